"""Collate functions for ``.batch(collate=)``: examples of different lengths, packed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.thread_safety import thread_safe
from stoker.basics.validate import whole_from
from stoker.batching.builder import Builder
from stoker.batching.joining import Packed


class Padded(NamedTuple):
    """Arrays of different lengths, padded into one array."""

    values: Any
    """``[n, longest, ...]``."""
    lengths: Any
    """``int64 [n]``: the length of each row's array; the rest of a row is padding. A tensor if the
    values are tensors."""


def pad(
    value: Any = 0, *, on: str | int | Sequence[str | int] | None = None, multiple_of: int = 1
) -> Pad:
    """Batch arrays that differ in their first dimension: ``.batch(32, collate=pad(0))``.

    Every array of at least one dimension becomes ``Padded(values, lengths)``, of the same dtype;
    tensors likewise. Everything else is stacked as usual.

    Args:
        value: the number that fills shorter arrays; or a mapping from padded fields to their
            numbers: ``pad({"tokens": 0, "labels": -100})``.
        on: the field that is padded, or several, by name, key or position; the others are stacked
            as usual.
        multiple_of: arrays are filled up to a multiple of so many, such as tensor cores
            and compiled models want.

    Raises TypeError or ValueError for wrong arguments. The batch raises ValueError where arrays
    differ in dtype or in another dimension, TypeError where the field is not an array.
    """
    multiple_of = whole_from(1, multiple_of, "pad(multiple_of=) takes")
    if isinstance(value, Mapping):
        if on is not None:
            raise ValueError("pad() takes the fields in a mapping, or on=, not both")
        return Pad(0, _check_fields(list(value.items())), multiple_of)
    if on is None:
        return Pad(_number(value), None, multiple_of)
    fields = [on] if isinstance(on, (str, int)) else on
    if not isinstance(fields, Sequence):
        raise TypeError(f"pad(on=) takes a field or several, by name, key or position, not {on!r}")
    return Pad(0, _check_fields([(field, value) for field in fields]), multiple_of)


def _check_fields(pairs: list[tuple[Any, Any]]) -> dict[str | int, Any]:
    if not pairs:
        raise ValueError("pad() takes at least one field, or on=None for all")
    for field, value in pairs:
        if not isinstance(field, (str, int)) or isinstance(field, bool):
            raise TypeError(f"pad() takes fields by name, key or position, not {field!r}")
        _number(value)
    return dict(pairs)


def _number(value: Any) -> Any:
    """Return the number that fills arrays. Raises TypeError for other values."""
    if isinstance(value, (list, tuple)) and value and pytree.children(value[0]) is not None:
        raise TypeError("collate= takes what pad() returns: .batch(n, collate=pad())")
    if not isinstance(value, (bool, int, float, complex, np.generic)) or isinstance(
        value, (str, bytes)
    ):
        raise TypeError(f"pad() fills arrays up with a number, not {value!r}")
    return value


@thread_safe
@dataclass(frozen=True)
class Pad:
    """Called with a list of examples, returns a batch; made by ``pad``.

    Attributes:
        value: the number that fills arrays of fields not in ``fields``.
        fields: the padded fields and their numbers; None for all arrays.
        multiple_of: arrays are filled up to a multiple of it.
    """

    value: Any
    fields: Mapping[str | int, Any] | None
    multiple_of: int = 1

    def __call__(self, examples: list[Any]) -> Any:
        if self.fields is not None:
            return self._of_fields(examples, self.fields)
        template = examples[0]
        try:
            rows = [pytree.leaves_like(template, example) for example in examples]
        except TypeError as error:
            raise TypeError(
                f"pad() pads arrays, and the examples differ in more than their lengths: {error}. "
                'Make arrays of lists in a map, such as .map(np.asarray, on="ids")'
            ) from None
        made = iter(
            [
                _pad_column(column, self.value, self.multiple_of)
                if all(map(_is_ragged, column))
                else _stack(list(column))
                for column in zip(*rows, strict=True)
            ]
        )
        return _of_one_kind(pytree.map_leaves(lambda _: next(made), template))

    def _of_fields(self, examples: list[Any], fields: Mapping[str | int, Any]) -> Any:
        padded = {}
        for on, value in fields.items():
            field = pytree.Field(on)
            column = [field.get(example) for example in examples]
            if not all(map(_is_ragged, column)):
                kinds = ", ".join(sorted({type(value).__name__ for value in column}))
                raise TypeError(
                    f"pad(on={on!r}) takes arrays of at least one dimension, not {kinds}: "
                    "make them arrays in a map"
                )
            padded[field] = _pad_column(column, value, self.multiple_of)
            examples = [field.replace(example, None) for example in examples]
        batch = _stack(examples)
        for field, made in padded.items():
            batch = field.replace(batch, made)
        return _of_one_kind(batch)


def _of_one_kind(batch: Any) -> Any:
    """Return a batch whose arrays are all tensors, if one is: as ``.batch()`` makes them."""
    if not any(map(pytree.is_tensor, pytree.leaves(batch))):
        return batch
    return pytree.map_leaves(_tensor, batch)


def _tensor(leaf: Any) -> Any:
    import torch

    return torch.from_numpy(pytree.native(leaf)) if isinstance(leaf, np.ndarray) else leaf


def _pad_column(column: Sequence[Any], value: Any, multiple_of: int) -> Padded:
    if any(map(pytree.is_tensor, column)):
        column = [_tensor(each).detach() for each in column]
    forms = {(str(array.dtype), tuple(array.shape[1:])) for array in column}
    if len(forms) > 1:
        seen = ", ".join(f"{array.dtype} {list(array.shape)}" for array in column[:4])
        raise ValueError(
            f"pad fills up the first dimension alone, and these arrays differ in more: {seen}"
        )
    lengths = np.array([len(array) for array in column], np.int64)
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    values = _full((len(column), longest, *column[0].shape[1:]), value, column[0])
    for row, array in zip(values, column, strict=True):
        row[: len(array)] = array
    return Padded(values, lengths)


def _full(shape: tuple[int, ...], value: Any, like: Any) -> Any:
    """Return an array of one value, or a tensor. Raises ValueError if the dtype has no such one."""
    if not pytree.is_tensor(like):
        _check_fits(value, like.dtype)
        return np.full(shape, value, like.dtype)
    if not like.is_floating_point() and not like.is_complex():
        _check_fits(value, like.new_empty(0, device="cpu").numpy().dtype)
    return like.new_full(shape, value.item() if isinstance(value, np.generic) else value)


def _check_fits(value: Any, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "biu":
        return
    try:
        with np.errstate(invalid="ignore"):
            is_one = bool(np.asarray(value).astype(dtype) == value)
    except OverflowError:
        is_one = False
    if not is_one:
        raise ValueError(
            f"pad({value}) fits no array of {dtype}: give another value, or make the arrays of "
            "another type in a map"
        )


def _is_ragged(value: Any) -> bool:
    return (isinstance(value, np.ndarray) or pytree.is_tensor(value)) and value.ndim > 0


def _stack(examples: list[Any]) -> Any:
    builder = Builder(len(examples), None, Recycler())
    builder.put(0, examples)
    return builder.finish()


def varlen(names: Literal["flash", "transformers"] = "flash") -> Varlen:
    """Batch packed documents as one row, for attention within documents.

    Takes what ``.pack()`` makes: ``.pack(4096, fields=["input_ids"]).batch(2, collate=varlen())``.
    The batch is a dict. Of each packed field of ``n`` sequences it has one array ``[n * length]``,
    of each other field a list with the documents' values, and:

    - ``cu_seqlens``, ``int32 [k + 1]``: where documents begin, and the end. Padding counts as one.
    - ``max_seqlen``, a Python int: the longest.
    - ``seq_lens``, ``int32 [k]``: the length of each.
    - ``positions``, ``segments``: as of ``.pack()``; segments are numbered over the whole batch.

    Args:
        names: ``"transformers"`` gives what ``DataCollatorWithFlattening`` gives to models: arrays
            ``[1, n * length]``, ``position_ids``, ``cu_seq_lens_q``, ``cu_seq_lens_k``,
            ``max_length_q``, ``max_length_k``, and neither ``segments`` nor ``seq_lens``.

    Raises ValueError for other names. The batch raises TypeError for what was not packed.
    """
    if names not in ("flash", "transformers"):
        raise ValueError(f"varlen() takes names='flash' or 'transformers', not {names!r}")
    return Varlen(names == "transformers")


@thread_safe
@dataclass(frozen=True)
class Varlen:
    """Called with a list of packed sequences, returns a batch; made by ``varlen``.

    Attributes:
        as_transformers: whether names and shapes are those of transformers.
    """

    as_transformers: bool

    def __call__(self, examples: list[Any]) -> dict[Any, Any]:
        rows = [each._asdict() if isinstance(each, Packed) else each for each in examples]
        if not all(isinstance(row, Mapping) and "positions" in row for row in rows):
            raise TypeError("varlen() batches what .pack() makes: put it before .batch()")
        batch: dict[Any, Any] = {}
        for name, first in rows[0].items():
            column = [row[name] for row in rows]
            is_packed = isinstance(first, np.ndarray)
            batch[name] = np.concatenate(column) if is_packed else [*chain(*column)]
        begins, is_padding = batch["positions"] == 0, batch["segments"] < 0
        starts = np.append(np.flatnonzero(begins), len(begins)).astype(np.int32)
        longest = int(np.diff(starts).max())
        if not self.as_transformers:
            numbers = np.cumsum(begins & ~is_padding, dtype=np.int32) - 1
            batch["segments"] = np.where(is_padding, np.int32(-1), numbers)
            more = {"cu_seqlens": starts, "max_seqlen": longest, "seq_lens": np.diff(starts)}
            return {**batch, **more}
        del batch["segments"]
        batch["position_ids"] = batch.pop("positions").astype(np.int64)
        for name, value in batch.items():
            batch[name] = value[None] if isinstance(value, np.ndarray) else value
        ends = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts.copy()}
        return {**batch, **ends, "max_length_q": longest, "max_length_k": longest}
