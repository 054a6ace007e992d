"""A table in memory: Arrow's, or a DataFrame of any library."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from stoker.cache.contents import told_by_rows
from stoker.cache.fingerprint import Fingerprint
from stoker.sources.arrow_rows import to_table
from stoker.sources.grouped_rows import GroupedRows, kinds_of
from stoker.sources.source import IndexedSource, Indices, Rows


class TableSource(IndexedSource):
    """The rows of a table. What is in memory says nothing about itself: it has no identity.

    Raises ImportError without pyarrow, TypeError for what is no table, ValueError for one without
    rows or columns, or with two columns of one name.
    """

    is_numbered = True

    def __init__(self, data: Any) -> None:
        self._kind = type(data).__name__
        self._table = to_table(data, "from_table")
        if not len(self) or not self._table.num_columns:
            raise ValueError(f"{self.name} has no {'rows' if not len(self) else 'columns'}")

    @property
    def name(self) -> str:
        return f"from_table({self._kind} of {self._table.num_columns} columns)"

    @property
    def fields(self) -> Sequence[str | int]:
        names: list[str] = self._table.column_names
        return names

    @property
    def rows(self) -> Rows | None:
        return self._grouped if self._grouped.are_stacked else None

    @functools.cached_property
    def _grouped(self) -> GroupedRows:
        import pyarrow as pa

        table = self._table
        nulls = [name for name in table.column_names if table.column(name).null_count]
        parts = (pa.Table.from_batches([batch]) for batch in table.to_batches())
        return GroupedRows.of(parts, kinds_of(table.schema, nulls))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_grouped"}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fetch(self, indices: Indices) -> list[Any]:
        return self._grouped.examples(indices)

    def path(self, index: int) -> str | None:
        """Return None: there are no files."""
        return None

    def contents(self) -> str:
        return told_by_rows(self.fetch, len(self))

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))
