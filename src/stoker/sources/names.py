"""Very many names, kept compactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Names(Sequence[str]):
    """Strings in one piece of memory, since a million objects take long to pickle and to scan."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        start = self._ends[index - 1] if index else 0
        return self._bytes[start : self._ends[index]].decode("utf-8", "surrogateescape")
