"""What encryption costs on connections between hosts: rate, and processor time of both ends.

A process asks another one for bodies, one request after another, over the loopback. Plain, as on a
network that is said to be trusted (``insecure=True``); by the token, which is the default (TLS 1.3
with a certificate that both sides derive from it).

Command::

    python bench/encryption.py

Target: no more than 2.5 s of processor time a GB, both ends together. The cipher takes most of it:
`openssl speed -evp aes-256-gcm`, once for each end.

Machine: two cores of an AMD EPYC, shared with others, 24 GiB, Linux 6.18; Python 3.11.7, OpenSSL
3.0.

Results (five rounds)::

    [results/encryption.json]
    bodies                    MB/s                 of plain  CPU, s/GB  to connect, ms
    ----------------------------------------------------------------------------------
    110 KB by 16, plain      2,453               1 (1 .. 1)       0.19             1.1
    110 KB by 16, encrypted    301  0.114 (0.0552 .. 0.213)       1.55             6.8
    3 KB by 64, plain          367               1 (1 .. 1)       0.81             1.2
    3 KB by 64, encrypted      265    0.342 (0.247 .. 0.73)       3.02            10.3
    38 MB, plain             1,365               1 (1 .. 1)       0.39             7.7
    38 MB, encrypted           348    0.27 (0.115 .. 0.443)       1.31             6.0
    [end]

The machine was busy with other work (a load of 13 on two cores), so rates, and what a connection
takes, say little; processor time says more. In runs before it was 1.71 and 2.09 s a GB for
encrypted bodies of 110 KB, at other loads. They are of a link with code of its own around OpenSSL;
of the present one, interleaved with it at a load of 14 (three rounds), medians are 2.64 and 2.41 s
a GB for encrypted bodies of 110 KB, 4.26 and 4.84 for 3 KB. The certificate takes a process 1.4 ms,
once for each token, behind 35 ms for the import of cryptography.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report

from stoker.transport.link import Link
from stoker.transport.listener import Listener
from stoker.transport.secret import Secret

BODIES = {"110 KB by 16": (16, 110_000), "3 KB by 64": (64, 3_000), "38 MB": (1, 38_000_000)}
MOST_S_PER_GB = 2.5
PLAIN, ENCRYPTED = "plain", "encrypted"


def serve(secret: Secret, told: Connection) -> None:
    """Answer each request with as many pieces of as many bytes as it says, until the end."""
    content = np.frombuffer(os.urandom(40_000_000), np.uint8)

    def answer(link: Link) -> None:
        while True:
            words = link.receive()[0].split()
            if words[0] == b"cpu":
                link.send(repr(time.process_time()).encode())
                continue
            count, size = map(int, words)
            link.send(b"here", *(content[n * size : (n + 1) * size] for n in range(count)))

    with closing(Listener("127.0.0.1", 0, secret, "bench", answer)) as listener:
        told.send(listener.address)
        told.recv()


def measure(address: str, secret: Secret, body: str, total_bytes: int) -> dict[str, float]:
    """Ask for so many bytes; return the rate, and the processor time of both ends."""
    count, size = BODIES[body]
    requests = max(1, total_bytes // (count * size))
    memory = np.empty(count * size, np.uint8)
    began_s = time.perf_counter()
    link = Link.connect(address, secret, "bench", timeout_s=30)
    connect_s = time.perf_counter() - began_s

    def used_s() -> float:
        link.send(b"cpu")
        return time.process_time() + float(link.receive(wait_s=30)[0])

    with closing(link):
        before_s, began_s = used_s(), time.perf_counter()
        for _ in range(requests):
            link.send(b"%d %d" % (count, size))
            link.receive(lambda header, nbytes: memory[:nbytes].data, wait_s=30)
        elapsed_s, spent_s = time.perf_counter() - began_s, used_s() - before_s
    nbytes = requests * count * size
    return {
        "bytes_per_s": nbytes / elapsed_s,
        "cpu_s_per_gb": spent_s / nbytes * 1e9,
        "connect_ms": connect_s * 1e3,
    }


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    total_bytes = 40_000_000 if arguments.quick else 400_000_000
    token = secrets.token_bytes(32)
    how = {case: Secret(token, insecure=case == PLAIN) for case in (PLAIN, ENCRYPTED)}
    spawn: Any = multiprocessing.get_context("spawn")
    with report(__file__, arguments) as made:
        addresses, ends = {}, []
        for case, secret in how.items():
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve, args=(secret, there), daemon=True)
            process.start()
            addresses[case] = here.recv()
            ends.append(here)
        for body in BODIES:
            nbytes = total_bytes // 8 if body.startswith("3 KB") else total_bytes
            cases = {
                case: (lambda a=address, s=how[case], b=body, n=nbytes: measure(a, s, b, n))
                for case, address in addresses.items()
            }
            found = interleaved(cases, 1 if arguments.quick else arguments.rounds)
            for case, each in found.items():
                for number, row in enumerate(each):
                    made.add(body=body, case=case, round=number, **row)
        for end in ends:
            end.send("end")


def evaluate(made: Report) -> None:
    """Hold encrypted connections against plain ones."""
    rows = []
    for body in BODIES:
        found: dict[str, dict[str, list[float]]] = {}
        for case in (PLAIN, ENCRYPTED):
            of_case = [r for r in made.rows if (r["body"], r["case"]) == (body, case)]
            found[case] = {
                name: [row[name] for row in of_case]
                for name in ("bytes_per_s", "cpu_s_per_gb", "connect_ms")
            }
            rates = found[case]["bytes_per_s"]
            rows.append(
                (
                    f"{body}, {case}",
                    f"{statistics.median(rates) / 1e6:,.0f}",
                    str(Ratio.of(rates, found[PLAIN]["bytes_per_s"])),
                    f"{statistics.median(found[case]['cpu_s_per_gb']):.2f}",
                    f"{statistics.median(found[case]['connect_ms']):.1f}",
                )
            )
        if body.startswith("110"):
            made.expect(
                f"{body}: encrypted, processor seconds a GB",
                statistics.median(found[ENCRYPTED]["cpu_s_per_gb"]),
                MOST_S_PER_GB,
                at_least=False,
            )
    head = ("bodies", "MB/s", "of plain", "CPU, s/GB", "to connect, ms")
    made.show(head, rows)


if __name__ == "__main__":
    main()
