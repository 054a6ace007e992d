"""The beginnings of pipelines: a function for each kind of data."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.chain.chain import Chain
from stoker.echoing.stage import Factor
from stoker.engine.skip import MaxErrors
from stoker.foreign import explain_calls
from stoker.pipeline import Pipeline
from stoker.sources.arrays import ArraySource
from stoker.sources.dataset import of_dataset
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import Paths
from stoker.stages.iterable import IterableSource
from stoker.stages.loader import LoaderSource

if TYPE_CHECKING:
    from stoker.sources.folder import LabeledFile, LabeledImage
    from stoker.sources.remote.files import File
    from stoker.sources.remote.storage import RemoteOptions
    from stoker.sources.tokens import DocumentWindow, Window


T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Array = NDArray[Any]


class _Items(Protocol[T_co]):
    """The argument of ``from_dataset``, for type checkers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@overload
def from_dataset(
    dataset: _Items[T], *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[T]: ...


@overload
def from_dataset(
    dataset: Any, *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[Any]: ...


def from_dataset(
    dataset: Any, *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[Any]:
    """Read any object with ``__len__`` and ``__getitem__`` (integers from 0).

    ``__getitems__(indices)`` is used if there is one, unless a subclass or a wrapper overrides
    ``__getitem__`` alone. torch datasets work; Hugging Face's do, too, but ``from_huggingface``
    reads them faster.
    It is called as it is: in the loop's thread where it is cheap, in worker processes where it is
    not, in threads if it is declared ``stoker.thread_safe``. What it draws from its own or the
    global random generators is seeded for each example.

    Args:
        dataset: the object.
        seed: of shuffling, echoing and random maps; drawn at random by default.
        max_errors: how many examples of an epoch may be skipped after an error in a stage before
            ``batch``: a number (``100``) or a share (``"1%"``). Each skip is logged (logger
            ``stoker``) and counted in ``stats()``; one too many raises TooManyErrors with the list.
            A stage may have its own.

    Raises TypeError if a method is missing.
    """
    if isinstance(dataset, Pipeline):
        raise TypeError("from_dataset() takes a dataset; a pipeline goes on: pipeline.map(fn)")
    return Pipeline(Chain.begin(of_dataset(dataset), seed, max_errors))


def from_huggingface(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
) -> Pipeline[dict[str, Any]]:
    """Read rows of a Hugging Face ``datasets.Dataset``: dicts by column, as in ``from_parquet``.

    Rows come straight from its memory-mapped Arrow tables. Images, sound and video are the stored
    bytes: decode them in ``.map()``. The dataset's format is ignored, except for its columns;
    ``from_dataset`` keeps the format.

    Args:
        dataset: one split, not streaming.
        columns: the columns to read; by default those of its format.
        seed, max_errors: as in ``from_dataset``.

    Raises TypeError for any other object, ValueError if a column is missing, and for a dataset
    without rows or with a transform (``with_transform``).
    """
    _check_pyarrow("from_huggingface")
    from stoker.sources.arrow.huggingface import HuggingFaceSource

    return _begin(HuggingFaceSource(dataset, columns), seed, max_errors)


def from_iterable(
    examples: Iterable[T] | Callable[[], Iterable[T]],
    *,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
) -> Pipeline[T]:
    """Read a stream: a re-iterable object of examples, or a function that returns an iterator.

    One pass is one epoch. This process iterates the stream, in one thread at a time, ahead of the
    consumer. Its examples cannot be read again, so there is no state in the middle of an epoch, and
    shuffling uses a buffer. An exception of the stream ends the epoch and cannot be skipped.

    If the object, or the iterator that it returns, has ``state_dict()`` and
    ``load_state_dict(state)`` (a streaming dataset of Hugging Face, a ``torchdata.nodes.Loader``),
    there is a state in the middle of an epoch: the pipeline takes that state after every 16th
    example, so a resume reads up to 15 again.
    If it has ``set_epoch(epoch)``, that is called before each pass.

    Args:
        examples: the stream; every rank must see the same one in the same order.
        seed, max_errors: as in ``from_dataset``.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return Pipeline(Chain.begin(IterableSource(examples), seed, max_errors))


@overload
def from_arrays(array: Array, /, *, seed: int | None = None) -> Pipeline[Array]: ...


@overload
def from_arrays(
    first: Array, second: Array, /, *, seed: int | None = None
) -> Pipeline[tuple[Array, Array]]: ...


@overload
def from_arrays(*arrays: Array, seed: int | None = None) -> Pipeline[tuple[Array, ...]]: ...


@overload
def from_arrays(*arrays: Any, seed: int | None = None) -> Pipeline[Any]: ...


def from_arrays(*arrays: Any, seed: int | None = None) -> Pipeline[Any]:
    """Read rows of arrays of one length: NumPy, memory maps, HDF5, Zarr, other sliceable arrays.

    An example is a tuple of rows, or a bare row if there is one array. Batches are gathered
    straight from the arrays, which are never written to.

    Args:
        arrays: NumPy arrays; datasets of h5py, whose file each process opens again; or objects with
            ``shape`` and ``dtype`` that give arrays for ``[start:stop]`` and perhaps for lists of
            indices. Indices are read in ascending order.
        seed: as in ``from_dataset``.

    Raises TypeError for other objects and masked arrays, ValueError for arrays of different
    lengths or without a length, and for HDF5 datasets whose file cannot be opened again.
    """
    return _begin(ArraySource(arrays), seed)


def from_table(
    table: Any, *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[dict[str, Any]]:
    """Read rows of a table in memory: dicts by column, as in ``from_parquet``.

    Args:
        table: a ``pyarrow.Table``, or a DataFrame of pandas, Polars or another library with
            Arrow's protocol (``__arrow_c_stream__``, ``__dataframe__``). Do not change it later.
        seed, max_errors: as in ``from_dataset``.

    Raises TypeError for any other object, ValueError for a table without rows, ImportError without
    pyarrow (``pip install pyarrow``).
    """
    _check_pyarrow("from_table")
    from stoker.sources.arrow.table import TableSource

    return _begin(TableSource(table), seed, max_errors)


@overload
def from_loader(
    loader: Iterable[T] | Callable[[], Iterable[T]], *, seed: int | None = None
) -> Pipeline[T]: ...


@overload
def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]: ...


def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]:
    """Take ready batches from any object that can be iterated again every epoch.

    A torch ``DataLoader``, for example, keeps its workers, sampler, pinning and random draws. Its
    exceptions come through unchanged. The consumer's thread iterates it; under ``.echo("auto")`` a
    background thread does (the random draws of a ``DataLoader`` without workers then mix with those
    of training).

    Args:
        loader: a re-iterable of batches, a function that returns an iterator, or an iterator with
            ``reset()`` such as DALI's.
        seed: of echoing and random maps; drawn at random by default.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return Pipeline(Chain.begin(LoaderSource(loader), seed))


def echo(
    loader: Any,
    factor: Factor = "auto",
    *,
    max_factor: int | None = None,
    min_distance: int | None = None,
    pool: int | str | None = None,
    transform: Callable[[Any, Any], Any] | None = None,
    on: str | int | None = None,
    repeats_only: bool = False,
    device: Any = None,
    seed: int | None = None,
) -> Pipeline[Any]:
    """Echo the batches of a loader that you keep: batch echoing.

    Short for ``from_loader(loader).to_torch(device).echo(factor).random_map(transform, on=on)``.
    Each use of a batch is a copy, so changes to one reach no other.

    Args:
        loader: as in ``from_loader``.
        factor, max_factor, min_distance, pool: as in ``Pipeline.echo``.
        transform: called as ``transform(batch, rng)`` for each use: augment there. On a
            device ``rng`` is a ``torch.Generator`` of it, else a ``numpy.random.Generator``.
            ``stoker.images`` has transforms for images.
        on: the field of the batch that ``transform`` gets, instead of the whole batch.
        repeats_only: do not transform first uses: for a loader that augments already.
        device: keep batches there, as torch tensors, and transform them there.
        seed: of echoing and of ``rng``; drawn at random by default.
    """
    pipeline = from_loader(loader, seed=seed)
    if device is not None:
        pipeline = pipeline.to_torch(device)
    pipeline = pipeline.echo(factor, max_factor=max_factor, min_distance=min_distance, pool=pool)
    if transform is None:
        if on is not None or repeats_only:
            raise TypeError("echo(): on= and repeats_only= say what transform= gets: give it, too")
        return pipeline
    return pipeline.random_map(transform, on=on, repeats_only=repeats_only)


@overload
def from_folder(
    path: str | os.PathLike[str],
    /,
    *,
    extensions: None = None,
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[LabeledImage]: ...


@overload
def from_folder(
    path: str | os.PathLike[str],
    /,
    *,
    extensions: Sequence[str],
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[LabeledFile]: ...


def from_folder(
    path: str | os.PathLike[str],
    /,
    *,
    extensions: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Any]:
    """Read image files from ``path/CLASS/...``: examples ``(image=bytes, label=int)``.

    Labels number the sorted class folders; ``pipeline.class_names`` has their names. A folder
    without such a file is no class, and a warning names it. The folder is listed once, now.

    Args:
        path: a folder, or its URL in an object store (``s3://...``, and others that fsspec lists;
            needs ``pip install 'fsspec[http,s3]'``). HTTP lists nothing: see ``from_files``.
        extensions: read files with these extensions instead of images, such as ``[".wav",
            ".flac"]``, in any case. Examples are then ``(data=bytes, label=int)``.
        classes: the names of all classes, in the order of their labels: give a validation folder,
            which may lack some classes, ``train.class_names``.
        seed, max_errors: as in ``from_dataset``.
        requests: for URLs, the largest number of files read at a time.
        timeout_s: for URLs, how long a temporary failure of a file is retried, in seconds.
        storage_options: for URLs, the options of fsspec's file system.

    Raises FileNotFoundError or ValueError if there is nothing to read, and says what it looked
    for; ValueError for a class folder that is not in ``classes``; RemoteError after a permanent
    failure of a server.
    """
    from stoker.sources.folder import FolderSource

    remote = _options(requests, timeout_s, storage_options)
    source = FolderSource(path, remote, extensions=extensions, classes=classes)
    return _begin(source, seed, max_errors)


def from_files(
    paths: Paths,
    /,
    *,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[File]:
    """Read files: examples ``(path=str, data=bytes)``.

    Args:
        paths: paths or URLs, all of one file system; or one pattern such as ``"data/**/*.bin"`` or
            ``"s3://bucket/*.jpg"``, which is listed once, now; or a URL with braces, such as
            ``"https://host/{0000..0999}.jpg"``, which needs no listing.
        seed, max_errors, requests, timeout_s, storage_options: as in ``from_folder``.

    Raises FileNotFoundError if no file fits the pattern, ValueError for a pattern over HTTP, which
    lists nothing, RemoteError after a permanent failure of a server.
    """
    from stoker.sources.remote.files import FilesSource

    remote = _options(requests, timeout_s, storage_options)
    return _begin(FilesSource(paths, remote), seed, max_errors)


def from_parquet(
    paths: Paths,
    /,
    columns: Sequence[str] | None = None,
    *,
    filters: Sequence[Any] | None = None,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[dict[str, Any]]:
    """Read rows of Parquet files: dicts by column. Needs ``pip install pyarrow``.

    Numbers are NumPy's, lists of numbers arrays, text and bytes Python's, structs dicts; null is
    None. Row groups are read whole, and kept in up to a quarter of the memory that is free now (in
    each process that reads); ``print(pipeline)`` shows the size.

    Args:
        paths: files, URLs, patterns, or folders of files ``*.parquet``; URLs of one file system.
        columns: the columns to read; all by default.
        filters: ``[("height", ">=", 256), ...]``: read only rows that meet all of these conditions;
            with a list of such lists, rows that meet all conditions of one list. Decided now, by
            the statistics of row groups and one pass over the named columns; then like
            ``.select()``.
        seed, max_errors: as in ``from_dataset``.
        requests, timeout_s, storage_options: for URLs, as in ``from_folder``; each row group
            is one range request.

    Types that differ between files are unified (int32 beside int64); a column that a file lacks is
    None in its rows.

    Raises FileNotFoundError if a path or a pattern fits no file, ValueError for a file that is not
    Parquet, for types that no other holds, and if there are no rows; RemoteError after a permanent
    failure of a server, or if it sends no ranges; ImportError without pyarrow.
    """
    _check_pyarrow("from_parquet")
    from stoker.sources.arrow.parquet import ParquetSource

    source = ParquetSource(paths, _options(requests, timeout_s, storage_options), columns)
    train = _begin(source, seed, max_errors)
    if filters is None:
        return train
    from stoker.sources.arrow.parquet import matching_rows

    matches = matching_rows(source, filters)
    if not matches.any():
        raise ValueError(f"no row of {source.name} matches filters={filters!r}")
    return train.select(matches)


def from_text(
    paths: Paths, /, *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[str]:
    """Read the lines of text files: examples are ``str``, without the ends of lines.

    Files are UTF-8. Lines end with LF, or CR and LF; empty lines count. Their offsets are found
    now, in one pass, and take 8 bytes a line in memory; each line is then read by offset.

    Example: ``stoker.from_text("corpus/*.txt").filter(str.strip).shuffle()``

    Args:
        paths: files or patterns (``*``, ``{000..146}``) of local files, which are not compressed.
        seed, max_errors: as in ``from_dataset``.

    Raises FileNotFoundError if a path or a pattern fits no file, ValueError for a file that is
    compressed or UTF-16, and if there are no lines. A line that is not UTF-8 is an error of its
    example alone.
    """
    from stoker.sources.text import TextSource

    return _begin(TextSource(paths), seed, max_errors)


def from_jsonl(
    paths: Paths, /, *, seed: int | None = None, max_errors: MaxErrors = 0
) -> Pipeline[Any]:
    """Read JSON Lines: an example is the value in a line, mostly a ``dict``.

    Empty and blank lines are left out. Values are Python's: make arrays of lists in ``.map()``.
    ``NaN`` is read too, as Python writes it.

    Example: ``stoker.from_jsonl("chats.jsonl").map(lambda row: row["messages"])``

    Args:
        paths, seed, max_errors: as in ``from_text``.

    Raises as ``from_text``. A line that is not JSON is an error of its example alone.
    """
    from stoker.sources.text import JsonLinesSource

    return _begin(JsonLinesSource(paths), seed, max_errors)


def from_csv(
    paths: Paths,
    /,
    columns: Sequence[str] | None = None,
    *,
    delimiter: str = ",",
    seed: int | None = None,
    max_errors: MaxErrors = 0,
) -> Pipeline[dict[str, Any]]:
    """Read rows of CSV files: dicts by column, as in ``from_parquet``.

    pyarrow reads the files into memory, now: larger ones belong into Parquet. The first row has
    the names; a column has the type that all of its values fit, and empty numbers are None.
    Quoted values may contain line ends. Files may be compressed (``.csv.gz``).

    Example: ``stoker.from_csv("houses.csv", ["area", "price"]).shuffle().batch(64)``

    Args:
        paths: files or patterns (``*``, ``{000..146}``) of local files.
        columns: the columns to read; all by default.
        delimiter: between values, such as ``"\\t"``.
        seed, max_errors: as in ``from_dataset``.

    Raises FileNotFoundError if a path or a pattern fits no file; ValueError for a file that is not
    CSV, lacks a column or does not fit into memory, for files whose columns differ, and if there
    are no rows; ImportError without pyarrow (``pip install pyarrow``).
    """
    _check_pyarrow("from_csv")
    from stoker.sources.arrow.table import CsvSource

    return _begin(CsvSource(paths, columns, delimiter), seed, max_errors)


def from_tar(
    paths: Paths,
    /,
    fields: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    max_errors: MaxErrors = 0,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[dict[str, Any]]:
    """Read tar shards in WebDataset's format, or zip archives: examples are dicts of bytes.

    Files with the same path up to the first dot of its last part form an example: ``a/01.jpg`` and
    ``a/01.cls`` become ``{"__key__": "a/01", "jpg": b"...", "cls": b"..."}``. Headers are read
    once, now; their index is kept in the user's cache folder until the shard changes. Examples are
    read by offset.

    Args:
        paths: files, URLs or patterns (``*``, ``{000..146}``); URLs of one file system.
        fields: the fields to read, which every example must have; by default all its fields.
        seed, max_errors: as in ``from_dataset``. With ``max_errors=``, a truncated shard is a
            warning, and incomplete examples may be skipped.
        requests, timeout_s, storage_options: for URLs, as in ``from_folder``; one range is
            requested for each run of neighbours of about a MiB, or for each example.

    Raises FileNotFoundError if a path or a pattern fits no file; ValueError for a file that is no
    archive, is truncated, lacks the fields, or is compressed as a whole (``.tar.gz``); RemoteError
    after a permanent failure of a server, or if it sends no ranges.
    """
    from stoker.sources.shards.shard_source import ShardSource

    remote = _options(requests, timeout_s, storage_options)
    source = ShardSource(paths, remote, fields, is_strict=max_errors == 0)
    return _begin(source, seed, max_errors)


@overload
def from_tokens(
    paths: Paths,
    /,
    length: int,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: None = None,
    seed: int | None = None,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Window]: ...


@overload
def from_tokens(
    paths: Paths,
    /,
    length: int,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: int,
    seed: int | None = None,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[DocumentWindow]: ...


@overload
def from_tokens(
    paths: Paths,
    /,
    *,
    dtype: DTypeLike | None = None,
    separator: int | None = None,
    seed: int | None = None,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[NDArray[np.int64]]: ...


def from_tokens(
    paths: Paths,
    /,
    length: int | None = None,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: int | None = None,
    seed: int | None = None,
    requests: int = 32,
    timeout_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Any]:
    """Read windows of token files: examples ``(inputs, targets)``, ``int64 [length]`` each.

    Targets are the inputs one token later. Windows do not cross the borders of files; a rest at a
    file's end is left out. Now only file sizes are read.

    Without ``length`` examples are whole documents, ``int64 [tokens]``: for ``.pack()``. Give the
    ``separator`` that ends each (and stays at its end), which one pass over the files finds now; or
    Megatron's ``.idx`` files, which stand for the ``.bin`` files beside them. The lengths of
    documents are known by number: ``.batch_by_tokens(8192, len)`` reads nothing for them.

    Example: ``stoker.from_tokens("corpus_text_document.idx").shuffle().pack(2048)``

    Args:
        paths: files, URLs or patterns (``*``, ``{000..146}``) of raw tokens, of one-dimensional
            ``.npy`` arrays, or of llm.c's files; URLs of one file system.
        length: of a window, in tokens; None for documents.
        stride: from one window to the next, in tokens; by default ``length``, so that each
            token is a target once.
        dtype: of raw tokens, such as ``"uint16"``; other files tell it.
        separator: the token that ends a document. Windows are then ``(inputs, targets,
            documents)``: ``documents``, ``int32 [length]``, numbers the documents of a window from
            0 on (for attention masks), and the target of a separator is -100, which
            ``cross_entropy`` ignores.
        seed: as in ``from_dataset``.
        requests, timeout_s, storage_options: for URLs, as in ``from_folder``; each window is
            one range request.

    Raises FileNotFoundError if a path or a pattern fits no file, ValueError if a file is not a
    whole number of tokens, all files are shorter than a window, or nothing says where documents
    end; TypeError for raw files without ``dtype``; RemoteError after a permanent failure of a
    server, or if it sends no ranges.
    """
    remote = _options(requests, timeout_s, storage_options)
    if length is None:
        if stride is not None:
            raise TypeError("from_tokens(stride=) is of windows: give their length, too")
        from stoker.sources.tokens import DocumentSource

        return _begin(DocumentSource(paths, remote, dtype, separator), seed)
    from stoker.sources.tokens import TokenSource

    return _begin(TokenSource(paths, remote, length, stride, dtype, separator), seed)


def _options(
    requests: int, timeout_s: float, storage_options: Mapping[str, Any] | None
) -> RemoteOptions:
    from stoker.sources.remote.storage import RemoteOptions

    return RemoteOptions(requests, timeout_s, storage_options or {})


def _check_pyarrow(caller: str) -> None:
    """Raise ImportError, with the command to install it, without pyarrow."""
    try:
        importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError(f"{caller} needs pyarrow: pip install pyarrow") from error


def _begin(source: IndexedSource, seed: Any, max_errors: MaxErrors = 0) -> Pipeline[Any]:
    """Return the pipeline of a source of stoker's own."""
    return Pipeline(Chain.begin(source, seed, max_errors))


explain_calls(sys.modules[__name__])
