"""Trainings for equal time: their schedules, stacks of networks, and what is made of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stoker
from experiments.arms import epoch_after_epoch
from experiments.equal_time import data, page, plan, rows, sentences, stacks, tables, tasks
from experiments.equal_time.clock import ExactClock
from experiments.equal_time.features import write_features
from experiments.equal_time.plan import Settings
from experiments.equal_time.schedules import NONE, EchoArm, schedule_of
from experiments.equal_time.training import train
from stoker.schedule.echo_record import Decisions, EchoRecord, encode
from stoker.schedule.pools.adaptive import pack
from strategies import few

BATCH = 32


@pytest.mark.parametrize(
    "arm",
    [
        EchoArm("before", 8, (8,)),
        EchoArm("before", 3, (4,)),
        EchoArm("after", 4, (4,)),
        EchoArm("batch", 4, (4,)),
        NONE,
    ],
    ids=lambda arm: arm.name,
)
def test_a_schedule_is_the_stream_of_the_pipeline(arm: EchoArm) -> None:
    """Over three epochs, in which examples stay in the pool, step by step."""
    examples, seed, cap = 205, 3, max(arm.caps, default=1)
    found = schedule_of(arm, examples, BATCH, 3 * examples // BATCH, seed)

    def pipeline(**echo: Any) -> stoker.Pipeline:
        p = stoker.from_dataset(range(examples), seed=seed).shuffle()
        if arm.place in ("before", "after"):
            p = p.echo("auto", **echo)
        p = p.batch(BATCH, drop_last=True)
        return p.echo("auto", **echo) if arm.place == "batch" else p

    if arm == NONE:
        fed = pipeline()
    else:
        group = 1 if arm.place == "batch" else BATCH
        clock = ExactClock(
            examples,
            BATCH,
            ratio=arm.ratio,
            max_factor=cap,
            pool_batches=cap,
            of_examples=arm.place != "batch",
            seed=seed,
        )
        for _ in zip(found.items, clock.steps(), strict=False):
            pass
        epochs = {
            epoch: Decisions(epoch, 0, codes, None if carried is None else pack(carried))
            for epoch, codes in clock.codes.items()
            for carried in [clock.carried[epoch]]
        }
        empty = pipeline(pool=cap * group, max_factor=cap)
        made = empty.record()
        echo = EchoRecord(cap * group, epochs)
        fed = empty.replay(encode(made["seed"], made["pipeline"], {0: echo}))
    with closing(epoch_after_epoch(fed)) as batches:
        for step, items in enumerate(found.items):
            assert sorted(np.asarray(next(batches)).tolist()) == sorted(items.tolist()), step
    assert fed.clock.fresh_examples == found.fresh


@given(
    place=st.sampled_from(["before", "batch"]),
    cap=st.sampled_from([1, 2, 4, 8]),
    ratio=st.sampled_from([0.5, 1.0, 1.7, 2.0, 4.0, 9.0]),
    seed=st.integers(0, 99),
)
@few(20)
def test_no_example_is_used_before_the_exact_clock_has_it(
    place: str, cap: int, ratio: float, seed: int
) -> None:
    clock = ExactClock(
        640,
        BATCH,
        ratio=ratio,
        max_factor=cap,
        pool_batches=max(4, cap),
        of_examples=place == "before" and cap > 1,
        seed=seed,
    )
    fresh, ended = 0, 0.0
    for step in islice(clock.steps(), 60):
        fresh += step.fresh
        assert clock.supply.now >= ended + 1
        ended = clock.supply.now
        assert ended >= fresh / BATCH * ratio + 1 - 1e-9
        if cap == 1 and ratio >= 1:
            assert ended == pytest.approx(fresh / BATCH * ratio + 1)


@pytest.mark.parametrize(
    "arm",
    [
        NONE,
        *(EchoArm("before", r, (c,)) for r, c in ((2, 4), (4, 4), (8, 4), (8, 8), (8, 16))),
        EchoArm("after", 4, (4,)),
        EchoArm("batch", 8, (8,)),
        EchoArm("together", 4, (4,)),
        EchoArm("before", 8, (8, 4, 2)),
    ],
    ids=lambda arm: arm.name,
)
def test_an_arm_spends_the_same_fresh_examples_in_the_same_time(arm: EchoArm) -> None:
    length = 100
    found = schedule_of(arm, 4_096, BATCH, length, 0)
    assert length * BATCH <= found.fresh <= (length + 1) * BATCH
    assert found.waits <= 1.05 * length * (arm.ratio or 1.0) + 2 * arm.ratio
    assert found.progress[-1] == 1.0
    assert (np.diff(found.progress) >= 0).all()
    assert found.factor <= max(arm.caps, default=1) + 0.01
    assert found.uses.max() < max(arm.caps, default=1)
    assert (found.items >= 0).all()
    assert found.items.max() < 4_096
    if arm.place not in ("together",):
        assert all(len(set(step)) == BATCH for step in found.items.tolist())


def test_augmentation_is_drawn_anew_for_each_use_only_before_it() -> None:
    for place, anew in (("before", True), ("after", False), ("batch", False), ("together", True)):
        found = schedule_of(EchoArm(place, 4, (4,)), 4_096, BATCH, 40, 0)
        by_item: dict[int, set[int]] = {}
        for item, dice in zip(
            found.items.ravel().tolist(), found.dice.ravel().tolist(), strict=True
        ):
            by_item.setdefault(item, set()).add(dice)
        assert (max(map(len, by_item.values())) > 1) == anew, place


def test_caps_of_parts_hold_in_their_parts() -> None:
    found = schedule_of(EchoArm("before", 8, (8, 2)), 4_096, BATCH, 80, 0)
    half = int(np.searchsorted(found.progress, 0.5)) + 1
    assert found.uses[:half].max() == 7
    assert found.uses[half:].max() == 1
    with pytest.raises(ValueError, match="one epoch"):
        schedule_of(EchoArm("before", 8, (8, 2)), 64, BATCH, 80, 0)
    with pytest.raises(ValueError, match="is R"):
        schedule_of(EchoArm("together", 3, (4,)), 64, BATCH, 80, 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks gain nothing by more, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed, found = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("data")
    data.pack_made_up(packed)
    data.unpack(packed, found)
    write_features(found, "cpu", steps=2)
    return found


@pytest.mark.full
def test_a_stack_learns_as_its_networks_do_alone(folder: Path) -> None:
    """Against torch's own layers and optimizer, over three steps, with two rates."""
    task = tasks.Fashion(folder, "cpu", None, True)
    weights = stacks.begin(task.shapes, [5], 2, "cpu")
    normals, optimizer = task.normals(2), task.optimizer(weights)
    alone = []
    for rate in (0.05, 0.1):
        network = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 10),
        )  # fmt: skip
        of = stacks.named(task.shapes, weights)
        values = [value[0] for value in of.values()]
        with torch.no_grad():
            for parameter, value in zip(network.parameters(), values, strict=True):
                parameter.copy_(value.view(parameter.shape))
        sgd = torch.optim.SGD(
            network.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        alone.append((network, sgd))
    rates = torch.tensor([[0.05], [0.1]])
    for step in range(3):
        items = torch.arange(step * 8, step * 8 + 8)[None]
        x, y = task.batch("train", items, torch.arange(8)[None] * 7_919)
        spread = x.repeat_interleave(2, dim=0), y.repeat_interleave(2, dim=0)
        weights.requires_grad_(True)
        losses = task.losses(weights, spread, normals, True).loss
        (gradient,) = torch.autograd.grad(losses.mean(1).sum(), weights)
        weights = weights.detach()
        optimizer.step(weights, gradient, rates)
        for number, (network, sgd) in enumerate(alone):
            loss = nn.functional.cross_entropy(network(x[0].transpose(0, 1)), y[0])
            ours = float(losses[number].detach().mean())
            assert float(loss.detach()) == pytest.approx(ours, rel=1e-4)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    tested, _ = task.score(weights, normals, "test")
    held = torch.arange(128)
    x, y = task.batch("test", held, None)
    for number, (network, _) in enumerate(alone):
        loss = nn.functional.cross_entropy(network.eval()(x.transpose(0, 1)), y)
        assert tested[number] == pytest.approx(float(loss.detach()), rel=1e-3)


@pytest.mark.full
def test_adam_is_that_of_torch() -> None:
    begun = torch.randn(2, 30)
    weights, ours = begun.clone(), stacks.Adam(begun, decay=0.01)
    theirs = [begun[n].clone().requires_grad_() for n in range(2)]
    adams = [
        torch.optim.AdamW([each], lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        for each, rate in zip(theirs, (0.01, 0.1), strict=True)
    ]
    for _ in range(4):
        gradient = torch.randn(2, 30)
        ours.step(weights, gradient, torch.tensor([[0.01], [0.1]]))
        for n, adam in enumerate(adams):
            theirs[n].grad = gradient[n]
            adam.step()
            torch.testing.assert_close(weights[n], theirs[n].detach())


@pytest.mark.full
@pytest.mark.parametrize("task", tasks.TASKS, ids=lambda task: task.name)
def test_every_task_learns(folder: Path, task: type[tasks.Task]) -> None:
    """With a rate, and not without."""
    made = task(folder, "cpu", 64, True)
    schedules = [schedule_of(EchoArm("before", 2, (2,)), made.examples, made.batch_size, 8, 0)]
    found = train(made, [0], schedules, [Settings(0.0, 0.2), Settings(made.rates[0], 0.2)])
    (losses,) = found["by_use"]
    firsts = [[uses[0] for uses in bins if uses[0] is not None] for bins in losses]
    assert firsts[1][-1] < firsts[0][-1]


@pytest.mark.full
@pytest.mark.parametrize(
    "task", [tasks.Fashion, tasks.Digits, tasks.Words], ids=lambda task: task.name
)
def test_trainings_of_a_stack_are_what_each_is_alone(folder: Path, task: type[tasks.Task]) -> None:
    """With another rate beside it, and with a seed whose training is longer."""
    made = task(folder, "cpu", 4 * task.batch_size, True)
    settings = [Settings(rate, 0.2) for rate in (made.rates[0], made.rates[-1])]
    schedules = [
        schedule_of(EchoArm("before", 2, (2,)), made.examples, made.batch_size, length, seed)
        for seed, length in enumerate((1, 3))
    ]
    together = train(made, [0, 1], schedules, settings)
    assert together["steps"][0] < together["steps"][1]
    for seed, place in ((0, 0), (0, 1), (1, 1)):
        alone = train(made, [seed], [schedules[seed]], [settings[place]])
        for part in ("validation", "test", "by_use"):
            np.testing.assert_allclose(
                np.array(alone[part][0][0], float),
                np.array(together[part][seed][place], float),
                atol=2e-4,
                err_msg=part,
            )


def row(
    length: int, arm: EchoArm, losses: list[float], examples: int | None = None, lost: float = 0.25
) -> dict[str, Any]:
    """A row of two settings, of which validation chooses the second."""
    seeds = plan.seeds_of()
    cell = plan.Cell("fashion", length, arm, examples, examples is None, is_short=True)
    by_use = [[1.0, 0.9, 0.8, 1 - lost / 2], [1.0, 0.9, 0.8, 1 - lost], [None] * 4]
    return rows.row_of(
        cell,
        seeds,
        {
            "validation": [[0.9, 0.1]] * len(seeds),
            "test": [[9.0, loss] for loss in [*losses, 5.0, 5.0]],
            "test_metric": [[0.0, 1 - loss] for loss in [*losses, 5.0, 5.0]],
            "steps": [length * 4] * len(seeds),
            "fresh": [length * 32] * len(seeds),
            "waits": [length * (arm.ratio or 1.0)] * len(seeds),
            "by_use": [[by_use, by_use]] * len(seeds),
        },
    )


def test_arms_are_held_to_training_without_echoing_pair_by_pair() -> None:
    steps = [0.0, 0.01, 0.02, 0.03, 0.04]
    echo = EchoArm("before", 4, (4,))
    found = [
        row(100, NONE, [0.8 + x for x in steps]),
        row(200, NONE, [0.6 + x for x in steps]),
        row(400, NONE, [0.5 + x for x in steps]),
        row(100, echo, [0.6 + 2 * x for x in steps]),
        row(100, EchoArm("before", 8, (4,)), [0.3 + x for x in steps]),
        row(32, NONE, [0.5 + x for x in steps], 1_024),
        row(32, echo, [0.7 - x for x in steps], 1_024, lost=0.75),
    ]
    head, lines = tables.cells("lasting", found)
    assert [len(line) for line in lines] == [len(head)] * 2
    at_4, at_8 = (dict(zip(head, line, strict=True)) for line in lines)
    assert at_4["difference"] == "-0.180 [-0.200, -0.160]"
    # 0.64 lies between the medians of 100 and 200 fresh batches, 0.82 and 0.62.
    assert at_4["times as long"] == f"{2 ** (0.18 / 0.2):.1f}"
    assert at_8["times as long"] == "> 4.0"
    assert at_4["factor"] == "4.0"
    (passes,) = tables.cells("passes", found)[1]
    assert passes[0] == "Fashion-MNIST, 1,024 examples, 1 passes, not augmented"
    assert dict(zip(head, passes, strict=True))["times as long"] == "less"
    told = {name: counts for name, *counts in tables.cells("copies", found)[1]}
    assert told["0.2 or more"] == ["2", "0", "0"]
    assert told["0.6 or more"] == ["0", "0", "1"]


def test_sentences_follow_the_rows() -> None:
    """With an echo that helps, and with one that does harm."""
    lengths = [row(length, NONE, [0.9 - 0.001 * length] * 5) for length in (100, 200, 400)]
    echo = EchoArm("before", 4, (4,))
    better = [*lengths, row(100, echo, [0.7 - 0.001 * n for n in range(5)])]
    assert "lower in 1 of 1 comparisons" in sentences.lasting(better)[0]
    assert "2.0 times as long at R = 4" in sentences.lasting(better)[0]
    assert "higher in 1" in sentences.lasting([*better, row(200, echo, [0.9] * 5)])[0]
    at_8 = [row(100, EchoArm("before", 8, (cap,)), [1 / cap] * 5) for cap in (4, 8)]
    assert "-0.125 [-0.125, -0.125]" in sentences.caps([*lengths, *at_8])[0]
    assert f"1 of {len(plan.cells())} planned" in sentences.missing([row(150, NONE, [0.5] * 5)])[0]


def test_an_arm_that_took_longer_is_no_pair() -> None:
    late = row(100, EchoArm("before", 4, (4,)), [0.5] * 5) | {"waits": [480] * 7}
    with pytest.raises(ValueError, match="480 of 400"):
        tables.pairs([row(100, NONE, [0.6] * 5), late])


def test_pages_have_the_tables_and_sentences_of_their_rows() -> None:
    for each in page.PAGES:
        text = each.read_text(encoding="utf-8")
        assert page.told(text) == text, "python -m experiments.equal_time page writes them"
