"""``train.last``: which use each example is; and what the losses of copies tell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker

N = 64


def batches_of(size: int, examples: int) -> Any:
    numbers: Any = torch.arange(examples)
    return torch.utils.data.DataLoader(numbers, size)


def pipelines() -> dict[str, Any]:
    def begin() -> Any:
        return stoker.from_arrays(np.arange(N), seed=3).shuffle()

    return {
        "none": begin().batch(8),
        "fixed": begin().echo(3).batch(8),
        "auto": begin().echo().batch(8),
        "fraction": begin().echo(2.5, pool=30).batch(4),
        "mapped": begin().echo(2).map(lambda x: x).batch(8),
        "filtered": begin().echo(2).filter(lambda x: x % 3 > 0).batch(8),
        "processes": begin().echo(3).map(abs).batch(8).workers(1, kind="process"),
        "batches": begin().batch(8).echo(3, pool=4),
        "batches, changed": begin().batch(8).echo("auto").random_map(lambda b, rng: b),
        "loader": stoker.echo(batches_of(8, N), 3),
        "examples": begin().echo(3),
        "on a device": begin().echo(3).batch(8).to("cpu"),
        "batches on a device": begin().batch(8).to("cpu").echo(3),
        "nested": begin().echo(2).batch(8).echo(2, pool=4),
    }


@pytest.mark.parametrize("name", pipelines())
def test_each_use_has_its_number_and_its_distance(name: str) -> None:
    train = pipelines()[name]
    assert len(train.last.number) == 0
    number: dict[Any, int] = {}
    at: dict[Any, int] = {}
    step, carries = 0, name == "auto"
    for _ in range(1 if name == "batches, changed" else 2):  # then batches of two epochs overlap
        seen: set[Any] = set()
        if not carries:
            number.clear()
            at.clear()
        for batch in train:
            step += 1
            values = np.atleast_1d(np.asarray(batch)).tolist()
            last = train.last
            assert last.number.dtype == last.age_steps.dtype == np.int64
            if name == "nested":
                values = [tuple(values)] * len(values)
                again = number.get(values[0], 0) + 1
                assert last.number.tolist() == [again] * len(values)
                number[values[0]] = again
                continue
            for row, value in enumerate(values):
                number[value] = number.get(value, 0) + 1
                if last.number[row] == 1 and value not in seen:  # anew, in a new epoch
                    seen.add(value)
                    number[value] = 1
                    at.pop(value, None)
                assert last.number[row] == number[value]
                if name != "filtered":  # there a batch is of several draws
                    assert last.age_steps[row] == (step - at[value] if value in at else 0)
                at[value] = step
            assert len(last.number) == len(values)
            if name != "filtered":  # there what was left out counts as read
                assert train.clock.fresh_examples % N == len(seen) % N


def test_where_examples_are_left_out_the_clock_goes_on_evenly() -> None:
    train = pipelines()["filtered"]
    before, seen = 0, set()
    for batch in train:
        seen |= set(batch.tolist())
        assert before <= train.clock.fresh_examples
        before = train.clock.fresh_examples
        assert before <= N
    assert before == N
    assert len(seen) == 42


@given(stop=st.integers(1, 20), factor=st.sampled_from([2, 3, "auto"]), data=st.data())
@settings(deadline=None)
def test_behind_a_resume_numbers_are_the_same_and_ages_are_true_or_unknown(
    stop: int, factor: Any, data: st.DataObject
) -> None:
    def build() -> Any:
        return stoker.from_arrays(np.arange(N), seed=3).shuffle().echo(factor, pool=32).batch(4)

    train, seen, saved = build(), [], None
    with iter(train) as batches:
        for step, _ in enumerate(batches, 1):
            last = train.last
            seen.append((last.number.tolist(), last.age_steps.tolist(), train.clock))
            if step == stop:
                saved = train.state_dict()
    if saved is None:
        return
    record = train.record() if factor == "auto" else None
    again = build()
    if record is not None:
        again = stoker.from_arrays(np.arange(N)).shuffle().echo(replay=record).batch(4)
    again.load_state_dict(saved)
    for (numbers, ages, clock), _ in zip(seen[stop:], again, strict=True):
        last = again.last
        assert again.clock == clock
        assert last.number.tolist() == numbers
        for age, known in zip(ages, last.age_steps.tolist(), strict=True):
            assert known in ((age,) if age == 0 or factor == "auto" else (age, -1))


def trained(train: Any, loss_of: Any, epochs: int = 1, **how: Any) -> stoker.CopyValue:
    copies = stoker.value_of_copies(train)
    step = 0
    for _ in range(epochs):
        for _ in train:
            copies.observe(loss_of(train.last.number, step))
            step += 1
    return copies


def test_the_gap_is_that_between_first_and_later_uses() -> None:
    train = stoker.from_arrays(np.arange(4_000), seed=0).shuffle().echo(3).batch(16)
    noise = np.random.default_rng(0)
    losses = {1: 1.0, 2: 0.8, 3: 0.5}

    def loss_of(number: Any, step: int) -> Any:
        drift = 2 * math.exp(-step / 300)  # losses fall while it trains: no gap
        return np.array([losses[n] for n in number]) + drift + noise.normal(0, 0.05, len(number))

    copies = trained(train, loss_of, epochs=2)
    found = copies.gaps()
    assert [(gap.epoch, gap.use) for gap in found] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    for gap in found:
        assert gap.low < 1.0 - losses[gap.use] < gap.high
        assert gap.high - gap.low < 0.05
        assert gap.steps > 400
    assert "use 3: " in str(copies)
    assert len(str(copies).splitlines()) == 4


@pytest.mark.parametrize("kind", ["mean", "each", "tensor"])
def test_of_whole_batches_the_steps_around_are_compared(kind: str) -> None:
    loader = batches_of(4, 1_600)
    train = stoker.echo(loader, 3, seed=0)

    def loss_of(number: Any, step: int) -> Any:
        loss = 10 - step / 100 - 0.3 * (number[0] > 1)  # falls all the time: interpolated away
        if kind == "mean":
            return loss
        return np.full(4, loss) if kind == "each" else torch.full((4,), loss, requires_grad=True)

    for gap in trained(train, loss_of).gaps():
        assert gap.gap == pytest.approx(0.3, abs=0.01)


def test_too_little_is_said_to_be() -> None:
    train = stoker.from_arrays(np.arange(64), seed=0).shuffle().echo(2).batch(16)
    copies = stoker.value_of_copies(train)
    assert copies.gaps() == []
    assert str(copies) == "no copies have been compared yet"
    for _ in train:
        copies.observe(np.ones(16))
    assert all(math.isinf(gap.high) for gap in copies.gaps())
    assert "too few" in str(copies)


def test_losses_that_do_not_fit_are_refused() -> None:
    train = stoker.from_arrays(np.arange(64), seed=0).shuffle().echo(2).batch(16)
    copies = stoker.value_of_copies(train)
    batches = iter(train)
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match="reduction="):
        copies.observe(1.0)
    with pytest.raises(ValueError, match="each of the 16 examples"):
        copies.observe(np.ones(4))
    with pytest.raises(TypeError, match=r"takes a stoker.Pipeline, not list"):
        stoker.value_of_copies([])  # type: ignore[arg-type]


def test_losses_that_are_not_finite_are_left_out() -> None:
    train = stoker.from_arrays(np.arange(640), seed=0).shuffle().echo(2).batch(16)
    copies = trained(train, lambda number, step: np.where(step % 7, 2.0 / number, np.nan))
    assert [gap.gap for gap in copies.gaps()] == [pytest.approx(1.0)]
