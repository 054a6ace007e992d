"""Packs a source into shards, one after another. A run that was stopped continues.

A shard is written under a temporary name, read back and renamed, and the journal then lists it. A
killed run leaves its journal, its finished shards and at most one incomplete file, which the next
run removes. After the last shard, ``shards.json`` replaces the journal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from stoker.adapters.entrypoint import make_pipeline
from stoker.basics import pytree
from stoker.basics.resources import format_bytes, parse_bytes
from stoker.chain.chain import Chain
from stoker.constructors import from_folder
from stoker.pack.formats import ParquetShard, ShardFormat, TarShard
from stoker.pack.journal import (
    PART,
    lock_folder,
    read_journal,
    sync_folder,
    write_journal,
    write_manifest,
)
from stoker.pack.tail import Tail
from stoker.pipeline import Pipeline
from stoker.sources.folder import LabeledFile, LabeledImage
from stoker.sources.origin import IndexedSource

FORMATS: dict[str, type[TarShard] | type[ParquetShard]] = {
    "tar": TarShard,
    "parquet": ParquetShard,
}
# Examples between two reports of progress. Chosen, not measured.
_REPORT_EVERY = 500


class Shards(NamedTuple):
    """The contents of a folder of shards.

    Attributes:
        shards: each shard's name and number of examples, in order.
        nbytes: the total size in bytes.
        fields: the fields that all examples have.
    """

    shards: list[tuple[str, int]]
    nbytes: int
    fields: list[str]


def pack_command(
    source_name: str,
    folder: str,
    shard_size: str,
    shard_format: str,
    report: Callable[[str], None] | None,
) -> str:
    """Run ``stoker pack``, and return the report.

    Raises as ``pack_source`` does; ValueError or TypeError for invalid arguments.
    """
    if shard_format not in FORMATS:
        raise ValueError(f"--format must be {' or '.join(FORMATS)}, not {shard_format}")
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
    shards = pack_source(
        source,
        folder,
        shard_bytes=shard_bytes,
        shard_format=shard_format,
        report=report or (lambda text: None),
    )
    examples = sum(count for _, count in shards.shards)
    read = f'stoker.from_tar("{folder}/*.tar", {shards.fields})'
    if shard_format == "parquet":
        read = f'stoker.from_parquet("{folder}")'
    return (
        f"{examples:,} examples in {len(shards.shards):,} shards of "
        f"{format_bytes(shards.nbytes)}: {read}"
    )


def pack_source(
    source: IndexedSource,
    folder: str,
    *,
    shard_bytes: int,
    shard_format: str,
    report: Callable[[str], None] = lambda text: None,
) -> Shards:
    """Write the examples of a source to shards of about the same size, in a folder of their own.

    Args:
        source: a source whose examples are named tuples or dicts of bytes, text, numbers and
            arrays.
        folder: the destination. It is made if it does not exist; else it must be empty, or left by
            an earlier run with the same source.
        shard_bytes: the size at which a shard ends.
        shard_format: a key of ``FORMATS``.
        report: called with the progress as text.

    Raises ValueError if the folder holds other files or shards of another source, if another run
    uses it, or if a shard reads back differently; StageError if an example cannot be read.
    """
    if not len(source):
        raise ValueError(f"{source.name} has no examples")
    description = {**_describe_source(source), "format": shard_format, "shard_bytes": shard_bytes}
    os.makedirs(folder, exist_ok=True)
    with lock_folder(folder):
        done = read_journal(folder, description)
        first = sum(shard["examples"] for shard in done)
        if first < len(source):
            for shard in _write(source, folder, first, len(done), description, report):
                done.append(shard)
                write_journal(folder, description, done)
        write_manifest(folder, description, done)
    shards = [(shard["name"], shard["examples"]) for shard in done]
    fields = [name for name in done[0]["fields"] if all(name in shard["fields"] for shard in done)]
    return Shards(shards, sum(shard["bytes"] for shard in done), fields)


def _describe_source(source: IndexedSource) -> dict[str, Any]:
    """Return a description that identifies a source, wherever its files lie."""
    digest = xxhash.xxh3_64()
    for index in range(len(source)):
        digest.update(source.name_of(index).encode("utf-8", "surrogateescape") + b"\0")
    try:
        classes = list(source.attribute("class_names"))
    except AttributeError:
        classes = None
    (example,) = Pipeline(Chain.begin(Tail(source, 0), 0)).take(1)
    return {
        "source": source.kind,
        "examples": len(source),
        "names": digest.hexdigest(),
        "first": _digest(example),
        "class_names": classes,
    }


def _digest(value: Any) -> str:
    """Return an example's digest."""
    digest = xxhash.xxh3_64()
    for leaf in pytree.leaves(value):
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, (bytes, bytearray, memoryview)):
            digest.update(leaf)
        else:
            digest.update(repr(leaf).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _write(
    source: IndexedSource,
    folder: str,
    first: int,
    number: int,
    description: Mapping[str, Any],
    report: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Write the shards from example ``first`` on; yield each shard's entry for the journal."""
    shard_type, total = FORMATS[description["format"]], len(source)
    map_fields = _field_mapper(source, description["format"])
    width = len(str(total - 1))
    examples = iter(Pipeline(Chain.begin(Tail(source, first), 0)))
    with contextlib.closing(examples):
        position = first
        while position < total:
            name = f"shard-{number:06}{shard_type.suffix}"
            temporary = os.path.join(folder, f"{PART}{name}")
            schema_from = (
                None if not number else os.path.join(folder, f"shard-{0:06}{shard_type.suffix}")
            )
            shard: ShardFormat = shard_type(temporary, schema_from)
            first_in_shard = position
            try:
                while position < total and (
                    position == first_in_shard or shard.nbytes < description["shard_bytes"]
                ):
                    example = map_fields(next(examples))
                    try:
                        shard.add(f"{position:0{width}}", example)
                    except (ValueError, TypeError) as error:
                        which = source.path(position) or f"example {position}"
                        raise ValueError(f"{which}: {error}") from error
                    position += 1
                    if position % _REPORT_EVERY == 0:
                        report(f"{position:,} of {total:,} examples, shard {number + 1:,}")
                report(f"{position:,} of {total:,} examples, reading shard {number + 1:,} back")
                shard.finish()
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                if isinstance(error, OSError) and error.errno and error.filename is None:
                    raise OSError(error.errno, os.strerror(error.errno), temporary) from error
                raise
            finally:
                shard.close()
            nbytes = os.stat(temporary).st_size
            os.replace(temporary, os.path.join(folder, name))
            sync_folder(folder)
            yield {
                "name": name,
                "examples": position - first_in_shard,
                "bytes": nbytes,
                "fields": shard.fields,
            }
            number += 1


def _field_mapper(source: IndexedSource, shard_format: str) -> Callable[[Any], Mapping[str, Any]]:
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

    if shard_format != "tar" or set(source.fields or ()) not in _LABELED:
        return as_mapping
    # As in WebDataset, the field of a file's bytes is its suffix, if all files have the same one.
    suffixes = {_suffix(source.name_of(index)) for index in range(len(source))}

    def as_labeled(example: Any) -> Mapping[str, Any]:
        name = common_suffix or example._fields[0]
        return {name: example[0], "cls": example[1]}

    common_suffix = suffixes.pop() if len(suffixes) == 1 and "cls" not in suffixes else ""
    return as_labeled


_LABELED = ({*LabeledImage._fields}, {*LabeledFile._fields})


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower().removeprefix(".")
    return "jpg" if suffix in ("jpeg", "jpe") else suffix
