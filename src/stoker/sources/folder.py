"""Class folders: files in one sub-folder per class, and the numbers of the classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker.basics.fingerprint import Fingerprint, of_file
from stoker.basics.validate import names_in
from stoker.sources.files import IMAGE_SUFFIXES, files_below, read_files, warn_left_out
from stoker.sources.source import Fingerprinted, Indices, Labeled, OwnSource, ReadsFiles


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
        given: the classes in the order of their numbers; None: the sorted folders.
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

    def number(self, folders: Sequence[str], where: str) -> tuple[list[str], list[int]]:
        """Return the names of all classes, and the numbers of these (sorted) folders.

        Raises ValueError for a folder that is not in the given classes.
        """
        if self.given is None:
            return list(folders), list(range(len(folders)))
        unknown = [name for name in folders if name not in self.given]
        if unknown:
            more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{where} has a folder {unknown[0]!r}{more}, which is none of the "
                f"{len(self.given):,} classes: add it to classes=, or move it away"
            )
        numbers = {name: number for number, name in enumerate(self.given)}
        return list(self.given), [numbers[name] for name in folders]

    def refuse_empty(self, files: int, folders: int, where: str) -> None:
        """Raise ValueError if there are no files."""
        if not files:
            what = "images" if self.kind is LabeledImage else "such files"
            shown = ", ".join(self.suffixes[:5]) + (", ..." if len(self.suffixes) > 5 else "")
            raise ValueError(
                f"{where} has no {what} in its {folders} sub-folders (looked for {shown})"
            )

    def identity_of(self, where: str) -> str:
        """Return the identity of the examples below a folder."""
        return f"folder {where}" if self.kind is LabeledImage else f"folder of files {where}"


class FolderSource(OwnSource, Fingerprinted[Any], Labeled[Any], ReadsFiles[Any]):
    """Files in one sub-folder a class, listed once, in sorted order.

    Hidden files, and files with other suffixes, are left out. Paths with such a suffix that are not
    regular files (nor links to them), and folders that cannot be listed, are left out with a
    warning. A broken link is an example that fails.

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
        self.classes, labels = class_folders.number(found, self.folder)
        self._files: list[tuple[str, int]] = []
        left_out: list[str] = []
        self._above = os.path.join(self.folder, "")
        for name, label in zip(found, labels, strict=True):
            below = os.path.join(self.folder, name)
            files = sorted(files_below(below, class_folders.suffixes, left_out))
            self._files += [(file[len(self._above) :], label) for file in files]
        warn_left_out(self.name, left_out)
        class_folders.refuse_empty(len(self._files), len(found), self.folder)

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
        return self._class_folders.identity_of(os.path.realpath(self.folder))

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
