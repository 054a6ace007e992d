"""``.shard(remainder="pad")``: each example once over all ranks, and equal rows on each."""

from __future__ import annotations

import collections
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from scripts import REAL_WORLDS, told_by
from strategies import few, one_in, through_json

WORLDS = st.integers(1, 8)
PADS: Any = st.sampled_from(["pad", "pad_full"])


def padded(
    length: int, world: int, batch: int, pad: Any = "pad", **more: Any
) -> list[stoker.Pipeline[Any]]:
    """Return the pipelines of all ranks, over the numbers themselves."""
    return [
        stoker.from_arrays(np.arange(length), seed=0)
        .shard(rank=rank, world_size=world, **more, remainder=pad)
        .batch(batch)
        for rank in range(world)
    ]


def steps(ranks: list[stoker.Pipeline[Any]]) -> list[tuple[list[Any], list[Any]]]:
    """Return what all ranks handed out in each step, and what ``last.valid`` said of it."""
    found: list[Any] = []
    running = [iter(rank) for rank in ranks]
    while True:
        batches = [next(iterator, None) for iterator in running]
        ended = [each is None for each in batches]
        if any(ended):
            assert all(ended), "ranks take unequally many steps"
            return found
        found.append((batches, [rank.last.valid for rank in ranks]))


# -- what is whose


@given(st.integers(0, 70), WORLDS, st.integers(1, 9), PADS)
@example(3, 8, 4, "pad")
@example(16, 2, 4, "pad_full")
def test_what_ranks_gather_is_the_data_in_order_and_then_padding(
    length: int, world: int, batch: int, pad: Any
) -> None:
    ranks = padded(length, world, batch, pad)
    gathered: list[int] = []
    taken = steps(ranks)
    assert {len(rank) for rank in ranks} == {len(taken)}
    for number, (batches, valid) in enumerate(taken):
        rows = {len(each) for each in batches} | {len(each) for each in valid}
        assert len(rows) == 1
        is_last = number == len(taken) - 1
        assert rows == {batch} or (is_last and pad == "pad")
        together, real = np.concatenate(batches), np.concatenate(valid)
        assert (np.diff(real.astype(int)) <= 0).all(), "padding is at the end"
        assert real.all() or is_last
        assert (together[~real] == length - 1).all()
        gathered += together[real].tolist()
    assert gathered == list(range(length))
    assert sum(len(each[0][0]) for each in taken) * world - length < world * (
        batch if pad == "pad_full" else 1
    )


@given(st.integers(1, 60), st.integers(0, 10), WORLDS, st.integers(1, 30))
def test_of_a_part_of_the_data_the_last_of_the_part_is_repeated(
    length: int, skipped: int, world: int, taken: int
) -> None:
    data = stoker.from_arrays(np.arange(length), seed=0).skip(skipped).take(taken)
    ranks = [data.shard(rank=rank, world_size=world, remainder="pad") for rank in range(world)]
    part = list(range(length))[skipped : skipped + taken]
    found = [int(x) for batches, _ in steps(ranks) for x in batches]
    assert found[: len(part)] == part
    assert set(found[len(part) :]) <= set(part[-1:])
    assert len(found) == -(-len(part) // world) * world
    assert {len(rank) for rank in ranks} == {len(found) // world}


def test_a_trillion_examples_take_no_memory() -> None:
    class Numbers:
        def __len__(self) -> int:
            return 10**12 + 1

        def __getitem__(self, index: int) -> int:
            return index

    ranks = [
        stoker.from_dataset(Numbers(), seed=0)
        .shard(rank=rank, world_size=7, remainder="pad")
        .batch(4)
        for rank in (0, 6)
    ]
    for rank in ranks:
        rank.resume_at(len(rank) - 1)
    (first,), (last,) = (list(iter(rank)) for rank in ranks)
    assert first[0] < 10**12
    assert last[-1] == 10**12
    assert ranks[1].last.valid.tolist()[-1] is False


# -- with everything else


@stoker.thread_safe
class Rows:
    """Examples that know their number; a module's class, so that processes can have it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": np.full(3, index, np.float32)}


@stoker.thread_safe
def shaken(x: Any, rng: Any) -> Any:
    return x + rng.random(3).astype(np.float32)


@stoker.thread_safe
def halved(batch: Any) -> Any:
    return {**batch, "half": batch["id"] // 2}


WORKERS: list[dict[str, Any]] = [{"n": 0}, {"n": 3}, {"n": 2, "kind": "process"}]


@pytest.mark.parametrize("workers", one_in(2, WORKERS))
@pytest.mark.parametrize("pad", one_in(2, ["pad", "pad_full"]))
def test_with_maps_a_cache_workers_and_a_device_the_mask_is_that_of_the_rows(
    workers: dict[str, Any], pad: Any
) -> None:
    import torch

    def build(rank: int, **how: Any) -> stoker.Pipeline[Any]:
        chain = stoker.from_dataset(Rows(19), seed=3).shard(
            rank=rank, world_size=3, mask="valid", remainder=pad
        )
        chain = chain.cache("1MiB", version="1").random_map(shaken, on="x").batch(4)
        return chain.map(halved).to_torch().workers(**how)

    ids: list[int] = []
    ranks, alone = [build(r, **workers) for r in range(3)], [build(r, n=0) for r in range(3)]
    for _ in range(2):  # in the second epoch from the cache
        plain = steps(alone)
        for (batches, valid), (others, _) in zip(steps(ranks), plain, strict=True):
            for batch, mask, other in zip(batches, valid, others, strict=True):
                assert list(batch) == ["id", "x", "half", "valid"]
                assert batch["valid"].dtype == torch.bool
                assert batch["valid"].tolist() == mask.tolist()
                assert all(torch.equal(batch[name], other[name]) for name in batch)
            ids += [i for b in batches for i in b["id"][b["valid"]].tolist()]
    assert ids == 2 * list(range(19))


def test_copies_of_the_last_example_are_drawn_anew() -> None:
    def build(rank: int) -> stoker.Pipeline[Any]:
        chain = stoker.from_dataset(Rows(5), seed=3).shard(
            rank=rank, world_size=4, remainder="pad_full"
        )
        return chain.random_map(shaken, on="x").batch(2)

    drawn = [tuple(x) for rank in range(4) for batch in build(rank) for x in batch["x"].tolist()]
    assert len(drawn) == len(set(drawn)) == 8


@few(10)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), PADS, st.data())
def test_saved_anywhere_the_tail_and_its_mask_are_the_same_on_every_rank(
    length: int, world: int, batch: int, pad: Any, data: st.DataObject
) -> None:
    whole = steps(padded(length, world, batch, pad, mask="valid"))
    at = data.draw(st.integers(0, len(whole)))
    first = padded(length, world, batch, pad)[0]
    with iter(first) as batches:
        for _ in range(at):
            next(batches)
        state = through_json(first.state_dict())  # of one rank, and with another mask, for all
    ranks = padded(length, world, batch, pad, mask="valid")
    for rank in ranks:
        rank.load_state_dict(state)
    tail = steps(ranks)
    expected = whole[at:] if at < len(whole) else whole  # behind the last batch: the next epoch
    assert [json.dumps(shown(step)) for step in tail] == [json.dumps(shown(s)) for s in expected]
    skipping = padded(length, world, batch, pad, mask="valid")
    for rank in skipping:
        rank.resume_at(at)
    assert [shown(step) for step in steps(skipping)] == [shown(step) for step in whole[at:]]


def shown(step: Any) -> Any:
    batches, valid = step
    return [[x.tolist(), mask.tolist()] for x, mask in batches], [each.tolist() for each in valid]


def test_states_fit_only_the_same_padding() -> None:
    state = padded(20, 3, 3)[0].state_dict()
    with pytest.raises(stoker.StateError, match="pad=equal"):
        padded(20, 3, 3, "pad_full")[0].load_state_dict(state)


def test_print_and_the_outputs_without_batches_tell() -> None:
    ranks = [
        stoker.from_arrays(np.arange(5), seed=0).shard(rank=r, world_size=2, remainder="pad")
        for r in (0, 1)
    ]
    found = steps(ranks)
    assert [[int(x) for x in batches] for batches, _ in found] == [[0, 1], [2, 3], [4, 4]]
    assert [valid[1].tolist() for _, valid in found] == [[True], [True], [False]]
    assert (
        "shard(rank=0, world_size=2, remainder='pad')  all examples; padded with the last"
        in str(ranks[0])
    )
    assert ranks[0].last.number.tolist() == [1]


def test_everywhere_else_all_that_was_handed_out_is_valid() -> None:
    plain = stoker.from_arrays(np.arange(10), seed=0).shuffle().echo(2).batch(4)
    assert plain.last.valid.tolist() == []
    for batch in plain:
        assert plain.last.valid.tolist() == [True] * len(batch)
    loader = stoker.echo([np.arange(3), np.arange(2)], 2)
    for batch in loader:
        assert loader.last.valid.tolist() == [True] * len(batch)


# -- the mask as a field


class Photo(NamedTuple):
    image: Any
    label: int


def photo(row: Any) -> Photo:
    return Photo(np.zeros(2), int(row))


def counted(batch: Any) -> Any:
    return collections.UserDict(ids=batch)


def masked(change: Any, name: str = "valid", **batch: Any) -> Any:
    """Return the last batch of the last of two ranks."""
    chain = stoker.from_arrays(np.arange(5), seed=0).shard(
        rank=1, world_size=2, mask=name, remainder="pad"
    )
    *_, last = change(chain).batch(2, **batch)
    return last


def test_dicts_get_a_key_tuples_an_element_and_all_else_becomes_a_pair() -> None:
    for_dicts = masked(lambda p: p.map(lambda x: {"x": x}))
    assert for_dicts["valid"].tolist() == [False]
    assert masked(lambda p: p.map(lambda x: {"x": x}), "real")["real"].tolist() == [False]
    x, y, valid = masked(lambda p: p.map(lambda x: (x, x)))
    assert (x.tolist(), y.tolist(), valid.tolist()) == ([4], [4], [False])
    named = masked(lambda p: p.map(photo))
    assert named._fields == ("image", "label", "valid")
    assert type(named).__name__ == "Photo"
    again = pickle.loads(pickle.dumps(named))
    assert again.label.tolist() == [4]
    assert again.valid.tolist() == [False]
    for collate in (None, list):
        batch, valid = masked(lambda p: p.map(lambda x: str(x)), collate=collate)
        assert batch == ["4"]
        assert valid.tolist() == [False]
    of_its_own = masked(lambda p: p, collate=counted)
    assert sorted(of_its_own) == ["ids", "valid"]


@pytest.mark.parametrize(
    "change",
    [stoker.thread_safe(lambda x: {"valid": x}), stoker.thread_safe(lambda x: Photo(x, 1))],
)
def test_a_field_that_is_there_already_is_not_written_over(change: Any) -> None:
    name = "valid" if isinstance(change(1), dict) else "label"
    for tail in (lambda p: p, lambda p: p.to_torch()):
        chain = stoker.from_arrays(np.arange(5), seed=0)
        chain = chain.shard(rank=1, world_size=2, mask=name, remainder="pad").map(change).batch(2)
        with pytest.raises(stoker.StageError, match="give another name"):
            list(tail(chain))


# -- what is refused


def numbers() -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(20), seed=0)


def data(**more: Any) -> stoker.Pipeline[Any]:
    return numbers().shard(rank=0, world_size=2, **more)


def dealt() -> stoker.Pipeline[Any]:
    return data(remainder="pad")


def first(train: stoker.Pipeline[Any]) -> Any:
    return next(iter(train))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # Where it stands.
    "behind a shuffle": (
        lambda: numbers().shuffle().shard(rank=0, world_size=2, remainder="pad"),
        r"leave \.shuffle\(\) out",
    ),
    "behind a mixture": (
        lambda: stoker.mix([numbers()]).shard(rank=0, world_size=2, remainder="pad"),
        "evaluate its parts",
    ),
    "behind a stream": (
        lambda: stoker.from_iterable(range(9)).shard(rank=0, world_size=2, remainder="pad"),
        r"a stream has none: \.shard\(remainder='uneven'\)",
    ),
    "behind a loader": (
        lambda: stoker.from_loader([1]).shard(rank=0, world_size=2, remainder="pad"),
        "DistributedSampler",
    ),
    "another word": (lambda: data(remainder="fill"), "one of .*'pad_full'"),
    "a mask alone": (lambda: data(mask="valid"), "add remainder='pad'"),
    # What stands behind it, before the first batch.
    "shuffle": (lambda: first(dealt().shuffle().batch(2)), "leave it out of evaluation"),
    "take": (lambda: first(dealt().take(3).batch(2)), r"put \.take\(3\) before \.shard\(\)"),
    "skip": (lambda: first(dealt().skip(3).batch(2)), r"put \.skip\(3\) before \.shard\(\)"),
    "filter": (lambda: first(dealt().filter(bool).batch(2)), r"filter\(bool\) after it does not"),
    "own budget": (lambda: first(dealt().map(abs, max_errors=2).batch(2)), "after it does not"),
    "echo": (lambda: first(dealt().echo(2).batch(2)), r"echo\(2\).* after it does not"),
    "auto": (lambda: first(dealt().echo().batch(2)), "after it does not"),
    "batch echo": (lambda: first(dealt().batch(2).echo(2)), "after it does not"),
    "pack": (lambda: first(dealt().pack(8).batch(2)), "after it does not"),
    "steps": (lambda: first(dealt().batch(2).steps(3)), r"remove \.steps\(3\)"),
    "repeat": (lambda: first(dealt().batch(2).repeat().steps(3)), r"remove \.repeat\(\)"),
    "drop_last": (lambda: first(dealt().batch(3, drop_last=True)), "use remainder='pad_full'"),
    "budget": (
        lambda: first(
            stoker.from_dataset(Rows(9), seed=0, max_errors=3)
            .shard(rank=0, world_size=2, remainder="pad")
            .batch(2)
        ),
        r"max_errors=3 may leave some out",
    ),
    "a mask without batches": (lambda: first(data(remainder="pad", mask="valid")), r"last\.valid"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it_is_refused_before_the_first_batch(case: str) -> None:
    build, says = REFUSED[case]
    with pytest.raises(ValueError, match=says) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_mask_is_a_name_and_full_batches_may_drop_the_last() -> None:
    wrong: Any
    for wrong in (True, 3, ""):
        with pytest.raises(TypeError, match="a field's name"):
            data(remainder="pad", mask=wrong)
    assert [len(b) for b in data(remainder="pad_full").batch(3, drop_last=True)] == [3, 3, 3, 3]


# -- real ranks

GATHERED = """
    import itertools
    SIZES = [(11, 4), (11, 2), (1, 4), (16, 4), (17, 4), (3, 4), (9, 4)]
    told = {"gathered": [], "metric": []}
    for (n, batch), pad in itertools.product(SIZES, ("pad", "pad_full")):
        held_out = stoker.from_arrays(np.arange(n), seed=0).shard(mask="valid", remainder=pad)
        held_out = held_out.batch(batch).workers(2).to_torch()
        everything, total = [], torch.zeros(2)
        for ids, valid in held_out:
            both = torch.stack([ids, valid.long()])
            of_all = [torch.empty_like(both) for _ in range(WORLD)]
            dist.all_gather(of_all, both)  # as long on each, or this would fail
            rows, real = torch.cat(of_all, 1)
            everything += rows[real.bool()].tolist()
            total += torch.tensor([ids[valid].sum(), valid.sum()])
        dist.all_reduce(total)
        told["gathered"].append(everything)
        told["metric"].append(total.tolist())
"""


@pytest.mark.full  # in short: test_what_ranks_gather_is_the_data_in_order_and_then_padding
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_real_ranks_gather_every_example_once(tmp_path: Path, world: int) -> None:
    sizes = [n for n in (11, 11, 1, 16, 17, 3, 9) for _ in range(2)]
    for told in told_by(tmp_path, world, GATHERED):
        assert told["gathered"] == [list(range(n)) for n in sizes]
        assert told["metric"] == [[n * (n - 1) / 2, n] for n in sizes]
