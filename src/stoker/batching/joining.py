"""Joins sequences of tokens to full ones, straight into the rows of a batch.

Where full sequences begin is decided by lengths alone, for all documents at hand
(``CutDocuments``). Tokens are copied where they are used, by the thread that needs them, and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import Allocator

Tokens = NDArray[Any]


class Packed(NamedTuple):
    """An example behind ``.pack(length)``: arrays ``[length]``."""

    tokens: NDArray[np.int64]
    segments: NDArray[np.int32]
    """Which of the sequences in it a token is of, from 0 on."""
    positions: NDArray[np.int32]
    """The token's place among those of its segment, from 0 on."""


class CutDocuments:
    """Documents end to end, cut into full sequences. What is left over fills no further one.

    Args:
        documents: arrays [n] of integers.
        skip: the tokens of the first document that come before the first sequence.
        length: of a sequence, in tokens.

    Attributes:
        begins: where each sequence begins, and what is left over: a document, and the number of its
            tokens before.
        lasts: the document with the last token of each sequence.
    """

    def __init__(self, documents: list[Tokens], skip: int, length: int) -> None:
        self._documents = documents
        self.begins = [(0, skip)]
        self.lasts: list[int] = []
        # A piece is the part of a document that a sequence has.
        self._firsts = [0]  # the first piece of each sequence, and behind the last one
        sizes, numbers, places = list[int](), list[int](), list[int]()
        piece, room = 0, length
        for number, document in enumerate(documents):
            size = len(document)
            left, skip = size - skip, 0
            while left >= room:
                sizes.append(room)
                numbers.append(piece)
                places.append(length - room)
                self.lasts.append(number)
                self._firsts.append(len(sizes))
                left, piece, room = left - room, 0, length
                self.begins.append((number, size - left) if left else (number + 1, 0))
            if left:
                sizes.append(left)
                numbers.append(piece)
                places.append(length - room)
                piece, room = piece + 1, room - left
        self._sizes, self._numbers = np.array(sizes), np.array(numbers, np.int32)
        self._places = np.array(places, np.int32)

    def join(self, start: int, stop: int, rows: Packed, counting: NDArray[np.int32]) -> None:
        """Write sequences ``start .. stop - 1`` as rows [n, length]; ``counting`` is 0, 1, ..."""
        (first, skip), last = self.begins[start], self.lasts[stop - 1]
        behind, end = self.begins[stop]
        documents = self._documents[first : last + 1]
        if behind == last:
            documents[-1] = documents[-1][:end]
        if skip:
            documents[0] = documents[0][skip:]
        # One call for all pieces: 16 us a batch of 8 x 2,049 tokens that no cache holds.
        np.concatenate(documents, out=rows.tokens.reshape(-1), casting="unsafe")
        pieces, shape = slice(self._firsts[start], self._firsts[stop]), rows.tokens.shape
        sizes = self._sizes[pieces]
        rows.segments[...] = self._numbers[pieces].repeat(sizes).reshape(shape)
        places = self._places[pieces].repeat(sizes).reshape(shape)
        np.subtract(counting, places, out=rows.positions)


FullSequence = tuple[CutDocuments, int]
"""A full sequence: the one of this number in the cut."""


def rows_of(batch: Packed, start: int, stop: int) -> Packed:
    """Return rows ``start .. stop - 1`` of a batch, as views."""
    tokens, segments, positions = batch
    return Packed(tokens[start:stop], segments[start:stop], positions[start:stop])


class JoinedBatch:
    """Builds one batch of full sequences, as a ``Builder`` does of examples.

    Args:
        length: of full sequences, in tokens.
        rows: the number of full sequences.
        allocator: the owner of the arrays.
    """

    def __init__(self, length: int, rows: int, allocator: Allocator) -> None:
        self._counting, shape = _counting(length), (rows, length)
        self._batch = Packed(
            allocator.array(shape, np.int64),
            allocator.array(shape, np.int32),
            allocator.array(shape, np.int32),
        )

    def put(self, start: int, sequences: Sequence[FullSequence]) -> None:
        """Write full sequences, in order, as rows from ``start`` on."""
        for cut, each in groupby(sequences, itemgetter(0)):
            numbers = [number for _, number in each]
            stop = start + len(numbers)
            rows = rows_of(self._batch, start, stop)
            cut.join(numbers[0], numbers[-1] + 1, rows, self._counting)
            start = stop

    def finish(self, collate: None = None) -> Packed:
        """Return the batch: joining and a user's ``collate`` do not go together."""
        return self._batch


@cache
def _counting(length: int) -> NDArray[np.int32]:
    return np.arange(length, dtype=np.int32)
