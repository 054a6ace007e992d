"""A stage of a user's own makes outputs of some inputs, by their numbers, and resumes exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stoker_lmdb import Every

import stoker
from stoker.testing import check_resume
from strategies import opened, signed, stream, through_json


class Windows(stoker.WindowStage):
    """Stacks examples ``step`` apart, and writes into them before."""

    def __init__(self, size: int, stride: int = 1, step: int = 1) -> None:
        self.size, self.stride, self.step = size, stride, step

    def inputs(self, output: int) -> range:
        first = output * self.stride
        return range(first, first + self.size * self.step, self.step)

    def make(self, examples: list[Any]) -> Any:
        window = np.stack(examples)
        for example in examples:  # its own: no other window has them
            example[...] = -1
        return window


def is_kept(x: Any) -> bool:
    return int(x[0]) % 7 != 3


def rows(n: int) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(2 * n).reshape(n, 2), seed=3)


def build(stage: stoker.Stage, workers: int = 0, *, drops: bool = False, echo: int = 1) -> Any:
    pipeline = rows(40).shuffle()
    if drops:
        pipeline = pipeline.filter(is_kept)
    return pipeline.apply(stage).echo(echo, pool=8).batch(3).workers(workers)


STAGES: dict[str, Callable[[], stoker.WindowStage]] = {
    "sliding": lambda: Windows(4),
    "strides": lambda: Windows(4, 3),
    "gaps": lambda: Windows(2, 5),
    "apart": lambda: Windows(3, 2, 4),
    "every": lambda: Every(3),
}


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", STAGES)
def test_outputs_are_of_the_inputs_that_it_names(kind: str, drops: bool) -> None:
    stage = STAGES[kind]()
    whole = rows(40).shuffle()
    every = [*(whole.filter(is_kept) if drops else whole)]
    expected = []
    for number in itertools.count():
        inputs = stage.inputs(number)
        if inputs[-1] >= len(every):
            break
        expected.append(stage.make([every[i].copy() for i in inputs]))
    for workers in (0, 2):
        pipeline = build(stage, workers, drops=drops)
        assert np.array_equal(np.concatenate([*pipeline]), np.stack(expected))
        if not drops:
            assert len(pipeline) == -(-len(expected) // 3)


@pytest.mark.parametrize("echo", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", STAGES)
def test_it_resumes_at_every_batch(kind: str, drops: bool, echo: int) -> None:
    check_resume(lambda: build(STAGES[kind](), drops=drops, echo=echo))


def test_with_workers_it_resumes_too() -> None:
    check_resume(lambda: build(STAGES["apart"](), 2, drops=True, echo=2), every=3)


def test_processes_make_the_same() -> None:
    expected = stream(build(Windows(4, 3)))
    assert stream(build(Windows(4, 3)).workers(2, kind="process")) == expected


def test_windows_of_windows_resume() -> None:
    check_resume(lambda: rows(30).apply(Windows(3)).apply(Every(2)).apply(Windows(2, 2)).batch(2))


def test_ranks_with_equally_many_examples_take_equally_many_steps() -> None:
    ranks = [
        rows(40).shuffle().shard(rank=rank, world_size=2).apply(Windows(4, 2)).batch(3)
        for rank in (0, 1)
    ]
    assert [len(rank) for rank in ranks] == [len([*rank]) for rank in ranks] == [3, 3]
    with iter(ranks[0]) as batches:
        next(batches)
        state = through_json(ranks[0].state_dict())
    ranks[1].load_state_dict(state)  # one state serves both
    assert len([*ranks[1]]) == 2


def test_other_windows_and_damaged_states_are_refused() -> None:
    pipeline = build(Windows(4, 2))
    with iter(pipeline) as batches:
        next(batches)
        state = pipeline.state_dict()
    fields = opened(state)
    (node,) = fields["parts"]
    assert node == {"kind": "window", "input": 6, "output": 3}
    with pytest.raises(stoker.StateError, match="another pipeline"):
        build(Windows(4, 3)).load_state_dict(state)
    for changes in ({"input": 5}, {"output": 2}, {"input": 60, "output": 30}, {"output": -1}):
        damaged = signed({**fields, "parts": [{**node, **changes}]})
        with pytest.raises(stoker.StateError, match="damaged"):
            build(Windows(4, 2)).load_state_dict(damaged)
    late = signed({**fields, "parts": [{**node, "input": 8, "output": 4}]})
    pipeline = build(Windows(4, 2))
    pipeline.load_state_dict(late)
    with pytest.raises(stoker.StateError, match="goes on too late"):
        iter(pipeline)


class Wrong(stoker.WindowStage):
    def __init__(self, *inputs: Any) -> None:
        self.ranges = inputs

    def inputs(self, output: int) -> Any:
        return self.ranges[min(output, len(self.ranges) - 1)]

    def make(self, examples: list[Any]) -> Any:
        return examples[0]


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ([[0, 1]], TypeError, r"inputs\(0\) of Wrong returned \[0, 1\]: return a range"),
        ([range(0)], TypeError, r"returned range\(0, 0\): return a range .* one at least"),
        ([range(3, 0, -1)], TypeError, "ascending"),
        ([range(-1, 2)], ValueError, r"inputs\(0\) of Wrong are range\(-1, 2\), behind"),
        ([range(2), range(2)], ValueError, "each begins, and ends, behind the one before it"),
    ],
)
def test_wrong_inputs_are_refused_where_it_is_applied(
    inputs: list[Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        rows(9).apply(Wrong(*inputs))


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_name_the_stage(workers: int) -> None:
    back = rows(9).filter(is_kept).apply(Wrong(range(1), range(1, 3), range(4), range(5, 7)))
    with pytest.raises(stoker.StageError, match=r"Wrong: window.*each begins, and ends, behind"):
        list(back.batch(2).workers(workers))
    made = stoker.from_dataset(["a", "bc"], seed=0).apply(Windows(2)).workers(workers)
    with pytest.raises(stoker.StageError, match=r"Windows: map\(make\)"):
        list(made)


def test_it_stands_before_what_repeats_and_combines() -> None:
    for before in (rows(9).batch(2), rows(9).echo(2, pool=4)):
        with pytest.raises(stoker.errors.CombinationError, match=r"\.every\(2\) cannot follow"):
            before.apply(Every(2))
    with pytest.raises(stoker.errors.CombinationError, match=r"\.shuffle\(\) cannot follow every"):
        rows(9).apply(Every(2)).shuffle()


def test_its_line_shows_the_first_windows() -> None:
    text = str(rows(9).apply(Windows(4, 2)))
    assert ".Windows: window  of the examples range(0, 4), range(2, 6) and so on" in text


def test_what_random_maps_draw_belongs_to_the_last_example() -> None:
    def noisy(x: Any, rng: np.random.Generator) -> float:
        return rng.random()

    drawn = stream(rows(9).random_map(noisy).batch(1))
    assert stream(rows(9).apply(Windows(3)).random_map(noisy).batch(1)) == drawn[2:]
