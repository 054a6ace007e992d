"""Worker processes stay over epochs by ``persistent=True``; they end with their pipeline."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from scripts import Watch, run, script
from strategies import one_in, shortened

METHODS = pytest.mark.parametrize("method", shortened(["fork", "forkserver"], 1))
RESTING = """
    if __name__ == "__main__":
        multiprocessing.set_start_method(METHOD)
        pipeline = stoker.from_dataset(Examples(20), seed=0).batch(4)
        pipeline = pipeline.workers(2, kind="process", persistent=True)
        list(pipeline)
        pids = [p.pid for p in multiprocessing.active_children()]
        assert len(pids) == 2
"""


def resting(method: str) -> str:
    return RESTING.replace("METHOD", repr(method))


@METHODS
def test_sigkill_of_the_program_ends_them(tmp_path: Path, method: str) -> None:
    rest = """
        say(json.dumps(pids))
        signal.pause()
    """
    with (
        script(tmp_path, resting(method) + rest) as running,
        Watch(json.loads(running.line())) as watch,
    ):
        os.kill(running.pid, signal.SIGKILL)
        assert watch.gone()


@METHODS
def test_they_end_with_the_program(tmp_path: Path, method: str) -> None:
    watched = tmp_path / "watched"
    rest = f"""
        say(json.dumps(pids))
        while not os.path.exists({str(watched)!r}):
            time.sleep(0.01)
    """
    with (
        script(tmp_path, resting(method) + rest) as running,
        Watch(json.loads(running.line())) as watch,
    ):
        watched.touch()
        assert running.finish() == (0, "", "")
        assert watch.gone()


@METHODS
def test_ctrl_c_between_two_epochs_does_not_end_them(tmp_path: Path, method: str) -> None:
    rest = """
        for _ in range(2):
            try:
                os.killpg(0, signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                list(pipeline)
            assert pids == [p.pid for p in multiprocessing.active_children()]
        del pipeline
        say(json.dumps(left()["processes"]))
    """
    assert run(tmp_path, resting(method) + rest) == [[]]


@pytest.mark.parametrize("does", one_in(2, ["pass", "del pipeline"]))
@METHODS
def test_a_forked_child_leaves_them_to_its_parent(tmp_path: Path, method: str, does: str) -> None:
    rest = f"""
        faulthandler.cancel_dump_traceback_later()  # its thread is not there in a child
        child = os.fork()
        if not child:
            {does}
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        list(pipeline)
        assert pids == [p.pid for p in multiprocessing.active_children()]
        say("0")
    """
    assert run(tmp_path, resting(method) + rest) == [0]


STAYING = """
class Scaled(Examples):
    scale = 1

    def __getitem__(self, index):
        return index * self.scale


if __name__ == "__main__":
    multiprocessing.set_start_method(METHOD)
    dataset = Scaled(8)
    pipeline = stoker.from_dataset(dataset).batch(4).workers(2, kind="process", persistent=True)

    def epoch(pipeline=pipeline):
        rows = [int(x) for batch in pipeline for x in batch]
        return rows, sorted(p.pid for p in multiprocessing.active_children())

    first, again = epoch(), epoch()
    assert first == again, (first, again)
    assert len(first[1]) == 2

    flowing = pipeline.repeat()
    iterator, seen = iter(flowing), set()
    for _ in range(9):  # more than four passes
        next(iterator)
        seen |= {p.pid for p in multiprocessing.active_children()} - set(first[1])
    assert len(seen) == 2, seen
    iterator.close()  # left early
    del iterator, flowing

    dataset.scale = 10  # against the word that was given: nobody sees it
    assert epoch() == first
    (killed,) = (p for p in multiprocessing.active_children() if p.pid == first[1][0])
    killed.kill()
    killed.join()
    after = epoch()
    assert after[0] == [10 * x for x in first[0]]
    assert set(after[1]).isdisjoint(first[1])
    del pipeline, epoch.__defaults__
    assert not left()["processes"]

    def new(pipeline=stoker.from_dataset(dataset).batch(4).workers(2, kind="process")):
        return [int(x) for batch in pipeline for x in batch]

    assert new() == after[0]
    assert not left()["processes"]
    dataset.scale = 1
    assert new() == first[0]
    say("0")
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_they_stay_until_one_ends_and_others_are_new_in_each_epoch(
    tmp_path: Path, method: str
) -> None:
    assert run(tmp_path, STAYING.replace("METHOD", repr(method))) == [0]
