"""Packing a source into shards: in order, one shard at a time; a stopped run continues.

A shard is written under a temporary name, read back, and renamed; then the journal lists it. A
killed run leaves its journal, its finished shards and at most one half-written file, which the next
run removes. The journal becomes ``shards.json`` after the last shard.
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
    alone_in,
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
# Examples from one word of progress to the next. Chosen, not measured.
_SAID_EVERY = 500


class Shards(NamedTuple):
    """The contents of a folder of shards.

    Attributes:
        shards: their names and numbers of examples, in order.
        nbytes: their total size.
        fields: the fields that all of their examples have.
    """

    shards: list[tuple[str, int]]
    nbytes: int
    fields: list[str]


def pack_command(
    given: str, folder: str, shard_size: str, form: str, say: Callable[[str], None] | None
) -> str:
    """Run ``stoker pack``, and return its report.

    Raises as ``pack_source``; ValueError or TypeError for wrong arguments.
    """
    if form not in FORMATS:
        raise ValueError(f"--format is {' or '.join(FORMATS)}, not {form}")
    shard_bytes = parse_bytes(shard_size)
    is_function = not os.path.isdir(given) and "://" not in given and ":" in given
    pipeline = make_pipeline(given) if is_function else from_folder(given)
    chain, source = pipeline.chain, pipeline.chain.source
    behind = chain.stages or chain.steps is not None or chain.flows
    if behind or not isinstance(source, IndexedSource):
        raise ValueError(
            f"{given}: the examples of a source with an index are packed as they are; leave out "
            "what stands behind it"
        )
    if source.has_own_order:
        raise ValueError(f"{given} is a mixture: pack its parts, and mix what is read of them")
    packed = pack_source(
        source, folder, shard_bytes=shard_bytes, form=form, say=say or (lambda text: None)
    )
    examples = sum(count for _, count in packed.shards)
    read = f'stoker.from_tar("{folder}/*.tar", {packed.fields})'
    if form == "parquet":
        read = f'stoker.from_parquet("{folder}")'
    return (
        f"{examples:,} examples in {len(packed.shards):,} shards of "
        f"{format_bytes(packed.nbytes)}: {read}"
    )


def pack_source(
    source: IndexedSource,
    folder: str,
    *,
    shard_bytes: int,
    form: str,
    say: Callable[[str], None] = lambda text: None,
) -> Shards:
    """Write the examples of a source into shards of about one size, in a folder of their own.

    Args:
        source: a source whose examples are named tuples or dicts of bytes, text, numbers and
            arrays.
        folder: the destination, made if missing; otherwise empty, or left by a run of the same
            source.
        shard_bytes: a shard ends with the example that reaches it.
        form: a key of ``FORMATS``.
        say: called with the progress as text.

    Raises ValueError where the folder holds other files or another packing, where another run is
    packing into it, or a shard cannot be read back; StageError where an example cannot be read.
    """
    if not len(source):
        raise ValueError(f"{source.name} has no examples")
    about = {**_about(source), "format": form, "shard_bytes": shard_bytes}
    os.makedirs(folder, exist_ok=True)
    with alone_in(folder):
        done = read_journal(folder, about)
        first = sum(shard["examples"] for shard in done)
        if first < len(source):
            for shard in _write(source, folder, first, len(done), about, say):
                done.append(shard)
                write_journal(folder, about, done)
        write_manifest(folder, about, done)
    shards = [(shard["name"], shard["examples"]) for shard in done]
    fields = [name for name in done[0]["fields"] if all(name in shard["fields"] for shard in done)]
    return Shards(shards, sum(shard["bytes"] for shard in done), fields)


def _about(source: IndexedSource) -> dict[str, Any]:
    """Return a source's identity, independent of its name."""
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
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Write shards from an example on, and yield each one's entry."""
    kind, of = FORMATS[about["format"]], len(source)
    fields_of = _naming(source, about["format"])
    width = len(str(of - 1))
    examples = iter(Pipeline(Chain.begin(Tail(source, first), 0)))
    with contextlib.closing(examples):
        at = first
        while at < of:
            name = f"shard-{number:06}{kind.suffix}"
            part = os.path.join(folder, f"{PART}{name}")
            like = None if not number else os.path.join(folder, f"shard-{0:06}{kind.suffix}")
            shard: ShardFormat = kind(part, like)
            began = at
            try:
                while at < of and (at == began or shard.nbytes < about["shard_bytes"]):
                    example = fields_of(next(examples))
                    try:
                        shard.add(f"{at:0{width}}", example)
                    except (ValueError, TypeError) as error:
                        which = source.path(at) or f"example {at}"
                        raise ValueError(f"{which}: {error}") from error
                    at += 1
                    if at % _SAID_EVERY == 0:
                        say(f"{at:,} of {of:,} examples, shard {number + 1:,}")
                say(f"{at:,} of {of:,} examples, reading shard {number + 1:,} back")
                shard.finish()
            except BaseException as error:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                if isinstance(error, OSError) and error.errno and error.filename is None:
                    raise OSError(error.errno, os.strerror(error.errno), part) from error
                raise
            finally:
                shard.close()
            nbytes = os.stat(part).st_size
            os.replace(part, os.path.join(folder, name))
            sync_folder(folder)
            yield {
                "name": name,
                "examples": at - began,
                "bytes": nbytes,
                "fields": shard.fields,
            }
            number += 1


def _naming(source: IndexedSource, form: str) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that turns an example into a mapping of fields."""

    def plain(example: Any) -> Mapping[str, Any]:
        if hasattr(example, "_asdict"):
            example = example._asdict()
        if not isinstance(example, Mapping):
            raise ValueError(
                f"examples with named fields are packed, not {type(example).__name__}: give a "
                "source of dicts or named tuples"
            )
        return {name: value for name, value in example.items() if name != "__key__"}

    if form != "tar" or set(source.fields or ()) not in _LABELED:
        return plain
    # As WebDataset has them: what all files are called, if they are called alike.
    suffixes = {_suffix(source.name_of(index)) for index in range(len(source))}

    def labeled(example: Any) -> Mapping[str, Any]:
        name = suffixes_alone or example._fields[0]
        return {name: example[0], "cls": example[1]}

    suffixes_alone = suffixes.pop() if len(suffixes) == 1 and "cls" not in suffixes else ""
    return labeled


_LABELED = ({*LabeledImage._fields}, {*LabeledFile._fields})


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower().removeprefix(".")
    return "jpg" if suffix in ("jpeg", "jpe") else suffix
