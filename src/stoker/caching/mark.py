"""What tells one item of a source from another."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """What tells the content of an example from that of others, and from its own former one."""

    name: str | bytes | int
    """Within its source: a path, or an index."""
    size_bytes: int = -1
    """Of its file; -1 where there is none, or its server does not tell."""
    version: int = 0
    """Of its file: when it was changed (ns), or a digest of what its server tells; 0: unknown."""
    label: int = 0
    """What its source adds to the file's content."""
