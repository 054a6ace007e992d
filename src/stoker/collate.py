"""What ``.batch(collate=)`` takes for examples that cannot be stacked as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stoker import pytree
from stoker.buffers import Recycler
from stoker.stages.batch import Builder


class Padded(NamedTuple):
    """Arrays of different lengths as one."""

    values: Any
    """``[n, longest, ...]``."""
    lengths: Any
    """``int64 [n]``: of the array in each row; the rest is padding. A tensor beside tensors."""


def pad(value: Any = 0, *, on: str | int | None = None) -> Pad:
    """Batch arrays that differ in their first dimension: ``.batch(32, collate=pad(0))``.

    Every array of at least one dimension becomes ``Padded(values, lengths)``, of the same dtype;
    tensors likewise. Everything else is stacked as usual.

    Args:
        value: what shorter arrays are filled up with.
        on: the field that is padded, by name, key or position; the others are stacked as usual.

    The batch raises ValueError where arrays differ in dtype or in another dimension, TypeError
    where the field is no array.
    """
    return Pad(value, on)


@dataclass(frozen=True)
class Pad:
    """Called with a list of examples, returns a batch; made by ``pad``."""

    value: Any
    on: str | int | None

    def __call__(self, examples: list[Any]) -> Any:
        if self.on is not None:
            field = pytree.Field(self.on)
            column = [field.get(example) for example in examples]
            if not all(map(_is_ragged, column)):
                kinds = ", ".join(sorted({type(value).__name__ for value in column}))
                raise TypeError(
                    f"pad(on={self.on!r}) takes arrays of at least one dimension, not {kinds}: "
                    "make them arrays in a map"
                )
            rest = _stacked([field.replace(example, None) for example in examples])
            return field.replace(rest, self._padded(column))
        template = examples[0]
        rows = [pytree.leaves_like(template, example) for example in examples]
        made = iter(
            [
                self._padded(column) if all(map(_is_ragged, column)) else _stacked(list(column))
                for column in zip(*rows, strict=True)
            ]
        )
        return pytree.map_leaves(lambda _: next(made), template)

    def _padded(self, column: Sequence[Any]) -> Padded:
        if any(map(pytree.is_tensor, column)):
            import torch

            padded = self._padded([np.asarray(value) for value in column])
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
        shape = (len(column), lengths.max(), *column[0].shape[1:])
        values = np.full(shape, self.value, column[0].dtype)
        for row, array in zip(values, column, strict=True):
            row[: len(array)] = array
        return Padded(values, lengths)


def _is_ragged(value: Any) -> bool:
    return (isinstance(value, np.ndarray) or pytree.is_tensor(value)) and value.ndim > 0


def _stacked(examples: list[Any]) -> Any:
    builder = Builder(len(examples), None, Recycler())
    builder.put(0, examples)
    return builder.finish()
