"""The lines of text files by number, as text or as the JSON in them."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from typing import Any

import msgspec
import numpy as np

from stoker.basics.fingerprint import Fingerprint, of_file
from stoker.schedule.numbering import Numbering
from stoker.sources.files import OpenFiles, refuse_too_large
from stoker.sources.patterns import Paths, describe_paths, find_files
from stoker.sources.source import Fingerprinted, Indices, OwnSource
from stoker.sources.text.line_index import LineIndex, index_lines


class _LineSource(OwnSource, Fingerprinted[Any]):
    """Lines of files, one file after another; a subclass makes examples of their bytes.

    Raises FileNotFoundError if a path or a pattern matches no file; ValueError for files that have
    no lines, or cannot be read by line; TypeError for other arguments.
    """

    _caller: str
    _keeps_blank: bool

    def __init__(self, files: Paths) -> None:
        self._given = describe_paths(files)
        found = find_files(files, self._caller)
        self._files = [index_lines(path, keep_blank=self._keeps_blank) for path in found]
        self._lines = Numbering([len(file.ends) for file in self._files])
        if not self._lines.total:
            raise ValueError(f"{self.name} has no lines")
        self._opened = OpenFiles()

    @property
    def name(self) -> str:
        return f"{self._caller}({self._given})"

    def __len__(self) -> int:
        return self._lines.total

    def fetch(self, indices: Indices) -> list[Any]:
        files, numbers = self._lines.find_many(np.asarray(indices, np.int64))
        examples: list[Any] = [None] * len(files)
        for file in dict.fromkeys(files.tolist()):
            lines = self._files[file]
            places = np.flatnonzero(files == file)
            starts, ends = lines.before[numbers[places]] + 1, lines.ends[numbers[places]]
            refuse_too_large(int((ends - starts).max()), lines.path)
            # Once for all its lines: looking up the version takes as long as reading a line.
            opened = self._opened.open(lines.path, lines.version)
            parts = zip(places.tolist(), starts.tolist(), (ends - starts).tolist(), strict=True)
            for place, start, nbytes in parts:
                examples[place] = self._make(opened.read(start, nbytes).removesuffix(b"\r"))
        return examples

    @abstractmethod
    def _make(self, line: bytes) -> Any:
        """Return the example of a line without its end. Raises ValueError."""

    def extent(self) -> str:
        files = f" in {len(self._files):,} files" if len(self._files) > 1 else ""
        return f"{len(self):,} lines{files}"

    def path(self, index: int) -> str | None:
        """Return the file and the line, as compilers write them."""
        file, number = self._locate(index)
        return f"{file.path}:{file.line(number)}"

    def name_of(self, index: int) -> str:
        file, number = self._locate(index)
        return f"{os.path.basename(file.path)}:{file.line(number)}"

    def identity(self) -> str | None:
        """Return the kind; lines are identified by their file's path, size and times, and place."""
        return self._caller

    def fingerprint(self, index: int) -> Fingerprint:
        file, number = self._locate(index)
        path = os.path.abspath(file.path)
        return of_file(path, os.stat(path), int(file.ends[number]))

    def _locate(self, index: int) -> tuple[LineIndex, int]:
        file, number = self._lines.find(index)
        return self._files[file], number


class TextSource(_LineSource):
    """Lines as text. Empty lines count."""

    _caller = "from_text"
    _keeps_blank = True

    def _make(self, line: bytes) -> str:
        return _text(line)


class JsonLinesSource(_LineSource):
    """The JSON value in each line; empty and blank lines are left out."""

    _caller = "from_jsonl"
    _keeps_blank = False

    def _make(self, line: bytes) -> Any:
        try:
            return msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # NaN, numbers beyond floats and halves of surrogate pairs, all of which Python's json
            # writes and reads, or a mistake.
            text = _text(line)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            way = ""
            if text.strip() in ("[", "{") or text.lstrip().startswith("[{"):
                way = (
                    ". Each line is to hold one whole value; if the file is one value over many "
                    "lines, use from_dataset(json.load(file))"
                )
            raise ValueError(f"this is not JSON: {error}{way}") from None


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start:,} of the line, 0x{line[error.start]:02x}, is not UTF-8: convert "
            "the file, such as by iconv -f latin1 -t utf-8"
        ) from None
