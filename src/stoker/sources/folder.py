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
from stoker.sources.files import IMAGE_SUFFIXES, absolute, files_below, read_files, warn_left_out
from stoker.sources.origin import IndexedSource
from stoker.sources.patterns import is_web
from stoker.sources.remote.files import HIDDEN, Listed
from stoker.sources.remote.reader import RemoteFile
from stoker.sources.remote.source import Access, ReadsRanges
from stoker.sources.remote.storage import Entries, RemoteOptions
from stoker.sources.source import Indices


class LabeledImage(NamedTuple):
    """An example of ``from_folder``: an encoded image and the number of its class."""

    image: bytes
    label: int


class LabeledFile(NamedTuple):
    """An example of ``from_folder(extensions=...)``: a file and the number of its class."""

    data: bytes
    label: int


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
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: RemoteOptions | None = None,
        *,
        extensions: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"from_folder takes the path of one folder, not {type(path).__name__}: several are "
                "joined by concat([from_folder(a), from_folder(b)])"
            )
        self.folder = os.fspath(path)
        self._kind: type[LabeledImage] | type[LabeledFile] = LabeledImage
        self._suffixes: tuple[str, ...] = IMAGE_SUFFIXES
        if extensions is not None:
            names = names_in("extensions", extensions, "['.wav', '.flac']")
            self._kind = LabeledFile
            self._suffixes = tuple(f".{name.lower().removeprefix('.')}" for name in names)
            if "." in self._suffixes:
                raise ValueError("extensions has one without a letter")
        given = None if classes is None else names_in("classes", classes, "['cat', 'dog']")
        self.access: Access | None = None
        self._listed: Listed | None = None
        if "://" in self.folder:
            self.access = Access(self.folder, options or RemoteOptions())
            listed, places = self._list_at_url(self.access)
            numbers = self._number_classes(places, given)
            chosen = [at for name in numbers for at in places[name]]
            self._listed = Listed.of(self.folder, listed, chosen)
            sizes = [len(places[name]) for name in numbers]
        else:
            files = self._list_local()
            numbers = self._number_classes(files, given)
            self._paths = [file[len(self._above) :] for name in numbers for file in files[name]]
            sizes = [len(files[name]) for name in numbers]
        self._labels, self._numbering = list(numbers.values()), Numbering(sizes)

    def _list_local(self) -> dict[str, list[str]]:
        """Return the files of each sub-folder; all sorted."""
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
        files = {
            name: sorted(files_below(above + name, self._suffixes, left_out)) for name in found
        }
        warn_left_out(self.name, left_out)
        return files

    def _list_at_url(self, access: Access) -> tuple[Entries, dict[str, list[int]]]:
        """Return what is there, and the places of the files of each sub-folder; all sorted."""
        url = self.folder
        if is_web(url):
            raise ValueError(
                f"from_folder lists a folder, which HTTP cannot ({url}): give from_files the URLs, "
                "as a list or by braces such as {000..099}, and take the labels from the paths"
            )
        listed = access.find()
        if not listed.names:
            raise FileNotFoundError(f"there are no files below {url}")
        files: dict[str, list[int]] = {}
        for at in sorted(range(len(listed.names)), key=listed.names.__getitem__):
            name = listed.names[at]
            folder, slash, _ = name.partition("/")
            if slash and not folder.startswith("."):
                found = files.setdefault(folder, [])
                if not HIDDEN.search(name) and name.lower().endswith(self._suffixes):
                    found.append(at)
        if not files:
            raise ValueError(
                f"{url} has no sub-folders; from_folder expects one a class, such as "
                "train/cat/0001.jpg"
            )
        return listed, dict(sorted(files.items()))

    def _number_classes(
        self, files: Mapping[str, Sized], given: Sequence[str] | None
    ) -> dict[str, int]:
        """Name the classes; return the numbers of the folders that have files, from ``files``."""
        where = self.folder
        folders = [name for name, found in files.items() if len(found)]
        what = "images" if self._kind is LabeledImage else "such files"
        if not folders:
            shown = ", ".join(self._suffixes[:5]) + (", ..." if len(self._suffixes) > 5 else "")
            raise ValueError(
                f"{where} has no {what} in its {len(files)} sub-folders (looked for {shown})"
            )
        if given is None:
            empty = [name for name in files if name not in folders]
            if empty:
                more = f" and {len(empty) - 1:,} more" if len(empty) > 1 else ""
                warn(
                    f"{where}: the sub-folder {empty[0]!r}{more} has no {what} and is no class; "
                    "where it is one, give classes="
                )
        self.classes = list(folders if given is None else given)
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = [name for name in folders if name not in numbers]
        if unknown:
            more = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{where} has a folder {unknown[0]!r}{more}, which is none of the "
                f"{len(self.classes):,} classes: add it to classes=, or move it away"
            )
        return {name: numbers[name] for name in folders}

    @property
    def name(self) -> str:
        return f"from_folder({self.folder!r})"

    @property
    def fields(self) -> Sequence[str | int]:
        return self._kind._fields

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
        return self._kind(data, self._label(index))

    def _label(self, index: int) -> int:
        return self._labels[self._numbering.find(index)[0]]

    def identity(self) -> str | None:
        """Return the folder's real path; of a URL, if its server sent a version of every file."""
        where = os.path.realpath(self._above) if self._listed is None else self.folder
        if self._listed is not None and not self._listed.versions.all():
            return None
        return f"folder {where}" if self._kind is LabeledImage else f"folder of files {where}"

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's current fingerprint, at a URL the listed one, and its label."""
        if self._listed is None:
            file = self._paths[index]
            return of_file(file, os.stat(self._above + file), self._label(index))
        listed = self._listed.locate(index)
        return Fingerprint(listed.url, listed.size, listed.version, self._label(index))

    def name_of(self, index: int) -> str:
        return self._paths[index] if self._listed is None else self._listed.names[index]

    def path(self, index: int) -> str | None:
        return self.local_path(index) or self.locate(index).url

    def local_path(self, index: int) -> str | None:
        return None if self._listed is not None else self._above + self._paths[index]

    lies_by_class = True

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
