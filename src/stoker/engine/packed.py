"""Joins the sequences of a stream into full ones.

The parts of a full sequence are known only once the values are there (``survivors``).

A resume needs the start of one full sequence: its input, and the offset in it. All later ones
follow. Where other ranks take the epoch over, these starts say which inputs are unread, and which
are begun: whoever gets those leaves out what was handed out (``BegunInputs``). No pool may stand
after ``.pack()``, so no full sequence is ever made again from its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.compact_integers import LARGEST, check_integer
from stoker.engine.checkpoint import Bounds, Node, UpstreamRequest, damage_error
from stoker.engine.items import Item, Planning, done_item
from stoker.engine.plan.points import PackPoint
from stoker.engine.segment_stream import SegmentStream
from stoker.engine.survivors import OrderedStream
from stoker.engine.work.failure import Failure
from stoker.engine.workers.threads import WorkerPool
from stoker.errors import StateError
from stoker.schedule.dealing import RankOrder
from stoker.schedule.orders.order import as_array
from stoker.stages.batching.pack import Packed

# Inputs whose places are looked up at once. Chosen, not measured.
_LOOKED_UP = 4_096
# The most segments of which an array of their number is kept. Sequences of more, shorter parts take
# longer to join than to make these.
_NUMBERED = 64
# The most inputs that are asked for at once beyond the number of sequences. Chosen, not measured.
_MOST_MORE = 64


@dataclass
class PackStart(Node):
    """The start of a full sequence.

    Attributes:
        number: its number, from 0.
        input: the number of the input with its first token.
        offset: how many tokens of that input come before it; of an input that earlier ranks have
            begun, of those that they left.
    """

    number: int = 0
    input: int = 0
    offset: int = 0

    @classmethod
    def from_json(cls, saved: Any, bounds: Bounds) -> PackStart:
        """Read the result of ``to_json``."""
        number, of = check_integer(saved["number"]), check_integer(saved["input"], 0, bounds.most)
        bounds.most, bounds.exact = LARGEST, None
        return cls(number, of, check_integer(saved["offset"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": PackPoint.kind,
            "number": self.number,
            "input": self.input,
            "offset": self.offset,
        }


class BegunInputs:
    """The inputs of a rank whose first tokens earlier ranks have handed out.

    Args:
        order: the rank's order of the epoch.
        offsets: how many tokens, by the place of the input.
    """

    def __init__(self, order: RankOrder, offsets: Mapping[int, int]) -> None:
        self._order, self._offsets = order, offsets
        self._begun = np.array([*offsets], np.int64)
        self._rows = range(0)
        self._found = dict[int, int]()

    def offset(self, ordinal: int) -> int:
        """Return how many tokens of an input were handed out."""
        if ordinal not in self._rows:
            first = ordinal // _LOOKED_UP * _LOOKED_UP
            self._rows = range(first, min(first + _LOOKED_UP, len(self._order)))
            places = as_array(self._order.places(self._rows))
            begun = np.flatnonzero(np.isin(places, self._begun)).tolist()
            self._found = {first + row: self._offsets[int(places[row])] for row in begun}
        return self._found.get(ordinal, 0)


class _Piece(NamedTuple):
    input: int
    offset: int
    """As in ``PackStart``."""
    tokens: NDArray[Any]
    """The rest of the input, from ``offset`` on."""
    fresh: int
    """The fresh examples that were read up to the input."""


class PackedStream(OrderedStream):
    """A stream of full sequences. Tokens that do not fill the last one are dropped.

    Args:
        point: the length of full sequences.
        upstream: the stream of sequences.
        worker_pool: computes them.
        planning: tells whether the planner may block.
        begun: the inputs that earlier ranks have begun; None if there are none.
    """

    keeps = True

    def __init__(
        self,
        point: PackPoint,
        upstream: SegmentStream,
        worker_pool: WorkerPool,
        planning: Planning,
        begun: BegunInputs | None = None,
    ) -> None:
        super().__init__(upstream, worker_pool, planning)
        self._begun = begun
        self._stage, self._length = point.pack, point.pack.length
        self._pieces: deque[_Piece] = deque()
        self._tokens = 0  # tokens in the pieces
        self._skip_count = 0  # tokens of the next input that came before a resume
        self._sequences = 0
        self._starts: deque[PackStart] = deque()  # of the latest full sequences
        self._seen_inputs = self._seen_tokens = 0
        self._counted = np.arange(self._length, dtype=np.int32)
        self._numbered: list[NDArray[np.int32]] = []  # arrays of 0, of 1, ..., for segments

    def ready_since(self) -> tuple[int, int | None]:
        return len(self._survivors), self.upstream.ready_since()[1]

    def recompute(self, number: int) -> Item:
        """Refuse: chains that would need this are refused before."""
        raise AssertionError("no pool stands behind .pack()")

    def resume_point(self, number: int) -> tuple[PackStart, int]:
        """Return the start of a full sequence that was made, is next, or is after the end."""
        if number < self._sequences:
            start = self._starts[number - self._sequences]
        elif self._pieces:  # at the end, too: what is left may go on elsewhere
            start = PackStart(number, self._pieces[0].input, self._pieces[0].offset)
        else:
            start = PackStart(number, self._inputs, 0 if self._has_ended else self._skip_count)
        return start, start.input

    def forget_before(self, number: int) -> int:
        while self._starts and self._starts[0].number < number:
            self._starts.popleft()
        return self.resume_point(number)[1]

    def resume(self, node: PackStart | None, request: UpstreamRequest) -> UpstreamRequest:
        start = node or PackStart()
        if start.number != request.next:
            raise damage_error("where a sequence begins does not fit")
        self._sequences, self._inputs, self._skip_count = start.number, start.input, start.offset
        return UpstreamRequest(start.input, start.input, start.input)

    def clear(self) -> None:
        super().clear()
        self._pieces.clear()

    def _make(self, count: int) -> bool:
        count = min(count, self._tokens // self._length)
        if count:
            for made, fresh in self._join(count):
                self._keep(made, fresh)
        return bool(count)

    def _inputs_for(self, count: int) -> int:
        """Return how many inputs have the tokens that ``count`` full sequences lack, and a few.

        Asking again for what was missing would cost more than those few are early. A pool in front
        decides by what it is asked for, so there no more is.
        """
        if not self._seen_inputs or self.upstream.feed is not None:
            return count
        lacking = count * self._length - self._tokens
        about = lacking * self._seen_inputs // self._seen_tokens
        return max(1, min(about + about // 8 + 1, count + _MOST_MORE))

    def _end(self) -> None:
        pass

    def _decide(self, item: Item) -> None:
        value, item.task.values[item.row] = item.task.values[item.row], None
        number, offset = self._inputs, self._skip_count
        self._inputs, self._skip_count = number + 1, 0
        if type(value) is not Failure:
            begun = 0 if self._begun is None else self._begun.offset(item.ordinal)
            try:
                tokens = _check_tokens(value)
                if begun + offset:
                    tokens = tokens[begun + offset :]
                if begun + offset and not len(tokens):
                    raise StateError(
                        "a sequence has become shorter since the state was saved: what stands "
                        "before .pack() must be deterministic"
                    )
            except (TypeError, ValueError) as error:
                value = self.upstream.failure(self._stage.name, error, item.ordinal)
            except StateError as error:
                value = Failure(error)
        if type(value) is Failure:
            self._make(self._tokens // self._length)  # these come before it
            self._starts.append(PackStart(self._sequences, self._inputs))
            self._keep(value, item.fresh)
        elif size := len(tokens):
            self._pieces.append(_Piece(number, offset, tokens, item.fresh))
            self._tokens += size
            self._seen_inputs += 1
            self._seen_tokens += size

    def _keep(self, value: Any, fresh: int) -> None:
        """Add a full sequence, or a failure in its place."""
        self._survivors.append(done_item(value, self._sequences, 0, fresh, 1))
        self._sequences += 1

    def _join(self, count: int) -> Iterator[tuple[Packed, int]]:
        """Take the tokens of ``count`` full sequences from the pieces.

        Yields them with the fresh examples that were read for each.
        """
        length, pieces = self._length, self._pieces
        tokens: list[NDArray[Any]] = []
        segments: list[NDArray[np.int32]] = []
        positions: list[NDArray[np.int32]] = []
        fresh: list[int] = []
        for number in range(self._sequences, self._sequences + count):
            self._starts.append(PackStart(number, pieces[0].input, pieces[0].offset))
            left, segment = length, 0
            while left:
                piece = pieces.popleft()
                its = piece.tokens
                size = len(its)
                if size > left:
                    rest = _Piece(piece.input, piece.offset + left, its[left:], piece.fresh)
                    pieces.appendleft(rest)
                    its, size = its[:left], left
                tokens.append(its)
                segments.append(self._constant(segment)[:size])
                positions.append(self._counted[:size])
                left, segment = left - size, segment + 1
            fresh.append(piece.fresh)
        self._tokens -= count * length
        made = zip(
            np.concatenate(tokens, dtype=np.int64, casting="unsafe").reshape(count, length),
            np.concatenate(segments).reshape(count, length),
            np.concatenate(positions).reshape(count, length),
            strict=True,
        )
        return zip(starmap(Packed, made), fresh, strict=True)

    def _constant(self, segment: int) -> NDArray[np.int32]:
        if segment < len(self._numbered):
            return self._numbered[segment]
        made = np.full(self._length, segment, np.int32)
        if segment == len(self._numbered) < _NUMBERED:
            self._numbered.append(made)
        return made


def _check_tokens(value: Any) -> NDArray[Any]:
    """Return a sequence of tokens as an array."""
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iu":
        return value
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
