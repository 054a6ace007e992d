"""Checkpoint and resume: where an epoch is, what a resume needs of pools and filters, and how a
run is restored.

A position is: outputs handed out, uses, one snapshot for each pool, one record for each filter, and
one state of each scan.

With nested pools, ``needed`` goes from the consumer to the source. Each pool's snapshot must reach
back to the oldest item that the pool downstream of it still holds, because that item will be made
again. ``resume`` goes the same way. Each pool is replayed from its snapshot, and recalls the draws
of those steps whose outputs will be asked for again. Those outputs are made again, their own inputs
included, when a draw first needs them.

A loader that has a state of its own is asked for it behind every batch. A position in its epoch is
that state, and pools begin empty (``begin_empty``).

That parts of a state fit each other is found here. That each field is possible at all was checked
before, by ``chain.state``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.engine.echo.pool_inputs import EchoInputs
from stoker.engine.items import Inputs, Planning
from stoker.engine.packed import PackedStream, PackStart
from stoker.engine.scanned import ScannedStream, ScanStart
from stoker.engine.segment_stream import SegmentStream
from stoker.engine.survivors import FilteredStream, FilterRecord
from stoker.errors import StateError
from stoker.schedule.adaptive import AdaptiveSnapshot
from stoker.schedule.fixed import Snapshot
from stoker.schedule.owners import OwnerSnapshot


@dataclass
class Position:
    """Where an epoch is: enough to go on from there.

    Attributes:
        yielded, uses, fresh: outputs, examples and fresh examples that were handed out.
        owners: by whose parts the epoch is dealt, if it is.
        loaded: batches of a loader that were handed out; ``loader_state``: its own state there.
        snapshots: one of each pool, in the order that data meets them.
        items: how many fresh items each pool had in the epoch, where its end has told.
        records: of each filtered stream, which examples it left out.
        scans: where each scan goes on.
        packs: of a packed stream, where the next full sequence begins; at most one.
        spent: how much of each skip budget is spent; ``filtered``: what filters left out.
    """

    yielded: int = 0
    uses: int = 0
    snapshots: list[Snapshot | AdaptiveSnapshot] = field(default_factory=list)
    items: list[int | None] = field(default_factory=list)
    records: list[FilterRecord] = field(default_factory=list)
    spent: dict[int, int] = field(default_factory=dict)
    filtered: int = 0
    fresh: int = 0
    loaded: int = 0
    loader_state: Any = None
    owners: OwnerSnapshot | None = None
    packs: list[PackStart] = field(default_factory=list)
    scans: list[ScanStart] = field(default_factory=list)


class Needed(NamedTuple):
    """What a resume needs of pools, filters, packed streams and scans, each in order."""

    snapshots: list[Snapshot | AdaptiveSnapshot]
    records: list[FilterRecord]
    packs: list[PackStart]
    scans: list[ScanStart]


def filtered_of(segments: Sequence[SegmentStream]) -> list[FilteredStream]:
    """Return the filtered streams that feed segments, in data-flow order."""
    upstreams = [stream.feed.upstream for stream in segments if stream.feed is not None]
    return [upstream for upstream in upstreams if isinstance(upstream, FilteredStream)]


def needed(segments: Sequence[SegmentStream], yielded: int, planning: Planning) -> Needed:
    """Return what a resume at ``yielded`` needs.

    All is empty if a pool has not started yet. The caller must hold ``planning``.
    """
    assert planning.is_held()
    snapshots: list[Any] = []
    records: list[FilterRecord] = []
    packs: list[PackStart] = []
    scans: list[ScanStart] = []
    oldest = yielded  # the oldest output of the stream at hand that is asked for again
    for stream in reversed(segments):
        feed = stream.feed
        if feed is None:
            break
        if isinstance(feed, EchoInputs):
            if not feed.started:
                return Needed([], [], [], [])
            snapshot = feed.pool.snapshot(_uses_taken(oldest, stream) // feed.pool.group)
            snapshots.append(snapshot)
            oldest = snapshot.oldest
        else:
            oldest *= stream.inputs_each
        upstream = _filtered(feed)
        if upstream is not None:
            record = upstream.needed(oldest)
            records.append(record)
            oldest = record.number
        elif isinstance(feed.upstream, PackedStream):
            packs.append(feed.upstream.needed(oldest))
            oldest = packs[-1].input
        elif isinstance(feed.upstream, ScannedStream):
            scans.append(feed.upstream.needed(oldest))
            oldest = scans[-1].input
    return Needed(snapshots[::-1], records[::-1], packs, scans[::-1])


def forget(segments: Sequence[SegmentStream], yielded: int, planning: Planning) -> None:
    """Drop what only a resume before ``yielded`` would need. The caller holds ``planning``."""
    snapshots, records, packs, scans = needed(segments, yielded, planning)
    for feed, snapshot in zip(_echoes(segments), snapshots, strict=False):
        feed.pool.forget_before(snapshot.step)
    for filtered, record in zip(filtered_of(segments), records, strict=False):
        filtered.forget_before(record.survivors)
    for scanned, scan in zip(_scanned_of(segments), scans, strict=False):
        scanned.forget_before(scan.output)
    for stream in segments:
        if stream.feed is not None and isinstance(stream.feed.upstream, PackedStream) and packs:
            stream.feed.upstream.forget_before(packs[0].number)


def begin_empty(segments: Sequence[SegmentStream], position: Position) -> None:
    """Continue after the batches that a loader or a feed has already yielded, with empty pools."""
    outputs = position.yielded
    for stream in reversed(segments):
        stream.start_at(outputs)
        outputs = position.loaded if isinstance(stream.feed, EchoInputs) else outputs
    for feed in _echoes(segments):
        step = position.yielded
        feed.pool.restore(AdaptiveSnapshot(step, position.loaded, (), began=step))


def resume(segments: Sequence[SegmentStream], position: Position) -> None:
    """Bring new streams to a position that was read for this pipeline.

    Raises StateError where its parts do not fit each other.
    """
    snapshots = list(position.snapshots)
    items = list(position.items)
    records = list(position.records)
    scans = list(position.scans)
    outputs = oldest = position.yielded  # of the stream at hand; as in ``needed``
    again: set[int] = set()
    for stream in reversed(segments):
        if stream.total is not None and outputs > stream.total:
            raise StateError(f"the state is damaged: it is at {outputs:,} of {stream.total:,}")
        stream.start_at(outputs)
        feed = stream.feed
        if feed is None:
            break
        each = stream.inputs_each
        again = {n * each + i for n in again for i in range(each)}
        upstream = _filtered(feed)
        record = FilterRecord()
        if upstream is not None and records:
            record = records.pop()
        if isinstance(feed, EchoInputs):
            taken, first = _uses_taken(outputs, stream), _uses_taken(oldest, stream)
            snapshot = snapshots.pop()
            again = feed.replay(snapshot, first, taken, again, items.pop())
            outputs, oldest = feed.pool.admitted, snapshot.oldest
        else:
            outputs, oldest = outputs * each, oldest * each
        if upstream is not None:
            if record.total is not None:  # the last batch may have been short
                if isinstance(feed, EchoInputs) and outputs > record.total:
                    had = f"{outputs:,} of {record.total:,} items"
                    raise StateError(f"the state is damaged: a pool has had {had}")
                outputs = min(outputs, record.total)
                again = {n for n in again if n < record.total}
            if position.records and not record.covers({*again, outputs}):
                raise StateError("the state is damaged: what was left out does not fit the rest")
            record.seen = max(record.seen, outputs)  # all survived where nothing could be left out
            again = {record.number_of(n) for n in again}
            outputs = upstream.start_at(record, outputs)
            oldest = record.number if position.records else oldest
        elif isinstance(feed.upstream, PackedStream):
            start = position.packs[0] if position.packs else PackStart()
            if start.number != outputs:
                raise StateError("the state is damaged: where a sequence begins does not fit")
            outputs = oldest = feed.upstream.start_at(start)
        elif isinstance(feed.upstream, ScannedStream):
            begin = scans.pop()
            if begin.output > min({*again, outputs}):
                raise StateError("the state is damaged: a scan in it goes on too late")
            outputs = oldest = feed.upstream.start_at(begin, outputs, each, again)
            again = set()
    for scanned in _scanned_of(segments):
        scanned.make_again()
    for pooled in _echoes(segments):
        pooled.refill()


def _echoes(segments: Sequence[SegmentStream]) -> Iterator[EchoInputs[Any]]:
    for stream in segments:
        feed: Any = stream.feed
        if isinstance(feed, EchoInputs):
            yield feed


def _scanned_of(segments: Sequence[SegmentStream]) -> list[ScannedStream]:
    upstreams = [stream.feed.upstream for stream in segments if stream.feed is not None]
    return [upstream for upstream in upstreams if isinstance(upstream, ScannedStream)]


def _filtered(feed: Inputs) -> FilteredStream | None:
    return feed.upstream if isinstance(feed.upstream, FilteredStream) else None


def _uses_taken(outputs: int, stream: SegmentStream) -> int:
    assert stream.feed is not None
    inputs = outputs * stream.inputs_each
    return inputs if stream.feed.total is None else min(inputs, stream.feed.total)
