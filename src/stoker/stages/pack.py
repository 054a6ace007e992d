"""Packing: documents joined into full sequences.

Where a full sequence begins is known only once the values are there (``survivors``), or ahead of
the epoch where lengths are known (``schedule.packing``). The segment behind joins the documents.

A resume needs the start of one full sequence: the input, the offset in it, and the numbers of the
documents that wait in a window. All later sequences follow. Where other ranks take the epoch over,
these starts say which inputs are unread, and which are begun: whoever gets those leaves out what
was handed out (``EpochRest.offsets``). Sequences that a pool behind it still needs are made once
more on the way there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat, takewhile
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from stoker.basics import compact_integers
from stoker.basics.compact_integers import LARGEST, check_integer
from stoker.basics.validate import is_whole_number
from stoker.batching.joining import CutDocuments, Document, Joining, Tokens
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
from stoker.engine.items import DoneTask, Item, with_value
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.survivors import OrderedStream
from stoker.engine.work.step import Failure, RowStep
from stoker.errors import CombinationError, FieldError, StateError
from stoker.schedule.costs import Costs
from stoker.schedule.orders.order import as_array
from stoker.schedule.packing import BestFit, PackedSharding, PackRule, Piece
from stoker.sources.origin import UserObject, numbers_of
from stoker.stages.batching.planned import check_planned
from stoker.stages.stage import ChainView, StreamStage, Traits, not_known, refuse_behind

# The most inputs that are asked for at once beyond the number of sequences. Chosen, not measured.
_MOST_MORE = 64
_FORM = attrgetter("ndim", "dtype")
_NO_TOKENS: Tokens = np.zeros(0, np.int64)
_FITS = ("split", "best")
_ADDED = {"segments", "positions"}


@dataclass(frozen=True)
class Pack(StreamStage):
    """The stage ``.pack(length)``.

    Attributes:
        length: of what comes out, in tokens.
        fields, labels: as in ``Joining``.
        window: the number of documents among which the best fit is chosen; 0 where documents are
            split.
        sizes: of the source's examples, if they are given; ``rule``: what follows from them, once
            it is bound.
    """

    length: int
    fields: tuple[str | int, ...] | None = None
    labels: str | int = ""
    window: int = 0
    sizes: Any = field(default=None, compare=False, repr=False)
    rule: PackRule | None = None
    kind = "pack"

    @staticmethod
    def of(length: Any, fields: Any, fit: Any, window: Any, sizes: Any, labels: Any) -> Pack:
        """Check the arguments of ``.pack()``."""
        for name, value in {"length": length, "window": window}.items():
            if not is_whole_number(value):
                raise TypeError(f".pack() takes {name}= as a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f".pack() takes {name}= from 1, not {value}")
        if fit not in _FITS:
            raise ValueError(f".pack() takes fit='split' or 'best', not {fit!r}")
        if fields is not None:
            fields = (fields,) if isinstance(fields, (str, int)) else tuple(fields)
            if not fields or not all(isinstance(each, (str, int)) for each in fields):
                raise TypeError(f".pack() takes fields= as a name, or a list of them, not {fields}")
        elif labels is not None:
            raise CombinationError(".pack(labels=) names a field of what comes out: add fields=")
        window = int(window) if fit == "best" else 0
        return Pack(int(length), fields, "" if labels is None else labels, window, sizes)

    @property
    def call(self) -> str:
        said = [f"{self.length:,}"]
        said += [] if self.fields is None else [f"fields={list(self.fields)}"]
        said += [f"fit='best', window={self.window:,}"] if self.window else []
        said += ["sizes=..."] * (self.sizes is not None)
        said += [] if self.labels == "" else [f"labels={self.labels!r}"]
        return f"pack({', '.join(said)})"

    def bind(self, before: ChainView) -> Pack:
        """Check that single documents come here; plan them where their sizes are known."""
        if before.source.yields_batches:
            raise CombinationError(".pack() joins single sequences, and a loader yields batches")
        once = "put it before .batch(), once"
        refuse_behind("pack()", before, lambda t: t.batches or t.joins, once)
        if self.sizes is None:
            return self
        source, _ = check_planned(".pack(sizes=)", before)
        sizes = numbers_of(source, self.sizes, ".pack(sizes=)")
        costs = Costs.of(sizes, ".pack(sizes=)", scaled=False)
        return replace(self, rule=PackRule(self.length, costs, self.window))

    @property
    def traits(self) -> Traits:
        return Traits(joins=True, by_number=self.rule is not None)

    @property
    def batch_rule(self) -> PackRule | None:
        return self.rule

    @property
    def joins_rows(self) -> bool:
        """Whether bare documents, one behind the other, are joined straight into a batch's rows."""
        return self.fields is None and not self.window and self.rule is None

    def add_to(self, flow: Flow) -> None:
        super().add_to(flow)
        flow.join(self.length if self.joins_rows else 0)
        if not self.joins_rows:
            flow.then(_Join(self.call, Joining(self.length, self.fields, self.labels)))

    def stream(self, upstream: SegmentStream, context: StreamContext) -> PackedStream:
        if self.rule is not None:
            return PlannedStream(self, upstream, context)
        return (BestFitStream if self.window else PackedStream)(self, upstream, context)

    def read_node(self, saved: Any, bounds: Bounds) -> PackStart:
        start = msgspec.convert(saved, PackStart)
        check_integer(start.input, 0, bounds.most)
        waiting = {*start.waiting}
        if len(waiting) > self.window or not {int(n) for n in start.begun} <= waiting:
            raise ValueError("what waits to be packed is damaged")
        if self.rule is None:
            bounds.most, bounds.exact = LARGEST, None
            return start
        assert bounds.cuts is not None
        if start.input or start.offset:
            raise ValueError("where a planned sequence begins is in the plan")
        bounds.most = bounds.exact = bounds.cuts.batches
        bounds.cuts = None
        return start

    def check_leg(self, chain: ChainView) -> None:
        """Refuse a plan of which ranks have had unequal numbers of sequences."""
        if self.rule is not None and chain.may_leave_out:
            raise StateError(
                f"what is left out behind .{self.call} is the rank's own: leave sizes= out"
            )

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells, or the plan of an epoch (``Chain.cuts``)."""
        raise not_known()

    def signature(self) -> str:
        return self.call if self.rule is None else f"{self.call} of {self.rule.sizes.digest}"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        if not self.window:
            return "  sequences are joined, and cut where one is full"
        return f"  best fit among {self.window:,} documents that wait; the rest is padding"


@dataclass(frozen=True)
class _Join(RowStep):
    """The step that joins the documents of a sequence."""

    call: str
    joining: Joining
    budget = part = None
    account = 0

    @property
    def name(self) -> str:
        return self.call

    def user_objects(self) -> list[UserObject]:
        return []

    def compile(self, rejected: object) -> Callable[..., Any]:
        return self.joining


class PackStart(Node, tag=Pack.kind, omit_defaults=True):
    """The start of a full sequence.

    Attributes:
        number: its number, from 0; of one that was planned, nothing else is told.
        input: the number of the first input that was not packed, or that has its first token.
        offset: how many tokens of that one come before it; of an input that earlier ranks have
            begun, of those that they left.
        window: of a best fit: the numbers of the inputs that wait, below ``input``, in short.
        due: how many sequences of these are due.
        begun: how many tokens of these are in sequences before, by number.
    """

    number: Count
    input: Count
    offset: Count
    window: str | None = None
    due: Count = 0
    begun: dict[str, Count] = msgspec.field(default_factory=dict)

    @property
    def waiting(self) -> list[int]:
        """The numbers of inputs that wait. Raises ValueError if they are not as such."""
        if self.window is None:
            return []
        found = compact_integers.decode_ascending(self.window, 0, self.input, self.input)
        numbers: list[int] = found.tolist()
        return numbers

    @property
    def offsets(self) -> dict[int, int]:
        """How many tokens of inputs come before, by their numbers."""
        split = {self.input: self.offset} if self.offset else {}
        return split | {int(number): offset for number, offset in self.begun.items()}

    def read_so_far(self) -> ReadSoFar:
        return ReadSoFar(self.input, self.number, self.offsets, self.waiting)


class PackedStream(OrderedStream):
    """A stream of full sequences, not joined yet. Tokens that fill no last one are dropped.

    Args:
        stage: the stage.
        upstream: the stream of documents.
        context: the epoch. Its address has the rank and the number of ranks, which take turns with
            their sequences; its leg the inputs that earlier ranks have begun.
    """

    keeps = True

    def __init__(self, stage: Pack, upstream: SegmentStream, context: StreamContext) -> None:
        super().__init__(upstream)
        leg = context.leg
        # How many tokens of an input were handed out, by its place; full sequences of all ranks.
        self._begun, self._before = ({}, 0) if leg is None else (leg.offsets, leg.sequences)
        self._rank, self._world = context.address.rank, context.address.world
        self._stage, self._length = stage, stage.length
        # The latest inputs, not all of which is in full sequences: the first ``_skip`` tokens are.
        self._documents: list[Any] = []
        self._fresh_at: list[int] = []  # the fresh examples up to each of them
        self._tokens = self._skip = 0
        self._cut_off = 0  # of the next input, by a resume
        self._sequences = 0
        # Of the latest sequences, up to number ``_sequences - 1``: input, as in ``PackStart``, the
        # offset or how many are due, and the pieces that a best fit took.
        self._starts: deque[tuple[int, int, tuple[Piece, ...]]] = deque()
        # Sequences before a resume: up to this number, and those of them that are needed again.
        self._first, self._replayed = 0, frozenset[int]()
        self._again: dict[int, Item] = {}
        self._seen_inputs = self._seen_tokens = 0

    def ready_since(self) -> tuple[int, int | None]:
        return len(self._survivors), self.upstream.ready_since()[1]

    @property
    def end(self) -> int | None:
        return self._sequences if self._has_ended else None

    def recompute(self, number: int) -> Item:
        """Return a sequence from before a resume."""
        item = self._again[number]
        return with_value(item, DoneTask([item.task.values[item.row]]))

    def resume_point(self, number: int) -> tuple[PackStart, int]:
        """Return the start of a full sequence that was made, is next, or is after the end."""
        if number < self._sequences:
            at, offset, _ = self._starts[number - self._sequences]
        else:  # at the end, too: what is left may go on elsewhere
            at, offset = self._next_start()
        return PackStart(number, at, offset), at

    def forget_before(self, number: int) -> int:
        for _ in range(len(self._starts) - max(0, self._sequences - number)):
            self._starts.popleft()
        self._again = {n: item for n, item in self._again.items() if n >= number}
        return self.resume_point(number)[1]

    def resume(self, node: PackStart | None, request: UpstreamRequest) -> UpstreamRequest:
        start = node or PackStart(0, 0, 0)
        if start.number > min({*request.again, request.next}):
            raise damage_error("where a sequence begins does not fit")
        self._first, self._replayed = request.next, request.again
        self._sequences, self._skip = start.number, start.offset
        self._cut_off = start.offset
        self._inputs = oldest = self._go_to(start)
        return UpstreamRequest(oldest, oldest, oldest)

    def _go_to(self, start: PackStart) -> int:
        """Go to a start; return the oldest input that it needs."""
        return start.input

    def catch_up(self) -> None:
        """Make the sequences before the run's position that are needed again."""
        if self._replayed:
            with self._planning.lock:
                self._planning.may_block = True
                self._have(1)

    def clear(self) -> None:
        super().clear()
        self._documents.clear()
        self._again.clear()

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
        items = [*takewhile(lambda item: item.task.done, arriving)]
        values = [item.task.values[item.row] for item in items]
        for item in items:
            item.task.values[item.row] = None
            arriving.popleft()
        self._add(values, [item.place for item in items], [item.fresh for item in items])

    def _add(self, values: list[Any], places: Sequence[int], fresh: Sequence[int]) -> None:
        """Add inputs; what they fill is found for all of them at once."""
        skip, self._cut_off, added = self._cut_off, 0, 0
        if skip or self._begun or not (self._stage.joins_rows and _are_usual(values)):
            values = [*map(self._rest_of, values, places, chain([skip], repeat(0)))]
            for at, value in enumerate(values):
                if type(value) is Failure:
                    self._extend(values[added:at], fresh[added:at])
                    self._fail(value, fresh[at])
                    values[at], added = _NO_TOKENS, at
        self._extend(values[added:], fresh[added:])

    def _rest_of(self, value: Any, place: int, skip: int) -> Any:
        """Return an input without what earlier ranks have handed out, or a ``Failure``."""
        if type(value) is Failure:
            return value
        begun = self._begun.get(place, 0)
        try:
            document = self._document(value)
        except (TypeError, ValueError, LookupError) as error:
            return self.upstream.failure(self._stage.name, error, place)
        if begun + skip and len(document) <= begun + skip:
            return Failure(
                StateError(
                    "a sequence has become shorter since the state was saved: what stands before "
                    ".pack() must be deterministic"
                )
            )
        return document[begun:] if begun else document

    def _document(self, value: Any) -> Any:
        fields = self._stage.fields
        if fields is not None:
            return _fields_of(value, fields, self._stage.labels)
        tokens = _check_tokens(value)
        return tokens if self._stage.joins_rows else Document([tokens], {})

    def _extend(self, documents: list[Any], fresh: Sequence[int]) -> None:
        self._documents += documents
        self._fresh_at += fresh
        self._inputs += len(documents)
        tokens = sum(map(len, documents))
        self._tokens += tokens
        self._seen_inputs += len(documents)
        self._seen_tokens += tokens
        self._cut()

    def _cut(self) -> None:
        """Add the full sequences that the documents have."""
        if self._tokens - self._skip < self._length:
            return
        cut = CutDocuments(self._documents, self._skip, self._length)
        count = len(cut.lasts)
        first = self._inputs - len(self._documents)
        values = [(cut, n) if self._stage.joins_rows else cut.pieces(n) for n in range(count)]
        *begins, (behind, skip) = cut.begins
        starts = [(first + document, offset, ()) for document, offset in begins]
        self._hand_out(values, [self._fresh_at[last] for last in cut.lasts], starts)
        self._tokens -= self._skip + count * self._length - skip
        self._documents, self._fresh_at = self._documents[behind:], self._fresh_at[behind:]
        self._skip = skip

    def _hand_out(
        self,
        values: list[Any],
        fresh: Iterable[int],
        starts: Iterable[tuple[int, int, tuple[Piece, ...]]],
    ) -> None:
        """Add sequences; of those before a resume, only what is needed again."""
        task: Any = DoneTask(values)
        number = self._sequences
        items = [Item(task, n, self._place(number + n), 0, at, 1) for n, at in enumerate(fresh)]
        behind = max(0, self._first - number)
        for item in items[:behind]:
            if number + item.row in self._replayed:
                self._again[number + item.row] = item
        self._survivors += items[behind:]
        self._starts += starts
        self._sequences += len(items)

    def _fail(self, failure: Failure, fresh: int) -> None:
        """Add a failed input in place of a sequence; it comes again if this is resumed."""
        self._hand_out([failure], [fresh], [(*self._next_start(), ())])
        if not self._documents:
            self._skip = 0


class BestFitStream(PackedStream):
    """A stream of sequences of documents that fit, among a window of those that wait."""

    def __init__(self, stage: Pack, upstream: SegmentStream, context: StreamContext) -> None:
        super().__init__(stage, upstream, context)
        self._fit = BestFit(stage.length, stage.window)
        self._by_number: dict[int, Document] = {}
        self._fresh_seen = 0
        # Behind a resume: where it goes on, the inputs that wait there, and their sizes so far.
        self._start, self._sizes = PackStart(0, 0, 0), dict[int, int]()
        self._kept: set[int] = set()

    def resume_point(self, number: int) -> tuple[PackStart, int]:
        made = max(0, self._sequences - number)
        starts = [*islice(self._starts, len(self._starts) - made, None)]
        if self._inputs < self._start.input:  # not all is here again
            node = msgspec.structs.replace(self._start, number=number)
            return node, min(node.waiting, default=node.input)
        fit = self._fit
        waiting = dict.fromkeys(fit.waiting, 0) | fit.begun
        for _, _, pieces in reversed(starts):
            waiting |= {n: start for n, start, _ in pieces}
        end, due = starts[0][:2] if starts else self._next_start()
        window = sorted(n for n in waiting if n < end)
        short = compact_integers.encode_ascending(np.array(window, np.int64), 0)
        begun = {str(n): waiting[n] for n in window if waiting[n]}
        node = PackStart(number, end, 0, short, due, begun)
        return node, min(window, default=end)

    def _go_to(self, start: PackStart) -> int:
        self._start, self._fit.end = start, start.input
        self._kept = {*start.waiting}
        return min(self._kept, default=start.input)

    def _is_due(self, number: int) -> bool:
        """Whether an input was not handed out before a resume."""
        return number >= self._start.input or number in self._kept

    def _next_start(self) -> tuple[int, int]:
        return self._fit.end, self._fit.due

    def _inputs_for(self, count: int) -> int:
        if self.is_fed:
            return count
        return max(1, min(self._fit.lacking(count), count + _MOST_MORE))

    def _extend(self, documents: list[Any], fresh: Sequence[int]) -> None:
        for document, self._fresh_seen in zip(documents, fresh, strict=True):
            number, start = self._inputs, self._start
            self._inputs += 1
            if len(document) and self._is_due(number):
                self._by_number[number] = document
                if number < start.input:
                    self._sizes[number] = len(document)
                else:
                    self._fit.add(number, len(document))
            if self._inputs == start.input:
                self._fit.restore(self._sizes, start.offsets, start.due)
            if self._inputs >= start.input and self._fit.is_ready:
                self._pack()

    def _fail(self, failure: Failure, fresh: int) -> None:
        if self._is_due(self._inputs):
            super()._fail(failure, fresh)

    def _end(self) -> None:
        self._pack(ended=True)

    def _pack(self, *, ended: bool = False) -> None:
        fit = self._fit
        for pieces in fit.packs(ended=ended):
            value = [self._piece(*piece) for piece in pieces]
            for number, _, _ in pieces:
                if number not in fit.waiting:
                    del self._by_number[number]
            # What waits comes again where other ranks go on; of what is begun, the rest does.
            fresh = self._fresh_seen - fit.untouched
            self._hand_out([value], [fresh], [(fit.end, fit.due + 1, tuple(pieces))])

    def _piece(self, number: int, start: int, stop: int) -> Document:
        document = self._by_number[number]
        return document if stop - start == len(document) else document[start:stop]


class PlannedStream(PackedStream):
    """A stream of sequences that were planned, of documents that come in the plan's order."""

    def __init__(self, stage: Pack, upstream: SegmentStream, context: StreamContext) -> None:
        super().__init__(stage, upstream, context)
        setup = context.setup
        plan = setup.flow.orders.planned_deal(setup.seed, setup.epoch)
        assert isinstance(plan, PackedSharding)
        self._plan, self.total = plan, plan.cuts.batches
        self._pieces: list[Any] = []  # of the next sequence
        self._failure: Failure | None = None  # in it

    def resume_point(self, number: int) -> tuple[PackStart, int]:
        return PackStart(number, 0, 0), self._plan.cuts.start(number)

    def _go_to(self, start: PackStart) -> int:
        return self._plan.cuts.start(start.number)

    def _place(self, number: int) -> int:
        return int(self._plan.numbers[number])

    def _inputs_for(self, count: int) -> int:
        return max(1, self._plan.cuts.start(self._sequences + count) - self._inputs)

    def _extend(self, documents: list[Any], fresh: Sequence[int]) -> None:
        for document, fresh_at in zip(documents, fresh, strict=True):
            row, plan = self._inputs, self._plan
            self._inputs += 1
            if self._failure is None and len(document) != plan.sizes[row]:
                (place,) = as_array(plan.places(range(row, row + 1))).tolist()
                said = f"it has {len(document):,} tokens, and {plan.sizes[row]:,} by sizes="
                self._failure = self.upstream.failure(self._stage.name, ValueError(said), place)
            if self._failure is None:
                self._pieces.append(document[slice(*plan.pieces[row, 1:].tolist())])
            if self._inputs == plan.cuts.start(self._sequences + 1):
                value = self._pieces if self._failure is None else self._failure
                self._pieces, self._failure = [], None
                self._hand_out([value], [fresh_at], [(0, 0, ())])

    def _fail(self, failure: Failure, fresh: int) -> None:
        self._failure = self._failure or failure  # in place of the whole sequence


def _fields_of(example: Any, names: Sequence[str | int], labels: str | int) -> Document:
    """Return the fields of an example that are packed, and the others."""
    if isinstance(example, Mapping):
        fields = dict(example)
    elif isinstance(example, tuple):
        fields = dict(zip(getattr(example, "_fields", range(len(example))), example, strict=True))
    else:
        raise TypeError(f"fields= are of dicts and tuples, not of {type(example).__name__}")
    if not {*names} <= {*fields}:
        missing = next(name for name in names if name not in fields)
        raise FieldError(f"there is no field {missing!r}: the example has {list(fields)}")
    if not _ADDED.isdisjoint(fields):
        raise ValueError("it adds the fields 'segments' and 'positions': rename those before it")
    arrays = [np.asarray(fields.pop(name)) for name in names]
    if labels != "" and labels in fields:
        raise ValueError(f"labels={labels!r} is a field that is not joined: add it to fields=")
    for name, array in zip(names, arrays, strict=True):
        if not array.ndim or (array.size and array.dtype.kind not in "biuf"):
            raise TypeError(
                f"it joins arrays [n, ...] of numbers, and {name!r} is {array.dtype} "
                f"{list(array.shape)}"
            )
        if len(array) != len(arrays[0]):
            raise ValueError(
                f"{names[0]!r} has {len(arrays[0]):,} tokens, and {name!r} {len(array):,}"
            )
    return Document(arrays, fields)


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
