"""One process's client of the other members: it looks items up there and sends new ones.

Three kinds of threads, all of this process: a few ask (``fetch_queue``), one brings
(``replicate_queue``), one, here, looks after those that do not answer and after the membership.
Nobody waits for a member that is known to be dead: it is tried again aside, later each time. Nobody
waits for one that has just died for longer than a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from stoker.basics.process import OwningProcess
from stoker.basics.signals import deferred
from stoker.basics.warn import warn
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.cluster_view import ClusterView
from stoker.cluster.fetch_queue import FetchQueue
from stoker.cluster.keeper.client import DefinitionRefused, Record
from stoker.cluster.members.membership import Members, Membership
from stoker.cluster.pending import PendingGet
from stoker.cluster.remote_node import MemberMap, RemoteNode
from stoker.cluster.replicate_queue import ReplicateQueue
from stoker.errors import CacheError, CacheWarning
from stoker.schedule.owners import OwnerMap
from stoker.transport.link import LinkError, LinkRefused

# Members change by minutes: a second's delay costs a second of lookups that miss.
_REFRESH_S = 1.0
# Threads, one for each keeper that is waited for; more would only share the network. Chosen, not
# measured.
_ASKERS = 8
# As long as a user waits without a word for items that are still to be brought.
_JOIN_S = 5.0


class NodeClient:
    """The other members of a cluster, for one process.

    Args:
        membership: lists them.
        definition: the specification of this process's cache.
        home_has_room: whether this host's store has room.
        keep: stores an item on this host.
        on_refused: called with the items that were taken for other members, and that none stored.
        on_change: called with the number of members, the number of others that answer, and the
            map's version.

    Raises DefinitionRefused where a member keeps another cache.
    """

    def __init__(
        self,
        membership: Membership,
        definition: CacheSpec,
        *,
        home_has_room: Callable[[], bool],
        keep: Callable[[Record], None],
        on_refused: Callable[[Sequence[Record]], None],
        on_change: Callable[[int, int, int], None],
    ) -> None:
        self._membership = membership
        self._owner = OwningProcess()
        self._has_warned = False
        self._members = Members(0, ())
        self._neighbours = ClusterView(membership.token, definition, home_has_room, on_change)
        self._asking = FetchQueue(self._neighbours)
        self._bringing = ReplicateQueue(self._neighbours, keep, on_refused)
        self._threads: list[threading.Thread] = []
        self._adopt(membership.members())
        for peer in self._neighbours.all:
            self._meet(peer, refuse=True)
        self._neighbours.tell()
        with deferred():
            self._start("stoker-cluster", self._look_after)
            self._start("stoker-cluster-bring", self._bringing.run)

    @property
    def is_current(self) -> bool:
        """Whether it can be used: it is open, and was made by this process."""
        return self._owner.is_current and not self._neighbours.is_closed

    @property
    def owner_map(self) -> OwnerMap:
        """The owner of each item, by the members known now."""
        return self._neighbours.view.owners

    @property
    def have_room(self) -> bool:
        """Whether any of them, or this host's store, has room."""
        return self._neighbours.have_room

    def ask(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> PendingGet:
        """Begin to ask for items that are not on this host; returns at once."""
        return self._asking.ask(keys, on_missing)

    def place(self, key: bytes, before: str | None = None) -> str | None:
        """Return the member that should store an item: its name, ``HOME``, or None for none.

        With ``before``, only members that rank before that one.
        """
        return self._neighbours.place(key, before)

    def bring(self, record: Record) -> bool:
        """Queue an item for the member that it belongs to; False if the queue is full."""
        return self._bringing.offer(record)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued items are stored, or refused; False after the timeout."""
        return self._bringing.flush(timeout_s)

    def close(self) -> None:
        """Send queued items for at most 5 s, then end connections and threads.

        Does nothing in a forked child.
        """
        if not self.is_current:
            return
        if threading.current_thread() not in self._threads:
            self.flush(_JOIN_S)
        neighbours = self._neighbours
        with neighbours.lock:
            neighbours.is_closed = True
            neighbours.changed.notify_all()
            errands = [errand for peer in neighbours.all for errand in peer.errands]
            for peer in neighbours.all:
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

    def _look_after(self) -> None:
        neighbours = self._neighbours
        refresh_s = time.monotonic() + _REFRESH_S
        while True:
            with neighbours.lock:
                due_s = [peer.backoff.due_s for peer in neighbours.all if not peer.is_alive]
                wait_s = min([refresh_s, *due_s]) - time.monotonic()
                if neighbours.changed.wait_for(lambda: neighbours.is_closed, max(0.0, wait_s)):
                    return
            if time.monotonic() >= refresh_s:
                try:
                    self._adopt(self._membership.members())
                except CacheError as error:
                    self._warn(str(error))
                refresh_s = time.monotonic() + _REFRESH_S
            for peer in neighbours.all:
                if peer.backoff.is_due and not neighbours.is_closed:
                    self._meet(peer)
            neighbours.tell()

    def _adopt(self, found: Members) -> None:
        home = self._membership.home
        if found == self._members:
            return
        self._members = found
        owners = OwnerMap.of(found.members, found.version)
        neighbours = self._neighbours
        known = {peer.member: peer for peer in neighbours.all}
        peers = [
            None if member.name == home else known.pop(member, None) or RemoteNode(member)
            for member in owners.members
        ]
        with neighbours.lock:
            neighbours.view = MemberMap(owners, peers)
        for peer in known.values():
            peer.lost()
            self._asking.take_from(peer)
        with deferred():
            for _ in range(min(_ASKERS, len(neighbours.all)) - self._count_askers()):
                self._start("stoker-cluster-ask", self._asking.run)

    def _count_askers(self) -> int:
        return sum(thread.name == "stoker-cluster-ask" for thread in self._threads)

    def _meet(self, peer: RemoteNode, *, refuse: bool = False) -> None:
        neighbours = self._neighbours
        try:
            line = neighbours.connect(peer)
        except DefinitionRefused as error:
            peer.backoff.failed()
            if refuse:
                raise
            self._warn(str(error))
        except LinkRefused as error:
            peer.backoff.failed()
            self._warn(str(error))
        except LinkError:
            peer.backoff.failed()
        else:
            with neighbours.lock:
                peer.asking, peer.is_full = line, line.welcome.is_full
                if neighbours.is_closed:
                    line.close()
                peer.backoff.succeeded()

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}. It is left out", CacheWarning)
