"""The keeper's server: it serves one node's store to the processes of the other nodes.

Each connection has a thread of its own. Requests are answered one after another: a process has one
connection for lookups and one for storing items, so that no lookup waits for a write. Views of the
store are collected first and sent when its transaction has ended.

The first process that connects sets the store's specification (``CacheSpec``); a process with
another one is refused.
"""

from __future__ import annotations

import functools
import os
import threading
import time

import numpy as np

from stoker.basics.warn import warn
from stoker.cache import inventory, location, store_dir
from stoker.cache.counters import ITEMS, PAYLOAD_BYTES, USED_BYTES
from stoker.cache.handles import HANDLES, Handle
from stoker.cache.layout import StoredItem, checksum_of
from stoker.cache.store import Busy
from stoker.cache.store_dir import boot_id
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.keeper import protocol
from stoker.errors import CacheError, CacheWarning
from stoker.transport.link import Buffer, Link, LinkError, split_address
from stoker.transport.listener import Listener
from stoker.transport.tls import host_tls

# Of one reply, unless a single item is larger: the rest is asked for again. bench/cluster.py:
# replies of 21 items of 110 KB have 2 MB.
_REPLY_BYTES = 64 << 20
# A member sends its cache's definition at once; a busy host may take seconds. Chosen, not measured.
_GREET_S = 10.0
# As long as another process's commit of 1 MiB, some ten items of 110 KB at 36 us each, may last.
_BUSY_S = 0.002
# On whose account items are stored: members that bring items count them themselves.
_NOBODY = (1, 1)


class Keeper:
    """Serves a store; makes it, or joins an existing one.

    Args:
        address: where to listen, ``host:port``; port 0: any that is free.
        token: the cluster's secret.
        limit: the size of a new store; as in ``.cache()``.
        folder: the store's folder on a local disk, which stays; None: a store in memory.
        insecure: do not encrypt connections: the network is trusted.

    Attributes:
        folder: the store's folder.
        limit_bytes: its budget.

    Raises CacheError where the store cannot be made, OSError where the address is not free,
    TokenError where the TLS key cannot be read.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        *,
        limit: location.Limit = "auto",
        folder: str | None = None,
        insecure: bool = False,
    ) -> None:
        host, port = split_address(address)
        self._handle = _open(folder, limit, address)
        self._store = self._handle.store
        self.folder = self._handle.store_dir.folder
        self.limit_bytes = self._store.limit_bytes
        self._definition: CacheSpec | None = None
        self._map_version = 0
        self._lock = threading.Lock()
        try:
            self._listener = Listener(
                host, port, token, protocol.PURPOSE, self._serve, tls=host_tls(), insecure=insecure
            )
        except BaseException:
            HANDLES.release(self._handle)
            raise
        self.address = self._listener.address

    def close(self) -> None:
        """End all connections, and leave the store."""
        self._listener.close()
        HANDLES.release(self._handle)

    def _serve(self, link: Link) -> None:
        header, _ = link.receive(_no_body, wait_s=_GREET_S)
        hello = protocol.decode_request(header)
        if not isinstance(hello, protocol.Meet):
            raise LinkError(f"{link.peer} does not say what it caches")
        differences = self._agree(hello)
        if differences:
            link.send(protocol.encode(protocol.Differs(hello.id, differences)))
            return
        link.send(
            protocol.encode(
                protocol.Met(
                    hello.id, boot_id(), self.folder, self.limit_bytes, self._store.is_full
                )
            )
        )
        while True:
            header, body = link.receive(_place)
            request = protocol.decode_request(header)
            match request:
                case protocol.Get():
                    self._get(link, request)
                case protocol.Put():
                    self._put(link, request, body)
                case protocol.Look():
                    self._look(link, request)
                case _:
                    raise LinkError(f"{link.peer} says hello twice")

    def _agree(self, hello: protocol.Meet) -> str:
        """Adopt the first process's specification; return another one's differences from it."""
        with self._lock:
            if self._definition is None:
                self._definition = hello.definition
            self._map_version = max(self._map_version, hello.map_version)
            return hello.definition.differences(self._definition)

    def _get(self, link: Link, request: protocol.Get) -> None:
        sizes: list[int] = []
        checksums: list[int] = []
        parts: list[Buffer] = []
        total = 0
        for found in self._store.records(protocol.split_keys(request.keys)):
            if found is None:
                sizes.append(-1)
                checksums.append(0)
                continue
            checksum, record = found
            if parts and total + len(record) > _REPLY_BYTES:
                break
            sizes.append(len(record))
            checksums.append(checksum)
            parts.append(record)
            total += len(record)
        link.send(protocol.encode(protocol.Got(request.id, sizes, checksums)), *parts)

    def _put(self, link: Link, request: protocol.Put, body: memoryview) -> None:
        keys = protocol.split_keys(request.keys)
        records = protocol.split_body(body, request.sizes)
        if not len(keys) == len(records) == len(request.checksums):
            raise LinkError(f"{link.peer} brings items without keys")
        items = [
            StoredItem(key, [bytes(record)], len(record), _NOBODY)
            for key, record, checksum in zip(keys, records, request.checksums, strict=True)
            if record is not None and checksum_of(key, record) == checksum
        ]
        self._add(items)
        there = self._store.holds(keys)
        refused = [place for place, is_there in enumerate(there) if not is_there]
        link.send(protocol.encode(protocol.Stored(request.id, refused, self._store.is_full)))

    def _add(self, items: list[StoredItem]) -> None:
        while not self._store.is_full:
            try:
                self._store.add(items)
            except Busy:
                time.sleep(_BUSY_S)
            except OSError as error:  # it is noted: nothing enters any more
                warn(
                    f"the cache in {self.folder} admits nothing more: {error}. What is in it "
                    "stays in use",
                    CacheWarning,
                )
                return
            else:
                return

    def _look(self, link: Link, request: protocol.Look) -> None:
        head = self._store.counters.head
        link.send(
            protocol.encode(
                protocol.Looked(
                    request.id,
                    int(head[ITEMS]),
                    int(head[PAYLOAD_BYTES]),
                    int(head[USED_BYTES]),
                    self.limit_bytes,
                    self._store.is_full,
                    self._map_version,
                )
            )
        )


def _open(folder: str | None, limit: location.Limit, address: str) -> Handle:
    """Open a keeper's store; make it if there is none."""
    if folder is None:
        name = "keeper-" + "".join(c if c.isalnum() else "-" for c in address)
        if address.endswith(":0"):
            name += f"-{os.getpid()}"
        path = os.path.join(location.make_memory_folder(), name)
    else:
        path = os.path.realpath(os.path.expanduser(folder))
        location.check_local(path)
    in_memory = location.is_in_memory(path)
    inventory.sweep(path)
    join = functools.partial(
        store_dir.join,
        path,
        describes=f"a keeper's part ({address})",
        temporary=in_memory,
        on_damage="rebuild",
    )

    def join_or_make() -> store_dir.StoreDir | None:
        found = join(limit_bytes=None)
        if found is None:
            limit_bytes = location.resolve_limit(limit, path, in_memory=in_memory)
            found = join(limit_bytes=limit_bytes) if limit_bytes else None
        return found

    try:
        with HANDLES.lock:
            found = HANDLES.get(path, join_or_make)
    except OSError as error:
        raise location.cannot_make(path, error, in_memory=in_memory) from error
    if found is None:
        raise CacheError(f"there is no room for a cache in {os.path.dirname(path)}")
    return found


def _no_body(header: bytes, body_bytes: int) -> memoryview:
    if body_bytes:
        raise LinkError("a body where there is none")
    return memoryview(bytearray())


def _place(header: bytes, body_bytes: int) -> memoryview:
    """Return memory for a request's body, if the request announces one."""
    if body_bytes:
        request = protocol.decode_request(header)
        told = isinstance(request, protocol.Put) and sum(request.sizes) == body_bytes
        if not told:
            raise LinkError(f"{body_bytes} bytes that the header does not tell of")
        if body_bytes > protocol.MAX_PUT_BYTES and len(request.sizes) > 1:  # type: ignore[union-attr]
            raise LinkError(f"{body_bytes} bytes are too many for a request")
    # Not yet of the machine's memory: who announces much and sends little takes little.
    return np.empty(body_bytes, np.uint8).data
