"""Cache specification: a cache's contents, described alike on all hosts with the same data.

The stores of one host identify files by absolute paths, times and inodes, which differ between
hosts. Nodes of a cluster compare this specification instead, when they connect: a node with another
specification is refused, and told the difference.
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
    """The contents of a partitioned cache. No field depends on a host's paths."""

    kind: str
    """The kind of source."""
    operations: list[str]
    """The stages before the cache, with the functions' names."""
    version: str
    """The user's ``version=``; "" for none."""
    examples: int
    """The number of examples."""
    names: str
    """A digest of the examples' names, in order."""
    sizes: str
    """A digest of the sizes of some of their files."""

    def digest(self) -> bytes:
        """Return 8 bytes that identify this specification."""
        return xxhash.xxh3_64_digest(msgspec.msgpack.encode(self))

    def differences(self, other: CacheSpec) -> str:
        """Return the differences from another one, for people; "" for none."""
        found = []
        for name, label in LABELS.items():
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                told = name not in ("names", "sizes")
                found.append(f"{label} ({here!r}, not {there!r})" if told else label)
        return ", ".join(found)
