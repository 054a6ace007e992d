"""A cache partitioned over the nodes of a cluster: one member stores each item."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from stoker.basics.fingerprint import Fingerprint
from stoker.basics.signals import finalize
from stoker.cache import location
from stoker.cache.counters import MAP_VERSION, MEMBERS, MEMBERS_ALIVE
from stoker.cache.example_cache import ExampleCache
from stoker.cache.handles import close_with_worker
from stoker.cache.layout import StoredItem, checksum_of
from stoker.cache.location import LEAST_BYTES, Limit
from stoker.cache.store import MISSING
from stoker.cluster.cache_connection import Record
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Membership
from stoker.cluster.node_client import LOCAL, LocalStore, NodeClient
from stoker.cluster.remote_node import Found, PendingGet, RemoteNode, key_of
from stoker.errors import CacheError
from stoker.stats import CacheCounts, CacheStats
from stoker.transport.codec import UnknownType, decode

Join = Callable[[CacheSpec, Limit, str | None], Membership]
"""Joins the cluster of a specification. The limit and the folder are those of a new store on this
host."""


class PendingLookups:
    """A run's lookups at other members, sent ahead of use. Any thread may call it.

    Args:
        cache: the run's cache.
    """

    def __init__(self, cache: PartitionedCache) -> None:
        self._cache = cache
        self._pending: dict[bytes, list[PendingGet]] = {}
        self._lock = threading.RLock()  # a finalizer may close it in a thread that holds the lock
        self._closed = False

    def expect(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        """Request items that this host lacks, each for one later ``find``. Returns at once.

        Another thread calls ``on_missing`` with the keys that no member has.
        """
        pending = self._cache.fetch(keys, on_missing)
        if pending is None:
            return
        with self._lock:
            if not self._closed:
                for key in keys:
                    self._pending.setdefault(key, []).append(pending)

    def find(self, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[Any]:
        """Return items as ``ExampleCache.find`` does; waits for requested ones."""
        waiting: dict[bytes, PendingGet] = {}
        with self._lock:
            for key in keys:
                pending = self._pending.get(key)
                if pending:
                    waiting[key] = pending.pop(0)
                    if not pending:
                        del self._pending[key]
        answers = {pending: pending.wait() for pending in set(waiting.values())}
        fetched = {key: answers[pending].found.get(key) for key, pending in waiting.items()}
        late = sum(key in answers[pending].late for key, pending in waiting.items())
        return self._cache.find_fetched(keys, sizes, fetched, late)

    def close(self) -> None:
        """Drop all lookups that no ``find`` has used."""
        with self._lock:
            self._closed = True
            self._pending.clear()


class PartitionedCache(ExampleCache):
    """A cache over several nodes. It is picklable; each process connects to the nodes itself.

    `find` looks in this host's store first, directly and not through a cache server. It then asks
    the other members for the rest (``node_client``). A host without a member stores no items: it
    has a store of the least size, for the counters.

    Args:
        limit: the size of this host's store, if the job starts the cache servers itself.
        join: joins the cluster.
        spec: the cache's specification, the same on all nodes.
        path: the folder of the store on this host, or None.
        describes: the contents, for messages.
    """

    is_shared_by_nodes = True

    def __init__(
        self,
        limit: Limit,
        *,
        join: Join,
        spec: CacheSpec,
        path: str | os.PathLike[str] | None,
        keep: bool | None,
        describes: str,
    ) -> None:
        super().__init__(
            limit,
            path=path,
            keep=keep,
            identity=f"cluster {spec.digest().hex()}",
            describes=describes,
            examples=spec.examples,
        )
        self._join = join
        self._spec = spec
        self._digest = spec.digest()
        self._path = None if path is None else os.fspath(path)
        self._membership: Membership | None = None

    def _begin(self) -> None:
        super()._begin()
        self._client: NodeClient | None = None

    def _begin_locks(self) -> None:
        super()._begin_locks()  # runs again in a forked child, where this lock may be held
        self._client_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        per_process = ("_client", "_client_lock")
        return {
            name: value for name, value in super().__getstate__().items() if name not in per_process
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._membership is not None:
            self._use_store(self._membership)  # unpickled on another node, it has another store

    def open(self) -> bool:
        """Join the cluster, once, and open the store on this host.

        Raises CacheError if there is no cluster to join, or if it keeps another cache.
        """
        if self._membership is None:
            self._use_store(self._join(self._spec, self.limit, self._path))
        is_first = super().open()
        self._connected_client()
        return is_first

    def _use_store(self, membership: Membership) -> None:
        """Choose this host's store, or a small one for the counters if it has no member."""
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
        """Return an item's key, which is the same on all nodes.

        It depends on a file's size, but not on its time, which may differ between nodes.
        """
        version = 0 if fingerprint.changed_ns else fingerprint.version
        identity = (self._digest, fingerprint.size_bytes, version, fingerprint.label)
        if isinstance(place, str):
            place = xxhash.xxh3_64_intdigest(place.encode("utf-8", "surrogateescape"))
        return key_of(place, xxhash.xxh3_64_digest(msgspec.msgpack.encode(identity)))

    def fetch(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None
    ) -> PendingGet | None:
        """Request items from the other members; None if there is no store or it is closed."""
        client = self._connected_client()
        return None if client is None else client.fetch(keys, on_missing)

    def find(
        self, keys: Sequence[bytes], sizes: Sequence[int] | None = None, *, lends: bool = False
    ) -> list[Any]:
        return self.find_fetched(keys, sizes, {})

    def find_fetched(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None,
        fetched: Mapping[bytes, Found | None],
        late: int = 0,
    ) -> list[Any]:
        """Return items as ``find`` does, but use the answers that came already.

        Args:
            keys: the items' keys.
            sizes: their files' sizes in bytes, or None.
            fetched: answers of other members by key, None for a missing item; these keys are not
                looked up again.
            late: the number of items whose answer did not come in time.
        """
        local_at = [at for at, key in enumerate(keys) if key not in fetched]
        values: list[Any] = [MISSING] * len(keys)
        local_keys = [keys[at] for at in local_at]
        local, saved_bytes = self._look_up(local_keys, sizes and [sizes[at] for at in local_at])
        for at, value in zip(local_at, local, strict=True):
            values[at] = value
        found = fetched
        missing = [keys[at] for at in local_at if values[at] is MISSING]
        if missing and (client := self._connected_client()) is not None:
            answer = client.fetch(missing).wait()
            found = {**fetched, **answer.found}
            late += len(answer.late)
        used: list[Found] = []
        for at, key in enumerate(keys):
            got = found.get(key) if values[at] is MISSING else None
            value = None if got is None else self._read(got.record)
            if got is not None and value is not None:
                values[at] = value[0]
                used.append(got)
                own_size = sizes[at] if sizes else -1
                saved_bytes += own_size if own_size >= 0 else len(got.record.data)
        self._send_to_owners(used)
        misses = sum(value is MISSING for value in values)
        self.count(
            hits=len(keys) - misses,
            misses=misses,
            saved_bytes=saved_bytes,
            peer_hits=len(used),
            peer_bytes=sum(len(each.record.data) for each in used),
            peer_timeouts=late,
        )
        return values

    def _read(self, record: Record) -> tuple[Any] | None:
        """Decode an item that a member sent.

        Return the value in a tuple; None if the item is damaged or cannot be decoded here.
        """
        try:
            if checksum_of(record.key, record.data) != record.checksum:
                raise ValueError("the checksum differs")
            return (decode(memoryview(record.data)),)
        except UnknownType:
            return None
        except ValueError:  # Damaged is one
            self.count(damaged=1)
            return None

    def _send_to_owners(self, found: Sequence[Found]) -> None:
        """Send items that came from other members than their owners to members that rank before."""
        client = self._connected_client()
        if client is None or not found:
            return
        owners = client.owner_names([each.record.key for each in found])
        for (record, member), owner in zip(found, owners, strict=True):
            target = None if member == owner else client.choose_store(record.key, before=member)
            if target is not None:
                self._send(target, Record(record.key, bytes(record.data), record.checksum))

    @property
    def takes(self) -> bool:
        """True if any store, on this host or at another member, has room."""
        client = self._connected_client()
        return client is not None and client.has_room

    def _enter(self, item: StoredItem) -> bool:
        client = self._connected_client()
        target = LOCAL if client is None else client.choose_store(item.key)
        if target == LOCAL:
            return super()._enter(item)
        if target is None:
            return False
        data = b"".join(item.record)
        return self._send(target, Record(item.key, data, checksum_of(item.key, data)))

    def _send(self, target: RemoteNode | str, record: Record) -> bool:
        """Store an item at ``target``; False if the queue for it is full."""
        client = self._connected_client()
        if client is None:
            return False
        if target == LOCAL:
            return client.local.offer(record)
        return client.put(record)

    @property
    def _limit_to_make(self) -> Limit:
        return LEAST_BYTES

    def batch_lookups(self) -> PendingLookups:
        return PendingLookups(self)

    def flush(self, timeout_s: float = 5.0) -> bool:
        client = self._client
        sent = client is None or not client.is_current or client.flush(timeout_s)
        return super().flush(timeout_s) and sent

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

    def _connected_client(self) -> NodeClient | None:
        """Return this process's client of the other members; connect if there is none.

        Return None if there is no store on this host.
        """
        client = self._client
        if client is not None and client.is_current:
            return client
        handle, membership = self._open_handle(), self._membership
        if handle is None:
            return None
        if membership is None:
            raise CacheError("this process has not joined the cluster: open() was not called")
        with self._client_lock:
            if self._client is None or not self._client.is_current:
                keeps_items = membership.local_member is not None
                local = LocalStore(handle, self._user, keeps_items=keeps_items)
                self._client = client = NodeClient(membership, self._spec, local)
                finalize(self, client.close)
                close_with_worker(client.close)
            return self._client
