"""The formats of shards, tar archives and Parquet files: writing, and reading back."""

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

# The size of a Parquet row group, the unit of a random read: large beside its metadata, small
# beside memory. Chosen, not measured.
_GROUP_BYTES = 8 << 20


class ShardFormat(Protocol):
    """Writes one shard. The caller renames the file when it is complete.

    Attributes:
        fields: the names under which readers find the fields that all examples have.
    """

    fields: list[str]

    @property
    def nbytes(self) -> int:
        """The approximate size so far in bytes."""
        ...

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        """Write an example. Raises ValueError or TypeError if it cannot be written."""
        ...

    def finish(self) -> None:
        """Complete the file, and read it back. Raises ValueError if it differs."""
        ...

    def close(self) -> None:
        """Close the file, whether it is complete or not."""
        ...


class TarShard:
    """A tar archive: one member for each field of each example."""

    suffix = ".tar"

    def __init__(self, path: str, schema_from: str | None = None) -> None:
        self.fields: list[str] = []
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self._expected: list[tuple[str, dict[str, int]]] = []

    @property
    def nbytes(self) -> int:
        return self._file.tell()

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        files = [_as_file(field, value) for field, value in example.items()]
        names = [name for name, _ in files]
        if len({*names}) < len(names):
            raise ValueError(f"two of its fields would have the same name in a tar shard: {names}")
        for name, data in files:
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
        if self._expected:
            names = [name for name in self.fields if name in names]
        self.fields = names
        self._expected.append((key, {n: xxhash.xxh3_64_intdigest(data) for n, data in files}))

    def finish(self) -> None:
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        file = OpenFile(self._path)
        index = build_index(file)
        contents = []
        for number, key in enumerate(index.keys):
            places = index.files_of(number).items()
            digests = {
                field: xxhash.xxh3_64_intdigest(file.read(start, nbytes))
                for field, (start, nbytes, _) in places
            }
            contents.append((key, digests))
        if contents != self._expected:
            raise ValueError(
                f"{self._path} reads back differently than it was written: check the disk"
            )

    def close(self) -> None:
        self._file.close()


class ParquetShard:
    """A Parquet file: one row for each example.

    Its columns are those of the shard ``schema_from``, or of its own first row group.
    """

    suffix = ".parquet"

    def __init__(self, path: str, schema_from: str | None = None) -> None:
        self._pa = import_pyarrow("stoker pack --format parquet")
        self._parquet = import_pyarrow("stoker pack --format parquet", "pyarrow.parquet")
        self._path = path
        self._schema: Any = None if schema_from is None else self._parquet.read_schema(schema_from)
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
            raise ValueError(
                f"its fields are {names}, but the Parquet shards have the columns {self.fields}: "
                "give all examples the same fields"
            )
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
            contents = [file.read_row_group(n) for n in range(file.num_row_groups)]
        if len(contents) != len(self._groups) or not all(map(_are_equal, contents, self._groups)):
            raise ValueError(
                f"{self._path} reads back differently than it was written: check the disk"
            )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_group(self) -> None:
        pa = self._pa
        try:
            table = pa.Table.from_pylist(self._rows)
            if self._schema is not None and table.schema != self._schema:
                table = self._cast_to_schema(table)
            if self._writer is None:
                self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"one of the last {len(self._rows)} examples cannot be stored in Parquet: {error}"
            ) from error
        self._schema = self._writer.schema
        self._writer.write_table(table, row_group_size=len(table))
        self._groups.append(table)
        self._groups_bytes += self._rows_bytes
        self._rows, self._rows_bytes = [], 0

    def _cast_to_schema(self, table: Any) -> Any:
        """Return a table with the types of the earlier rows. Raises ValueError if values change."""
        names = self._schema.names
        kinds = [(n, table.field(n).type, self._schema.field(n).type) for n in names]
        for name, kind, earlier_kind in kinds:
            if earlier_kind == self._pa.null() != kind:
                raise ValueError(
                    f"{name!r} has type {kind}, but it was None in all examples before, so its "
                    "column has no type: put an example with a value first, or give all examples "
                    "a value"
                )
        cast = self._pa.Table.from_pylist(self._rows, self._schema)  # 0.5 becomes a whole 0
        for name, kind, earlier_kind in kinds:
            if kind != earlier_kind and not _same(cast[name].to_pylist(), table[name].to_pylist()):
                raise ValueError(
                    f"{name!r} has type {kind}, but had type {earlier_kind} in earlier examples"
                )
        return cast


def _are_equal(left: Any, right: Any) -> bool:
    """True if two tables are equal; NaN equals NaN."""
    return bool(left.equals(right)) or (
        bool(left.schema.equals(right.schema)) and _same(left.to_pylist(), right.to_pylist())
    )


def _same(left: Any, right: Any) -> bool:
    """True if two Python values are equal. NaN equals NaN, and None equals a missing field."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(_same(left.get(name), right.get(name)) for name in {*left, *right})
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right) or (left != left and right != right)


def _as_file(field: Any, value: Any) -> tuple[str, bytes]:
    if not isinstance(field, str) or "/" in field or field != field.lower():
        raise ValueError(
            f"{field!r} cannot be a field of a tar shard: its name must be lower-case text without "
            "'/'"
        )
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
        f"{field!r} is a {type(value).__name__}: tar shards hold bytes, text, numbers and arrays"
    )


def _as_cell(value: Any) -> Any:
    """Return a value from which pyarrow infers the same dtype."""
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
