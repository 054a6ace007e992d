"""Where pipelines begin: a function for each kind of source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from numpy.typing import DTypeLike, NDArray

from stoker.caution import warn
from stoker.chain import Chain
from stoker.pipeline import Pipeline
from stoker.sources.arrays import ArraySource
from stoker.sources.class_folders import ClassFolders, LabeledFile, LabeledImage
from stoker.sources.dataset import DatasetSource
from stoker.sources.folder import FolderSource
from stoker.sources.huggingface import HuggingFaceSource
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource
from stoker.sources.patterns import Paths, has_urls
from stoker.sources.source import IndexedSource, Source
from stoker.sources.tokens import DocumentWindow, TokenSource, Window
from stoker.stages.echo import Factor
from stoker.stages.skip import OnError, budget_of

if TYPE_CHECKING:
    from stoker.sources.remote.files import File

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
Array = NDArray[Any]


class _Items(Protocol[T_co]):
    """What ``from_dataset`` takes, for type checkers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


def _begin(source: Source, seed: int | None, on_error: OnError = "raise") -> Pipeline[Any]:
    return Pipeline(Chain.begin(source, seed, budget_of(on_error)))


@overload
def from_folder(
    path: str | os.PathLike[str],
    *,
    extensions: None = None,
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[LabeledImage]: ...


@overload
def from_folder(
    path: str | os.PathLike[str],
    *,
    extensions: Sequence[str],
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[LabeledFile]: ...


def from_folder(
    path: str | os.PathLike[str],
    *,
    extensions: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Any]:
    """Read image files from ``path/CLASS/...``: examples ``(image=bytes, label=int)``.

    Labels number the sorted class folders; ``pipeline.class_names`` has their names. The folder is
    listed once, now.

    Args:
        path: a folder, or a URL that fsspec knows (``https://...``, ``s3://...``; needs
            ``pip install 'stoker[remote]'``).
        extensions: of the files that are read instead of images, such as ``[".wav", ".flac"]``, in
            any case. Examples are then ``(data=bytes, label=int)``.
        classes: the names of all classes, in the order of their labels: ``train.class_names`` for a
            folder to validate on, which may lack some.
        seed, on_error: as in ``from_dataset``.
        requests: for URLs, how many files are read at a time, at most.
        retry_s: for URLs, how long a file is asked for again after a passing failure, in seconds.
        storage_options: for URLs, what fsspec's file system is made with.

    Raises FileNotFoundError or ValueError, saying what was looked for, when there is nothing
    to read; ValueError for a folder that is none of ``classes``; RemoteError when a server fails
    for good.
    """
    asked = ClassFolders.of(extensions, classes)
    if "://" in os.fspath(path):
        from stoker.sources.remote.files import RemoteFolderSource

        source: IndexedSource = RemoteFolderSource(
            str(path), asked, requests=requests, retry_s=retry_s, storage_options=storage_options
        )
    else:
        source = FolderSource(path, asked)
    return _begin(source, seed, on_error)


def from_files(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[File]:
    """Read files: examples ``(path=str, data=bytes)``.

    Args:
        files: paths or URLs, all of one file system; or one pattern such as ``"data/**/*.bin"`` or
            ``"s3://bucket/*.jpg"``, which is listed once, now.
        seed, on_error, requests, retry_s, storage_options: as in ``from_folder``.

    Raises FileNotFoundError when nothing fits the pattern, RemoteError when a server fails for
    good.
    """
    from stoker.sources.remote.files import FilesSource

    source = FilesSource(files, requests=requests, retry_s=retry_s, storage_options=storage_options)
    return _begin(source, seed, on_error)


@overload
def from_dataset(
    dataset: _Items[T], *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[T]: ...


@overload
def from_dataset(
    dataset: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[Any]: ...


def from_dataset(
    dataset: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[Any]:
    """Read any object with ``__len__`` and ``__getitem__`` (integers from 0).

    ``__getitems__(indices)`` is used where it exists. torch datasets fit; Hugging Face's, too, but
    ``from_huggingface`` reads them faster.
    Threads call the dataset concurrently, and randomness inside it is then not reproducible
    (use ``random_map``, or process workers).

    Args:
        dataset: the object.
        seed: of shuffling, echoing and random maps; drawn if there is none.
        on_error: ``"raise"``, or how many examples may be skipped in an epoch because a stage
            before ``batch`` failed on them: a count (``100``) or a fraction (``0.01``). Each is
            logged (logger ``stoker``) and counted in ``stats()``; one too many raises BudgetSpent
            with the list. Stages may have a budget of their own.

    Raises TypeError when a method is missing.
    """
    return _begin(DatasetSource(dataset), seed, on_error)


def from_huggingface(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[dict[str, Any]]:
    """Read rows of a Hugging Face ``datasets.Dataset``: dicts by column, as in ``from_parquet``.

    Rows come straight from its Arrow tables, which it maps from files. Images, sound and video are
    the bytes that are stored: decode them in ``.map()``. The data set's format is not looked at,
    but for its columns; ``from_dataset`` asks the data set as it is.

    Args:
        dataset: one split, not streaming.
        columns: the columns that are read; those of its format, if there are none.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for what is no such data set, ValueError where it has no such column, no rows,
    or a transform (``with_transform``).
    """
    return _begin(HuggingFaceSource(dataset, columns), seed, on_error)


def from_iterable(
    examples: Iterable[T] | Callable[[], Iterable[T]],
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
) -> Pipeline[T]:
    """Read a stream: a re-iterable object of examples, or a function that returns an iterator.

    One pass is one epoch. It is iterated in this process, by one thread at a time, ahead of the
    consumer. Its examples cannot be asked for again, so an epoch has no state in its middle, and
    shuffling goes through a buffer. What it raises ends it and cannot be skipped.

    An object with ``state_dict()`` and ``load_state_dict(state)`` (a streaming data set of Hugging
    Face, a ``torchdata.nodes.Loader``) has a state in the middle, which is kept in the pipeline's:
    it is asked behind every 16th example, so up to 15 are read again on a resume. One with
    ``set_epoch(epoch)`` is told the epoch before each pass.

    Args:
        examples: the stream; every rank must see the same one in the same order.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return _begin(IterableSource(examples), seed, on_error)


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
    """Read rows of arrays of one length: NumPy's, memory maps, HDF5, Zarr, whatever is sliced.

    An example is a tuple of rows, or a bare row of a single array. Batches are gathered
    straight from the arrays, which are never written to.

    Args:
        arrays: NumPy arrays; datasets of h5py, whose file each process opens anew; or objects with
            ``shape`` and ``dtype`` that give arrays for ``[start:stop]`` and perhaps for lists of
            indices. These are read in ascending order.
        seed: as in ``from_dataset``.

    Raises TypeError for other objects, ValueError for arrays of different lengths, and for HDF5
    datasets without a file that can be opened again.
    """
    return _begin(ArraySource(arrays), seed)


def from_parquet(
    paths: Paths,
    columns: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[dict[str, Any]]:
    """Read rows of Parquet files: dicts by column. Needs ``pip install 'stoker[parquet]'``.

    Numbers are NumPy's, lists of numbers arrays, text and bytes Python's, structs dicts; what is
    null is None. Row groups are read whole, and kept in up to a quarter of the memory that is free
    now (in each process that reads); ``print(pipeline)`` says how much that is.

    Args:
        paths: files, URLs, patterns, or folders of files ``*.parquet``; URLs of one file system.
        columns: the columns that are read; all, if there are none.
        seed, on_error: as in ``from_dataset``.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; of each row group one
            range is requested.

    Raises FileNotFoundError when a path or a pattern fits nothing, ValueError for what is no
    Parquet file, for files whose columns differ, and where there are no rows; RemoteError when a
    server fails for good, or sends no ranges; ImportError.
    """
    from stoker.sources.parquet import ParquetSource

    if has_urls(paths):
        from stoker.sources.remote.row_ranges import RemoteParquetSource

        source: ParquetSource = RemoteParquetSource(
            paths, columns, requests=requests, retry_s=retry_s, storage_options=storage_options
        )
    else:
        source = ParquetSource(paths, columns)
    return _begin(source, seed, on_error)


def from_table(
    table: Any, *, seed: int | None = None, on_error: OnError = "raise"
) -> Pipeline[dict[str, Any]]:
    """Read rows of a table in memory: dicts by column, as in ``from_parquet``.

    Args:
        table: a ``pyarrow.Table``, or a DataFrame of pandas, Polars or another library with
            Arrow's protocol (``__arrow_c_stream__``, ``__dataframe__``). Not to be changed later.
        seed, on_error: as in ``from_dataset``.

    Raises TypeError for what is no table, ValueError for one without rows; ImportError without
    pyarrow (``pip install 'stoker[parquet]'``).
    """
    from stoker.sources.table import TableSource

    return _begin(TableSource(table), seed, on_error)


def from_tar(
    shards: Paths,
    fields: Sequence[str] | None = None,
    *,
    seed: int | None = None,
    on_error: OnError = "raise",
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[dict[str, Any]]:
    """Read tar shards as WebDataset has them, or zip archives: examples are dicts of bytes.

    Files that share their path up to the first dot of its last part are an example:
    ``a/01.jpg`` and ``a/01.cls`` become ``{"__key__": "a/01", "jpg": b"...", "cls": b"..."}``.
    Headers are read once, now; their index is kept in the user's cache folder until the shard
    changes. Examples are read by offset.

    Args:
        shards: paths, URLs or patterns (``*``, ``{000..146}``); URLs of one file system. Local tar
            archives that were compressed as a whole (``.tar.gz``) come as a stream, with a warning:
            see ``from_iterable``.
        fields: the fields that are read, and that every example must have; else all it has.
        seed, on_error: as in ``from_dataset``. With a budget, a truncated shard is a warning,
            and examples that are not all there may be skipped.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; of each example
            one range is requested.

    Raises FileNotFoundError when a path or a pattern fits nothing; ValueError for what is no
    archive, is truncated, or lacks the fields, and for compressed ones at a URL; RemoteError when a
    server fails for good, or sends no ranges.
    """
    from stoker.sources.shards.compressed import CompressedTarSource, compressed_kinds
    from stoker.sources.shards.shard_source import ShardSource

    is_strict = on_error == "raise"
    if has_urls(shards):
        from stoker.sources.remote.shards import RemoteShardSource

        source: ShardSource = RemoteShardSource(
            shards,
            fields,
            is_strict=is_strict,
            requests=requests,
            retry_s=retry_s,
            storage_options=storage_options,
        )
    elif compressed := compressed_kinds(shards):
        stream = _begin(CompressedTarSource(shards, fields), seed, on_error)
        path, kind = next(iter(compressed.items()))
        warn(
            f"from_tar: {path} is compressed ({kind}) as a whole, so its examples come as a "
            "stream: in order, without a length, shuffled through a buffer. Decompress it to have "
            "them by number"
        )
        return stream
    else:
        source = ShardSource(shards, fields, is_strict=is_strict)
    return _begin(source, seed, on_error)


@overload
def from_tokens(
    files: Paths,
    length: int,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: None = None,
    seed: int | None = None,
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Window]: ...


@overload
def from_tokens(
    files: Paths,
    length: int,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: int,
    seed: int | None = None,
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[DocumentWindow]: ...


def from_tokens(
    files: Paths,
    length: int,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    separator: int | None = None,
    seed: int | None = None,
    requests: int = 32,
    retry_s: float = 60.0,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline[Any]:
    """Read windows of token files: examples ``(inputs, targets)``, ``int64 [length]`` each.

    Targets are the inputs one token later. Windows do not cross the borders of files, and what is
    left at a file's end is no example. Nothing but file sizes is read now.

    Args:
        files: paths, URLs or patterns (``*``, ``{000..146}``) of raw tokens, or of one-dimensional
            ``.npy`` arrays; URLs of one file system.
        length: of a window, in tokens.
        stride: from one window to the next, in tokens; ``length`` if there is none, so that each
            token is a target once.
        dtype: of raw tokens, such as ``"uint16"``.
        separator: the token that ends a document. Examples are then ``(inputs, targets,
            documents)``: ``documents``, ``int32 [length]``, numbers the documents of a window from
            0 on (for attention masks), and the target of a separator is -100, which
            ``cross_entropy`` leaves out.
        seed: as in ``from_dataset``.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; of each window one
            range is requested.

    Raises FileNotFoundError when a path or a pattern fits nothing, ValueError for files that are no
    whole number of tokens or all shorter than a window, TypeError for raw files without ``dtype``;
    RemoteError when a server fails for good, or sends no ranges.
    """
    if has_urls(files):
        from stoker.sources.remote.token_ranges import RemoteTokenSource

        source: TokenSource = RemoteTokenSource(
            files,
            length,
            stride,
            dtype,
            separator,
            requests=requests,
            retry_s=retry_s,
            storage_options=storage_options,
        )
    else:
        source = TokenSource(files, length, stride, dtype, separator)
    return _begin(source, seed)


@overload
def from_loader(
    loader: Iterable[T] | Callable[[], Iterable[T]], *, seed: int | None = None
) -> Pipeline[T]: ...


@overload
def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]: ...


def from_loader(loader: Any, *, seed: int | None = None) -> Pipeline[Any]:
    """Take ready batches from any object that can be iterated anew every epoch.

    A torch ``DataLoader`` above all: its workers, sampler, pinning and random draws stay as
    its owner set them. What it raises comes through unchanged. It is iterated in the consumer's
    thread; under ``.echo("auto")`` by a thread of its own (what a ``DataLoader`` without workers
    draws at random then mixes with what training draws).

    Args:
        loader: a re-iterable of batches, a function that returns an iterator, or an iterator with
            ``reset()`` such as DALI's.
        seed: of echoing and random maps; drawn if there is none.

    Raises TypeError for an iterator, which would be used up after one epoch.
    """
    return _begin(LoaderSource(loader), seed)


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
    replay: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Pipeline[Any]:
    """Echo the batches of a loader that you keep: batch echoing.

    Short for ``from_loader(loader).to(device).echo(factor).random_map(transform, on=on)``.
    Earlier uses of a batch are copies; what is done to one reaches no other.

    Args:
        loader: as in ``from_loader``.
        factor, max_factor, min_distance, pool, replay: as in ``Pipeline.echo``.
        transform: called as ``transform(batch, rng)`` anew for each use: augment there. On a
            device ``rng`` is a ``torch.Generator`` of it, else a ``numpy.random.Generator``.
            ``stoker.images`` has some for images.
        on: the field of the batch that ``transform`` is given, instead of the whole.
        repeats_only: leave first uses of a batch as they are: where the loader augments already,
            and twice would be too much.
        device: keep batches there, as torch tensors, and transform them there.
        seed: of echoing and of ``rng``; drawn if there is none.
    """
    pipeline = from_loader(loader, seed=seed)
    if device is not None:
        pipeline = pipeline.to(device)
    pipeline = pipeline.echo(
        factor, max_factor=max_factor, min_distance=min_distance, pool=pool, replay=replay
    )
    if transform is None:
        return pipeline
    return pipeline.random_map(transform, on=on, repeats_only=repeats_only)
