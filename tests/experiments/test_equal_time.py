"""Trainings for equal time: their schedules, stacks of networks, and what is made of rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from experiments.arms import Arm, epoch_after_epoch
from experiments.equal_time import data, plan, queue, rows, sentences, stacks, tables, tasks
from experiments.equal_time.features import write_features
from experiments.equal_time.schedules import NONE, EchoArm, schedule_of
from experiments.equal_time.training import OutOfTimeError, train
from experiments.suite import evidence
from experiments.suite.exact_clock import ExactClock
from experiments.suite.plan import Settings
from experiments.suite.workload import Variant
from experiments.suite.workloads import class_of

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
    examples, seed, cap = 205, 3, max(arm.caps, default=2)
    made = class_of("fashion")(Variant(pool_batches=cap), None)
    made.train = [(np.full((1, 1), number), 0) for number in range(examples)]
    made.recipe = replace(made.recipe, step_s=1.0)
    found = schedule_of(arm, examples, BATCH, 3 * examples // BATCH, seed)
    told = Arm(arm.place, "auto" if arm.caps else 1, arm.ratio or 1.0)
    clock = ExactClock(made, told, seed, max_factor=cap)
    for _ in zip(found.items, clock.steps(), strict=False):
        pass

    def pipeline(**echo: Any) -> stoker.Pipeline:
        p = stoker.from_dataset(range(examples), seed=seed).shuffle()
        if arm.place in ("before", "after"):
            p = p.echo("auto", **echo)
        p = p.batch(BATCH, drop_last=True)
        return p.echo("auto", **echo) if arm.place == "batch" else p

    record = clock.record()
    if record is not None:
        pool = cap if arm.place == "batch" else cap * BATCH
        record["pipeline"] = pipeline(pool=pool, max_factor=cap).record()["pipeline"]
    fed = pipeline(pool=pool, max_factor=cap).replay(record) if record is not None else pipeline()
    with closing(epoch_after_epoch(fed)) as batches:
        for step, items in enumerate(found.items):
            assert sorted(np.asarray(next(batches)).tolist()) == sorted(items.tolist()), step
    assert fed.clock.fresh_examples == found.fresh


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
def test_images_are_cut_and_mirrored_as_the_dice_say(folder: Path) -> None:
    task = tasks.Fashion(folder, "cpu", None, True)
    items = torch.zeros(51, dtype=torch.int64)
    plain, _ = task.batch("train", items, None)
    drawn, _ = task.batch("train", items, torch.arange(51))
    # 2 down of 0 to 4, 2 across of 0 to 4, not mirrored: where it was.
    torch.testing.assert_close(drawn[:, 12], plain[:, 12])
    torch.testing.assert_close(drawn[:, 37], plain[:, 37].flip(-1))
    assert not torch.equal(drawn[:, 11], plain[:, 11])
    torch.testing.assert_close(drawn[:, 13, :-1], plain[:, 13, 1:])


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


@pytest.mark.full
def test_a_training_that_cannot_end_in_time_is_given_up(folder: Path) -> None:
    made = tasks.Digits(folder, "cpu", 64, True)
    schedules = [schedule_of(NONE, 64, BATCH, 60, 0)]
    with pytest.raises(OutOfTimeError):
        train(made, [0], schedules, [Settings(0.1, 0.2)], deadline=time.monotonic())


@pytest.mark.full
def test_a_queue_carries_out_cells_and_stops(folder: Path) -> None:
    cells = plan.shortened([plan.Cell("digits", 8), plan.Cell("digits", 8, plan.WIDE[0])])
    found: list[dict[str, Any]] = []
    said: list[str] = []
    seeds = plan.seeds_of(2, 1)
    queue.carry_out(cells, seeds, folder, "cpu", 1, math.inf, found.append, said.append)
    assert (len(found), said) == (2, [])
    assert all(rows.is_known(cell, found) for cell in cells)
    for each in found:
        chosen = tables.chosen(each)
        assert list(chosen.losses) == [0, 1]
        trained = [[loss is not None for loss in losses] for losses in each["test"]]
        assert trained == [[place == chosen.place for place in range(2)]] * 2 + [[True] * 2]
    queue.carry_out(cells, seeds, folder, "cpu", 1, time.monotonic(), found.append, said.append)
    assert len(found) == 2


def test_rows_are_kept_and_the_last_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows.read_rows(path) == []
    cell = plan.Cell("digits", 8)
    for took_s in (1.0, 2.0):
        rows.append(path, rows.row_of(cell, [0], {"took_s": took_s}))
    (row,) = rows.read_rows(path)
    assert row["took_s"] == 2.0
    assert rows.is_known(cell, [row])
    assert not rows.is_known(plan.Cell("digits", 16), [row])


def test_each_cell_is_planned_once_and_has_its_baseline() -> None:
    cells = plan.cells()
    assert len(set(cells)) == len(cells)
    bare = {(c.task, c.examples, c.augments, c.fresh_batches) for c in cells if c.arm == NONE}
    for cell in cells:
        assert (cell.task, cell.examples, cell.augments, cell.fresh_batches) in bare


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
    with pytest.raises(LookupError):
        tables.cells("tea", found)


def test_as_long_is_read_between_lengths() -> None:
    found = [(100, 0.8), (200, 0.6), (400, 0.5)]
    assert tables.as_long(0.6, found) == pytest.approx(200)
    assert tables.as_long(0.55, found) == pytest.approx(200 * 2**0.5)
    assert tables.as_long(0.4, found) is None


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
    assert f"1 of {len(plan.cells())} planned" in sentences.missing([row(150, NONE, [0.5] * 5)])


def test_an_arm_that_took_longer_is_no_pair() -> None:
    late = row(100, EchoArm("before", 4, (4,)), [0.5] * 5) | {"waits": [480] * 7}
    with pytest.raises(ValueError, match="480 of 400"):
        tables.pairs([row(100, NONE, [0.6] * 5), late])


def test_a_block_of_the_page_has_its_table() -> None:
    page = "<!-- equal time: copies -->\nold\n<!-- end -->\n"
    assert "lost by the fourth use" in evidence.with_tables(page)


def test_tables_are_of_the_stored_rows() -> None:
    """Whatever was run: every table can be made, and every line has its place in it."""
    stored = rows.read_rows()
    for name in (*tables.TABLES, "copies"):
        head, lines = tables.cells(name, stored)
        assert all(len(line) == len(head) for line in lines)
