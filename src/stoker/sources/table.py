"""A table in memory: Arrow's, or a DataFrame of any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stoker.cache.fingerprint import Fingerprint
from stoker.sources.arrow_rows import to_examples, to_table
from stoker.sources.source import IndexedSource, Indices


class TableSource(IndexedSource):
    """The rows of a table. What is in memory says nothing about itself: it has no identity.

    Raises ImportError without pyarrow, TypeError for what is no table, ValueError for one without
    rows or with two columns of one name.
    """

    is_numbered = True

    def __init__(self, data: Any) -> None:
        self._kind = type(data).__name__
        self._table = to_table(data, "from_table")
        if not len(self):
            raise ValueError(f"{self.name} has no rows")

    @property
    def name(self) -> str:
        return f"from_table({self._kind} of {self._table.num_columns} columns)"

    @property
    def fields(self) -> Sequence[str | int]:
        names: list[str] = self._table.column_names
        return names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fetch(self, indices: Indices) -> list[Any]:
        return to_examples(self._table.take(np.asarray(indices, np.int64)))

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))
