"""The pipelines of the corpus: the one file of it that names sources and stages.

A case is JSON, such as ``{"source": ["dicts", 20], "seed": 3, "stages": [["shuffle"], ["batch", 4,
false]]}``: names of ``SOURCES`` and ``STAGES`` with their arguments.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import stoker

Case = dict[str, Any]


# -- examples


@stoker.thread_safe
class Dicts:
    def __init__(self, length: int, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(f"{index} cannot be read")
        return {"id": index, "x": np.full(3, index, np.float32), "name": f"example {index}"}


@stoker.thread_safe
class Many(Dicts):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def folder_of(name: str, count: int, folder: Path) -> Path:
    """Write the files of a source, once; return their folder."""
    there = folder / f"{name}-{count}"
    if not there.exists():
        there.mkdir()
        WRITERS[name](count, there)
    return there


def write_folder(count: int, there: Path) -> None:
    for number in range(count):
        (there / f"c{number % 3}").mkdir(exist_ok=True)
        pixels = np.full((6, 5, 3), number % 251, np.uint8)
        Image.fromarray(pixels).save(there / f"c{number % 3}" / f"{number:03}.png")


def write_files(count: int, there: Path) -> None:
    for number in range(count):
        (there / f"{number:03}.bin").write_bytes(b"%03d" % number)


def write_tar(count: int, there: Path) -> None:
    with tarfile.open(there / "a.tar", "w") as archive:
        for number in range(count):
            for field, data in (("bin", b"%03d" % number), ("cls", b"%d" % (number % 3))):
                info = tarfile.TarInfo(f"{number:03}.{field}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def write_parquet(count: int, there: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table(
        {
            "id": list(range(count)),
            "values": [[number, number + 1] for number in range(count)],
            "name": [f"example {number}" for number in range(count)],
        }
    )
    parquet.write_table(table, there / "a.parquet", row_group_size=7)


def write_csv(count: int, there: Path) -> None:
    rows = "".join(f"{number},{number / 2}\n" for number in range(count))
    (there / "a.csv").write_text("id,half\n" + rows)


def write_jsonl(count: int, there: Path) -> None:
    rows = (json.dumps({"id": number, "x": [number] * 2}) for number in range(count))
    (there / "a.jsonl").write_text("\n".join(rows))


def write_text(count: int, there: Path) -> None:
    (there / "a.txt").write_text("".join(f"line {number}\n" for number in range(count)))


def write_tokens(count: int, there: Path) -> None:
    np.save(there / "a.npy", np.arange(8 * count + 1, dtype=np.uint16))


WRITERS: dict[str, Callable[[int, Path], None]] = {
    "folder": write_folder,
    "files": write_files,
    "tar": write_tar,
    "parquet": write_parquet,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "text": write_text,
    "tokens": write_tokens,
}


def loader(count: int, seed: int, _: Path) -> stoker.Pipeline[Any]:
    batches = [np.arange(4) + 4 * number for number in range(count)]
    return stoker.from_loader(batches, seed=seed)


def mixed(count: int, seed: int, _: Path) -> stoker.Pipeline[Any]:
    one = stoker.from_arrays(np.arange(count), seed=seed).shuffle()
    other = stoker.from_arrays(-np.arange(1, 2 * count + 1), seed=seed).map(add)
    return stoker.mix([one, other], weights=[0.7, 0.3])


def mixed_to_all(count: int, seed: int, _: Path) -> stoker.Pipeline[Any]:
    one = stoker.from_arrays(np.arange(count), seed=seed).filter(keep)
    other = stoker.from_arrays(-np.arange(1, count + 4), seed=seed).shuffle().random_map(noise)
    return stoker.mix([one, other], weights=[1, 2], stop="all")


SOURCES: dict[str, Callable[[int, int, Path], stoker.Pipeline[Any]]] = {
    "numbers": lambda n, s, _: stoker.from_arrays(np.arange(n), seed=s),
    "rows": lambda n, s, _: stoker.from_arrays(np.arange(3.0 * n).reshape(n, 3), seed=s),
    "pairs": lambda n, s, _: stoker.from_arrays(np.arange(n), np.ones((n, 2), "f4"), seed=s),
    "dicts": lambda n, s, _: stoker.from_dataset(Dicts(n), seed=s),
    "many": lambda n, s, _: stoker.from_dataset(Many(n), seed=s),
    "faulty": lambda n, s, _: stoker.from_dataset(Dicts(n, n // 2), seed=s),
    "skipping": lambda n, s, _: stoker.from_dataset(Dicts(n, n // 2), seed=s, max_errors=2),
    "stream": lambda n, s, _: stoker.from_iterable([Dicts(n)[i] for i in range(n)], seed=s),
    "loader": loader,
    "mix": mixed,
    "mix_all": mixed_to_all,
    "folder": lambda n, s, f: stoker.from_folder(folder_of("folder", n, f), seed=s),
    "files": lambda n, s, f: stoker.from_files(f"{folder_of('files', n, f)}/*.bin", seed=s),
    "tar": lambda n, s, f: stoker.from_tar(folder_of("tar", n, f) / "a.tar", seed=s),
    "parquet": lambda n, s, f: stoker.from_parquet(folder_of("parquet", n, f), seed=s),
    "csv": lambda n, s, f: stoker.from_csv(folder_of("csv", n, f) / "a.csv", seed=s),
    "jsonl": lambda n, s, f: stoker.from_jsonl(folder_of("jsonl", n, f) / "a.jsonl", seed=s),
    "text": lambda n, s, f: stoker.from_text(folder_of("text", n, f) / "a.txt", seed=s),
    "tokens": lambda n, s, f: stoker.from_tokens(folder_of("tokens", n, f) / "a.npy", 8, seed=s),
}
"""By name: makes the source of so many examples, with a seed; writes its files into a folder."""

STREAMS = ("stream", "loader")
"""Those without numbered examples."""


# -- functions


def changed(value: Any, by: int) -> Any:
    """Add to all numbers of a value; texts and bytes get it at their end."""
    if isinstance(value, dict):
        return {key: changed(each, by) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(each, by) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(changed(each, by) for each in value)
    if isinstance(value, str):
        return f"{value}+{by}"
    if isinstance(value, bytes):
        return value + b"+%d" % by
    return value + np.asarray(by).astype(getattr(value, "dtype", type(value)))


def number_of(value: Any) -> int:
    """Return a number that follows from all of a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return zlib.crc32(b"".join(b"%d," % number_of(each) for each in value))
    data = value.encode() if isinstance(value, str) else value
    return zlib.crc32(data if isinstance(data, bytes) else np.asarray(data).tobytes())


@stoker.thread_safe
def without_path(file: Any) -> Any:
    return file.data


@stoker.thread_safe
def add(value: Any) -> Any:
    return changed(value, 1)


@stoker.thread_safe
def noise(value: Any, rng: np.random.Generator) -> Any:
    return changed(value, int(rng.integers(100)))


@stoker.thread_safe
def keep(value: Any) -> bool:
    return number_of(value) % 3 != 0


@stoker.thread_safe
def keep_most(value: Any) -> bool:
    return number_of(value) % 7 != 1


@stoker.thread_safe
def count_up(state: int, value: Any) -> Any:
    state += number_of(value) % 5
    return state, stoker.DROP if state % 4 == 1 else changed(value, state % 100)


@stoker.thread_safe
def as_tokens(value: Any) -> Any:
    return np.arange(1 + number_of(value) % 9)


@stoker.thread_safe
def fails_once(value: Any) -> Any:
    if number_of(value) % 11 == 0:
        raise ValueError("no such value")
    return value


class Draws:
    """Draws from a generator of its own, and from a global one, as many datasets do."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, value: Any) -> Any:
        return changed(value, int(self.rng.integers(100)) + random.randrange(100))


# -- stages

Made = Callable[..., stoker.Pipeline[Any]]

STAGES: dict[str, Made] = {
    "shuffle": lambda p: p.shuffle(),
    "shuffle_buffer": lambda p, n: p.shuffle(n),
    "shuffle_blocks": lambda p, n: p.shuffle(block=n),
    "shuffle_weights": lambda p, n: p.sample(1 + np.arange(n) % 3),
    "shuffle_some": lambda p, n, k: p.sample(1 + np.arange(n) % 3, num_samples=k),
    "order": lambda p, n: p.order(lambda epoch, rng: rng.permutation(n)[: n // 2 + 1], n // 2 + 1),
    "shard": lambda p, rank, world, uneven: p.shard(
        rank=rank, world_size=world, remainder="uneven" if uneven else "drop"
    ),
    "shard_padded": lambda p, rank, world: p.shard(rank=rank, world_size=world, remainder="pad"),
    "balance": lambda p, rank, world, n: p.shard(rank=rank, world_size=world).balance(
        1 + np.arange(n) % 7
    ),
    "select": lambda p, step: p.select(lambda number, name: number % step == 0),
    "split": lambda p, part: p.split(0.6, 0.4)[part],
    "take": lambda p, n: p.take(n),
    "skip": lambda p, n: p.skip(n),
    "numbered": lambda p: p.with_index("number"),
    "without_path": lambda p: p.map(without_path),
    "map": lambda p: p.map(add),
    "random_map": lambda p: p.random_map(noise),
    "draws": lambda p: p.map(Draws()),
    "filter": lambda p: p.filter(keep),
    "filter_few": lambda p: p.filter(keep_most),
    "fails": lambda p: p.map(fails_once),
    "scan": lambda p: p.scan(count_up, 0),
    "pack": lambda p, length: p.map(as_tokens).pack(length),
    "cache": lambda p: p.cache("1MiB", version="1"),
    "echo": lambda p, over, under, pool: p.echo(Fraction(over, under), pool=pool),
    "batch": lambda p, n, drop_last: p.batch(n, drop_last=drop_last),
    "batch_tokens": lambda p, most, n, multiple: p.map(as_tokens).batch_by_tokens(
        most, 1 + np.arange(n) % 9, collate=list, multiple_of=multiple
    ),
    "batch_keys": lambda p, size, n: p.bucket(size, np.arange(n) % 3),
    "to": lambda p: p.to_torch(),
    "steps": lambda p, n: p.repeat().steps(n),
}
"""By name: adds the stage, with its arguments, to a pipeline."""


def build(case: Case, folder: Path) -> stoker.Pipeline[Any]:
    """Return the pipeline of a case; its files are written into a folder."""
    name, count = case["source"]
    pipeline = SOURCES[name](count, case["seed"], folder)
    for stage, *arguments in case["stages"]:
        pipeline = STAGES[stage](pipeline, *arguments)
    return pipeline


# -- drawing cases


NOT_BEFORE_A_CACHE = ("random_map", "draws", "scan", "cache")


def draw(number: int) -> Case:
    """Draw a case: of every source in turn, with stages in an order that pipelines allow."""
    rng = random.Random(number)
    source = list(SOURCES)[number % len(SOURCES)]
    n = rng.choice([1, 2, 7, rng.randrange(3, 30), rng.randrange(20, 60)])
    if source.startswith("mix"):
        n = max(n, 7)
    stages: list[list[Any]] = []

    def perhaps(share: float, *stage: Any) -> bool:
        if rng.random() < share:
            stages.append(list(stage))
            return True
        return False

    size = rng.randrange(1, 9)
    if source == "loader":
        perhaps(0.5, "random_map")
        perhaps(0.7, "echo", *rng.choice([(3, 2), (2, 1)]), None)
        perhaps(0.3, "to")
        return {"source": [source, n], "seed": rng.randrange(100), "stages": stages}
    is_stream = source == "stream"
    is_mix = source.startswith("mix")
    if not is_stream and not is_mix:
        perhaps(0.1, "select", rng.choice([1, 2]))
        if source not in ("text", "files"):
            perhaps(0.1, "numbered")
        if n > 4:
            perhaps(0.08, "split", rng.choice([0, 1]))
    if source != "mix_all":
        perhaps(0.15, "take", rng.randrange(1, n + 2))
    if not is_mix:
        perhaps(0.1, "skip", rng.randrange(0, max(1, n // 2)))
    plain = not stages  # so that weights fit the source
    if not is_mix and not is_stream and source != "skipping" and rng.random() < 0.06:
        perhaps(1, "shard_padded", *rng.choice([(0, 2), (1, 3)]))
        perhaps(source == "files", "without_path")
        perhaps(0.5, "map")
        perhaps(1, "batch", size, False)
        return {"source": [source, n], "seed": rng.randrange(100), "stages": stages}
    fixed = rng.random() < 0.1 and perhaps(1, "shard", *rng.choice([(0, 2), (1, 3)]), not is_mix)
    plain = plain and not fixed
    if is_stream:
        perhaps(0.5, "shuffle_buffer", rng.randrange(2, 12))
    elif not is_mix:
        how = rng.choice(["", "shuffle", "shuffle", "shuffle", "blocks", "weights", "order"])
        if how == "shuffle":
            perhaps(1, "shuffle")
        elif how == "blocks":
            perhaps(1, "shuffle_blocks", rng.randrange(1, 9))
        elif how == "weights" and plain:
            if not perhaps(0.5, "shuffle_weights", n):
                perhaps(1, "shuffle_some", n, rng.randrange(1, 2 * n + 1))
        elif how == "order" and plain:
            perhaps(1, "order", n)
        if how == "shuffle" and plain and perhaps(0.1, "balance", *rng.choice([(0, 2), (1, 2)]), n):
            fixed, plain = True, False
    leaves_out = source == "skipping"
    if not fixed and source != "mix_all":
        perhaps(0.15, "shard", *rng.choice([(0, 2), (1, 3)]), not is_mix)
    plain = plain and not any(each[0] == "shard" for each in stages)
    perhaps(source == "files", "without_path")
    planned = not is_stream and not is_mix and not leaves_out and plain and rng.random() < 0.12
    echoes = 0
    body = (
        []
        if planned
        else rng.choices(
            [
                "map",
                "random_map",
                "filter",
                "filter_few",
                "scan",
                "echo",
                "cache",
                "draws",
                "fails",
            ],
            [8, 8, 2, 2, 2, 6, 2, 1, 0.5],
            k=rng.randrange(0, 5),
        )
    )
    for name in body:
        if name == "echo":
            if echoes:
                continue
            echoes += 1
            factor = rng.choice([(5, 4), (3, 2), (2, 1), (21, 10), (4, 1)])
            perhaps(1, "echo", *factor, rng.choice([None, size + rng.randrange(0, 30)]))
        elif (name in ("scan", "cache") and (echoes or is_stream)) or (
            name == "cache"
            and (source == "mix_all" or any(each[0] in NOT_BEFORE_A_CACHE for each in stages))
        ):
            continue
        else:
            perhaps(1, name)
    if not echoes and not planned and perhaps(0.06, "pack", rng.randrange(4, 12)):
        echoes = 1
    if planned:
        if not perhaps(0.5, "batch_tokens", rng.randrange(12, 40), n, rng.choice([None, 4])):
            perhaps(1, "batch_keys", size, n)
    elif perhaps(0.9, "batch", size, rng.random() < 0.3):
        perhaps(0.3, "random_map")
        if not echoes:
            perhaps(0.2, "echo", *rng.choice([(3, 2), (2, 1)]), rng.choice([None, 4]))
        perhaps(0.15, "to")
    perhaps(0.15, "steps", rng.randrange(1, 12))
    return {"source": [source, n], "seed": rng.randrange(100), "stages": stages}
