"""Packing: ragged sequences joined into full ones.

Where a full sequence begins is known only once the values are there (``survivors``). Here that is
decided, for all documents that are there at once: the segment behind joins them, where they are
needed (``batching.joining``).

A resume needs the start of one full sequence: its input, and the offset in it. All later ones
follow. Where other ranks take the epoch over, these starts say which inputs are unread, and which
are begun: whoever gets those leaves out what was handed out (``EpochRest.offsets``). No pool may
stand after ``.pack()``, so no full sequence is ever made again from its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat, takewhile
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from stoker.basics.compact_integers import LARGEST, check_integer
from stoker.basics.validate import is_whole_number
from stoker.batching.joining import CutDocuments, Tokens
from stoker.engine.checkpoint import (
    Bounds,
    Count,
    Node,
    PoolSize,
    ReadSoFar,
    UpstreamRequest,
    damage_error,
)
from stoker.engine.flow import Flow
from stoker.engine.items import DoneTask, Item, done_item
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.survivors import OrderedStream
from stoker.engine.work.address import WorkAddress
from stoker.engine.work.failure import Failure
from stoker.errors import CombinationError, StateError
from stoker.schedule.epoch_rest import EpochRest
from stoker.stages.stage import ChainView, StreamStage, Traits, first_with, not_known

# The most inputs that are asked for at once beyond the number of sequences. Chosen, not measured.
_MOST_MORE = 64
_FORM = attrgetter("ndim", "dtype")
_NO_TOKENS: Tokens = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Pack(StreamStage):
    """The stage ``.pack(length)``.

    Attributes:
        length: of what comes out, in tokens.
    """

    length: int
    traits = Traits(joins=True)
    kind = "pack"

    @staticmethod
    def of(length: Any) -> Pack:
        """Check the argument of ``.pack()``."""
        if not is_whole_number(length):
            raise TypeError(f".pack() takes a whole number of tokens, not {length!r}")
        if length < 1:
            raise ValueError(f".pack() makes sequences of at least one token, not {length}")
        return Pack(int(length))

    @property
    def call(self) -> str:
        return f"pack({self.length:,})"

    def bind(self, before: ChainView) -> Pack:
        """Check that single sequences come here."""
        if before.source.yields_batches:
            raise CombinationError(".pack() joins single sequences, and a loader yields batches")
        stage = first_with(before.stages, lambda t: t.batches or t.joins)
        if stage is not None:
            raise CombinationError(
                f".pack() cannot follow {stage.name}: put it before .batch(), once"
            )
        return self

    def add_to(self, flow: Flow) -> None:
        super().add_to(flow)
        flow.join(self.length)

    def stream(self, upstream: SegmentStream, context: StreamContext) -> PackedStream:
        return PackedStream(self, upstream, context.address, context.leg)

    def read_node(self, saved: Any, bounds: Bounds) -> PackStart:
        start = msgspec.convert(saved, PackStart)
        check_integer(start.input, 0, bounds.most)
        bounds.most, bounds.exact = LARGEST, None
        return start

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells."""
        raise not_known()

    def signature(self) -> str:
        return self.call

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        return "  sequences are joined, and cut where one is full"


class PackStart(Node, tag=Pack.kind):
    """The start of a full sequence.

    Attributes:
        number: its number, from 0.
        input: the number of the input with its first token.
        offset: how many tokens of that input come before it; of an input that earlier ranks have
            begun, of those that they left.
    """

    number: Count
    input: Count
    offset: Count

    def read_so_far(self) -> ReadSoFar:
        return ReadSoFar(self.input, self.number, self.offset)


class PackedStream(OrderedStream):
    """A stream of full sequences, not joined yet. Tokens that fill no last one are dropped.

    Args:
        stage: the stage.
        upstream: the stream of sequences.
        address: has the rank and the number of ranks, which take turns with their sequences.
        leg: the leg of the epoch, or None: it has the inputs that earlier ranks have begun.
    """

    keeps = True

    def __init__(
        self, stage: Pack, upstream: SegmentStream, address: WorkAddress, leg: EpochRest | None
    ) -> None:
        super().__init__(upstream)
        # How many tokens of an input were handed out, by its place; full sequences of all ranks.
        self._begun, self._before = ({}, 0) if leg is None else (leg.offsets, leg.sequences)
        self._rank, self._world = address.rank, address.world
        self._stage, self._length = stage, stage.length
        # The latest inputs, not all of which is in full sequences: the first ``_skip`` tokens are.
        self._documents: list[Tokens] = []
        self._fresh_at: list[int] = []  # the fresh examples up to each of them
        self._tokens = self._skip = 0
        self._sequences = 0
        # Of the latest sequences, up to number ``_sequences - 1``: as in ``PackStart``.
        self._starts: deque[tuple[int, int]] = deque()
        self._seen_inputs = self._seen_tokens = 0

    def ready_since(self) -> tuple[int, int | None]:
        return len(self._survivors), self.upstream.ready_since()[1]

    def recompute(self, number: int) -> Item:
        """Refuse: chains that would need this are refused before."""
        raise AssertionError("no pool stands behind .pack()")

    def resume_point(self, number: int) -> tuple[PackStart, int]:
        """Return the start of a full sequence that was made, is next, or is after the end."""
        if number < self._sequences:
            start = PackStart(number, *self._starts[number - self._sequences])
        else:  # at the end, too: what is left may go on elsewhere
            start = PackStart(number, *self._next_start())
        return start, start.input

    def forget_before(self, number: int) -> int:
        for _ in range(len(self._starts) - max(0, self._sequences - number)):
            self._starts.popleft()
        return self.resume_point(number)[1]

    def resume(self, node: PackStart | None, request: UpstreamRequest) -> UpstreamRequest:
        start = node or PackStart(0, 0, 0)
        if start.number != request.next:
            raise damage_error("where a sequence begins does not fit")
        self._sequences, self._inputs, self._skip = start.number, start.input, start.offset
        return UpstreamRequest(start.input, start.input, start.input)

    def clear(self) -> None:
        super().clear()
        self._documents.clear()

    def _place(self, number: int) -> int:
        """Return the place of a full sequence by its number on this rank."""
        return self._before + number * self._world + self._rank

    def _next_start(self) -> tuple[int, int]:
        return self._inputs - len(self._documents), self._skip

    def _inputs_for(self, count: int) -> int:
        """Return how many inputs have the tokens that ``count`` full sequences lack, and a few.

        Asking again for what was missing would cost more than those few are early. A pool in front
        decides by what it is asked for, so there no more is.
        """
        if not self._seen_tokens or self.is_fed:
            return count
        lacking = count * self._length - (self._tokens - self._skip)
        about = lacking * self._seen_inputs // self._seen_tokens
        return max(1, min(about + about // 8 + 1, count + _MOST_MORE))

    def _end(self) -> None:
        pass

    def _have(self, count: int) -> None:
        while len(self._survivors) < count and not self._arriving:
            wanted = self._inputs_for(count - len(self._survivors))
            values, places, fresh = self.upstream.make_values(wanted)
            if not values:
                break
            self._add(values, places, fresh)
        super()._have(count)

    def _decide(self, arriving: deque[Item]) -> None:
        items = [*takewhile(_is_done, arriving)]
        values = [item.task.values[item.row] for item in items]
        for item in items:
            item.task.values[item.row] = None
            arriving.popleft()
        self._add(values, [item.place for item in items], [item.fresh for item in items])

    def _add(self, values: list[Any], places: Sequence[int], fresh: Sequence[int]) -> None:
        """Add inputs; what they fill is found for all of them at once."""
        skip, added = 0 if self._documents else self._skip, 0
        if skip or self._begun or not _are_usual(values):
            values = [*map(self._rest_of, values, places, chain([skip], repeat(0)))]
            for at, value in enumerate(values):
                if type(value) is Failure:
                    self._extend(values[added:at], fresh[added:at])
                    self._fail(value, fresh[at])
                    values[at], added = _NO_TOKENS, at
        self._extend(values[added:], fresh[added:])

    def _extend(self, documents: list[Tokens], fresh: Sequence[int]) -> None:
        self._documents += documents
        self._fresh_at += fresh
        self._inputs += len(documents)
        tokens = sum(map(len, documents))
        self._tokens += tokens
        self._seen_inputs += len(documents)
        self._seen_tokens += tokens
        self._cut()

    def _rest_of(self, value: Any, place: int, skip: int) -> Any:
        """Return an input without what earlier ranks have handed out, or a ``Failure``."""
        if type(value) is Failure:
            return value
        begun = self._begun.get(place, 0)
        try:
            tokens = _check_tokens(value)
        except (TypeError, ValueError) as error:
            return self.upstream.failure(self._stage.name, error, place)
        if begun + skip and len(tokens) <= begun + skip:
            return Failure(
                StateError(
                    "a sequence has become shorter since the state was saved: what stands before "
                    ".pack() must be deterministic"
                )
            )
        return tokens[begun:]

    def _cut(self) -> None:
        """Add the full sequences that the documents have."""
        if self._tokens - self._skip < self._length:
            return
        cut = CutDocuments(self._documents, self._skip, self._length)
        count = len(cut.lasts)
        first, number = self._inputs - len(self._documents), self._sequences
        task: Any = DoneTask(list(zip(repeat(cut, count), range(count), strict=True)))
        self._survivors += [
            Item(task, n, self._place(number + n), 0, self._fresh_at[last], 1)
            for n, last in enumerate(cut.lasts)
        ]
        *begins, (behind, skip) = cut.begins
        self._starts += [(first + document, offset) for document, offset in begins]
        self._sequences += count
        self._tokens -= self._skip + count * self._length - skip
        self._documents, self._fresh_at = self._documents[behind:], self._fresh_at[behind:]
        self._skip = skip

    def _fail(self, failure: Failure, fresh: int) -> None:
        """Add a failed input in place of a sequence; it comes again if this is resumed."""
        self._survivors.append(done_item(failure, self._place(self._sequences), fresh, 1))
        self._starts.append(self._next_start())
        self._sequences += 1
        if not self._documents:
            self._skip = 0


def _is_done(item: Item) -> bool:
    done: bool = item.task.done
    return done


def _are_usual(values: list[Any]) -> bool:
    """True if values are certainly sequences of tokens."""
    if {*map(type, values)} != {np.ndarray}:
        return False
    return all(axes == 1 and dtype.kind in "iu" for axes, dtype in {*map(_FORM, values)})


def _check_tokens(value: Any) -> Tokens:
    """Return a sequence of tokens as an array."""
    tokens = np.asarray(value) if isinstance(value, (np.ndarray, list)) else None
    if tokens is not None and not tokens.size and tokens.ndim == 1:
        return tokens.astype(np.int64)
    if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        what = type(value).__name__
        if isinstance(value, np.ndarray):
            what = f"{value.dtype} {list(value.shape)}"
        raise TypeError(
            f"it joins sequences of tokens, arrays [n] of integers, not {what}: make them so in a "
            "map before it"
        )
    return tokens
