"""Hugging Face's map-style datasets: rows by number, from their Arrow tables."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.basics.validate import names_in
from stoker.sources.arrow.examples import to_examples
from stoker.sources.arrow.rows import GroupedRows, in_chunks
from stoker.sources.arrow.table import TableSource, numbers_in, values_of, without_views
from stoker.sources.files import read_file
from stoker.sources.source import Indices

_STORED = {"bytes", "path"}  # what an Image, an Audio, a Video is in a table


class HuggingFaceSource(TableSource):
    """The rows of a dataset, as dicts by column; images and sound are the stored bytes.

    Rows come straight from the dataset's memory-mapped Arrow tables, so the dataset decodes
    nothing. Of its format only the columns count.
    """

    def __init__(self, dataset: Any, columns: Sequence[str] | None = None) -> None:
        if columns is not None:
            columns = names_in("columns", columns, "['image', 'label']")
        _check_kind(dataset)
        self._kind = type(dataset).__name__
        names = dataset.column_names
        self._columns = list(dataset.format["columns"] if columns is None else columns)
        for name in self._columns:
            if name not in names:
                raise ValueError(f"{self.name} has no column {name!r}, but {', '.join(names)}")
        if not len(dataset):
            raise ValueError(f"{self.name} has no rows")
        self._length = len(dataset)
        self._own_fingerprint = getattr(dataset, "_fingerprint", None)
        self._dataset = dataset.with_format("arrow", columns=self._columns)
        self._folder = os.getcwd()  # of files that rows name by relative paths

    @property
    def name(self) -> str:
        return f"from_huggingface({self._kind})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._columns

    @functools.cached_property
    def _grouped_rows(self) -> GroupedRows | None:
        """The rows of its tables that its selection leaves; None if files must be read."""
        data = getattr(self._dataset, "data", None)
        if data is None or not hasattr(self._dataset, "_indices"):
            return None
        picked: Any = self._dataset._indices  # has no public name
        if len(data if picked is None else picked) != len(self):
            return None
        table = data.table.select(self._columns)
        for field in filter(lambda field: _is_file(field.type), table.schema):
            column = table.column(field.name)
            if column.null_count or any(each.field("bytes").null_count for each in column.chunks):
                return None
        table = _with_bytes(table, self._folder)
        return GroupedRows.of(table, None if picked is None else picked.table)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Indices) -> list[Any]:
        if self._grouped_rows is not None:
            return super().fetch(indices)
        table = self._dataset[np.asarray(indices, np.int64).tolist()]
        return to_examples(_with_bytes(table.select(self._columns), self._folder))

    def column(self, field: str | int) -> NDArray[Any]:
        table = self._dataset.select_columns([field])[:]
        return numbers_in(without_views(table).column(field), str(field))

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        """Return the labels of a column, by default of the only ``ClassLabel``."""
        if field is None:
            named = self._class_columns()
            if len(named) != 1:
                return super().labels(None)
            field = named[0]
        table = self._dataset.select_columns([field])[:]
        return values_of(without_views(table).column(field), str(field))

    def extent(self) -> str:
        data = getattr(self._dataset, "data", None)
        chunks = "" if data is None else in_chunks(data.table.select(self._columns))
        return f"{len(self):,} examples{chunks}"

    def identity(self) -> str | None:
        """Return the dataset's own fingerprint: a digest of its data and transforms."""
        own = self._own_fingerprint
        return None if own is None else f"datasets {own} {self._columns}"

    @property
    def class_names(self) -> Sequence[str]:
        """The names of its classes. Raises AttributeError unless one column is a ``ClassLabel``."""
        named = self._class_columns()
        if len(named) != 1:
            raise AttributeError(
                f"class_names needs one column of kind ClassLabel, but {self.name} has "
                f"{len(named)} of the kind ClassLabel"
            )
        return list(self._dataset.features[named[0]].names)

    def _class_columns(self) -> list[str]:
        features = self._dataset.features
        return [name for name in self._columns if type(features[name]).__name__ == "ClassLabel"]


def _check_kind(dataset: Any) -> None:
    """Raise TypeError unless this is a map-style dataset, judged by its methods."""
    if not hasattr(dataset, "__len__") and hasattr(dataset, "load_state_dict"):
        raise TypeError(
            f"from_huggingface reads rows by number, but a {type(dataset).__name__} is a stream: "
            "use from_iterable, which keeps its state"
        )
    if isinstance(dataset, dict):
        shown = ", ".join(map(repr, dataset))
        raise TypeError(f"from_huggingface reads one dataset, but these are several: {shown}")
    for method in ("column_names", "format", "with_format", "__getitems__"):
        if not hasattr(dataset, method):
            raise TypeError(
                f"from_huggingface takes a datasets.Dataset; a {type(dataset).__name__} has no "
                f"{method}"
            )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the dataset transforms its rows (with_transform): remove that by .reset_format() "
            "and put it into .map(), or use from_dataset, which keeps it"
        )


def _is_file(kind: Any) -> bool:
    """True if a feature is stored as a file: an Image, an Audio, a Video."""
    return pa.types.is_struct(kind) and {each.name for each in kind} == _STORED


def _with_bytes(table: Any, folder: str) -> Any:
    """Return the table with the files' bytes in place of their paths, and text for views."""
    for at, field in enumerate(table.schema):
        if _is_file(field.type):
            chunks = []
            for chunk in table.column(at).chunks:
                data = chunk.field("bytes")
                if data.null_count:
                    rows = zip(data.to_pylist(), chunk.field("path").to_pylist(), strict=True)
                    data = pa.array([_read(*row, folder) for row in rows], pa.large_binary())
                chunks.append(data)
            if len({chunk.type for chunk in chunks}) > 1:  # some had paths
                chunks = [chunk.cast(pa.large_binary()) for chunk in chunks]
            table = table.set_column(at, field.name, pa.chunked_array(chunks))
    return without_views(table)


def _read(data: bytes | None, path: str | None, folder: str) -> bytes | None:
    if data is not None or path is None:
        return data
    if "://" in path:
        raise ValueError(
            f"{path} is in an archive or at a URL, and the dataset does not hold its bytes: use "
            "from_dataset, which lets the dataset fetch it"
        )
    return read_file(os.path.join(folder, path))
