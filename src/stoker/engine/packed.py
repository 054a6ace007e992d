"""Joins the sequences of a stream into full ones.

The parts of a full sequence are known only once the values are there (``survivors``). Here they are
only listed: the segment behind joins them, where they are needed (``stages.batching.joining``).

A resume needs the start of one full sequence: its input, and the offset in it. All later ones
follow. Where other ranks take the epoch over, these starts say which inputs are unread, and which
are begun: whoever gets those leaves out what was handed out (``BegunInputs``). No pool may stand
after ``.pack()``, so no full sequence is ever made again from its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from stoker.stages.batching.joining import Pieces

# Inputs whose places are looked up at once. Chosen, not measured.
_LOOKED_UP = 4_096
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


class PackedStream(OrderedStream):
    """A stream of full sequences, as their pieces. Tokens that fill no last one are dropped.

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
        self._pieces = Pieces()  # of the sequence that is not full yet
        self._room = self._length  # the tokens that it lacks
        self._start = (0, 0)  # its first token's input and offset, as in ``PackStart``
        self._skip_count = 0  # tokens of the next input that came before a resume
        self._sequences = 0
        # Of the latest full sequences, up to number ``_sequences - 1``: inputs and offsets, too.
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
        elif self._pieces:  # at the end, too: what is left may go on elsewhere
            start = PackStart(number, *self._start)
        else:
            start = PackStart(number, self._inputs, 0 if self._has_ended else self._skip_count)
        return start, start.input

    def forget_before(self, number: int) -> int:
        for _ in range(len(self._starts) - max(0, self._sequences - number)):
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

    def _inputs_for(self, count: int) -> int:
        """Return how many inputs have the tokens that ``count`` full sequences lack, and a few.

        Asking again for what was missing would cost more than those few are early. A pool in front
        decides by what it is asked for, so there no more is.
        """
        if not self._seen_inputs or self.upstream.feed is not None:
            return count
        lacking = (count - 1) * self._length + self._room
        about = lacking * self._seen_inputs // self._seen_tokens
        return max(1, min(about + about // 8 + 1, count + _MOST_MORE))

    def _end(self) -> None:
        pass

    def _decide(self, item: Item) -> None:
        values, row = item.task.values, item.row
        value, values[row] = values[row], None
        number, offset = self._inputs, self._skip_count
        self._inputs, self._skip_count = number + 1, 0
        if offset or self._begun is not None or not _is_usual(value):
            value = self._rest_of(value, item, offset)
        if type(value) is Failure:
            self._keep(value, item.fresh, (number + 1, 0))
            return
        size = len(value)
        if not size:
            return
        self._seen_inputs += 1
        self._seen_tokens += size
        if not self._pieces:
            self._start = number, offset
        if size < self._room:
            self._pieces.append(value)
            self._room -= size
        else:
            self._cut(value, number, offset, item.fresh)

    def _rest_of(self, value: Any, item: Item, offset: int) -> Any:
        """Return what is left of an input behind its first tokens, or a ``Failure``."""
        if type(value) is Failure:
            return value
        begun = 0 if self._begun is None else self._begun.offset(item.ordinal)
        try:
            tokens = _check_tokens(value)
        except (TypeError, ValueError) as error:
            return self.upstream.failure(self._stage.name, error, item.ordinal)
        rest = tokens[begun + offset :]
        if begun + offset and not len(rest):
            return Failure(
                StateError(
                    "a sequence has become shorter since the state was saved: what stands before "
                    ".pack() must be deterministic"
                )
            )
        return rest

    def _cut(self, tokens: NDArray[Any], number: int, offset: int, fresh: int) -> None:
        """Cut an input where sequences are full; ``number`` and ``offset`` are of its first token.

        The sequences that it fills were filled by the first ``fresh`` fresh examples.
        """
        size, end = len(tokens), self._room
        self._pieces.append(tokens[:end])
        self._keep(self._pieces, fresh, self._start)
        while size - end >= self._length:
            at, end = end, end + self._length
            self._keep(Pieces((tokens[at:end],)), fresh, (number, offset + at))
        self._start = number, offset + end
        self._pieces = Pieces((tokens[end:],) if end < size else ())
        self._room = self._length - (size - end)

    def _keep(self, value: Pieces | Failure, fresh: int, start: tuple[int, int]) -> None:
        """Add a full sequence, or a failure in its place, with its ``_starts``."""
        self._survivors.append(done_item(value, self._sequences, 0, fresh, 1))
        self._starts.append(start)
        self._sequences += 1


def _is_usual(value: Any) -> bool:
    """True if a value is certainly a sequence of tokens."""
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iu"


def _check_tokens(value: Any) -> NDArray[Any]:
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
