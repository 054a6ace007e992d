"""Single shards, written and read back: tar archives, and Parquet files."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from stoker.sources.arrow_rows import import_pyarrow
from stoker.sources.open_files import OpenFile
from stoker.sources.shards.index import build_index

_GROUP_BYTES = 8 << 20  # of a row group: what one random read costs


class ShardFormat(Protocol):
    """Writes a shard; the file is not there for others before it is renamed."""

    @property
    def nbytes(self) -> int:
        """How large it is by now, about."""
        ...

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        """Write an example. Raises ValueError or TypeError for what cannot be written."""
        ...

    def finish(self) -> None:
        """Complete the file and read it back. Raises ValueError where it differs."""
        ...

    def close(self) -> None:
        """Let go of the file, complete or not."""
        ...


class TarShard:
    """A tar archive: of each example a file for each field."""

    suffix = ".tar"

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self._written: list[tuple[str, dict[str, int]]] = []

    @property
    def nbytes(self) -> int:
        return self._file.tell()

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        digests = {}
        for field, value in example.items():
            field, data = _as_file(field, value)
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
            digests[field] = xxhash.xxh3_64_intdigest(data)
        self._written.append((key, digests))

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
    """A Parquet file: of each example a row. Its columns are those of its first example."""

    suffix = ".parquet"

    def __init__(self, path: str) -> None:
        self._pa = import_pyarrow("stoker pack --format parquet")
        self._parquet = import_pyarrow("stoker pack --format parquet", "pyarrow.parquet")
        self._path = path
        self._writer: Any = None
        self._groups: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._rows_bytes = self._groups_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._groups_bytes + self._rows_bytes

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        row = {field: _as_cell(value) for field, value in example.items()}
        self._rows.append(row)
        self._rows_bytes += sum(map(_size, row.values()))
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
        if not all(map(self._pa.Table.equals, found, self._groups)) or len(found) != len(
            self._groups
        ):
            raise ValueError(f"{self._path} does not hold what was written: is the disk broken?")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_group(self) -> None:
        schema = None if self._writer is None else self._writer.schema
        pa = self._pa
        try:
            table = pa.Table.from_pylist(self._rows, schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"examples of one kind are needed for Parquet: {error}") from error
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._groups.append(table)
        self._groups_bytes += self._rows_bytes
        self._rows, self._rows_bytes = [], 0


def _as_file(field: str, value: Any) -> tuple[str, bytes]:
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
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _size(value: Any) -> int:
    if isinstance(value, (bytes, str)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, dict)) else 8
