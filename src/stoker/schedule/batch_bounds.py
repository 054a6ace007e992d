"""The cuts of a row of examples into batches: at equal distances, or by a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class FixedBatches:
    """Each output takes equally many inputs; only the last one of an epoch may have fewer."""

    each: int

    def start(self, output: int) -> int:
        """Return the number of its first input; behind the last output, that of all inputs."""
        return output * self.each

    def outputs(self, inputs: int) -> int:
        """Return how many outputs begin within the first so many inputs."""
        return -(-inputs // self.each)

    def spans(self, output: int, inputs: int) -> list[tuple[int, int]]:
        """Return where outputs from this one on begin and end, in so many inputs of theirs."""
        each = self.each
        if 0 < inputs <= each:  # the list below adds 0.5 us to the 12 of a batch of one
            return [(0, inputs)]
        return [(at, min(at + each, inputs)) for at in range(0, inputs, each)]


class PlannedBounds:
    """The batches of one epoch on one rank, of different sizes.

    Args:
        rows: how many examples each batch has, shape [batches].
        of_all: how many those of all ranks have together in each step, likewise.

    Attributes:
        batches: how many there are.
        examples: how many they have together.
        largest: how many the largest has, 0 if there is none.
    """

    def __init__(self, rows: NDArray[np.int64], of_all: NDArray[np.int64]) -> None:
        self._starts, self._of_all = (
            np.concatenate([np.zeros(1, np.int64), np.cumsum(each)]) for each in (rows, of_all)
        )
        self.batches, self.examples = len(rows), int(self._starts[-1])
        self.largest = int(rows.max(initial=0))

    def start(self, output: int) -> int:
        return int(self._starts[min(output, self.batches)])

    def outputs(self, inputs: int) -> int:
        return int(np.searchsorted(self._starts[:-1], inputs))

    def spans(self, output: int, inputs: int) -> list[tuple[int, int]]:
        first, at, spans = self.start(output), 0, []
        while at < inputs:
            output += 1
            end = min(self.start(output) - first, inputs)
            spans.append((at, end))
            at = end
        return spans

    def of_all(self, examples: int) -> int:
        """Return how many examples all ranks have read, once this one has read so many."""
        return int(self._of_all[np.searchsorted(self._starts, examples)])


BatchBounds = FixedBatches | PlannedBounds
"""Says with which input an output of a segment begins."""
