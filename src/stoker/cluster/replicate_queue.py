"""Sending items to the members that they belong to, in the background, many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stoker.cluster.cluster_view import HOME, ClusterView
from stoker.cluster.keeper.client import DefinitionRefused, Record
from stoker.transport.link import LinkError

QUEUE_BYTES = 32 << 20
"""Most bytes that wait to be brought to others; items beyond that are refused. Memory that a
process has beside its own: 8 requests."""
# A request is shared by some 40 items of 110 KB. Sent one by one, items cost 2.2 times the
# processor time, of 3 KB 15 times.
_PUT_BYTES = 4 << 20
# Nobody waits for an item that is brought: it may wait so long for others to be sent with.
_GATHER_S = 0.05


class ReplicateQueue:
    """A queue of items for other members. One thread calls ``run``.

    Args:
        neighbours: the members that store them.
        keep: stores an item on this host.
        on_refused: called with the items that were queued, and that no member stored.
    """

    def __init__(
        self,
        neighbours: ClusterView,
        keep: Callable[[Record], None],
        on_refused: Callable[[Sequence[Record]], None],
    ) -> None:
        self._neighbours = neighbours
        self._keep = keep
        self._on_refused = on_refused
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0  # with what is under way
        self._is_flushing = False

    def offer(self, record: Record) -> bool:
        """Queue an item; False if the queue is full."""
        size = len(record.data)
        with self._neighbours.lock:
            is_closed = self._neighbours.is_closed
            if is_closed or self._queued_bytes + size > max(QUEUE_BYTES, size):
                return False
            self._queue.append(record)
            self._queued_bytes += size
            if len(self._queue) == 1 or self._queued_bytes >= _PUT_BYTES:
                self._neighbours.changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued items are stored, or refused; False after the timeout."""
        neighbours = self._neighbours
        with neighbours.lock:
            self._is_flushing = True
            neighbours.changed.notify_all()
            done = neighbours.changed.wait_for(
                lambda: not self._queued_bytes or neighbours.is_closed, timeout_s
            )
            self._is_flushing = False
        return done

    def run(self) -> None:
        """Send items until the view is closed."""
        neighbours = self._neighbours
        while True:
            with neighbours.lock:
                neighbours.changed.wait_for(lambda: self._queue or neighbours.is_closed)
                neighbours.changed.wait_for(self._has_enough, _GATHER_S)
                if neighbours.is_closed:
                    return
                batch, size = [], 0
                while self._queue and size < _PUT_BYTES:
                    batch.append(self._queue.popleft())
                    size += len(batch[-1].data)
            try:
                self._bring_all(batch)
            finally:
                with neighbours.lock:
                    # One that Ctrl-C broke off may have been counted wrong.
                    self._queued_bytes = self._queued_bytes - size if self._queue else 0
                    neighbours.changed.notify_all()

    def _has_enough(self) -> bool:
        is_closed = self._neighbours.is_closed
        return is_closed or self._is_flushing or self._queued_bytes >= _PUT_BYTES

    def _bring_all(self, records: list[Record]) -> None:
        """Send each item to the first member that takes it."""
        while records:
            by_name: dict[str | None, list[Record]] = {}
            for record in records:
                by_name.setdefault(self._neighbours.place(record.key), []).append(record)
            records = []
            for name, some in by_name.items():
                if name == HOME:
                    for record in some:
                        self._keep(record)
                elif name is None:
                    self._on_refused(some)
                else:
                    records += self._bring_to(name, some)

    def _bring_to(self, name: str, records: list[Record]) -> list[Record]:
        """Send items to a member; return the ones that it refuses, for others."""
        neighbours = self._neighbours
        peer = next((peer for peer in neighbours.all if peer.member.name == name), None)
        if peer is None:
            return records  # it has just left
        try:
            if peer.bringing is None:
                peer.bringing = neighbours.connect(peer)
            stored = peer.bringing.put(records)
        except (LinkError, DefinitionRefused):
            neighbours.lose(peer)
            return records
        peer.is_full = stored.is_full
        refused = [records[at] for at in stored.refused]
        if stored.is_full:
            return refused
        self._on_refused(refused)
        return []
