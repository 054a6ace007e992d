"""Folders of files, one a class: which files are examples, and how classes are numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker.checks import names_in
from stoker.sources.local_files import IMAGE_SUFFIXES


class LabeledImage(NamedTuple):
    """An example of ``from_folder``: an encoded image and the number of its class."""

    image: bytes
    label: int


class LabeledFile(NamedTuple):
    """An example of ``from_folder(extensions=...)``: a file and the number of its class."""

    data: bytes
    label: int


class ClassFolders(NamedTuple):
    """What ``from_folder`` was asked for.

    Attributes:
        suffixes: of the files that are examples, in lower case, each with its dot.
        given: the classes in the order of their numbers; None: the sorted folders.
        kind: what examples are.
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

        Raises ValueError for a folder that is none of the classes that were given.
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
        """Raise ValueError where there are no files."""
        if not files:
            what = "images" if self.kind is LabeledImage else "such files"
            shown = ", ".join(self.suffixes[:5]) + (", ..." if len(self.suffixes) > 5 else "")
            raise ValueError(
                f"{where} has no {what} in its {folders} sub-folders (looked for {shown})"
            )

    def identity_of(self, where: str) -> str:
        """Return what tells the examples below a folder from others."""
        return f"folder {where}" if self.kind is LabeledImage else f"folder of files {where}"
