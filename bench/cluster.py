"""A cache over several nodes: what items of others cost, and what it saves on slow storage.

1. Items of 110 KB from three cache servers, one of which is on this host, against a whole copy on
this
   host: the same pipeline, an epoch behind the first.
2. The experiment of the papers, in small: nodes that train together, each with a copy of the files
   on a disk of 100 MB/s and with memory for a third of them. What memory is for: the page cache;
   each node's own cache (parts are drawn anew every epoch); one cache over all nodes. Nodes are
   processes in control groups of their own, each with its cache server, connected by the loopback.

Command, as root (the second question needs it)::

    python bench/cluster.py

Target: items from three cache servers at 0.65 of the rate of a whole copy here.

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18, control groups v1; Python 3.11.7.

Results (five rounds)::

    [results/cluster.json]
    110 KB items         items/s         of a whole copy
    ----------------------------------------------------
    a whole copy here     54,083              1 (1 .. 1)
    three cache servers   23,105  0.373 (0.278 .. 0.497)

                                 of the files read  epoch, s          times as fast
    -------------------------------------------------------------------------------
    2 nodes: page cache                      61.8%      1.90             1 (1 .. 1)
    2 nodes: own caches                      59.7%      1.85       1.03 (1 .. 1.05)
    2 nodes: one cache over all              25.6%      0.80    2.36 (2.24 .. 2.49)
    3 nodes: page cache                      60.4%      1.25             1 (1 .. 1)
    3 nodes: own caches                      61.7%      1.25  0.996 (0.981 .. 1.01)
    3 nodes: one cache over all               0.2%      0.34    3.72 (3.33 .. 4.11)
    [end]

Missed: items of others come at a third of the rate of a whole copy. Requests have 21 items each;
more of them ahead, or whole bodies in one system call, changed nothing. Of an item of which two
thirds are elsewhere, the loopback takes 40 us of processor time at both ends together, and the
reader's checksum, copy and threads take 40 more, most of it with the GIL; a copy that is here takes
12 to 25 us in all. Two cores cannot do the first in the time that the target leaves. Two nodes hold
two thirds of the files, three hold all.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import throttled
from harness import Ratio, Report, interleaved, parser, report
from throttled import read_bytes, write_files

import stoker
from stoker.cluster.cache_server import CacheServer
from stoker.transport.secret import make_token_file, read_token

ITEM_BYTES = 110_000
FILE_BYTES = 100 << 10
OWN_BYTES = 160 << 20  # of a node's process, its threads, and what it is about to hand out
PACKING = 1.04  # what a store takes for a byte
EPOCHS = 3
ARMS = ("page cache", "own caches", "one cache over all")
LEAST_RATE = 0.65


class Items:
    """Byte strings of 110 KB, made anew each time."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self._contents = [rng.bytes(ITEM_BYTES) for _ in range(64)]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        return self._contents[index % 64]


def size_of(examples: list[Any]) -> int:
    """Look at what came, without stacking it."""
    return sum(len(example) for example in examples)


@contextmanager
def servers(folder: Path, count: int, size_bytes: int) -> Iterator[list[tuple[str, str]]]:
    """Start cache servers as processes; yields their addresses and folders."""
    command = "import sys; sys.argv[0] = 'stoker'; from stoker.cli import main; main()"
    serve = [sys.executable, "-c", command, "cache", "serve", "--listen", "127.0.0.1:0"]
    serve += ["--insecure"]  # results/encryption.json has the cost of encryption
    with ExitStack() as ends:
        found = []
        for number in range(count):
            path = str(folder / f"server-{number}")
            server = subprocess.Popen(
                [*serve, "--folder", path, "--size", str(size_bytes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            ends.enter_context(server)
            ends.callback(server.terminate)
            assert server.stdout is not None
            words = server.stdout.readline().split()
            found.append((words[words.index("at") + 1].rstrip(","), path))
        yield found


def remote_gets(made: Report, count: int, rounds: int) -> None:
    """Question 1."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    size = int(count * ITEM_BYTES * PACKING) + (16 << 20)
    with (
        tempfile.TemporaryDirectory(dir=memory) as home,
        servers(Path(home), 3, size // 2) as found,
    ):
        source = stoker.from_dataset(Items(count), seed=0).shuffle()
        hosts = [address for address, _ in found]
        caches: dict[str, Any] = {
            "a whole copy here": source.cache(size, version="1", path=f"{home}/whole"),
            "three cache servers": source.cache(
                cluster=hosts, version="1", path=found[0][1], insecure=True
            ),
        }
        pipelines = {k: v.batch(64, collate=size_of).workers(2) for k, v in caches.items()}

        def rate(train: Any) -> float:
            began = time.perf_counter()
            assert sum(train) == count * ITEM_BYTES
            return count / (time.perf_counter() - began)

        cases = {name: (lambda p=p: rate(p)) for name, p in pipelines.items()}
        for _ in range(2):
            for case in cases.values():
                case()
        rates = interleaved(cases, rounds)
        remote = pipelines["three cache servers"].stats().cache
        for name, each in rates.items():
            for number, items_per_s in enumerate(each):
                made.add(
                    case=name,
                    round=number,
                    items_per_s=items_per_s,
                    remote_fraction=remote.peer_hits / count,
                    misses=remote.misses,
                )


def node(folder: str, arm: str, limit_bytes: int, rank: int, world: int) -> None:
    """Be a node: say where the cache server is, hear of the others, go through epochs when told
    to."""
    warnings.simplefilter("ignore", stoker.CacheWarning)
    train: Any = stoker.from_folder(folder, seed=0).shuffle().shard(rank=rank, world_size=world)
    with ExitStack() as ends:
        if arm == "own caches":
            train = train.cache(limit_bytes)
        if arm == "one cache over all":
            token = read_token(Path(os.environ["STOKER_TOKEN_FILE"]))
            server = CacheServer("127.0.0.1:0", token, limit=limit_bytes, insecure=True)
            ends.callback(server.close)
            print(json.dumps([server.address, server.folder]), flush=True)
            hosts = json.loads(sys.stdin.readline())
            train = train.cache(cluster=hosts, path=server.folder, insecure=True)
        train = train.batch(64, collate=lambda e: sum(len(x.image) for x in e)).workers(4)
        print(json.dumps("ready"), flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            total = sum(train)
            elapsed_s = time.perf_counter() - began
            cache = train.stats().cache
            print(
                json.dumps(
                    {
                        "epoch_s": elapsed_s,
                        "bytes": total,
                        "peer_hits": cache.peer_hits if cache else 0,
                    }
                ),
                flush=True,
            )
        del train


def together(
    disk: throttled.Disk, arm: str, world: int, total: int, speed: int, count: int
) -> list[dict[str, float]]:
    """Run the nodes of one arm; an epoch begins when all have ended the one before."""
    store = int(total * PACKING / 3)
    disk.forget()
    with ExitStack() as ends:
        nodes = []
        for rank in range(world):
            before = ends.enter_context(throttled.limited(store + OWN_BYTES, disk, speed))
            arguments = [str(disk.folder / f"node{rank}"), arm, str(store), str(rank), str(world)]
            process = subprocess.Popen(
                [*before, sys.executable, __file__, "--node", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.enter_context(process)
            ends.callback(process.kill)
            nodes.append(process)

        def heard() -> list[Any]:
            return [json.loads(each.stdout.readline()) for each in nodes if each.stdout is not None]

        def tell(word: str) -> None:
            for each in nodes:
                assert each.stdin is not None
                each.stdin.write(word + "\n")
                each.stdin.flush()

        if arm == "one cache over all":
            tell(json.dumps([address for address, _ in heard()]))
        heard()
        found = []
        for _ in range(count):
            before_bytes = read_bytes(disk.stat)
            tell("epoch")
            told = heard()
            found.append(
                {
                    "epoch_s": max(one["epoch_s"] for one in told),
                    "read_bytes": read_bytes(disk.stat) - before_bytes,
                    "bytes": sum(one["bytes"] for one in told),
                    "peer_hits": sum(one["peer_hits"] for one in told),
                }
            )
        for each in nodes:
            assert each.stdin is not None
            each.stdin.close()
        for each in nodes:
            each.wait()
        return found


def slow_storage(
    made: Report, files: int, speed: int, rounds: int, worlds: tuple[int, ...]
) -> None:
    """Question 2."""
    total = files * FILE_BYTES
    with throttled.disk(int(total * max(worlds) * 1.3) + (64 << 20)) as disk:
        content = np.random.default_rng(0).bytes(FILE_BYTES + files)
        for rank in range(max(worlds)):
            home = disk.folder / f"node{rank}"
            home.mkdir()
            write_files(home, (content[i : i + FILE_BYTES] for i in range(files)))
        for number in range(rounds):
            for world in worlds:
                for arm in ARMS[:: 1 if number % 2 else -1]:
                    epochs = together(disk, arm, world, total, speed, EPOCHS)
                    for epoch, row in enumerate(epochs):
                        made.add(arm=arm, nodes=world, round=number, epoch=epoch, **row)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--node", nargs=5, help=argparse.SUPPRESS)
    options.add_argument("--files", type=int, default=6000, help="how many (default %(default)s)")
    options.add_argument(
        "--speed", type=int, default=100, help="of each disk, in MB/s (default %(default)s)"
    )
    arguments = options.parse_args()
    if arguments.node:
        folder, arm, limit, rank, world = arguments.node
        return node(folder, arm, int(limit), int(rank), int(world))
    quick = arguments.quick
    rounds = 1 if quick else arguments.rounds
    with tempfile.TemporaryDirectory() as home, report(__file__, arguments) as made:
        path = Path(home) / secrets.token_hex(4)
        make_token_file(path)
        os.environ["STOKER_TOKEN_FILE"] = str(path)
        os.environ["XDG_STATE_HOME"] = home
        remote_gets(made, 200 if quick else 1800, rounds)
        missing = throttled.why_not()
        if missing:
            print(f"the second question cannot be measured here: it {missing}")
        else:
            files = 150 if quick else arguments.files
            worlds = (2,) if quick else (2, 3)
            slow_storage(made, files, arguments.speed * 1_000_000, rounds, worlds)


def evaluate(made: Report) -> None:
    """Hold remote items against local ones, and the arms against each other."""
    gets = made.having("case")
    rates = {
        case: [row["items_per_s"] for row in gets if row["case"] == case]
        for case in dict.fromkeys(row["case"] for row in gets)
    }
    local = rates["a whole copy here"]
    rows: list[tuple[object, ...]] = []
    for case, each in rates.items():
        rows.append((case, f"{statistics.median(each):,.0f}", str(Ratio.of(each, local))))
    made.show(("110 KB items", "items/s", "of a whole copy"), rows)
    ratio = Ratio.of(rates["three cache servers"], local).median
    made.expect("three cache servers, of a whole copy", ratio, LEAST_RATE)
    slow = made.having("arm")
    rows = []
    for world in dict.fromkeys(row["nodes"] for row in slow):
        later = {
            arm: [r for r in slow if (r["arm"], r["nodes"]) == (arm, world) and r["epoch"]]
            for arm in ARMS
        }
        times = {arm: [r["epoch_s"] for r in each] for arm, each in later.items()}
        for arm, each in later.items():
            reads = statistics.median(r["read_bytes"] / r["bytes"] for r in each)
            rows.append(
                (
                    f"{world} nodes: {arm}",
                    f"{reads:.1%}",
                    f"{statistics.median(times[arm]):.2f}",
                    str(Ratio.of(times[ARMS[0]], times[arm])),
                )
            )
    if rows:
        made.show(("", "of the files read", "epoch, s", "times as fast"), rows)


if __name__ == "__main__":
    main()
