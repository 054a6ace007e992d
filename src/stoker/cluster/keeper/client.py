"""A client's connection to a keeper: one request at a time, then its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.keeper import protocol
from stoker.errors import CacheError, TokenError
from stoker.transport.link import Buffer, Link, LinkError, LinkRefused
from stoker.transport.tls import host_tls

DEADLINE_S = 0.5
"""How long a keeper may be silent before it counts as dead: workers wait for it meanwhile, and
then ask storage. Chosen, not measured."""
PUT_DEADLINE_S = 5.0
"""How long a keeper may take to store items that others bring; nobody waits for that: ten times
as long."""

T = TypeVar("T")


class DefinitionRefused(CacheError):
    """The keeper's cache holds other data than this process caches."""


class Record(NamedTuple):
    """An item in a store's format."""

    key: bytes
    data: bytes | memoryview
    checksum: int
    """The checksum of the key and ``data``; each reader verifies it."""


class KeeperClient:
    """A connection to a keeper; one thread uses it at a time.

    Args:
        address: the keeper's ``host:port``.
        token: the cluster's secret.
        definition: the specification of this process's cache.
        map_version: the newest map version that this process knows.

    Attributes:
        welcome: the keeper's first answer.

    Raises LinkError where there is no keeper or it does not answer in time, DefinitionRefused where
    its cache holds other data. After any error the connection cannot be used.
    """

    def __init__(self, address: str, token: bytes, definition: CacheSpec, map_version: int) -> None:
        self._address = address
        self._count = 0
        try:
            tls = host_tls()
            self._link = Link.connect(
                address, token, protocol.PURPOSE, timeout_s=DEADLINE_S, tls=tls
            )
        except TokenError as error:
            raise LinkRefused(str(error)) from error
        hello = protocol.Meet(0, definition, map_version)
        reply, _ = self._ask(hello, (), DEADLINE_S, (protocol.Met, protocol.Differs))
        if isinstance(reply, protocol.Differs):
            self.close()
            raise DefinitionRefused(
                f"the keeper at {address} keeps something else: it differs in "
                f"{reply.differences}. All nodes need the same data and the same version=; a "
                "keeper that is to keep something else has to be started anew"
            )
        assert isinstance(reply, protocol.Met)
        self.welcome = reply

    def get(self, keys: Sequence[bytes]) -> list[Record | None]:
        """Return items, None for each that the keeper lacks. Raises LinkError."""
        found: list[Record | None] = []
        while len(found) < len(keys):
            some = keys[len(found) : len(found) + protocol.MAX_KEYS]
            request = protocol.Get(self._number(), b"".join(some))
            reply, body = self._ask(request, (), DEADLINE_S, (protocol.Got,))
            assert isinstance(reply, protocol.Got)
            if not 0 < len(reply.sizes) == len(reply.checksums) <= len(some):
                raise self._broken(f"{len(reply.sizes)} answers to {len(some)} questions")
            try:
                records = protocol.split_body(body, reply.sizes)
            except LinkError:
                self.close()
                raise
            for key, data, checksum in zip(some, records, reply.checksums, strict=False):
                found.append(None if data is None else Record(key, data, checksum))
        return found

    def put(self, records: Sequence[Record]) -> protocol.Stored:
        """Send items; they are stored when this returns. Raises LinkError."""
        request = protocol.Put(
            self._number(),
            b"".join(record.key for record in records),
            [len(record.data) for record in records],
            [record.checksum for record in records],
        )
        data = [record.data for record in records]
        reply, _ = self._ask(request, data, PUT_DEADLINE_S, (protocol.Stored,))
        assert isinstance(reply, protocol.Stored)
        if any(place >= len(records) for place in reply.refused):
            raise self._broken("it refuses more than it was brought")
        return reply

    def look(self) -> protocol.Looked:
        """Return the state of the keeper's store. Raises LinkError."""
        reply, _ = self._ask(protocol.Look(self._number()), (), DEADLINE_S, (protocol.Looked,))
        assert isinstance(reply, protocol.Looked)
        return reply

    def close(self) -> None:
        """End the connection, from any thread."""
        self._link.close()

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _ask(
        self,
        request: protocol.Request,
        parts: Sequence[Buffer],
        wait_s: float,
        kinds: tuple[type[protocol.Reply], ...],
    ) -> tuple[protocol.Reply, memoryview]:
        try:
            self._link.send(protocol.encode(request), *parts)
            header, body = self._link.receive(wait_s=wait_s)
            reply = protocol.decode_reply(header)
        except (EOFError, OSError) as error:
            raise self._broken(str(error)) from error
        if reply.id != request.id or not isinstance(reply, kinds):
            raise self._broken("it answers another question")
        return reply, body

    def _broken(self, why: str) -> LinkError:
        """End the connection; a late answer on it would have no reader."""
        self.close()
        return LinkError(f"the keeper at {self._address}: {why}")
