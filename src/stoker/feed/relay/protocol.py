"""The protocol between a feed's relay server and the relays on other hosts: one message per frame.

A relay joins, and then requests one epoch at a time. The server sends items while fewer than
``max_leases`` of them wait for an ``ItemTaken``. An item is a record of ``transport.codec``: its
contents are the frame's body. An invalid frame ends the connection, not the feed: the relay
connects again, and requests its next output.

``Heartbeat`` is answered with ``Heartbeat``. An end that receives nothing for ``SILENT_S`` seconds
considers the other end gone.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.feed.messages import (
    Begin,
    End,
    EpochRequest,
    Failed,
    Label,
    Malformed,
    Message,
    Number,
    Positive,
    Refused,
    Seed,
    Welcome,
)
from stoker.transport.link import Link
from stoker.transport.secret import Secret

# Raised whenever a message between hosts changes.
VERSION = 4
PURPOSE = "feed"
# The time between heartbeats: six fit into ``SILENT_S``, so a late one does no harm.
HEARTBEAT_S = 2.0
# A host that swaps may stop for seconds. Jobs wait without batches for no longer than this. Chosen,
# not measured.
SILENT_S = 12.0

_Checksum = Annotated[int, msgspec.Meta(ge=0)]  # below 2^64


class Join(Message):
    """The first frame of a relay.

    Attributes:
        version: the version of this schema.
        name: the feed's name.
        label: describes the relay, for people.
        seed, signature: those of the feed that it continues, if there was one.
    """

    version: int
    name: Label
    label: Label
    seed: Seed | None
    signature: list[str]


class ItemTaken(Message):
    """The relay has used an item, and has room for another."""


class Heartbeat(Message):
    """Shows that the sender is alive."""


class RemoteItem(Message):
    """``count`` outputs from ``number`` on, with ``rows`` examples.

    Attributes:
        checksum: the checksum of all else and the body (xxh3, 64 bits): not all connections are
            encrypted, and TCP's own has 16 bits.
        head: the head of the value's record; the record's contents are the body.
    """

    epoch: Number
    number: Number
    count: Positive
    rows: Number
    checksum: _Checksum
    head: bytes

    @classmethod
    def of(
        cls, position: tuple[int, int], count: int, rows: int, head: bytes, contents: Iterable[Any]
    ) -> RemoteItem:
        """Return an item with its checksum."""
        item = cls(*position, count, rows, 0, head)
        item.checksum = item._checksum_with(contents)
        return item

    def fits(self, contents: NDArray[np.uint8]) -> bool:
        """True if neither the item nor its contents are damaged."""
        return self.checksum == self._checksum_with([contents])

    def _checksum_with(self, contents: Iterable[Any]) -> int:
        numbers = struct.pack("<4Q", self.epoch, self.number, self.count, self.rows)
        digest = xxhash.xxh3_64(numbers + self.head)
        for content in contents:
            digest.update(content)
        return digest.intdigest()


FromRelay = Join | EpochRequest | ItemTaken | Heartbeat
FromServer = Welcome | Refused | Begin | RemoteItem | End | Failed | Heartbeat
_Allocate = Callable[[int], NDArray[np.uint8]]

_encode = msgspec.msgpack.Encoder().encode
_decode_from_relay = msgspec.msgpack.Decoder(FromRelay).decode
_decode_from_server = msgspec.msgpack.Decoder(FromServer).decode


def connect(address: str, token: bytes, *, insecure: bool) -> RelaySourceEnd:
    """Connect to the relay server of a feed. Raises LinkError, TokenError, ImportError."""
    secret = Secret.of_host(token, insecure=insecure)
    return RelaySourceEnd(Link.connect(address, secret, PURPOSE, timeout_s=SILENT_S))


class _RelayEnd:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        return self._link.peer

    def send(self, message: Message, *contents: bytes | memoryview) -> None:
        """Send a frame. Raises LinkError; ValueError for one that is too large."""
        with self._sending:
            self._link.send(_encode(message), *contents)

    def close(self) -> None:
        """End the connection, from any thread; a waiting ``receive`` raises."""
        self._link.close()


class RelayServerEnd(_RelayEnd):
    """The end on the feeder's host."""

    def receive(self) -> FromRelay:
        """Return the relay's next message; answer heartbeats.

        Raises Malformed for an invalid message; EOFError or OSError if the relay has left, or was
        silent for too long.
        """
        while True:
            try:
                header, _ = self._link.receive(_refuse_contents, wait_s=SILENT_S)
            except TimeoutError:
                if self._sending.locked():  # the relay may be busy receiving a large item
                    continue
                raise
            message: FromRelay = _read(header, _decode_from_relay)
            if not isinstance(message, Heartbeat):
                return message
            self.send(message)


class RelaySourceEnd(_RelayEnd):
    """The end on the relay's host."""

    def receive(self, allocate: _Allocate | None = None) -> tuple[FromServer, NDArray[np.uint8]]:
        """Return the server's next message and its contents; send heartbeats while waiting.

        ``allocate(n)`` returns memory for ``n`` bytes of contents.

        Raises Malformed for an invalid message; EOFError or OSError if the server has left, or was
        silent for too long; the exceptions of ``allocate``.
        """
        contents = _NOTHING
        message: FromServer

        def allocate_body(header: bytes, size: int) -> memoryview:
            nonlocal message, contents
            message = _read(header, _decode_from_server)
            if size and (allocate is None or not isinstance(message, RemoteItem)):
                raise Malformed("a message that must not have contents has some")
            contents = allocate(size) if size and allocate is not None else _NOTHING
            return contents.data

        last_message_s = time.monotonic()
        while True:
            try:
                self._link.receive(allocate_body, wait_s=HEARTBEAT_S)
            except TimeoutError:
                if time.monotonic() - last_message_s > SILENT_S:
                    raise
                self.send(Heartbeat())
                continue
            if isinstance(message, RemoteItem) and not message.fits(contents):
                raise Malformed("an item is damaged")
            if not isinstance(message, Heartbeat):
                return message, contents
            last_message_s = time.monotonic()


_NOTHING = np.zeros(0, np.uint8)


def _refuse_contents(header: bytes, size: int) -> memoryview:
    if size:
        raise Malformed("a message that must not have contents has some")
    return _NOTHING.data


def _read(header: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None
