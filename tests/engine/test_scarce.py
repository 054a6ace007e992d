"""What is said where a process cannot have what workers need: descriptors, or pickles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strategies import one_in

_LIMITED = """
import os, resource, sys, tempfile
import numpy as np
import stoker

folder = tempfile.mkdtemp()
for i in range(12):
    open(f"{folder}/{i}", "wb").write(b"x" * 10_000)
train = stoker.from_files(f"{folder}/*", seed=0)
np.asarray(list(train.map(lambda x: np.zeros(2)).batch(4)))  # what is imported late, now
train = HOW
used = len(os.listdir("/proc/self/fd"))
for free in range(FIRST, 40, 3):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free,) * 2)
        try:
            count = len(list(train))
            said = "whole" if count == 12 else f"only {count}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".replace(chr(10), " ")
        os.write(1, f"{said}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("how", "first"),
    one_in(
        4,
        [
            ('train.workers(3, kind="process")', 2),
            ("train.workers(3)", 0),
            ('train.cache("1MiB").workers(2)', 0),
            ('train.cache("1MiB", path=folder + "-cache").workers(2)', 0),
        ],
    ),
)
def test_a_lack_of_descriptors_is_said(how: str, first: int) -> None:
    program = _LIMITED.replace("HOW", how).replace("FIRST", str(first))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    said = done.stdout.splitlines()
    assert said[-1] == "whole", done.stderr
    lacks = [line for line in said if line != "whole"]
    assert all("file descriptors" in line or "Too many open files" in line for line in lacks)
    assert not any("damaged" in line for line in lacks)


_SPAWNING = """
import multiprocessing
import sys
import threading
import stoker

class Locked:
    def __init__(self):
        self.lock = threading.Lock()
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

def main():
    multiprocessing.set_start_method("spawn")
    train = stoker.from_dataset(range(8), seed=0)
    train = {
        "lambda": lambda: train.map(lambda x: x),
        "collate": lambda: train.batch(2, collate=lambda x: x),
        "lock": lambda: stoker.from_dataset(Locked()),
        "bound": lambda: train.map(Locked().__getitem__),
        "unguarded": lambda: train.map(int),
    }[sys.argv[1]]()
    try:
        print(len(list(train.workers(1, kind="process"))))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

if sys.argv[1] == "unguarded" or __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("what", "says"),
    one_in(
        5,
        [
            (
                "lambda",
                [
                    "TypeError: map(<lambda>) cannot be sent",
                    "'spawn'",
                    '.workers(n, kind="thread")',
                ],
            ),
            ("collate", ["TypeError: batch(2) cannot be sent", "top of a module"]),
            ("lock", ["TypeError: from_dataset(Locked) cannot be sent", "__getstate__"]),
            ("bound", ["TypeError: map(__getitem__) cannot be sent", "lock"]),
            ("unguarded", ["WorkerDied", "'spawn'", 'if __name__ == "__main__"']),
        ],
    ),
)
def test_what_spawn_cannot_send_is_named(what: str, says: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SPAWNING)
    done = subprocess.run(
        [sys.executable, str(program), what], capture_output=True, text=True, timeout=120
    )
    last = done.stdout.splitlines()[-1]
    assert all(part in last for part in says), last
