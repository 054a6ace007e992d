"""What is said where a process cannot have what workers need: descriptors, or pickles."""

from __future__ import annotations

import pytest

from command_line import python
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
    done = python("-W", "ignore", "-c", program)
    said = done.stdout.splitlines()
    assert said[-1] == "whole", done.stderr
    lacks = [line for line in said if line != "whole"]
    assert all("file descriptors" in line or "Too many open files" in line for line in lacks)
    assert not any("damaged" in line for line in lacks)
