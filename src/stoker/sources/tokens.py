"""Files of tokens, for language models: windows, or documents; at URLs each is one request.

A separator tells where documents end, which one pass over the files finds; or Megatron's ``.idx``
file beside each ``.bin``, which alone is read then. A document takes 12 bytes of memory.

``stoker-native``, where it is installed, reads and widens many windows in one call without the GIL.
If it stops at an error, NumPy continues, and raises the precise error.
"""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.basics.buffers import Allocator, Recycler
from stoker.basics.signals import pass_on
from stoker.basics.validate import is_whole_number
from stoker.images import native
from stoker.schedule.numbering import Numbering
from stoker.sources.files import MOST_OPEN, FileVersion, OpenFiles, PartialFile
from stoker.sources.in_files import FileItem, RangedFiles
from stoker.sources.patterns import Paths, split_query
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.storage import RemoteOptions
from stoker.sources.source import Indices, Rows

IGNORED_TARGET = -100
"""The target that ``torch.nn.functional.cross_entropy`` leaves out of the loss: its default
``ignore_index``."""
# Of batches that are gathered at once: more would leave the CPU's caches. Twice that of arrays, for
# there are inputs and targets.
_TOGETHER_BYTES = 2 << 20
# In a call: Ctrl-C waits for its end, and they share a call's cost. Chosen, not measured.
_WINDOWS = 256
# Their files stay open meanwhile, beside those that always do.
_WINDOWS_OF_MANY_FILES = 16
_NPY = b"\x93NUMPY"
MEGATRON = b"MMIDIDX\0\0"
"""The first bytes of the ``.idx`` files that Megatron writes beside its token files."""
# What llm.c's files begin with, before their number of tokens: a magic number and a version, int32.
_LLM_C = {struct.pack("<2i", 20240520, 1): "<u2", struct.pack("<2i", 20240801, 7): "<u4"}
_LLM_C_BYTES = 1024  # of the header
# Magic numbers of at least four bytes: raw tokens begin so by chance once in four billion files.
_OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive (.npz, .pt)",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x1f\x8b\x08\x00": "compressed (gzip)",
    b"\x1f\x8b\x08\x08": "compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"\xfd7zXZ\x00": "compressed (xz)",
    b"BZh91AY&SY": "compressed (bzip2)",
    MEGATRON: "Megatron's index (leave length and separator out, or give its .bin file)",
}
_HEAD_BYTES = 12
_SCAN_BYTES = 1 << 20  # at URLs a request. Chosen, not measured.
_INDEX_HEAD = struct.Struct("<9sQBQQ")
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Bounds = NDArray[np.int64]
"""Where the documents of a file begin, and where the last one ends, in tokens."""


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
    """The number of each token's document in the window, from 0 on."""


class TokenSource(RangedFiles, Rows):
    """Windows of ``length`` tokens, one every ``stride``, in each file on its own.

    A window is ``length + 1`` tokens of a file; a shorter rest at a file's end is not an example. A
    window's place follows from its number alone.
    """

    caller = "from_tokens"
    _files: Sequence[TokenFile]

    def __init__(
        self,
        paths: Paths,
        options: RemoteOptions,
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
        self._files = self.look(paths, options, lambda file: token_file(file, dtype))
        counts = [max(0, (f.tokens - 1 - length) // stride + 1) for f in self._files]
        self._windows = Numbering(counts)
        if not self._windows.total:
            most = max(file.tokens for file in self._files)
            raise ValueError(
                f"from_tokens: a window takes {length + 1:,} tokens (length + 1), and the longest "
                f"of {len(counts):,} files has {most:,}"
            )
        self._begin_reading()

    @property
    def name(self) -> str:
        return f"{self.caller}({self.given}, {self._length})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._kind._fields

    @property
    def rows(self) -> Rows | None:
        """This source; None at URLs, where single windows are read ahead."""
        return self if self.access is None else None

    def __len__(self) -> int:
        return self._windows.total

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        batch = self.allocate(len(indices), Recycler())
        self.gather(np.asarray(indices, np.int64), batch, 0)
        return [self._kind(*(array[row] for array in batch)) for row in range(len(indices))]

    def signature(self) -> str:
        borders = "" if self._separator is None else f", documents end with {self._separator}"
        return f"{len(self)} windows of {self._length} tokens every {self._stride}{borders}"

    def settings(self) -> str:
        kinds = sorted({file.dtype.str for file in self._files})
        return f"tokens {kinds} {self._length} {self._separator}"

    def item(self, index: int) -> FileItem:
        file, token = self._locate(index)
        return FileItem(file, token, f" from token {token} on")

    def concatenate(self, others: Sequence[Rows]) -> TokenSource | None:
        """Return the windows of several sources as one, if all have the same form."""
        each = [self, *(other for other in others if isinstance(other, TokenSource))]
        if len(each) <= len(others) or len({source._form for source in each}) > 1:
            return None
        made = copy.copy(self)
        made._files = [file for source in each for file in source._files]
        made._windows = Numbering(
            np.concatenate([source._windows.ends - source._windows.starts for source in each])
        )
        made._begin_reading()
        # With more files than stay open, or other dtypes, a reader for each is faster.
        return made if made.releases_gil == all(source.releases_gil for source in each) else None

    def together(self, rows: int) -> int:
        return max(1, min(4, _TOGETHER_BYTES // (2 * 8 * rows * self._length)))

    def allocate(self, rows: int, recycler: Allocator) -> Any:
        shape = rows, self._length
        inputs, targets = recycler.array(shape, np.int64), recycler.array(shape, np.int64)
        if self._separator is None:
            return Window(inputs, targets)
        return DocumentWindow(inputs, targets, recycler.array(shape, np.int32))

    def gather(self, indices: NDArray[np.int64], batch: Any, start: int) -> None:
        rows = slice(start, start + len(indices))
        inputs, targets = batch.inputs[rows], batch.targets[rows]
        which, windows = self._windows.find_many(indices)
        starts = self._begins[which] + windows * self._stride * self._item_bytes[which]
        done = self._read_natively(which.tolist(), starts, inputs, targets)
        for number in dict.fromkeys(which[done:].tolist()):
            there = which == number
            there[:done] = False
            path, version, dtype, _, _ = self._files[number]
            found = np.empty((np.count_nonzero(there), self._length + 1), dtype)
            out = found.view(np.uint8).reshape(-1).data
            file = self._opened.open(path, version)
            file.read_parts(starts[there].tolist(), out, found[0].nbytes)
            of_file = slice(None) if there.all() else there
            inputs[of_file] = found[:, :-1]
            targets[of_file] = found[:, 1:]
        self._separate(batch, rows)

    def locate(self, index: int) -> RemoteFile:
        file, token = self._locate(index)
        nbytes = (self._length + 1) * file.dtype.itemsize
        start = file.start + token * file.dtype.itemsize
        return RemoteFile(file.path, nbytes, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        tokens = np.frombuffer(data, self._locate(index)[0].dtype)
        batch = self.allocate(1, Recycler())
        batch.inputs[0], batch.targets[0] = tokens[:-1], tokens[1:]
        self._separate(batch, slice(0, 1))
        return self._kind(*(array[0] for array in batch))

    def _separate(self, batch: Any, rows: slice) -> None:
        """Number the documents of windows, and blank the targets that follow their ends."""
        if self._separator is not None:
            ends = batch.inputs[rows] == self._separator
            batch.targets[rows][ends] = IGNORED_TARGET
            documents = batch.documents[rows]
            documents[:, 0] = 0
            np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])

    def _begin_reading(self) -> None:
        self._opened = OpenFiles()
        self._begins = np.array([file.start for file in self._files], np.int64)
        self._item_bytes = np.array([file.dtype.itemsize for file in self._files], np.int64)
        kinds = {file.dtype for file in self._files}
        (dtype,) = kinds if len(kinds) == 1 else (None,)
        self._dtype = dtype if dtype is not None and dtype.isnative else None
        stay_open = len(self._files) <= MOST_OPEN
        self._at_once = _WINDOWS if stay_open else _WINDOWS_OF_MANY_FILES
        # NumPy's many short reads release the GIL, too, but each then waits for other threads to
        # give it back; so does opening very many files again and again.
        self.releases_gil = stay_open and self._dtype is not None and _of_library() is not None

    def _read_natively(
        self, files: list[int], starts: NDArray[np.int64], inputs: Any, targets: Any
    ) -> int:
        """Read windows with the library, from these bytes of these files on; return how many."""
        read_windows, dtype = _of_library(), self._dtype
        if read_windows is None or dtype is None:
            return 0
        for at in range(0, len(files), self._at_once):
            part = slice(at, at + self._at_once)
            opened = {n: self._opened.open(*self._files[n][:2]) for n in dict.fromkeys(files[part])}
            descriptors = np.array([opened[n].descriptor for n in files[part]], np.int32)
            done = read_windows(descriptors, starts[part], dtype, inputs[part], targets[part])
            if done < len(descriptors):
                return at + done
        return len(files)

    @property
    def _kind(self) -> type[Window] | type[DocumentWindow]:
        return Window if self._separator is None else DocumentWindow

    @property
    def _form(self) -> tuple[Any, ...]:
        return type(self), self._length, self._stride, self._separator

    def _locate(self, index: int) -> tuple[TokenFile, int]:
        file, window = self._windows.find(index)
        return self._files[file], window * self._stride


class TokenFile(NamedTuple):
    """A file of tokens, with its version."""

    path: str
    version: FileVersion
    dtype: np.dtype[Any]
    start: int
    """The offset of the first token, in bytes."""
    tokens: int


def token_file(file: PartialFile, dtype: DTypeLike | None) -> TokenFile:
    """Return a file's token dtype and count, from its first bytes."""
    path, version, start, end = file.path, file.version, 0, file.version.size_bytes
    head = file.read(0, min(_HEAD_BYTES, version.size_bytes))
    if split_query(path)[0].endswith(".npy") or head.startswith(_NPY):
        opened = file.as_file()
        shape, kind = _npy_header(path, opened)
        if len(shape) != 1:
            raise ValueError(f"{path} is no row of tokens: its shape is {list(shape)}")
        start = opened.tell()
        end = start + shape[0] * kind.itemsize  # as numpy.load does, it reads nothing behind
        if version.size_bytes < end:
            raise ValueError(
                f"{path} is not an array of tokens: it is truncated, with {version.size_bytes:,} "
                f"bytes for {shape[0]:,} tokens"
            )
    elif head[:8] in _LLM_C:
        kind, start = np.dtype(_LLM_C[head[:8]]), _LLM_C_BYTES
        tokens = int.from_bytes(head[8:], "little")
        if version.size_bytes != start + tokens * kind.itemsize:
            raise ValueError(f"{path} is truncated: its header says {tokens:,} tokens of {kind}")
    else:
        for magic, other in _OTHER_KINDS.items():
            if head.startswith(magic):
                raise ValueError(
                    f"{path} is {other}, not raw tokens: write these with array.tofile, or a .npy "
                    "file with numpy.save"
                )
        if dtype is None:
            raise TypeError(f"what are the tokens in {path}? Say so, such as dtype='uint16'")
        kind = np.dtype(dtype)
    if dtype is not None and np.dtype(dtype) != kind:
        raise ValueError(f"{path} holds {kind}, not {np.dtype(dtype)}: leave dtype out")
    if kind.kind not in "iu" or not np.can_cast(kind, np.int64):
        raise TypeError(f"tokens are integers that fit into int64; those in {path} are {kind}")
    nbytes = end - start
    if nbytes % kind.itemsize:
        raise ValueError(
            f"{path} is truncated, or of another dtype: its {nbytes:,} bytes are no whole number "
            f"of {kind} tokens"
        )
    return TokenFile(path, version, kind, start, nbytes // kind.itemsize)


def _npy_header(path: str, file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    form = np.lib.format
    try:
        first = form.read_magic(file) == (1, 0)
        read = form.read_array_header_1_0 if first else form.read_array_header_2_0
        shape, _, kind = read(file)
    except Exception as error:  # NumPy parses the header as Python: anything may be wrong with it
        pass_on(error)
        raise ValueError(f"{path} is not an array of tokens: {error}") from error
    if any(length < 0 for length in shape):
        raise ValueError(f"{path} is not an array of tokens: its shape is {list(shape)}")
    return shape, kind


def _of_library() -> Callable[..., int] | None:
    """Return a function of the library; None without the library, or if it is older than 0.2."""
    found: Callable[..., int] | None = getattr(native.library(), "read_windows", None)
    return found


class DocumentSource(RangedFiles):
    """The documents of token files, ``int64 [tokens]`` each, with the separator that ends them.

    Documents of a single token, as of a separator alone, are left out.
    """

    caller = "from_tokens"
    fields = ()
    _files: Sequence[TokenFile]

    def __init__(
        self,
        paths: Paths,
        options: RemoteOptions,
        dtype: DTypeLike | None = None,
        separator: int | None = None,
    ) -> None:
        if separator is not None and not is_whole_number(separator):
            raise TypeError(f"separator is a token, a whole number, not {separator!r}")

        def look(file: PartialFile) -> tuple[TokenFile, Bounds] | _Index:
            if file.path.endswith(".idx") and separator is None:
                return _read_index(file)
            found = token_file(file, dtype)
            return found, _split(file, found, separator)

        found = self.look(paths, options, look)
        each = [one for one in found if not isinstance(one, _Index)]
        indices = {one.path: one for one in found if isinstance(one, _Index)}
        if indices:  # alone: what says where documents end in other files is refused beside them
            given = self.given
            each = self.look(list(indices), options, lambda bin: _of_index(indices[bin.path], bin))
            self.given = given
        self._files = [file for file, _ in each]
        sizes = np.concatenate([np.diff(bounds) for _, bounds in each])
        begins = np.concatenate([bounds[:-1] for _, bounds in each])
        kept = sizes > 1
        if not kept.any():
            raise ValueError(f"{self.name} has no documents")
        files = np.repeat(np.arange(len(each)), [len(bounds) - 1 for _, bounds in each])
        self._numbering = Numbering(np.bincount(files[kept], minlength=len(each)))
        self._begins, self._sizes = begins[kept], sizes[kept]
        if self._sizes.max() <= np.iinfo(np.int32).max:
            self._sizes = self._sizes.astype(np.int32)
        self._digest = f"{zlib.crc32(self._sizes.data):08x}"
        self._opened = OpenFiles()

    def __len__(self) -> int:
        return len(self._sizes)

    def lengths(self) -> NDArray[Any]:
        return self._sizes

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        found = []
        for index in map(int, indices):
            file, part = self._file_of(index), self.locate(index)
            assert part.start is not None
            data = self._opened.read(file.path, file.version, part.start, part.size)
            found.append(self.example(index, data))
        return found

    def locate(self, index: int) -> RemoteFile:
        file = self._file_of(index)
        each = file.dtype.itemsize
        start, nbytes = file.start + int(self._begins[index]) * each, int(self._sizes[index]) * each
        return RemoteFile(file.path, nbytes, start, *file.version[:2])

    def example(self, index: int, data: bytes) -> Any:
        return np.frombuffer(data, self._file_of(index).dtype).astype(np.int64)

    def item(self, index: int) -> FileItem:
        token = int(self._begins[index])
        return FileItem(self._file_of(index), token, f" from token {token} on")

    def extent(self) -> str:
        return f"{len(self):,} documents of {self._sizes.sum():,} tokens"

    def signature(self) -> str:
        return f"{len(self)} documents of tokens, sizes {self._digest}"

    def settings(self) -> str:
        return f"documents {sorted({file.dtype.str for file in self._files})} {self._digest}"

    def _file_of(self, index: int) -> TokenFile:
        return self._files[self._numbering.find(index)[0]]


class _Index(NamedTuple):
    """What an ``.idx`` file says of the ``.bin`` file with this path."""

    path: str
    dtype: str
    bounds: Bounds


def _split(file: PartialFile, found: TokenFile, separator: int | None) -> Bounds:
    """Find the documents of a file by the token that ends them."""
    if separator is None:
        raise ValueError(
            f"from_tokens: where do the documents in {file.path} end? Give separator=, the token "
            "that ends each, or Megatron's .idx files; for windows give their length"
        )
    each, bounds = found.dtype.itemsize, [np.zeros(1, np.int64)]
    step = _SCAN_BYTES // each
    for first in range(0, found.tokens, step):
        nbytes = min(step, found.tokens - first) * each
        part = np.frombuffer(file.read(found.start + first * each, nbytes), found.dtype)
        bounds.append(np.flatnonzero(part == separator) + (first + 1))
    if not any(map(len, bounds[1:])):
        raise ValueError(f"from_tokens: {file.path} has no token {separator}, the separator")
    return np.append(np.concatenate(bounds), found.tokens)


def _read_index(file: PartialFile) -> _Index:
    """Read Megatron's index: header, sequences' lengths and offsets, documents' first sequences."""
    magic, version, code, sequences, count = _INDEX_HEAD.unpack(file.read(0, _INDEX_HEAD.size))
    if magic != MEGATRON or version != 1 or code not in _INDEX_DTYPES:
        raise ValueError(f"{file.path} is no index of token files as Megatron writes it")
    behind = _INDEX_HEAD.size + 12 * sequences  # int32 and int64 for each
    if file.version.size_bytes < behind + 8 * count:
        raise ValueError(f"{file.path} is truncated")
    lengths = np.frombuffer(file.read(_INDEX_HEAD.size, 4 * sequences), "<i4")
    ends = np.append(np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))
    firsts = np.frombuffer(file.read(behind, 8 * count), "<i8").clip(0, sequences)
    return _Index(file.path.removesuffix("idx") + "bin", _INDEX_DTYPES[code], ends[firsts])


def _of_index(index: _Index, file: PartialFile) -> tuple[TokenFile, Bounds]:
    found, bounds = token_file(file, index.dtype), index.bounds
    if bounds.max(initial=0) > found.tokens or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{file.path} does not fit its .idx file: it has {found.tokens:,} tokens")
    return found, bounds
