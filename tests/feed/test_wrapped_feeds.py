"""Feeds under wrappers: trials, loops that stop at the length, reading ahead, a forked child."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command_line import python

PREP = """
import numpy as np
import stoker


def batches():
    chain = stoker.from_arrays(np.arange(96), seed=0).shuffle()
    return chain.map(abs).cache("4MiB", version="1").batch(8)


def examples():
    return stoker.from_arrays(np.arange(96), seed=0).shuffle()


def chosen():  # how long an epoch is only its end tells
    return examples().filter(lambda number: number % 9).batch(8)
"""
JOB = """
import json
import os
import sys

import numpy as np
import stoker
import prep


def numbers(batches):
    return [np.asarray(batch).tolist() for batch in batches]


if __name__ == "__main__":
    name = sys.argv[1]
    alone = prep.batches()
    whole = [numbers(alone) for _ in range(3)]

    train = stoker.feed(prep.batches, name=name)
    iter(train).close()
    assert numbers(train) == whole[0], "a trial spent an epoch"
    iterator = iter(train)
    assert [np.asarray(next(iterator)).tolist() for _ in range(12)] == whole[1]
    state = train.state_dict()
    assert (state["epoch"], state["step"]) == (2, 0)
    assert (state["loader"][0]["epoch"], state["loader"][0]["number"]) == (2, 0)
    assert numbers(train) == whole[2]
    train.load_state_dict(state)
    assert numbers(train) == whole[2]

    for prepare in (prep.batches, prep.examples, prep.chosen):
        short = stoker.feed(prepare, name=f"{name}-{prepare.__name__}")
        short = (short.batch(8) if prepare is prep.examples else short).steps(5)
        iterator = iter(short)
        numbers(next(iterator) for _ in range(5))
        state = json.loads(json.dumps(short.state_dict()))  # before the loop has ended
        following = numbers(short)
        short.load_state_dict(state)
        assert numbers(short) == following, "an epoch that was left went on"

    ahead = stoker.feed(prep.batches, name=name + "-ahead")
    ahead.acknowledge(0)
    iterator = iter(ahead)
    for _ in range(5):
        next(iterator)
    ahead.acknowledge(3)
    state = json.loads(json.dumps(ahead.state_dict()))
    iterator.close()
    ahead.load_state_dict(state)
    assert numbers(ahead) == whole[0][3:]

    echoed = stoker.feed(prep.examples, name=name + "-echoed").echo().batch(8)
    echoed.acknowledge(0)
    iterator = iter(echoed)
    seen, held = set(), [next(iterator), next(iterator)]
    for _ in range(3):
        seen |= set(held.pop(0).tolist())
        held.append(next(iterator))
        echoed.acknowledge()
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    state = echoed.state_dict()
    iterator.close()
    echoed.load_state_dict(state)
    for batch in echoed:
        seen |= set(batch.tolist())
    assert seen == set(range(96)), "examples were lost"
"""


@pytest.mark.full
def test_a_feed_is_no_other_under_a_wrapper(tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(PREP)
    (tmp_path / "job.py").write_text(JOB)
    done = python("-W", "error", "job.py", f"wrapped-{os.getpid()}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
