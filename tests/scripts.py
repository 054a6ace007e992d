"""Real processes for tests of life and death: scripts that are run, signalled and looked after."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where programs find modules: `experiments`, and what this run was told."""
TIMEOUT_S = 240
"""After which a program hangs; a busy machine takes its time."""
REAL_WORLDS = [2, 4] if os.environ.get("STOKER_TEST_PROFILE") == "full" else [2]
"""How many real ranks there are: starting four takes its time."""

PRELUDE = """
import faulthandler, gc, json, multiprocessing, os, signal, sys, threading, time, warnings
faulthandler.dump_traceback_later(200, exit=True)
import numpy as np
import stoker


def say(words):
    os.write(1, (words + "\\n").encode())  # at once: several processes speak


def left():
    multiprocessing.active_children()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("stoker")]
    return {
        "threads": threads,
        "processes": [p.pid for p in multiprocessing.active_children()],
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")
        ),
    }


class Examples:
    def __init__(self, length=100_000, seconds=0.0):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return {"id": index, "x": np.full(5000, index, np.float64)}
"""


class Script:
    """A Python program in a session of its own."""

    def __init__(self, folder: Path, body: str, first: str = "") -> None:
        path = folder / "script.py"
        path.write_text(first + PRELUDE + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PATH},
            start_new_session=True,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        """Wait for what the program says next."""
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n"):  # by single characters, so that select sees what is left
            ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
            assert ready, f"the script says nothing more than {text!r}"
            character = os.read(self.process.stdout.fileno(), 1).decode()
            if not character:
                break
            text += character
        text = text.rstrip("\n")
        if not text:
            _, errors = self.process.communicate(timeout=TIMEOUT_S)
            raise AssertionError(f"the script ended, code {self.process.returncode}:\n{errors}")
        return text

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end: its code, what else it said, and what it complained about."""
        try:
            out, errors = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGABRT)
            _, errors = self.process.communicate(timeout=TIMEOUT_S)
            raise AssertionError(f"the script hangs:\n{errors}") from None
        return self.process.returncode, out, errors


@contextlib.contextmanager
def script(folder: Path, body: str, first: str = "") -> Iterator[Script]:
    """Start a program; whatever is left of its session is killed at the end."""
    running = Script(folder, body, first)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.process.communicate(timeout=TIMEOUT_S)


def run(folder: Path, body: str, first: str = "") -> list[Any]:
    """Run a program to its good and silent end; return the JSON lines it said.

    ``first`` is what it does before it imports stoker.
    """
    with script(folder, body, first) as running:
        code, out, errors = running.finish()
    assert code == 0, errors
    assert errors == "", errors
    return [json.loads(line) for line in out.splitlines()]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that the system gives to nobody else; a server that names it may listen there.

    It stays bound, and servers say SO_REUSEADDR. Were it let go, what asks for any port could have
    it before the server does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def shared_files(pid: int) -> set[str]:
    """Return the named shared memory that a process has open or mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[-1] for line in lines}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor))
    return {path for path in found if path.startswith("/dev/shm/")}


def children() -> list[psutil.Process]:
    """Child processes, but for those of multiprocessing that serve all the tests."""
    servers = ("forkserver", "resource_tracker")
    found = psutil.Process().children()
    return [p for p in found if not any(name in " ".join(p.cmdline()) for name in servers)]


class Watch:
    """Processes of others, seen until they end, whatever number they had."""

    def __init__(self, pids: list[int]) -> None:
        self._handles = {pid: os.pidfd_open(pid) for pid in pids}

    def gone(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Wait until all of them have ended."""
        poll = select.poll()
        waiting = set(self._handles.values())
        for handle in waiting:
            poll.register(handle, select.POLLIN)
        while waiting:
            events = poll.poll(timeout_s * 1000)
            if not events:
                return False
            for handle, _ in events:
                poll.unregister(handle)
                waiting.discard(handle)
        return True

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)


SETUP = """
import datetime, logging
import torch, torch.distributed as dist

RANK, WORLD = {rank}, {world}
torch.set_num_threads(1)
logging.getLogger("stoker").setLevel(logging.ERROR)


class Slow:
    \"\"\"The slower, the higher the rank.\"\"\"

    def __init__(self, length, fails=()):
        self.length, self.fails = length, set(fails)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.0003 * RANK)
        if index in self.fails:
            raise OSError("rotten")
        return {{"id": index, "x": np.float32([index % 7, index % 5, 1])}}


def jitter(x, rng):
    return x + rng.normal(size=3).astype(np.float32)


def batches(pipeline):
    \"\"\"Take every step together, as training does.\"\"\"
    taken = []
    for batch in pipeline:
        dist.all_reduce(torch.ones(1))
        taken.append(len(batch["id"]))
    return taken


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        dist.init_process_group(
            "gloo", init_method={init!r}, rank=RANK, world_size=WORLD,
            timeout=datetime.timedelta(seconds=150),
        )
"""


@contextlib.contextmanager
def ranks(folder: Path, world: int, body: str) -> Any:
    """Start a process for each rank."""
    init = f"file://{folder / 'rendezvous'}"
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(world):
            place = folder / str(rank)
            place.mkdir()
            text = SETUP.format(rank=rank, world=world, init=init) + body
            running.append(stack.enter_context(script(place, text)))
        yield running


def told_by(folder: Path, world: int, body: str) -> list[dict[str, Any]]:
    """Run ranks to their good end; return what each told."""
    ending = """
    say(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
"""
    with ranks(folder, world, body + ending) as running:
        told = [json.loads(process.line()) for process in running]
        assert [process.finish()[0] for process in running] == [0] * world
    return told
