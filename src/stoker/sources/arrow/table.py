"""Tables in memory, as rows by number: Arrow's, a DataFrame of any library, or of CSV files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, csv, interchange, types

from stoker.basics.resources import format_bytes, usable_memory_bytes
from stoker.basics.validate import names_in
from stoker.sources.arrow.examples import is_list
from stoker.sources.arrow.rows import GroupedRows, in_chunks
from stoker.sources.files import compression_of, version_of
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import Paths, describe_paths, find_files
from stoker.sources.source import Indices, Rows

# Of usable memory: a table takes about as much as its CSV text, while this is read too.
_MOST_SHARE = 0.5
_INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")


class TableSource(IndexedSource):
    """The rows of a table. A table in memory has no identity."""

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
        found = self._grouped_rows
        return found if found is not None and found.are_stacked else None

    @functools.cached_property
    def _grouped_rows(self) -> GroupedRows | None:
        """The rows, unless more than the table must be read."""
        return GroupedRows.of(self._table)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_grouped_rows"}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fetch(self, indices: Indices) -> list[Any]:
        assert self._grouped_rows is not None
        return self._grouped_rows.examples(indices)

    def column(self, field: str | int) -> NDArray[Any]:
        return numbers_in(self._table.column(field), str(field))

    def labels(self, field: str | int | None = None) -> NDArray[Any]:
        if field is None:
            return super().labels(field)
        return values_of(self._table.column(field), str(field))

    def extent(self) -> str:
        return super().extent() + in_chunks(self._table)


def numbers_in(column: Any, name: str) -> NDArray[Any]:
    """Return the numbers in an Arrow column; for lists, text and bytes, their lengths."""
    kind = column.type
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} nulls: each needs a number")
    if is_list(kind):
        column = compute.list_value_length(column)
    elif types.is_string(kind) or types.is_large_string(kind):
        column = compute.utf8_length(column)
    elif types.is_binary(kind) or types.is_large_binary(kind):
        column = compute.binary_length(column)
    elif not (types.is_integer(kind) or types.is_floating(kind)):
        raise TypeError(f"column {name!r} holds {kind}: sizes are numbers, or lengths of lists")
    numbers: NDArray[Any] = column.to_numpy()
    return numbers


def values_of(column: Any, name: str) -> NDArray[Any]:
    """Return the numbers or texts in an Arrow column. Raises ValueError if a value is null."""
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} nulls: each needs a label")
    found: NDArray[Any] = column.to_numpy()
    return found.astype(str) if found.dtype == object else found


def to_table(data: Any, caller: str) -> Any:
    """Return a ``pyarrow.Table`` with the same columns, without copies if possible."""
    if isinstance(data, pa.Table):
        table = data
    elif hasattr(data, "__arrow_c_stream__"):
        try:
            table = _with_nan(pa.table(data), data)
        except (
            pa.ArrowInvalid,
            pa.ArrowTypeError,
        ) as error:  # a single column, values that Arrow does not know
            kind = type(data).__name__
            raise ValueError(f"{caller}: this {kind} is not a table for Arrow: {error}") from error
    elif hasattr(data, "__dataframe__"):
        table = interchange.from_dataframe(data)
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    else:
        raise TypeError(
            f"{caller} takes a pyarrow.Table or a DataFrame (pandas, Polars, ...), not "
            f"{type(data).__name__}"
        )
    names = [name for name in table.column_names if not _INDEX_OF_PANDAS.fullmatch(name)]
    again = sorted({name for name in names if names.count(name) > 1})
    if again:
        raise ValueError(f"{caller}: two columns are called {again[0]!r}")
    return without_views(_without_runs(table.select(names), caller))


def _with_nan(table: Any, data: Any) -> Any:
    """Return the table of a DataFrame with its NaN, which pandas gives to Arrow as nulls."""
    columns = (table.schema.pandas_metadata or {"columns": []})["columns"]
    for at, (about, field) in enumerate(zip(columns, table.schema, strict=False)):
        column, kind = table.column(at), about["numpy_type"]
        if kind.startswith("float") and column.null_count:  # of NumPy: Float64's are nulls
            table = table.set_column(at, field, compute.fill_null(column, float("nan")))
        elif kind == "object" and types.is_nested(field.type):
            values, nulls = data.iloc[:, at].tolist(), column.is_null().to_numpy()
            with contextlib.suppress(pa.ArrowInvalid):  # nulls of pandas within its lists
                column = pa.array(values, field.type, mask=nulls, from_pandas=False)
                table = table.set_column(at, field, column)
    return table


def _without_runs(table: Any, caller: str) -> Any:
    """Return a table with run-end-encoded columns decoded: Arrow cannot take their rows."""
    for place, field in enumerate(table.schema):
        if types.is_run_end_encoded(field.type):
            try:
                column = compute.run_end_decode(table.column(place))
            except pa.ArrowNotImplementedError as error:  # of dictionaries, of views
                raise ValueError(f"{caller}: column {field.name!r}: {error}") from error
            table = table.set_column(place, field.with_type(column.type), column)
    return table


def without_views(table: Any) -> Any:
    """Return a table with plain text for Polars's string views: Arrow cannot take their rows."""
    fields = [field.with_type(without_views_in(field.type)) for field in table.schema]
    schema = pa.schema(fields, table.schema.metadata)
    return table if schema == table.schema else table.cast(schema)


def without_views_in(kind: Any) -> Any:
    """Return a type with plain text for string views."""
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(without_views_in(field.type)) for field in kind])
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views_in(kind.value_type), kind.ordered)
    if not is_list(kind):
        return kind
    inner = kind.value_field.with_type(without_views_in(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(inner, kind.list_size)
    return pa.large_list(inner) if types.is_large_list(kind) else pa.list_(inner)


class CsvSource(TableSource):
    """The rows of CSV files; a file that changes later is not read again."""

    def __init__(self, paths: Paths, columns: Sequence[str] | None, delimiter: str) -> None:
        self._columns = None if columns is None else names_in("columns", columns, "['x', 'y']")
        if not isinstance(delimiter, str) or len(delimiter) != 1:
            raise ValueError(f"delimiter is one character, such as ';', not {delimiter!r}")
        self._given = describe_paths(paths, "from_csv")
        paths = find_files(paths, "from_csv")
        versions = [version_of(os.stat(path)) for path in paths]
        nbytes = sum(version.size_bytes for version in versions)
        if nbytes > _MOST_SHARE * usable_memory_bytes():
            raise ValueError(
                f"{self.name}: {format_bytes(nbytes)} of text are too much for this host's memory: "
                "write Parquet files (pyarrow.csv.open_csv reads part by part), and use "
                "from_parquet"
            )
        text = repr((self._columns, delimiter, list(map(os.path.abspath, paths)), versions))
        self._identity = f"CSV {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()}"
        tables = [self._read(path, delimiter) for path in paths]
        self._table = self._join(paths, tables)
        if not len(self):
            raise ValueError(f"{self.name} has no rows")

    @property
    def name(self) -> str:
        return f"from_csv({self._given})"

    def identity(self) -> str | None:
        """Return a digest of the files' paths, sizes and times, and of how they were read."""
        return self._identity

    def _read(self, path: str, delimiter: str) -> Any:
        with open(path, "rb") as file:
            kind = compression_of(file.read(8))
        # By its name alone, pyarrow would take a compressed file for text.
        codec = {"": None, "bzip2": "bz2"}.get(kind, kind)
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)

        def read(**how: Any) -> Any:
            converted = csv.ConvertOptions(**how)
            return csv.read_csv(
                pa.input_stream(path, codec), parse_options=parse, convert_options=converted
            )

        try:
            table = read(include_columns=self._columns)
        except KeyError:
            with csv.open_csv(pa.input_stream(path, codec), parse_options=parse) as reader:
                there = reader.schema.names
            lacking = [name for name in self._columns or () if name not in there]
            raise ValueError(
                f"{path} has no column {lacking[0]!r}, only {reprlib.repr(there)[1:-1]}: name "
                "those of its first line, and the delimiter= between them"
            ) from None
        except (OSError, ValueError) as error:  # pyarrow's are of these kinds
            raise ValueError(f"{path} cannot be read as CSV: {error}") from error
        for field in table.schema:
            if pa.types.is_binary(field.type):  # what pyarrow makes of text in other encodings
                raise ValueError(
                    f"{path}: column {field.name!r} is not UTF-8: convert the file, such as by "
                    "iconv -f latin1 -t utf-8"
                )
        return _with_read_nan(to_table(table, "from_csv"), read)

    def _join(self, paths: Sequence[str], tables: Sequence[Any]) -> Any:
        names = tables[0].column_names
        for path, table in zip(paths, tables, strict=True):
            if sorted(table.column_names) != sorted(names):
                raise ValueError(
                    f"{path} has the columns {table.column_names}, and {paths[0]} {names}: the "
                    "files of a source have the same ones"
                )
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"{self.name}: a column holds numbers in one file and text in another: {error}"
            ) from error


def _with_read_nan(table: Any, read: Callable[..., Any]) -> Any:
    """Return a table with the NaN of its numbers, which pyarrow takes for missing values."""
    kinds = {
        field.name: pa.float64()
        for field in table.schema
        if (pa.types.is_floating(field.type) or pa.types.is_null(field.type))
        and table.column(field.name).null_count
    }
    if not kinds:
        return table
    usual = csv.ConvertOptions().null_values
    missing = [text for text in usual if text.lower().removeprefix("-") != "nan"]
    again = read(include_columns=[*kinds], column_types=kinds, null_values=missing)
    for name, column in zip(kinds, again.columns, strict=True):
        if column.null_count < len(table):
            table = table.set_column(table.column_names.index(name), name, column)
    return table
