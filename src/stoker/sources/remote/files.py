"""Files on any file system: as examples, and as lists for sources that read parts of them.

URLs are read through fsspec (extra ``[remote]``). A source holds the listing, made once, and how to
read the files; it pickles with both. Open connections belong to its readers.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint, of_file
from stoker.sources.files import is_special, read_files, warn_left_out
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import (
    Names,
    Paths,
    expand_braces,
    is_aside,
    is_web,
    path_list,
    split_query,
)
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.source import Access, ReadsRanges
from stoker.sources.remote.storage import UNKNOWN, Entries, RemoteOptions
from stoker.sources.source import Indices

HIDDEN = re.compile(r"(?:^|/)\.")


class File(NamedTuple):
    """An example of ``from_files``."""

    path: str
    """The path or URL."""
    data: bytes
    """The file's bytes."""


class FilesSource(ReadsRanges[Any], IndexedSource):
    """Whole files by path or URL.

    Hidden files match only patterns that name them. A single named file that is a pipe, a socket or
    a device is refused; in a list it is an example that fails, and left out, with a warning, where
    it matches a pattern.
    """

    fields = File._fields

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        options: RemoteOptions,
    ) -> None:
        self._listed: Listed | None = None
        alone = isinstance(files, (str, os.PathLike))
        given = [_to_text(file) for file in path_list(files, "from_files")]
        if alone and "://" in given[0]:
            given = list(expand_braces(given[0]))
            alone = len(given) == 1
        if not given:
            raise ValueError("from_files needs at least one file")
        self._name = f"from_files({given[0]!r})" if alone else f"from_files({len(given):,} files)"
        self.access: Access | None = None
        if _find_protocol(given):
            self.access = Access(given[0], options)
        # Of local files: examples have the paths that were given, and these may be relative.
        self._below = "" if self.access or all(map(os.path.isabs, given)) else os.getcwd()
        self._files = self._list_matching(given[0]) if alone else Names(given)

    @property
    def name(self) -> str:
        return self._name

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        paths = [self._files[i] for i in indices]
        data = read_files([os.path.join(self._below, path) for path in paths])
        return [File(*each) for each in zip(paths, data, strict=True)]

    def local_path(self, index: int) -> str | None:
        return os.path.join(self._below, self._files[index]) if self.access is None else None

    def path(self, index: int) -> str | None:
        return self.locate(index).url

    def name_of(self, index: int) -> str:
        file: str = self._files[index]
        return os.path.basename(file) if self.access is None else file

    def identity(self) -> str | None:
        """Return "files" if every file's version is known: then fingerprints identify the data."""
        if self.access is None:
            return "files"
        return "files" if self._listed is not None and self._listed.versions.all() else None

    def fingerprint(self, index: int) -> Fingerprint:
        if self.access is None:
            given = self._files[index]  # examples hold it, so another spelling is another example
            path = os.path.join(self._below, given)
            return of_file(path if path == given else f"{self._below}\0{given}", os.stat(path))
        file = self.locate(index)
        return Fingerprint(file.url, file.size, file.version)

    def locate(self, index: int) -> RemoteFile:
        if self._listed is None:
            return RemoteFile(self._files[index], UNKNOWN)
        return self._listed.locate(index)

    def example(self, index: int, data: bytes) -> File:
        return File(self.locate(index).url, data)

    def _list_matching(self, pattern: str) -> Names:
        """List the matching files, from the pattern's last folder without wildcards on."""
        if self.access is None:
            literal = os.path.lexists(pattern) or not glob.has_magic(pattern)
            found = [pattern] if literal else sorted(glob.glob(pattern, recursive=True))
            special = [file for file in found if is_special(file)]
            if literal and os.path.isdir(pattern):
                raise IsADirectoryError(
                    f"{pattern} is a folder: give the files in it, as {pattern}/*"
                )
            if literal and special:
                raise ValueError(f"{pattern} is not a regular file, and cannot be an example")
            warn_left_out(self._name, special)
            files = Names([file for file in found if os.path.isfile(file)])
        elif (start := _find_pattern(pattern)) is None:
            files = Names([pattern])
        else:
            protocol, _, rest = pattern.partition("://")
            folder, slash, _ = rest[:start].rpartition("/")
            tail = rest[len(folder) + len(slash) :]
            self.access = replace(self.access, url=f"{protocol}://{folder}")
            listed = self.access.find(None if "**" in tail else tail.count("/") + 1)
            chosen = _matching(listed.names, tail)
            self._listed = Listed.of(self.access.url, listed, chosen)
            files = self._listed.names
        if not len(files):
            raise FileNotFoundError(f"no file fits {pattern}")
        return files


class Listed(NamedTuple):
    """Some of the files below a folder, kept compactly enough for millions."""

    url: str
    folder: str
    names: Names
    sizes: NDArray[np.int64]
    versions: NDArray[np.int64]

    @classmethod
    def of(cls, url: str, listed: Entries, chosen: list[int]) -> Listed:
        sizes, versions = (np.array(each, np.int64)[chosen] for each in listed[2:])
        names = Names([listed.names[at] for at in chosen])
        return cls(url if url.endswith("/") else f"{url}/", listed.folder, names, sizes, versions)

    def locate(self, index: int) -> RemoteFile:
        name, size, version = self.names[index], self.sizes[index], self.versions[index]
        return RemoteFile(
            self.url + name, int(size), version=int(version), path=f"{self.folder}/{name}"
        )


def _matching(names: Sequence[str], pattern: str) -> list[int]:
    """Return which names fit a pattern, sorted by name; hidden ones only if it names them."""
    from fsspec.utils import glob_translate

    fits, hidden = re.compile(glob_translate(pattern)).fullmatch, HIDDEN.search(pattern)
    found = [at for at, name in enumerate(names) if hidden or not HIDDEN.search(name)]
    return sorted(filter(lambda at: fits(names[at]), found), key=names.__getitem__)


def _to_text(file: Any) -> str:
    text = os.fspath(file) if isinstance(file, os.PathLike) else file
    if not isinstance(text, str):
        raise TypeError(f"from_files takes paths and URLs, not {type(text).__name__}")
    return text


def _find_protocol(files: Sequence[str]) -> str:
    """Return the protocol of all files, "" for local ones."""
    found = {file.partition("://")[0].lower() if "://" in file else "" for file in files}
    if found == {"http", "https"}:
        return "https"
    if len(found) > 1:
        kinds = ", ".join(f"{kind}://" if kind else "local paths" for kind in sorted(found))
        raise ValueError(f"from_files reads from one file system, not from {kinds}")
    return found.pop()


def _find_pattern(url: str) -> int | None:
    """Return the start of the pattern in a URL, counted from after ``://``."""
    protocol, _, rest = split_query(url)[0].partition("://")
    web = protocol.lower() in ("http", "https")
    start = rest.find("/") + 1 if web else 0  # after the host, which may be [::1]
    found = re.compile(r"[*\[]" if web else r"[*?\[]").search(rest, start)
    return found.start() if found else None


def access_to(given: Paths, options: RemoteOptions) -> Access:
    return Access(str(path_list(given, "a source")[0]), options)


def find_urls(given: Paths, access: Access, suffix: str = "") -> list[str]:
    """Return the matching files, as ``find_files``.

    A URL without ``suffix``, and without a query, is a folder if there are such files below it;
    over HTTP it is a file.
    """
    texts = [os.fspath(each) for each in path_list(given, "a source")]
    urls: list[str] = []
    for url in itertools.chain.from_iterable(map(expand_braces, texts)):
        if "://" not in url:
            raise ValueError(f"{url} is a local path, among URLs: read them apart")
        is_folder = suffix and not url.endswith(suffix) and "*" not in url and not is_web(url)
        folder = f"{url.rstrip('/')}/"
        try:
            found = FilesSource(f"{folder}**/*{suffix}" if is_folder else url, access.options)
        except FileNotFoundError:
            if not is_folder:
                raise
            found, is_folder = FilesSource(url, access.options), False
        each = [str(found.path(index)) for index in range(len(found))]
        if is_folder:
            each = [
                one
                for one in each
                if not one.startswith(folder) or not is_aside(one[len(folder) :])
            ]
        if not each:
            raise FileNotFoundError(f"no file fits {folder}**/*{suffix}")
        urls += each
    return urls
