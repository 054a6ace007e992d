"""Worker processes by every start method: the stream is that of one process alone.

Which method is the default depends on Python and on the platform: fork on Linux before 3.14,
forkserver from then on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import run
from strategies import shortened

SCRIPT = """
import logging


def augment(x, rng):
    return x + rng.random()


def is_third(example):
    return example["id"] % 3 == 0


def checked(example):
    if example["id"] % 11 == 5:
        raise ValueError("a bad one")
    return example


def stacked(examples):
    return {"x": np.stack([example["x"] for example in examples]) + len(examples)}


def halved(batch, rng):
    return {"x": batch["x"] / 2 + rng.random()}


def data(**options):
    return stoker.from_dataset(Examples(50), seed=3, **options).shuffle()


CHAINS = {
    "echo": lambda: data().echo(2).random_map(augment, on="x").batch(8),
    "survivors": lambda: data(max_errors=9).map(checked).cache("4MiB").filter(is_third).batch(4),
    "whole batches": lambda: data().batch(8, collate=stacked).random_map(halved),
    "columns": lambda: stoker.from_arrays(np.arange(900.0).reshape(90, 10), seed=1)
    .shuffle().random_map(augment).batch(8),
}


def sums(batches):
    return [float(np.sum(b["x"] if isinstance(b, dict) else b)) for b in batches]


def begun(pipeline):
    # Two batches, and the state behind them.
    with iter(pipeline) as batches:
        return sums(next(batches) for _ in range(2)), json.loads(json.dumps(pipeline.state_dict()))


def rest(pipeline, state):
    pipeline.load_state_dict(state)
    return sums(pipeline)


if __name__ == "__main__":
    if METHOD:
        multiprocessing.set_start_method(METHOD)
    warnings.simplefilter("ignore", UserWarning)  # small pools
    logging.getLogger("stoker").setLevel(logging.ERROR)  # skips
    for name, chain in CHAINS.items():
        alone = sums(chain().workers(0))
        first, state = begun(chain().workers(2, kind="process"))
        tail = rest(chain().workers(1, kind="process"), state)
        assert first + tail == alone, (name, first, tail, alone)
        say(json.dumps(len(alone)))
    say(json.dumps(multiprocessing.get_start_method()))
    say(json.dumps(left()["processes"]))
"""


@pytest.mark.parametrize("method", shortened(["fork", "forkserver", "spawn", ""], 1))
def test_the_stream_does_not_depend_on_the_start_method(tmp_path: Path, method: str) -> None:
    *counts, used, remains = run(tmp_path, SCRIPT.replace("METHOD", repr(method)))
    assert len(counts) == 4
    assert all(counts)
    assert used == method or not method
    assert remains == []
