"""Joins the pieces of full sequences, straight into the rows of a batch.

A full sequence is decided by the lengths of its pieces alone; they are copied where it is used, by
the thread that needs it, and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator
from stoker.stages.batching.pack import Packed


class Pieces(list[NDArray[Any]]):
    """The pieces of one full sequence, in order, each a part of another sequence of tokens."""


class Joiner:
    """Joins pieces. Safe to use from any thread.

    Args:
        length: of full sequences, in tokens.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._positions = np.arange(length, dtype=np.int32)
        # Row n is n all along, of no memory of its own: what a piece's number is copied from.
        self._numbers = np.broadcast_to(self._positions[:, None], (length, length))

    def allocate(self, rows: int, allocator: Allocator) -> Packed:
        """Return a batch of full sequences whose rows are to be written."""
        shape = rows, self._length
        return Packed(
            allocator.array(shape, np.int64),
            allocator.array(shape, np.int32),
            allocator.array(shape, np.int32),
        )

    def join(self, sequences: Sequence[Pieces], batch: Packed, start: int) -> None:
        """Write full sequences as rows from ``start`` on."""
        if not sequences:
            return
        rows = slice(start, start + len(sequences))
        pieces = [piece for sequence in sequences for piece in sequence]
        numbers, positions = self._numbers, self._positions
        # One call for all pieces: 29 us a batch of 8 x 2,049 from 20 documents, not 35 by
        # assignments to slices.
        np.concatenate(pieces, out=batch.tokens[rows].reshape(-1), casting="unsafe")
        np.concatenate(
            [
                numbers[number, : len(piece)]
                for sequence in sequences
                for number, piece in enumerate(sequence)
            ],
            out=batch.segments[rows].reshape(-1),
        )
        np.concatenate(
            [positions[: len(piece)] for piece in pieces], out=batch.positions[rows].reshape(-1)
        )
