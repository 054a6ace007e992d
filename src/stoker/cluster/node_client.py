"""One process's client of the other members: it fetches items from them and sends them new ones.

Each process that uses the cache has three kinds of threads. A few send lookups (``fetch_queue``),
one sends new items (``replicate_queue``), and one follows the membership and tries dead members
again. No lookup waits for a member that is known to be dead, and none waits longer than a deadline
for a member that has just died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from stoker.basics.future import start_thread
from stoker.basics.process import OwningProcess
from stoker.basics.signals import defer_interrupts
from stoker.basics.warn import warn
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.cluster_view import ClusterView
from stoker.cluster.fetch_queue import FetchQueue
from stoker.cluster.keeper.client import Record, SpecRefused
from stoker.cluster.members.membership import Members, Membership
from stoker.cluster.owners import OwnerMap
from stoker.cluster.pending import PendingGet
from stoker.cluster.remote_node import MemberMap, RemoteNode
from stoker.cluster.replicate_queue import ReplicateQueue
from stoker.errors import CacheError, CacheWarning
from stoker.transport.link import LinkError, LinkRefused

# How often the list of members is read. Members change every few minutes at most; a delay of one
# second costs a second of lookups that miss. Chosen, not measured.
_REFRESH_S = 1.0
# Threads that send lookups, one for each member that is waited for. More threads would only share
# the same network. Chosen, not measured.
_MAX_FETCHERS = 8
# How long closing waits for queued items to be sent. A user would wait so long without an
# explanation. Chosen, not measured.
_JOIN_S = 5.0


class NodeClient:
    """The other members of a cluster, for one process.

    Args:
        membership: lists the members.
        spec: the specification of this process's cache.
        local_has_room: returns whether this host's store has room.
        store_locally: stores an item on this host.
        on_refused: called with items that `put` accepted and no member stored.
        on_change: called with the number of members, the number that answer, and the map's version.
        heard_of_ns: returns when the newest member joined of which this host's keeper has heard.

    Raises SpecRefused if a member holds another cache.
    """

    def __init__(
        self,
        membership: Membership,
        spec: CacheSpec,
        *,
        local_has_room: Callable[[], bool],
        store_locally: Callable[[Record], None],
        on_refused: Callable[[Sequence[Record]], None],
        on_change: Callable[[int, int, int], None],
        heard_of_ns: Callable[[], int],
    ) -> None:
        self._membership = membership
        self._heard_of_ns = heard_of_ns
        self._looked_for_ns = 0
        self._following = threading.Lock()
        self._owner = OwningProcess()
        self._has_warned = False
        self._members = Members(0, ())
        self._cluster = ClusterView(membership.token, spec, local_has_room, on_change)
        self._fetches = FetchQueue(self._cluster)
        self._replication = ReplicateQueue(self._cluster, store_locally, on_refused)
        self._threads: list[threading.Thread] = []
        self._update_members(membership.members(), refuse=True)
        self._cluster.report()
        with defer_interrupts():
            self._start("stoker-cluster", self._maintain)
            self._start("stoker-cluster-put", self._replication.run)

    @property
    def is_current(self) -> bool:
        """True if this process may use it: it is open, and this process made it."""
        return self._owner.is_current and not self._cluster.is_closed

    @property
    def owner_map(self) -> OwnerMap:
        """The current owner of each item."""
        return self._cluster.map.owners

    @property
    def has_room(self) -> bool:
        """True if this host's store, or any live member's, has room."""
        return self._cluster.has_room

    def fetch(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> PendingGet:
        """Request items from other members; returns at once.

        If this host has heard of a new member, that member is looked for first: else items that are
        there would be read from storage, until the next look.

        ``on_missing`` is called by another thread with the keys that no member has.
        """
        if self._heard_of_ns() > max(self._cluster.map.newest_ns, self._looked_for_ns):
            self._look_for_newest()
        return self._fetches.fetch(keys, on_missing)

    def owner_names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the members that own these items if all members are alive."""
        return self._cluster.map.owner_names(keys)

    def choose_store(self, key: bytes, before: str | None = None) -> str | None:
        """Return the name of the member that should store an item, or ``LOCAL``; None if none can.

        With ``before``, only members that rank before that member are considered.
        """
        return self._cluster.choose_store(key, before)

    def put(self, record: Record) -> bool:
        """Queue an item for its owner; False if the queue is full."""
        return self._replication.offer(record)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued items are stored or refused; False after the timeout."""
        return self._replication.flush(timeout_s)

    def close(self) -> None:
        """Send queued items for at most 5 s, then end connections and threads.

        Does nothing in a forked child: connections and threads are its parent's.
        """
        if not self.is_current:
            return
        if threading.current_thread() not in self._threads:
            self.flush(_JOIN_S)
        cluster = self._cluster
        with cluster.lock:
            cluster.is_closed = True
            cluster.changed.notify_all()
            self._fetches.wake()
            queued = [get for node in cluster.others for get in node.queue]
            for node in cluster.others:
                node.close()
        for get in queued:
            get.pending.add_missing(get.keys)
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._threads.append(start_thread(name, run))

    def _maintain(self) -> None:
        cluster = self._cluster
        refresh_s = time.monotonic() + _REFRESH_S
        while True:
            with cluster.lock:
                due_s = [node.backoff.due_s for node in cluster.others if not node.is_alive]
                wait_s = min([refresh_s, *due_s]) - time.monotonic()
                if cluster.changed.wait_for(lambda: cluster.is_closed, max(0.0, wait_s)):
                    return
            if time.monotonic() >= refresh_s:
                with self._following:
                    self._follow_members()
                refresh_s = time.monotonic() + _REFRESH_S
            for node in cluster.others:
                with self._following:
                    if node.backoff.is_due and not cluster.is_closed:
                        self._connect(node, cluster.map.newest_ns)
            cluster.report()

    def _look_for_newest(self) -> None:
        """Look for a member of which this host has heard; once, as it may have gone again."""
        with self._following:
            heard_of_ns = self._heard_of_ns()
            if heard_of_ns <= max(self._cluster.map.newest_ns, self._looked_for_ns):
                return  # another thread has looked meanwhile
            self._follow_members(at_once=True)
            self._looked_for_ns = heard_of_ns  # now: until then other threads wait for the lock
        self._cluster.report()

    def _follow_members(self, *, at_once: bool = False) -> None:
        try:
            self._update_members(self._membership.members(at_once=at_once))
        except CacheError as error:
            self._warn(str(error))

    def _update_members(self, members: Members, *, refuse: bool = False) -> None:
        """Connect to new members, then use the map of all. Raises SpecRefused with ``refuse``."""
        local_member = self._membership.local_member
        if members == self._members:
            return
        owners = OwnerMap.of(members.members, members.version)
        cluster = self._cluster
        left = {node.member: node for node in cluster.others}
        nodes = [
            None if member.name == local_member else left.pop(member, None) or RemoteNode(member)
            for member in owners.members
        ]
        new_map = MemberMap(owners, nodes)
        known = cluster.others
        for node in nodes:
            if node is not None and node not in known:
                self._connect(node, new_map.newest_ns, refuse=refuse)
        with cluster.lock:
            cluster.map = new_map
        self._members = members
        for node in left.values():
            node.mark_lost()
            self._fetches.reroute(node)
        with defer_interrupts():
            for _ in range(min(_MAX_FETCHERS, len(cluster.others)) - self._count_fetchers()):
                self._start("stoker-cluster-fetch", self._fetches.run)

    def _count_fetchers(self) -> int:
        return sum(thread.name == "stoker-cluster-fetch" for thread in self._threads)

    def _connect(self, node: RemoteNode, newest_ns: int, *, refuse: bool = False) -> None:
        cluster = self._cluster
        try:
            client = cluster.connect(node, newest_ns)
        except SpecRefused as error:
            node.backoff.failed()
            if refuse:
                raise
            self._warn(str(error))
        except LinkRefused as error:
            node.backoff.failed()
            self._warn(str(error))
        except LinkError:
            node.backoff.failed()
        else:
            with cluster.lock:
                node.get_client, node.is_full = client, client.welcome.is_full
                if cluster.is_closed:
                    client.close()
                node.backoff.succeeded()

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}. This node is not used", CacheWarning)
