"""Image files in one sub-folder a class."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from stoker.cache.fingerprint import Fingerprint, of_file
from stoker.sources.local_files import IMAGE_SUFFIXES, images_below, read_file, warn_left_out
from stoker.sources.source import IndexedSource, Indices


class LabeledImage(NamedTuple):
    """An example of ``from_folder``: an encoded image and the number of its class."""

    image: bytes
    label: int


class FolderSource(IndexedSource):
    """Image files in one sub-folder a class, listed once, in sorted order.

    Hidden files, and files that are no images by their suffix, are left out. So is, with a warning,
    what is named like an image and is no regular file (nor a link to one), and what cannot be
    listed. A link that leads nowhere is an example that fails.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        ValueError: it has no sub-folders, or no images in them.
    """

    fields = LabeledImage._fields
    fits_page_cache = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        with os.scandir(self.folder) as entries:
            self.classes = sorted(
                e.name for e in entries if e.is_dir() and not e.name.startswith(".")
            )
        if not self.classes:
            raise ValueError(
                f"{self.folder} has no sub-folders; from_folder expects one a class, "
                "such as train/cat/0001.jpg"
            )
        self._files: list[tuple[str, int]] = []
        left_out: list[str] = []
        above = len(os.path.join(self.folder, ""))
        for label, name in enumerate(self.classes):
            found = sorted(images_below(os.path.join(self.folder, name), left_out))
            self._files += [(file[above:], label) for file in found]
        warn_left_out(self.name, left_out)
        if not self._files:
            raise ValueError(
                f"{self.folder} has no images in its {len(self.classes)} sub-folders (looked for "
                f"{', '.join(IMAGE_SUFFIXES[:5])}, ...)"
            )

    @property
    def name(self) -> str:
        return f"from_folder({self.folder!r})"

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: Indices) -> list[Any]:
        files = (self._files[index] for index in indices)
        return [LabeledImage(read_file(os.path.join(self.folder, f)), label) for f, label in files]

    def identity(self) -> str | None:
        """Return the folder's real path: files are known below it by path, size, times, inode."""
        return f"folder {os.path.realpath(self.folder)}"

    def name_of(self, index: int) -> str:
        return self._files[index][0]

    def fingerprint(self, index: int) -> Fingerprint:
        """Return the file's fingerprint as it is now, and its label."""
        file, label = self._files[index]
        return of_file(file, os.stat(os.path.join(self.folder, file)), label)

    def path(self, index: int) -> str | None:
        return os.path.join(self.folder, self._files[index][0])

    def local_path(self, index: int) -> str | None:
        return self.path(index)

    def attribute(self, name: str) -> Any:
        return self.classes if name == "classes" else super().attribute(name)
