"""The other members as a process reaches them: asked for what is missing here, brought what is new.

An item belongs to the first member in its rank (``owners``) that is alive. Who misses one asks that
member and the next, and no others; what neither has is read from storage, and brought to the first
of them that has room. So a lost member costs what it had, once, and one that comes back, or is new,
is brought what others still find behind it.

Three kinds of threads, all of this process: a few ask, one brings, one looks after those that do
not answer and after the membership. Nobody waits for a member that is known to be dead: it is tried
again aside, later each time. Nobody waits for one that has just died for longer than a deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from stoker.caution import warn
from stoker.cluster.asked import Asked, Found
from stoker.cluster.definition import Definition
from stoker.cluster.line import DefinitionRefused, Line, Record
from stoker.cluster.membership import Members, Membership
from stoker.cluster.owners import OwnerMap
from stoker.cluster.peer import Errand, MemberMap, Peer
from stoker.errors import CacheError, CacheWarning
from stoker.fork_safety import OwningProcess
from stoker.net.link import LinkError
from stoker.signals import deferred

QUEUE_BYTES = 32 << 20
"""What may wait to be brought to others; what is offered beyond that is refused."""
_PUT_BYTES = 4 << 20
_GATHER_S = 0.05
_REFRESH_S = 1.0
_ASKERS = 8
_IN_TURN = 2  # members that are asked for an item, or brought it
_JOIN_S = 5.0

HOME = "home"
"""In place of a member: this host's own store."""


class PeerGroup:
    """The other members of a cluster, for one process.

    Args:
        membership: who they are.
        definition: what this process caches.
        home_has_room: whether this host's store takes anything.
        keep: stores an item on this host.
        on_refused: is told what was taken to be brought to others, and did not enter anywhere.
        on_change: is told how many members there are, how many of the others answer, and the
            version of the map.

    Raises DefinitionRefused where a member keeps something else.
    """

    def __init__(
        self,
        membership: Membership,
        definition: Definition,
        *,
        home_has_room: Callable[[], bool],
        keep: Callable[[Record], None],
        on_refused: Callable[[Sequence[Record]], None],
        on_change: Callable[[int, int, int], None],
    ) -> None:
        self._membership = membership
        self._definition = definition
        self._home_has_room = home_has_room
        self._keep = keep
        self._on_refused = on_refused
        self._on_change = on_change
        self._owner = OwningProcess()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._ready: deque[Peer] = deque()
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0  # with what is under way
        self._is_flushing = False
        self._has_warned = False
        self._members = Members(0, ())
        self._view = MemberMap(OwnerMap.of((), 0), [])
        self._threads: list[threading.Thread] = []
        self._adopt(membership.members())
        for peer in self._others:
            self._meet(peer, refuse=True)
        self._tell()
        with deferred():
            self._start("stoker-cluster", self._look_after)
            self._start("stoker-cluster-bring", self._bring)

    @property
    def is_current(self) -> bool:
        """Whether it can be used: it is open, and this process's own."""
        return self._owner.is_current and not self._closed

    @property
    def owner_map(self) -> OwnerMap:
        """Who owns what, by what is known of the members now."""
        return self._view.owners

    @property
    def _others(self) -> list[Peer]:
        return [peer for peer in self._view.peers if peer is not None]

    def ask(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> Asked:
        """Begin to ask for items that are not on this host; returns at once."""
        asked = Asked(keys, on_missing)
        self._route(asked, list(dict.fromkeys(keys)), frozenset())
        return asked

    def place(self, key: bytes, before: str | None = None) -> str | None:
        """Return who an item is to be brought to: a member's name, ``HOME``, or None for nobody.

        With ``before``, only to one that ranks before that member.
        """
        with self._lock:
            view, alive = self._view, 0
            if view.peers and view.first(key) == before:
                return None
            for number in view.ranked(key):
                peer = view.peers[number]
                if view.owners.members[number].name == before:
                    return None
                if peer is None and self._home_has_room():
                    return HOME
                if peer is not None and peer.is_alive and not peer.is_full:
                    return peer.member.name
                alive += peer is None or peer.is_alive
                if alive == _IN_TURN:
                    return None
        return None

    @property
    def have_room(self) -> bool:
        """Whether any of them, or this host's store, takes anything."""
        return self._home_has_room() or any(
            peer.is_alive and not peer.is_full for peer in self._others
        )

    def bring(self, record: Record) -> bool:
        """Take an item that is to be brought to who it belongs to; False where too much waits."""
        size = len(record.data)
        with self._lock:
            if self._closed or self._queued_bytes + size > max(QUEUE_BYTES, size):
                return False
            self._queue.append(record)
            self._queued_bytes += size
            if len(self._queue) == 1 or self._queued_bytes >= _PUT_BYTES:
                self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken is stored, or refused; False if that takes longer."""
        with self._lock:
            self._is_flushing = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queued_bytes or self._closed, timeout_s)
            self._is_flushing = False
        return done

    def close(self) -> None:
        """Bring what waits, if that takes no longer than 5 s, and end connections and threads.

        Does nothing in a forked child.
        """
        if not self.is_current:
            return
        if threading.current_thread() not in self._threads:
            self.flush(_JOIN_S)
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            errands = [errand for peer in self._others for errand in peer.errands]
            for peer in self._others:
                peer.close()
        for errand in errands:
            errand.asked.miss(errand.keys)
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # Asking.

    def _route(self, asked: Asked, keys: list[bytes], answered: frozenset[str]) -> None:
        """Hand each question to the next who may know; what nobody may is missing."""
        missing: list[bytes] = []
        with self._lock:
            view = self._view
            by_peer: dict[Peer, list[bytes]] = {}
            places = np.frombuffer(b"".join(keys), ">u8")[::2].astype(np.uint64)
            owners = view.owners.owners(places).tolist() if len(view.owners) else [0] * len(keys)
            for key, owner in zip(keys, owners, strict=True):
                peer = view.peers[owner] if view.peers else None
                if answered or peer is None or not peer.is_alive:
                    peer = None if self._closed else self._next(view, key, answered)
                if peer is None:
                    missing.append(key)
                else:
                    by_peer.setdefault(peer, []).append(key)
            for peer, some in by_peer.items():
                peer.errands.append(Errand(asked, some, answered))
                if not peer.is_served:
                    peer.is_served = True
                    self._ready.append(peer)
            if by_peer:
                self._changed.notify_all()
        asked.miss(missing)

    def _next(self, view: MemberMap, key: bytes, answered: frozenset[str]) -> Peer | None:
        turn = 0
        for number in view.ranked(key):
            peer = view.peers[number]
            if peer is not None and not peer.is_alive:
                continue
            if peer is not None and peer.member.name not in answered:
                return peer
            turn += 1
            if turn == _IN_TURN:
                return None
        return None

    def _ask(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if self._closed:
                    return
                peer = self._ready.popleft()
                errands, peer.errands = peer.errands, []
            self._serve(peer, errands)
            with self._lock:
                if peer.errands:
                    self._ready.append(peer)
                    self._changed.notify_all()
                else:
                    peer.is_served = False

    def _serve(self, peer: Peer, errands: list[Errand]) -> None:
        """Ask a member for all that waits for it, in one request."""
        keys = [key for errand in errands for key in errand.keys]
        name, line = peer.member.name, peer.asking
        try:
            if line is None:
                raise LinkError(f"{name} is not there")
            records = line.get(keys)
        except LinkError:
            self._lose(peer)
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

    # Bringing.

    def _bring(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._changed.wait_for(self._has_enough, _GATHER_S)
                if self._closed:
                    return
                batch, size = [], 0
                while self._queue and size < _PUT_BYTES:
                    batch.append(self._queue.popleft())
                    size += len(batch[-1].data)
            try:
                self._bring_all(batch)
            finally:
                with self._lock:
                    # One that Ctrl-C broke off may have been counted wrong.
                    self._queued_bytes = self._queued_bytes - size if self._queue else 0
                    self._changed.notify_all()

    def _has_enough(self) -> bool:
        return self._closed or self._is_flushing or self._queued_bytes >= _PUT_BYTES

    def _bring_all(self, records: list[Record]) -> None:
        """Bring each item to the first who takes it."""
        while records:
            by_name: dict[str | None, list[Record]] = {}
            for record in records:
                by_name.setdefault(self.place(record.key), []).append(record)
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
        """Bring items to a member; return what it cannot take, for others."""
        peer = next((peer for peer in self._others if peer.member.name == name), None)
        if peer is None:
            return records  # it has just left
        try:
            if peer.bringing is None:
                peer.bringing = self._connect(peer)
            stored = peer.bringing.put(records)
        except (LinkError, DefinitionRefused):
            self._lose(peer)
            return records
        peer.is_full = stored.is_full
        refused = [records[at] for at in stored.refused]
        if stored.is_full:
            return refused
        self._on_refused(refused)
        return []

    # Looking after the others.

    def _look_after(self) -> None:
        refresh_s = time.monotonic() + _REFRESH_S
        while True:
            with self._lock:
                due_s = [peer.backoff.due_s for peer in self._others if not peer.is_alive]
                wait_s = min([refresh_s, *due_s]) - time.monotonic()
                if self._changed.wait_for(lambda: self._closed, max(0.0, wait_s)):
                    return
            if time.monotonic() >= refresh_s:
                try:
                    self._adopt(self._membership.members())
                except CacheError as error:
                    self._warn(str(error))
                refresh_s = time.monotonic() + _REFRESH_S
            for peer in self._others:
                if peer.backoff.is_due and not self._closed:
                    self._meet(peer)
            self._tell()

    def _adopt(self, found: Members) -> None:
        """Take over the members, if they have changed."""
        home = self._membership.home
        if found == self._members:
            return
        self._members = found
        owners = OwnerMap.of(found.members, found.version)
        known = {peer.member: peer for peer in self._others}
        peers = [
            None if member.name == home else known.pop(member, None) or Peer(member)
            for member in owners.members
        ]
        with self._lock:
            self._view = MemberMap(owners, peers)
        for peer in known.values():
            peer.lost()
            with self._lock:
                errands, peer.errands = peer.errands, []
            for errand in errands:
                self._route(errand.asked, errand.keys, errand.answered)
        with deferred():
            for _ in range(min(_ASKERS, len(self._others)) - self._count_askers()):
                self._start("stoker-cluster-ask", self._ask)

    def _count_askers(self) -> int:
        return sum(thread.name == "stoker-cluster-ask" for thread in self._threads)

    def _meet(self, peer: Peer, *, refuse: bool = False) -> None:
        """Try to reach a member."""
        try:
            line = self._connect(peer)
        except DefinitionRefused as error:
            peer.backoff.failed()
            if refuse:
                raise
            self._warn(str(error))
        except LinkError:
            peer.backoff.failed()
        else:
            with self._lock:
                peer.asking, peer.is_full = line, line.welcome.is_full
                if self._closed:
                    line.close()
                peer.backoff.succeeded()

    def _connect(self, peer: Peer) -> Line:
        member, version = peer.member, self._view.owners.version
        return Line(member.address, self._membership.token, self._definition, version)

    def _lose(self, peer: Peer) -> None:
        with self._lock:
            if peer.is_alive:
                peer.lost()
            self._changed.notify_all()  # it is tried again in time
        self._tell()

    def _tell(self) -> None:
        view = self._view
        alive = sum(peer is None or peer.is_alive for peer in view.peers)
        self._on_change(len(view.peers), alive, view.owners.version)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}. It is left out", CacheWarning)
