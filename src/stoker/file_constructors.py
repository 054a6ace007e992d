"""Functions that begin a pipeline over files: one for each kind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import DTypeLike

from stoker.caution import warn
from stoker.chain import Chain
from stoker.pipeline import Pipeline
from stoker.sources.folder import ClassFolders, FolderSource, LabeledFile, LabeledImage
from stoker.sources.patterns import Paths, has_urls
from stoker.sources.remote.options import RemoteOptions
from stoker.sources.source import IndexedSource
from stoker.sources.tokens import DocumentWindow, TokenSource, Window
from stoker.stages.skip import OnError

if TYPE_CHECKING:
    from stoker.sources.remote.files import File


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
        extensions: read files with these extensions instead of images, such as ``[".wav",
            ".flac"]``, in any case. Examples are then ``(data=bytes, label=int)``.
        classes: the names of all classes, in the order of their labels: give a validation folder,
            which may lack some classes, ``train.class_names``.
        seed, on_error: as in ``from_dataset``.
        requests: for URLs, the largest number of files read at a time.
        retry_s: for URLs, how long a temporary failure of a file is retried, in seconds.
        storage_options: for URLs, the options of fsspec's file system.

    Raises FileNotFoundError or ValueError if there is nothing to read, and says what it looked
    for; ValueError for a class folder that is not in ``classes``; RemoteError after a permanent
    failure of a server.
    """
    asked = ClassFolders.of(extensions, classes)
    remote = RemoteOptions(requests, retry_s, storage_options or {})
    if "://" in os.fspath(path):
        from stoker.sources.remote.files import RemoteFolderSource

        source: IndexedSource = RemoteFolderSource(str(path), remote, asked)
    else:
        source = FolderSource(path, asked)
    return Pipeline(Chain.begin(source, seed, on_error))


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

    Raises FileNotFoundError if no file fits the pattern, RemoteError after a permanent failure of a
    server.
    """
    from stoker.sources.remote.files import FilesSource

    remote = RemoteOptions(requests, retry_s, storage_options or {})
    return Pipeline(Chain.begin(FilesSource(files, remote), seed, on_error))


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

    Numbers are NumPy's, lists of numbers arrays, text and bytes Python's, structs dicts; null is
    None. Row groups are read whole, and kept in up to a quarter of the memory that is free now (in
    each process that reads); ``print(pipeline)`` shows the size.

    Args:
        paths: files, URLs, patterns, or folders of files ``*.parquet``; URLs of one file system.
        columns: the columns to read; all by default.
        seed, on_error: as in ``from_dataset``.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; each row group is one
            range request.

    Raises FileNotFoundError if a path or a pattern fits no file, ValueError for a file that is not
    Parquet, for files whose columns differ, and if there are no rows; RemoteError after a permanent
    failure of a server, or if it sends no ranges; ImportError without pyarrow.
    """
    from stoker.sources.arrow.parquet import ParquetSource

    remote = RemoteOptions(requests, retry_s, storage_options or {})
    if has_urls(paths, "from_parquet"):
        from stoker.sources.remote.parquet_ranges import RemoteParquetSource

        source: ParquetSource = RemoteParquetSource(paths, remote, columns)
    else:
        source = ParquetSource(paths, columns)
    return Pipeline(Chain.begin(source, seed, on_error))


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
    """Read tar shards in WebDataset's format, or zip archives: examples are dicts of bytes.

    Files that share their path up to the first dot of its last part are an example:
    ``a/01.jpg`` and ``a/01.cls`` become ``{"__key__": "a/01", "jpg": b"...", "cls": b"..."}``.
    Headers are read once, now; their index is kept in the user's cache folder until the shard
    changes. Examples are read by offset.

    Args:
        shards: paths, URLs or patterns (``*``, ``{000..146}``); URLs of one file system. Local tar
            archives that are compressed as a whole (``.tar.gz``) come as a stream, with a warning:
            see ``from_iterable``.
        fields: the fields to read, which every example must have; by default all its fields.
        seed, on_error: as in ``from_dataset``. With a budget, a truncated shard is a warning,
            and incomplete examples may be skipped.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; one range is
            requested for each run of neighbours of about a MiB, or for each example.

    Raises FileNotFoundError if a path or a pattern fits no file; ValueError for a file that is no
    archive, is truncated, or lacks the fields, and for a compressed archive at a URL; RemoteError
    after a permanent failure of a server, or if it sends no ranges.
    """
    from stoker.sources.shards.compressed import CompressedTarSource, compressed_kinds
    from stoker.sources.shards.shard_source import ShardSource

    is_strict = on_error == "raise"
    remote = RemoteOptions(requests, retry_s, storage_options or {})
    if has_urls(shards, "from_tar"):
        from stoker.sources.remote.shards import RemoteShardSource

        source: ShardSource = RemoteShardSource(shards, remote, fields, is_strict=is_strict)
    elif compressed := compressed_kinds(shards):
        stream = Pipeline(Chain.begin(CompressedTarSource(shards, fields), seed, on_error))
        path, kind = next(iter(compressed.items()))
        warn(
            f"from_tar: {path} is compressed ({kind}) as a whole, so its examples come as a "
            "stream: in order, without a length, shuffled through a buffer. Decompress it to read "
            "them by number"
        )
        return stream
    else:
        source = ShardSource(shards, fields, is_strict=is_strict)
    return Pipeline(Chain.begin(source, seed, on_error))


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

    Targets are the inputs one token later. Windows do not cross the borders of files; a rest at a
    file's end is left out. Now only file sizes are read.

    Args:
        files: paths, URLs or patterns (``*``, ``{000..146}``) of raw tokens, or of one-dimensional
            ``.npy`` arrays; URLs of one file system.
        length: of a window, in tokens.
        stride: from one window to the next, in tokens; by default ``length``, so that each
            token is a target once.
        dtype: of raw tokens, such as ``"uint16"``.
        separator: the token that ends a document. Examples are then ``(inputs, targets,
            documents)``: ``documents``, ``int32 [length]``, numbers the documents of a window from
            0 on (for attention masks), and the target of a separator is -100, which
            ``cross_entropy`` ignores.
        seed: as in ``from_dataset``.
        requests, retry_s, storage_options: for URLs, as in ``from_folder``; each window is one
            range request.

    Raises FileNotFoundError if a path or a pattern fits no file, ValueError if a file is not a
    whole number of tokens or all files are shorter than a window, TypeError for raw files without
    ``dtype``; RemoteError after a permanent failure of a server, or if it sends no ranges.
    """
    remote = RemoteOptions(requests, retry_s, storage_options or {})
    if has_urls(files, "from_tokens"):
        from stoker.sources.remote.token_ranges import RemoteTokenSource

        source: TokenSource = RemoteTokenSource(files, remote, length, stride, dtype, separator)
    else:
        source = TokenSource(files, length, stride, dtype, separator)
    return Pipeline(Chain.begin(source, seed))
