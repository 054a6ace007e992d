"""Sources with an index: as fast as each format's own reader, and shuffled truly?

Seven tasks, whole epochs, two workers each; stoker chooses its own, at most two threads, but where
Pillow decodes: with images so small it holds the GIL, ``stats()`` says so, and two processes do it.

- tar: shards of small JPEGs, sorted by class, decoded by Pillow; against WebDataset's reader
  (shards shuffled, a buffer of 1,000). And stoker with threads.
- parquet: rows of a number and 1 KiB of bytes; against pyarrow reading one row group after
  another in random order, rows as they lie in it.
- hugging face: the same JPEGs in a ``datasets.Dataset``, decoded by Pillow; against a torch
  ``DataLoader`` over it, which decodes by ``Image()``. And stoker with threads, and these with
  ``stoker.images.decode``.
- hugging face, bytes: the same without decoding.
- mix: the same shards as four sources, mixed evenly; against one source of all of them.
- mix of rows: rows of 16 numbers in memory, as four sources and as one. Nothing is to be done but
  to gather them, so this is what mixing costs.
- index and resume: how long the index of 10^6 members takes, and how long it is to the first batch
  of a new pipeline in the middle of 10^8 tokens.

Beside each rate: how many classes a batch has, on average. The data lie in order of their classes.

Command::

    python bench/sources.py                            # torch and datasets, of the dev group
    python bench/sources.py --peers all --install      # WebDataset as well, in .peers/webdataset

Targets: tar at least 1.2 of WebDataset's rate; Parquet 1.0 of pyarrow's row groups; Hugging Face
2.0 of the better DataLoader; four sources mixed 0.97 of one; the index in under 20 s; resumed in
under 100 ms. Tokens are in ``token_peers.py``.

Results::

    [results/sources.json]
    task                                 case  examples/s             stoker / it  classes a batch
    ----------------------------------------------------------------------------------------------
    tar                                stoker      17,751              1 (1 .. 1)             47.5
    tar                       stoker, threads      10,206      1.7 (1.64 .. 2.03)             47.5
    tar                            webdataset       9,174     1.95 (1.85 .. 1.97)             14.4
    parquet                            stoker   1,361,618              1 (1 .. 1)             17.2
    parquet               pyarrow, row groups   1,984,760    0.68 (0.652 .. 0.73)              1.0
    hugging face                       stoker      18,396              1 (1 .. 1)             47.5
    hugging face              stoker, threads      12,118     1.52 (1.43 .. 1.68)             47.5
    hugging face         stoker.images.decode      30,654  0.616 (0.573 .. 0.675)             47.5
    hugging face             torch, 0 workers      11,550     1.54 (1.37 .. 1.71)             47.4
    hugging face             torch, 2 workers      13,035     1.39 (1.22 .. 1.66)             47.4
    hugging face, bytes                stoker     801,263              1 (1 .. 1)             47.5
    hugging face, bytes      torch, 0 workers     194,832     4.12 (3.79 .. 4.19)             47.7
    hugging face, bytes      torch, 2 workers      57,437     14.2 (12.8 .. 16.8)             47.6
    mix                                stoker      15,448              1 (1 .. 1)             48.0
    mix                            one source      15,514    0.998 (0.94 .. 1.11)             47.5
    mix of rows                        stoker   8,376,528              1 (1 .. 1)             48.0
    mix of rows                    one source  11,948,085  0.701 (0.693 .. 0.725)             47.4

                                                seconds  at most
    ------------------------------------------------------------
    index of 1,000,000 members                     6.87     20.0
    resume in the middle of 100,000,000 tokens  0.00201      0.1
    [end]

Behind, and why. Parquet: pyarrow hands out neighbours; of shuffled rows each KiB is a copy of its
own, from anywhere in some 10 MB. That alone takes 25 us a batch, and reading the row groups 9,
where pyarrow takes 21 to 32 in all: more than 0.8 cannot come of it. Hugging Face: decoding is 85
of the 88 us that an image takes, whoever reads it, and two cores have no more than two of it at a
time; ``stoker.images.decode`` is what makes it twice as fast. Mix of rows: a batch takes 5 us from
one source and 7.5 from four, since each gives its rows by itself.

Caveats: all files are in the page cache. WebDataset and pyarrow's row groups give an order that is
less random, as the classes a batch tell; the figures are those of the orders that people take.
Images are small (64 x 64), so that decoding does not hide what reading costs.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import Ratio, Report, interleaved, parser, report
from peers import environment
from peers.serve import Epochs, timed, whole_rates
from PIL import Image
from torch.utils.data import DataLoader

import stoker

WORKERS = 2
CLASSES = 100
LENGTH = 1024
TARGETS = {
    ("tar", "webdataset"): 1.2,
    ("parquet", "pyarrow, row groups"): 1.0,
    ("hugging face", "torch, 0 workers"): 2.0,
    ("hugging face", "torch, 2 workers"): 2.0,
    ("hugging face, bytes", "torch, 0 workers"): 2.0,
    ("hugging face, bytes", "torch, 2 workers"): 2.0,
    ("mix", "one source"): 0.97,
    ("mix of rows", "one source"): 0.97,
}
PARTS = 4


class Sizes(NamedTuple):
    """How much of everything there is."""

    images: int = 20_000
    rows: int = 200_000
    tokens: int = 100_000_000
    members: int = 1_000_000
    shards: int = 10
    batch: int = 64
    least_s: float = 1.0


QUICK = Sizes(400, 2_000, 200_000, 2_000, 4, 16, 0.0)


# -- the data


def jpegs(count: int) -> list[bytes]:
    """Return a few hundred different files, so that making them takes no time."""
    draw = np.random.default_rng(0)
    files = []
    for _ in range(min(count, 500)):
        small = draw.integers(0, 256, (8, 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((64, 64), Image.Resampling.BICUBIC).save(file, "jpeg")
        files.append(file.getvalue())
    return files


def label_of(number: int, count: int) -> int:
    return number * CLASSES // count


def write_shards(folder: Path, sizes: Sizes) -> str:
    files, each = jpegs(sizes.images), sizes.images // sizes.shards
    for shard in range(sizes.shards):
        with tarfile.open(folder / f"images-{shard:03}.tar", "w") as tar:
            for n in range(shard * each, shard * each + each):
                _add(tar, f"{n:08}.jpg", files[n % len(files)])
                _add(tar, f"{n:08}.cls", b"%d" % label_of(n, sizes.images))
    return f"{folder}/images-{{000..{sizes.shards - 1:03}}}.tar"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_rows(folder: Path, sizes: Sizes) -> Path:
    draw = np.random.default_rng(0)
    data = [draw.bytes(1024) for _ in range(500)]
    table = pa.table(
        {
            "label": [label_of(n, sizes.rows) for n in range(sizes.rows)],
            "data": [data[n % len(data)] for n in range(sizes.rows)],
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=sizes.rows // 40)
    return folder / "rows.parquet"


def write_dataset(folder: Path, sizes: Sizes) -> Any:
    datasets.disable_progress_bars()
    files = jpegs(sizes.images)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": files[n % len(files)], "path": None} for n in range(sizes.images)],
            "label": [label_of(n, sizes.images) for n in range(sizes.images)],
        },
        features=features,
    )
    made.save_to_disk(str(folder / "dataset"))
    return datasets.load_from_disk(str(folder / "dataset"))


def write_tokens(folder: Path, sizes: Sizes) -> Path:
    np.zeros(sizes.tokens, np.uint16).tofile(folder / "tokens.bin")
    return folder / "tokens.bin"


def write_members(folder: Path, sizes: Sizes) -> str:
    """Write shards of very many files of a few bytes."""
    each = sizes.members // sizes.shards
    for shard in range(sizes.shards):
        with tarfile.open(folder / f"many-{shard:03}.tar", "w") as tar:
            for n in range(shard * each, shard * each + each):
                _add(tar, f"{n:08}.txt", b"x" * 16)
    return f"{folder}/many-*.tar"


# -- the cases


def decoded(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def stoker_parquet(path: Path, batch: int) -> Epochs:
    train = stoker.from_parquet(path, seed=0).shuffle().batch(batch)
    return lambda: ((each["data"], each["label"]) for each in train)


def of_shards(shards: str | Sequence[Path]) -> Any:
    return stoker.from_tar(shards, ["jpg", "cls"], seed=0).shuffle()


def mixed_shards(folder: Path) -> Any:
    shards = sorted(folder.glob("images-*.tar"))
    return mixed([of_shards(shards[n::PARTS]) for n in range(PARTS)])


def decoded_batches(examples: Any, batch: int, kind: str = "thread") -> Epochs:
    train = examples.map(decoded, on="jpg").map(int, on="cls").batch(batch)
    train = train.workers(WORKERS, kind=kind)
    return lambda: ((each["jpg"], each["cls"]) for each in train)


def of_rows(first: int, rows: int, total: int) -> Any:
    """Return rows in memory from a number on, in order of their classes."""
    labels = np.arange(first, first + rows) * CLASSES // total
    return stoker.from_arrays(np.ones((rows, 16), np.float32), labels, seed=0).shuffle()


def row_batches(examples: Any, batch: int) -> Epochs:
    return partial(iter, examples.batch(batch))


def mixed_rows(rows: int) -> Any:
    each = rows // PARTS
    return mixed([of_rows(n * each, each, rows) for n in range(PARTS)])


def mixed(parts: Sequence[Any]) -> Any:
    """Mix parts so that an epoch has each example once."""
    return stoker.mix(parts, weights=list(map(len, parts)))


def pyarrow_groups(path: Path, batch: int) -> Epochs:
    draw = np.random.default_rng(0)

    def epoch() -> Iterator[tuple[Any, Any]]:
        with pq.ParquetFile(path) as file:
            for group in draw.permutation(file.num_row_groups).tolist():
                table = file.read_row_group(group)
                for part in table.to_batches(max_chunksize=batch):
                    yield part["data"].to_pylist(), part["label"].to_numpy()

    return epoch


def stoker_huggingface(dataset: Any, batch: int, decode: Any, kind: str = "thread") -> Epochs:
    train: Any = stoker.from_huggingface(dataset, seed=0).shuffle()
    if decode is not None:
        train = train.map(decode, on="image")
    train = train.batch(batch).workers(WORKERS, kind=kind)
    return lambda: ((each["image"], each["label"]) for each in train)


def stacked(examples: list[Any]) -> tuple[Any, Any]:
    images = np.stack([np.asarray(each["image"]) for each in examples])
    return torch.from_numpy(images), torch.tensor([each["label"] for each in examples])


def listed(examples: list[Any]) -> tuple[Any, Any]:
    files = [each["image"]["bytes"] for each in examples]
    return files, torch.tensor([each["label"] for each in examples])


def stoker_tokens(path: Path, batch: int) -> Any:
    tokens = stoker.from_tokens(path, LENGTH, dtype="uint16", seed=0)
    return tokens.shuffle().batch(batch)


def loaders(dataset: Any, batch: int, collate: Any = None) -> dict[str, Epochs]:
    """Return torch's DataLoader without workers and with two, which it keeps."""
    made: dict[str, Epochs] = {}
    for workers in (0, WORKERS):
        loader = DataLoader(
            dataset,
            batch_size=batch,
            shuffle=True,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        made[f"torch, {workers} workers"] = partial(iter, loader)
    return made


def classes_a_batch(epoch: Epochs) -> float:
    """Return how many classes the batches of an epoch have, on average."""
    return mean(len(np.unique(np.asarray(batch[1]))) for batch in epoch())


def index_s(shards: str) -> float:
    """Return how long it takes to index shards of which nothing is known."""
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = cache
        try:
            began = time.perf_counter()
            stoker.from_tar(shards)
            return time.perf_counter() - began
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def resume_s(path: Path, batch: int, state: dict[str, Any]) -> float:
    """Return how long it is from nothing to the first batch in the middle."""
    began = time.perf_counter()
    train = stoker_tokens(path, batch)
    train.load_state_dict(state)
    with iter(train) as batches:
        next(batches)
        return time.perf_counter() - began


def state_in_the_middle(path: Path, batch: int) -> dict[str, Any]:
    train = stoker_tokens(path, batch)
    with iter(train) as batches:
        for _ in range(len(train) // 2):
            next(batches)
        state: dict[str, Any] = train.state_dict()
        return state


def evaluate(found: Report) -> None:
    """Compare stoker with each case."""
    lines: list[Any] = []
    rates: dict[str, list[float]] = {}
    for row in found.having("task", "case", "samples"):
        task, case = row["task"], row["case"]
        each = whole_rates(row["samples"])
        if case == "stoker":
            rates[task] = each
        ratio = Ratio.of(rates[task], each)
        lines.append((task, case, f"{median(each):,.0f}", ratio, f"{row['classes']:.1f}"))
        if (task, case) in TARGETS:
            what = f"{task}: examples/s of {case}"
            found.expect(what, ratio.median, TARGETS[task, case])
    found.show(("task", "case", "examples/s", "stoker / it", "classes a batch"), lines)
    lines.clear()
    for row in found.having("what", "seconds", "most_s"):
        taken_s = median(row["seconds"])
        lines.append((row["what"], f"{taken_s:.3g}", row["most_s"]))
        found.expect(row["what"], taken_s, row["most_s"], at_least=False)
    found.show(("", "seconds", "at most"), lines)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--peers", default="", help="'all', or webdataset")
    options.add_argument("--install", action="store_true", help="make the peer's environment")
    arguments = options.parse_args()
    sizes, rounds = (QUICK, 1) if arguments.quick else (Sizes(), arguments.rounds)
    batch = sizes.batch
    if arguments.peers and arguments.install:
        environment.install("webdataset")
    with report(__file__, arguments) as found, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shards, rows = write_shards(folder, sizes), write_rows(folder, sizes)
        dataset, tokens = write_dataset(folder, sizes), write_tokens(folder, sizes)
        tasks: dict[str, dict[str, Epochs]] = {
            "tar": {
                "stoker": decoded_batches(of_shards(shards), batch, "process"),
                "stoker, threads": decoded_batches(of_shards(shards), batch),
            },
            "parquet": {
                "stoker": stoker_parquet(rows, batch),
                "pyarrow, row groups": pyarrow_groups(rows, batch),
            },
            "hugging face": {
                "stoker": stoker_huggingface(dataset, batch, decoded, "process"),
                "stoker, threads": stoker_huggingface(dataset, batch, decoded),
                "stoker.images.decode": stoker_huggingface(dataset, batch, stoker.images.decode),
                **loaders(dataset, batch, stacked),
            },
            "hugging face, bytes": {
                "stoker": stoker_huggingface(dataset, batch, None),
                **loaders(
                    dataset.cast_column("image", datasets.Image(decode=False)), batch, listed
                ),
            },
            "mix": {
                "stoker": decoded_batches(mixed_shards(folder), batch, "process"),
                "one source": decoded_batches(of_shards(shards), batch, "process"),
            },
            "mix of rows": {
                "stoker": row_batches(mixed_rows(sizes.rows), batch),
                "one source": row_batches(of_rows(0, sizes.rows, sizes.rows), batch),
            },
        }
        for task, epochs in tasks.items():
            cases: dict[str, Callable[[], dict[str, Any]]] = {
                name: partial(timed, epoch, sizes.least_s) for name, epoch in epochs.items()
            }
            classes = {name: classes_a_batch(epoch) for name, epoch in epochs.items()}
            if task == "tar" and arguments.peers:
                program = environment.HERE / "webdataset_shards.py"
                python = environment.python("webdataset")
                peer = environment.Peer([python, program, shards, batch, WORKERS])
                stack.callback(peer.close)
                cases["webdataset"] = partial(peer.timed, sizes.least_s)
                classes["webdataset"] = peer.about["classes"]
            for name, samples in interleaved(cases, rounds).items():
                found.add(task=task, case=name, samples=samples, classes=classes[name])
        many = write_members(folder, sizes)
        found.add(
            what=f"index of {sizes.members:,} members",
            seconds=[index_s(many) for _ in range(rounds)],
            most_s=20.0,
        )
        state = state_in_the_middle(tokens, batch)
        found.add(
            what=f"resume in the middle of {sizes.tokens:,} tokens",
            seconds=[resume_s(tokens, batch, state) for _ in range(rounds)],
            most_s=0.1,
        )


if __name__ == "__main__":
    main()
