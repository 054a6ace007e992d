"""The cache server's server: it serves one node's store to the processes of the other nodes.

Each connection has its own thread, which answers requests one after another. A client has one
connection for lookups and one for storing items, so no lookup waits for a write. The server
collects views of the store first, and sends them after the store's transaction has ended.

The first client that connects sets the store's specification (``CacheSpec``). A client with another
one is refused.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from stoker.basics.warn import warn
from stoker.cache import inventory, location, store_dir
from stoker.cache.counters import NEWEST_NS
from stoker.cache.handles import HANDLES, Handle
from stoker.cache.layout import StoredItem, checksum_of
from stoker.cache.store import StoreLocked
from stoker.cache.store_dir import boot_id
from stoker.cluster import cache_protocol as protocol
from stoker.cluster.cache_spec import CacheSpec
from stoker.errors import CacheError, CacheWarning
from stoker.transport.link import Buffer, Link, LinkError, split_address
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret

# The most bytes in one reply, unless a single item is larger; the client requests the rest again.
# bench/cluster.py: replies of 21 items of 110 KB have 2 MB.
_REPLY_BYTES = 64 << 20
# How long a client may take to send its specification. It does so at once, but a busy host may take
# seconds. Chosen, not measured.
_HELLO_S = 10.0
# The wait before a busy store is tried again: about as long as another process's commit of 1 MiB
# (ten items of 110 KB at 36 us each) may take.
_BUSY_S = 0.002
# How long new items wait for another writer of this host: less than those who sent them wait
# (``cache_connection.PUT_DEADLINE_S``), so that they are told.
_LOCKED_S = 4.0
# The account for items that clients send: each client counts its own items itself.
_NO_USER = (1, 1)


class CacheServer:
    """Serves a store. It opens an existing store, or makes a new one.

    Args:
        address: where to listen, ``host:port``; port 0 for any free port.
        token: the cluster's secret.
        limit: the size of a new store, as in ``.cache()``.
        folder: a folder on a local disk, which is kept; None for a store in memory.
        insecure: do not encrypt connections: the user trusts the network. Clients must say so, too.

    Attributes:
        folder: the store's folder.
        limit_bytes: the store's size limit.

    Raises CacheError if the store cannot be made, OSError if the address is not free, TokenError if
    a certificate cannot be read, ImportError if cryptography is missing.
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
        self._spec: CacheSpec | None = None
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()
        try:
            secret = Secret.of_host(token, insecure=insecure)
            self._listener = Listener(host, port, secret, protocol.PURPOSE, self._serve)
        except BaseException:
            HANDLES.release(self._handle)
            raise
        self.address = self._listener.address

    def close(self) -> None:
        """End all connections, and leave the store."""
        self._listener.close()
        HANDLES.release(self._handle)

    def _serve(self, link: Link) -> None:
        header, _ = link.receive(_refuse_body, wait_s=_HELLO_S)
        hello = protocol.decode_request(header)
        if not isinstance(hello, protocol.CacheHello):
            raise LinkError(f"{link.peer} did not send its specification first")
        differences = self._check_spec(hello)
        if differences:
            link.send(protocol.encode(protocol.SpecDiffers(differences)))
            return
        link.send(
            protocol.encode(
                protocol.CacheWelcome(
                    boot_id(),
                    self.folder,
                    self.limit_bytes,
                    self._store.is_full,
                    self._started_ns,
                )
            )
        )
        while True:
            header, body = link.receive(_allocate_body)
            request = protocol.decode_request(header)
            match request:
                case protocol.GetRequest():
                    self._get(link, request)
                case protocol.PutRequest():
                    self._put(link, request, body)
                case _:
                    raise LinkError(f"{link.peer} sent its specification twice")

    def _check_spec(self, hello: protocol.CacheHello) -> str:
        """Adopt the first client's specification; return how another one differs, "" if not.

        A client with the same one may know of a newer member: the processes of this host look for
        it when they see that in the store's counters.
        """
        with self._lock:
            if self._spec is None:
                self._spec = hello.spec
            differences = hello.spec.differences(self._spec)
            head = self._store.counters.head
            if not differences and hello.newest_ns > head[NEWEST_NS]:
                head[NEWEST_NS] = hello.newest_ns
            return differences

    def _get(self, link: Link, request: protocol.GetRequest) -> None:
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
        link.send(protocol.encode(protocol.GetReply(sizes, checksums)), *parts)

    def _put(self, link: Link, request: protocol.PutRequest, body: memoryview) -> None:
        keys = protocol.split_keys(request.keys)
        records = protocol.split_body(body, request.sizes)
        if not len(keys) == len(records) == len(request.checksums):
            raise LinkError(f"{link.peer} sent items without keys")
        items = [
            StoredItem(key, [bytes(record)], len(record), _NO_USER)
            for key, record, checksum in zip(keys, records, request.checksums, strict=True)
            if record is not None and checksum_of(key, record) == checksum
        ]
        self._add(items)
        held = self._store.holds(keys)
        refused = [index for index, is_held in enumerate(held) if not is_held]
        link.send(protocol.encode(protocol.PutReply(refused, self._store.is_full)))

    def _add(self, items: list[StoredItem]) -> None:
        until_s = time.monotonic() + _LOCKED_S
        while not self._store.is_full:
            try:
                self._store.add(items)
            except StoreLocked:
                if time.monotonic() > until_s:  # its writer may be stopped for good
                    return
                time.sleep(_BUSY_S)
            except OSError as error:  # the store has marked itself as full
                warn(
                    f"the cache in {self.folder} stores no more examples: {error}. The examples "
                    "in it are still used",
                    CacheWarning,
                )
                return
            else:
                return


def _open(folder: str | None, limit: location.Limit, address: str) -> Handle:
    """Open a cache server's store, or make it."""
    if folder is None:
        name = "server-" + "".join(c if c.isalnum() else "-" for c in address)
        if address.endswith(":0"):
            name += f"-{os.getpid()}"
        path = os.path.join(location.make_memory_folder(), name)
    else:
        path = location.local_folder(folder)

    def join_or_make() -> store_dir.StoreDir | None:
        describes = f"a cache server's part ({address})"
        temporary = location.is_in_memory(path)
        return inventory.join_or_make(path, limit, describes=describes, temporary=temporary)[0]

    with HANDLES.lock:
        found = HANDLES.get(path, join_or_make)
    if found is None:
        raise CacheError(
            f"{os.path.dirname(path)} has no room for a cache: free some space there, or choose "
            "another folder"
        )
    return found


def _refuse_body(header: bytes, body_bytes: int) -> memoryview:
    if body_bytes:
        raise LinkError("the first message has a body, but must not")
    return memoryview(bytearray())


def _allocate_body(header: bytes, body_bytes: int) -> memoryview:
    """Return memory for a request's body. Raises LinkError if the request does not announce it."""
    if body_bytes:
        request = protocol.decode_request(header)
        is_announced = isinstance(request, protocol.PutRequest) and sum(request.sizes) == body_bytes
        if not is_announced:
            raise LinkError(f"the body has {body_bytes} bytes, but the header says otherwise")
        if body_bytes > protocol.MAX_PUT_BYTES and len(request.sizes) > 1:  # type: ignore[union-attr]
            raise LinkError(f"the body has {body_bytes} bytes, which is too many for a request")
    # The kernel assigns pages as they are written, so a client that announces a large body and
    # sends little takes little memory.
    return np.empty(body_bytes, np.uint8).data
