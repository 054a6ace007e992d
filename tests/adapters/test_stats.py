"""Statistics: counts that agree with what came, and with each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import stoker
from stoker.basics.resources import usable_cores
from stoker.types import ProcessTrial, Stats, ThreadTrial, WorkerTime
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
    assert (stats.pool is not None) == bool(spec.echoes)
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
            if (pool := stats.pool) is not None:
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
    plain = built(Spec(20, 4), 0)
    stream(plain)
    assert (plain.stats().copy_distance, plain.stats().realised_factor) == (0, 1)


def test_threads_that_wait_for_each_other_are_told_of() -> None:
    pipeline = built(Spec(20, 4))
    list(pipeline)
    stats = replace(pipeline.stats(), elapsed_s=1.0, consumer_wait_s=1.0)
    told = replace(stats, thread_trial=ThreadTrial(16, 8, 1.0))
    assert '.workers(8, kind="process")' in str(told)
    assert "wait for each other" not in str(replace(told, consumer_wait_s=0.0))  # nor does training
    assert "wait for each other" not in str(replace(stats, thread_trial=ThreadTrial(16, 8, 7.0)))


def holds_the_gil(value: Any) -> Any:
    for _ in range(5000):
        pass
    return value


def told_of_threads_that_hold_the_gil(is_told: Callable[[Stats], bool]) -> Stats:
    """Run until it is told, by one trial if not by another: programs beside them mislead them."""
    chain = stoker.from_arrays(np.arange(20_000), seed=0).map(holds_the_gil).batch(64)
    for _ in range(50):
        train = chain.workers(2, kind="thread")
        with iter(train) as batches:
            for _ in batches:
                stats = train.stats()
                if is_told(stats):
                    return stats
    raise AssertionError("it was never told")


@pytest.mark.alone  # programs beside it mislead all trials, where they take a core for long
@pytest.mark.full  # trials that a busy machine misleads are made again, for a minute at the worst
def test_code_that_holds_the_gil_is_told_of() -> None:
    def is_told(stats: Stats) -> bool:
        return stats.thread_trial is not None and stats.thread_trial.speedup < 1.2

    trial = told_of_threads_that_hold_the_gil(is_told).thread_trial
    assert trial is not None
    assert (trial.threads, trial.cores) == (2, usable_cores())
    assert trial.wait_for_each_other == (trial.cores > 1)
    alone = stoker.from_arrays(np.arange(8), seed=0).map(holds_the_gil).batch(4).workers(0)
    next(iter(alone))
    assert alone.stats().thread_trial is None


@pytest.mark.alone
def test_code_that_leaves_the_gil_free_is_told_of() -> None:
    def waits(value: Any) -> Any:
        time.sleep(0.002)
        return value

    def holds(value: Any) -> Any:
        for _ in range(200_000):
            pass
        return value

    def trial(function: Any) -> ProcessTrial:
        train = stoker.from_arrays(np.arange(64), seed=0).map(function).batch(8).workers(2)
        list(train)
        found = train.stats().process_trial
        assert found is not None
        return found

    assert trial(waits).gil_free_fraction > trial(holds).gil_free_fraction
    assert stoker.from_arrays(np.arange(64)).batch(8).stats().process_trial is None


def test_threads_are_named_where_they_would_be_faster_than_processes() -> None:
    pipeline = built(Spec(20, 4))
    list(pipeline)
    stats = replace(pipeline.stats(), elapsed_s=1.0, consumer_wait_s=1.0)
    told = replace(stats, process_trial=ProcessTrial(1, 1, 1, 0.8, 0.25))
    assert "1.2 times as fast as processes" in str(told)
    assert "declare it stoker.thread_safe" in str(told)
    assert "thread_safe" not in str(replace(told, consumer_wait_s=0.0))
    for trial in (
        ProcessTrial(2, 2, 2, 0.2, 0.25),  # two threads would wait for each other
        ProcessTrial(1, 1, 1, 0.8, 0.05),  # little is handed over
    ):
        assert "thread_safe" not in str(replace(told, process_trial=trial))
    assert ProcessTrial(16, 64, 2, 1.0, 0.0).threads_are_faster


WORKERS = pytest.mark.parametrize(
    ("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")]
)


def counts_of(pipeline: Any) -> list[tuple[str, int]]:
    for _ in pipeline:
        pass
    return [(stage.name, stage.examples) for stage in pipeline.stats().stages]


@WORKERS
def test_every_stage_counts_examples_wherever_it_stands(workers: int, kind: str) -> None:
    """Two maps of one name are two stages, and none of them counts batches."""
    data = stoker.from_arrays(np.arange(100), seed=0)
    source = "from_arrays(int64 [100])"
    half = data.map(same).filter(is_even).map(same).batch(8, drop_last=True).map(same)
    assert counts_of(half.to_torch().map(same).workers(workers, kind=kind)) == [
        (source, 100), ("map(same)", 100), ("filter(is_even)", 100), ("map(same)", 50),
        ("batch(8)", 48), ("map(same)", 48), ("map(same)", 48),
    ]  # fmt: skip
    examples = data.echo(2).random_map(keep).batch(8).map(same)
    assert counts_of(examples.workers(workers, kind=kind)) == [
        (source, 100), ("random_map(keep)", 200), ("batch(8)", 200), ("map(same)", 200),
    ]  # fmt: skip
    batches = data.batch(8).map(same).echo(3).map(same)
    assert counts_of(batches.workers(workers, kind=kind)) == [
        (source, 100), ("batch(8)", 100), ("map(same)", 100), ("map(same)", 300),
    ]  # fmt: skip
    collated = data.batch(8, collate=np.array).map(same).echo(2).to_torch().random_map(keep)
    assert counts_of(collated.workers(workers, kind=kind)) == [
        (source, 100), ("batch(8)", 100), ("map(same)", 100), ("random_map(keep)", 200),
    ]  # fmt: skip
    gathered = data.batch(8).workers(workers, kind=kind)
    assert [n for _, n in counts_of(gathered)] == [100, 100]
    packed = stoker.from_arrays(np.zeros((30, 5), np.int64), seed=0).pack(8).batch(2).map(same)
    assert [n for _, n in counts_of(packed.workers(workers, kind=kind))] == [30, 18, 18]


def is_even(value: Any) -> bool:
    return bool(value % 2 == 0)


def test_stages_behind_loaders_streams_and_mixtures_count_examples() -> None:
    loader = [np.zeros((4, 2)), np.zeros((4, 2)), np.zeros((1, 2))]
    assert counts_of(stoker.from_loader(loader, seed=0).map(same).to_torch().map(same)) == [
        ("from_loader(list)", 9), ("map(same)", 9), ("map(same)", 9),
    ]  # fmt: skip
    echoed = stoker.echo(loader, 2, seed=0).map(same)
    assert [n for _, n in counts_of(echoed)] == [9, 18]
    stats = echoed.stats()
    assert (stats.fresh_examples, stats.uses, stats.batches) == (9, 18, 6)
    assert stats.realised_factor == 2
    stream = stoker.from_iterable(range(20), seed=0).map(same).batch(8).map(same)
    assert [n for _, n in counts_of(stream)] == [20, 20, 20, 20]
    parts = [stoker.from_arrays(np.arange(60), seed=0), stoker.from_arrays(np.arange(20), seed=0)]
    mixed = stoker.mix([parts[0].map(same), parts[1].map(keep_batch)], weights=[0.75, 0.25], seed=0)
    counts = [n for _, n in counts_of(mixed.batch(8).map(dict_of))]
    assert counts[1] == 3 * counts[2] > 0
    assert counts[1] + counts[2] == counts[0] == counts[3] == counts[4]


def keep_batch(batch: Any) -> Any:
    return batch


def dict_of(batch: Any) -> Any:
    return {"batch": batch}


def test_what_a_cache_has_is_not_counted_before_it() -> None:
    data = stoker.from_dataset(Examples(20), seed=0).map(dict)
    chain = data.cache("2MiB", version="stages").batch(8).map(same)
    assert [n for _, n in counts_of(chain)] == [20, 20, 20, 20, 20]
    assert [n for _, n in counts_of(chain)] == [0, 0, 20, 20, 20]


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("place", ["filter", "pack", "skip"])
def test_what_is_left_out_or_joined_is_no_echo(place: str, factor: int) -> None:
    rows = np.arange(64 * 7).reshape(64, 7)
    chain = stoker.from_dataset(rows, seed=0, max_errors="75%" if place == "skip" else 0)
    if place == "filter":
        chain = chain.filter(lambda row: row[0] % 2 == 0)
    elif place == "skip":
        chain = chain.map(refuse_odd)
    chain = chain.echo(factor, pool=16) if factor > 1 else chain
    chain = chain.pack(12) if place == "pack" else chain
    train = chain.batch(4).workers(0)
    steps = iter(train)
    next(steps)
    assert train.stats().realised_factor >= 1
    for _ in steps:
        pass
    stats = train.stats()
    if factor == 1:
        assert stats.fresh_examples != stats.uses
    assert stats.realised_factor == factor
    assert f"(factor {factor:.2f})" in str(stats) == repr(stats)  # a notebook shows this
    assert train.metrics()["stoker/realised_factor"] == factor


def refuse_odd(row: Any) -> Any:
    if row[0] % 2:
        raise ValueError("odd")
    return row


@given(specs(max_echoes=1), st.integers(1, 12), st.integers(1, 4))
def test_an_epoch_of_set_steps_is_what_is_counted_whatever_passes_it_goes_over(
    spec: Spec, steps: int, rounds: int
) -> None:
    with small_pools_allowed():
        train = built(spec, 0).repeat().steps(steps)
        assume(spec.outputs)
        assert train.stats().epoch == 0
        fresh, elapsed_s = 0, 0.0
        for epoch in range(rounds):
            seen = 0
            for number, batch in enumerate(train, 1):
                seen += len(ids(batch))
                stats = train.stats()
                assert (stats.epoch, stats.batches, stats.uses) == (epoch, number, seen)
            stats = train.stats()
            assert (stats.epoch, stats.batches, stats.uses) == (epoch, steps, seen)
            fresh += stats.fresh_examples
            elapsed_s += stats.elapsed_s
            assert 0 <= stats.consumer_wait_s <= stats.elapsed_s
            assert stats.totals.elapsed_s == pytest.approx(elapsed_s)
            assert fresh == train.counts.fresh_examples
            assert train.metrics()["stoker/epoch"] == epoch
        assert train.counts.steps == steps * rounds


def test_an_epoch_that_goes_on_in_a_pass_counts_from_its_own_beginning() -> None:
    train = stoker.from_arrays(np.arange(83), seed=0).map(same).batch(8).repeat().steps(4)
    train = train.workers(0)
    for expected in (32, 32, 27, 32):  # the third goes over the short batch of a pass
        assert {n for _, n in counts_of(train)} == {expected}
        assert train.stats().fresh_examples == expected
    first = train.state_dict()
    again = stoker.from_arrays(np.arange(83), seed=0).map(same).batch(8).workers(0)
    again = again.repeat().steps(4)
    again.load_state_dict(first)
    assert again.stats().epoch == 4
    list(again)
    assert (again.stats().epoch, again.stats().batches) == (4, 4)


def test_before_a_run_there_are_zeros_and_nothing_is_the_bottleneck() -> None:
    pipeline = built(Spec(20, 4, echoes=(("before", Fraction(2), 8),)))
    stats = pipeline.stats()
    assert (stats.uses, stats.fresh_examples, stats.realised_factor) == (0, 0, 0)
    assert stats.wait_fraction == 0
    assert stats.pool is not None
    assert stats.pool.size == 8
    for stats in (pipeline.stats(), pipeline.repeat().steps(3).stats()):
        assert stats.bottleneck is None
        assert "bottleneck" not in str(stats)
    list(pipeline)
    assert pipeline.stats().bottleneck is not None


def test_of_two_stages_of_one_name_the_slower_is_marked() -> None:
    pipeline = stoker.from_arrays(np.arange(20), seed=0).map(same).batch(4).map(same).workers(0)
    list(pipeline)
    stats = replace(pipeline.stats(), elapsed_s=1.0, consumer_wait_s=1.0)
    slow = replace(stats.stages[3], seconds=10.0)
    shown = str(replace(stats, stages=(*stats.stages[:3], slow))).splitlines()
    assert [line.endswith("<- bottleneck") for line in shown[1:5]] == [False, False, False, True]


def test_every_stage_tells_its_time() -> None:
    chain = stoker.from_dataset(Examples(40), seed=0).map(dict).echo(2)
    pipeline = chain.random_map(keep).batch(8).map(same).workers(2)
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


@stoker.thread_safe
def same(x: Any) -> Any:
    return x


def test_a_pool_tells_its_bytes() -> None:
    data = np.zeros((100, 1000), np.float64)
    pipeline = stoker.from_dataset(list(data), seed=0).echo(2, pool="80KB").batch(4).workers(0)
    iterator = iter(pipeline)
    next(iterator)
    pool = pipeline.stats().pool
    assert pool is not None
    assert pool.size == 10
    assert pool.bytes == pipeline.stats().pool_bytes == 80_000
    assert "pool of 10 examples" in str(pipeline)
    usual = stoker.from_dataset(Examples(200), seed=0).echo(2).batch(4).workers(0)
    next(iter(usual))
    pool = usual.stats().pool
    assert pool is not None
    assert pool.size == 64, "sixteen batches"


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
    pipeline = {"echo": chain.echo(2), "to": chain.to_torch(), "map": chain.map(same)}[place]
    assert len(list(pipeline.workers(0))) == (6 if place == "echo" else 3)
    pipeline = pipeline.workers(0)
    list(pipeline)
    stats = pipeline.stats()
    assert stats.fresh_examples == 10
    assert stats.uses == (20 if place == "echo" else 10)


def sleeps(value: Any) -> Any:
    time.sleep(0.003)
    return value


@pytest.mark.alone  # it looks at time
@pytest.mark.parametrize(("workers", "kind"), [(4, "thread"), (2, "process")])
def test_workers_that_sleep_are_told_of(workers: int, kind: str) -> None:
    """Whatever else runs: of a sample's time most is what the program says it sleeps."""
    chain = stoker.from_arrays(np.arange(400), seed=0).map(sleeps).batch(16)
    train = chain.workers(workers, kind=kind)
    for _ in range(20):  # on a busy machine an epoch may be over before a trial is
        list(train)
        stats = train.stats()
        found = stats.worker_time
        if found is not None and found.asleep_fraction is not None:
            break
    assert found is not None
    assert found.sampled_s > 0
    parts = found.computing_fraction, found.queued_fraction, found.blocked_fraction
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) >= 0
    assert found.blocked_fraction > found.computing_fraction
    asleep, contended = found.asleep_fraction, found.contended_fraction
    assert asleep is not None
    assert contended is not None
    assert asleep + contended == pytest.approx(found.blocked_fraction)
    assert asleep > contended


def test_what_workers_do_with_their_time_is_said_where_the_consumer_waits() -> None:
    pipeline = built(Spec(20, 4))
    list(pipeline)
    stats = replace(pipeline.stats(), elapsed_s=1.0, consumer_wait_s=1.0)
    told = str(replace(stats, worker_time=WorkerTime(2.0, 0.2, 0.1, 0.7, 0.3)))
    assert "20% computing, 10% waiting for a processor, 30% asleep, 40% waiting for the GIL" in told
    unknown = replace(stats, worker_time=WorkerTime(2.0, 0.2, 0.1, 0.7, None))
    assert "70% asleep or waiting for the GIL" in str(unknown)
    for little in (None, WorkerTime(0.01, 0.2, 0.1, 0.7, 0.3)):
        assert "asleep" not in str(replace(stats, worker_time=little))
    assert "asleep" not in str(replace(unknown, consumer_wait_s=0.0))
    alone = pipeline.workers(0)
    list(alone)
    assert alone.stats().worker_time is None


def test_waiting_for_the_gil_is_told_from_sleeping() -> None:
    def is_told(stats: Stats) -> bool:
        time_of = stats.worker_time
        contended = time_of and time_of.contended_fraction
        return bool(time_of and contended and contended > (time_of.asleep_fraction or 0.0))

    told_of_threads_that_hold_the_gil(is_told)
