"""Caches of pipelines that are shared: they are the feeder's, and go with it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import stoker
from patience import wait_until
from scripts import Watch, script

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "feed"))  # where the fixture `name` finds `playing`

TARGET = """
import os

import numpy as np

import stoker


class Examples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.full(1000, index)


def make():
    made = stoker.from_dataset(Examples(), seed=0).cache("2MiB")
    with open(os.path.join(os.path.dirname(__file__), "folder"), "w") as file:
        file.write(made.chain.stages[0].cache.folder)
    return made.batch(4).workers({workers}, kind={kind!r})


def cached():
    global dataset
    dataset = stoker.cached(Examples(), "2MiB")
    with open(os.path.join(os.path.dirname(__file__), "folder"), "w") as file:
        file.write(dataset.cache_stats().folder)
    return "no pipeline"
"""

JOB = """
    sys.path += [{tests!r}, {tests!r} + "/feed"]
    from playing import feeder_of
    pipeline = stoker.feed({target!r}, name={name!r})
    for _ in range(2):
        assert len(list(pipeline)) == 10
    with open({folder!r} + "/folder") as file:
        say(json.dumps([file.read(), feeder_of({name!r})]))
    while not os.path.exists({folder!r} + "/end"):
        time.sleep(0.01)
"""


def target(folder: Path, workers: int = 1, kind: str = "thread", function: str = "make") -> str:
    file = folder / "prep.py"
    file.write_text(TARGET.format(workers=workers, kind=kind))
    return f"{file}:{function}"


def job(folder: Path, name: str, **how: Any) -> str:
    return JOB.format(target=target(folder, **how), name=name, folder=str(folder), tests=str(TESTS))


@pytest.mark.interrupts
@pytest.mark.parametrize(
    ("how", "workers", "kind"),
    [
        ("SIGINT", 2, "thread"),
        ("SIGTERM", 2, "thread"),
        ("the job ends", 1, "process"),
        ("SIGINT to the feeder", 1, "process"),
        pytest.param("the job ends", 2, "thread", marks=pytest.mark.full),
        pytest.param("SIGINT to the feeder", 2, "thread", marks=pytest.mark.full),
        pytest.param("SIGINT", 1, "process", marks=pytest.mark.full),
        pytest.param("SIGTERM", 1, "process", marks=pytest.mark.full),
    ],
)
def test_the_cache_of_a_feeder_ends_with_it(
    tmp_path: Path, name: str, how: str, workers: int, kind: str
) -> None:
    with script(tmp_path, job(tmp_path, name, workers=workers, kind=kind)) as running:
        folder, feeder = json.loads(running.line())
        assert os.path.isdir(folder)
        with Watch([feeder]) as watch:
            if how == "the job ends":
                (tmp_path / "end").touch()
            else:
                sign, _, who = how.partition(" to the ")
                os.kill(feeder if who else running.pid, signal.Signals[sign])
            assert watch.gone()
        assert not os.path.exists(folder)


def test_the_cache_of_a_feeder_that_is_terminated_is_removed(tmp_path: Path, name: str) -> None:
    with script(tmp_path, job(tmp_path, name)) as running:
        folder, feeder = json.loads(running.line())
        with Watch([feeder]) as watch:
            os.kill(feeder, signal.SIGTERM)
            assert watch.gone()
        assert not os.path.exists(folder)


def test_what_a_feeder_cached_that_cannot_serve_is_removed(tmp_path: Path, name: str) -> None:
    with pytest.raises(stoker.FeedError, match="not a stoker pipeline"):
        stoker.feed(target(tmp_path, function="cached"), name=name)
    folder = (tmp_path / "folder").read_text()
    wait_until(lambda: not os.path.exists(folder))
