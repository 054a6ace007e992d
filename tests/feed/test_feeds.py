"""Feeds as their users meet them: what comes out, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import failing
import numpy as np
import pytest
import served
from playing import (
    Play,
    check_outputs,
    feeder_of,
    feeding,
    joining,
    log_of,
    sharing,
    start,
    wait_for_the_end,
)

import stoker
from command_line import python
from patience import WITHIN_S, wait_until
from scripts import shared_files
from stoker.feeds import local_feeds, messages, server
from stoker.feeds.local_feeds import FeedSettings
from strategies import one_in, shortened


def failing_target(function: str) -> str:
    return f"{Path(failing.__file__)}:{function}"


def target(kind: str) -> str:
    return f"{Path(served.__file__)}:{kind}"


# -- what comes out


def test_batches_are_read_only_views_and_may_go_to_torch(name: str) -> None:
    with feeding(served.batches, name):
        feed = stoker.from_feed(name)
        grids, labels = next(iter(feed))
        with pytest.raises(ValueError, match="read-only"):
            grids += 1
        assert not labels.flags.writeable
        assert not grids.flags.owndata
        tensors = stoker.from_feed(name).to_torch()
        moved, _ = next(iter(tensors))
        moved.zero_()
        again = stoker.from_feed(name)
        again.load_state_dict(feed_state(again, 0, 0))
        assert served.digest(next(iter(again))) == served.expected("batches", 0)[0]


def feed_state(feed: stoker.Pipeline, epoch: int, number: int) -> dict[str, Any]:
    """Return the state of a job that stands there in the feed's epochs."""
    state = feed.state_dict()
    state["loader"][0].update({"epoch": epoch, "number": number})
    return state


def test_length_seed_and_epochs(name: str) -> None:
    with feeding(served.batches, name):
        feed = stoker.from_feed(name, seed=3)
        assert len(feed) == 19
        assert feed.seed == 3
        assert sum(1 for _ in feed) == 19
        assert feed.epoch == 1
        assert "from_feed" in str(feed)


@pytest.mark.full
def test_an_example_that_is_stuck_is_skipped_for_all_jobs(name: str) -> None:
    with feeding(served.stuck, name):
        labels = [each for _, batch in stoker.from_feed(name) for each in batch.tolist()]
        assert labels == [each for each in range(served.EXAMPLES) if each != 7]


def test_jobs_augment_and_batch_on_their_own(name: str) -> None:
    with feeding(served.examples, name):
        ones, others = (
            stoker.from_feed(name, seed=seed).random_map(served.noisy, on=0).batch(n)
            for seed, n in ((1, 50), (2, 40))
        )
        with iter(ones) as batches:
            assert len(batches) == len(ones)  # a feed is sure of it
        first = [labels.tolist() for _, labels in ones]
        second = [labels.tolist() for _, labels in others]
        assert [len(labels) for labels in first] == [50, 50, 50]
        assert [len(labels) for labels in second] == [40, 40, 40, 30]
        assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
        assert len(ones) == 3


def test_two_loops_over_one_connection_do_not_look_finished(name: str) -> None:
    with feeding(served.examples, name):
        feed = stoker.from_feed(name)
        with pytest.raises(stoker.StokerError, match=r"a stoker\.from_feed\(\) of its own"):
            list(zip(feed.batch(50), feed.batch(50), strict=False))


def test_a_fast_job_echoes(name: str) -> None:
    with feeding(served.batches, name):
        feed = stoker.from_feed(name).echo("auto", max_factor=3)
        uses = [served.digest(batch) for batch in feed]
        assert set(uses) == set(served.expected("batches", 0))
        state = feed.state_dict()
        feed.load_state_dict(state)


def test_a_job_resumes_its_own_augmentation(name: str) -> None:
    def job() -> stoker.Pipeline:
        return stoker.from_feed(name, seed=5).random_map(served.noisy, on=0).batch(20)

    with feeding(served.examples, name):
        whole, states = [], []
        feed = job()
        for batch in feed:
            whole.append(served.digest(batch))
            states.append(feed.state_dict())
        for number in (0, 3, 6):
            again = job()
            again.load_state_dict(states[number])
            assert [served.digest(batch) for batch in again] == whole[number + 1 :]


def test_named_tuples_of_the_script_itself(tmp_path: Path, name: str) -> None:
    script = tmp_path / "trains.py"
    script.write_text(
        f"""
from typing import NamedTuple
import numpy as np
import stoker

class Example(NamedTuple):
    image: object
    label: int

class Data:
    def __len__(self): return 10
    def __getitem__(self, index): return Example(np.zeros(3000), index)

def make():
    return stoker.from_dataset(Data(), seed=0).batch(5)

if __name__ == "__main__":
    for batch in stoker.feed(make, name="{name}"):
        assert type(batch) is Example
        print(batch.label.tolist())
"""
    )
    done = python("-W", "error", str(script))
    assert done.stdout.split("\n")[0] == "[0, 1, 2, 3, 4]", done.stderr
    assert not done.stderr


def test_a_loader_is_shared_but_not_resumed(name: str) -> None:
    with feeding(failing.loader, name):
        feed = stoker.from_feed(name)
        assert list(feed) == [[number] for number in range(10)]
        batches = iter(feed)
        next(batches)
        state = feed.state_dict()
        batches.close()
        other = stoker.from_feed(name)
        other.load_state_dict(state)
        with pytest.raises(stoker.StateError, match="cannot prepare outputs again"):
            iter(other)


# -- what is refused


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (failing_target("adaptive"), "cannot serve .echo"),
        (failing_target("late"), "cannot serve .late"),
        (failing_target("flowing"), r"\.repeat\(\) behind"),
        (failing_target("on_device"), r"\.to_torch\(device\)"),
        (failing_target("raises"), "no data today"),
        (failing_target("returns_none"), "not a stoker pipeline"),
        (failing_target("nowhere"), "has no function nowhere"),
        ("/no/such/file.py:make", "no file"),
        ("no_such_module:make", "no_such_module"),
    ],
)
def test_what_cannot_be_served_says_so(
    target: str, says: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_REFUSING_S", 0.1)
    monkeypatch.setattr(sys, "path", [*sys.path])
    listener = local_feeds.listen(name)
    assert listener is not None
    with connect(name) as job:
        messages.send(job, good)
        with pytest.raises(stoker.FeedError, match=says):
            server.open_server(listener, FeedSettings(name, target))
        answer, _ = messages.receive_as_job(job)
    assert isinstance(answer, messages.Refused)
    assert re.search(says, answer.reason)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda: None, stoker.FeedError, "cannot find"),
        ("prep.py", ValueError, "FILE.py:FUNCTION"),
    ],
)
def test_wrong_functions(function: Any, error: type[Exception], says: str, name: str) -> None:
    with pytest.raises(error, match=says):
        stoker.feed(function, name=name)


TYPED_IN = """
import stoker

def make():
    return stoker.from_dataset(range(10), seed=0).batch(5)

list(stoker.feed(make, name="{name}"))
"""


@pytest.mark.parametrize("way", one_in(3, ["-", "-c", "-i", "-i train.py"]))
def test_a_function_that_stands_in_no_file_is_to_be_put_into_one(
    way: str, tmp_path: Path, name: str
) -> None:
    text = TYPED_IN.format(name=name)
    (tmp_path / "train.py").write_text("import os")
    arguments = ["-c", text] if way == "-c" else way.split()
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input="" if way == "-c" else text,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    said = next(line for line in done.stderr.splitlines() if "errors.FeedError: " in line)
    assert "make(), because it is not in a file" in said
    assert "prep.py:make" in said


def test_a_module_that_is_run_shares_its_function(tmp_path: Path, name: str) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("LENGTH = 10")
    guarded = TYPED_IN.replace("list(", 'if __name__ == "__main__":\n    list(')
    (package / "train.py").write_text("from . import LENGTH\n" + guarded.format(name=name))
    done = python("-W", "error", "-m", "project.train", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_names() -> None:
    for wrong in ("", "a b", "x" * 65, "ä"):
        with pytest.raises(ValueError, match="name of a feed"):
            stoker.from_feed(wrong)


def test_two_functions_under_one_name(name: str) -> None:
    first = stoker.feed(target("batches"), name=name)
    with pytest.raises(stoker.FeedError, match=r"not .*:rows"):
        stoker.feed(target("rows"), name=name)
    del first


def test_a_script_that_shares_while_it_is_imported(tmp_path: Path, name: str) -> None:
    script = tmp_path / "no_guard.py"
    script.write_text(
        f"""
import stoker
def make():
    return stoker.from_dataset(range(10), seed=0).batch(5)
stoker.feed(make, name="{name}")
"""
    )
    done = python(str(script))
    assert '__name__ == "__main__"' in done.stderr.splitlines()[-1]


def test_too_small_staging_areas(name: str) -> None:
    with pytest.raises(stoker.FeedError, match="at least 4"):
        stoker.feed(target("batches"), name=name, staging=2)


def test_states_of_other_feeds_are_refused(name: str) -> None:
    with feeding(served.batches, name):
        state = feed_state(stoker.from_feed(name), 0, 3)
    with feeding(served.rows, name):
        feed = stoker.from_feed(name)
        feed.load_state_dict(state)
        with pytest.raises(stoker.StateError, match="another pipeline"):
            iter(feed)


# -- what goes wrong


def test_a_pipeline_that_fails_tells_every_job(name: str) -> None:
    with feeding(failing.fails_on_7, name):
        for _ in range(2):
            feed = stoker.from_feed(name)
            got: list[int] = []
            with pytest.raises(stoker.FeedError, match=r"example 7.*seven"):
                got.extend(value for batch in feed for value in batch.tolist())
            assert got == [0, 1, 2, 3, 4, 5]


def test_what_cannot_be_pickled_tells_the_jobs(name: str) -> None:
    with feeding(failing.unpicklable, name):
        feed = iter(stoker.from_feed(name).batch(2, collate=list))
        with pytest.raises(stoker.StokerError, match="cannot send this value"):
            next(feed)


def test_the_end_of_a_feeder_is_told_at_once(name: str) -> None:
    with feeding(served.batches, name) as feeder:
        feed = stoker.from_feed(name)
        batches = iter(feed)
        first = next(batches)
        kept = served.digest(first)
        feeder.kill()
        with pytest.raises(stoker.FeedError, match="has ended"):
            for _ in batches:
                pass
        assert served.digest(first) == kept


def test_everybody_killed_leaves_nothing(name: str, tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    make = sharing("batches", name, jobs=3)
    plays = [Play(epochs=50, step_s=0.005) for _ in range(3)]
    jobs = [start(make, play, tmp_path / f"{i}") for i, play in enumerate(plays)]
    wait_until(lambda: len(log_of(tmp_path / "0").outputs) > 3)
    feeder = feeder_of(name)
    assert feeder is not None
    pids = [feeder, *(job.pid for job in jobs)]
    own = {path for pid in pids for path in shared_files(pid)}
    for job in jobs:
        job.kill()
    for job in jobs:
        job.join()
        job.close()
    wait_until(lambda: not Path(f"/proc/{feeder}").exists())
    # Others may use shared memory meanwhile: what is new there must not be this feed's.
    new = set(os.listdir("/dev/shm")) - shm
    assert [file for file in new if f"/dev/shm/{file}" in own] == []
    assert [file for file in new if any(str(word) in file for word in (name, *pids))] == []


def test_a_frozen_feeder_of_a_share_that_is_killed(name: str, tmp_path: Path) -> None:
    play = Play(epochs=1, step_s=0.01)
    job = start(sharing("batches", name), play, tmp_path / "log")
    wait_until(lambda: len(log_of(tmp_path / "log").outputs) > 3)
    feeder = feeder_of(name)
    assert feeder is not None
    os.kill(feeder, signal.SIGSTOP)
    os.kill(feeder, signal.SIGKILL)
    wait_for_the_end([job])
    check_outputs(log_of(tmp_path / "log"), "batches", play)


# -- who may connect, and what they may say


def connect(name: str) -> socket.socket:
    connection = local_feeds.connect_within(name, WITHIN_S)
    assert connection is not None
    connection.settimeout(WITHIN_S)
    return connection


good = messages.Hello(messages.VERSION, "fuzz")


def test_connections_that_say_nothing_hold_up_nobody(name: str) -> None:
    with feeding(served.batches, name), connect(name), connect(name):
        assert len(list(stoker.from_feed(name))) == 19


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_connect(name: str) -> None:
    with feeding(served.batches, name):
        connect(name).close()
        asks = f"""
import os, socket
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(100)
connection.connect({local_feeds.address_of(name)!r})
print(len(connection.recv(1000)))
"""
        done = subprocess.run(
            [sys.executable, "-c", asks], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "0"
        assert len(list(stoker.from_feed(name))) == 19


# -- memory and processor


def test_the_staging_area_bounds_shared_memory(name: str) -> None:
    """Of 500 batches, however long a job waits: what is staged, and a pipeline's own window."""
    with feeding(served.many, name, staging=6) as feeder:
        slow = iter(stoker.from_feed(name))
        held = next(slow)
        wait_until(lambda: _shared_bytes(feeder.pid) >= 6 * held.nbytes)
        shared, before = _shared_bytes(feeder.pid), -1
        while shared != before:
            time.sleep(0.2)
            shared, before = _shared_bytes(feeder.pid), shared
        # On a busy machine a pipeline takes its work for waiting: more threads, a longer window.
        assert shared <= 200 * held.nbytes


def _shared_bytes(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    blocks = [link for link in folder.iterdir() if "stoker-feed" in os.readlink(link)]
    return sum(link.stat().st_size for link in blocks)


def test_a_kept_batch_stays_what_it_is_when_its_feed_is_gone(name: str) -> None:
    with feeding(served.many, name):
        feed, other = (iter(stoker.from_feed(name)) for _ in range(2))
        kept = next(feed)
        next(other)
        was = kept.copy()
        del feed
        gc.collect()
        for _ in zip(range(100), other, strict=False):
            pass
        assert np.array_equal(kept, was)


def test_a_batch_in_a_forked_child_stays_what_it_is(name: str) -> None:
    with feeding(served.many, name):
        batches = iter(stoker.from_feed(name))
        kept = next(batches)
        digest = served.digest(kept)
        to_child, from_parent = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on
            child = os.fork()
        if child == 0:
            os.read(to_child, 1)
            os._exit(served.digest(kept) != digest)
        del kept
        for _ in itertools.islice(batches, 100):
            pass
        os.write(from_parent, b"x")
        assert os.waitpid(child, 0)[1] == 0


def test_a_slow_job_gets_messages_that_its_socket_has_no_room_for(name: str) -> None:
    with feeding(served.wide, name):
        for index, example in enumerate(stoker.from_feed(name)):
            if not index:
                time.sleep(1.0)  # a slow step
            assert example["index"] == index
            assert (example["mask"] == index % 251).all()
        assert index == 1_999


def test_code_that_draws_gives_each_job_what_one_process_gives(name: str) -> None:
    """Also a job that comes late, for which it is called again."""
    with feeding(served.drawn, name):
        whole = served.expected("drawn", 0)
        assert [served.digest(batch) for batch in stoker.from_feed(name)] == whole
        late = stoker.from_feed(name)
        late.load_state_dict(feed_state(late, 0, 5))
        assert [served.digest(batch) for batch in late] == whole[5:]


def test_who_waits_for_ever_may_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])  # Python ignores it
    for number, timeout_s in enumerate((float("inf"), 1e300)):
        feed = sharing("batches", f"{name}-{number}", timeout_s=timeout_s)()
        assert [served.digest(batch) for batch in feed] == served.expected("batches", 0)
        del feed
        gc.collect()


def test_a_new_job_does_not_wait_for_one_that_is_silent(name: str) -> None:
    with feeding(served.many, name, timeout_s=0.5):
        silent = iter(stoker.from_feed(name))
        for _ in range(20):  # so that another one must wait for the next epoch
            next(silent)
        assert next(iter(stoker.from_feed(name)))[0, 0] == 0
        assert next(silent)[0, 0] == 80


@pytest.mark.interrupts
def test_a_feeder_that_its_only_job_has_left_waits_again(name: str) -> None:
    with feeding(served.batches, name, jobs=2, timeout_s=5.0) as feeder:
        waits = iter(stoker.from_feed(name))
        with pytest.raises(KeyboardInterrupt):
            _interrupted(lambda: next(waits))
        time.sleep(5.0)
        wait_until(lambda: _uses_no_processor(feeder.pid))


@pytest.mark.interrupts
def test_who_stops_waiting_holds_up_nobody(name: str) -> None:
    with feeding(served.many, name, timeout_s=1000.0):
        first = stoker.from_feed(name)
        batches = iter(first)
        next(batches)
        for _ in range(20):  # so that another one must wait for the next epoch
            next(batches)
        waits = iter(stoker.from_feed(name))
        with pytest.raises(KeyboardInterrupt):
            _interrupted(lambda: next(waits))
        assert 21 + sum(1 for _ in batches) == 500
        assert sum(1 for _ in zip(range(60), first, strict=False)) == 60


def _interrupted(wait: Any) -> None:
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    sender.start()
    try:
        wait()
    finally:
        sender.join()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"jobs": 0}, ValueError),
        ({"jobs": "8"}, TypeError),
        ({"staging": 2.5}, TypeError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": None}, TypeError),
    ],
)
def test_wrong_settings(settings: dict[str, Any], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        stoker.feed(target("batches"), name=name, **settings)


@pytest.mark.parametrize(
    ("cluster", "error"), [("slurm", ValueError), ("ray", stoker.ClusterError)]
)
def test_without_a_cluster_it_says_so(cluster: str, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match="cluster="):
        stoker.feed(target("batches"), name=name, cluster=cluster)


def test_waiting_uses_no_processor(name: str) -> None:
    """Who waits blocks: the time is the processor's, not the clock's."""
    with feeding(served.batches, name, jobs=2) as feeder:
        waits = start(joining(name), Play(), Path("/dev/null"))
        wait_until(lambda: _uses_no_processor(feeder.pid, waits.pid))
        waits.kill()
        waits.join()
        waits.close()


def _kill(jobs: list[subprocess.Popen[str]]) -> None:
    for job in jobs:
        job.kill()


@pytest.mark.full
@pytest.mark.parametrize("access", shortened(["share", "from_feed"], 1))
def test_a_job_that_waits_for_others_says_so_once(access: str, name: str) -> None:
    call = f"stoker.feed({target('batches')!r}, name={name!r}, jobs=2)"
    with contextlib.ExitStack() as stack:
        if access == "from_feed":
            stack.enter_context(feeding(served.batches, name, jobs=2))
            call = f"stoker.from_feed({name!r})"
        code = f"import stoker; print(len(list({call})))"
        command, pipe = [sys.executable, "-c", code], subprocess.PIPE
        jobs = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)]
        stack.callback(_kill, jobs)
        assert jobs[0].stderr is not None
        said = jobs[0].stderr.readline()
        assert said.startswith(f"stoker: the feed {name!r} waits for 2 jobs")
        assert "jobs=" in said
        jobs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        for job in jobs:
            out, errors = job.communicate(timeout=240)
            assert (job.returncode, out, errors) == (0, "19\n", "")


def _uses_no_processor(*processes: int) -> bool:
    """Whether processes use no processor for a second."""
    stats = [Path(f"/proc/{pid}/stat") for pid in processes]
    before = [_ticks(path) for path in stats]
    time.sleep(1.0)
    return max(_ticks(path) - was for path, was in zip(stats, before, strict=True)) <= 1  # of 100


def _ticks(path: Path) -> int:
    fields = path.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# -- the command


@pytest.mark.interrupts
def test_the_command_serves_until_it_is_interrupted(name: str) -> None:
    call = [sys.executable, "-c", "from stoker.cli import main; main()"]
    command = subprocess.Popen(
        [*call, "feed", target("batches"), "--name", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    feed = None
    try:
        wait_until(lambda: feeder_of(name))
        feed = stoker.from_feed(name)
        assert [served.digest(batch) for batch in feed] == served.expected("batches", 0)
        second = subprocess.run(
            [*call, "feed", target("batches"), "--name", name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert second.returncode == 1
        assert "there is already" in second.stderr
    finally:
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=240)
    assert command.returncode == 130, err
    assert "staging area: 8 batches" in out
    assert err.strip() == "stopped"


def test_a_job_is_told_how_much_is_ready_for_it(name: str) -> None:
    with feeding(served.batches, name):
        feed = stoker.from_feed(name)

        def lags() -> bool:
            most = 0.0
            for _ in feed:
                time.sleep(0.02)  # meanwhile the feeder prepares others
                most = max(most, feed.metrics()["stoker/feed_lag_outputs"])
            return most > 0

        wait_until(lags)
        assert feed.stats().read_bytes > 0


def test_a_feeder_that_ends_each_time_at_one_place_is_not_started_for_ever(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, stoker\n"
        "def die(x):\n    return x if x < 6 else os._exit(3)\n"
        "def build():\n"
        "    return stoker.from_dataset(list(range(9))).map(die).batch(2).workers(0)\n"
    )
    train = stoker.feed(f"{tmp_path}/deadly.py:build", name=name)
    with pytest.raises(stoker.FeedError, match=r"ended \d times.* to see why"):
        list(train)
