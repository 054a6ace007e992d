"""Calls a user's ``collate``, and finds the example that it failed on."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from stoker.basics.signals import pass_on

Collate = Callable[[list[Any]], Any]


class RowError(Exception):
    """An error of a user's collate function that a single example causes.

    Attributes:
        error: the function's error.
        row: the row of the example in the batch.
    """

    def __init__(self, error: Exception, row: int) -> None:
        super().__init__(error, row)
        self.error = error
        self.row = row


def collate_examples(collate: Collate, examples: list[Any]) -> Any:
    """Return a user's batch of examples; the function may change the list.

    Raises the function's errors, as RowError if a single example causes them; TypeError if it
    returns None.
    """
    inputs = examples.copy()
    try:
        batch = collate(examples)
    except Exception as error:
        pass_on(error)
        row = _blame(collate, inputs, type(error))
        if row is None:
            raise
        raise RowError(error, row) from None
    if batch is None:
        raise TypeError("collate returned None: return the batch")
    return batch


def _blame(collate: Collate, examples: list[Any], kind: type[Exception]) -> int | None:
    """Return the row without which a user's function does not fail; None if there is none.

    Calls the function again with fewer examples, about log2(n) times.
    """

    def fails(some: list[Any]) -> bool:
        try:
            collate(some)
        except kind:
            return True
        except Exception:
            return False
        return False

    counts = range(1, len(examples))
    fewest = 1 + bisect.bisect_left(counts, True, key=lambda n: fails(examples[:n]))
    row, others = fewest - 1, examples[1:3]
    if len(examples) == 1:
        return None
    if fewest == 1 or (fewest == 2 < len(examples)):  # is it the first one, or the second?
        row = 1 if fails(others) else 0
        if fewest == 1 and row == 1:
            return None  # the function fails on any example
    if len(examples) == fewest == 2 and not fails(others):
        return None  # each of the two is right on its own
    return None if fails(_without(examples, row)) else row


def _without(examples: list[Any], row: int) -> list[Any]:
    return examples[:row] + examples[row + 1 :]
