"""Raw files against record files: what does packing bring on a slow disk, and behind a latency?

The same files of 20 kB (random bytes, not decoded), in batches of 64, shuffled, two epochs:

- disk: a loop device that reads 50 MB/s and 300 times a second, as a small network disk does. Its
  names and files are forgotten before each case, and the files before each epoch, as if there were
  many more of them than memory has room for.
- server: HTTP on this host, that answers after 20 ms and sends 50 MB/s over all connections.

Cases: the files as they are (``from_folder``; at URLs ``from_files``), with a cache in memory that
holds all of them (an LMDB store); tar shards of 8 MiB, made by ``stoker pack``, and Parquet files
of 8 MiB; ``datasets``' own reader of these Parquet files (``streaming=True``, a buffer of 1,000),
and WebDataset's of the tar shards (two workers, a buffer of 1,000). Each case is a process.
Building a pipeline (listing folders, reading the headers of shards) is told apart from its first
epoch.

Command (as root, for the disk)::

    python bench/records.py                            # datasets, of the dev extra
    python bench/records.py --peers all --install      # WebDataset as well, in .peers/webdataset

Targets: Parquet at least as fast as the files in first epochs, on the disk and behind the latency;
tar behind the latency; a cache that holds all at least twice as fast in later epochs.

Results::

    [results/records.json]
                          built in, s  first, ex/s  / files  later, ex/s  / files  reads/ex
    ---------------------------------------------------------------------------------------
    disk: folder                 0.10          301        1          302        1     1.034
    disk: folder, cached         0.13          302        1       26,025     86.2     0.532
    disk: tar                    0.66          376     1.25          443     1.47     0.780
    disk: parquet                0.07        2,036     6.76      202,926      672     0.044
    disk: datasets               2.55          280    0.932          285    0.945     0.052
    disk: webdataset             0.00        2,063     6.85        2,150     7.12     0.033

                            built in, s  first, ex/s  / files  later, ex/s  / files  requests/ex
    --------------------------------------------------------------------------------------------
    server: folder                 0.22        1,393        1        1,417        1        1.002
    server: folder, cached         0.26        1,314    0.944       21,069     14.9        0.502
    server: tar                    3.17        1,733     1.24        1,806     1.27        0.190
    server: parquet                0.30        1,914     1.37      134,783     94.8        0.004
    server: datasets               2.43          274    0.197          277    0.195        0.013
    server: webdataset             0.00        1,878     1.35        2,009     1.42        0.003
    [end]

Caveats: tar shards on a disk are shuffled as a whole: a seek for each example, as single files
have. ``from_parquet`` keeps row groups in memory, up to a quarter of what is free, so that later
epochs may read nothing. An epoch ends with its last batch: ``datasets`` then sleeps for 5 s,
which are not counted. WebDataset and ``datasets`` read shards from their beginning, and what they
give is less random. The server takes a part of this host's processors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import throttled
from harness import Ratio, Report, parser, report
from peers import environment

import stoker
from experiments.server import serving
from stoker.pack.run import pack_command

FILE_BYTES = 20_000
SHARD_SIZE = "8MiB"
BATCH = 64
EPOCHS = 2
DISK_BYTES_PER_S, DISK_READS_PER_S = 50_000_000, 300
MEMORY_BYTES = 4 << 30
LATENCY_S = 0.02
SERVER_BYTES_PER_S = 50e6
CASES = ("folder", "folder, cached", "tar", "parquet", "datasets")
PEER = "webdataset"
TARGETS = {
    ("disk", "parquet", "first"): 1.0,
    ("server", "parquet", "first"): 1.0,
    ("server", "tar", "first"): 1.0,
    ("disk", "folder, cached", "later"): 2.0,
    ("server", "folder, cached", "later"): 2.0,
}


# -- a case, in a process of its own


def epochs_of(case: str, place: str) -> Callable[[], Iterator[Any]]:
    """Return what begins an epoch: batches whose length is that of their last part."""
    if case == "datasets":
        return _datasets(f"{place}/parquet")
    source: Any
    if case == "tar":
        source = stoker.from_tar(f"{place}/tar/{_shards(place, 'tar')}", ["jpg", "cls"], seed=0)
    elif case == "parquet":
        source = stoker.from_parquet(f"{place}/parquet/{_shards(place, 'parquet')}", seed=0)
    elif "://" in place:
        count = int(os.environ["COUNT_FILES"])
        names = [f"{place}/files/class{number % 4}/{number:06}.jpg" for number in range(count)]
        source = stoker.from_files(names, seed=0)
    else:
        source = stoker.from_folder(f"{place}/files", seed=0)
    train = source.shuffle()
    if case == "folder, cached":
        train = train.cache("1GiB", version="1")
    train = train.batch(BATCH).workers(2)
    return lambda: (tuple(each.values() if isinstance(each, dict) else each) for each in train)


def _shards(place: str, form: str) -> str:
    """Return a pattern of all shards, which servers do not list."""
    return f"shard-{{000000..{int(os.environ['COUNT_' + form.upper()]) - 1:06}}}.{form}"


def _datasets(place: str) -> Callable[[], Iterator[Any]]:
    import datasets

    datasets.disable_progress_bars()
    count = int(os.environ["COUNT_PARQUET"])
    files = [f"{place}/shard-{number:06}.parquet" for number in range(count)]
    found = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    shuffled = found.shuffle(seed=0, buffer_size=1_000)
    return lambda: (tuple(each.values()) for each in shuffled.iter(BATCH))


def one(case: str, place: str) -> None:
    """Run a case, and print what it took."""
    began = time.perf_counter()
    epochs = epochs_of(case, place)
    found: dict[str, Any] = {"build_s": time.perf_counter() - began, "epochs": []}
    for _ in range(EPOCHS):
        if os.path.isdir(place):
            throttled.forget(Path(place))
        examples, last = 0, (began := time.perf_counter())
        for batch in epochs():
            examples, last = examples + len(batch[-1]), time.perf_counter()
        found["epochs"].append({"epoch_s": last - began, "examples": examples})
    print("\n" + json.dumps(found))


def run(case: str, place: str, before: Sequence[str], written: dict[str, int]) -> dict[str, Any]:
    """Run a case in a process of its own, with nothing in the folders where readers keep things."""
    program = [sys.executable, __file__, "--one", case, place]
    if case == PEER:
        peer = str(environment.HERE / "webdataset_records.py")
        url = f"{place}/tar/shard-{{000000..{written['tar'] - 1:06}}}.tar"
        program = [str(environment.python(PEER)), peer, url, str(BATCH), str(EPOCHS)]
    with tempfile.TemporaryDirectory() as home:
        kept = dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME"), home)
        counts = {f"COUNT_{form.upper()}": str(count) for form, count in written.items()}
        done = subprocess.run(
            [*before, *program],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **kept, **counts},
        )
    if done.returncode:
        raise RuntimeError(f"{case} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- the settings


def write(folder: Path, count: int) -> dict[str, int]:
    """Write files, and shards of them; return how many of each kind there are."""
    (folder / "files").mkdir()
    content = np.random.default_rng(0).bytes(FILE_BYTES + count)
    throttled.write_files(
        folder / "files", (content[start : start + FILE_BYTES] for start in range(count))
    )
    pack_command(str(folder / "files"), str(folder / "tar"), SHARD_SIZE, None)
    _write_parquet(folder / "files", folder / "parquet")
    shards = {form: len(list((folder / form).glob(f"*.{form}"))) for form in ("tar", "parquet")}
    return {"files": count, **shards}


def _write_parquet(source: Path, folder: Path) -> None:
    """Write files with row groups of 8 MiB, one each: image and label."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    rows = [example._asdict() for example in stoker.from_folder(source)]
    each = (8 << 20) // FILE_BYTES
    for number, start in enumerate(range(0, len(rows), each)):
        table = pa.Table.from_pylist(rows[start : start + each])
        parquet.write_table(table, folder / f"shard-{number:06}.parquet")


def on_disk(found: Report, cases: Sequence[str], count: int, rounds: int) -> None:
    """Measure on a disk that is slow and seeks slowly."""
    total = count * FILE_BYTES
    with throttled.disk(4 * total + (256 << 20)) as disk:
        written = write(disk.folder, count)
        for number in range(rounds):
            for case in _turned(cases, number):
                disk.remount()
                before = throttled.reads(disk.stat)
                speed = DISK_BYTES_PER_S, DISK_READS_PER_S
                with throttled.limited(MEMORY_BYTES, disk, *speed) as joining:
                    row = run(case, str(disk.folder), joining, written)
                row["asked"] = throttled.reads(disk.stat) - before
                found.add(setting="disk", case=case, round=number, **row)


def on_server(found: Report, cases: Sequence[str], count: int, rounds: int) -> None:
    """Measure behind a latency."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = write(folder, count)
        settings: Any = {"latency_s": LATENCY_S, "bandwidth_bytes_per_s": SERVER_BYTES_PER_S}
        server = stack.enter_context(serving(folder, **settings))
        for number in range(rounds):
            for case in _turned(cases, number):
                before = server.stats().requests
                row = run(case, server.url, [], written)
                row["asked"] = server.stats().requests - before
                found.add(setting="server", case=case, round=number, **row)


def _turned(cases: Sequence[str], number: int) -> list[str]:
    """Return the cases, those of each round in another order."""
    first = number % len(cases)
    return [*cases[first:], *cases[:first]]


def evaluate(found: Report) -> None:
    """Hold each case against the files as they are."""
    for setting in dict.fromkeys(row["setting"] for row in found.rows):
        rows = [row for row in found.rows if row["setting"] == setting]
        rates = {
            (case, which): [
                row["epochs"][at]["examples"] / row["epochs"][at]["epoch_s"]
                for row in sorted(rows, key=lambda row: row["round"])
                if row["case"] == case
            ]
            for case in dict.fromkeys(row["case"] for row in rows)
            for at, which in enumerate(("first", "later"))
        }
        lines = []
        for case in sorted({case for case, _ in rates}, key=[*CASES, PEER].index):
            own = [row for row in rows if row["case"] == case]
            each = [row["asked"] / sum(e["examples"] for e in row["epochs"]) for row in own]
            ratios = [
                Ratio.of(rates[case, which], rates["folder", which]) for which in ("first", "later")
            ]
            lines.append(
                (
                    f"{setting}: {case}",
                    f"{median(row['build_s'] for row in own):.2f}",
                    f"{median(rates[case, 'first']):,.0f}",
                    f"{ratios[0].median:.3g}",
                    f"{median(rates[case, 'later']):,.0f}",
                    f"{ratios[1].median:.3g}",
                    f"{median(each):.3f}",
                )
            )
            for which, ratio in zip(("first", "later"), ratios, strict=True):
                if (setting, case, which) in TARGETS:
                    limit = TARGETS[setting, case, which]
                    found.expect(f"{setting}: {case}, {which}, of the files", ratio.median, limit)
        asked = "requests" if setting == "server" else "reads"
        found.show(
            ("", "built in, s", "first, ex/s", "/ files", "later, ex/s", "/ files", f"{asked}/ex"),
            lines,
        )


def main() -> None:
    options = parser(__doc__, evaluate)
    options.set_defaults(rounds=2)
    options.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--files", type=int, default=1500, help="how many (default %(default)s)")
    options.add_argument("--peers", default="", help="'all', or webdataset")
    options.add_argument("--install", action="store_true", help="make the peer's environment")
    arguments = options.parse_args()
    if arguments.one:
        one(*arguments.one)
        return
    if arguments.peers and arguments.install:
        environment.install(PEER)
    count, rounds = (100, 1) if arguments.quick else (arguments.files, arguments.rounds)
    cases = [*CASES, *([PEER] if arguments.peers else [])]
    missing = throttled.why_not()
    if missing:
        print(f"the disk cannot be measured here: it {missing}")
    with report(__file__, arguments) as found:
        if not missing:
            on_disk(found, cases, count, rounds)
        on_server(found, cases, count, rounds)


if __name__ == "__main__":
    main()
