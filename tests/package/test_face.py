"""What frameworks ask of a ``DataLoader``, asked of pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

import stoker
from strategies import Spec, built, few, frozen, small_pools_allowed, specs, stream, through_json


def batches(of: Any) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in of]


def numbers(examples: int = 20) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(examples), seed=0)


def small(examples: int = 20) -> stoker.Pipeline[Any]:
    return numbers(examples).shuffle().batch(4)


# -- skipping


class Read:
    """Numbers; remembers which ones were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return np.array(index)


@few(6)
@given(specs(max_examples=30, max_filters=1), st.integers(0, 12))
def test_skipping_leaves_out_the_first_batches_and_nothing_else(spec: Spec, n: int) -> None:
    with small_pools_allowed():
        plain = built(spec, 0)
        epochs = [stream(plain) for _ in range(2)]
        pipeline = built(spec, 0)
        pipeline.resume_at(n)
        if n > len(epochs[0]) > 0 and not spec.filters:
            with pytest.raises(ValueError, match="is behind its end"):
                iter(pipeline)
            return
        assert stream(pipeline) == epochs[0][n:]
        assert stream(pipeline) == epochs[1]
        assert pipeline.counts == plain.counts


def test_where_numbers_tell_nothing_is_read_for_it() -> None:
    data = Read(1_000_000)
    pipeline = stoker.from_dataset(data, seed=0).shuffle().batch(4).workers(0)
    pipeline.resume_at(249_998)
    assert pipeline.state_dict()["step"] == 0  # not before it begins
    iterator = iter(pipeline)
    assert len(iterator) == 2
    assert len(list(iterator)) == 2
    assert len(data.read) == 8


@pytest.mark.parametrize(
    ("kind", "pool"), [("before", 32), ("before", 5), ("after", 8), ("alone", 16), ("whole", 99)]
)
def test_the_draws_of_one_pool_are_repeated_without_reading(kind: str, pool: int) -> None:
    data = Read(130)

    def build() -> stoker.Pipeline[Any]:
        chain = stoker.from_dataset(data, seed=0).shuffle().workers(0)
        if kind == "after":
            return chain.batch(4).echo(2.5, pool=pool)
        return (
            chain.echo(2.5, pool=pool) if kind == "alone" else chain.echo(2.5, pool=pool).batch(4)
        )

    with small_pools_allowed():
        plain = build()
        whole, clocks = [], []
        for batch in plain:
            whole.append(batch.tolist())
            clocks.append(plain.counts)
        second = batches(plain)
        for n in (n for n in (1, 7, 60, 82, 95, 200) if n <= len(whole)):
            skipping = build()
            skipping.resume_at(n)
            data.read.clear()
            iterator = iter(skipping)
            assert len(data.read) <= 4 * pool
            left = []
            for number, batch in enumerate(iterator, n):
                left.append(batch.tolist())
                assert skipping.counts == clocks[number]
                if number == n:
                    state = skipping.state_dict()
            assert left == whole[n:]
            assert len(data.read) <= 4 * (pool + len(left))
            assert batches(skipping) == second
            if left:
                resumed = build()
                resumed.load_state_dict(state)
                assert batches(resumed) == (left[1:] or batches(skipping))


def test_batches_behind_a_state_are_counted_from_the_epoch_s_beginning() -> None:
    whole = batches(small())
    pipeline = small()
    iterator = iter(pipeline)
    next(iterator)
    next(iterator)
    state = pipeline.state_dict()
    iterator.close()
    for skip, left in ((0, whole[2:]), (2, whole[2:]), (3, whole[3:])):
        resumed = small()
        resumed.load_state_dict(state)
        resumed.resume_at(skip)
        assert batches(resumed) == left
    resumed = small()
    resumed.load_state_dict(state)
    resumed.resume_at(1)
    with pytest.raises(ValueError, match="the state that was loaded is behind 2"):
        iter(resumed)


def test_an_iterator_that_handed_out_nothing_keeps_what_is_skipped() -> None:
    pipeline = small()
    pipeline.resume_at(3)
    iter(pipeline).close()
    assert batches(pipeline) == batches(small())[3:]


def turned(epoch: int, rng: np.random.Generator) -> Any:
    return rng.permutation(20)


SKIPPED: dict[str, Any] = {
    "plain": small,
    "echo": lambda: numbers().shuffle().echo(2, pool=9).batch(4),
    "filter": lambda: numbers().filter(stoker.thread_safe(lambda x: x % 3 > 0)).batch(4),
    "order": lambda: numbers().order(turned).batch(4),
    "rounds": lambda: small().repeat().steps(7),
    "rounds of echoes": lambda: SKIPPED["echo"]().repeat().steps(7),
    "rounds of an order": lambda: SKIPPED["order"]().repeat().steps(7),
    "rounds by weights": lambda: (
        numbers().sample(lambda epoch: np.arange(20) + epoch + 1.0).batch(4).repeat().steps(7)
    ),
}


@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.parametrize("before", ["nothing", "an epoch", "a part", "a state", "set_epoch"])
def test_a_state_before_the_first_batch_keeps_what_is_skipped(kind: str, before: str) -> None:
    def begun() -> stoker.Pipeline[Any]:
        pipeline = SKIPPED[kind]()
        if before == "an epoch":
            list(pipeline)
        elif before == "set_epoch" and kind not in ("filter", "rounds of echoes"):
            pipeline.set_epoch(2)
        elif before in ("a part", "a state"):
            with iter(pipeline) as part:
                next(part)
                state = through_json(pipeline.state_dict())
            if before == "a state":
                pipeline.load_state_dict(state)
        return pipeline

    pipeline, again = begun(), SKIPPED[kind]()
    pipeline.resume_at(3)
    again.resume_at(1)  # a state says where to begin
    again.load_state_dict(through_json(pipeline.state_dict()))
    assert again.state_dict() == pipeline.state_dict()
    with small_pools_allowed():
        assert batches(again) == batches(pipeline)
        assert batches(again) == batches(pipeline)


@pytest.mark.parametrize("kind", ["plain", "echo", "filter", "rounds"])
def test_a_state_that_skips_too_much_takes_no_longer(kind: str) -> None:
    pipeline = SKIPPED[kind]()
    pipeline.resume_at(10**15)
    again = SKIPPED[kind]()
    again.load_state_dict(pipeline.state_dict())
    with small_pools_allowed():
        if kind in ("plain", "echo"):
            with pytest.raises(ValueError, match=r"is behind its end; .* it is set_epoch\("):
                iter(again)
        else:
            assert not batches(again)


@pytest.mark.parametrize("kind", ["order", "filter", "steps", "repeat"])
def test_where_iter_fails_nothing_is_lost(kind: str) -> None:
    """The next one begins where the failed one would have."""
    fails: list[int] = []

    def ordered(epoch: int, rng: Any) -> Any:
        if fails and kind == "order":
            raise OSError(fails.pop())
        return np.arange(20)

    def mapped(x: Any) -> Any:
        if x == 6 and fails:
            raise OSError(fails.pop())
        return x

    data = stoker.from_arrays(np.arange(20), seed=0)
    made: Any = data.order(ordered) if kind == "order" else data.map(mapped).filter(lambda x: True)
    made = made.batch(2).workers(0)
    made = {"steps": lambda: made.repeat().steps(10), "repeat": made.repeat}.get(
        kind, lambda: made
    )()
    made.resume_at(4)
    fails.append(1)
    with pytest.raises(OSError, match="1"):
        iter(made)
    rest = [batch.tolist() for batch in itertools.islice(made, 6)]
    assert rest == [[n, n + 1] for n in range(8, 20, 2)]


def test_a_state_of_a_running_epoch_knows_nothing_of_the_next_one() -> None:
    pipeline, again = small(), small()
    with iter(pipeline) as running:
        next(running)
        pipeline.resume_at(3)
        state = pipeline.state_dict()
    again.load_state_dict(state)
    assert batches(again) == batches(small())[1:]
    assert "skip" not in state


def test_other_ranks_do_not_skip_as_many_batches() -> None:
    def build(world: int) -> Any:
        return numbers().shard(rank=0, world_size=world).batch(2)

    pipeline = build(2)
    pipeline.resume_at(3)
    with pytest.raises(stoker.StateError, match="to begin behind 3 batches"):
        build(3).load_state_dict(pipeline.state_dict())


def test_what_the_clock_decided_is_not_skipped_by_number() -> None:
    pipeline = numbers().echo().batch(4)
    for each in (pipeline, pipeline.repeat().steps(9)):
        each.resume_at(2)
        with pytest.raises(ValueError, match="load the state"):
            iter(each)
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match="a whole number from 0"):
            pipeline.resume_at(wrong)  # type: ignore[arg-type]


# -- attributes


def test_as_a_dataloader_a_pipeline_shows_its_next_epoch() -> None:
    pipeline = small(22)
    loader = pipeline.as_dataloader()
    assert len(loader.dataset) == 22
    assert len(numbers(22).take(6).batch(2).as_dataloader().dataset) == 6
    assert (loader.batch_size, loader.drop_last) == (4, False)
    assert isinstance(loader.sampler, SequentialSampler)  # of batches: nobody need shuffle them
    assert isinstance(loader.batch_sampler, BatchSampler)
    made = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    assert len(made) == 6
    assert batches(made) == batches(small(22))
    assert pipeline.epoch == 1
    assert stoker.from_arrays(np.arange(4)).batch(3, drop_last=True).as_dataloader().drop_last


def test_an_index_of_the_epoch_is_a_place_and_no_batch_may_be_left_out() -> None:
    loader = small().as_dataloader()
    with pytest.raises(TypeError, match="has no indices"):
        loader.dataset[0]
    places = list(zip(range(4), loader.batch_sampler, strict=False))
    given = [loader.dataset[places[0][1][0]]]
    with pytest.raises(stoker.StokerError, match=r"shard a pipeline by \.shard\(\)"):
        loader.dataset[places[2][1][0]]
    assert batches(given) == batches(small())[:1]
    del places


def test_what_looks_for_the_parts_of_a_loader_is_told_where_they_are() -> None:
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
        with pytest.raises(AttributeError, match=r"as_dataloader\(\)"):
            getattr(small(), name)
    with pytest.raises(AttributeError, match=r"no attribute 'missing'$"):
        _ = small().missing  # type: ignore[attr-defined]


def test_a_loader_s_sampler_is_told_the_epoch() -> None:
    sampler: Any = DistributedSampler(torch.arange(20), 2, 0)  # type: ignore[arg-type]
    loader: Any = DataLoader(torch.arange(20), batch_sampler=BatchSampler(sampler, 4, True))  # type: ignore[arg-type]
    stoker.echo(loader, 2, seed=0).set_epoch(3)
    assert sampler.epoch == 3


def test_a_pipeline_is_a_dataloader_where_only_that_will_do() -> None:
    pipeline = built(Spec(20, 4, echoes=(("before", Fraction(2), None),)), 0)
    loader = pipeline.as_dataloader()
    assert isinstance(loader, DataLoader)
    assert len(loader) == len(pipeline) == 10
    assert loader.batch_size == 4
    whole = stream(built(Spec(20, 4, echoes=(("before", Fraction(2), None),)), 0))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    assert state == pipeline.state_dict()
    del iterator
    loader.load_state_dict(state)
    assert stream(loader) == whole[4:]  # type: ignore[arg-type]
    loader.set_epoch(0)
    assert stream(loader) == whole  # type: ignore[arg-type]
    again = type(loader)(pipeline=pipeline, sampler=SequentialSampler(loader.dataset))
    again.set_epoch(0)
    assert stream(again) == whole  # type: ignore[arg-type]


def called_as(module: str, pipeline: stoker.Pipeline[Any]) -> Any:
    there: dict[str, Any] = {"__name__": module}
    exec("def save(pipeline): return pipeline.state_dict()", there)
    return there["save"](pipeline)


@pytest.mark.parametrize(
    "module", ["pytorch_lightning.trainer.connectors", "accelerate.checkpointing"]
)
def test_a_state_of_one_rank_is_none_of_all_where_they_differ(module: str) -> None:
    even = numbers().shard(rank=0, world_size=2)
    assert called_as(module, even.batch(4))["step"] == 0
    for differing in (
        even.filter(lambda x: x % 3 > 0).batch(4).steps(2),
        numbers(21).shard(rank=0, world_size=2, remainder="uneven").batch(4),
    ):
        with pytest.raises(stoker.StateError, match="keeps the state of one rank for all"):
            called_as(module, differing)
        assert differing.state_dict()["step"] == 0


_CHECKPOINTED: dict[str, Callable[[], stoker.Pipeline]] = {
    "plain": lambda: small(96),
    "repeat": lambda: numbers(36).echo(2).batch(3).repeat().steps(24),
    "echo": lambda: numbers(48).shuffle().echo(2).batch(4),
    "filter": lambda: numbers(192).filter(lambda x: x % 2).batch(4),
    "scan": lambda: (
        stoker.from_dataset(range(96), seed=0).scan(lambda s, x: (s + x, s), 0).batch(4)
    ),
    "pack": lambda: (
        stoker.from_dataset([[n] * (n % 7) for n in range(90)], seed=0).pack(8).batch(1)
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("kind", _CHECKPOINTED)
def test_torch_s_distributed_checkpoints(kind: str, as_dict: bool, tmp_path: Any) -> None:
    """At any step, of the pipeline or of its state."""
    import torch.distributed.checkpoint as dcp

    build = _CHECKPOINTED[kind]
    whole = [frozen(batch) for batch in build()]
    for step in (0, 1, len(whole) - 1):
        pipeline, resumed = build(), build()
        with iter(pipeline) as batches:
            for _ in range(step):
                next(batches)
            saved: dict[str, Any] = {"loader": pipeline.state_dict() if as_dict else pipeline}
            dcp.save(saved, checkpoint_id=tmp_path / f"{step}")
        loaded: dict[str, Any] = {"loader": resumed.state_dict() if as_dict else resumed}
        dcp.load(loaded, checkpoint_id=tmp_path / f"{step}")
        if as_dict:
            resumed.load_state_dict(loaded["loader"])
        assert [frozen(batch) for batch in resumed] == whole[step:]
