"""One process's client of the other members: it fetches items from them and sends them new ones.

Each item ranks the members (``OwnerMap``) and belongs to the first one that is alive. A process
that lacks an item asks that member and the next one, and then each member that owned the item
before others joined. If none has the item, it is read from storage and stored at the first of the
two that has room. So if a member is lost, each of its items is read from storage once more. If a
member joins or returns, other processes still find its items where they were.

Each process that uses the cache has three kinds of threads. A few send lookups, all keys that wait
for a member in one request. One sends new items. One follows the membership and tries dead members
again. No lookup waits for a member that is known to be dead, and none waits longer than a deadline
for a member that has just died.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from stoker.basics.future import start_thread
from stoker.basics.process import OwningProcess
from stoker.basics.signals import defer_interrupts
from stoker.basics.warn import warn
from stoker.cache.counters import DAMAGED, MAP_VERSION, MEMBERS, MEMBERS_ALIVE, NEWEST_NS
from stoker.cache.handles import Handle
from stoker.cache.layout import StoredItem
from stoker.cache.writer import BatchQueue
from stoker.cluster.cache_connection import CacheConnection, Record, SpecRefused
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Members, Membership
from stoker.cluster.owners import OwnerMap
from stoker.cluster.remote_node import Found, MemberMap, PendingGet, QueuedGet, RemoteNode
from stoker.errors import CacheError, CacheWarning
from stoker.transport.link import LinkError, LinkRefused

# Members that an item may be stored at: its owner, and the next in the ranking, which has the item
# while the owner is full or does not answer.
_MAX_HOLDERS = 2
# How often the list of members is read. Members change every few minutes at most; a delay of one
# second costs a second of lookups that miss. Chosen, not measured.
_REFRESH_S = 1.0
# Threads that send lookups, one for each member that is waited for. More threads would only share
# the same network. Chosen, not measured.
_MAX_FETCHERS = 8
# How long closing waits for queued items to be sent. A user would wait so long without an
# explanation. Chosen, not measured.
_JOIN_S = 5.0

LOCAL = "local"
"""In place of a member: the store on this host."""


class LocalStore:
    """The store on this host, for a client of the other members.

    It refers to the handle, not to the cache: the cache's finalizer closes the client.

    Args:
        handle: the open store.
        user: whose counts it corrects.
        keeps_items: whether it is a member's; else it has the counts alone.
    """

    def __init__(self, handle: Handle, user: tuple[int, int], *, keeps_items: bool) -> None:
        self._handle = handle
        self._counters = handle.store.counters
        self._user = user
        self._keeps_items = keeps_items

    @property
    def has_room(self) -> bool:
        if not self._keeps_items or not self._handle.is_alive or self._handle.store.is_full:
            return False
        return not self._counters.head[DAMAGED]

    @property
    def heard_of_ns(self) -> int:
        """When the newest member joined of which this host's cache server has heard."""
        return int(self._counters.head[NEWEST_NS]) if self._handle.is_alive else 0

    def offer(self, record: Record) -> bool:
        """Queue an item to be stored; False if the queue is full."""
        item = StoredItem(record.key, [bytes(record.data)], len(record.data), self._user)
        return self._handle.is_alive and self._handle.writer.offer(item)

    def count_refused(self, records: Sequence[Record]) -> None:
        """Count items as refused that were counted as admitted, but that no member has stored."""
        if self._handle.is_alive:
            count, size = len(records), sum(len(record.data) for record in records)
            self._counters.add(
                self._user, admitted=-count, admitted_bytes=-size, refused=count, refused_bytes=size
            )

    def note_members(self, members: int, alive: int, version: int) -> None:
        if self._handle.is_alive:
            head = self._counters.head
            head[MEMBERS], head[MEMBERS_ALIVE], head[MAP_VERSION] = members, alive, version


class NodeClient:
    """The other members of a cluster, for one process.

    Code that holds its lock never waits for another node.

    Args:
        membership: lists the members.
        spec: the specification of this process's cache.
        local: this host's store.

    Raises SpecRefused if a member holds another cache.
    """

    def __init__(self, membership: Membership, spec: CacheSpec, local: LocalStore) -> None:
        self._membership = membership
        self._spec = spec
        self.local = local
        self._owner = OwningProcess()
        self._lock = threading.RLock()  # guards all below, but for the membership
        self._changed = threading.Condition(self._lock)  # notified when there is other work
        self._has_lookups = threading.Condition(self._lock)  # wakes a single thread for a lookup
        self._is_closed = False
        self._map = MemberMap(OwnerMap.of((), 0), [])
        self._ready: deque[RemoteNode] = deque()  # those with keys that no thread asks for yet
        self._puts: BatchQueue[Record] = BatchQueue(lambda record: len(record.data))
        self._following = threading.Lock()  # guards the membership
        self._members = Members(0, ())
        self._looked_for_ns = 0
        self._has_warned = False
        self._threads: list[threading.Thread] = []
        self._update_members(membership.members(), refuse=True)
        self._report()
        with defer_interrupts():
            self._start("stoker-cluster", self._maintain)
            self._start("stoker-cluster-put", lambda: self._puts.take_all(self._send_to_owners))

    @property
    def is_current(self) -> bool:
        """True if this process may use it: it is open, and this process made it."""
        return self._owner.is_current and not self._is_closed

    @property
    def has_room(self) -> bool:
        """True if this host's store, or any live member's, has room."""
        return self.local.has_room or any(
            node.is_alive and not node.is_full for node in self._map.others
        )

    def owner_names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the members that own these items if all members are alive."""
        return self._map.owner_names(keys)

    def choose_store(self, key: bytes, before: str | None = None) -> RemoteNode | str | None:
        """Return the member that should store an item, or ``LOCAL``; None if none can.

        With ``before``, only members that rank before the member of that name are considered.
        """
        with self._lock:
            members, alive_count = self._map, 0
            for number in members.ranking(key):
                node = members.nodes[number]
                if members.owners.members[number].name == before:
                    return None
                if node is None and self.local.has_room:
                    return LOCAL
                if node is not None and node.is_alive and not node.is_full:
                    return node
                alive_count += _is_alive(node)
                if alive_count == _MAX_HOLDERS:
                    return None
        return None

    def fetch(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> PendingGet:
        """Request items from other members; returns at once.

        If this host has heard of a new member, that member is looked for first: else items that are
        there would be read from storage, until the next look.

        ``on_missing`` is called by another thread with the keys that no member has.
        """
        if self.local.heard_of_ns > max(self._map.newest_ns, self._looked_for_ns):
            self._look_for_newest()
        pending = PendingGet(keys, on_missing)
        self._route(QueuedGet(pending, list(dict.fromkeys(keys)), frozenset()))
        return pending

    def put(self, record: Record) -> bool:
        """Queue an item for its owner; False if the queue is full."""
        return self._puts.put(record)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued items are stored or refused; False after the timeout."""
        return self._puts.flush(timeout_s)

    def close(self) -> None:
        """Send queued items for at most 5 s, then end connections and threads.

        Does nothing in a forked child: connections and threads are its parent's.
        """
        if not self.is_current:
            return
        if threading.current_thread() not in self._threads:
            self.flush(_JOIN_S)
        self._puts.close()
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            self._has_lookups.notify_all()
            queued = [each for node in self._map.others for each in node.queue]
            for node in self._map.others:
                node.close()
        for pending, keys, _ in queued:
            pending.add_missing(keys)
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._threads.append(start_thread(name, run))

    # -- lookups

    def _send_lookups(self) -> None:
        """Ask members for the keys that wait for them; a thread asks one at a time."""
        while True:
            with self._lock:
                self._has_lookups.wait_for(lambda: self._ready or self._is_closed)
                if self._is_closed:
                    return
                node = self._ready.popleft()
                queued, node.queue = node.queue, []
            self._ask(node, queued)
            with self._lock:
                if node.queue:
                    self._ready.append(node)
                    self._has_lookups.notify()
                else:
                    node.is_busy = False

    def _ask(self, node: RemoteNode, queued: list[QueuedGet]) -> None:
        """Ask a member for all keys that wait for it, in one request."""
        name, client = node.member.name, node.get_client
        try:
            if client is None:
                raise LinkError(f"{name} is not connected")
            records = client.get([key for each in queued for key in each.keys])
        except LinkError:
            self._mark_lost(node)
            for each in queued:
                self._route(each)
            return
        start = 0
        for pending, keys, answered in queued:
            got = records[start : start + len(keys)]
            start += len(keys)
            pending.add_found([Found(record, name) for record in got if record is not None])
            rest = [key for key, record in zip(keys, got, strict=True) if record is None]
            if rest:
                self._route(QueuedGet(pending, rest, answered | {name}))

    def _route(self, queued: QueuedGet) -> None:
        """Queue each key at the next member that may have it; report the rest as missing."""
        pending, keys, answered = queued
        missing: list[bytes] = []
        by_node: dict[RemoteNode, list[bytes]] = {}
        with self._lock:
            for key, node in zip(keys, self._next_holders(keys, answered), strict=True):
                if node is None:
                    missing.append(key)
                else:
                    by_node.setdefault(node, []).append(key)
            for node, node_keys in by_node.items():
                node.queue.append(QueuedGet(pending, node_keys, answered))
                if not node.is_busy:
                    node.is_busy = True
                    self._ready.append(node)
                    self._has_lookups.notify()
        pending.add_missing(missing)

    def _next_holders(
        self, keys: list[bytes], answered: frozenset[str]
    ) -> Iterator[RemoteNode | None]:
        """Yield the next member to ask for each item; None if no more may have it."""
        members = self._map
        owners = members.first(keys) if members.nodes else [0] * len(keys)
        for key, owner in zip(keys, owners, strict=True):
            node = members.nodes[owner] if members.nodes else None
            if answered or node is None or not node.is_alive:
                node = None if self._is_closed else self._next_holder(key, answered)
            yield node

    def _next_holder(self, key: bytes, answered: frozenset[str]) -> RemoteNode | None:
        for number in self._possible_holders(key):
            node = self._map.nodes[number]
            if node is not None and node.is_alive and node.member.name not in answered:
                return node
        return None

    def _possible_holders(self, key: bytes) -> Iterator[int]:
        """Yield the members that may hold an item, the likely ones first.

        They are the first live ones in the ranking, then those that owned the item before others
        joined.
        """
        members = self._map
        alive = (n for n in members.ranking(key) if _is_alive(members.nodes[n]))
        yield from islice(alive, _MAX_HOLDERS)
        yield from members.past_owners(key)

    # -- new items

    def _send_to_owners(self, records: list[Record]) -> None:
        """Send each item to the first member that takes it."""
        by_store: dict[RemoteNode | str | None, list[Record]] = {}
        for record in records:
            by_store.setdefault(self.choose_store(record.key), []).append(record)
        refused: list[Record] = []
        for store, its_records in by_store.items():
            if isinstance(store, RemoteNode):
                refused += self._send_to(store, its_records)
            elif store == LOCAL:
                lost = [record for record in its_records if not self.local.offer(record)]
                self.local.count_refused(lost)
            else:
                self.local.count_refused(its_records)
        if refused:
            self._send_to_owners(refused)

    def _send_to(self, node: RemoteNode, records: list[Record]) -> list[Record]:
        """Send items to a member; return the ones that it refuses, for others."""
        try:
            if node.put_client is None:
                node.put_client = self._connect(node, self._map.newest_ns)
            stored = node.put_client.put(records)
        except (LinkError, SpecRefused):
            self._mark_lost(node)
            return records
        node.is_full = stored.is_full
        refused = [records[at] for at in stored.refused]
        if stored.is_full:
            return refused
        self.local.count_refused(refused)
        return []

    # -- members

    def _maintain(self) -> None:
        """Follow the membership, and try dead members again."""
        refresh_s = time.monotonic() + _REFRESH_S
        while True:
            with self._lock:
                due_s = [node.backoff.due_s for node in self._map.others if not node.is_alive]
                wait_s = min([refresh_s, *due_s]) - time.monotonic()
                if self._changed.wait_for(lambda: self._is_closed, max(0.0, wait_s)):
                    return
            if time.monotonic() >= refresh_s:
                with self._following:
                    self._follow_members()
                refresh_s = time.monotonic() + _REFRESH_S
            for node in self._map.others:
                with self._following:
                    if node.backoff.is_due and not self._is_closed:
                        self._try_node(node, self._map.newest_ns)
            self._report()

    def _look_for_newest(self) -> None:
        """Look for a member of which this host has heard; once, as it may have gone again."""
        with self._following:
            heard_of_ns = self.local.heard_of_ns
            if heard_of_ns <= max(self._map.newest_ns, self._looked_for_ns):
                return  # another thread has looked meanwhile
            self._follow_members(at_once=True)
            self._looked_for_ns = heard_of_ns  # now: until then other threads wait for the lock
        self._report()

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
        known = self._map.others
        left = {node.member: node for node in known}
        nodes = [
            None if member.name == local_member else left.pop(member, None) or RemoteNode(member)
            for member in owners.members
        ]
        new_map = MemberMap(owners, nodes)
        for node in new_map.others:
            if node not in known:
                self._try_node(node, new_map.newest_ns, refuse=refuse)
        with self._lock:
            self._map = new_map
        self._members = members
        for node in left.values():
            node.mark_lost()
            with self._lock:
                queued, node.queue = node.queue, []
            for each in queued:
                self._route(each)
        with defer_interrupts():
            for _ in range(min(_MAX_FETCHERS, len(new_map.others)) - self._count_fetchers()):
                self._start("stoker-cluster-fetch", self._send_lookups)

    def _count_fetchers(self) -> int:
        return sum(thread.name == "stoker-cluster-fetch" for thread in self._threads)

    def _connect(self, node: RemoteNode, newest_ns: int) -> CacheConnection:
        """Connect to a member, and tell it when the newest known member joined.

        Raises LinkError, and SpecRefused if it holds another cache.
        """
        membership = self._membership
        return CacheConnection(
            node.member.address,
            membership.token,
            self._spec,
            newest_ns,
            insecure=membership.insecure,
        )

    def _try_node(self, node: RemoteNode, newest_ns: int, *, refuse: bool = False) -> None:
        """Connect to a member that is new or did not answer."""
        try:
            client = self._connect(node, newest_ns)
        except LinkRefused as error:
            node.backoff.failed()
            self._warn(str(error))
        except LinkError:
            node.backoff.failed()
        except SpecRefused as error:
            node.backoff.failed()
            if refuse:
                raise
            self._warn(str(error))
        else:
            with self._lock:
                node.get_client, node.is_full = client, client.welcome.is_full
                if self._is_closed:
                    client.close()
                node.backoff.succeeded()

    def _mark_lost(self, node: RemoteNode) -> None:
        """Record that a member does not answer."""
        with self._lock:
            if node.is_alive:
                node.mark_lost()
            self._changed.notify_all()  # so that it is tried again when its backoff ends
        self._report()

    def _report(self) -> None:
        alive_count = sum(map(_is_alive, self._map.nodes))
        self.local.note_members(len(self._map.nodes), alive_count, self._map.owners.version)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}. This node is not used", CacheWarning)


def _is_alive(node: RemoteNode | None) -> bool:
    return node is None or node.is_alive
