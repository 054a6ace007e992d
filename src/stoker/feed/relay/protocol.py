"""The protocol between a feed's relay server and relays on other hosts: one message a frame.

A relay joins, and then asks for one epoch at a time. Items come as long as it has said ``Taken`` of
all but ``lent`` of them. A record of ``transport.codec`` travels so: its contents are the frame's
body. A frame that makes no sense ends its connection, which says nothing of the feed: the relay
connects again, and asks from where it is.

``Beat`` is answered by ``Beat``: an end that hears nothing for ``SILENT_S`` seconds takes the other
for gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.feed.messages import (
    Ask,
    Begin,
    End,
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
from stoker.transport.tls import host_tls

# Raised whenever a message between hosts changes.
VERSION = 2
PURPOSE = "feed"
# Six of them fit into ``SILENT_S``: one that is late ends nothing.
BEAT_S = 2.0
# A host that is swapping may stop for seconds; jobs wait without batches for no longer. Chosen, not
# measured.
SILENT_S = 12.0

_Checksum = Annotated[int, msgspec.Meta(ge=0)]  # below 2^64


class Join(Message):
    """The first frame of a relay.

    Attributes:
        version: of this schema.
        name: of the feed.
        label: the relay's command line, for people.
        seed, outline: of the feed that it continues, if there was one.
    """

    version: int
    name: Label
    label: Label
    seed: Seed | None
    outline: list[str]


class Taken(Message):
    """The relay has taken one more item."""


class Beat(Message):
    """A sign of life."""


class RemoteItem(Message):
    """``count`` outputs from ``number`` on, of ``rows`` examples.

    Attributes:
        checksum: of the body (xxh3, 64 bits).
        head: of the record of the value, whose contents are the body.
    """

    epoch: Number
    number: Number
    count: Positive
    rows: Number
    checksum: _Checksum
    head: bytes


FromRelay = Join | Ask | Taken | Beat
FromGateway = Welcome | Refused | Begin | RemoteItem | End | Failed | Beat
_Place = Callable[[int], NDArray[np.uint8]]

_encode = msgspec.msgpack.Encoder().encode
_decode_from_relay = msgspec.msgpack.Decoder(FromRelay).decode
_decode_from_gateway = msgspec.msgpack.Decoder(FromGateway).decode


def connect(address: str, token: bytes) -> RelaySourceEnd:
    """Connect to the gateway of a feed. Raises LinkError, TokenError."""
    return RelaySourceEnd(Link.connect(address, token, PURPOSE, timeout_s=SILENT_S, tls=host_tls()))


class _End:
    """One end of a connection. Any thread may send; one receives."""

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
        """End it, from any thread; a waiting ``receive`` raises."""
        self._link.close()


class RelayServerEnd(_End):
    """The end on the feeder's host."""

    def receive(self) -> FromRelay:
        """Return the relay's next message; beats are answered here.

        Raises Malformed, EOFError or OSError: it has left, or has been silent for too long.
        """
        while True:
            try:
                header, _ = self._link.receive(_nowhere, wait_s=SILENT_S)
            except TimeoutError:
                if self._sending.locked():  # then it may have no time to speak
                    continue
                raise
            message: FromRelay = _read(header, _decode_from_relay)
            if not isinstance(message, Beat):
                return message
            self.send(message)


class RelaySourceEnd(_End):
    """The end on another host."""

    def receive(self, place: _Place | None = None) -> tuple[FromGateway, NDArray[np.uint8]]:
        """Return the server's next message and its contents; beats are answered here.

        ``place(n)`` returns memory for ``n`` bytes of contents.

        Raises Malformed, EOFError or OSError: it has left, or has been silent for too long; what
        ``place`` raises.
        """
        placed = _NOTHING
        message: FromGateway

        def put(header: bytes, size: int) -> memoryview:
            nonlocal message, placed
            message = _read(header, _decode_from_gateway)
            if size and (place is None or not isinstance(message, RemoteItem)):
                raise Malformed("contents that belong to nothing")
            placed = place(size) if size and place is not None else _NOTHING
            return placed.data

        heard_s = time.monotonic()
        while True:
            try:
                self._link.receive(put, wait_s=BEAT_S)
            except TimeoutError:
                if time.monotonic() - heard_s > SILENT_S:
                    raise
                self.send(Beat())
                continue
            if isinstance(message, RemoteItem) and message.checksum != checksum(placed):
                raise Malformed("contents are damaged")
            if not isinstance(message, Beat):
                return message, placed
            heard_s = time.monotonic()


def checksum(*contents: Any) -> int:
    """Return the checksum of contents that come one after another."""
    made = xxhash.xxh3_64()
    for content in contents:
        made.update(content)
    return made.intdigest()


_NOTHING = np.zeros(0, np.uint8)


def _nowhere(header: bytes, size: int) -> memoryview:
    if size:
        raise Malformed("contents that belong to nothing")
    return _NOTHING.data


def _read(header: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)) from None
