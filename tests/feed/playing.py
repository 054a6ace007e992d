"""Jobs and feeders as processes of a test: what they did is read from files."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import served
from hypothesis import strategies as st

import stoker
from patience import WITHIN_S, wait_until
from stoker.feeds import local_feeds, messages
from stoker.feeds.local_feeds import FeedSettings
from stoker.feeds.server import FeedServer

_fork = multiprocessing.get_context("fork")


@dataclass
class Play:
    """What a job does.

    Attributes:
        epochs: how many it trains for, unless it meets its fate before.
        step_s: how long each step takes.
        fate: what happens after ``at`` outputs of an epoch: ``killed``, ``stopped`` (and continued
            after a while), ``skips`` the rest of the epoch, ``resumes`` in a new process, from the
            state; or ``none``.
        keeps: how many outputs it goes on referring to.
    """

    epochs: int = 2
    step_s: float = 0.0
    fate: str = "none"
    at: int = 5
    keeps: int = 0
    delay_s: float = 0.0


@dataclass
class Log:
    """What a job wrote: (epoch, number, digest) of each output, and how it ended."""

    outputs: list[tuple[int, int, str]] = field(default_factory=list)
    ended: str = ""


def log_of(path: Path) -> Log:
    """Read what a job wrote."""
    log = Log()
    for line in path.read_text().splitlines() if path.exists() else ():
        what = json.loads(line)
        if isinstance(what, str):
            log.ended = what
        else:
            log.outputs.append(tuple(what))
    return log


def start(make: Callable[[], stoker.Pipeline], play: Play, log: Path) -> Any:
    """Start a job; ``make`` returns its pipeline, there."""
    process = _fork.Process(target=_job, args=(make, play, log, None))
    process.start()
    return process


def _job(make: Callable[[], stoker.Pipeline], play: Play, log: Path, state: Any) -> None:
    with log.open("a") as out:

        def write(what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        try:
            time.sleep(play.delay_s)
            pipeline = make()
            place = 0, -1
            if state is not None:
                pipeline.load_state_dict(state)
                at = state["loader"][0]
                place = at["epoch"], at["number"] - 1
            _play(pipeline, play, write, log, place)
            write("done")
        except BaseException as error:
            traceback.print_exc()
            write(f"{type(error).__name__}: {error}")
    os._exit(0)


def _play(
    pipeline: stoker.Pipeline,
    play: Play,
    write: Callable[[Any], None],
    log: Path,
    place: tuple[int, int],
) -> None:
    """Play; ``place`` is the epoch and number of the last output that came before."""
    kept: list[tuple[str, Any]] = []
    left = play.epochs
    while left:
        left -= 1
        count = 0
        with iter(pipeline) as outputs:
            for value in outputs:
                now = served.digest(value)
                at = pipeline.state_dict()["loader"][0]
                ended = not at["number"]  # the last output: the next epoch begins behind it
                place = (place[0], place[1] + 1) if ended else (at["epoch"], at["number"] - 1)
                write((*place, now))
                kept.append((now, value))
                if play.step_s:
                    time.sleep(play.step_s)
                for digest, old in kept:
                    assert served.digest(old) == digest, "an output changed while it was held"
                del kept[: max(0, len(kept) - play.keeps)]
                del value, old
                count += 1
                if count == play.at and play.fate != "none":
                    if play.fate == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    elif play.fate == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    elif play.fate == "resumes":
                        _resume(pipeline.state_dict(), play, log, left - ended)
                        return
                    elif play.fate == "skips":
                        break
        if play.fate != "skips":
            play.fate = "none"


def _resume(state: Any, play: Play, log: Path, left: int) -> None:
    """Become a process that knows nothing but the state: what was open is closed."""
    settings = {**asdict(play), "fate": "none", "epochs": left + 1, "delay_s": 0.0}
    arguments = json.dumps([make_of_this_job, settings, str(log), state])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    os.execve(sys.executable, [sys.executable, __file__, arguments], environment)


make_of_this_job: list[Any] = []
"""How a job that resumes makes its pipeline: kind of access, and its arguments."""


def sharing(kind: str, name: str, **settings: Any) -> Callable[[], stoker.Pipeline]:
    """Return what shares a pipeline of ``served``."""

    def make() -> stoker.Pipeline:
        make_of_this_job[:] = ["share", kind, name, settings]
        target = f"{Path(served.__file__)}:{kind}"
        return stoker.feed(target, name=name, **settings)

    return make


def joining(name: str) -> Callable[[], stoker.Pipeline]:
    """Return what takes a feed."""

    def make() -> stoker.Pipeline:
        make_of_this_job[:] = ["from_feed", name]
        return stoker.from_feed(name)

    return make


@contextlib.contextmanager
def feeding(make: Callable[[], stoker.Pipeline], name: str, **settings: Any) -> Iterator[Any]:
    """Have a process of its own serve a pipeline; it is killed at the end."""
    how = FeedSettings(name, "", **{"timeout_s": 20.0, **settings})

    def feed() -> None:
        listener = local_feeds.listen(name)
        assert listener is not None
        feeder = FeedServer(listener, make(), how)
        try:
            feeder.serve()
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    process = _fork.Process(target=feed)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def feeder_of(name: str) -> int | None:
    """Return the process id of a feed's feeder, None if there is none."""
    connection = local_feeds.connect(name)
    if connection is None:
        return None
    with connection:
        connection.settimeout(WITHIN_S)
        try:
            messages.send(connection, messages.Hello(messages.VERSION, "who is there"))
            welcome, _ = messages.receive_as_job(connection)
        except OSError:
            return None
        return welcome.pid if isinstance(welcome, messages.Welcome) else None


def wait_for_the_end(processes: list[Any], continue_after_s: float = 0.0) -> None:
    """Wait for jobs to end; those that stop themselves are continued after a while."""

    def all_ended() -> bool:
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            if is_stopped(process.pid):
                time.sleep(continue_after_s)
                os.kill(process.pid, signal.SIGCONT)
        return not alive

    try:
        wait_until(all_ended, lambda: "a job hangs")
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def check_outputs(log: Log, kind: str, play: Play) -> None:
    """Check that a job saw everything exactly once, as one process makes it."""
    by_epoch: dict[int, list[int]] = {}
    for epoch, number, digest in log.outputs:
        assert served.expected(kind, epoch)[number] == digest, (kind, epoch, number)
        by_epoch.setdefault(epoch, []).append(number)
    epochs = list(by_epoch)
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs))) if epochs else True
    for epoch, numbers in by_epoch.items():
        assert numbers == list(range(len(numbers))), (epoch, numbers)
        last = epoch == epochs[-1]
        whole = len(numbers) == len(served.expected(kind, epoch))
        if play.fate == "skips":
            assert len(numbers) == min(play.at, len(served.expected(kind, epoch)))
        elif not (last and play.fate == "killed"):
            assert whole, (epoch, len(numbers), log.ended)
    if play.fate == "killed":
        assert sum(map(len, by_epoch.values())) == play.at
    else:
        assert log.ended == "done", log.ended
        assert len(by_epoch) == play.epochs


if __name__ == "__main__":
    access, settings, path, saved = json.loads(sys.argv[1])
    if access[0] == "share":
        remade = sharing(access[1], access[2], **access[3])
    else:
        remade = joining(access[1])
    _job(remade, Play(**settings), Path(path), saved)


_names = itertools.count()


def fresh_name() -> str:
    return f"test-{os.getpid()}-{next(_names)}"


def plays(fewest: int = 1) -> st.SearchStrategy[list[Play]]:
    play = st.builds(
        Play,
        epochs=st.integers(1, 3),
        step_s=st.sampled_from((0.0, 0.0, 0.001, 0.004)),
        fate=st.sampled_from(("none", "none", "killed", "stopped", "skips", "resumes")),
        at=st.integers(1, 12),
        keeps=st.sampled_from((0, 0, 1, 5)),
        delay_s=st.sampled_from((0.0, 0.0, 0.02, 0.1)),
    )
    return st.lists(play, min_size=fewest, max_size=5)


def play_out(
    makes: list[Callable[[], Any]],
    cast: list[Play],
    kind: str,
    kills: list[tuple[int, str]],
    continue_after_s: float = 0.1,
) -> None:
    """Have jobs play, kill feeders behind so many outputs, and check what came."""
    with tempfile.TemporaryDirectory() as home:
        logs = [Path(home) / f"{number}" for number in range(len(cast))]
        jobs = [start(*one) for one in zip(makes, cast, logs, strict=True)]

        def outputs() -> int:
            return sum(len(log_of(log).outputs) for log in logs)

        for behind, name in sorted(kills):
            while outputs() < behind and any(job.is_alive() for job in jobs):
                if any(is_stopped(job.pid) for job in jobs):
                    break
                time.sleep(0.002)
            pid = feeder_of(name) if any(job.is_alive() for job in jobs) else None
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_for_the_end(jobs, continue_after_s=continue_after_s)
        for play, log in zip(cast, logs, strict=True):
            check_outputs(log_of(log), kind, play)
