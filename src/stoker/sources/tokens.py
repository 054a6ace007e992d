"""Windows over files of tokens, for language models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.buffers import Recycler
from stoker.cache.fingerprint import Fingerprint, of_file
from stoker.checks import is_whole_number
from stoker.sources.patterns import Paths, find_files, shown
from stoker.sources.source import IndexedSource, Indices, Rows
from stoker.sources.token_files import TokenFile, find_tokens
from stoker.sources.window_reader import WindowReader

IGNORED_TARGET = -100
"""What ``torch.nn.functional.cross_entropy`` leaves out of the loss."""
_TOGETHER_BYTES = 2 << 20  # of batches that are gathered at once: more would leave the CPU's caches


class Window(NamedTuple):
    """An example of ``from_tokens``: arrays ``[length]`` of ``int64``."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """The inputs, one token later."""


class DocumentWindow(NamedTuple):
    """An example of ``from_tokens(separator=)``: arrays ``[length]``."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    """The inputs, one token later; ``IGNORED_TARGET`` where the next document begins."""
    documents: NDArray[np.int32]
    """Which document of the window a token belongs to, from 0 on."""


class TokenSource(IndexedSource, Rows):
    """Windows of ``length`` tokens, one every ``stride``, in each file on its own.

    A window is ``length + 1`` tokens of a file; what is left at a file's end is no example. Where a
    window is follows from its number alone.

    Args:
        files: paths or patterns of raw files, which need ``dtype``, and of one-dimensional
            ``.npy`` files, which have theirs.
        length, stride: in tokens; ``stride`` is ``length`` where it is None.
        dtype: of the tokens in raw files.
        separator: the token that ends a document.

    Raises:
        FileNotFoundError: a path or a pattern fits nothing.
        ValueError: a file is no whole number of tokens, no file is as long as a window, or a number
            is out of range.
        TypeError: wrong kinds of arguments; no ``dtype`` for raw files.
    """

    def __init__(
        self,
        files: Paths,
        length: int,
        stride: int | None = None,
        dtype: DTypeLike | None = None,
        separator: int | None = None,
    ) -> None:
        stride = length if stride is None else stride
        for name, number in (("length", length), ("stride", stride)):
            if not is_whole_number(number):
                raise TypeError(f"{name} is a whole number of tokens, not {number!r}")
            if number < 1:
                raise ValueError(f"{name} is at least 1 token, not {number}")
        if separator is not None and not is_whole_number(separator):
            raise TypeError(f"separator is a token, a whole number, not {separator!r}")
        self._length, self._stride, self._separator = int(length), int(stride), separator
        self._files = self._find(files, dtype)
        self._given = shown(files)
        counts = [max(0, (f.tokens - 1 - length) // stride + 1) for f in self._files]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._firsts = self._ends - np.array(counts, np.int64)
        if not self._ends[-1]:
            most = max(file.tokens for file in self._files)
            raise ValueError(
                f"from_tokens: a window takes {length + 1:,} tokens (length + 1), and the longest "
                f"of {len(counts):,} files has {most:,}"
            )
        self._reader = WindowReader(self._files)
        self.releases_gil = self._reader.releases_gil

    @property
    def name(self) -> str:
        return f"from_tokens({self._given}, {self._length})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._kind._fields

    @property
    def rows(self) -> Rows | None:
        return self

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fetch(self, indices: Indices) -> list[Any]:
        batch = self.allocate(len(indices), Recycler())
        self.gather(np.asarray(indices, np.int64), batch, 0)
        return [self._kind(*(array[row] for array in batch)) for row in range(len(indices))]

    def outline(self) -> str:
        borders = "" if self._separator is None else f", documents end with {self._separator}"
        return f"{len(self)} windows of {self._length} tokens every {self._stride}{borders}"

    def path(self, index: int) -> str | None:
        return self._locate(index)[0].path

    def name_of(self, index: int) -> str:
        file, token = self._locate(index)
        return f"{os.path.basename(file.path)} from token {token} on"

    def identity(self) -> str | None:
        """Return what a window is; files are known by path, size and times."""
        kinds = sorted({file.dtype.str for file in self._files})
        return f"tokens {kinds} {self._length} {self._separator}"

    def fingerprint(self, index: int) -> Fingerprint:
        """Return that of the file as it is now, with the number of the window's first token."""
        file, token = self._locate(index)
        path = os.path.abspath(file.path)
        return of_file(path, os.stat(path), token)

    def together(self, rows: int) -> int:
        return max(1, min(4, _TOGETHER_BYTES // (2 * 8 * rows * self._length)))

    def allocate(self, rows: int, recycler: Recycler) -> Any:
        shape = rows, self._length
        inputs, targets = recycler.array(shape, np.int64), recycler.array(shape, np.int64)
        if self._separator is None:
            return Window(inputs, targets)
        return DocumentWindow(inputs, targets, recycler.array(shape, np.int32))

    def split(self, batch: Any, rows: int) -> list[Any]:
        if len(batch.inputs) <= rows:
            return [batch]
        spans = [slice(start, start + rows) for start in range(0, len(batch.inputs), rows)]
        return [self._kind(*(array[span] for array in batch)) for span in spans]

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        rows = slice(start, start + len(indices))
        inputs, targets = batch.inputs[rows], batch.targets[rows]
        files = np.searchsorted(self._ends, indices, side="right")
        tokens = (indices - self._firsts[files]) * self._stride
        self._reader.read(files, tokens, inputs, targets)
        self._separate(batch, rows)

    def _window(self, tokens: NDArray[Any]) -> Any:
        """Return the example of so many tokens."""
        batch = self.allocate(1, Recycler())
        batch.inputs[0], batch.targets[0] = tokens[:-1], tokens[1:]
        self._separate(batch, slice(0, 1))
        return self._kind(*(array[0] for array in batch))

    def _separate(self, batch: Any, rows: slice) -> None:
        """Number the documents of windows, and leave out the targets behind their ends."""
        if self._separator is not None:
            ends = batch.inputs[rows] == self._separator
            batch.targets[rows][ends] = IGNORED_TARGET
            documents = batch.documents[rows]
            documents[:, 0] = 0
            np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])

    def _find(self, files: Paths, dtype: DTypeLike | None) -> list[TokenFile]:
        return [find_tokens(path, dtype) for path in find_files(files, "from_tokens")]

    @property
    def _kind(self) -> type[Window] | type[DocumentWindow]:
        return Window if self._separator is None else DocumentWindow

    def _locate(self, index: int) -> tuple[TokenFile, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._files[number], int(index - self._firsts[number]) * self._stride
