"""A client's connection to a cache server: it sends a request, then waits for the reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from stoker.cluster import cache_protocol as protocol
from stoker.cluster.cache_spec import CacheSpec
from stoker.errors import CacheError, TokenError
from stoker.transport.link import Buffer, Link, LinkError, LinkRefused
from stoker.transport.secret import Secret

DEADLINE_S = 0.5
"""How long a cache server may be silent before it counts as dead. Workers wait meanwhile, and then
read
from storage. Chosen, not measured."""
PUT_DEADLINE_S = 5.0
"""How long a cache server may take to store items. No worker waits for that, so it is ten times as
long. Chosen, not measured."""

T = TypeVar("T")


class SpecRefused(CacheError):
    """The cache server's cache has another specification than this process's."""


class Record(NamedTuple):
    """An item in the store's format."""

    key: bytes
    data: bytes | memoryview
    checksum: int
    """The checksum of the key and ``data``; every reader verifies it."""


class CacheConnection:
    """A connection to a cache server; one thread uses it at a time.

    Args:
        address: the cache server's ``host:port``.
        token: the cluster's secret.
        spec: the specification of this process's cache.
        newest_ns: when the newest member that this process knows joined.
        insecure: whether the connection is not encrypted; the cache server must have been told the
            same.

    Attributes:
        welcome: the cache server's reply to the greeting.

    Raises LinkError if no cache server answers in time, SpecRefused if its cache has another
    specification, ImportError if cryptography is missing. After any error the connection cannot be
    used.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        spec: CacheSpec,
        newest_ns: int,
        *,
        insecure: bool = False,
    ) -> None:
        self._address = address
        try:
            secret = Secret.of_host(token, insecure=insecure)
            self._link = Link.connect(address, secret, protocol.PURPOSE, timeout_s=DEADLINE_S)
        except TokenError as error:
            raise LinkRefused(str(error)) from error
        hello = protocol.CacheHello(spec, newest_ns)
        reply, _ = self._request(
            hello, (), DEADLINE_S, (protocol.CacheWelcome, protocol.SpecDiffers)
        )
        if isinstance(reply, protocol.SpecDiffers):
            self.close()
            raise SpecRefused(
                f"the cache server at {address} holds another cache: it differs in "
                f"{reply.differences}. Give all nodes the same data and the same version=. To use "
                "the cache server for another cache, restart it"
            )
        assert isinstance(reply, protocol.CacheWelcome)
        self.welcome = reply

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        """Return items, None for each one that the cache server lacks. Raises LinkError."""
        found: list[Record | None] = []
        while len(found) < len(keys):
            chunk = keys[len(found) : len(found) + protocol.MAX_KEYS]
            request = protocol.GetRequest(b"".join(chunk))
            reply, body = self._request(request, (), DEADLINE_S, (protocol.GetReply,))
            assert isinstance(reply, protocol.GetReply)
            if not 0 < len(reply.sizes) == len(reply.checksums) <= len(chunk):
                raise self._fail(f"{len(reply.sizes)} answers to {len(chunk)} keys")
            try:
                records = protocol.split_body(body, reply.sizes)
            except LinkError:
                self.close()
                raise
            for key, data, checksum in zip(chunk, records, reply.checksums, strict=False):
                found.append(None if data is None else Record(key, data, checksum))
        return found

    def put(self, records: Sequence[Record]) -> protocol.PutReply:
        """Send items; they are stored when the call returns. Raises LinkError."""
        stored = protocol.PutReply([], False)
        for start in range(0, len(records), protocol.MAX_KEYS):
            reply = self._put(records[start : start + protocol.MAX_KEYS])
            refused = [*stored.refused, *(start + index for index in reply.refused)]
            stored = protocol.PutReply(refused, reply.is_full)
        return stored

    def _put(self, records: Sequence[Record]) -> protocol.PutReply:
        request = protocol.PutRequest(
            b"".join(record.key for record in records),
            [len(record.data) for record in records],
            [record.checksum for record in records],
        )
        data = [record.data for record in records]
        reply, _ = self._request(request, data, PUT_DEADLINE_S, (protocol.PutReply,))
        assert isinstance(reply, protocol.PutReply)
        if any(index >= len(records) for index in reply.refused):
            raise self._fail("it refuses items that it was not sent")
        return reply

    def close(self) -> None:
        """End the connection, from any thread."""
        self._link.close()

    def _request(
        self,
        request: protocol.Request,
        parts: Sequence[Buffer],
        wait_s: float,
        expected: tuple[type[protocol.Reply], ...],
    ) -> tuple[protocol.Reply, memoryview]:
        try:
            self._link.send(protocol.encode(request), *parts)
            header, body = self._link.receive(wait_s=wait_s)
            reply = protocol.decode_reply(header)
        except (EOFError, OSError) as error:
            raise self._fail(str(error)) from error
        if not isinstance(reply, expected):
            raise self._fail("it answers another request")
        return reply, body

    def _fail(self, reason: str) -> LinkError:
        """Close the connection and return the error to raise.

        A late reply on it would be taken for the reply to the next request.
        """
        self.close()
        return LinkError(f"the cache server at {self._address}: {reason}")
