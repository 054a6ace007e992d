"""``.repeat()``: epochs of exactly n batches, beneath which passes over the data flow on."""

from __future__ import annotations

import gc
import itertools
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import stoker
from strategies import Spec, built, few, frozen, small_pools_allowed, specs, stream, through_json

ECHOED = Spec(20, 4, echoes=(("before", Fraction(2), None),))


def passes(spec: Spec, outputs: int) -> list[Any]:
    """Return so many outputs of pass after pass; fewer, where a pass has nothing."""
    pipeline = built(spec, 0)
    found: list[Any] = []
    while len(found) < outputs and (more := stream(pipeline)):
        found += more
    return found[:outputs]


@few(8)
@given(
    specs(max_examples=30, max_filters=1),
    st.integers(1, 12),
    st.integers(0, 30),
    st.sampled_from([0, 2]),
)
def test_epochs_are_cuts_of_one_stream_and_go_on_anywhere(
    spec: Spec, steps: int, cut: int, workers: int
) -> None:
    epochs = 3
    with small_pools_allowed():
        whole = passes(spec, steps * epochs)
        assume(len(whole) == steps * epochs)
        cut %= steps * epochs

        def build(workers: int) -> stoker.Pipeline:
            return built(spec, workers).repeat().steps(steps)

        pipeline = build(workers)
        state = pipeline.state_dict()
        given: list[Any] = []
        for _ in range(epochs):
            assert len(pipeline) == steps
            for batch in pipeline:
                given.append(frozen(batch))
                if len(given) == cut:
                    state = pipeline.state_dict()
            assert len(given) % steps == 0
        assert given == whole
        assert pipeline.counts.steps == len(whole)

        resumed = build(0)
        resumed.load_state_dict(through_json(state))
        rest = [frozen(batch) for batch in resumed]
        assert rest == whole[cut : (cut // steps + 1) * steps]
        assert stream(resumed) == passes(spec, cut + len(rest) + steps)[cut + len(rest) :]


@pytest.mark.parametrize("kind", ["auto", "filter", "loader", "auto loader"])
def test_epochs_have_n_batches_where_nothing_else_tells_how_many(kind: str) -> None:
    loader: Any = DataLoader(torch.arange(20), 4)  # type: ignore[arg-type]
    chain = stoker.from_arrays(np.arange(20), seed=0).shuffle()
    pipeline: Any = {
        "auto": lambda: chain.echo().batch(4),
        "filter": lambda: chain.filter(lambda x: x % 3 > 0).batch(4),
        "loader": lambda: stoker.echo(loader, 2),
        "auto loader": lambda: stoker.echo(loader),
    }[kind]()
    pipeline = pipeline.repeat().steps(11)
    before = 0.0
    for _ in range(4):
        assert len(pipeline) == len(list(pipeline)) == 11
        assert pipeline.epoch + pipeline.progress > before
        before = pipeline.epoch + pipeline.progress
    assert before > 1
    assert pipeline.counts.steps == 44


def test_what_is_left_early_goes_on_in_the_next_epoch() -> None:
    whole = passes(ECHOED, 40)
    pipeline = built(ECHOED, 2).repeat().steps(7)
    assert [frozen(b) for b in itertools.islice(pipeline, 3)] == whole[:3]
    assert stream(pipeline) == whole[3:10]
    state = pipeline.state_dict()
    resumed = built(ECHOED, 0).repeat().steps(7)
    resumed.load_state_dict(state)
    assert stream(resumed) == whole[10:17]


def test_a_loader_s_pass_rests_between_epochs_and_ends_with_one_that_is_left() -> None:
    pipeline = stoker.from_loader([np.full(2, i) for i in range(5)]).repeat().steps(3)
    assert [int(b[0]) for b in pipeline] == [0, 1, 2]
    assert [int(b[0]) for b in pipeline] == [3, 4, 0]
    assert [int(b[0]) for b in itertools.islice(pipeline, 1)] == [1]
    assert [int(b[0]) for b in pipeline] == [0, 1, 2]


@pytest.mark.parametrize("factor", [1, 2])
def test_over_a_loader_without_a_state_an_epoch_s_end_leads_to_the_next_pass(factor: int) -> None:
    def build() -> stoker.Pipeline:
        loader = [np.full(2, i) for i in range(5)]
        return stoker.echo(loader, factor, seed=0).repeat().steps(3)

    pipeline = build()
    iterator = iter(pipeline)
    next(iterator)
    with pytest.raises(stoker.StateError, match="after the last batch of an epoch"):
        pipeline.state_dict()
    list(iterator)
    with pytest.warns(UserWarning, match="the rest of that pass is left out"):
        state = pipeline.state_dict()
    resumed = build()
    resumed.load_state_dict(through_json(state))
    assert resumed.epoch == 1
    assert resumed.counts == pipeline.counts
    given = [int(b[0]) for _ in range(5 * factor) for b in resumed]
    assert given[: 5 * factor].count(0) == factor
    assert len(given) == 3 * 5 * factor
    assert sorted(given) == sorted(list(range(5)) * 3 * factor)  # three whole passes
    assert pipeline.epoch == 0  # which goes on in its own
    assert len([*pipeline]) == 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call
def test_over_a_loader_with_a_state_an_epoch_s_end_is_resumed() -> None:
    def build() -> stoker.Pipeline:
        loader = StatefulDataLoader(torch.arange(20), 4)  # type: ignore[arg-type]
        return stoker.from_loader(loader).repeat().steps(3)

    pipeline = build()
    list(pipeline)
    resumed = build()
    resumed.load_state_dict(pipeline.state_dict())
    given = [[b.tolist() for b in each] for each in (resumed, pipeline)]
    assert given[0] == given[1]
    assert given[0][0][0] == 12


def test_nothing_lives_on_when_the_pipeline_is_gone() -> None:
    def workers() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("stoker-worker")]

    pipeline = built(Spec(4000, 4), 2).repeat().steps(5)
    list(pipeline)
    list(pipeline)
    del pipeline
    gc.collect()
    assert not workers()


def test_batches_may_be_acknowledged_when_the_next_pass_has_begun() -> None:
    whole = passes(ECHOED, 40)

    def build() -> stoker.Pipeline:
        return built(ECHOED, 0).repeat().steps(15)

    pipeline = build()
    pipeline.acknowledge(0)
    iterator = iter(pipeline)
    for _ in range(3):  # ahead
        next(iterator)
    for done in range(1, 13):
        next(iterator)
        pipeline.acknowledge()
        resumed = build()
        resumed.load_state_dict(through_json(pipeline.state_dict()))
        assert stream(resumed) == whole[done:15]
    iterator.close()


@pytest.mark.parametrize("epoch", [0, 1, 2, 5])
@pytest.mark.parametrize("skip", [0, 1, 6, 7])
def test_epochs_and_batches_are_found_by_number_without_reading(epoch: int, skip: int) -> None:
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return np.array(index)

    pipeline = stoker.from_dataset(Data(), seed=3).shuffle().batch(4).workers(0)
    plain = pipeline.repeat()
    expected = [b.tolist() for b in itertools.islice(plain, (epoch + 1) * 7)][epoch * 7 + skip :]
    del read[:]
    jumping = pipeline.repeat().steps(7)
    jumping.set_epoch(epoch)
    jumping.resume_at(skip)
    assert [b.tolist() for b in jumping] == expected
    assert len(read) == 4 * len(expected)
    assert jumping.counts.steps == (epoch + 1) * 7


def test_an_epoch_that_only_its_state_leads_to_is_refused() -> None:
    pipeline = built(ECHOED, 0).repeat().steps(7)
    pipeline.set_epoch(0)
    with pytest.raises(ValueError, match="load a state"):
        pipeline.set_epoch(1)
    list(pipeline)
    pipeline.set_epoch(1)  # the next one anyway
    assert stream(pipeline) == passes(ECHOED, 14)[7:]
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match="whole number"):
            pipeline.set_epoch(wrong)  # type: ignore[arg-type]


def test_without_steps_there_is_no_end_and_no_length() -> None:
    pipeline = stoker.from_arrays(np.arange(9), seed=0).batch(3).repeat()
    with pytest.raises(TypeError, match=r"\.steps\(n\) ends an epoch"):
        len(pipeline)
    assert len(list(itertools.islice(pipeline, 100))) == 100
    assert pipeline.epoch == 33


def test_a_schedule_of_fresh_data_knows_its_epochs() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train = built(ECHOED, 0).repeat().steps(4)  # 10 batches a pass, 5 without echoing
    schedule = stoker.lr_schedule(cosine, train)
    while train.epoch + train.progress < 2:
        for _ in train:
            optimizer.step()
            schedule.step()
    assert cosine.last_epoch == 10


def ending(kind: str) -> stoker.Pipeline[Any]:
    """Return a pipeline of 5 batches a pass."""
    train = stoker.from_arrays(np.arange(40 if kind == "filtered" else 20), seed=0)
    if kind == "loader":
        return stoker.from_loader(DataLoader(torch.arange(20), 4))  # type: ignore[arg-type]
    if kind == "filtered":
        train = train.filter(stoker.thread_safe(lambda x: x % 2 == 0))
    if kind == "echoed":
        return train.take(10).echo(2, pool=8).batch(4)
    return train.shuffle().batch(4) if kind == "shuffled" else train.batch(4)


@pytest.mark.parametrize("kind", ["plain", "shuffled", "filtered", "echoed", "loader"])
@pytest.mark.parametrize("workers", [None, 0])
def test_a_pass_that_ends_where_the_steps_do_is_counted(kind: str, workers: int | None) -> None:
    def build() -> stoker.Pipeline[Any]:
        train = ending(kind) if workers is None or kind == "loader" else ending(kind).workers(0)
        return train.repeat().steps(5)

    train, whole, states, given = build(), stream(build()), list[Any](), list[Any]()
    assert len(whole) == 5
    while train.epoch < 3:
        given += stream(train)
        states.append(through_json(train.state_dict()))
        assert (train.stats().epoch, train.stats().batches) == (len(states) - 1, 5)
    assert (len(given), len(states)) == (15, 3)
    assert train.counts.steps == 15
    assert given[:5] == whole
    for at, state in enumerate(states[:-1], 1):
        again = build()
        again.load_state_dict(state)
        assert again.epoch == at
        assert stream(again) == given[5 * at : 5 * at + 5]
        assert again.epoch == at + 1


def test_statistics_count_epochs_of_steps_not_passes() -> None:
    def build() -> stoker.Pipeline[Any]:
        return stoker.from_arrays(np.arange(40), seed=0).shuffle().batch(4).repeat().steps(6)

    train, passes = build(), []
    for epoch in range(4):
        list(train)
        assert train.stats().epoch == epoch
        assert train.stats().uses == 24
        passes.append(train.epoch)
    assert passes == [0, 1, 1, 2]  # the clocks describe the data
    with iter(train) as batches:
        next(batches)
        state = train.state_dict()
    again = build()
    again.load_state_dict(state)
    assert again.stats().epoch == 4
    list(again)
    assert again.stats().epoch == 4
