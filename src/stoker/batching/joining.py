"""Joins sequences of tokens to full ones, straight into the rows of a batch.

Where full sequences begin is decided by lengths alone, for all documents at hand
(``CutDocuments``). Tokens are copied where they are used, by the thread that needs them, and once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
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
    """Which of the sequences in it a token is of, from 0 on; -1 for padding, which comes last."""
    positions: NDArray[np.int32]
    """The token's place among those of its segment, from 0 on."""


class Document:
    """A document, or a piece of one.

    Attributes:
        arrays: those that are packed, ``[n, ...]``.
        others: the other fields of the example.
    """

    def __init__(self, arrays: Sequence[Tokens], others: Mapping[Any, Any]) -> None:
        self.arrays, self.others = arrays, others

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, part: slice) -> Document:
        return Document([array[part] for array in self.arrays], self.others)


@dataclass(frozen=True)
class Joining:
    """Joins pieces of documents to one example of full length.

    Attributes:
        length: of the example. Padding follows the pieces: 0, and -100 in ``labels``.
        fields: the names of what is packed; None for bare tokens, which become ``Packed``.
        labels: the field in which no first token of a segment is a target; "" for none.
    """

    length: int
    fields: tuple[str | int, ...] | None = None
    labels: str | int = ""

    def __call__(self, pieces: list[Document]) -> Any:
        sizes, numbers = [*map(len, pieces)], [*range(len(pieces))]
        padding = self.length - sum(sizes)
        if padding:
            sizes.append(padding)
            numbers.append(-1)
        starts = np.array([0, *accumulate(sizes[:-1])], np.int32)
        segments = np.array(numbers, np.int32).repeat(sizes)
        positions = _counting(self.length) - starts.repeat(sizes)
        arrays = zip(*(piece.arrays for piece in pieces), strict=True)
        columns = [self._column([*each]) for each in arrays]
        if self.fields is None:
            return Packed(columns[0], segments, positions)
        joined: dict[Any, Any] = dict(zip(self.fields, columns, strict=True))
        if self.labels != "":
            labels = joined.setdefault(self.labels, columns[0].copy())
            labels[starts] = labels[self.length - padding :] = -100
        for name in pieces[0].others:
            joined[name] = [piece.others[name] for piece in pieces]
        return {**joined, "segments": segments, "positions": positions}

    def _column(self, arrays: list[Tokens]) -> Tokens:
        are_whole = {array.dtype.kind for array in arrays} <= {"i", "u"}
        dtype = np.int64 if are_whole else np.result_type(*arrays)
        out = np.zeros((self.length, *arrays[0].shape[1:]), dtype)
        np.concatenate(arrays, out=out[: sum(map(len, arrays))], casting="unsafe")
        return out


class CutDocuments:
    """Documents end to end, cut into full sequences. What is left over fills no further one.

    Args:
        documents: arrays [n] of integers; a ``Document`` each where ``pieces`` are asked for.
        skip: the tokens of the first document that come before the first sequence.
        length: of a sequence, in tokens.

    Attributes:
        begins: where each sequence begins, and what is left over: a document, and the number of its
            tokens before.
        lasts: the document with the last token of each sequence.
    """

    def __init__(self, documents: list[Any], skip: int, length: int) -> None:
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

    def pieces(self, number: int) -> list[Any]:
        """Return what sequence ``number`` has of the documents, those without tokens left out."""
        (first, skip), (behind, end) = self.begins[number : number + 2]
        parts = self._documents[first : self.lasts[number] + 1]
        if behind == self.lasts[number]:
            parts[-1] = parts[-1][:end]
        parts[0] = parts[0][skip:]
        return [part for part in parts if len(part)]

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
