"""Cache specification: what a cache holds, described the same way on every host with the same data.

Stores of one host identify files by absolute paths, times and inodes. These differ between hosts,
so the nodes of a cluster compare this specification instead when they connect. A node with another
specification is refused, and the message names the differences.
"""

from __future__ import annotations

import msgspec
import xxhash

LABELS = {
    "kind": "the kind of source",
    "operations": "the stages before the cache",
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
        """Return the differences from another specification as text; "" for none."""
        found = []
        for name, label in LABELS.items():
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                is_readable = name not in ("names", "sizes")  # the others are digests
                found.append(f"{label} ({here!r}, not {there!r})" if is_readable else label)
        return ", ".join(found)
