"""The lines of text files by number, as text or as the JSON in them.

The places of a file's lines are found in one pass. Lines end with LF, or CR and LF. A last line
needs no end, and the end of a last line begins no other. A byte order mark is no part of the first
line.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.schedule.numbering import Numbering
from stoker.sources.files import FileVersion, OpenFile, OpenFiles, compression_of, refuse_too_large
from stoker.sources.in_files import FileItem, InFiles
from stoker.sources.patterns import Paths, describe_paths, find_files
from stoker.sources.source import Indices

_LF = 10
_BLANKS = b" \t\r"
_UTF_8_MARK = b"\xef\xbb\xbf"
# UTF-32 in the order of little endian begins as UTF-16 does.
_OTHER_MARKS = {b"\xff\xfe": "UTF-16 or UTF-32", b"\xfe\xff": "UTF-16", b"\0\0\xfe\xff": "UTF-32"}
_HEAD_BYTES = 8
# A pass over a GiB of lines of 100 bytes takes 0.70 s of processor time with 256 KiB, 0.75 s with a
# MiB and 0.88 s with 16 MiB, which leave the CPU's caches.
_CHUNK_BYTES = 1 << 18


class _LineSource(InFiles):
    """Lines of files, one file after another; a subclass makes examples of their bytes."""

    _keeps_blank: bool
    _files: Sequence[LineIndex]

    def __init__(self, paths: Paths) -> None:
        self.given = describe_paths(paths, self.caller)
        found = find_files(paths, self.caller)
        self._files = [index_lines(path, keep_blank=self._keeps_blank) for path in found]
        self._lines = Numbering([len(file.ends) for file in self._files])
        if not self._lines.total:
            raise ValueError(f"{self.name} has no lines")
        self._opened = OpenFiles()

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

    def settings(self) -> str:
        return self.caller

    def item(self, index: int) -> FileItem:
        """Return the file and the line, as compilers write them, numbered by its end."""
        at, number = self._lines.find(index)
        file = self._files[at]
        return FileItem(file, int(file.ends[number]), f":{file.line(number)}")


class TextSource(_LineSource):
    """Lines as text. Empty lines count."""

    caller = "from_text"
    _keeps_blank = True

    def _make(self, line: bytes) -> str:
        return _text(line)


class JsonLinesSource(_LineSource):
    """The JSON value in each line; empty and blank lines are left out."""

    caller = "from_jsonl"
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


class LineIndex(NamedTuple):
    """The lines of a file: ``int64 [lines]`` each."""

    path: str
    version: FileVersion
    before: NDArray[np.int64]
    """The offset of the byte before each line, so that it and ``ends`` are views of one array."""
    ends: NDArray[np.int64]
    """The offset of its LF, or the file's size."""
    numbers: NDArray[np.int64] | None
    """The number of each line in the file, from 0 on; None if no line is left out."""

    def line(self, number: int) -> int:
        """Return a line's number for people: from 1 on, the same in an editor."""
        return 1 + (number if self.numbers is None else int(self.numbers[number]))


def index_lines(path: str, *, keep_blank: bool) -> LineIndex:
    """Find the lines of a file; without those that are blank, unless they are to be kept."""
    file = OpenFile(path)
    version = file.version()
    head = file.read(0, min(_HEAD_BYTES, version.size_bytes))
    if kind := compression_of(head):
        raise ValueError(
            f"{path} is compressed ({kind}): no line of it can be read by its offset. Decompress "
            "it, or read it in order by from_iterable"
        )
    if name := next((name for mark, name in _OTHER_MARKS.items() if head.startswith(mark)), ""):
        raise ValueError(f"{path} is {name}: make it UTF-8, such as by iconv -f utf-16 -t utf-8")
    first = len(_UTF_8_MARK) if head.startswith(_UTF_8_MARK) else 0
    bounds, heads = _bounds(file, first, version.size_bytes)
    if file.version() != version:
        raise ValueError(f"{path} is being written: wait for its end")
    found = LineIndex(path, version, bounds[:-1], bounds[1:], None)
    return found if keep_blank else _without_blank(found, heads, file)


def _bounds(file: OpenFile, first: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offset before the first line and those of all ends; and each line's first byte."""
    chunk = np.empty(_CHUNK_BYTES, np.uint8)
    found, heads, last = [np.array([first - 1])], [np.empty(0, np.uint8)], _LF
    for at in range(first, size, _CHUNK_BYTES):
        part = chunk[: size - at]
        file.read_parts((at,), part.data, len(part))
        if last == _LF:
            heads.append(part[:1].copy())
        ends = np.flatnonzero(part == _LF)
        found.append(ends + at)
        last = int(part[-1])
        heads.append(part[ends[: len(ends) - (last == _LF)] + 1])
    if last != _LF:  # no end behind the last line
        found.append(np.array([size]))
    return np.concatenate(found), np.concatenate(heads)


def _without_blank(lines: LineIndex, heads: NDArray[np.uint8], file: OpenFile) -> LineIndex:
    lengths = lines.ends - lines.before - 1
    is_blank, begins_blank = lengths == 0, np.isin(heads, np.frombuffer(_BLANKS, np.uint8))
    is_blank |= begins_blank & (lengths == 1)
    for number in np.flatnonzero(begins_blank & (lengths > 1)).tolist():
        line = file.read(int(lines.before[number]) + 1, int(lengths[number]))
        is_blank[number] = not line.strip(_BLANKS)
    if not is_blank.any():
        return lines
    kept = np.flatnonzero(~is_blank)
    return LineIndex(lines.path, lines.version, lines.before[kept], lines.ends[kept], kept)
