"""The way back: what a resume needs of every pool and sift, and how a run goes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stoker.echoing.following import Moment
from stoker.echoing.pool import Snapshot
from stoker.engine.items import Feed
from stoker.engine.pooled import EchoFeed
from stoker.engine.position import Position
from stoker.engine.sieve import Record, Sieve
from stoker.engine.streams import SegmentStream
from stoker.errors import StateError


def sieves_of(segments: Sequence[SegmentStream]) -> list[Sieve]:
    """Return the sieves that feed segments, in the order that data meets them."""
    upstreams = [stream.feed.upstream for stream in segments if stream.feed is not None]
    return [upstream for upstream in upstreams if isinstance(upstream, Sieve)]


def needed(
    segments: Sequence[SegmentStream], yielded: int
) -> tuple[list[Snapshot | Moment], list[Record]]:
    """Return what a resume at ``yielded`` needs of each pool and each sift, in order.

    Nothing at all while a pool was not begun. The caller holds the planning lock.
    """
    snapshots: list[Any] = []
    records: list[Record] = []
    oldest = yielded  # the oldest output of the stream at hand that is asked for again
    for stream in reversed(segments):
        feed = stream.feed
        if feed is None:
            break
        if isinstance(feed, EchoFeed):
            if not feed.started:
                return [], []
            snapshot = feed.pool.snapshot(_uses_taken(oldest, stream) // feed.pool.group)
            snapshots.append(snapshot)
            oldest = snapshot.oldest
        else:
            oldest *= stream.inputs_each
        upstream = _sieve(feed)
        if upstream is not None:
            record = upstream.needed(oldest)
            records.append(record)
            oldest = record.number
    return snapshots[::-1], records[::-1]


def forget(segments: Sequence[SegmentStream], yielded: int) -> None:
    """Drop what only a resume before ``yielded`` would need."""
    snapshots, records = needed(segments, yielded)
    for feed, snapshot in zip(_echoes(segments), snapshots, strict=False):
        feed.pool.forget_before(snapshot.step)
    for sieve, record in zip(sieves_of(segments), records, strict=False):
        sieve.forget_before(record.survivors)


def begin_empty(segments: Sequence[SegmentStream], position: Position) -> None:
    """Go on behind what a loader or a feed gave before, with empty pools."""
    outputs = position.yielded
    for stream in reversed(segments):
        stream.start_at(outputs)
        outputs = position.loaded if isinstance(stream.feed, EchoFeed) else outputs
    for feed in _echoes(segments):
        feed.pool.restore(Moment(position.yielded, position.loaded, ()))


def resume(segments: Sequence[SegmentStream], position: Position) -> None:
    """Bring new streams to a position.

    Raises StateError when it was saved with other skip budgets.
    """
    snapshots = list(position.snapshots)
    items = list(position.items)
    records = list(position.records)
    if records and len(records) != len(sieves_of(segments)):
        raise StateError(
            "the state was saved with other skip budgets: examples it left out cannot be told"
        )
    outputs = position.yielded
    again: set[int] = set()
    for stream in reversed(segments):
        stream.start_at(outputs)
        feed = stream.feed
        if feed is None:
            break
        each = stream.inputs_each
        again = {n * each + i for n in again for i in range(each)}
        upstream = _sieve(feed)
        record = Record()
        if upstream is not None and records:
            record = records.pop()
        if isinstance(feed, EchoFeed):
            taken = _uses_taken(outputs, stream)
            again = feed.replay(snapshots.pop(), taken, again, items.pop())
            outputs = feed.pool.admitted
        else:
            outputs *= each
        if upstream is not None:
            if record.total is not None:  # the last batch may have been short
                outputs = min(outputs, record.total)
                again = {n for n in again if n < record.total}
            record.seen = max(record.seen, outputs)  # all survived where nothing could be left out
            again = {record.number_of(n) for n in again}
            outputs = upstream.start_at(record, outputs)
    for pooled in _echoes(segments):
        pooled.refill()


def _echoes(segments: Sequence[SegmentStream]) -> Iterator[EchoFeed[Any]]:
    for stream in segments:
        feed: Any = stream.feed
        if isinstance(feed, EchoFeed):
            yield feed


def _sieve(feed: Feed) -> Sieve | None:
    return feed.upstream if isinstance(feed.upstream, Sieve) else None


def _uses_taken(outputs: int, stream: SegmentStream) -> int:
    assert stream.feed is not None
    inputs = outputs * stream.inputs_each
    return inputs if stream.feed.total is None else min(inputs, stream.feed.total)
