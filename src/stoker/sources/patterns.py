"""Paths, patterns and braces to files; and a compact list of very many names."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from stoker.schedule.numbering import Numbering
from stoker.sources.files import absolute, files_below, is_special

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_files(given: Paths, caller: str, suffix: str = "") -> list[str]:
    """Return the absolute paths of the matching files: a list's in its order, a pattern's sorted.

    Braces are expanded first, then ``*``, ``?``, ``[...]``, ``**``; an existing path is no pattern.
    ``suffix``: of a folder, take the files below it with this suffix (without ``is_aside``).
    """
    found: list[str] = []
    for each in path_list(given, caller):
        text = os.fspath(each) if isinstance(each, os.PathLike) else each
        if not isinstance(text, str):
            raise TypeError(f"{caller} takes paths, not {type(text).__name__}")
        if "://" in text:
            raise ValueError(f"{caller} reads local files, not {text}: copy them to a local disk")
        for path in [text] if os.path.lexists(text) else expand_braces(text):
            found += _find(path, suffix)
    if not found:
        raise ValueError(f"{caller} needs at least one file")
    for path in found:
        if is_special(path):  # to open a pipe would wait for its writer
            raise ValueError(f"{path} is not a regular file: {caller} takes files, or a pattern")
    return list(map(absolute, found))


def expand_braces(text: str) -> Iterator[str]:
    """Yield the expansions of braces: ``a{01..03}`` and ``{x,y}``, as a shell does."""
    braces = _BRACES.search(text)
    if braces is None:
        yield text
        return
    for part in _parts(braces[1]):
        yield from expand_braces(text[: braces.start()] + part + text[braces.end() :])


def is_web(url: str) -> bool:
    """True for a URL of HTTP, which has no listings."""
    return url.lower().startswith(("http://", "https://"))


def split_query(url: str) -> tuple[str, str]:
    """Return a path or a URL without the query of HTTP, and that (``?sig=...``, or "")."""
    if not is_web(url):
        return url, ""
    path, mark, query = url.partition("?")
    return path, mark + query


def has_urls(given: Paths, caller: str) -> bool:
    """True if a function's paths include URLs. Raises TypeError for other objects than paths."""
    return any("://" in str(each) for each in path_list(given, caller))


def describe_paths(given: Paths, caller: str) -> str:
    """Return the user's paths for messages. Raises TypeError for other objects than paths."""
    path_list(given, caller)
    if isinstance(given, (str, os.PathLike)):
        return repr(os.fspath(given))
    return repr(os.fspath(next(iter(given)))) if len(given) == 1 else f"{len(given):,} paths"


def path_list(given: Any, caller: str) -> Sequence[str | os.PathLike[str]]:
    """Return the user's paths as a list; raise TypeError for an unordered collection."""
    if isinstance(given, (str, os.PathLike)):
        return [given]
    is_list = all(hasattr(given, name) for name in ("__len__", "__getitem__"))
    if is_list and not isinstance(given, (bytes, Mapping)):
        return list(given)
    hint = ": give sorted(...) of it" if isinstance(given, (Iterator, Set)) else ""
    hint = ": give its path" if hasattr(given, "read") else hint
    raise TypeError(
        f"{caller} takes a path, a pattern, or a list of them, not {type(given).__name__}{hint}"
    )


def _parts(inside: str) -> list[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    # As a shell does: one that is written with zeros in front sets the width of all.
    is_wide = any(len(each) > 1 and each.startswith("0") for each in numbers.groups())
    width = max(map(len, numbers.groups())) if is_wide else 0
    step = 1 if first <= last else -1
    return [f"{n:0{width}}" for n in range(first, last + step, step)]


def _find(path: str, suffix: str) -> list[str]:
    """Return the files of one path or pattern, each once."""
    is_pattern = glob.has_magic(path) and not os.path.lexists(path)
    hits = glob.iglob(path, recursive=True) if is_pattern else [path]
    found: set[str] = set()
    for hit in hits:
        if not os.path.isdir(hit):
            found.update([hit] if os.path.exists(hit) else [])
        elif suffix:
            below = files_below(hit, (suffix,), [])
            found.update(each for each in below if not is_aside(os.path.relpath(each, hit)))
        elif not is_pattern:
            raise IsADirectoryError(f"{path} is a folder: give the files in it, as {path}/*")
    if not found:
        nor = f", nor *{suffix} below it" if os.path.isdir(path) else ""
        raise FileNotFoundError(f"no file fits {path}{nor}")
    return sorted(found)


def is_aside(path: str) -> bool:
    """True if a path below a folder is hidden, or half written (``_temporary/``), as for Spark."""
    return any(part.startswith(("_", ".")) for part in path.split("/"))


class Names(Sequence[str]):
    """Strings in one buffer, since a million objects take long to pickle and to scan."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._bytes = b"".join(encoded)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        self._bounds = Numbering(lengths)

    def __len__(self) -> int:
        return len(self._bounds.ends)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        starts, ends = self._bounds.starts, self._bounds.ends
        return self._bytes[starts[index] : ends[index]].decode("utf-8", "surrogateescape")
