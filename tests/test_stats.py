"""Statistics: counts that agree with what came, and with each other."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import ThreadTrial
from stoker.machine import usable_cores
from strategies import (
    Examples,
    Spec,
    built,
    few,
    ids,
    small_pools_allowed,
    specs,
    stream,
    through_json,
)


def rows(batches: list[Any]) -> int:
    return sum(len(ids(batch)) for batch in batches)


@given(specs(), st.sampled_from([0, 2]))
def test_an_epoch_s_counts_are_those_of_what_came(spec: Spec, workers: int) -> None:
    pipeline = built(spec, workers)
    with small_pools_allowed():
        batches = list(pipeline)
    stats = pipeline.stats()
    assert stats.epoch == 0
    assert stats.batches == len(batches)
    assert stats.uses == rows(batches)
    if batches and not spec.drop_last:
        assert stats.fresh_examples == spec.examples
    assert stats.fresh_examples <= spec.examples
    if stats.fresh_examples:
        assert stats.realised_factor == stats.uses / stats.fresh_examples
    assert len(stats.pools) == len(spec.echoes)
    assert 0 <= stats.consumer_wait_s <= stats.elapsed_s
    assert 0 <= stats.wait_fraction <= 1


@given(specs(max_echoes=1), st.sampled_from([0, 1, 3]))
def test_counts_on_the_way_are_those_of_the_batches_so_far(spec: Spec, workers: int) -> None:
    pipeline, seen, fresh = built(spec, workers), 0, 0
    with small_pools_allowed():
        for number, batch in enumerate(pipeline, 1):
            seen += len(ids(batch))
            stats = pipeline.stats()
            assert (stats.batches, stats.uses) == (number, seen)
            assert fresh <= stats.fresh_examples <= spec.examples
            assert stats.fresh_examples >= 1
            fresh = stats.fresh_examples
            for pool in stats.pools:
                assert 0 <= pool.held <= pool.size
                assert pool.bytes >= 0


@few(15)
@given(specs())
def test_counts_do_not_depend_on_workers(spec: Spec) -> None:
    def counts(workers: int) -> list[tuple[int, ...]]:
        pipeline = built(spec, workers)
        found: list[tuple[int, ...]] = []
        with small_pools_allowed():
            for _ in pipeline:
                s = pipeline.stats()
                found.append((s.batches, s.uses, s.fresh_examples, s.repeats_in_batches))
        return found

    assert counts(0) == counts(2)


@given(specs(max_echoes=1), st.data())
def test_counts_go_on_after_a_resume(spec: Spec, data: st.DataObject) -> None:
    with small_pools_allowed():
        pipeline = built(spec, 0)
        at = data.draw(st.integers(0, spec.outputs))
        iterator = iter(pipeline)
        for _ in range(at):
            next(iterator)
        restored = built(spec, 0)
        restored.load_state_dict(through_json(pipeline.state_dict()))
        again = iter(restored)
        for _ in range(at, spec.outputs):
            next(iterator), next(again)
            one, other = pipeline.stats(), restored.stats()
            assert other.batches == one.batches
            assert other.uses == one.uses
            assert other.fresh_examples == one.fresh_examples


@given(specs(max_echoes=1, min_echoes=1, points=("before", "after")))
def test_repeats_in_batches_are_counted(spec: Spec) -> None:
    pipeline, repeats = built(spec, 0), 0
    with small_pools_allowed():
        for batch in pipeline:
            repeats += len(ids(batch)) - len(set(ids(batch)))
            assert pipeline.stats().repeats_in_batches == repeats


def test_copy_distance_is_the_mean_of_steps_between_uses() -> None:
    spec = Spec(60, 1, shuffle=False, echoes=(("before", Fraction(3), 10),))
    pipeline, distances = built(spec, 0), []
    last: dict[Any, int] = {}
    for step, batch in enumerate(pipeline):
        (i,) = ids(batch)
        if i in last:
            distances.append(step - last[i])
        last[i] = step
    assert pipeline.stats().copy_distance == pytest.approx(np.mean(distances))
    assert "steps apart" in str(pipeline.stats())


def test_without_echo_copies_have_no_distance() -> None:
    pipeline = built(Spec(20, 4), 0)
    stream(pipeline)
    assert pipeline.stats().copy_distance == 0
    assert pipeline.stats().realised_factor == 1


def test_before_the_first_epoch_there_are_zeros() -> None:
    stats = built(Spec(20, 4, echoes=(("before", Fraction(2), 8),))).stats()
    assert (stats.uses, stats.fresh_examples, stats.realised_factor) == (0, 0, 0)
    assert stats.wait_fraction == 0
    assert stats.pools[0].size == 8
    assert str(stats)


def test_threads_that_wait_for_each_other_are_told_of() -> None:
    pipeline = built(Spec(20, 4))
    list(pipeline)
    stats = replace(pipeline.stats(), elapsed_s=1.0, consumer_wait_s=1.0)
    told = replace(stats, thread_trial=ThreadTrial(16, 8, 1.0))
    assert '.workers(8, kind="process")' in str(told)
    assert all(len(line) <= 60 for line in told.drawn(60).splitlines())
    assert "wait for each other" not in str(replace(told, consumer_wait_s=0.0))  # nor does training
    assert "wait for each other" not in str(replace(stats, thread_trial=ThreadTrial(16, 8, 7.0)))
    assert told.as_dict()["thread_trial"]["wait_for_each_other"]
    assert stats.as_dict()["thread_trial"] is None


def test_code_that_holds_the_gil_is_told_of() -> None:
    """By one trial of threads, if not by another: programs beside them mislead them."""

    def holds(value: Any) -> Any:
        for _ in range(5000):
            pass
        return value

    chain = stoker.from_arrays(np.arange(20_000), seed=0).map(holds).batch(64)

    def found() -> ThreadTrial | None:
        train = chain.workers(2)
        with iter(train) as batches:
            for _ in batches:
                trial = train.stats().thread_trial
                if trial is not None and trial.speedup < 1.2:
                    return trial
        return None

    trial = next(filter(None, (found() for _ in range(50))))
    assert (trial.threads, trial.cores) == (2, usable_cores())
    assert trial.wait_for_each_other == (trial.cores > 1)
    alone = chain.workers(0)
    next(iter(alone))
    assert alone.stats().thread_trial is None


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (2, "process")])
def test_every_stage_is_counted(workers: int, kind: str) -> None:
    chain = stoker.from_dataset(Examples(40), seed=0).map(dict).echo(2)
    pipeline = chain.random_map(keep).batch(8).map(same).workers(workers, kind=kind)
    list(pipeline)
    stats = pipeline.stats()
    counted = {stage.name: stage.examples for stage in stats.stages}
    assert set(counted) == {
        "from_dataset(Examples)", "map(dict)", "random_map(keep)", "batch(8)", "map(same)"
    }  # fmt: skip
    assert counted["from_dataset(Examples)"] == counted["map(dict)"] == 40
    assert counted["random_map(keep)"] == 80
    assert all(stage.seconds >= 0 for stage in stats.stages)
    assert sum(stage.seconds for stage in stats.stages) > 0
    assert stats.production_s_per_example == pytest.approx(
        sum(stage.seconds for stage in stats.stages) / 40
    )
    assert stats.bottleneck in {*counted, "consumer"}
    shown = str(stats)
    assert all(name in shown for name in counted)
    assert "80 uses of 40 fresh examples (factor 2.00)" in shown


def keep(x: Any, rng: Any) -> Any:
    return x


def same(x: Any) -> Any:
    return x


def test_a_pool_tells_its_bytes() -> None:
    data = np.zeros((100, 1000), np.float64)
    pipeline = stoker.from_arrays(data, seed=0).echo(2, pool="80KB").batch(4).workers(0)
    iterator = iter(pipeline)
    next(iterator)
    (pool,) = pipeline.stats().pools
    assert pool.size == 10
    assert pool.bytes == pipeline.stats().pool_bytes == 80_000
    assert "pool of 10 examples" in str(pipeline)


def test_the_default_pool_is_sixteen_batches() -> None:
    pipeline = stoker.from_dataset(Examples(200), seed=0).echo(2).batch(4).workers(0)
    next(iter(pipeline))
    assert pipeline.stats().pools[0].size == 64


@pytest.mark.parametrize("leaf", ["name", "text", "bytes", "nothing", "collated"])
@pytest.mark.parametrize("place", ["echo", "to", "map"])
def test_uses_are_examples_whatever_a_batch_is_made_of(leaf: str, place: str) -> None:
    make = {
        "name": lambda i: {"name": f"example {i}"},
        "text": lambda i: f"{i}",
        "bytes": lambda i: (b"x" * i, "y"),
        "nothing": lambda i: [None],
        "collated": lambda i: i,
    }[leaf]
    collate = (lambda examples: {"mean": np.mean(examples)}) if leaf == "collated" else None
    chain = stoker.from_dataset([make(i) for i in range(10)], seed=0).batch(4, collate=collate)
    pipeline = {"echo": chain.echo(2), "to": chain.to("cpu"), "map": chain.map(same)}[place]
    assert len(list(pipeline.workers(0))) == (6 if place == "echo" else 3)
    pipeline = pipeline.workers(0)
    list(pipeline)
    stats = pipeline.stats()
    assert stats.fresh_examples == 10
    assert stats.uses == (20 if place == "echo" else 10)


def test_loaders_are_counted_by_rows() -> None:
    loader = [np.zeros((4, 2)), np.zeros((4, 2)), np.zeros((1, 2))]
    pipeline = stoker.echo(loader, 2, seed=0)
    list(pipeline)
    stats = pipeline.stats()
    assert (stats.fresh_examples, stats.uses, stats.batches) == (9, 18, 6)
    assert stats.realised_factor == 2
