"""Shards as a source: examples by number, read by the offsets of their files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint
from stoker.basics.validate import names_in
from stoker.basics.warn import warn
from stoker.schedule.numbering import Numbering
from stoker.sources.files import OpenFiles, refuse_too_large
from stoker.sources.in_files import InFiles, Part, fingerprint_in
from stoker.sources.patterns import Paths, describe_paths, find_files
from stoker.sources.shards.archives import unzip
from stoker.sources.shards.index import ShardIndex, index_shards
from stoker.sources.source import Indices

KEY = "__key__"
# A disk reads that much in a fraction of a seek's time; of larger examples nothing between their
# files is read.
_SMALL = 1 << 18
# Headers and padding, in front of each file: a tar header of 512 bytes, a long name's, and the rest
# of a block.
_BETWEEN = 2048

Read = Callable[[int, int], bytes]
"""``read(start, nbytes)``: reads bytes of a shard."""


class ShardSource(InFiles):
    """Files in tar or zip archives, grouped by key; an example is a dict of their bytes.

    Args:
        shards: paths or patterns.
        fields: the fields to read; None: all fields of an example.
        is_strict: whether a damaged shard is refused at once. Otherwise only its incomplete
            examples fail.

    Raises:
        FileNotFoundError: a path or a pattern matches no file.
        ValueError: a file is not a shard, or is compressed as a whole; an example has a field
            twice; no shard has an example, or one of ``fields``; a shard is damaged.
        TypeError: wrong kinds of arguments.
    """

    prefers_blocks = False
    _files: Sequence[ShardIndex]

    def __init__(self, shards: Paths, fields: Sequence[str] | None, *, is_strict: bool) -> None:
        self._fields = None if fields is None else names_in("fields", fields, "['jpg', 'cls']")
        self._files = self._index(shards)
        self._given = describe_paths(shards)
        self._numbering = Numbering([len(shard.keys) for shard in self._files])
        for shard in self._files:
            _tell_damage(shard, is_strict=is_strict)
        if not self._numbering.total:
            raise ValueError(f"{self.name} has no examples: no files with a name and a suffix")
        there = dict.fromkeys(field for shard in self._files for field in shard.fields)
        for field in self._fields or ():
            if field not in there:
                shown_fields = ", ".join(map(repr, there))
                raise ValueError(f"{self.name} has no field {field!r}; it has {shown_fields}")
        self._opened = OpenFiles()

    @property
    def name(self) -> str:
        return f"from_tar({self._given})"

    @property
    def fields(self) -> Sequence[str | int] | None:
        return None if self._fields is None else (KEY, *self._fields)

    def __len__(self) -> int:
        return self._numbering.total

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The shards that have examples."""
        return np.setdiff1d(self._numbering.ends, [0])

    def fetch(self, indices: Indices) -> list[Any]:
        examples = []
        for index in indices:
            shard, number = self._locate(int(index))
            files = shard.files_of(number)
            wanted = [files[field] for field in self._fields or files if field in files]
            read = functools.partial(self._opened.read, shard.path, shard.version)
            examples.append(self._make(shard, number, files, _at_once(wanted, read)))
        return examples

    def extent(self) -> str:
        return f"{len(self):,} examples in {len(self._files):,} shards"

    def settings(self) -> str:
        return f"shards {'all' if self._fields is None else list(self._fields)}"

    def part(self, index: int) -> Part:
        """Return the shard, and the key."""
        shard, number = self._locate(index)
        return Part(shard, number, f"/{shard.keys[number]}")

    def fingerprint(self, index: int) -> Fingerprint:
        return fingerprint_in(*self.part(index))

    def _locate(self, index: int) -> tuple[ShardIndex, int]:
        shard, number = self._numbering.find(index)
        return self._files[shard], number

    def _index(self, shards: Paths) -> list[ShardIndex]:
        return index_shards(find_files(shards, "from_tar"))

    def _make(
        self, shard: ShardIndex, number: int, files: dict[str, list[int]], read: Read
    ) -> dict[str, Any]:
        """Make an example from its files, which ``read(start, nbytes)`` returns."""
        example: dict[str, Any] = {KEY: shard.keys[number]}
        for field in self._fields or files:
            found = files.get(field)
            if found is None:
                raise ValueError(
                    f"{shard.path}: example {example[KEY]!r} has no {field!r}, only "
                    f"{', '.join(map(repr, files))}"
                )
            start, nbytes, inflated_bytes = found
            refuse_too_large(max(nbytes, inflated_bytes), shard.path)
            try:
                data = read(start, nbytes)
                if inflated_bytes >= 0:
                    data = unzip(data, inflated_bytes, f"{example[KEY]}.{field}")
                example[field] = data
            except ValueError as error:
                raise ValueError(f"{field!r} of example {example[KEY]!r}: {error}") from error
        return example


def _at_once(places: Sequence[Sequence[int]], read: Read) -> Read:
    """Return a function that reads an example's small files in one read, if they are adjacent.

    Storage that seeks then needs one seek.
    """
    if len(places) < 2:
        return read
    first = min(start for start, *_ in places)
    span = max(start + nbytes for start, nbytes, _ in places) - first
    if span > min(_SMALL, sum(nbytes for _, nbytes, _ in places) + _BETWEEN * len(places)):
        return read
    held = b""

    def read_part(start: int, nbytes: int) -> bytes:
        nonlocal held
        if not held:
            try:
                held = read(first, span)
            except ValueError:  # perhaps not all of them are damaged
                return read(start, nbytes)
        return held[start - first : start - first + nbytes]

    return read_part


def _tell_damage(shard: ShardIndex, *, is_strict: bool) -> None:
    """Refuse a damaged shard, or warn of it."""
    if not shard.damage:
        return
    key = shard.incomplete()
    which = "" if key is None else f" (example {key!r} is not all there)"
    text = f"{shard.path} {shard.damage}{which}"
    if is_strict:
        raise ValueError(
            f"{text}. Write it again; or give on_error=, which leaves out such examples and what "
            "comes behind them"
        )
    warn(f"{text}: what comes behind is left out")
