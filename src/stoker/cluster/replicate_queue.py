"""Sends items to the members that own them, in the background, many in one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stoker.cluster.cluster_view import LOCAL, ClusterView
from stoker.cluster.keeper.client import Record, SpecRefused
from stoker.transport.link import LinkError

QUEUE_BYTES = 32 << 20
"""The most bytes that wait to be sent: 8 requests. Further items are refused, so the queue takes no
more memory."""
# The size of a request: about 40 items of 110 KB. Sent one by one, items of 110 KB cost 2.2 times
# the processor time, and items of 3 KB 15 times.
_PUT_BYTES = 4 << 20
# How long an item waits for others to share its request. No batch waits for it. Chosen, not
# measured.
_BATCH_DELAY_S = 0.05


class ReplicateQueue:
    """A queue of items for other members. One thread calls `run`.

    Args:
        cluster: the members.
        store_locally: stores an item on this host.
        on_refused: called with queued items that no member stored.
    """

    def __init__(
        self,
        cluster: ClusterView,
        store_locally: Callable[[Record], None],
        on_refused: Callable[[Sequence[Record]], None],
    ) -> None:
        self._cluster = cluster
        self._store_locally = store_locally
        self._on_refused = on_refused
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0  # with the items that are being sent
        self._is_flushing = False

    def offer(self, record: Record) -> bool:
        """Queue an item; False if the queue is full."""
        size = len(record.data)
        with self._cluster.lock:
            is_closed = self._cluster.is_closed
            if is_closed or self._queued_bytes + size > max(QUEUE_BYTES, size):
                return False
            self._queue.append(record)
            self._queued_bytes += size
            if len(self._queue) == 1 or self._queued_bytes >= _PUT_BYTES:
                self._cluster.changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued items are stored or refused; False after the timeout."""
        cluster = self._cluster
        with cluster.lock:
            self._is_flushing = True
            cluster.changed.notify_all()
            done = cluster.changed.wait_for(
                lambda: not self._queued_bytes or cluster.is_closed, timeout_s
            )
            self._is_flushing = False
        return done

    def run(self) -> None:
        """Send items until the cluster view is closed."""
        cluster = self._cluster
        while True:
            with cluster.lock:
                cluster.changed.wait_for(lambda: self._queue or cluster.is_closed)
                cluster.changed.wait_for(self._has_enough, _BATCH_DELAY_S)
                if cluster.is_closed:
                    return
                batch, size = [], 0
                while self._queue and size < _PUT_BYTES:
                    batch.append(self._queue.popleft())
                    size += len(batch[-1].data)
            try:
                self._send_all_to_owners(batch)
            finally:
                with cluster.lock:
                    # An `offer` that Ctrl-C interrupted may have added its bytes but not its item.
                    # An empty queue has 0 bytes, whatever the sum says.
                    self._queued_bytes = self._queued_bytes - size if self._queue else 0
                    cluster.changed.notify_all()

    def _has_enough(self) -> bool:
        is_closed = self._cluster.is_closed
        return is_closed or self._is_flushing or self._queued_bytes >= _PUT_BYTES

    def _send_all_to_owners(self, records: list[Record]) -> None:
        """Send each item to the first member that takes it."""
        while records:
            by_name: dict[str | None, list[Record]] = {}
            for record in records:
                by_name.setdefault(self._cluster.choose_store(record.key), []).append(record)
            records = []
            for name, node_records in by_name.items():
                if name == LOCAL:
                    for record in node_records:
                        self._store_locally(record)
                elif name is None:
                    self._on_refused(node_records)
                else:
                    records += self._send_to(name, node_records)

    def _send_to(self, name: str, records: list[Record]) -> list[Record]:
        """Send items to a member; return the ones that it refuses, for others."""
        cluster = self._cluster
        node = next((node for node in cluster.others if node.member.name == name), None)
        if node is None:
            return records  # it has left the cluster a moment ago
        try:
            if node.put_client is None:
                node.put_client = cluster.connect(node, cluster.map.newest_ns)
            stored = node.put_client.put(records)
        except (LinkError, SpecRefused):
            cluster.mark_lost(node)
            return records
        node.is_full = stored.is_full
        refused = [records[at] for at in stored.refused]
        if stored.is_full:
            return refused
        self._on_refused(refused)
        return []
