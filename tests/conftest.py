"""What all tests share: Hypothesis profiles, markers, and a check that nothing is left.

Profiles are chosen by STOKER_TEST_PROFILE: `short` (the default), which tries the same cases in
every run, so that a failure belongs to a change; or `full`, which draws new ones.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from descriptors import RAISED

LEFTOVER_GRACE_S = 60.0

# A shell that is not interactive starts background jobs with SIGINT ignored, and programs that a
# test starts would inherit that. With a handler here they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_in_ci = bool(os.environ.get("CI"))
for _profile, _max_examples in (("short", 5), ("full", 500)):
    # Everything that Hypothesis would choose otherwise under CI is said here.
    settings.register_profile(
        _profile,
        max_examples=_max_examples,
        deadline=None,
        derandomize=_profile == "short",
        database=None
        if _in_ci or _profile == "short"
        else DirectoryBasedExampleDatabase(".hypothesis/examples"),
        print_blob=True,
    )
settings.load_profile(os.environ.get("STOKER_TEST_PROFILE", "short"))

# Python 3.14 starts processes by forkserver, which pickles what it sends, and functions that a test
# defines cannot be. Tests of start methods name theirs.
multiprocessing.set_start_method("fork", force=True)


def _has_accelerator() -> bool:
    try:
        import torch
    except ImportError:
        return False
    # Asked through NVML, so that tests which fork afterwards still can.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def pytest_configure() -> None:
    """Refuse to run with metadata that is older than the sources: commands would be missing."""
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    for group, wanted in pyproject["project"]["entry-points"].items():
        found = {
            point.name: point.value
            for point in entry_points(group=group)
            if point.dist is not None and point.dist.name == "stoker"
        }
        if found != wanted:
            raise pytest.UsageError(
                f"stoker was installed before {group} in pyproject.toml changed: "
                "pip install --no-deps -e . (scripts/setup-venv does it too)"
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("cov_source", None) or sys.version_info[:2] == (3, 14):
        kept = [item for item in items if not item.get_closest_marker("interrupts")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    # First, one behind the other, so that the processes of a parallel run wait for each other once.
    items.sort(key=_runs_alone, reverse=True)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    # PyTorch is imported only where a collected test asks for it.
    if marked and not _has_accelerator():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def no_callback_takes_a_ctrl_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep a test of Ctrl-C from losing it in a callback of the garbage collector.

    Hypothesis registers one, and Python drops what is raised in it.
    """
    if request.node.get_closest_marker("interrupts") is None:
        yield
        return
    before = gc.callbacks[:]
    gc.callbacks.clear()
    gc.collect()  # nor may what tests before this one left be finalized by this one
    yield
    gc.callbacks[:] = before


@pytest.fixture(scope="session", autouse=True)
def coverage_is_forked_whole(request: pytest.FixtureRequest) -> None:
    """Have forks wait for the lock that coverage's tracers take when they meet a file.

    A process that was forked while another thread had it waited for ever, at its first new file.
    """
    if not request.config.getoption("cov_source", None):
        return
    from coverage import Coverage

    measuring = Coverage.current()
    if measuring is not None and measuring._collector is not None:
        lock = measuring._collector.data_lock = threading.RLock()  # type: ignore[assignment]
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


def pytest_collection_finish() -> None:
    # What was imported and collected stays: no later collection need go over it again.
    gc.collect()
    gc.freeze()


def _runs_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


# Locks of the processes that share a run, on what is there anyway.
_turn = os.open(os.path.dirname(__file__), os.O_RDONLY)
_running = os.open(__file__, os.O_RDONLY)


_holds_all = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Has a test that is marked `alone` wait for those of other processes, and they for it.

    Outermost, so that the waiting does not count as the test's time. Between two such tests nobody
    else's begins.
    """
    global _holds_all
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    if not _holds_all:
        fcntl.flock(_turn, fcntl.LOCK_EX)  # who waits for all others keeps new ones out
        fcntl.flock(_running, fcntl.LOCK_EX if _runs_alone(item) else fcntl.LOCK_SH)
        fcntl.flock(_turn, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        _holds_all = _runs_alone(item) and nextitem is not None and _runs_alone(nextitem)
        if not _holds_all:
            fcntl.flock(_running, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "call":
        item.stash[RAISED] = call.excinfo is not None
    return (yield)


@pytest.fixture(autouse=True)
def own_places(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Have tests of caches leave the user's list of caches and token alone, in programs, too."""
    room = request.path.parent.name
    if room not in ("cache", "cluster"):
        return
    folder = tmp_path_factory.mktemp("places")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    if room == "cluster":
        from nodes import write_token

        monkeypatch.setenv("STOKER_TOKEN_FILE", str(write_token(folder)))
        # Servers of a busy machine answer late.
        monkeypatch.setattr("stoker.cluster.cache_connection.DEADLINE_S", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return where a store may be made."""
    return str(tmp_path / "cache")


@pytest.fixture
def name() -> Iterator[str]:
    """Return a feed's name; no feed has it when the test has ended."""
    from playing import fresh_name

    from patience import wait_until

    made = fresh_name()
    yield made
    wait_until(lambda: made not in Path("/proc/net/unix").read_text())


def _helper_pids() -> set[int]:
    """Processes that `multiprocessing` starts once and keeps until the interpreter ends."""
    from multiprocessing import forkserver, resource_tracker

    pids = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    return {pid for pid in pids if pid is not None}


def _counted_threads() -> set[threading.Thread]:
    """The live threads that a test must not leave: non-daemon ones, and all of stoker's."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith("stoker")
    }


def _has_children() -> bool:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                if file.read():
                    return True
        except OSError:  # the thread has ended; or the kernel does not tell
            return True
    return False


def _child_processes() -> set[psutil.Process]:
    """All descendants of this process that run; `multiprocessing` reaps its own on the way."""
    multiprocessing.active_children()
    if not _has_children():  # mostly, and looking through all processes takes long
        return set()
    return set(filter(_runs, psutil.Process().children(recursive=True)))


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended: nobody but its parent can end a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
        return f"process {process.pid} ({process.status()}): {command[:200]}"
    except psutil.Error:
        return f"process {process.pid}"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads or child processes, after a few seconds of grace.

    What fixtures of wider scope started before the test is not counted. A test that failed is not
    checked: its traceback keeps alive what it used.
    """
    threads_before = set(threading.enumerate())
    processes_before = _child_processes()

    yield

    if request.node.stash.get(RAISED, False):
        return

    def leftovers() -> tuple[set[threading.Thread], set[psutil.Process]]:
        helpers = _helper_pids()
        processes = {p for p in _child_processes() - processes_before if p.pid not in helpers}
        return _counted_threads() - threads_before, processes

    threads, processes = leftovers()
    if not threads and not processes:
        return
    gc.collect()
    give_up_at = time.monotonic() + LEFTOVER_GRACE_S
    while True:
        threads, processes = leftovers()
        if not threads and not processes:
            return
        if time.monotonic() >= give_up_at:
            break
        time.sleep(0.02)

    names = sorted(f"thread {thread.name!r}" for thread in threads)
    names += sorted(_describe(process) for process in processes)
    pytest.fail(f"left behind after {LEFTOVER_GRACE_S:g} s: " + "; ".join(names), pytrace=False)
