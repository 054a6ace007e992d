"""A cache partitioned over a cluster: each item is stored by one member."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from stoker.basics.fingerprint import Fingerprint
from stoker.cache import location
from stoker.cache.counters import DAMAGED, MAP_VERSION, MEMBERS, MEMBERS_ALIVE
from stoker.cache.example_cache import ExampleCache
from stoker.cache.handles import Handle, close_with_worker
from stoker.cache.layout import StoredItem, checksum_of
from stoker.cache.location import LEAST_BYTES, Limit
from stoker.cache.store import MISSING
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.cluster_view import HOME
from stoker.cluster.keeper.client import Record
from stoker.cluster.members.membership import Membership
from stoker.cluster.node_client import NodeClient
from stoker.cluster.pending import Found, PendingGet
from stoker.cluster.remote_node import key_of
from stoker.errors import CacheError
from stoker.replicas.thread_safety import thread_safe
from stoker.schedule.owners import OwnerMap
from stoker.stats import CacheCounts, CacheStats
from stoker.transport import codec

Join = Callable[[CacheSpec, Limit, str | None], Membership]
"""Joins the cluster of a specification; limit and folder apply to a store made on this host."""


class PendingLookups:
    """Lookups that a run has sent to other members ahead of use; any thread may call it.

    Args:
        cache: the run's cache.
    """

    def __init__(self, cache: PartitionedCache) -> None:
        self._cache = cache
        self._asked: dict[bytes, list[PendingGet]] = {}
        self._lock = threading.RLock()  # finalisers may close
        self._closed = False

    def expect(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        """Start to look up items that this host lacks; each is for one ``find``. Returns at once.

        Another thread calls ``on_missing`` with the items that no member has.
        """
        asked = self._cache.ask(keys, on_missing)
        if asked is None:
            return
        with self._lock:
            if not self._closed:
                for key in keys:
                    self._asked.setdefault(key, []).append(asked)

    def find(self, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[Any]:
        """Return items as ``ExampleCache.find`` does; waits for the expected ones."""
        waiting: dict[bytes, PendingGet] = {}
        with self._lock:
            for key in keys:
                asked = self._asked.get(key)
                if asked:
                    waiting[key] = asked.pop(0)
                    if not asked:
                        del self._asked[key]
        answers = {asked: asked.wait() for asked in set(waiting.values())}
        gathered = {key: answers[asked].found.get(key) for key, asked in waiting.items()}
        late = sum(key in answers[asked].late for key, asked in waiting.items())
        return self._cache.find_gathered(keys, sizes, gathered, late)

    def close(self) -> None:
        """Drop all lookups whose items were not taken."""
        with self._lock:
            self._closed = True
            self._asked.clear()


@thread_safe
class PartitionedCache(ExampleCache):
    """A cache over several nodes; picklable, and connects to the others in each process.

    The store on this host is looked up first, without anybody in the way. What it does not have is
    asked for at the other members (``node_client``). On a host without a member nothing is kept: a
    store of least size holds the counts.

    Args:
        limit: the size of this host's store, where the job starts the keepers itself.
        join: joins the cluster.
        definition: the cache's specification, the same on all nodes.
        path: the folder of the store on this host, or None.
        describes: the contents, for people.
    """

    is_shared_by_nodes = True

    def __init__(
        self,
        limit: Limit,
        *,
        join: Join,
        definition: CacheSpec,
        path: str | os.PathLike[str] | None,
        keep: bool | None,
        describes: str,
        admit: str,
        on_damage: str,
    ) -> None:
        if admit != "first":
            raise ValueError("a cache over several nodes admits what comes first: leave out admit=")
        super().__init__(
            limit,
            path=path,
            keep=keep,
            identity=f"cluster {definition.digest().hex()}",
            describes=describes,
            examples=definition.examples,
            admit=admit,
            on_damage=on_damage,
        )
        self._join = join
        self._definition = definition
        self._digest = definition.digest()
        self._path = None if path is None else os.fspath(path)
        self._membership: Membership | None = None

    def _begin(self) -> None:
        super()._begin()
        self._peers: NodeClient | None = None

    def _begin_admission(self) -> None:
        super()._begin_admission()  # again in a forked child, where locks may be held
        self._peers_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        mine = ("_peers", "_peers_lock", "_join")
        return {name: value for name, value in super().__getstate__().items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._membership is not None:
            self._settle(self._membership)  # another node's store may be the near one now

    def open(self) -> bool:
        """Join the cluster, once, and open the store on this host.

        Raises CacheError where there is no cluster to join, or it keeps another cache.
        """
        if self._membership is None:
            self._settle(self._join(self._definition, self.limit, self._path))
        is_first = super().open()
        self._reached()
        return is_first

    def _settle(self, membership: Membership) -> None:
        """Use this host's store, or a small one for the counts."""
        if membership.folder is not None:
            self.folder = membership.folder
        else:
            name = f"counts-{self._digest.hex()}"
            self.folder = os.path.join(location.memory_folder(), name)
            self.temporary = True
        self.in_memory = location.is_in_memory(self.folder)
        self._has_compared_size = True
        self._membership = membership

    def key(self, fingerprint: Fingerprint, place: int | str) -> bytes:
        """Return an item's key, the same on all nodes; it depends on a file's size."""
        version = 0 if fingerprint.changed_ns else fingerprint.version
        told = (self._digest, fingerprint.size_bytes, version, fingerprint.label)
        if isinstance(place, str):
            place = xxhash.xxh3_64_intdigest(place.encode("utf-8", "surrogateescape"))
        return key_of(place, xxhash.xxh3_64_digest(msgspec.msgpack.encode(told)))

    def ask(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None
    ) -> PendingGet | None:
        """Ask the other members for items; None where there is no store, or it is closed."""
        peers = self._reached()
        return None if peers is None else peers.ask(keys, on_missing)

    def find(self, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[Any]:
        return self.find_gathered(keys, sizes, {})

    def find_gathered(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None,
        gathered: Mapping[bytes, Found | None],
        late: int = 0,
    ) -> list[Any]:
        """Return items as ``find`` does; the ``gathered`` ones are not looked up again.

        ``late``: for how many of these no answer came in time.
        """
        here = [at for at, key in enumerate(keys) if key not in gathered]
        values: list[Any] = [MISSING] * len(keys)
        asked = [keys[at] for at in here]
        near, saved_bytes = self._look_up(asked, sizes and [sizes[at] for at in here])
        for at, value in zip(here, near, strict=True):
            values[at] = value
        found = dict(gathered)
        missing = [keys[at] for at in here if values[at] is MISSING]
        if missing and (peers := self._reached()) is not None:
            answer = peers.ask(missing).wait()
            found |= answer.found
            late += len(answer.late)
        peer_hits = peer_bytes = 0
        for at, key in enumerate(keys):
            got = found.get(key) if values[at] is MISSING else None
            value = None if got is None else self._read(got)
            if got is not None and value is not None:
                values[at] = value[0]
                size = len(got.record.data)
                peer_hits, peer_bytes = peer_hits + 1, peer_bytes + size
                saved_bytes += sizes[at] if sizes and sizes[at] >= 0 else size
        misses = sum(value is MISSING for value in values)
        self.count(
            hits=len(keys) - misses,
            misses=misses,
            saved_bytes=saved_bytes,
            peer_hits=peer_hits,
            peer_bytes=peer_bytes,
            peer_timeouts=late,
        )
        return values

    def _read(self, found: Found) -> tuple[Any] | None:
        """Return a member's item, and store it where it belongs; None if it is damaged."""
        record = found.record
        try:
            if checksum_of(record.key, record.data) != record.checksum:
                raise ValueError("another checksum")
            value = codec.decode(memoryview(record.data))
        except codec.UnknownType:
            return None
        except ValueError:  # Damaged among them
            self.count(damaged=1)
            return None
        peers = self._reached()
        to = None if peers is None else peers.place(record.key, before=found.member)
        if to is not None:
            self._bring(to, Record(record.key, bytes(record.data), record.checksum))
        return (value,)

    @property
    def takes(self) -> bool:
        """Whether any store, here or at other members, has room."""
        peers = self._reached()
        return peers is not None and peers.have_room

    def _enter(self, item: StoredItem) -> bool:
        peers = self._reached()
        to = HOME if peers is None else peers.place(item.key)
        if to == HOME:
            return super()._enter(item)
        if to is None:
            return False
        data = b"".join(item.record)
        return self._bring(to, Record(item.key, data, checksum_of(item.key, data)))

    def _bring(self, to: str, record: Record) -> bool:
        """Store an item at the member that it belongs to; False if that is too slow."""
        handle, peers = self._opened(), self._reached()
        if handle is None or peers is None:
            return False
        if to == HOME:
            return handle.writer.offer(_stored(record, self._user))
        return peers.bring(record)

    @property
    def _limit_to_make(self) -> Limit:
        return LEAST_BYTES

    def gather(self) -> PendingLookups:
        return PendingLookups(self)

    def flush(self, timeout_s: float = 5.0) -> bool:
        peers = self._peers
        brought = peers is None or not peers.is_current or peers.flush(timeout_s)
        return super().flush(timeout_s) and brought

    def stats(self, since: CacheCounts | None = None) -> CacheStats:
        found = super().stats(since)
        handle = self._handle
        if handle is None or not handle.is_alive:
            return found
        head = handle.store.counters.head
        return dataclasses.replace(
            found,
            members=int(head[MEMBERS]),
            members_alive=int(head[MEMBERS_ALIVE]),
            map_version=int(head[MAP_VERSION]),
        )

    @property
    def node(self) -> str:
        """The name of the member on this host; empty where there is none."""
        membership = self._membership
        return "" if membership is None else membership.home or ""

    def owner_map(self) -> OwnerMap:
        """Return this process's current map."""
        peers = self._reached()
        return OwnerMap.of((), 0) if peers is None else peers.owner_map

    def _reached(self) -> NodeClient | None:
        """Return this process's client of the other members; None where there is no store."""
        peers = self._peers
        if peers is not None and peers.is_current:
            return peers
        handle, membership = self._opened(), self._membership
        if handle is None:
            return None
        if membership is None:
            raise CacheError("the cluster was not joined")
        with self._peers_lock:
            if self._peers is None or not self._peers.is_current:
                peers = _reach(membership, self._definition, handle, self._user)
                self._peers = peers
                weakref.finalize(self, peers.close)
                close_with_worker(peers.close)
            return self._peers


def _stored(record: Record, user: tuple[int, int]) -> StoredItem:
    return StoredItem(record.key, [bytes(record.data)], len(record.data), user)


def _reach(
    membership: Membership, definition: CacheSpec, handle: Handle, user: tuple[int, int]
) -> NodeClient:
    """Connect to the other members. Their callbacks hold no reference to the cache."""
    store = handle.store
    has_home = membership.home is not None

    def has_room() -> bool:
        if not has_home or not handle.is_alive or store.is_full:
            return False
        return not store.counters.head[DAMAGED]

    def keep(record: Record) -> None:
        if not handle.is_alive or not handle.writer.offer(_stored(record, user)):
            refuse([record])

    def refuse(records: Sequence[Record]) -> None:
        size = sum(len(record.data) for record in records)
        if handle.is_alive:
            count = len(records)
            store.counters.add(
                user, admitted=-count, admitted_bytes=-size, refused=count, refused_bytes=size
            )

    def note(members: int, alive: int, version: int) -> None:
        if handle.is_alive:
            head = store.counters.head
            head[MEMBERS], head[MEMBERS_ALIVE], head[MAP_VERSION] = members, alive, version

    return NodeClient(
        membership,
        definition,
        home_has_room=has_room,
        keep=keep,
        on_refused=refuse,
        on_change=note,
    )
