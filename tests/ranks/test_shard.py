"""Parts of an epoch for several ranks: disjoint, together everything, and each on its own."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from command_line import python
from stoker.schedule.orders.order import TRUE_PERMUTATION_LIMIT
from stoker.schedule.selection import Selection, Share
from strategies import (
    Examples,
    Faulty,
    Spec,
    built,
    few,
    frozen,
    ids,
    jitter,
    small_pools_allowed,
    specs,
    stream,
    through_json,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*are fewer than.*ranks")

WORLDS = st.sampled_from([1, 2, 3, 8])


def flat(pipeline: stoker.Pipeline) -> list[int]:
    with small_pools_allowed():
        return [i for batch in pipeline for i in ids(batch)]


def parts(spec: Spec, world: int, *, uneven: bool, anew: bool) -> list[stoker.Pipeline]:
    """Return the pipelines of all ranks."""
    return [built(replace(spec, shard=(rank, world, uneven, anew)), 0) for rank in range(world)]


# -- what is whose


@few(10)
@given(specs(max_echoes=0, max_examples=60), WORLDS, st.booleans(), st.booleans())
@example(Spec(0, 4), 3, False, False)
@example(Spec(2, 4), 3, False, True)
@example(Spec(2, 4), 8, True, False)
@example(Spec(24, 4), 8, False, False)
def test_parts_are_disjoint_equally_long_and_together_all_but_a_few(
    spec: Spec, world: int, uneven: bool, anew: bool
) -> None:
    spec = replace(spec, drop_last=False)
    ranks = parts(spec, world, uneven=uneven, anew=anew)
    lengths = {len(rank) for rank in ranks}
    for _ in range(3):
        found = [flat(rank) for rank in ranks]
        together = [i for part in found for i in part]
        assert len(set(together)) == len(together)
        assert set(together) <= set(range(spec.examples))
        if uneven:
            assert len(together) == spec.examples
            assert max(map(len, found)) - min(map(len, found)) <= 1
        else:
            assert {len(part) for part in found} == {spec.examples // world}
            assert spec.examples - len(together) <= world - 1
            assert len(lengths) == 1
            assert len({rank.stats().batches for rank in ranks}) == 1
        assert [rank.stats().batches for rank in ranks] == [len(rank) for rank in ranks]


@given(specs(max_examples=50), WORLDS, st.booleans(), st.booleans())
def test_ranks_of_equal_parts_take_equally_many_steps(
    spec: Spec, world: int, anew: bool, twice: bool
) -> None:
    counts = []
    for rank in parts(spec, world, uneven=False, anew=anew):
        found = stream(rank)
        assert len(found) == len(rank) == rank.stats().batches
        counts.append(len(found))
        if twice:
            assert len(stream(rank)) == counts[-1]
    assert len(set(counts)) == 1


@few(8)
@given(st.integers(0, 60), WORLDS, st.integers(0, 2**40), st.booleans(), st.booleans())
def test_before_shuffle_parts_are_fixed_but_for_the_one_left_out(
    examples: int, world: int, seed: int, uneven: bool, shuffle: bool
) -> None:
    spec = Spec(examples, 4, seed=seed, shuffle=shuffle)
    for rank, pipeline in enumerate(parts(spec, world, uneven=uneven, anew=False)):
        own = set(range(rank, examples, world))
        count = len(own) if uneven else examples // world
        seen: set[int] = set()
        for _ in range(max(2, len(own))):  # so many epochs leave out each of them once
            part = flat(pipeline)
            assert len(part) == count
            assert set(part) <= own
            assert len(set(part)) == len(part)
            if not shuffle:
                assert part == sorted(part)
            seen |= set(part)
        if count:
            assert seen == own


@few(6)
@given(st.integers(10, 60), st.sampled_from([2, 3, 8]), st.integers(0, 2**40))
def test_behind_shuffle_parts_are_drawn_anew(examples: int, world: int, seed: int) -> None:
    spec = Spec(examples, 4, seed=seed)
    whole = built(spec, 0)
    ranks = parts(spec, world, uneven=False, anew=True)
    epochs = []
    seen: set[int] = set()
    for _ in range(15):
        order = flat(whole)
        found = [flat(rank) for rank in ranks]
        # Dealt out from the order that everybody has.
        count = examples // world
        assert found == [order[rank::world][:count] for rank in range(world)]
        epochs.append(frozenset(found[0]))
        seen |= {i for part in found for i in part}
    assert len(set(epochs)) > 1
    assert seen == set(range(examples))  # whoever is left out is another one every epoch


def test_orders_within_parts_differ_by_rank_epoch_and_seed() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        found = []
        for pipeline in parts(Spec(120, 4, seed=seed), 2, uneven=False, anew=False):
            found += [tuple(i // 2 for i in flat(pipeline)) for _ in range(2)]
        return found

    every = orders(0) + orders(1)
    assert len(set(every)) == len(every) == 8
    assert {tuple(sorted(order)) for order in every} == {tuple(range(60))}


@given(specs(max_filters=2), st.booleans(), st.booleans())
def test_a_part_of_one_is_the_identity(spec: Spec, uneven: bool, anew: bool) -> None:
    plain, part = built(spec, 0), built(replace(spec, shard=(0, 1, uneven, anew)), 0)
    for _ in range(2):
        assert stream(part) == stream(plain)


# -- resumed


@few(15)
@given(specs(max_examples=60), st.sampled_from([2, 3]), st.booleans(), st.data())
def test_a_state_of_one_rank_continues_every_rank_s_own_stream(
    spec: Spec, world: int, anew: bool, data: st.DataObject
) -> None:
    # As training does, which saves on rank 0 and loads everywhere.
    ranks = parts(spec, world, uneven=False, anew=anew)
    epoch = data.draw(st.integers(0, 2), label="epoch")
    with small_pools_allowed():
        wholes = []
        for rank in ranks:
            rank.set_epoch(epoch)
            wholes.append([frozen(batch) for batch in rank])
        at = data.draw(st.integers(0, max(0, len(wholes[0]) - 1)), label="batches")
        ranks[0].set_epoch(epoch)
        iterator = iter(ranks[0])
        for _ in range(at):
            next(iterator)
        state = through_json(ranks[0].state_dict())
        iterator.close()
        for other, whole in zip(parts(spec, world, uneven=False, anew=anew), wholes, strict=True):
            if not at:
                other.set_epoch(epoch)
            else:
                other.load_state_dict(state)
            assert stream(other) == whole[at:]


def test_states_tell_shards_apart_but_not_ranks() -> None:
    states = {
        shard: built(Spec(24, 4, shard=shard), 0).state_dict()
        for shard in ((0, 2, False, False), (0, 2, False, True), (0, 2, True, False), None)
    }
    for shard, state in states.items():
        for other, _ in states.items():
            pipeline = built(Spec(24, 4, shard=other), 0)
            if shard == other:
                pipeline.load_state_dict(state)
            else:
                with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
                    pipeline.load_state_dict(state)
    built(Spec(24, 4, shard=(1, 2, False, False)), 0).load_state_dict(states[0, 2, False, False])
    with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
        built(Spec(24, 4, shard=(0, 3, False, False)), 0).load_state_dict(
            states[0, 2, False, False], elastic=False
        )


# -- with what leaves examples out


@given(specs(max_echoes=1, max_filters=2, min_filters=1, max_examples=60), WORLDS, st.booleans())
def test_uneven_parts_may_be_filtered(spec: Spec, world: int, anew: bool) -> None:
    spec = replace(spec, drop_last=False, echoes=())
    found = [flat(rank) for rank in parts(spec, world, uneven=True, anew=anew)]
    expected = flat(built(replace(spec, shuffle=False), 0))
    assert sorted(i for part in found for i in part) == expected


SIFTING = {
    "filter": lambda chain: chain.filter(bool, on="id"),
    "filter behind an echo": lambda chain: chain.echo(2).filter(bool, on="id"),
    "own budget": lambda chain: chain.map(stoker.thread_safe(lambda x: x), max_errors=3),
    "fraction": lambda chain: chain.random_map(jitter, on="x", max_errors="10%"),
    "budget": lambda chain: chain,
}


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("how", SIFTING)
def test_equal_parts_are_not_filtered_and_that_is_told_before_the_first_batch(
    how: str, anew: bool
) -> None:
    def build(world: int, remainder: Any = "drop") -> stoker.Pipeline:
        budget = 3 if how == "budget" else 0
        chain = stoker.from_dataset(Examples(20), seed=0, max_errors=budget)
        chain = chain.shuffle() if anew else chain
        return SIFTING[how](chain.shard(rank=0, world_size=world, remainder=remainder)).batch(4)

    with pytest.raises(ValueError, match=r"equally many steps.*remainder='uneven'") as caught:
        iter(build(2))
    assert "\n" not in str(caught.value)
    assert stream(build(2, "uneven"))
    assert stream(build(1))  # alone, nobody is waited for


def test_a_stream_s_equal_parts_are_not_filtered_either() -> None:
    chain = stoker.from_iterable(range(20), seed=0)
    with pytest.raises(ValueError, match="equally many steps"):
        iter(chain.shard(rank=0, world_size=2).filter(bool).batch(2))
    assert list(chain.shard(rank=0, world_size=2, remainder="uneven").filter(bool).batch(2))


# -- wrong arguments


def data() -> stoker.Pipeline:
    return stoker.from_dataset(Examples(20), seed=0)


def shard(**arguments: Any) -> Any:
    return lambda: data().shard(**arguments)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "rank alone": (shard(rank=0), ValueError, "together"),
    "world alone": (shard(world_size=2), ValueError, "together"),
    "rank of world": (shard(rank=2, world_size=2), ValueError, "rank=2, world_size=2"),
    "rank below 0": (shard(rank=-1, world_size=2), ValueError, "rank=-1"),
    "world of 0": (shard(rank=0, world_size=0), ValueError, "world_size=0"),
    "rank true": (shard(rank=True, world_size=2), TypeError, "rank=.*True"),
    "rank text": (shard(rank="0", world_size=2), TypeError, "rank=.*'0'"),
    "world of a float": (shard(rank=0, world_size=2.0), TypeError, "world_size=.*2.0"),
    "behind a map": (
        lambda: data().map(lambda x: x).shard(rank=0, world_size=2),
        ValueError, r"source, \.shuffle"
    ),
    "behind a filter": (
        lambda: data().filter(bool).shard(rank=0, world_size=2), ValueError, r"cannot follow filter"
    ),
    "behind an echo": (
        lambda: data().echo(2).shard(rank=0, world_size=2), ValueError, r"cannot follow echo"
    ),
    "behind a batch": (
        lambda: data().batch(2).shard(rank=0, world_size=2), ValueError, r"cannot follow batch"
    ),
    "twice": (
        lambda: data().shard(rank=0, world_size=2).shard(rank=0, world_size=2),
        ValueError, "cannot follow"
    ),
    "a loader": (
        lambda: stoker.from_loader([np.zeros(2)]).shard(rank=0, world_size=2),
        ValueError,
        "DistributedSampler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_in_one_line_that_says_what_to_do(case: str) -> None:
    wrong, kind, says = WRONG[case]
    with pytest.raises(kind, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_numpy_s_numbers_are_ranks_and_print_shows_them() -> None:
    rank: Any = np.int64(1)
    world: Any = np.int64(3)
    chain = data().shard(rank=rank, world_size=world).batch(2)
    assert flat(chain) == [1, 4, 7, 10, 13, 16]  # the first epoch leaves out the last
    assert "shard(rank=1, world_size=3)  parts of equal length" in str(chain)
    assert "uneven" in str(data().shard(rank=1, world_size=3, remainder="uneven"))
    assert "shard(rank=1, world_size=3)" in repr(chain)


def test_an_error_names_the_example_of_the_whole_not_of_the_part() -> None:
    for anew in (False, True):
        spec = Spec(40, 4, shard=(1, 3, False, anew))
        bad = flat(built(spec, 0))[7]
        with pytest.raises(stoker.StageError, match="cannot be read") as caught:
            list(built(spec, 0, data=Faulty(40, [bad])))
        assert caught.value.index == bad


# -- large epochs


ABOVE = st.integers(TRUE_PERMUTATION_LIMIT - 2, TRUE_PERMUTATION_LIMIT + 10**5)


@few(6)
@given(
    st.one_of(ABOVE, st.integers(TRUE_PERMUTATION_LIMIT, 10**12)),
    st.integers(0, 2**40),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_orders_of_large_epochs_say_the_same_by_spans_and_one_by_one(
    length: int, seed: int, world: int, uneven: bool, anew: bool, data: st.DataObject
) -> None:
    share = Share(data.draw(st.integers(0, world - 1)), world, uneven, anew)
    selection = Selection(True, share)
    order = selection.rank_order(length, seed, data.draw(st.integers(0, 5)))
    assert len(order) == share.count(length)
    edge = (1 << 16) * data.draw(st.integers(0, len(order) // (1 << 16)), label="block")
    start = max(0, edge - data.draw(st.integers(0, 20)))
    stop = min(len(order), start + data.draw(st.integers(0, 40)))
    found = order.span(start, stop).tolist()
    assert found == [int(order.span(n, n + 1)[0]) for n in range(start, stop)]
    assert found == order.at(order.places(range(start, stop))).tolist()
    assert all(0 <= index < length for index in found)
    if not anew:
        assert all(index % world == share.rank for index in found)
    again = selection.rank_order(length, seed, 0)
    assert order.span(0, 0).tolist() == again.span(5, 5).tolist() == []


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_parts_of_a_large_epoch_are_disjoint_and_together_all_but_a_few(
    uneven: bool, anew: bool, world: int
) -> None:
    length = TRUE_PERMUTATION_LIMIT + 1003
    counted = np.zeros(length, np.int8)
    for rank in range(world):
        share = Share(rank, world, uneven, anew)
        order = Selection(True, share).rank_order(length, 7, 3)
        counted[order.span(0, len(order))] += 1
    assert counted.max() == 1
    missing = length - int(counted.sum())
    assert missing == (0 if uneven else length % world)


class Numbers:
    """As many as you like."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"id": index}


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_billion_examples_take_no_memory_to_speak_of(anew: bool, filtered: bool) -> None:
    def build() -> stoker.Pipeline:
        chain = stoker.from_dataset(Numbers(10**9), seed=0)
        chain = chain.shuffle() if anew else chain
        chain = chain.shard(rank=5, world_size=8, remainder="uneven" if filtered else "drop")
        chain = chain if anew else chain.shuffle()
        chain = chain.filter(lambda i: i % 3 > 0, on="id") if filtered else chain
        return chain.echo(2, pool=32).batch(8).workers(0)

    tracemalloc.start()
    try:
        pipeline = build()
        found = []
        with iter(pipeline) as iterator:
            for _ in range(70):
                found += ids(next(iterator))
            state = through_json(pipeline.state_dict())
            tail = [frozen(next(iterator)) for _ in range(5)]
        restored = build()
        restored.load_state_dict(state)
        with iter(restored) as iterator:
            assert [frozen(next(iterator)) for _ in range(5)] == tail
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6
    assert len(json.dumps(state)) < 8192
    assert max(found) > 10**8
    if not anew:
        assert {i % 8 for i in found} == {5}


# -- without a process group; with one: test_agreement.py


def test_without_a_group_this_is_the_only_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (None, "", "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size is not None:
            monkeypatch.setenv("WORLD_SIZE", size)
        remainder: Any
        for remainder in ("drop", "uneven"):
            alone = data().shuffle().shard(remainder=remainder).batch(4)
            assert stream(alone) == stream(data().shuffle().batch(4))
            assert "world_size=1" in str(alone)
            assert "one process: there is no process group" in str(alone)
    assert "process group" not in str(data().shard(rank=0, world_size=2))


def test_asking_for_a_group_does_not_import_torch() -> None:
    code = (
        "import sys, stoker, numpy as np\n"
        "chain = stoker.from_arrays(np.zeros(4), seed=0)\n"
        "list(chain.shard(rank=0, world_size=2).batch(2)), list(chain.batch(2))\n"
        "list(chain.shard().batch(2))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_fewer_examples_than_ranks_are_warned_of() -> None:
    pipeline = stoker.from_arrays(np.arange(3), seed=0).shard(rank=1, world_size=4).batch(2)
    says = r"3 examples are fewer than 4 ranks.*remainder='uneven'"
    with pytest.warns(UserWarning, match=says) as caught:
        assert list(pipeline) == []
    assert [said.filename for said in caught] == [__file__]
    kept = stoker.from_arrays(np.arange(3), seed=0).shard(rank=1, world_size=4, remainder="uneven")
    assert [int(x) for x in kept] == [1]
