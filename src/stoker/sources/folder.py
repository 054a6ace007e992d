"""Class folders, local or at a URL: files in one sub-folder per class, and the classes' numbers."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint, of_file
from stoker.basics.validate import names_in
from stoker.basics.warn import warn
from stoker.schedule.numbering import Numbering
from stoker.sources.files import (
    IMAGE_SUFFIXES,
    absolute,
    files_below,
    read_files,
    warn_left_out,
)
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import is_web
from stoker.sources.remote.files import HIDDEN, Listed
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.source import Access, ReadsRanges
from stoker.sources.remote.storage import RemoteOptions
from stoker.sources.source import Indices


class LabeledImage(NamedTuple):
    """An example of ``from_folder``: an encoded image and the number of its class."""

    image: bytes
    label: int


class LabeledFile(NamedTuple):
    """An example of ``from_folder(extensions=...)``: a file and the number of its class."""

    data: bytes
    label: int


class ClassFolders(NamedTuple):
    """The arguments of ``from_folder``.

    Attributes:
        suffixes: the suffixes of examples, in lower case, each with its dot.
        given: the classes in the order of their numbers; None: the sorted folders with files.
        kind: the type of examples.
    """

    suffixes: tuple[str, ...]
    given: tuple[str, ...] | None
    kind: type[LabeledImage] | type[LabeledFile]

    @staticmethod
    def of(extensions: Any = None, classes: Any = None) -> ClassFolders:
        """Check the arguments. Raises TypeError or ValueError."""
        given = None if classes is None else names_in("classes", classes, "['cat', 'dog']")
        if extensions is None:
            return ClassFolders(IMAGE_SUFFIXES, given, LabeledImage)
        names = names_in("extensions", extensions, "['.wav', '.flac']")
        suffixes = tuple(f".{name.lower().removeprefix('.')}" for name in names)
        if "." in suffixes:
            raise ValueError("extensions has one without a letter")
        return ClassFolders(suffixes, given, LabeledFile)

    def number(self, files: Mapping[str, Sized], where: str) -> tuple[list[str], dict[str, int]]:
        """Return the names of all classes, and the numbers of the folders that have files.

        A folder without such a file (``__MACOSX``) is no class, unless it was given as one.

        Args:
            files: the files of each folder, sorted by folders.
            where: the folder of all, for messages.

        Raises ValueError if there are no files, and for a folder that is not in the given classes.
        """
        folders = [name for name, found in files.items() if len(found)]
        what = "images" if self.kind is LabeledImage else "such files"
        if not folders:
            shown = ", ".join(self.suffixes[:5]) + (", ..." if len(self.suffixes) > 5 else "")
            raise ValueError(
                f"{where} has no {what} in its {len(files)} sub-folders (looked for {shown})"
            )
        if self.given is None:
            empty = [name for name in files if name not in folders]
            if empty:
                more = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
                warn(
                    f"{where}: the sub-folder {empty[0]!r}{more} has no {what} and is no class; "
                    "where it is one, give classes="
                )
            return folders, {name: number for number, name in enumerate(folders)}
        unknown = [name for name in folders if name not in self.given]
        if unknown:
            more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{where} has a folder {unknown[0]!r}{more}, which is none of the "
                f"{len(self.given):,} classes: add it to classes=, or move it away"
            )
        return list(self.given), {name: self.given.index(name) for name in folders}

    def identity_of(self, where: str) -> str:
        """Return the identity of the examples below a folder."""
        return f"folder {where}" if self.kind is LabeledImage else f"folder of files {where}"


def _near(folder: str) -> str:
    """Return a question after a folder that a missing one may have meant, or ""."""
    above, name = os.path.split(folder.rstrip("/"))
    with contextlib.suppress(OSError):
        for near in difflib.get_close_matches(name, os.listdir(above or "."), 1):
            return f". Did you mean {os.path.join(above, near)}?"
    return ""


class FolderSource(ReadsRanges[Any], IndexedSource):
    """Files in one sub-folder a class, listed once, in sorted order; at a URL read ahead.

    Hidden files, and files with other suffixes, are left out. Local paths with such a suffix that
    are not regular files (nor links to them), folders that cannot be listed, and sub-folders
    without a file are left out with a warning. A broken link is an example that fails.

    Args:
        path: the folder, or its URL.
        options: how a URL is listed and read.
        class_folders: the suffixes of examples, and the numbers of the classes.

    Attributes:
        access: how to open the file system of a URL; None for a local folder.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder, or nothing at the URL.
        ValueError: it has no sub-folders, no such files in them, or a sub-folder that is not a
            class; or it is a URL of HTTP.
        RemoteError: the server failed for longer than ``retry_s``, or for good.
        ImportError: a package is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: RemoteOptions | None = None,
        class_folders: ClassFolders | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"from_folder takes the path of one folder, not {type(path).__name__}: several are "
                "joined by concat([from_folder(a), from_folder(b)])"
            )
        self.folder = os.fspath(path)
        self._class_folders = class_folders or ClassFolders.of()
        self.access: Access | None = None
        self._listed: Listed | None = None
        if "://" in self.folder:
            self.access = Access(self.folder, options or RemoteOptions())
            counts = self._list_at_url(self.access)
        else:
            counts = self._list_local()
        self._labels, self._numbering = list(counts), Numbering(list(counts.values()))

    def _list_local(self) -> dict[int, int]:
        """Find the files, by their paths below the folder; return how many each label has."""
        if not os.path.exists(self.folder):
            raise FileNotFoundError(
                f"there is no folder {self.folder}; this is {os.getcwd()}{_near(self.folder)}"
            )
        if not os.path.isdir(self.folder):
            raise NotADirectoryError(
                f"{self.folder} is a file; from_folder expects a folder with a sub-folder for each "
                "class. Files without classes: from_files"
            )
        with os.scandir(self.folder) as entries:
            found = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        if not found:
            raise ValueError(
                f"{self.folder} has no sub-folders; from_folder expects one a class, such as "
                f"train/cat/0001.jpg. Files without classes: from_files('{self.folder}/*')"
            )
        left_out: list[str] = []
        above = self._above = os.path.join(absolute(self.folder), "")
        suffixes = self._class_folders.suffixes
        files = {name: sorted(files_below(above + name, suffixes, left_out)) for name in found}
        warn_left_out(self.name, left_out)
        self.classes, numbers = self._class_folders.number(files, self.folder)
        self._paths = [file[len(above) :] for name in numbers for file in files[name]]
        return {number: len(files[name]) for name, number in numbers.items()}

    def _list_at_url(self, access: Access) -> dict[int, int]:
        """List the files; return how many each label has."""
        url, asked = self.folder, self._class_folders
        if is_web(url):
            raise ValueError(
                f"from_folder lists a folder, which HTTP cannot ({url}): give from_files the URLs, "
                "as a list or by braces such as {000..099}, and take the labels from the paths"
            )
        listed = access.find()
        if not listed.names:
            raise FileNotFoundError(f"there are no files below {url}")
        files: dict[str, list[int]] = {}
        for at, name in enumerate(listed.names):
            folder, slash, _ = name.partition("/")
            if slash and not folder.startswith("."):
                found = files.setdefault(folder, [])
                if not HIDDEN.search(name) and name.lower().endswith(asked.suffixes):
                    found.append(at)
        if not files:
            raise ValueError(
                f"{url} has no sub-folders; from_folder expects one a class, such as "
                "train/cat/0001.jpg"
            )
        for found in files.values():
            found.sort(key=listed.names.__getitem__)
        self.classes, numbers = asked.number(dict(sorted(files.items())), url)
        self._listed = Listed.of(url, listed, [at for name in numbers for at in files[name]])
        return {number: len(files[name]) for name, number in numbers.items()}

    @property
    def name(self) -> str:
        return f"from_folder({self.folder!r})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._class_folders.kind._fields

    def __len__(self) -> int:
        return self._numbering.total

    def fetch(self, indices: Indices) -> list[Any]:
        if self.access is not None:
            return super().fetch(indices)
        found = read_files([self._above + self._paths[index] for index in indices])
        return [self.example(int(at), data) for at, data in zip(indices, found, strict=True)]

    def locate(self, index: int) -> RemoteFile:
        assert self._listed is not None
        return self._listed.locate(index)

    def example(self, index: int, data: bytes) -> LabeledImage | LabeledFile:
        return self._class_folders.kind(data, self._label(index))

    def _label(self, index: int) -> int:
        return self._labels[self._numbering.find(index)[0]]

    def identity(self) -> str | None:
        """Return the folder's real path: its files are identified by path, size, times, inode.

        Of a URL, if its server sent a version of every file.
        """
        if self._listed is None:
            return self._class_folders.identity_of(os.path.realpath(self._above))
        has_versions = self._listed.versions.all()
        return self._class_folders.identity_of(self.folder) if has_versions else None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's current fingerprint, at a URL the listed one, and its label."""
        if self._listed is None:
            file = self._paths[index]
            return of_file(file, os.stat(self._above + file), self._label(index))
        listed = self._listed.locate(index)
        return Fingerprint(listed.url, listed.size, listed.version, self._label(index))

    def name_of(self, index: int) -> str:
        return self._paths[index] if self._listed is None else self.locate(index).url

    def path(self, index: int) -> str | None:
        return self.local_path(index) or self.locate(index).url

    def local_path(self, index: int) -> str | None:
        return None if self._listed is not None else self._above + self._paths[index]

    def labels(self, field: str | int | None = None) -> NDArray[np.int64]:
        if field not in (None, "label", 1, -1):
            raise TypeError(f"the labels of {self.name} are in the field 'label', not {field!r}")
        counts = self._numbering.ends - self._numbering.starts
        return np.repeat(np.array(self._labels, np.int64), counts)

    def column(self, field: str | int) -> NDArray[Any]:
        return self.labels(field)

    @property
    def class_names(self) -> Sequence[str]:
        return self.classes
