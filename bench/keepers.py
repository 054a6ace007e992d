"""Items of other nodes' keepers by processor time, and reads of storage while nodes join.

1. Processor time of an item of 110 KB from three keepers, one of which is on this host: of the job
   and of the keepers together. Beside it: a whole copy on this host, and the same by hand, with
   plain sockets: two processes send 21 items of their memory for each request, a loop receives
   them, checks each one's checksum and copies it; every third item is copied and not sent.
2. How often storage is read in the first epochs if nodes open the cache one after another, each
   with its part of every epoch, and each goes through its part of the first epoch before the next
   one opens.

Command::

    python bench/keepers.py

Target: items from three keepers at 0.7 of the rate by hand; no read after the first epoch.

Machine: two cores of an AMD EPYC shared with other work (load 15 to 17), 24 GiB, Linux 6.18; Python
3.11.7. All nodes are processes of this machine, connected by the loopback; nothing is encrypted
(bench/encryption.py has the cost of that).

Results (nine rounds)::

    [results/keepers.json]
    110 KB items       processor us        rate of by hand   rate of a whole copy
    -----------------------------------------------------------------------------
    a whole copy here           8.0   2.81 (0.978 .. 4.88)             1 (1 .. 1)
    three keepers              49.3  0.433 (0.351 .. 0.76)   0.155 (0.13 .. 0.41)
    sockets by hand            23.7             1 (1 .. 1)  0.355 (0.205 .. 1.02)

    epoch  examples  reads of storage
    ---------------------------------
    0           900               900
    1           900                 0
    2           900                 0
    [end]

Missed: the first target. Of an item, a third of which is here, the keepers take 17 us, the job's
receiving threads 17 and its workers 15. By hand two thirds cost 15 us at the sender, 10 at the
receiver and 4 for checksum and copy. What is more is Python for each item and request (keys,
routing, answers) and threads that wait for the GIL. Receiving whole bodies in one system call was
no cheaper. A whole copy on this host costs less than the kernel's two copies over the loopback, so
no cache over sockets reaches 0.7 of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash
from harness import Ratio, Report, interleaved, parser, report

import stoker
from cluster import ITEM_BYTES, PACKING, Items, keepers, size_of
from stoker.cluster.keeper import client
from stoker.cluster.keeper.server import Keeper
from stoker.transport.secret import make_token_file, read_token

PER_REQUEST = 21  # of a batch of 64, each of two others has a third
NODES = 3
EPOCHS = 3
LEAST_RATE = 0.7


def processor_s(processes: list[psutil.Process]) -> float:
    """Return the processor time of this process and of others so far."""
    times = [each.cpu_times() for each in processes]
    return time.process_time() + sum(each.user + each.system for each in times)


def serve(connection: socket.socket) -> None:
    """Send 21 items for each byte received."""
    rng = np.random.default_rng(0)
    items = [rng.bytes(ITEM_BYTES) for _ in range(PER_REQUEST)]
    while connection.recv(1):
        parts = [memoryview(item) for item in items]
        while parts:
            sent = connection.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]


@contextmanager
def servers(count: int) -> Iterator[list[tuple[socket.socket, psutil.Process]]]:
    """Start processes that send items from their memory; yields a connection to each."""
    with ExitStack() as ends:
        found = []
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                command = "import socket, sys; sys.path.insert(0, sys.argv[1]); import keepers; "
                command += "to = '127.0.0.1', int(sys.argv[2]); "
                command += "keepers.serve(socket.create_connection(to))"
                here, port = str(Path(__file__).parent), str(listener.getsockname()[1])
                process = subprocess.Popen([sys.executable, "-c", command, here, port])
                ends.enter_context(process)
                ends.callback(process.kill)
                connection = ends.enter_context(listener.accept()[0])
            found.append((connection, psutil.Process(process.pid)))
        yield found


def by_hand(connections: list[socket.socket], own: list[bytes], count: int) -> None:
    """Get items without the library: two thirds from other processes, one third from here."""
    got = 0
    while got < count:
        items = [bytes(memoryview(item)[:]) for item in own]
        for connection in connections:
            connection.sendall(b"x")
            body = np.empty(PER_REQUEST * ITEM_BYTES, np.uint8).data
            rest = body
            while rest.nbytes:
                rest = rest[connection.recv_into(rest) :]
            for at in range(0, body.nbytes, ITEM_BYTES):
                item = body[at : at + ITEM_BYTES]
                xxhash.xxh3_64_intdigest(item)
                items.append(bytes(item))
        got += len(items)


def processor_times(made: Report, count: int, rounds: int) -> None:
    """Question 1."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    size = int(count * ITEM_BYTES * PACKING) + (16 << 20)
    with (
        tempfile.TemporaryDirectory(dir=memory) as home,
        keepers(Path(home), 3, size // 2) as found,
    ):
        kept_by = psutil.Process().children()
        source = stoker.from_dataset(Items(count), seed=0).shuffle()
        hosts = [address for address, _ in found]
        whole = source.cache(size, version="1", path=f"{home}/whole")
        three = source.cache(cluster=hosts, version="1", path=found[0][1], insecure=True)
        pipelines = [each.batch(64, collate=size_of).workers(2) for each in (whole, three)]
        with servers(2) as peers:
            connections = [connection for connection, _ in peers]
            own = [os.urandom(ITEM_BYTES) for _ in range(PER_REQUEST)]
            processes = [*kept_by, *(process for _, process in peers)]

            def us_per_item(run: Callable[[], object]) -> float:
                before_s = processor_s(processes)
                run()
                return (processor_s(processes) - before_s) / count * 1e6

            def epoch(train: Any) -> Callable[[], float]:
                return lambda: us_per_item(lambda: sum(train))

            cases = {
                "a whole copy here": epoch(pipelines[0]),
                "three keepers": epoch(pipelines[1]),
                "sockets by hand": lambda: us_per_item(lambda: by_hand(connections, own, count)),
            }
            for _ in range(2):
                for case in cases.values():
                    case()
            times = interleaved(cases, rounds)
        for name, each in times.items():
            for number, us in enumerate(each):
                made.add(case=name, round=number, processor_us=us)


def node(rank: int, hosts: list[str], count: int) -> None:
    """Be a node: keep, and go through an epoch's part for each line; say how often storage was
    read."""
    client.DEADLINE_S = 60.0  # on a busy machine: reads are counted here, not time
    token = read_token(Path(os.environ["STOKER_TOKEN_FILE"]))
    with contextlib.closing(Keeper(hosts[rank], token, limit=64 << 20, insecure=True)) as keeper:
        source = stoker.from_dataset(Small(count), seed=0).shuffle()
        train: Any = source.shard(rank=rank, world=NODES)
        train = train.cache(cluster=hosts, version="1", path=keeper.folder, insecure=True)
        train = train.batch(64, collate=size_of)
        for _ in sys.stdin:
            for _ in train:
                pass
            cache = train.stats().cache
            assert cache is not None
            print(json.dumps(cache.misses), flush=True)
        del train


class Small(Items):
    """The same, of 3 KB."""

    def __getitem__(self, index: int) -> bytes:
        return super().__getitem__(index)[:3_000]


def opened_one_by_one(made: Report, count: int) -> None:
    """Question 2."""
    with ExitStack() as ends:
        held = [ends.enter_context(socket.socket()) for _ in range(NODES)]
        for each in held:  # bound, and not listening: nobody else gets the port
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
        nodes: list[subprocess.Popen[str]] = []

        def begin(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            process.stdin.write("epoch\n")
            process.stdin.flush()

        def reads(process: subprocess.Popen[str]) -> int:
            assert process.stdout is not None
            return int(json.loads(process.stdout.readline()))

        first = 0
        for rank in range(NODES):
            process = subprocess.Popen(
                [sys.executable, __file__, "--node", str(rank), json.dumps(hosts), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.enter_context(process)
            ends.callback(process.kill)
            nodes.append(process)
            begin(process)
            first += reads(process)
        made.add(epoch=0, examples=count, reads=first)
        for epoch in range(1, EPOCHS):
            for process in nodes:
                begin(process)
            made.add(epoch=epoch, examples=count, reads=sum(map(reads, nodes)))
        for process in nodes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--node", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.node:
        rank, hosts, count = arguments.node
        return node(int(rank), json.loads(hosts), int(count))
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as home, report(__file__, arguments) as made:
        path = Path(home) / secrets.token_hex(4)
        make_token_file(path)
        os.environ["STOKER_TOKEN_FILE"] = str(path)
        os.environ["XDG_STATE_HOME"] = home
        processor_times(made, 200 if quick else 3600, 1 if quick else arguments.rounds)
        opened_one_by_one(made, 90 if quick else 900)


def evaluate(made: Report) -> None:
    """Hold keepers against sockets by hand, and reads against none."""
    rows = made.having("processor_us")
    times = {
        case: [row["processor_us"] for row in rows if row["case"] == case]
        for case in dict.fromkeys(row["case"] for row in rows)
    }
    hand, whole = times["sockets by hand"], times["a whole copy here"]
    made.show(
        ("110 KB items", "processor us", "rate of by hand", "rate of a whole copy"),
        [
            (case, f"{statistics.median(each):.1f}", Ratio.of(hand, each), Ratio.of(whole, each))
            for case, each in times.items()
        ],
    )
    rate = Ratio.of(hand, times["three keepers"]).median
    made.expect("three keepers, of sockets by hand", rate, LEAST_RATE)
    epochs = made.having("epoch")
    made.show(
        ("epoch", "examples", "reads of storage"),
        [(row["epoch"], row["examples"], row["reads"]) for row in epochs],
    )
    later = sum(row["reads"] for row in epochs if row["epoch"])
    made.expect("reads of storage after the first epoch", later, 0, at_least=False)


if __name__ == "__main__":
    main()
