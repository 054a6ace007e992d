"""Trainings for equal time: their schedules are those of pipelines, and pages follow the rows."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from experiments import evidence
from experiments.arms import epoch_after_epoch
from experiments.equal_time.clock import ExactClock
from experiments.equal_time.schedules import NONE, EchoArm, schedule_of
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
        fed = empty.replay(encode(made["seed"], made["pipeline"], echo, {}))
    with closing(epoch_after_epoch(fed)) as batches:
        for step, items in enumerate(found.items):
            assert sorted(np.asarray(next(batches)).tolist()) == sorted(items.tolist()), step
    assert fed.counts.fresh_examples == found.fresh


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


def test_pages_have_the_tables_and_sentences_of_their_rows() -> None:
    for each in evidence.PAGES:
        text = each.read_text(encoding="utf-8")
        assert evidence.told(text) == text, "python -m experiments.evidence writes them"
