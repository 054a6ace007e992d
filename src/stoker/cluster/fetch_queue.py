"""Lookups at other members: all keys that wait for one member go in one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stoker.cluster.cluster_view import ClusterView
from stoker.cluster.pending import Found, PendingGet
from stoker.cluster.remote_node import QueuedGet, RemoteNode
from stoker.transport.link import LinkError


class FetchQueue:
    """Batches lookups per member; reports keys that no member has. Any thread may call it.

    Threads in ``run`` send the requests. Each serves one member at a time, no two the same.
    """

    def __init__(self, neighbours: ClusterView) -> None:
        self._neighbours = neighbours
        self._ready: deque[RemoteNode] = deque()

    def ask(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None
    ) -> PendingGet:
        """Begin to ask for items that are not on this host; returns at once."""
        asked = PendingGet(keys, on_missing)
        self._route(asked, list(dict.fromkeys(keys)), frozenset())
        return asked

    def run(self) -> None:
        """Send requests until the view is closed."""
        neighbours = self._neighbours
        while True:
            with neighbours.lock:
                neighbours.changed.wait_for(lambda: self._ready or neighbours.is_closed)
                if neighbours.is_closed:
                    return
                peer = self._ready.popleft()
                errands, peer.errands = peer.errands, []
            self._serve(peer, errands)
            with neighbours.lock:
                if peer.errands:
                    self._ready.append(peer)
                    neighbours.changed.notify_all()
                else:
                    peer.is_served = False

    def take_from(self, peer: RemoteNode) -> None:
        """Ask other members for the keys that wait for a member that has left."""
        with self._neighbours.lock:
            errands, peer.errands = peer.errands, []
        for errand in errands:
            self._route(errand.asked, errand.keys, errand.answered)

    def _route(self, asked: PendingGet, keys: list[bytes], answered: frozenset[str]) -> None:
        """Queue each key at the next member that may have it; report the rest as missing."""
        missing: list[bytes] = []
        neighbours = self._neighbours
        with neighbours.lock:
            by_peer: dict[RemoteNode, list[bytes]] = {}
            for key, peer in zip(keys, neighbours.whom_to_ask(keys, answered), strict=True):
                if peer is None:
                    missing.append(key)
                else:
                    by_peer.setdefault(peer, []).append(key)
            for peer, some in by_peer.items():
                peer.errands.append(QueuedGet(asked, some, answered))
                if not peer.is_served:
                    peer.is_served = True
                    self._ready.append(peer)
            if by_peer:
                neighbours.changed.notify_all()
        asked.miss(missing)

    def _serve(self, peer: RemoteNode, errands: list[QueuedGet]) -> None:
        """Ask a member for all keys that wait for it, in one request."""
        keys = [key for errand in errands for key in errand.keys]
        name, line = peer.member.name, peer.asking
        try:
            if line is None:
                raise LinkError(f"{name} is not there")
            records = line.get(keys)
        except LinkError:
            self._neighbours.lose(peer)
            for errand in errands:
                self._route(errand.asked, errand.keys, errand.answered)
            return
        start = 0
        for asked, some, answered in errands:
            got = records[start : start + len(some)]
            start += len(some)
            asked.give([Found(record, name) for record in got if record is not None])
            rest = [key for key, record in zip(some, got, strict=True) if record is None]
            if rest:
                self._route(asked, rest, answered | {name})
