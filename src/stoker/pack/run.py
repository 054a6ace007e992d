"""Packs a source into tar shards, one after another.

A shard is written under a temporary name, read back and renamed. ``shards.json`` is written last,
so a folder without it is unfinished.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stoker.adapters.entrypoint import make_pipeline
from stoker.basics.resources import format_bytes, parse_bytes
from stoker.chain.chain import Chain
from stoker.constructors import from_folder
from stoker.errors import StokerError
from stoker.pipeline import Pipeline
from stoker.sources.files import PartialFile
from stoker.sources.folder import LabeledFile, LabeledImage
from stoker.sources.origin import IndexedSource
from stoker.sources.shards.index import build_index

MANIFEST = "shards.json"
_PART = ".part-"
# Examples between two reports of progress. Chosen, not measured.
_REPORT_EVERY = 500

Report = Callable[[str], None]


class PackedShard(NamedTuple):
    """The content of one shard."""

    name: str
    examples: int
    bytes: int
    fields: list[str]
    """The fields that all of its examples have."""


def pack_command(source_name: str, folder: str, shard_size: str, report: Report | None) -> str:
    """Run ``stoker pack``, and return the report. Raises as ``pack_source``, and ValueError."""
    shard_bytes = parse_bytes(shard_size)
    is_function = not os.path.isdir(source_name) and "://" not in source_name and ":" in source_name
    pipeline = make_pipeline(source_name) if is_function else from_folder(source_name)
    chain, source = pipeline.chain, pipeline.chain.source
    is_more_than_source = chain.stages or chain.steps is not None or chain.flows
    if is_more_than_source or not isinstance(source, IndexedSource):
        raise ValueError(
            f"{source_name}: stoker pack takes a source that has an index, without stages: leave "
            "out the stages, or write the examples to files first"
        )
    if source.has_own_order:
        raise ValueError(
            f"{source_name} is a mixture: pack each of its sources, and mix the packed ones"
        )
    shards = pack_source(source, folder, shard_bytes, report or (lambda text: None))
    fields = [name for name in shards[0].fields if all(name in each.fields for each in shards)]
    size = format_bytes(sum(each.bytes for each in shards))
    return (
        f"{len(source):,} examples in {len(shards):,} shards of {size}: "
        f'stoker.from_tar("{folder}/*.tar", {fields})'
    )


def pack_source(
    source: IndexedSource, folder: str, shard_bytes: int, report: Report = lambda text: None
) -> list[PackedShard]:
    """Write the examples of a source to tar shards of about ``shard_bytes``, in an empty folder.

    Examples are named tuples or dicts of bytes, text, numbers and arrays. ``report`` is called with
    the progress. Raises ValueError if the folder holds files, or if a shard reads back differently.
    """
    if not len(source):
        raise ValueError(f"{source.name} has no examples")
    os.makedirs(folder, exist_ok=True)
    if there := os.listdir(folder):
        raise ValueError(
            f"{folder} holds files, such as {min(there)!r}: give an empty or new folder"
        )
    shards = list(_write(source, folder, shard_bytes, report))
    content: dict[str, Any] = {"examples": len(source), "class_names": None}
    with contextlib.suppress(AttributeError):
        content["class_names"] = list(source.attribute("class_names"))
    content["shards"] = [each._asdict() for each in shards]
    with open(os.path.join(folder, MANIFEST), "w") as file:
        json.dump(content, file, indent=1)
    return shards


def _write(
    source: IndexedSource, folder: str, shard_bytes: int, report: Report
) -> Iterator[PackedShard]:
    """Write the shards, and yield the content of each."""
    map_fields, total = _field_mapper(source), len(source)
    width = len(str(total - 1))
    number = position = 0
    with contextlib.closing(iter(Pipeline(Chain.begin(source, 0)))) as examples:
        while position < total:
            name, first = f"shard-{number:06}.tar", position
            temporary = os.path.join(folder, f"{_PART}{name}")
            try:
                with _TarWriter(temporary) as shard:
                    while position < total and (position == first or shard.nbytes < shard_bytes):
                        example = map_fields(next(examples))
                        try:
                            shard.add(f"{position:0{width}}", example)
                        except (ValueError, TypeError) as error:
                            which = source.path(position) or f"example {position}"
                            raise ValueError(f"{which}: {error}") from error
                        position += 1
                        if position % _REPORT_EVERY == 0:
                            report(f"{position:,} of {total:,} examples, shard {number + 1:,}")
                    nbytes = shard.finish()
                os.replace(temporary, os.path.join(folder, name))
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                known = (
                    isinstance(error, StokerError) or getattr(error, "filename", None) is not None
                )
                if isinstance(error, OSError) and error.errno and not known:
                    raise OSError(error.errno, os.strerror(error.errno), temporary) from error
                raise
            yield PackedShard(name, position - first, nbytes, shard.fields)
            number += 1


class _TarWriter:
    """Writes a tar archive, a member for each field of each example, and reads it back.

    ``fields`` are those that all examples have, as readers find them.
    """

    def __init__(self, path: str) -> None:
        self.fields: list[str] = []
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self._expected: list[tuple[str, dict[str, int]]] = []

    def __enter__(self) -> _TarWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def nbytes(self) -> int:
        return self._file.tell()

    def add(self, key: str, example: Mapping[str, Any]) -> None:
        """Write an example. Raises ValueError or TypeError if it cannot be written."""
        files = [_as_file(field, value) for field, value in example.items()]
        names = [name for name, _ in files]
        if len({*names}) < len(names):
            raise ValueError(f"two of its fields would have the same name in a tar shard: {names}")
        for name, data in files:
            info = tarfile.TarInfo(f"{key}.{name}")
            info.size = len(data)
            self._tar.addfile(info, io.BytesIO(data))
        self.fields = [name for name in self.fields if name in names] if self._expected else names
        self._expected.append((key, {name: xxhash.xxh3_64_intdigest(data) for name, data in files}))

    def finish(self) -> int:
        """Complete the file, read it back, and return its size. Raises ValueError if it differs."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        file = PartialFile.at(self._path)
        index = build_index(file)
        found = []
        for number, key in enumerate(index.keys):
            places = index.files_of(number).items()
            digests = {
                field: xxhash.xxh3_64_intdigest(file.read(start, nbytes))
                for field, (start, nbytes, _) in places
            }
            found.append((key, digests))
        if found != self._expected:
            raise ValueError(
                f"{self._path} reads back differently than it was written: check the disk"
            )
        return self.nbytes


def _as_file(field: Any, value: Any) -> tuple[str, bytes]:
    if not isinstance(field, str) or "/" in field or field != field.lower():
        raise ValueError(
            f"{field!r} cannot be a field of a tar shard: its name must be lower-case text without "
            "'/'"
        )
    if isinstance(value, (bytes, bytearray, memoryview)):
        return field, bytes(value)
    if isinstance(value, str):
        return field, value.encode()
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return field, str(value).encode()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return f"{field}.npy", file.getvalue()
    raise TypeError(
        f"{field!r} is a {type(value).__name__}: tar shards hold bytes, text, numbers and arrays"
    )


def _field_mapper(source: IndexedSource) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that turns an example into a mapping from field names to values."""

    def as_mapping(example: Any) -> Mapping[str, Any]:
        if hasattr(example, "_asdict"):
            example = example._asdict()
        if not isinstance(example, Mapping):
            raise ValueError(
                f"stoker pack needs examples with named fields, but an example is a "
                f"{type(example).__name__}: give a source of dicts or named tuples"
            )
        return {name: value for name, value in example.items() if name != "__key__"}

    if set(source.fields or ()) not in ({*LabeledImage._fields}, {*LabeledFile._fields}):
        return as_mapping
    # As in WebDataset, the field of a file's bytes is its suffix, if all files have the same one.
    suffixes = {_suffix(source.name_of(index)) for index in range(len(source))}
    common_suffix = suffixes.pop() if len(suffixes) == 1 and "cls" not in suffixes else ""

    def as_labeled(example: Any) -> Mapping[str, Any]:
        if not isinstance(example, (LabeledImage, LabeledFile)):
            return as_mapping(example)
        return {common_suffix or example._fields[0]: example[0], "cls": example[1]}

    return as_labeled


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower().removeprefix(".")
    return "jpg" if suffix in ("jpeg", "jpe") else suffix
