"""Class folders, local or at a URL: files in one sub-folder per class, and the classes' numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

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


class FolderSource(IndexedSource):
    """Files in one sub-folder a class, listed once, in sorted order.

    Hidden files, and files with other suffixes, are left out. Paths with such a suffix that are not
    regular files (nor links to them), folders that cannot be listed, and sub-folders without a file
    are left out with a warning. A broken link is an example that fails.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no sub-folders, no such files in them, or a sub-folder that is not a
        class.
    """

    def __init__(
        self, folder: str | os.PathLike[str], class_folders: ClassFolders | None = None
    ) -> None:
        self.folder = os.fspath(folder)
        self._class_folders = class_folders = class_folders or ClassFolders.of()
        if not os.path.exists(self.folder):
            raise FileNotFoundError(f"there is no folder {self.folder}; this is {os.getcwd()}")
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
        files = {
            name: sorted(files_below(above + name, class_folders.suffixes, left_out))
            for name in found
        }
        warn_left_out(self.name, left_out)
        self.classes, labels = class_folders.number(files, self.folder)
        self._files = [
            (file[len(above) :], label) for name, label in labels.items() for file in files[name]
        ]

    @property
    def name(self) -> str:
        return f"from_folder({self.folder!r})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._class_folders.kind._fields

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Indices) -> list[Any]:
        files = [self._files[index] for index in indices]
        kind = self._class_folders.kind
        found = read_files([self._above + file for file, _ in files])
        return [kind(data, label) for data, (_, label) in zip(found, files, strict=True)]

    def identity(self) -> str | None:
        """Return the folder's real path: its files are identified by path, size, times, inode."""
        return self._class_folders.identity_of(os.path.realpath(self._above))

    def name_of(self, index: int) -> str:
        return self._files[index][0]

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's current fingerprint, and its label."""
        file, label = self._files[index]
        return of_file(file, os.stat(self._above + file), label)

    def path(self, index: int) -> str | None:
        return self._above + self._files[index][0]

    def local_path(self, index: int) -> str | None:
        return self.path(index)

    @property
    def class_names(self) -> Sequence[str]:
        return self.classes


class RemoteFolderSource(ReadsRanges[Any], IndexedSource):
    """Files in one sub-folder per class, at a URL; in the order that a local folder has.

    Args:
        url: the folder.
        options: how its files are listed and read.
        class_folders: the suffixes of examples, and the numbers of the classes.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it has no sub-folders, no such files in them, or a sub-folder that is not a
            class; or it is a URL of HTTP.
        RemoteError: the server failed for longer than ``timeout_s``, or for good.
        ImportError: a package is missing.
    """

    def __init__(
        self,
        url: str,
        options: RemoteOptions,
        class_folders: ClassFolders | None = None,
    ) -> None:
        if is_web(url):
            raise ValueError(
                f"from_folder lists a folder, which HTTP cannot ({url}): give from_files the URLs, "
                "as a list or by braces such as {000..099}, and take the labels from the paths"
            )
        self.access = Access(url, options)
        self._class_folders = class_folders = class_folders or ClassFolders.of()
        listed = self.access.find()
        if not listed.names:
            raise FileNotFoundError(f"there are no files below {url}")
        files: dict[str, list[int]] = {}
        for at, name in enumerate(listed.names):
            folder, slash, _ = name.partition("/")
            if slash and not folder.startswith("."):
                found = files.setdefault(folder, [])
                if not HIDDEN.search(name) and name.lower().endswith(class_folders.suffixes):
                    found.append(at)
        if not files:
            raise ValueError(
                f"{url} has no sub-folders; from_folder expects one a class, such as "
                "train/cat/0001.jpg"
            )
        for found in files.values():
            found.sort(key=listed.names.__getitem__)
        self.classes, labels = class_folders.number(dict(sorted(files.items())), url)
        self._labels = list(labels.values())
        self._numbering = Numbering([len(files[folder]) for folder in labels])
        chosen = [at for folder in labels for at in files[folder]]
        self._listed = Listed.of(url, listed, chosen)

    @property
    def name(self) -> str:
        return f"from_folder({self.access.url!r})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._class_folders.kind._fields

    def __len__(self) -> int:
        return self._numbering.total

    def path(self, index: int) -> str | None:
        return self.locate(index).url

    def name_of(self, index: int) -> str:
        return self.locate(index).url

    @property
    def class_names(self) -> Sequence[str]:
        return self.classes

    def identity(self) -> str | None:
        """Return the folder's URL, if its server sent a version of every file."""
        has_versions = self._listed.versions.all()
        return self._class_folders.identity_of(self.access.url) if has_versions else None

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's URL, size and version, as they were listed, and its label."""
        file = self.locate(index)
        return Fingerprint(file.url, file.size, file.version, self._label(index))

    def locate(self, index: int) -> RemoteFile:
        return self._listed.locate(index)

    def example(self, index: int, data: bytes) -> LabeledImage | LabeledFile:
        return self._class_folders.kind(data, self._label(index))

    def _label(self, index: int) -> int:
        return self._labels[self._numbering.find(index)[0]]
