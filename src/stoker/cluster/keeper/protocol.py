"""The protocol between processes and a keeper: frame headers, checked as they are decoded.

Items travel in frame bodies in the stores' format, one after another, and are never unpickled. Each
request is answered by one frame with its number.
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
"""In one request: 256 KiB of keys. Lookups of a window have hundreds."""
MAX_PUT_BYTES = 256 << 20
"""In one request, unless a single item is larger: what a keeper may have to hold for each
connection."""

Size = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
"""The size of an item in bytes; -1: the keeper lacks it."""
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Meet(msgspec.Struct, tag=True, frozen=True):
    """The first request: the process's cache, and the newest map version that it knows."""

    id: Count
    definition: CacheSpec
    map_version: Count


class Met(msgspec.Struct, tag=True, frozen=True):
    """The keeper keeps the same cache."""

    id: Count
    boot: str
    """The boot id of its machine."""
    folder: str
    """Of its store."""
    limit_bytes: Count
    is_full: bool


class Differs(msgspec.Struct, tag=True, frozen=True):
    """The keeper keeps another cache."""

    id: Count
    differences: str


class Get(msgspec.Struct, tag=True, frozen=True):
    """Asks for items, by their keys one after another."""

    id: Count
    keys: bytes


class Got(msgspec.Struct, tag=True, frozen=True):
    """The items in the order of the request, in the body. Later items must be requested again."""

    id: Count
    sizes: list[Size]
    checksums: list[Checksum]


class Put(msgspec.Struct, tag=True, frozen=True):
    """Sends items to store, in the body."""

    id: Count
    keys: bytes
    sizes: list[Size]
    checksums: list[Checksum]


class Stored(msgspec.Struct, tag=True, frozen=True):
    """The result of ``Put``."""

    id: Count
    refused: list[Count]
    """The places of the items that were refused."""
    is_full: bool
    """Whether the store is full."""


class Look(msgspec.Struct, tag=True, frozen=True):
    """Asks for the state of the store."""

    id: Count


class Looked(msgspec.Struct, tag=True, frozen=True):
    """The state of the store."""

    id: Count
    items: Count
    payload_bytes: Count
    used_bytes: Count
    limit_bytes: Count
    is_full: bool
    map_version: Count
    """The newest map version that any client knew."""


Request = Meet | Get | Put | Look
Reply = Met | Differs | Got | Stored | Looked

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.encode

T = TypeVar("T")


def decode_request(header: bytes) -> Request:
    """Decode a request. Raises LinkError for an invalid one."""
    try:
        return _requests.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"no request to a keeper: {error}") from error


def decode_reply(header: bytes) -> Reply:
    """Decode a reply. Raises LinkError for an invalid one."""
    try:
        return _replies.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"no reply of a keeper: {error}") from error


def split_keys(keys: bytes) -> list[bytes]:
    """Return the keys of a request. Raises LinkError for a wrong length."""
    if len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * MAX_KEYS:
        raise LinkError(f"{len(keys)} bytes are no keys")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def split_body(body: memoryview, sizes: Sequence[int]) -> list[memoryview | None]:
    """Return the items in a body, None for each missing one.

    Raises LinkError where the body has another size.
    """
    if sum(size for size in sizes if size > 0) != len(body):
        raise LinkError(f"{len(body)} bytes are not what the header says")
    items: list[memoryview | None] = []
    start = 0
    for size in sizes:
        items.append(None if size < 0 else body[start : start + size])
        start += max(0, size)
    return items
