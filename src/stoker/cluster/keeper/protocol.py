"""What processes say to a keeper, and it to them: headers of frames, checked as they are decoded.

Items travel in bodies as stores hold them, one behind the other, and are never unpickled. Each
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
"""Of an item, in bytes; -1: there is none."""
Checksum = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Meet(msgspec.Struct, tag=True, frozen=True):
    """Comes first: what the process caches, and the newest map that it knows."""

    id: Count
    definition: CacheSpec
    map_version: Count


class Met(msgspec.Struct, tag=True, frozen=True):
    """The keeper keeps just that."""

    id: Count
    boot: str
    """The boot of its machine."""
    folder: str
    """Of its store."""
    limit_bytes: Count
    is_full: bool


class Differs(msgspec.Struct, tag=True, frozen=True):
    """The keeper keeps something else."""

    id: Count
    differences: str


class Get(msgspec.Struct, tag=True, frozen=True):
    """Asks for items, by their keys one behind the other."""

    id: Count
    keys: bytes


class Got(msgspec.Struct, tag=True, frozen=True):
    """Items in the order of the request: the body. Those behind have to be asked for again."""

    id: Count
    sizes: list[Size]
    checksums: list[Checksum]


class Put(msgspec.Struct, tag=True, frozen=True):
    """Brings items: the body."""

    id: Count
    keys: bytes
    sizes: list[Size]
    checksums: list[Checksum]


class Stored(msgspec.Struct, tag=True, frozen=True):
    """What became of them."""

    id: Count
    refused: list[Count]
    """The places of those that are not in the store."""
    is_full: bool
    """Whether nothing enters any more."""


class Look(msgspec.Struct, tag=True, frozen=True):
    """Asks what is there."""

    id: Count


class Looked(msgspec.Struct, tag=True, frozen=True):
    """What is there."""

    id: Count
    items: Count
    payload_bytes: Count
    used_bytes: Count
    limit_bytes: Count
    is_full: bool
    map_version: Count
    """The newest that anybody who came here knew of."""


Request = Meet | Get | Put | Look
Reply = Met | Differs | Got | Stored | Looked

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.encode

T = TypeVar("T")


def decode_request(header: bytes) -> Request:
    """Read a request. Raises LinkError for what is none."""
    try:
        return _requests.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"no request to a keeper: {error}") from error


def decode_reply(header: bytes) -> Reply:
    """Read a reply. Raises LinkError for what is none."""
    try:
        return _replies.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError(f"no reply of a keeper: {error}") from error


def split_keys(keys: bytes) -> list[bytes]:
    """Return the keys of a request. Raises LinkError where they are none."""
    if len(keys) % KEY_BYTES or len(keys) > KEY_BYTES * MAX_KEYS:
        raise LinkError(f"{len(keys)} bytes are no keys")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def split_body(body: memoryview, sizes: Sequence[int]) -> list[memoryview | None]:
    """Return the items in a body, None for those that are not there.

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
