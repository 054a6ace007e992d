"""What a cache holds, told in a way that is the same on every host that has the same data.

Stores of one host know files by absolute paths, times and inodes, which are others elsewhere. Nodes
of a cluster agree on this instead, when they meet: whoever has another definition is refused, and
told what differs.
"""

from __future__ import annotations

import msgspec
import xxhash

LABELS = {
    "kind": "the kind of source",
    "operations": "what is done in front of the cache",
    "version": "version=",
    "examples": "the number of examples",
    "names": "the examples' names",
    "sizes": "the sizes of their files",
}


class CacheSpec(msgspec.Struct, frozen=True):
    """The definition of a partitioned cache. No field says where anything lies."""

    kind: str
    """Of the source."""
    operations: list[str]
    """What is done to its examples before they are kept, with the functions' names."""
    version: str
    """What the user says it is; "" for nothing."""
    examples: int
    """How many there are."""
    names: str
    """A digest of what they are called, in order."""
    sizes: str
    """A digest of the sizes of some of their files."""

    def digest(self) -> bytes:
        """Return 8 bytes that tell it from others."""
        return xxhash.xxh3_64_digest(msgspec.msgpack.encode(self))

    def differences(self, other: CacheSpec) -> str:
        """Say in what it differs from another one, for people; "" if it does not."""
        found = []
        for name, label in LABELS.items():
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                told = name not in ("names", "sizes")
                found.append(f"{label} ({here!r}, not {there!r})" if told else label)
        return ", ".join(found)
