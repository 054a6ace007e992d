"""Shard formats: tar archives and Parquet files, written and read back."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping, ValuesView
from typing import Any, Protocol

import numpy as np
import xxhash

from stoker.basics import pytree
from stoker.sources.arrow.table import import_pyarrow
from stoker.sources.files import OpenFile
from stoker.sources.shards.index import build_index

# Of a row group, which one random read costs: large beside metadata, small beside memory. Chosen,
# not measured.
_GROUP_BYTES = 8 << 20


class ShardFormat(Protocol):
    """Writes a shard; other processes see the file only after it is renamed.

    Attributes:
        fields: the fields that all of its examples have, by their names for readers.
    """

    fields: list[str]

    @property
    def nbytes(self) -> int:
        """Its size so far in bytes, about."""
        ...

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        """Write an example. Raises ValueError or TypeError if it cannot be written."""
        ...

    def finish(self) -> None:
        """Complete the file and read it back. Raises ValueError where it differs."""
        ...

    def close(self) -> None:
        """Close the file, complete or not."""
        ...


class TarShard:
    """A tar archive: one member for each field of each example."""

    suffix = ".tar"

    def __init__(self, path: str, like: str | None = None) -> None:
        self.fields: list[str] = []
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self._written: list[tuple[str, dict[str, int]]] = []

    @property
    def nbytes(self) -> int:
        return self._file.tell()

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        files = [_as_file(field, value) for field, value in example.items()]
        names = [name for name, _ in files]
        if len({*names}) < len(names):
            raise ValueError(f"two of its fields have one name among {names}")
        for name, data in files:
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
        if self._written:
            names = [name for name in self.fields if name in names]
        self.fields = names
        self._written.append((key, {n: xxhash.xxh3_64_intdigest(data) for n, data in files}))

    def finish(self) -> None:
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        opened = OpenFile(self._path)
        index = build_index(opened)
        found = []
        for number, key in enumerate(index.keys):
            places = index.files_of(number).items()
            digests = {
                field: xxhash.xxh3_64_intdigest(opened.read(start, nbytes))
                for field, (start, nbytes, _) in places
            }
            found.append((key, digests))
        if found != self._written:
            raise ValueError(f"{self._path} does not hold what was written: is the disk broken?")

    def close(self) -> None:
        self._file.close()


class ParquetShard:
    """A Parquet file: one row for each example.

    Its columns are those of its first row group, or of a given earlier shard.
    """

    suffix = ".parquet"

    def __init__(self, path: str, like: str | None = None) -> None:
        self._pa = import_pyarrow("stoker pack --format parquet")
        self._parquet = import_pyarrow("stoker pack --format parquet", "pyarrow.parquet")
        self._path = path
        self._schema: Any = None if like is None else self._parquet.read_schema(like)
        self.fields: list[str] = [] if self._schema is None else self._schema.names
        self._writer: Any = None
        self._groups: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._rows_bytes = self._groups_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._groups_bytes + self._rows_bytes

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        names = list(example)
        self.fields = self.fields or names
        if not names or {*names} != {*self.fields} or not all(isinstance(n, str) for n in names):
            raise ValueError(f"its fields are {names}, and Parquet has columns {self.fields}")
        self._rows.append({field: _as_cell(value) for field, value in example.items()})
        self._rows_bytes += _size(example)
        if self._rows_bytes >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
        with self._parquet.ParquetFile(self._path) as file:
            found = [file.read_row_group(n) for n in range(file.num_row_groups)]
        if len(found) != len(self._groups) or not all(map(_are_equal, found, self._groups)):
            raise ValueError(f"{self._path} does not hold what was written: is the disk broken?")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_group(self) -> None:
        pa = self._pa
        try:
            table = pa.Table.from_pylist(self._rows)
            if self._schema is not None and table.schema != self._schema:
                table = self._as_before(table)
            if self._writer is None:
                self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"one of {len(self._rows)} examples does not go into Parquet: {error}"
            ) from error
        self._schema = self._writer.schema
        self._writer.write_table(table, row_group_size=len(table))
        self._groups.append(table)
        self._groups_bytes += self._rows_bytes
        self._rows, self._rows_bytes = [], 0

    def _as_before(self, table: Any) -> Any:
        """Return a table cast to the types of the previous one; ValueError where values change."""
        names = self._schema.names
        kinds = [(n, table.field(n).type, self._schema.field(n).type) for n in names]
        for name, given, before in kinds:
            if before == self._pa.null() != given:
                raise ValueError(
                    f"{name!r} is {given}, and was None in all examples before, which had its type "
                    "told: pack an example that has it first, or give all of them a value"
                )
        made = self._pa.Table.from_pylist(self._rows, self._schema)  # 0.5 becomes a whole 0
        for name, given, before in kinds:
            if given != before and not _same(made[name].to_pylist(), table[name].to_pylist()):
                raise ValueError(f"{name!r} is {given}, and was {before} before")
        return made


def _are_equal(left: Any, right: Any) -> bool:
    """True if tables are equal, with NaN equal to NaN."""
    return bool(left.equals(right)) or (
        bool(left.schema.equals(right.schema)) and _same(left.to_pylist(), right.to_pylist())
    )


def _same(left: Any, right: Any) -> bool:
    """True if Python values are equal; NaN equals NaN, and None a missing field of a struct."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(_same(left.get(name), right.get(name)) for name in {*left, *right})
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right) or (left != left and right != right)


def _as_file(field: Any, value: Any) -> tuple[str, bytes]:
    if not isinstance(field, str) or "/" in field or field != field.lower():
        raise ValueError(f"{field!r} is no field of a tar shard: lower-case text without '/'")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return field, bytes(value)
    if isinstance(value, str):
        return field, value.encode()
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return field, str(value).encode()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return f"{field}.npy", file.getvalue()
    raise TypeError(
        f"{field!r} is a {type(value).__name__}: bytes, text, numbers and arrays go into tar shards"
    )


def _as_cell(value: Any) -> Any:
    """Return a value for pyarrow that keeps its dtype."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return [_as_cell(row) for row in value]
    if isinstance(value, np.ndarray) and value.ndim:
        return pytree.native(value)
    if isinstance(value, np.ndarray):
        value = value[()]
    return value.item() if isinstance(value, (np.datetime64, np.timedelta64)) else value


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(_size, value)) if isinstance(value, (list, tuple, ValuesView)) else 8
