"""A feed for jobs on other hosts: the messages of its local socket, passed on over a link.

On the feeder's host, each connection of another host is a further job of the feed, at the local
socket. On the job's host, one end of a socket pair takes the feeder's place. So neither the feeder
nor the job knows of the network between them.

Messages cross unchanged, except for items: the value is a record of ``transport.codec`` (nothing
that comes from the network is unpickled), with its contents in the frame's body. They are received
straight into memory that the job maps, as it maps a feeder's. Each frame begins with a checksum.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from stoker.basics import process, resources
from stoker.basics.future import start_thread
from stoker.errors import FeedError
from stoker.feeds import local_feeds, messages
from stoker.feeds.shared_memory import Blocks, Payload, Stale, from_payload, map_block, to_payload
from stoker.transport.codec import RecordView, encode_views
from stoker.transport.link import Link, LinkError, LinkRefused, split_address
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret, make_token_file, read_token, token_path

PURPOSE = "feed"
# How long the other host may be silent. A job receives nothing while it holds the interpreter's
# lock in a long call; others wait without batches for no longer than this. Chosen, not measured.
_SILENT_S = 30.0
# How long a feed may take to start, or to be started again. Chosen, not measured.
_START_S = 10.0
# The wait between two tries to connect: short beside the start of a feeder, long beside a failed
# try. Chosen, not measured.
_RETRY_S = 0.1
# How long this process's own feeder may take to listen. Chosen, not measured.
_LISTEN_S = 5.0
_CHECKSUM_BYTES = 8
_SCHEME = "tcp://"
_ENDS = (OSError, EOFError, messages.Malformed, Stale)
"""Whatever ends a connection: the job connects again, and requests its next output."""


def is_url(text: object) -> bool:
    """True if ``text`` is the URL of a feed on another host."""
    return isinstance(text, str) and text.startswith(_SCHEME)


def split_url(url: str) -> tuple[str, str]:
    """Return the ``host:port`` and the name in ``tcp://host:port/NAME``. Raises ValueError."""
    address, _, name = url.removeprefix(_SCHEME).partition("/")
    try:
        split_address(address)
        local_feeds.check_name(name)
    except ValueError as error:
        raise ValueError(
            f"{url!r} is not the URL of a feed ({error}): write tcp://host:port/NAME"
        ) from None
    return address, name


def join_url(address: str, name: str) -> str:
    """Return the URL of a feed, the inverse of `split_url`."""
    return f"{_SCHEME}{address}/{name}"


# -- on the feeder's host


def listen_for_hosts(listen: str, name: str, token: bytes | None, *, insecure: bool) -> Listener:
    """Make the feed ``name`` of this process available at ``listen``, a ``host:port``.

    ``token`` is the secret of its connections; by default it is the user's own, which is made if
    there is none. With ``insecure``, its traffic is not encrypted; jobs must be told so, too.

    Raises FeedError if it cannot listen there, TokenError, ImportError if cryptography is missing,
    ValueError for an invalid address.
    """
    host, port = split_address(listen)
    secret = Secret.of_host(token or make_token_file(token_path()), insecure=insecure)
    serve = functools.partial(_serve, name)
    try:
        return Listener(host, port, secret, PURPOSE, serve, timeout_s=_SILENT_S)
    except OSError as error:
        raise FeedError(f"the feed cannot listen on {listen}: {error}") from error


def _serve(name: str, link: Link) -> None:
    """Pass the messages of a job on another host on until either side hangs up."""
    link.end_when_silent(_SILENT_S)
    local = local_feeds.connect_within(name, _LISTEN_S)
    if local is None:
        return
    with local:
        sender = start_thread("stoker-feed-outputs", _send_outputs, local, link)
        with _hanging_up(local, link):
            while True:
                header, _ = link.receive(_no_contents)
                local.send(header[_CHECKSUM_BYTES:])  # the feeder checks it
        sender.join()


def _send_outputs(local: socket.socket, link: Link) -> None:
    """Pass a feeder's messages on, with the contents of its items."""
    with _hanging_up(local, link):
        while True:
            message, descriptors = messages.receive_as_job(local)
            if message is None:
                break
            if isinstance(message, messages.ItemMessage):
                _send_item(local, link, message, descriptors)
            else:
                _send(link, message)


def _send_item(
    local: socket.socket, link: Link, item: messages.ItemMessage, descriptors: list[int]
) -> None:
    mappings = []
    try:
        for generation in item.generations:
            mappings.append(map_block(descriptors.pop(0), generation))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        head, contents = encode_views(from_payload(item.header, item.places, mappings))
        item.header, item.places, item.generations = head, [], []
        _send(link, item, contents)
    except (OSError, Stale):
        raise
    except Exception as error:  # it is too large for a frame, or a class of the user's raises
        reason = messages.clip_text(f"this feed cannot serve other hosts: {error}")
        _send(link, messages.Failed(item.request_id, reason))
        messages.send(local, messages.Release([item.lease]))


# -- on the job's host


def connect_within(url: str, *, insecure: bool) -> socket.socket:
    """Connect to a feed that may be starting; return a socket like one of a local feed.

    Raises FeedError, TokenError; ImportError if cryptography is missing.
    """
    address, name = split_url(url)
    until_s = time.monotonic() + _START_S
    while True:
        try:
            return connect(address, read_token(token_path()), insecure=insecure)
        except LinkRefused as error:
            raise FeedError(f"cannot join {url}: {error}") from error
        except LinkError as error:
            if time.monotonic() > until_s:
                raise FeedError(
                    f"there is no feed {url}: {error}. Start it there: stoker feed "
                    f"FILE.py:FUNCTION --name {name} --listen {address}"
                ) from error
        time.sleep(_RETRY_S)


def connect(address: str, token: bytes, *, insecure: bool) -> socket.socket:
    """Connect to a feed at ``host:port``. Raises LinkError, TokenError, ImportError."""
    secret = Secret.of_host(token, insecure=insecure)
    link = Link.connect(address, secret, PURPOSE, timeout_s=_SILENT_S)
    link.end_when_silent(_SILENT_S)
    of_job, of_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (of_job, of_link):
        process.close_in_children(end)
    start_thread("stoker-feed-items", _receive_outputs, of_link, link)
    return of_job


def _receive_outputs(local: socket.socket, link: Link) -> None:
    """Take the feeder's place at a job's socket until either side hangs up."""
    received = _Received()
    with local:
        sender = start_thread("stoker-feed-requests", _send_requests, local, link, received)
        with _hanging_up(local, link):
            try:
                while True:
                    message, descriptors = received.next(link)
                    messages.send(local, message, descriptors)
            finally:
                if received.refusal is not None:
                    messages.send(local, received.refusal)
        sender.join()
    received.close()  # both threads are done with it


def _send_requests(local: socket.socket, link: Link, received: _Received) -> None:
    with _hanging_up(local, link):
        while (message := messages.receive_as_feeder(local)) is not None:
            if isinstance(message, messages.Release):
                received.release(message.leases)
            _send(link, message)


class _Received:
    """The items that came over a link and that the job still uses.

    Attributes:
        refusal: for the job, if it has no memory for an item.
    """

    def __init__(self) -> None:
        self.refusal: messages.Failed | None = None
        self._blocks = Blocks()
        self._payloads: dict[int, Payload] = {}  # by lease
        self._largest_bytes = 0  # smaller items need no check of the free memory

    def next(self, link: Link) -> tuple[messages.Message, list[int]]:
        """Return the next message and the descriptors of its item's memory.

        Raises Malformed for a damaged message; EOFError or OSError if the feed has ended, or was
        silent for too long.
        """
        header, body = link.receive(self._allocate)
        packet = header[_CHECKSUM_BYTES:]
        if header[:_CHECKSUM_BYTES] != _checksum(packet, [body]):
            raise messages.Malformed("a message is damaged")
        message = messages.decode_from_feeder(packet)
        if not isinstance(message, messages.ItemMessage):
            return message, []
        record = RecordView(message.header, np.frombuffer(body, np.uint8))
        payload = to_payload(record, self._blocks)
        payload.mark(message.lease)
        self._payloads[message.lease] = payload
        message.header, message.places = payload.header, payload.places
        message.generations = [block.generation for block in payload.blocks]
        return message, [block.descriptor for block in payload.blocks]

    def release(self, leases: Sequence[int]) -> None:
        """Use the memory of these items again."""
        for lease in leases:
            payload = self._payloads.pop(lease, None)
            if payload is not None:
                payload.retire()

    def close(self) -> None:
        """Free all memory that the job does not map.

        Blocks keep their generation: the job may still copy from them, before it sees the end.
        """
        self._payloads.clear()
        self._blocks.clear()

    def _allocate(self, header: bytes, size: int) -> memoryview:
        message = messages.decode_from_feeder(header[_CHECKSUM_BYTES:])
        if not size:
            return memoryview(b"")
        if not isinstance(message, messages.ItemMessage):
            raise messages.Malformed("a message that must not have contents has some")
        if size > self._largest_bytes:
            usable = resources.usable_memory_bytes()
            if size > usable:
                reason = (
                    f"an item of {resources.format_bytes(size)} does not fit into memory: this job "
                    f"can use {resources.format_bytes(usable)}"
                )
                self.refusal = messages.Failed(message.request_id, reason)
                raise messages.Malformed(reason)
            self._largest_bytes = size
        return self._blocks.scratch(size)[:size].data


# -- on both


def _send(link: Link, message: messages.Message, contents: Sequence[Any] = ()) -> None:
    packet = messages.encode(message)
    link.send(_checksum(packet, contents) + packet, *contents)


def _checksum(packet: bytes, contents: Sequence[Any]) -> bytes:
    """Return a message's checksum: not all links are encrypted, and TCP's own has 16 bits."""
    digest = xxhash.xxh3_64(packet)
    for content in contents:
        digest.update(content)
    return digest.digest()


@contextlib.contextmanager
def _hanging_up(local: socket.socket, link: Link) -> Iterator[None]:
    """End both connections behind the block, whatever ends it; threads that wait for them go on."""
    try:
        with contextlib.suppress(*_ENDS):
            yield
    finally:
        link.close()
        with contextlib.suppress(OSError):
            local.shutdown(socket.SHUT_RDWR)


def _no_contents(header: bytes, size: int) -> memoryview:
    if size:
        raise messages.Malformed("a job's message has contents")
    return memoryview(b"")
