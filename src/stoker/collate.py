"""Collate functions for ``.batch(collate=)``: padding of examples of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.thread_safety import thread_safe
from stoker.basics.validate import is_whole_number
from stoker.batching.builder import Builder


class Padded(NamedTuple):
    """Arrays of different lengths, padded into one array."""

    values: Any
    """``[n, longest, ...]``."""
    lengths: Any
    """``int64 [n]``: the length of each row's array; the rest of a row is padding. A tensor if the
    values are tensors."""


def pad(
    value: Any = 0,
    *,
    on: str | int | Sequence[str | int] | None = None,
    multiple_of: int = 1,
) -> Pad:
    """Batch arrays that differ in their first dimension: ``.batch(32, collate=pad(0))``.

    Every array of at least one dimension becomes ``Padded(values, lengths)``, of the same dtype;
    tensors likewise. Everything else is stacked as usual.

    Args:
        value: the number that fills shorter arrays; or a mapping from padded fields to their
            numbers: ``pad({"tokens": 0, "labels": -100})``.
        on: the field that is padded, or several, by name, key or position; the others are stacked
            as usual.
        multiple_of: arrays are filled up to a multiple of so many, as ``.batch(multiple_of=)``
            expects.

    Raises TypeError or ValueError for wrong arguments. The batch raises ValueError where arrays
    differ in dtype or in another dimension, TypeError where the field is not an array.
    """
    if not is_whole_number(multiple_of) or multiple_of < 1:
        raise ValueError(f"pad(multiple_of=) takes a whole number from 1, not {multiple_of!r}")
    if isinstance(value, Mapping):
        if on is not None:
            raise ValueError("pad() takes the fields in a mapping, or on=, not both")
        return Pad(0, _check_fields(list(value.items())), int(multiple_of))
    if on is None:
        return Pad(_number(value), None, int(multiple_of))
    fields = [on] if isinstance(on, (str, int)) else on
    if not isinstance(fields, Sequence):
        raise TypeError(f"pad(on=) takes a field or several, by name, key or position, not {on!r}")
    return Pad(0, _check_fields([(field, value) for field in fields]), int(multiple_of))


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
        rows = [pytree.leaves_like(template, example) for example in examples]
        made = iter(
            [
                _pad_column(column, self.value, self.multiple_of)
                if all(map(_is_ragged, column))
                else _stack(list(column))
                for column in zip(*rows, strict=True)
            ]
        )
        return pytree.map_leaves(lambda _: next(made), template)

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
        return batch


def _pad_column(column: Sequence[Any], value: Any, multiple_of: int) -> Padded:
    if any(map(pytree.is_tensor, column)):
        import torch

        padded = _pad_column([np.asarray(each) for each in column], value, multiple_of)
        return Padded(
            torch.from_numpy(pytree.native(padded.values)), torch.from_numpy(padded.lengths)
        )
    forms = {(array.dtype.str, array.shape[1:]) for array in column}
    if len(forms) > 1:
        seen = ", ".join(f"{array.dtype} {list(array.shape)}" for array in column[:4])
        raise ValueError(
            f"pad fills up the first dimension alone, and these arrays differ in more: {seen}"
        )
    lengths = np.array([len(array) for array in column], np.int64)
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    shape = (len(column), longest, *column[0].shape[1:])
    values = np.full(shape, value, column[0].dtype)
    for row, array in zip(values, column, strict=True):
        row[: len(array)] = array
    return Padded(values, lengths)


def _is_ragged(value: Any) -> bool:
    return (isinstance(value, np.ndarray) or pytree.is_tensor(value)) and value.ndim > 0


def _stack(examples: list[Any]) -> Any:
    builder = Builder(len(examples), None, Recycler())
    builder.put(0, examples)
    return builder.finish()
