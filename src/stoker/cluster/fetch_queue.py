"""Batched lookups at other members: all keys that wait for a member go into one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stoker.cluster.cluster_view import ClusterView
from stoker.cluster.pending import Found, PendingGet
from stoker.cluster.remote_node import QueuedGet, RemoteNode
from stoker.transport.link import LinkError


class FetchQueue:
    """Batches lookups per member; keys that no member has are reported to the caller as missing.

    Any thread may call `fetch`. A few threads call `run` and send the requests: each serves one
    member at a time, and no two serve the same member.
    """

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._ready: deque[RemoteNode] = deque()

    def fetch(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None
    ) -> PendingGet:
        """Request items from other members; returns at once.

        ``on_missing`` is called by another thread with the keys that no member has.
        """
        pending = PendingGet(keys, on_missing)
        self._route(pending, list(dict.fromkeys(keys)), frozenset())
        return pending

    def run(self) -> None:
        """Send requests until the cluster view is closed."""
        cluster = self._cluster
        while True:
            with cluster.lock:
                cluster.has_lookups.wait_for(lambda: self._ready or cluster.is_closed)
                if cluster.is_closed:
                    return
                node = self._ready.popleft()
                queued, node.queue = node.queue, []
            self._serve(node, queued)
            with cluster.lock:
                if node.queue:
                    self._ready.append(node)
                    self._cluster.has_lookups.notify()
                else:
                    node.is_busy = False

    def wake(self) -> None:
        """Let the threads in ``run`` see that the view is closed. The caller holds its lock."""
        self._cluster.has_lookups.notify_all()

    def reroute(self, node: RemoteNode) -> None:
        """Ask other members for the keys that wait for a member that has left."""
        with self._cluster.lock:
            queued, node.queue = node.queue, []
        for get in queued:
            self._route(get.pending, get.keys, get.answered)

    def _route(self, pending: PendingGet, keys: list[bytes], answered: frozenset[str]) -> None:
        """Queue each key at the next member that may have it; report the rest as missing."""
        missing: list[bytes] = []
        cluster = self._cluster
        with cluster.lock:
            by_node: dict[RemoteNode, list[bytes]] = {}
            for key, node in zip(keys, cluster.next_holders(keys, answered), strict=True):
                if node is None:
                    missing.append(key)
                else:
                    by_node.setdefault(node, []).append(key)
            for node, node_keys in by_node.items():
                node.queue.append(QueuedGet(pending, node_keys, answered))
                if not node.is_busy:
                    node.is_busy = True
                    self._ready.append(node)
                    self._cluster.has_lookups.notify()
        pending.add_missing(missing)

    def _serve(self, node: RemoteNode, queued: list[QueuedGet]) -> None:
        """Ask a member for all keys that wait for it, in one request."""
        keys = [key for get in queued for key in get.keys]
        name, client = node.member.name, node.get_client
        try:
            if client is None:
                raise LinkError(f"{name} is not connected")
            records = client.get(keys)
        except LinkError:
            self._cluster.mark_lost(node)
            for get in queued:
                self._route(get.pending, get.keys, get.answered)
            return
        start = 0
        for pending, node_keys, answered in queued:
            got = records[start : start + len(node_keys)]
            start += len(node_keys)
            pending.add_found([Found(record, name) for record in got if record is not None])
            rest = [key for key, record in zip(node_keys, got, strict=True) if record is None]
            if rest:
                self._route(pending, rest, answered | {name})
