"""Where /dev/shm is read-only, or full: caches say so, and nothing else needs it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from scripts import PATH
from strategies import one_in

PROGRAM = """
import sys
import numpy as np
import stoker
from stoker.cluster.cache_server import CacheServer

if __name__ == "__main__":
    source = stoker.from_dataset([{"x": np.zeros(50_000)}] * 9, seed=0)
    made = {
        "cache": lambda: len(list(source.cache("2MiB", version="1").batch(3))),
        "cached": lambda: stoker.cached([1, 2], "2MiB", version="1")[0],
        "server": lambda: CacheServer("127.0.0.1:0", b"t" * 32, limit=1 << 21).close(),
        "path": lambda: len(list(source.cache("2MiB", version="1", path=sys.argv[2]).batch(3))),
        "processes": lambda: len(list(source.batch(3).workers(2, kind="process"))),
    }
    try:
        print("made", made[sys.argv[1]]())
    except stoker.StokerError as error:
        print(type(error).__name__, error)
"""
SHM = {
    "read-only": "mount -t tmpfs -o ro none /dev/shm",
    "read-only by now": "mount -t tmpfs none /dev/shm && mkdir -m 700 /dev/shm/stoker-0 && "
    "mount -o remount,ro /dev/shm",
    "without files": "mount -t tmpfs -o nr_inodes=1 none /dev/shm",
    "with few files": "mount -t tmpfs -o nr_inodes=5 none /dev/shm",
}


def run(shm: str, what: str, folder: object) -> str:
    """Run the program where /dev/shm is another one, and return what it says."""
    where = f'{shm} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", where, "sh", sys.executable, "-W", "error", "-c"]
    try:
        done = subprocess.run(
            [*command, PROGRAM, what, str(folder)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": PATH},
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("may not mount anything")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "what"), one_in(4, itertools.product(SHM, ["cache", "cached", "server"]))
)
def test_caches_say_what_is_wrong_with_it_and_what_to_do(
    name: str, what: str, tmp_path: object
) -> None:
    said = run(SHM[name], what, tmp_path)
    assert said.startswith("CacheError cannot make a cache in /dev/shm"), said
    if name.startswith("read-only"):
        assert "Read-only file system. Mount /dev/shm so that" in said
    else:
        assert (
            "No space left on device. Give the container more shared memory (docker run --shm-size"
            in said
        )
    assert "put the cache on a local disk with path=" in said


def test_nothing_else_needs_it(tmp_path: object) -> None:
    for what in ("path", "processes"):
        assert run(SHM["read-only"], what, f"{tmp_path}/store") == "made 3\n"
