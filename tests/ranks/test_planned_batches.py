"""``.batch_by_tokens()`` and ``.bucket(n, key)``: each once, none too large, equal steps."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_places import drawing, leave, taken

import stoker
from stoker import testing
from stoker.collate import pad
from strategies import few, opened

Build = Callable[..., stoker.Pipeline]


@dataclass(frozen=True)
class Case:
    """Examples with sizes and keys, and how they are batched."""

    lengths: np.ndarray
    keys: np.ndarray | None
    sizing: dict[str, Any]

    def begun(self, rank: int = 0, world: int = 1) -> stoker.Pipeline:
        train = stoker.from_arrays(np.arange(len(self.lengths)), seed=4).shuffle()
        return train.shard(rank=rank, world_size=world)

    def batched(self, train: stoker.Pipeline, **more: Any) -> stoker.Pipeline:
        given = self.sizing | more
        if "batch_size" in given:
            return train.bucket(key=self.keys, **given)
        return train.batch_by_tokens(sizes=self.lengths, key=self.keys, **given)

    def check(self, ids: list[int]) -> None:
        """Check that a batch holds no more than it may, of one key."""
        given, lengths = self.sizing, np.maximum(self.lengths[ids], 1)
        assert ids
        if self.keys is not None:
            assert len({*self.keys[ids].tolist()}) == 1
        assert len(ids) <= (given.get("batch_size") or given.get("max_rows") or len(ids))
        if "max_tokens" in given:
            multiple = given.get("multiple_of") or 1
            longest = -(-int(lengths.max()) // multiple) * multiple
            used = len(ids) * longest if given.get("padded", True) else int(lengths.sum())
            assert used <= given["max_tokens"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    examples = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    lengths = np.minimum(rng.lognormal(2, 1, examples).astype(np.int64), 60)
    keys = draw(st.sampled_from([None, "few", "many"]))
    chosen: np.ndarray | None = None
    if keys is not None:
        chosen = rng.integers(0, 3 if keys == "few" else 40, examples)
    if keys is not None and draw(st.booleans()):
        sizing: dict[str, Any] = {"batch_size": draw(st.integers(1, 12))}
    else:
        sizing = {"max_tokens": draw(st.integers(64, 300)), "padded": draw(st.booleans())}
        if draw(st.booleans()):
            sizing["max_rows"] = draw(st.integers(1, 9))
        if sizing["padded"] and draw(st.booleans()):
            sizing["multiple_of"] = draw(st.sampled_from([1, 4, 8]))
    return Case(lengths, chosen, sizing)


@few(40)
@given(case=cases(), world=st.integers(1, 5), epoch=st.integers(0, 2))
def test_each_comes_once_in_batches_that_fit_and_all_ranks_take_equal_steps(
    case: Case, world: int, epoch: int
) -> None:
    assume(len(case.lengths) >= world)
    ranks = [case.batched(case.begun(rank, world).random_map(drawing)) for rank in range(world)]
    drawn: dict[tuple[int, int], float] = dict(
        taken(case.begun().random_map(drawing).batch(8), epoch)[1]
    )
    found, steps = [], set()
    for rank in ranks:
        rank.set_epoch(epoch)
        steps.add(len(rank))
        batches, draws = taken(rank, epoch)
        steps.add(len(batches))
        for batch in batches:
            case.check(batch)
            found += batch
        assert all(drawn[use] == draw for use, draw in draws)
        assert rank.stats().fresh_examples == rank.stats().uses == sum(map(len, batches))
    assert len(steps) == 1
    assert len({*found}) == len(found)
    assert len(case.lengths) - len(found) < world
    assert world > 1 or len(found) == len(case.lengths)


@few(12)
@given(case=cases(), world=st.integers(1, 3), data=st.data())
def test_a_resume_at_every_batch_goes_on_exactly(
    case: Case, world: int, data: st.DataObject
) -> None:
    assume(len(case.lengths) >= world)
    rank = data.draw(st.integers(0, world - 1))

    def build(rank: int = rank) -> stoker.Pipeline:
        return case.batched(case.begun(rank, world).random_map(drawing))

    whole = [ids.tolist() for ids, _ in build()]
    some = {0, len(whole) // 2, len(whole) - 1} - {-1}
    for at in range(len(whole)) if len(whole) < 9 else some:
        saved = build(0)  # one rank's state serves all
        with iter(saved) as batches:
            for _ in range(at):
                next(batches)
        state = saved.state_dict()
        resumed, jumped = build(), build()
        resumed.load_state_dict(state)
        jumped.resume_at(at)
        for other in (resumed, jumped):
            assert [ids.tolist() for ids, _ in other] == whole[at:]
            assert other.epoch == 1 or not whole


LENGTHS = np.minimum(np.random.default_rng(2).lognormal(3, 0.8, 120), 200).astype(int) + 1
TOKENS = Case(LENGTHS, None, {"max_tokens": 400})


def test_workers_are_sent_no_sizes() -> None:
    lengths = np.full(100_000, 3)
    train = stoker.from_arrays(np.arange(100_000), seed=1).batch_by_tokens(30, lengths)
    (segment,) = train.chain.flow.segments
    assert len(pickle.dumps(segment.batch)) < 2_000
    assert segment.batch is not None
    assert segment.batch.name == train.chain.stages[0].name == "batch_by_tokens(30, sizes=...)"


def test_epochs_are_put_together_anew_and_know_their_lengths() -> None:
    train = TOKENS.batched(TOKENS.begun())
    seen, lengths = [], []
    for _ in range(4):
        lengths.append(len(train))
        batches = [tuple(sorted(ids.tolist())) for ids in train]
        assert len(batches) == lengths[-1]
        seen.append(batches)
    assert len({batch for batches in seen for batch in batches}) > 0.9 * sum(lengths)
    assert len({*lengths}) > 1  # epochs differ, so that a constant would be wrong
    with iter(train) as batches:
        next(batches)
        assert len(train) == len(batches) + 1
    assert train.progress < 1


def test_ranks_progress_alike() -> None:
    ranks = [TOKENS.batched(TOKENS.begun(rank, 3)) for rank in range(3)]
    for _ in zip(*ranks, strict=True):
        assert len({rank.progress for rank in ranks}) == 1
        assert len({opened(rank.state_dict())["before"][0] for rank in ranks}) == 1


def test_repeated_epochs_are_jumped_over() -> None:
    def build() -> stoker.Pipeline:
        return TOKENS.batched(TOKENS.begun(0, 2)).repeat().steps(9)

    train = build()
    epochs = [[ids.tolist() for ids in train] for _ in range(5)]
    for epoch in range(5):
        there = build()
        there.set_epoch(epoch)
        assert [ids.tolist() for ids in there] == epochs[epoch]


def test_mixtures_are_planned_over_all_parts() -> None:
    def build(rank: int = 0, world: int = 1) -> stoker.Pipeline:
        a = stoker.from_arrays(np.arange(80)).shuffle()
        b = stoker.from_arrays(np.arange(80, 120)).shuffle()
        mixed = stoker.mix([a, b], weights=[2, 1], seed=3).shard(rank=rank, world_size=world)
        return mixed.batch_by_tokens(400, LENGTHS)

    for epoch in range(2):
        found = []
        for rank in range(2):
            train = build(rank, 2)
            train.set_epoch(epoch)
            for ids in train:
                TOKENS.check(ids.tolist())
                found += ids.tolist()
            counts = [part.fresh_examples for part in train.stats().parts]
            assert sum(counts) == train.stats().fresh_examples
        assert len({*found}) == len(found) >= 119
    testing.check_resume(build, every=3)


def test_an_order_that_a_function_says_is_asked_for_when_an_epoch_begins() -> None:
    asked: list[int] = []

    def hardest_first(epoch: int, rng: np.random.Generator) -> np.ndarray:
        asked.append(epoch)
        return np.roll(np.arange(120), epoch)

    def build() -> stoker.Pipeline:
        return TOKENS.batched(stoker.from_arrays(np.arange(120), seed=1).order(hardest_first))

    train = build()
    with pytest.raises(TypeError, match="not known before"):
        len(train)
    assert asked == []
    whole = [ids.tolist() for ids in train]
    with iter(train) as batches:
        next(batches)
        assert len(train) == len(batches) + 1
    assert asked == [0, 1]
    resumed = build()
    resumed.load_state_dict(leave(build(), 1))
    assert [ids.tolist() for ids in resumed] == whole[1:]


def test_an_adaptive_echo_may_stand_behind() -> None:
    for _ in range(2):
        train = TOKENS.batched(TOKENS.begun()).echo()
        for _ in range(2):
            seen = {x for ids in train for x in ids.tolist()}
            assert seen == {*range(120)}
        record = train.record()
        replayed = TOKENS.batched(TOKENS.begun()).echo().replay(record)
        assert {x for ids in replayed for x in ids.tolist()} == {*range(120)}


def test_padded_texts_hold_little_padding() -> None:
    texts = [np.arange(n) for n in LENGTHS]
    train = stoker.from_dataset(texts, seed=1).shuffle()
    sizes = train.sizes()
    assert sizes.dtype == np.int32
    assert sizes.tolist() == LENGTHS.tolist()
    batched = train.batch_by_tokens(1_024, sizes, multiple_of=8, collate=pad(0, multiple_of=8))
    real = padded = 0
    for batch in batched:
        assert batch.values.size <= 1_024
        assert batch.values.shape[1] % 8 == 0
        real += int(batch.lengths.sum())
        padded += batch.values.size
    assert real == LENGTHS.sum()
    fixed = sum(batch.values.size for batch in train.batch(12, collate=pad(0)))
    assert padded < 0.6 * fixed


def test_batches_behind_draw_by_their_numbers_and_rank() -> None:
    def draws(rank: int) -> list[float]:
        batched = TOKENS.batched(TOKENS.begun(rank, 2))
        return [draw for _, draw in batched.random_map(drawing)]

    assert len({*draws(0), *draws(1)}) == 2 * len(draws(0))


def test_measure_asks_all_examples_in_order() -> None:
    source = stoker.from_arrays(np.arange(50), seed=1)
    base = source.map(stoker.thread_safe(lambda x: x * 2))
    sharded = source.shuffle().shard(rank=1, world_size=2).map(lambda x: x * 2)
    for train in (base, sharded, base.shuffle(), base.take(3)):
        assert train.sizes(int).tolist() == [2 * n for n in range(50)]
    assert base.sizes(lambda x: x / 2).dtype == np.float64
    assert base.sizes(lambda x: int(x) << 40).dtype == np.int64
    with pytest.raises(TypeError, match="returns a number"):
        base.sizes(lambda x: np.zeros(3))
    refused: list[tuple[stoker.Pipeline, str]] = [
        (base.filter(bool), "cannot follow filter"),
        (base.random_map(drawing), "cannot follow random_map"),
        (base.batch(4), "cannot follow batch"),
        (stoker.from_iterable(range(3)), "a stream has no numbers"),
        (stoker.mix([base, base.map(int)]), "measure its parts"),
    ]
    for wrong, said in refused:
        with pytest.raises(ValueError, match=said):
            wrong.sizes(int)


def test_each_rank_measures_all_examples_which_nobody_warns_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.distributed.unsharded._ranks", lambda: 2)
    monkeypatch.setattr("stoker.distributed.unsharded._warned", set())
    train = stoker.from_arrays(np.arange(50), seed=1).map(int)
    assert train.sizes(int).tolist() == list(range(50))
    with pytest.warns(UserWarning, match="each of 2 ranks iterates over all"):
        list(train)


def test_a_function_measures_all_examples_first() -> None:
    data = [np.arange(n % 9 + 1) for n in range(60)]
    lengths = [len(each) for each in data]
    train = stoker.from_dataset(data, seed=1).shuffle()
    builds: list[Callable[[Any], stoker.Pipeline]] = [
        lambda sizes: train.batch_by_tokens(40, sizes, collate=list),
        lambda sizes: train.bucket(4, sizes, collate=list),
        lambda sizes: train.shard(rank=0, world_size=2).balance(sizes).batch(4, collate=list),
    ]
    for build in builds:
        found, expected = ([[len(x) for x in b] for b in build(each)] for each in (len, lengths))
        assert found == expected


def test_what_cannot_be_planned_is_refused() -> None:
    begun, plain, size = TOKENS.begun(), stoker.from_arrays(np.arange(120)), LENGTHS

    def tokens(train: stoker.Pipeline, **more: Any) -> stoker.Pipeline:
        given: dict[str, Any] = {"max_tokens": 400, "sizes": size} | more
        return train.batch_by_tokens(**given)

    before: list[tuple[stoker.Pipeline, str]] = [
        (begun.filter(bool), r"filter.* decides later"),
        (begun.echo(2), r"put an echo behind it"),
        (begun.map(int, max_errors=3), r"decides later"),
        (stoker.from_dataset(np.arange(120), max_errors=3), "remove max_errors="),
        (stoker.from_iterable(range(120)), "a stream has none"),
        (stoker.from_loader([1, 2]), "a loader yields batches"),
        (begun.batch(3), "batch once"),
        (plain.shard(rank=0, world_size=2).shuffle(), r"before \.shard"),
        (begun.take(10), r"before \.shard"),
        (plain.shard(rank=0, world_size=2, remainder="pad"), "leave remainder='pad'"),
        (plain.shard(rank=0, world_size=2, remainder="uneven"), "leave remainder='uneven'"),
        (plain.shuffle().shard(rank=0, world_size=2).balance(size), r"leave .balance"),
    ]
    for train, said in before:
        with pytest.raises(ValueError, match=said):
            tokens(train)
    arguments: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"sizes": None}, TypeError, "a number for each example"),
        ({"max_tokens": 0}, ValueError, "max_tokens= from 1"),
        ({"max_tokens": 3.5}, TypeError, "max_tokens= as a whole number"),
        ({"max_tokens": None}, TypeError, "max_tokens= as a whole number"),
        ({"max_rows": 0}, ValueError, "max_rows= from 1"),
        ({"padded": 1}, TypeError, "padded=True or False"),
        ({"padded": False, "multiple_of": 8}, ValueError, "pads nothing"),
        ({"sizes": size + 0.5}, ValueError, "whole numbers"),
        ({"sizes": -size}, ValueError, "from 0 on"),
        ({"sizes": size[:7]}, ValueError, "but got 7"),
        ({"sizes": "length"}, LookupError, "no field"),
        ({"key": size[:7]}, ValueError, "but got 7"),
    ]
    for more, kind, said in arguments:
        with pytest.raises(kind, match=said):
            tokens(begun, **more)
    large = np.where(np.arange(120) == 17, 500, size)
    with pytest.raises(ValueError, match="example 17 has size 500, and a batch holds 400"):
        iter(tokens(begun, sizes=large))
    assert "about 14 examples, put together from 56" in str(tokens(begun))


def test_a_state_of_other_sizes_is_refused() -> None:
    saved = TOKENS.batched(TOKENS.begun(0, 2))
    next(iter(saved))
    state = saved.state_dict()
    with pytest.raises(stoker.StateError, match="another pipeline"):
        TOKENS.begun(0, 2).batch_by_tokens(400, LENGTHS + 1).load_state_dict(state)
    between = TOKENS.batched(TOKENS.begun(0, 2))
    for _ in between:
        pass
    later = TOKENS.batched(TOKENS.begun(0, 3))
    later.load_state_dict(between.state_dict())
    assert later.epoch == 1
    steps = len(later)
    assert len(list(later)) == steps


def test_as_a_dataloader_it_shows_no_batch_size() -> None:
    train = TOKENS.batched(TOKENS.begun())
    loader = train.as_dataloader()
    assert loader.batch_size is None
    assert len(loader) == len(train)
    assert sum(len(ids) for ids in loader) == 120
