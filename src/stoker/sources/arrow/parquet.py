"""Parquet files: rows by number, read by whole row groups.

At URLs a row group is a range of its file, read ahead while there is room.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import dataset, parquet

from stoker.basics.resources import format_bytes, usable_memory_bytes
from stoker.basics.validate import names_in
from stoker.basics.warn import warn
from stoker.errors import RemoteError
from stoker.schedule.numbering import Numbering
from stoker.schedule.selection import Selection
from stoker.sources.arrow.rows import GroupedRows, RowGroup, TableColumns
from stoker.sources.arrow.table import numbers_in, values_of, without_views_in
from stoker.sources.files import FileVersion, PartialFile, SeekableFile, version_of
from stoker.sources.in_files import FileItem, RangedFiles
from stoker.sources.patterns import Paths
from stoker.sources.remote.reader import BlockReader, HeldBlocks, RemoteFile
from stoker.sources.remote.storage import RemoteOptions
from stoker.sources.source import Indices, Reader, Rows

# Of usable memory. bench/results/records.json, row "disk: parquet": where row groups stay, later
# epochs are 100 times as fast as the first.
_KEPT_SHARE = 0.25
# Of the columns that are read, uncompressed: up to here they are taken to stay in memory, and
# ``.shuffle()`` shuffles all rows as one. The same on every host, as the order follows from it.
_WHOLE_BYTES = 256 << 20
# Of footers, as they are in files; in memory they are several times as large. Without them a row
# group of 5,000 rows with 8 columns takes 1.0 ms, not 0.55.
_FOOTERS_BYTES = 16 << 20
# Rows read for each that is used: beyond that nearly all reading is in vain. Chosen, not measured.
_RARELY = 20
# Of the memory for row groups: those that are read ahead are held beside the kept ones.
_AHEAD_SHARE = 0.25


class _OpenFiles:
    """The metadata of the files read last, up to a total size, and the last one, still open.

    Opening takes 50 us, a tenth of reading a row group of 12,500 rows with 8 columns. One thread at
    a time reads an open file. Pickles as none.
    """

    def __init__(self) -> None:
        self._metadata: dict[str, Any] = {}
        self._nbytes = 0
        self._idle: deque[tuple[str, Any]] = deque(maxlen=1)

    def __reduce__(self) -> tuple[object, ...]:
        return _OpenFiles, ()

    def add(self, path: str, metadata: Any) -> None:
        if self._nbytes + metadata.serialized_size > _FOOTERS_BYTES:
            self._metadata, self._nbytes = {}, 0
        self._metadata[path] = metadata
        self._nbytes += metadata.serialized_size

    def metadata(self, path: str) -> Any:
        """Return the metadata of a file; None if it is not held."""
        return self._metadata.get(path)

    def take(self, path: str) -> Any:
        """Return the file, which no other thread gets until it is kept again."""
        with contextlib.suppress(IndexError):
            held, file = self._idle.pop()
            if held == path:
                return file
        metadata = self.metadata(path)
        # A group of 12,500 rows with 8 columns takes 0.32 ms; with "pre_buffer", which fetches the
        # columns together beforehand, 0.47.
        file = parquet.ParquetFile(path, metadata=metadata, pre_buffer=False)
        if metadata is None:
            self.add(path, file.metadata)
        return file

    def keep(self, path: str, file: Any) -> None:
        self._idle.append((path, file))


class _File(NamedTuple):
    path: str
    version: FileVersion


class ParquetSource(RangedFiles):
    """The rows of Parquet files, as dicts by column.

    A row is read with its whole row group: at URLs as one range, from its first wanted column to
    its last. Each reading process keeps decoded groups (``held``), in up to a quarter of the memory
    that was free when the source was made.
    """

    caller = "from_parquet"

    def __init__(
        self, paths: Paths, options: RemoteOptions, columns: Sequence[str] | None = None
    ) -> None:
        if columns is not None:
            columns = names_in("columns", columns, "['image', 'label']")
        self._files: list[_File] = []
        self._groups: list[tuple[int, int]] = []  # file, and number in the file
        counts: list[int] = []
        file_rows: list[int] = []
        self._nbytes = files = 0
        schemas: dict[Any, str] = {}  # each with the first file that has it
        nulls: set[str] = set()
        self._opened = _OpenFiles()
        # At URLs the footers of all files, which would take requests to read again.
        self._metadata: dict[str, Any] = {}
        found = self.look(paths, options, self._look_at, suffix=".parquet")
        for path, version, metadata in found:
            files += 1
            if not metadata.num_rows:  # of an empty part nothing is read, whatever its columns
                continue
            schema = metadata.schema.to_arrow_schema()
            schemas.setdefault(schema, path)
            names = {*(schema.names if columns is None else columns)}
            for number, (rows, nbytes) in enumerate(_row_groups(path, metadata, names, nulls)):
                self._groups.append((len(self._files), number))
                counts.append(rows)
                self._nbytes += nbytes
            self._files.append(_File(path, version))
            if self.access is None:
                self._opened.add(path, metadata)
            else:
                self._metadata[path] = metadata
            file_rows.append(metadata.num_rows)
        if not schemas:
            raise ValueError(f"{self.name} has no rows, in {files:,} files")
        self._schema = _unified(schemas, columns)
        self._columns: list[str] = self._schema.names
        kinds = {tuple(_type_in(schema, name) for name in self._columns) for schema in schemas}
        self._is_mixed = len(kinds) > 1
        lacking = [None in each for each in zip(*kinds, strict=True)]
        nulls.update(itertools.compress(self._columns, lacking))
        self._read_columns = TableColumns(self._schema, nulls)
        self._rows_by_group, self._rows_by_file = Numbering(counts), Numbering(file_rows)
        self.prefers_blocks = self._nbytes > _WHOLE_BYTES
        self.held = HeldBlocks(int(usable_memory_bytes() * _KEPT_SHARE))
        self._used = 0
        self._has_warned = False
        self._spans = self._ranges()

    @property
    def fields(self) -> Sequence[str | int]:
        return self._columns

    def __len__(self) -> int:
        return self._rows_by_group.total

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The row groups."""
        return self._rows_by_group.ends

    @property
    def rows(self) -> Rows | None:
        """The rows of local files; None at URLs, where row groups are read ahead."""
        is_gathered = self.access is None and self._read_columns.are_stacked
        return self._group_rows(self._read) if is_gathered else None

    def reader(self, selection: Selection | None = None) -> Reader | None:
        if self.access is None:
            return None
        ahead_bytes = int(self.held.limit_bytes * _AHEAD_SHARE)
        return BlockReader(self, self.access.reader(self), ahead_bytes)

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        return self.examples_of(indices, self._read)

    def column(self, field: str | int) -> NDArray[Any]:
        return np.concatenate([numbers_in(each, str(field)) for each in self._column(field)])

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        if field is None:
            return super().labels(field)
        return np.concatenate([values_of(each, str(field)) for each in self._column(field)])

    def _column(self, field: str | int) -> list[Any]:
        """Read one column of all local files; a range has all columns of a row group."""
        if self.access is not None:
            raise TypeError(
                f"{self.name} cannot read one column of all files: give its numbers as an array"
            )
        parts = []
        for path, _ in self._files:
            with parquet.ParquetFile(path) as file:
                found = self._declared(file.read(columns=[field], use_threads=False), [field])
            parts.append(found.column(field))
        return parts

    def blocks_of(self, indices: Indices) -> NDArray[np.int64]:
        """Return the numbers of the row groups that contain these rows."""
        return self._rows_by_group.parts(np.asarray(indices, np.int64))

    def examples_of(self, indices: Indices, read: Callable[[int], Any]) -> list[Any]:
        """Return rows; ``read`` returns the table of a row group that is not held."""
        return self._group_rows(read).examples(indices)

    def of_columns(self, names: Sequence[str]) -> Self:
        """Return this source with other columns. Raises ValueError if one is missing."""
        twin = copy.copy(self)
        schemas: dict[Any, str] = {}
        for path, _ in self._files:
            schemas.setdefault(self._metadata_of(path).schema.to_arrow_schema(), path)
        twin._schema, twin._columns = _unified(schemas, names), list(names)
        twin._spans = twin._ranges()
        return twin

    def tables(self, groups: Sequence[int]) -> Iterator[Any]:
        """Yield the tables of row groups, read from the files again."""
        if self.access is None:
            yield from map(self._read, groups)
            return
        with contextlib.closing(self.access.reader(self)) as reader:
            for start in range(0, len(groups), reader.requests):
                some = groups[start : start + reader.requests]
                reader.expect(some)
                for group in some:
                    yield from reader.fetch([group])

    def groups_that_may_match(self, condition: Any) -> list[int]:
        """Return the row groups whose statistics allow Arrow's condition; None: all of them."""
        if condition is None:
            return list(range(len(self._groups)))
        kept: set[tuple[int, int]] = set()
        for number, (path, _) in enumerate(self._files):
            footer = pa.BufferOutputStream()
            self._metadata_of(path).write_metadata_file(footer)
            reader = pa.BufferReader(footer.getvalue())
            fragment = dataset.ParquetFileFormat().make_fragment(reader)
            some = fragment.subset(condition, schema=self._schema).row_groups
            kept.update((number, group.id) for group in some)
        return [number for number, group in enumerate(self._groups) if group in kept]

    def _metadata_of(self, path: str) -> Any:
        found = self._metadata.get(path, self._opened.metadata(path))
        return _read_metadata(path, path) if found is None else found

    def _group_rows(self, read: Callable[[int], Any]) -> GroupedRows:
        def group(number: int) -> RowGroup:
            found: RowGroup = self.held.get(number, lambda: RowGroup(read(number)))
            return found

        row_bytes = self._nbytes / len(self)
        return GroupedRows(self._rows_by_group, group, self._read_columns, row_bytes, self._note)

    def extent(self) -> str:
        return (
            f"{len(self):,} examples in {len(self._groups):,} row groups of "
            f"{format_bytes(self._nbytes)}, encoded; decoded, up to "
            f"{format_bytes(self.held.limit_bytes)} of them are kept in memory"
        )

    def settings(self) -> str:
        types = f" as {self._schema.types}" if self._is_mixed else ""  # those of other files, too
        return f"parquet {self._columns}{types}"

    def item(self, index: int) -> FileItem:
        file, row = self._rows_by_file.find(index)
        return FileItem(self._files[file], row, f", row {row}")

    def _look_at(self, file: PartialFile) -> tuple[str, FileVersion, Any]:
        """Return the path of a file, its version and its metadata."""
        given = file.path if self.access is None else file.as_file()
        return file.path, file.version, _read_metadata(file.path, given)

    def locate(self, index: int) -> RemoteFile:
        """Return a row group's range."""
        start, end = self._spans[index]
        file = self._files[self._groups[index][0]]
        return RemoteFile(file.path, end - start, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        """Return the table of a row group."""
        number, within = self._groups[index]
        path, version = self._files[number]
        first = self._spans[index][0]

        def read(start: int, nbytes: int) -> bytes:
            return data[start - first : start - first + nbytes] if start >= first else b""

        part = io.BufferedReader(SeekableFile(version.size_bytes, read))
        try:
            file = parquet.ParquetFile(part, metadata=self._metadata[path])
            table = file.read_row_group(within, columns=self._columns, use_threads=False)
            return self._declared(table, self._columns)
        except (OSError, ValueError) as error:  # pyarrow's are of these kinds
            raise ValueError(
                f"{path}, row group {within}, is damaged, or the file has changed since the "
                f"pipeline was built: {error}"
            ) from error

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the first and last byte of the wanted columns of each row group at URLs."""
        spans = []
        for number, within in self._groups if self.access is not None else ():
            about = self._metadata[self._files[number].path].row_group(within)
            chunks = [about.column(at) for at in range(about.num_columns)]
            wanted = [c for c in chunks if columns_of(c.path_in_schema, self._columns)]
            wanted = wanted or chunks[:1]  # of a file without these columns, only rows count
            starts = [c.dictionary_page_offset or c.data_page_offset for c in wanted]
            ends = [s + c.total_compressed_size for s, c in zip(starts, wanted, strict=True)]
            spans.append((min(starts), max(ends)))
        return spans

    def _read(self, group: int) -> Any:
        number, within = self._groups[group]
        path, version = self._files[number]
        found = os.stat(path)
        if version_of(found) != version:
            raise ValueError(f"{path} has changed since the pipeline was built: build it again")
        try:
            file = self._opened.take(path)
            table = file.read_row_group(within, columns=self._columns, use_threads=False)
            self._opened.keep(path, file)
            return self._declared(table, self._columns)
        except (OSError, ValueError) as error:  # pyarrow's are of these kinds
            raise ValueError(f"{path}, row group {within}: {error}") from error

    def _declared(self, table: Any, names: Sequence[str | int]) -> Any:
        """Return columns in the types that they have over all files; nulls for lacking ones."""
        fields, columns = [self._schema.field(name) for name in names], []
        for field in fields:
            kind = _type_in(table.schema, field.name)
            if kind is None:
                columns.append(pa.nulls(table.num_rows, field.type))
            else:
                column = table.column(field.name)
                columns.append(column if kind == field.type else column.cast(field.type))
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def _note(self, rows: int) -> None:
        """Count used rows; warn once if most of the rows read are dropped unused."""
        self._used += rows
        held = self.held
        if self._has_warned or held.rows_read < max(_RARELY * self._used, 2 * len(self)):
            return
        self._has_warned = True
        warn(
            f"{self.name}: {held.rows_read // max(1, self._used):,} rows are read for each one "
            f"that is used. Its row groups of {format_bytes(self._nbytes)} are read whole, in "
            f"random order, and {format_bytes(held.limit_bytes)} of them are kept. Put "
            ".cache(...) behind it, or write smaller row groups"
        )


def _read_metadata(path: str, file: Any) -> Any:
    try:
        return parquet.read_metadata(file)
    except (RemoteError, FileNotFoundError):
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a Parquet file, or is truncated: {error}") from error


def columns_of(path: str, names: Collection[str]) -> list[str]:
    """Return the columns to which a path in a file may lead: their names may have dots, too."""
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return [prefix for prefix in prefixes if prefix in names]


def _unified(schemas: Mapping[Any, str], columns: Sequence[str] | None) -> Any:
    """Return the schema of the columns that are read, of types that hold all files' values."""
    fields: dict[str, tuple[Any, str]] = {}
    for schema, path in schemas.items():
        for name in schema.names if columns is None else columns:
            places = schema.get_all_field_indices(name)
            if len(places) > 1:
                raise ValueError(f"{path} has two columns {name!r}: leave them out by columns=")
            for here in map(schema.field, places):
                there, first = fields.get(name, (here, path))
                try:
                    fields[name] = _wider(there, here), first
                except (pa.ArrowInvalid, pa.ArrowTypeError):
                    raise ValueError(
                        f"{path}: column {name!r} is {here.type}; in {first} it is {there.type}. "
                        "Give it one type in all files, or leave it out by columns="
                    ) from None
    for name in columns or ():
        if name not in fields:
            schema, path = next(iter(schemas.items()))
            raise ValueError(f"{path} has no column {name!r}, but {', '.join(schema.names)}")
    found = [fields[name][0] for name in columns or fields]
    return pa.schema([pa.field(each.name, without_views_in(each.type)) for each in found])


def _wider(one: Any, other: Any) -> Any:
    """Return a field that holds the values of both. Raises errors of pyarrow."""
    if one.type == other.type:
        return one
    plain = []
    for field in (one, other):  # dictionaries and views only store values in another way
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        plain.append(pa.schema([pa.field(field.name, without_views_in(kind))]))
    return pa.unify_schemas(plain, promote_options="permissive").field(0)


def _type_in(schema: Any, name: str) -> Any:
    """Return the type of a column; None if there is no such column."""
    at = schema.get_field_index(name)
    return None if at < 0 else schema.field(at).type


def _row_groups(
    path: str, metadata: Any, names: Collection[str], nulls: set[str]
) -> list[tuple[int, int]]:
    """Return the rows of row groups, and the bytes of these columns, uncompressed.

    Adds to ``nulls`` the columns that may contain some. Raises ValueError for damaged metadata.
    """
    groups = []
    try:
        for number in range(metadata.num_row_groups):
            group, nbytes = metadata.row_group(number), 0
            for column in map(group.column, range(group.num_columns)):
                found = columns_of(column.path_in_schema, names)
                nbytes += column.total_uncompressed_size if found else 0
                if not nulls.issuperset(found):
                    statistics = column.statistics if column.is_stats_set else None
                    if statistics is None or not statistics.has_null_count or statistics.null_count:
                        nulls.update(found)
            groups.append((group.num_rows, nbytes))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is a damaged Parquet file: {error}") from error
    counts = [rows for rows, _ in groups]
    if min(counts, default=-1) < 0 or sum(counts) != metadata.num_rows:
        raise ValueError(
            f"{path} is a damaged Parquet file: of {metadata.num_rows:,} rows, its row groups have "
            f"{sum(counts):,}"
        )
    return groups


def matching_rows(source: ParquetSource, filters: Any) -> NDArray[np.bool_]:
    """Return for each row of Parquet files whether it matches the filters, ``bool [n]``.

    It reads only the named columns, and only row groups that may have a match.
    """
    alternatives = _checked(filters)
    names = dict.fromkeys(column for all_of in alternatives for column, _, _ in all_of)
    source = source.of_columns([*names])
    matches, ends = np.zeros(len(source), np.bool_), source.blocks
    try:
        condition = parquet.filters_to_expression(alternatives)
        # Statistics do not tell of NaN, which is unequal to everything.
        told = [[c for c in all_of if c[1] not in ("!=", "not in")] for all_of in alternatives]
        groups = source.groups_that_may_match(
            parquet.filters_to_expression(told) if all(told) else None
        )
        for group, table in zip(groups, source.tables(groups), strict=True):
            found = dataset.dataset(table).to_table(columns={"matches": condition})["matches"]
            end = int(ends[group])
            matches[end - table.num_rows : end] = found.fill_null(False).to_numpy()
    except (TypeError, NotImplementedError) as error:  # of pyarrow
        raise TypeError(f"from_parquet(filters={filters!r}): {error}") from error
    except ValueError as error:
        raise ValueError(f"from_parquet(filters={filters!r}): {error}") from error
    return matches


def _checked(filters: Any) -> list[list[Any]]:
    """Return filters as alternatives, each a list of conditions. Raises TypeError."""
    if isinstance(filters, (list, tuple)) and filters:
        alternatives = filters if isinstance(filters[0], list) else [filters]
        if all(_are_conditions(conditions) for conditions in alternatives):
            return [list(map(tuple, conditions)) for conditions in alternatives]
    raise TypeError(
        "from_parquet() takes filters= as a list of conditions (column, operator, value), such as "
        f"[('height', '>=', 256)], or a list of such lists; not {filters!r}"
    )


def _are_conditions(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(map(_is_condition, given))


def _is_condition(each: Any) -> bool:
    return isinstance(each, (list, tuple)) and len(each) == 3 and isinstance(each[0], str)
