"""Python code of users: what do the defaults bring for it, beside the best DataLoader?

Each row is a dataset, or a function, as users write it:

- dicts: four numbers an example, 2 us; they stay in the loop's thread.
- Python: a millisecond of it an example, which holds the GIL.
- Pillow: files of 400 x 304 pixels, decoded, cropped.
- tokenizer: 200 words an example, by the package ``tokenizers``; ``collate`` pads the lists of ids.
- lists: 256 Python numbers an example, handed out as they are.
- waits: 4 ms an example, as from storage.
- paths: 1.28 million (path, label) pairs in a list.
- array: 400 MB in memory, read row by row.
- echo: README's own chain, ``from_folder``, decoded, each used twice, augmented by the user's
  function, batched. ``DataLoader`` has no echo: it decodes for each use, by the same function.

Each is read by stoker at its defaults, by as many processes as cores (new ones for each epoch, and
persistent ones), declared ``stoker.thread_safe``; by ``DataLoader`` with no worker, and with as
many as cores (of both kinds); examples that wait by 8 and 16 processes, too. ``--against`` adds the
defaults of another checkout. Every case of every round is a process of its own, in turns. Measured
are examples a second of whole epochs behind the first (the median), the time from making the loader
to its first batch, and the memory (PSS of the process and its children) that the first epoch took
at its peak, above what the process had with the dataset alone.

Command::

    python bench/users_code.py --jpegs imagenet-sample.tar --against ../stoker-before

Target: at least 0.95 of the best ``DataLoader`` with as many processes.

Machine: told in results/users_code.json.

Results::

    [results/users_code.json]
                                          examples/s  first ms  MiB       the defaults / it
    ---------------------------------------------------------------------------------------
    dicts: stoker                            857,802        59    5              1 (1 .. 1)
    dicts: stoker, thread_safe               939,205        17    4   0.928 (0.618 .. 1.74)
    dicts: stoker before                   1,223,886        21    4   0.892 (0.539 .. 1.06)
    dicts: DataLoader, 0                   1,035,914        11   11     0.94 (0.81 .. 1.09)
    dicts: stoker, 2                          93,246        75   21     9.67 (8.22 .. 11.5)
    dicts: DataLoader, 2                      80,693        62   43       10.6 (9.02 .. 13)
    dicts: stoker, 2, persistent              79,791        78   20       11 (8.49 .. 14.7)
    dicts: DataLoader, 2, persistent          77,740        55   43     11.8 (8.06 .. 15.1)
    Python: stoker                             1,460        57   19              1 (1 .. 1)
    Python: stoker, thread_safe                  872        31    3     1.67 (1.64 .. 2.37)
    Python: stoker before                        879        33    3     1.66 (1.62 .. 1.86)
    Python: DataLoader, 0                        890        20    3     1.65 (1.61 .. 1.75)
    Python: stoker, 2                          1,442        60   19    1.03 (0.974 .. 1.11)
    Python: DataLoader, 2                      1,451        71   33        1.01 (1 .. 1.21)
    Python: stoker, 2, persistent              1,539        65   19  0.945 (0.928 .. 0.953)
    Python: DataLoader, 2, persistent          1,500        69   33   0.978 (0.928 .. 1.05)
    Pillow: stoker                             1,627        64   54              1 (1 .. 1)
    Pillow: stoker, thread_safe                2,205        26   16  0.753 (0.729 .. 0.765)
    Pillow: stoker before                      2,188        26   16   0.742 (0.73 .. 0.779)
    Pillow: DataLoader, 0                      1,247        20   14      1.31 (1.06 .. 1.4)
    Pillow: stoker, 2                          1,662        67   47    1.01 (0.902 .. 1.06)
    Pillow: DataLoader, 2                      1,533        57   45     1.06 (1.01 .. 1.13)
    Pillow: stoker, 2, persistent              1,934        71   48   0.841 (0.83 .. 0.993)
    Pillow: DataLoader, 2, persistent          1,739        66   44   0.945 (0.934 .. 1.01)
    tokenizer: stoker                          7,945        42   28              1 (1 .. 1)
    tokenizer: stoker, thread_safe             4,815        16    6     1.65 (1.58 .. 1.71)
    tokenizer: stoker before                   4,675        25    9     1.76 (1.67 .. 2.07)
    tokenizer: DataLoader, 0                   5,410        10    6     1.48 (1.39 .. 1.52)
    tokenizer: stoker, 2                       7,899        56   28    1.02 (0.975 .. 1.11)
    tokenizer: DataLoader, 2                   7,126        42   30     1.16 (1.05 .. 1.17)
    tokenizer: stoker, 2, persistent           8,511        50   27      0.951 (0.889 .. 1)
    tokenizer: DataLoader, 2, persistent       7,719        42   30     1.02 (0.964 .. 1.1)
    lists: stoker                            200,748        39    5              1 (1 .. 1)
    lists: stoker, thread_safe               212,293        13   13    0.94 (0.897 .. 1.04)
    lists: stoker before                     160,131        25    8     1.25 (1.23 .. 1.32)
    lists: DataLoader, 0                     245,549         3    4  0.844 (0.792 .. 0.879)
    lists: stoker, 2                          35,766        51   32     5.69 (5.44 .. 6.04)
    lists: DataLoader, 2                      71,843        29   33     2.78 (2.71 .. 3.17)
    lists: stoker, 2, persistent              39,724        50   32     4.94 (4.78 .. 5.83)
    lists: DataLoader, 2, persistent         111,129        28   33     1.85 (1.72 .. 2.25)
    waits: stoker                              2,013       232   91              1 (1 .. 1)
    waits: stoker, thread_safe                 6,171        52    4  0.332 (0.302 .. 0.554)
    waits: stoker before                       6,278        53    5  0.334 (0.316 .. 0.341)
    waits: DataLoader, 0                         240        68    4      8.35 (8.15 .. 8.8)
    waits: stoker, 2                             468       102   19      4.3 (4.16 .. 4.64)
    waits: DataLoader, 2                         469        96   34     4.26 (4.16 .. 4.53)
    waits: stoker, 2, persistent                 474       103   19     4.27 (4.13 .. 4.47)
    waits: DataLoader, 2, persistent             480       100   34     4.22 (4.16 .. 4.39)
    waits: stoker, 8, persistent               1,858       102   51     1.12 (1.07 .. 1.13)
    waits: DataLoader, 8, persistent           1,889       167  100     1.07 (1.05 .. 1.12)
    waits: stoker, 16, persistent              3,382       160   92   0.595 (0.57 .. 0.624)
    waits: DataLoader, 16, persistent          3,499       260  185   0.586 (0.56 .. 0.605)
    paths: stoker                            727,936       617    4              1 (1 .. 1)
    paths: stoker, thread_safe               828,966       285    4   0.886 (0.852 .. 1.02)
    paths: stoker before                     990,920        12    4  0.765 (0.675 .. 0.957)
    paths: DataLoader, 0                     930,995        55   52  0.774 (0.626 .. 0.837)
    paths: stoker, 2                          96,917       338  438      7.34 (6.89 .. 8.4)
    paths: DataLoader, 2                     215,638       104  495      3.28 (2.7 .. 3.67)
    paths: stoker, 2, persistent              99,328       366  437     7.16 (6.92 .. 7.57)
    paths: DataLoader, 2, persistent         241,831       109  495     3.03 (2.92 .. 3.51)
    array: stoker                            500,778        52    5              1 (1 .. 1)
    array: stoker, thread_safe               615,406        13    4  0.849 (0.128 .. 0.931)
    array: stoker before                     608,147        14    4   0.873 (0.135 .. 1.17)
    array: DataLoader, 0                     294,908        10   10    1.87 (0.291 .. 2.14)
    array: stoker, 2                          93,290        65   31      5.67 (0.95 .. 8.5)
    array: DataLoader, 2                      72,321        48   42     7.52 (1.02 .. 8.75)
    array: stoker, 2, persistent              89,888        67   31    6.03 (0.847 .. 6.39)
    array: DataLoader, 2, persistent          65,792        53   42     8.67 (1.11 .. 9.54)
    echo: stoker                               1,512        73  224              1 (1 .. 1)
    echo: stoker, thread_safe                  2,105        31  110  0.743 (0.597 .. 0.771)
    echo: stoker before                        2,174        32  110  0.705 (0.555 .. 0.808)
    echo: DataLoader, 0                        1,072        22   15     1.45 (1.14 .. 1.55)
    echo: stoker, 2                            1,428       125  210    1.07 (0.853 .. 1.13)
    echo: DataLoader, 2                        1,445        54   37    1.06 (0.856 .. 1.14)
    echo: stoker, 2, persistent                1,696       125  216  0.905 (0.743 .. 0.974)
    echo: DataLoader, 2, persistent            1,563        53   38   0.998 (0.766 .. 1.06)

    the defaults over    DataLoader, as many        DataLoader, best        which is
    --------------------------------------------------------------------------------
    dicts                  10.6 (9.02 .. 13)     0.94 (0.81 .. 1.09)               0
    Python             0.978 (0.928 .. 1.05)   0.978 (0.928 .. 1.05)   2, persistent
    Pillow             0.945 (0.934 .. 1.01)   0.945 (0.934 .. 1.01)   2, persistent
    tokenizer            1.02 (0.964 .. 1.1)     1.02 (0.964 .. 1.1)   2, persistent
    lists                1.85 (1.72 .. 2.25)  0.844 (0.792 .. 0.879)               0
    waits              0.586 (0.56 .. 0.605)   0.586 (0.56 .. 0.605)  16, persistent
    paths                3.03 (2.92 .. 3.51)  0.774 (0.626 .. 0.837)               0
    array                7.52 (1.02 .. 8.75)    1.87 (0.291 .. 2.14)               0
    echo               0.998 (0.766 .. 1.06)   0.998 (0.766 .. 1.06)   2, persistent

    over DataLoader alike           new processes              persistent       defaults / before
    ---------------------------------------------------------------------------------------------
    dicts                      1.1 (1.03 .. 1.18)    1.03 (0.949 .. 1.07)   0.892 (0.539 .. 1.06)
    Python                   1.03 (0.904 .. 1.18)        1.03 (1 .. 1.11)     1.66 (1.62 .. 1.86)
    Pillow                   1.07 (0.951 .. 1.18)     1.13 (0.987 .. 1.2)   0.742 (0.73 .. 0.779)
    tokenizer                 1.06 (1.05 .. 1.13)     1.08 (1.06 .. 1.16)     1.76 (1.67 .. 2.07)
    lists                  0.498 (0.466 .. 0.558)  0.358 (0.352 .. 0.388)     1.25 (1.23 .. 1.32)
    waits                  0.991 (0.975 .. 0.999)   0.987 (0.983 .. 1.01)  0.334 (0.316 .. 0.341)
    paths                   0.44 (0.368 .. 0.475)  0.422 (0.393 .. 0.497)  0.765 (0.675 .. 0.957)
    array                     1.29 (1.03 .. 1.34)     1.45 (1.28 .. 1.49)   0.873 (0.135 .. 1.17)
    echo                        1 (0.987 .. 1.05)     1.07 (1.03 .. 1.13)  0.705 (0.555 .. 0.808)
    [end]

Where it is behind, and why:

- Pillow: new processes for each epoch of 0.3 s cost a sixth of what persistent ones bring, for both
  loaders. Beside threads, rows have to travel: declared ``thread_safe`` it is as before.
- waits: 16 processes are forked for each epoch of 0.4 s; persistent, both loaders are alike. 64
  threads are three times as fast: what nobody declares safe does not run in them.
- echo: photographs go from the decoding threads to the processes, and their crops back; declared
  ``thread_safe`` nothing travels.
- lists: inline by default. In processes seeds for each call, and counting the bytes of each list,
  take a quarter of the time (by a profile).

- dicts, paths and array stay inline, as before. They are slower than before because the states of
  the global generators are compared around each millisecond of work (``ANSWERED.md``). paths takes
  0.6 s to the first batch: looking for generators in 1.28 million pairs, and a fork of the process
  that holds them. In processes its rows cost twice what DataLoader's do: the seeds.

The rows dicts, paths and array were measured on another day than the others.

Caveats: epochs take 0.3 s to 2 s, so what their beginning and end cost weighs more than in
training: it is what workers that are forked anew cost beside persistent ones. The loop does
nothing, so that it has a core for itself only where the workers leave one. Examples that wait
sleep: no network, no decoding. The lists are cheap to make, so that the defaults make them in the
loop's thread: what their way from a process costs is told by the cases with processes.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from harness import Ratio, Report, parser, report
from inputs import iterations_for, jpegs, spin
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

import stoker
from stoker.basics.resources import usable_cores

SIDE, WIDTH, HEIGHT = 224, 400, 304
FILES = 64  # different ones
WINDOW_S = 0.6
LOOKS = 8  # at the memory of an epoch
DEFAULT, BEFORE, THREADS = "stoker", "stoker before", "stoker, thread_safe"


@dataclass(frozen=True)
class Order:
    """One case, which a process of its own does.

    Attributes:
        loader: "stoker" or "DataLoader".
        workers: the number of processes; None for the defaults.
    """

    row: str
    loader: str
    workers: int | None
    persistent: bool
    thread_safe: bool
    examples: int
    window_s: float
    iterations: int
    folder: str


# -- datasets and functions, as users write them


class Dicts:
    def __init__(self, order: Order) -> None:
        self.size = order.examples

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = (index * 2654435761 & 0xFFFF) / 65536
        return {"id": index, "x": x, "squared": x * x, "label": index % 10}


class Slow(Dicts):
    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.iterations = order.iterations

    def __getitem__(self, index: int) -> Any:
        return {"sum": spin(self.iterations), "label": index % 10}


class Photographs(Dicts):
    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.paths = files(order)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as opened:
            image = opened.convert("RGB")
        left, top = 37 * index % (WIDTH - SIDE), 41 * index % (HEIGHT - SIDE)
        return np.array(image.crop((left, top, left + SIDE, top + SIDE))), index % 10


class Texts(Dicts):
    def __init__(self, order: Order) -> None:
        super().__init__(order)
        words = [f"word{number}" for number in range(5_000)]
        drawn = np.random.default_rng(0).integers(0, len(words), (256, 200))
        self.texts = [" ".join(words[number] for number in text) for text in drawn]
        vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return self.tokenizer.encode(self.texts[index % len(self.texts)]).ids


def padded(rows: list[list[int]]) -> Any:
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for out, row in zip(ids, rows, strict=True):
        out[: len(row)] = torch.tensor(row)
    return ids


class Lists(Dicts):
    def __getitem__(self, index: int) -> Any:
        return list(range(index, index + 256))


def listed(rows: list[Any]) -> list[Any]:
    return rows


class Remote(Dicts):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return np.full(8, index)


class Paths(Dicts):
    def __init__(self, order: Order) -> None:
        super().__init__(order)
        count = order.examples
        self.items = [(f"/data/train/{i % 1000:04}/{i:08}.jpg", i % 1000) for i in range(count)]

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Array(Dicts):
    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.rows = np.ones((order.examples, 1024), np.float32)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def augmented(image: Any, rng: np.random.Generator) -> Any:
    top, left = rng.integers(image.shape[0] - SIDE), rng.integers(image.shape[1] - SIDE)
    crop = image[top : top + SIDE, left : left + SIDE]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    brighter = np.clip(np.arange(256) * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    return brighter[crop]


class Augmented(Dicts):
    """What README's chain makes, without an echo."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.paths = files(order)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        image = stoker.images.decode(Path(self.paths[index]).read_bytes())
        return augmented(image, self.rng), index % 10


def files(order: Order) -> list[str]:
    """Return the paths of the JPEGs, as many as there are examples."""
    return sorted(map(str, Path(order.folder).rglob("*.jpg")))[: order.examples]


# -- rows


@dataclass(frozen=True)
class Row:
    """One kind of users' code.

    Attributes:
        data: makes the dataset.
        examples: in an epoch, and in one of ``--quick``; whole batches where each is used twice.
        collate: the user's collate function.
        waits: whether examples wait, so that more processes than cores are of use.
        echo: whether stoker reads a folder, with README's chain.
    """

    data: Callable[[Order], Any]
    examples: tuple[int, int]
    batch: int
    collate: Callable[[list[Any]], Any] | None = None
    waits: bool = False
    echo: bool = False

    @property
    def most(self) -> int:
        """The most processes that the defaults take."""
        return 16 if self.waits else usable_cores()


ROWS = {
    "dicts": Row(Dicts, (200_000, 2_000), 256),
    "Python": Row(Slow, (768, 64), 16),
    "Pillow": Row(Photographs, (512, 32), 16),
    "tokenizer": Row(Texts, (4_096, 128), 32, padded),
    "lists": Row(Lists, (8_192, 256), 64, listed),
    "waits": Row(Remote, (768, 32), 16, waits=True),
    "paths": Row(Paths, (1_280_000, 5_000), 256),
    "array": Row(Array, (100_000, 1_000), 128),
    "echo": Row(Augmented, (512, 32), 16, echo=True),
}


def pipeline(row: Row, order: Order, data: Any) -> Any:
    """Return stoker's pipeline of a row."""
    if order.thread_safe:
        for users in (data, augmented, *filter(None, [row.collate])):
            stoker.thread_safe(users)
    made: Any
    if row.echo:
        made = stoker.from_folder(order.folder, seed=0).shuffle()
        made = made.map(stoker.images.decode, on="image").echo(2)
        made = made.random_map(augmented, on="image").batch(row.batch)
    else:
        made = stoker.from_dataset(data, seed=0).shuffle().batch(row.batch, collate=row.collate)
    if order.workers is None:
        return made
    how = {"persistent": True} if order.persistent else {}
    return made.workers(order.workers, kind="process", **how)


def loader_of(row: Row, order: Order, data: Any) -> Any:
    """Return the ``DataLoader`` of a row."""
    return DataLoader(
        data,
        batch_size=row.batch,
        shuffle=True,
        num_workers=order.workers or 0,
        persistent_workers=order.persistent,
        collate_fn=row.collate,
    )


# -- measuring one case


def measured(order: Order) -> dict[str, Any]:
    """Run one case in this process."""
    row = ROWS[order.row]
    data = row.data(order)
    uses = 2 if row.echo and order.loader == "stoker" else 1
    batches = uses * -(-order.examples // row.batch)
    make = loader_of if order.loader == "DataLoader" else pipeline
    gc.collect()
    before = memory_bytes()
    began = time.perf_counter()
    loader = make(row, order, data)
    first_s, peak = first_epoch(loader, began, max(1, batches // LOOKS))
    rates: list[float] = []
    spent_s = 0.0
    while not rates or spent_s < order.window_s:
        began = time.perf_counter()
        count = sum(1 for _ in loader)
        took_s = time.perf_counter() - began
        rates.append(uses * order.examples / took_s)
        spent_s += took_s
    if count != batches:
        raise AssertionError(f"{count} batches, not {batches}")
    return {"per_s": median(rates), "first_s": first_s, "memory_bytes": peak - before}


def first_epoch(batches: Iterable[Any], began: float, every: int) -> tuple[float, int]:
    """Return the time to the first batch, and the peak of memory, looked at now and then."""
    first_s, peak = 0.0, 0
    for number, _ in enumerate(batches):
        first_s = first_s or time.perf_counter() - began
        if number % every == every - 1:
            peak = max(peak, memory_bytes())
    return first_s, peak


def memory_bytes() -> int:
    """Return the PSS of this process and its children."""
    me, found = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            found += process.memory_full_info().pss
    return found


def in_own_process(order: Order, path: str | None) -> dict[str, Any] | None:
    """Run one case in a new process, with the stoker of a checkout, or with this one.

    Return None if that checkout cannot: it may need another version of stoker-native.
    """
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(Path(path).resolve() / "src")
    command = [sys.executable, __file__, "--one", json.dumps(vars(order))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if path is not None and done.returncode:
        return None
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cases(row: Row, against: str | None, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Return the cases of a row, to find errors only a few: what their ``Order``s do not share."""
    plain: dict[str, Any] = {
        "loader": "stoker",
        "workers": None,
        "persistent": False,
        "thread_safe": False,
    }
    made = {DEFAULT: plain, THREADS: plain | {"thread_safe": True}}
    if against is not None:
        made[BEFORE] = plain
    torch_plain = plain | {"loader": "DataLoader"}
    if quick:
        return made | {f"DataLoader, {row.most}": torch_plain | {"workers": row.most}}
    made["DataLoader, 0"] = torch_plain | {"workers": 0}
    cores = usable_cores()
    several = [(cores, False), (cores, True), *([(8, True), (16, True)] if row.waits else [])]
    for workers, persistent in several:
        name = f"{workers}{', persistent' * persistent}"
        made[f"stoker, {name}"] = plain | {"workers": workers, "persistent": persistent}
        made[f"DataLoader, {name}"] = torch_plain | {"workers": workers, "persistent": persistent}
    return made


# -- what is made of it


def evaluate(found: Report) -> None:
    """Hold stoker's defaults against the best DataLoader of as many processes, and of all."""
    lines, ratios, same = [], [], []
    for name in dict.fromkeys(row["row"] for row in found.rows):
        rows = [row for row in found.rows if row["row"] == name]
        rates = {row["case"]: row["per_s"] for row in rows}
        peers = {row["case"]: row["workers"] for row in rows if row["loader"] == "DataLoader"}
        as_many = [case for case, workers in peers.items() if workers == rows[0]["most"]]
        best = {
            what: max(names, key=lambda case: median(rates[case]))
            for what, names in (("as many", as_many), ("all", list(peers)))
        }
        for row in rows:
            lines.append(
                (
                    f"{name}: {row['case']}",
                    f"{median(row['per_s']):,.0f}",
                    f"{1e3 * median(row['first_s']):,.0f}",
                    f"{median(row['memory_bytes']) / 2**20:,.0f}",
                    Ratio.of(rates[DEFAULT], row["per_s"]),
                )
            )
        over = {what: Ratio.of(rates[DEFAULT], rates[case]) for what, case in best.items()}
        before = Ratio.of(rates[DEFAULT], rates[BEFORE]) if BEFORE in rates else ""
        alike = [
            Ratio.of(rates[f"stoker, {mode}"], rates[f"DataLoader, {mode}"])
            if f"stoker, {mode}" in rates
            else ""
            for mode in (str(usable_cores()), f"{usable_cores()}, persistent")
        ]
        which = best["all"].split(", ", 1)[1]
        ratios.append((name, over["as many"], over["all"], which))
        same.append((name, *alike, before))
        found.expect(f"{name}: over the best DataLoader of as many", over["as many"].median, 0.95)
    found.show(("", "examples/s", "first ms", "MiB", "the defaults / it"), lines)
    found.show(
        ("the defaults over", "DataLoader, as many", "DataLoader, best", "which is"),
        ratios,
    )
    found.show(("over DataLoader alike", "new processes", "persistent", "defaults / before"), same)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="folder or tar of photographs; by default some are made")
    options.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="these alone")
    options.add_argument("--against", help="a checkout of stoker: its defaults, too")
    options.add_argument("--one", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    # More workers than cores are tried on purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    if arguments.one:
        print(json.dumps(measured(Order(**json.loads(arguments.one)))))
        return
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as folder, report(__file__, arguments) as found:
        write_jpegs(folder, arguments.jpegs, ROWS["Pillow"].examples[quick])
        iterations = iterations_for(5e-5 if quick else 1e-3)
        for name in arguments.rows:
            row = ROWS[name]
            kinds = cases(row, arguments.against, quick=quick)
            orders = {
                case: Order(
                    name,
                    **how,
                    examples=row.examples[quick],
                    window_s=0.0 if quick else WINDOW_S,
                    iterations=iterations,
                    folder=folder,
                )
                for case, how in kinds.items()
            }
            samples: dict[str, list[dict[str, Any]]] = {case: [] for case in kinds}
            for number in range(1 if quick else arguments.rounds):
                for case in turned(list(kinds), number):
                    path = arguments.against if case == BEFORE else None
                    own = not quick or path is not None
                    order = orders[case]
                    sample = in_own_process(order, path) if own else measured(order)
                    samples[case] += [] if sample is None else [sample]
            for case, each in samples.items():
                if not each:
                    continue
                measures = {key: [sample[key] for sample in each] for key in each[0]}
                found.add(row=name, case=case, most=row.most, **kinds[case], **measures)
            print(name, flush=True)


def turned(names: list[str], by: int) -> list[str]:
    """Return names in turns, so that each is first at some time."""
    first = by % len(names)
    return names[first:] + names[:first]


def write_jpegs(folder: str, place: str | None, count: int) -> None:
    """Write JPEGs of two classes."""
    for label in range(2):
        Path(folder, str(label)).mkdir()
    images = []
    for data in jpegs(place, FILES)[:FILES]:
        out = io.BytesIO()
        image = Image.open(io.BytesIO(data)).convert("RGB").resize((WIDTH, HEIGHT))
        image.save(out, "JPEG", quality=90)
        images.append(out.getvalue())
    for number in range(count):
        Path(folder, str(number % 2), f"{number:05}.jpg").write_bytes(images[number % len(images)])


if __name__ == "__main__":
    main()
