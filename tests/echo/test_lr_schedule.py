"""Schedulers that follow fresh data: the same at the same share of it, whatever was echoed."""

from __future__ import annotations

import copy
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import stoker
from strategies import few, small_pools_allowed

EPOCHS, EXAMPLES, BATCH = 3, 80, 8
STEPS = EPOCHS * EXAMPLES // BATCH


def optimizer_of() -> Any:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def pipeline(factor: Any = 1) -> Any:
    made = stoker.from_arrays(np.arange(EXAMPLES), seed=0).shuffle()
    made = made if factor == 1 else made.echo(factor)
    return made.batch(BATCH)


def batches_of(size: int, examples: int) -> Any:
    numbers: Any = torch.arange(examples)
    return torch.utils.data.DataLoader(numbers, size)


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=STEPS + 1),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [STEPS // 3, STEPS // 2]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.PolynomialLR(o, STEPS - 5)],
        [5],
    ),
    "by function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


def trained(train: Any, schedule: Any, optimizer: Any) -> None:
    for _ in train:
        optimizer.step()
        schedule.step()


def rates_without_echo(make: Any) -> list[float]:
    optimizer = optimizer_of()
    schedule = make(optimizer)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("factor", [1, 2, 3.5, "auto"])
def test_the_rate_is_that_of_training_without_echoing(name: str, factor: Any) -> None:
    expected = rates_without_echo(SCHEDULERS[name])
    optimizer, train = optimizer_of(), pipeline(factor)
    schedule = stoker.lr_schedule(SCHEDULERS[name](optimizer), train)
    for epoch in range(EPOCHS):
        for _ in train:
            optimizer.step()
            schedule.step()
            fresh = (epoch + train.progress if train.epoch == epoch else train.epoch) * STEPS
            assert schedule.get_last_lr()[0] == expected[int(fresh / EPOCHS + 1e-6)]
        assert schedule.get_last_lr()[0] == expected[(epoch + 1) * STEPS // EPOCHS]
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]


class Counting:
    """A scheduler that counts its steps."""

    optimizer = None

    def __init__(self) -> None:
        self.taken = 0

    def step(self) -> None:
        self.taken += 1

    def get_last_lr(self) -> list[float]:
        return []


@st.composite
def chains_of_known_length(draw: st.DrawFn) -> Any:
    made: Any = stoker.from_arrays(np.arange(draw(st.integers(1, 90))), seed=0)
    made = made.shuffle() if draw(st.booleans()) else made
    made = made.take(draw(st.integers(1, 60))) if draw(st.booleans()) else made
    if draw(st.booleans()):
        made = made.shard(
            rank=draw(st.integers(0, 2)),
            world_size=3,
            remainder=draw(st.sampled_from(["drop", "uneven"])),
        )
    factors = st.sampled_from([Fraction(1), Fraction(13, 10), Fraction(2), Fraction(7, 2)])
    pools = st.sampled_from([8, 64])
    echo = draw(st.sampled_from(["", "before", "behind"]))
    made = made.echo(draw(factors), pool=draw(pools)) if echo == "before" else made
    made = made.batch(draw(st.integers(1, 8)), drop_last=draw(st.booleans()))
    made = made.echo(draw(factors), pool=draw(pools)) if echo == "behind" else made
    made = made.to_torch() if draw(st.booleans()) else made
    return made.workers(0)


@given(chains_of_known_length(), st.integers(1, 3))
def test_it_ends_with_the_epoch_of_any_chain_of_known_length(train: Any, epochs: int) -> None:
    """Whatever a last batch leaves out: neither a step early nor late, and level without echoes."""
    each = train.chain.count_without_echo()
    assume(each)
    scheduler = Counting()
    schedule = stoker.lr_schedule(scheduler, train)
    with small_pools_allowed():
        for epoch in range(epochs):
            for number, _ in enumerate(train, 1):
                schedule.step()
                assert scheduler.taken <= (epoch + 1) * each
                if train.chain.echo is None:
                    assert scheduler.taken == epoch * each + number
            assert scheduler.taken == (epoch + 1) * each


def test_a_loader_counts_its_batches() -> None:
    loader = batches_of(8, 30)  # the last one is short
    train, optimizer = stoker.echo(loader, 3), optimizer_of()
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    schedule = stoker.lr_schedule(cosine, train)
    for _ in range(2):
        trained(train, schedule, optimizer)
    assert cosine.last_epoch == 2 * len(loader)
    assert schedule.get_last_lr()[0] == pytest.approx(0)


def test_a_resume_goes_on_with_the_rate() -> None:
    optimizer, train = optimizer_of(), pipeline(2)
    schedule = stoker.lr_schedule(SCHEDULERS["cosine"](optimizer), train)
    expected: list[Any] = []
    saved: Any = None
    for epoch in range(EPOCHS):
        for number, _ in enumerate(train):
            optimizer.step()
            schedule.step()
            if (epoch, number) == (1, 6):
                saved = train.state_dict(), schedule.state_dict(), optimizer.state_dict()
                saved = copy.deepcopy(saved)
                expected.clear()
            else:
                expected.append(schedule.get_last_lr())
    assert saved is not None
    for pipeline_first in (False, True):
        optimizer, train, found = optimizer_of(), pipeline(2), []
        schedule = stoker.lr_schedule(SCHEDULERS["cosine"](optimizer), train)
        if pipeline_first:
            train.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[2])
        schedule.load_state_dict(saved[1])
        train.load_state_dict(saved[0])
        for _ in range(train.epoch, EPOCHS):
            for _ in train:
                optimizer.step()
                schedule.step()
                found.append(schedule.get_last_lr())
        assert found == expected


def test_the_end_of_its_length_is_told_once() -> None:
    optimizer, train = optimizer_of(), pipeline(2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EXAMPLES // BATCH)
    schedule = stoker.lr_schedule(cosine, train)
    trained(train, schedule, optimizer)
    with pytest.warns(UserWarning, match="made for 10 steps.* give it 10 for each epoch"):
        trained(train, schedule, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(train, schedule, optimizer)


def test_a_warm_up_ends_without_a_word() -> None:
    optimizer, train = optimizer_of(), pipeline(2)
    schedule = stoker.lr_schedule(lr_scheduler.LinearLR(optimizer, total_iters=5), train)
    trained(train, schedule, optimizer)  # warnings are errors
    assert schedule.get_last_lr() == [pytest.approx(1.0)]


def test_steps_and_what_is_left_out() -> None:
    optimizer = optimizer_of()
    train = pipeline("auto").steps(6)
    schedule = stoker.lr_schedule(lr_scheduler.CosineAnnealingLR(optimizer, T_max=12), train)
    for _ in range(2):
        trained(train, schedule, optimizer)
    assert schedule.scheduler.last_epoch == 12

    train = stoker.from_arrays(np.arange(80), seed=0).filter(lambda x: x % 2 == 1).echo(2).batch(8)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    with pytest.raises(TypeError, match="steps_per_epoch="):
        stoker.lr_schedule(cosine, train)
    schedule = stoker.lr_schedule(cosine, train, steps_per_epoch=5)
    trained(train, schedule, optimizer)
    assert cosine.last_epoch == 5


@few(5)
@given(
    examples=st.integers(10, 200),
    rest=st.integers(2, 5),
    batch=st.integers(1, 9),
    drop_last=st.booleans(),
    shuffled=st.booleans(),
    workers=st.sampled_from([0, 2]),
)
def test_it_ends_with_the_epoch_whatever_filters_leave_out(
    examples: int, rest: int, batch: int, drop_last: bool, shuffled: bool, workers: int
) -> None:
    made = stoker.from_arrays(np.arange(examples), seed=0)
    made = made.shuffle() if shuffled else made
    train = made.filter(lambda x: x % rest == 1).batch(batch, drop_last=drop_last).workers(workers)
    left = len(range(1, examples, rest))
    each = left // batch if drop_last else -(-left // batch)
    assume(each)
    scheduler = Counting()
    schedule = stoker.lr_schedule(scheduler, train, steps_per_epoch=each)
    for epoch in range(3):
        for _ in train:
            schedule.step()
        assert scheduler.taken == (epoch + 1) * each


def test_what_is_no_schedule_is_refused() -> None:
    optimizer, train = optimizer_of(), pipeline(2)
    with pytest.raises(TypeError, match="T_max=epochs"):
        stoker.lr_schedule(lr_scheduler.CosineAnnealingLR, train)
    with pytest.raises(TypeError, match="follows a metric"):
        stoker.lr_schedule(lr_scheduler.ReduceLROnPlateau(optimizer), train)
    cosine = SCHEDULERS["cosine"](optimizer)
    with pytest.raises(TypeError, match=r"takes a stoker.Pipeline, not list"):
        stoker.lr_schedule(cosine, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whole number from 1"):
        stoker.lr_schedule(cosine, train, steps_per_epoch=0)
