"""CSV files, which pyarrow reads into a table in memory."""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import csv

from stoker.basics.resources import format_bytes, usable_memory_bytes
from stoker.basics.validate import names_in
from stoker.sources.arrow.table import TableSource, to_table
from stoker.sources.files import compression_of, version_of
from stoker.sources.patterns import Paths, describe_paths, find_files

# Of usable memory: the table takes about as much as its text, while this is read too.
_MOST_SHARE = 0.5


class CsvSource(TableSource):
    """The rows of CSV files; a file that changes later is not read again."""

    def __init__(self, paths: Paths, columns: Sequence[str] | None, delimiter: str) -> None:
        self._columns = None if columns is None else names_in("columns", columns, "['x', 'y']")
        if not isinstance(delimiter, str) or len(delimiter) != 1:
            raise ValueError(f"delimiter is one character, such as ';', not {delimiter!r}")
        self._given = describe_paths(paths)
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
        return to_table(_with_nan(table, read), "from_csv")

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


def _with_nan(table: Any, read: Callable[..., Any]) -> Any:
    """Return a table with the NaN of its numbers, which pyarrow takes for missing values."""
    kinds = {
        field.name: pa.float64()
        for field in table.schema
        if (pa.types.is_floating(field.type) or pa.types.is_null(field.type))
        and table.column(field.name).null_count
    }
    if not kinds:
        return table
    missing = [text for text in csv.ConvertOptions().null_values if "nan" not in text.lower()]
    again = read(include_columns=[*kinds], column_types=kinds, null_values=missing)
    for name, column in zip(kinds, again.columns, strict=True):
        if column.null_count < len(table):
            table = table.set_column(table.column_names.index(name), name, column)
    return table
