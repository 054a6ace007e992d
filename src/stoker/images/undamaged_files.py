"""Remembers files that were decoded in full without an error: they need no second check."""

from __future__ import annotations

_MOST = 1 << 18
"""The most files that are remembered, in about 25 MB; beyond that all are forgotten."""


class UndamagedFiles:
    """The files that this process has found undamaged. Safe to use from any thread."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __contains__(self, data: bytes) -> bool:
        return _digest(data) in self._seen

    def add(self, data: bytes) -> None:
        """Remember a file; at the limit, forget all others first."""
        if len(self._seen) >= _MOST:
            self._seen = set()
        self._seen.add(_digest(data))

    def __reduce__(self) -> tuple[type[UndamagedFiles], tuple[()]]:
        return UndamagedFiles, ()  # another process checks the files itself


def _digest(data: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(data)
