"""Sources whose examples are parts of files: ``InFiles``, and ``RangedFiles`` at URLs, too."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from stoker.basics.fingerprint import Fingerprint, of_file
from stoker.sources.files import FileVersion, PartialFile, absolute, for_each
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import Paths, describe_paths, find_files, has_urls
from stoker.sources.remote.files import access_to, find_urls
from stoker.sources.remote.source import ReadsRanges
from stoker.sources.remote.storage import RemoteOptions

T = TypeVar("T")

# More than cores: they wait for a disk.
_THREADS = 8


class VersionedFile(Protocol):
    """A file of this version; its path is absolute, or a URL."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> FileVersion: ...


class FileItem(NamedTuple):
    """Where an example is found: a file, a number within it, and what follows the file's name."""

    file: VersionedFile
    number: int
    suffix: str


class InFiles(IndexedSource):
    """A source whose examples are parts of files.

    ``caller`` is the name of the function that makes it, ``given`` the user's paths as short text.
    """

    caller: str
    given: str
    _files: Sequence[VersionedFile]

    @property
    def name(self) -> str:
        return f"{self.caller}({self.given})"

    @abstractmethod
    def item(self, index: int) -> FileItem:
        """Return where an example is found."""

    @abstractmethod
    def settings(self) -> str:
        """Return how examples are made of the files: equal settings give equal examples."""

    def path(self, index: int) -> str | None:
        item = self.item(index)
        return item.file.path + item.suffix

    def name_of(self, index: int) -> str:
        item = self.item(index)
        return os.path.basename(item.file.path) + item.suffix

    def identity(self) -> str | None:
        """Return the settings: an example's fingerprint has its file, and the file's version."""
        are_known = all(file.version.is_known for file in self._files)
        return self.settings() if are_known else None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's present version with the example's number; for a URL the listed one."""
        file, number, _ = self.item(index)
        return fingerprint_in(file, number)


class RangedFiles(ReadsRanges[Any], InFiles):
    """Parts of files that are local, or all at URLs of one file system.

    At URLs a part is a range, which is read ahead; ``fetch`` of a subclass reads local ones.
    """

    def look(
        self,
        paths: Paths,
        options: RemoteOptions,
        look: Callable[[PartialFile], T],
        *,
        suffix: str = "",
        show: Callable[[Sequence[T], int], bool] = lambda found, of: False,
    ) -> list[T]:
        """Find the files, set ``given`` and ``access``, and return the results of ``look``.

        ``suffix``: of the files below a folder that are meant, where folders are taken. ``show``:
        as in ``for_each``.
        """
        self.access = access_to(paths, options) if has_urls(paths, self.caller) else None
        if self.access is not None:
            found = find_urls(paths, self.access, suffix)
        else:
            found = find_files(paths, self.caller, suffix)
        self.given = describe_paths(paths, self.caller)
        if self.access is not None:
            return self.access.for_each(found, look, show)
        return for_each(found, lambda path: look(PartialFile.at(path)), _THREADS, show)


def fingerprint_in(file: VersionedFile, number: int, suffix: str = "") -> Fingerprint:
    """Return the fingerprint of a part of a file."""
    if "://" in file.path:
        return Fingerprint(file.path + suffix, *file.version[:2], number)
    path = absolute(file.path)
    return of_file(path + suffix, os.stat(path), number)
