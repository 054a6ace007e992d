"""The protocol between clients and a cache server: message types, checked as they are decoded.

A message is the header of a frame. Items travel in the frame's body in the store's format, one
after another; nothing is unpickled. A client waits for the reply to each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from stoker.cache.layout import KEY_BYTES
from stoker.cluster.cache_spec import CacheSpec
from stoker.transport.link import LinkError

PURPOSE = "cache"
MAX_KEYS = 1 << 14
"""The most keys in one request: 256 KiB. A window of lookups has hundreds."""
MAX_PUT_BYTES = 256 << 20
"""The most bytes in one put, unless a single item is larger. It bounds the memory that a cache
server needs for each connection. Chosen, not measured."""

Size = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
"""The size of an item in bytes; -1: the cache server lacks it."""
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class CacheHello(msgspec.Struct, tag="hello", frozen=True):
    """The first request: the client's specification, and the newest member that it knows.

    The cache server passes the news on to the processes of its host.
    """

    spec: CacheSpec
    newest_ns: Count
    """When the newest member that the client knows joined (``Member.joined_ns``)."""


class CacheWelcome(msgspec.Struct, tag="met", frozen=True):
    """The reply if the cache server holds the same cache."""

    boot: str
    """The boot id of the cache server's machine."""
    folder: str
    """The folder of its store."""
    limit_bytes: Count
    is_full: bool
    started_ns: Count
    """When the cache server started, in ns since 1970."""


class SpecDiffers(msgspec.Struct, tag="differs", frozen=True):
    """The reply if the cache server holds another cache."""

    differences: str


class GetRequest(msgspec.Struct, tag="get", frozen=True):
    """Requests items; ``keys`` holds their keys, one after another."""

    keys: bytes


class GetReply(msgspec.Struct, tag="got", frozen=True):
    """The first items of the request, in its order, in the body.

    If the reply would be too large, it ends early, and the client requests the rest again.
    """

    sizes: list[Size]
    checksums: list[Checksum]


class PutRequest(msgspec.Struct, tag="put", frozen=True):
    """Sends items to store; they are in the body."""

    keys: bytes
    sizes: list[Size]
    checksums: list[Checksum]


class PutReply(msgspec.Struct, tag="stored", frozen=True):
    """The reply to ``PutRequest``."""

    refused: list[Count]
    """The positions of refused items in the request."""
    is_full: bool
    """True if the store is full."""


Request = CacheHello | GetRequest | PutRequest
Reply = CacheWelcome | SpecDiffers | GetReply | PutReply

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.encode

T = TypeVar("T")


def decode_request(header: bytes) -> Request:
    """Decode a request. Raises LinkError for an invalid one."""
    return _decode(_requests, header)


def decode_reply(header: bytes) -> Reply:
    """Decode a reply. Raises LinkError for an invalid one."""
    return _decode(_replies, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes) -> T:
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"a message is invalid: {error}") from error


def split_keys(keys: bytes) -> list[bytes]:
    """Return the keys of a request. Raises LinkError for a wrong length."""
    if len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * MAX_KEYS:
        raise LinkError(f"a request has {len(keys)} bytes of keys, which is not a valid length")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def split_body(body: memoryview, sizes: Sequence[int]) -> list[memoryview | None]:
    """Return the items in a body, None for each missing one.

    Raises LinkError if the body has another size.
    """
    if sum(size for size in sizes if size > 0) != len(body):
        raise LinkError(f"the body has {len(body)} bytes, but the header says otherwise")
    items: list[memoryview | None] = []
    start = 0
    for size in sizes:
        items.append(None if size < 0 else body[start : start + size])
        start += max(0, size)
    return items
