"""Shuffling by blocks: a permutation still, read nearly in sequence, and as random as it says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.schedule import rng
from stoker.schedule.orders.blocks import LARGEST, WINDOW, BlockOrder, cut_to, not_too_large, runs
from stoker.testing import check_resume
from strategies import few, one_in

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=80)


@given(sizes=sizes, seed=st.integers(0, 99), data=st.data())
def test_it_is_a_permutation_addressed_by_number(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    ends = np.cumsum(sizes)
    order = BlockOrder(ends, rng.key(seed, 0, 0))
    whole = order.at(range(len(order))).tolist()
    assert sorted(whole) == list(range(ends[-1]))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert order.at(range(start, stop)).tolist() == whole[start:stop]
    some = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=9))
    assert order.at(np.array(some, np.int64)).tolist() == [whole[place] for place in some]


@given(sizes=st.lists(st.integers(WINDOW, 60), min_size=WINDOW + 1, max_size=60))
def test_few_blocks_are_read_at_a_time_and_each_once(sizes: list[int]) -> None:
    ends = np.cumsum(sizes)
    order = BlockOrder(ends, rng.key(1, 2, 0))
    blocks = np.searchsorted(ends, order.at(range(len(order))), side="right").tolist()
    held: dict[int, None] = {}
    reads = 0
    for block in blocks:  # those used last are kept: the window's, and the one that enters
        reads += block not in held
        held.pop(block, None)
        held[block] = None
        if len(held) > 2 * WINDOW:
            del held[next(iter(held))]
    assert reads <= len(sizes) + 2 * WINDOW


def test_batches_draw_from_as_many_blocks_as_print_says() -> None:
    train = stoker.from_arrays(np.arange(20_000), seed=0).shuffle(block=200).batch(64)
    text = str(train)
    assert ".shuffle(100 blocks)  of 200 examples; a batch draws from about 16 of them" in text
    drawn = [len(set((batch // 200).tolist())) for batch in train]
    assert 14 < np.mean(drawn) <= 17
    small = stoker.from_arrays(np.arange(20_000), seed=0).shuffle(block=200).batch(8)
    assert "a batch draws from about 6 of them" in str(small)
    assert 5 < np.mean([len(set((batch // 200).tolist())) for batch in small]) < 8
    assert "16 of them at a time" in str(stoker.from_arrays(np.arange(99)).shuffle(block=2))


def test_epochs_and_seeds_differ_and_few_blocks_are_shuffled_as_a_whole() -> None:
    def epochs(seed: int, **block: Any) -> list[Any]:
        train = stoker.from_arrays(np.arange(300), seed=seed).shuffle(**block).workers(0)
        return [tuple(map(int, train)) for _ in range(2)]

    found = epochs(0, block=10) + epochs(1, block=10)
    assert len(set(found)) == 4
    assert epochs(0, block=100) == epochs(0) == epochs(0, block=False)


@settings(few(8))
@given(
    length=st.integers(1, 150),
    block=st.integers(1, 5),
    world=st.integers(1, 4),
    anew=st.booleans(),
    remainder=st.sampled_from(["drop", "uneven"]),
    take=st.none() | st.integers(1, 150),
)
def test_ranks_share_an_epoch_and_go_through_blocks_of_their_own(
    length: int, block: int, world: int, anew: bool, remainder: Any, take: int | None
) -> None:
    if length < world:
        return

    def of_rank(rank: int) -> stoker.Pipeline:
        source = stoker.from_arrays(np.arange(length), seed=5).workers(0)
        source = source if take is None else source.take(take)
        source = source.shuffle(block=block) if anew else source
        part = source.shard(rank=rank, world_size=world, remainder=remainder)
        return part if anew else part.shuffle(block=block)

    ranks = [of_rank(rank) for rank in range(world)]
    whole = min(length, take or length)
    if whole < world:
        return
    seen: set[int] = set()
    for epoch in range(3):
        parts = [[int(x) for x in rank] for rank in ranks]
        assert [len(part) for part in parts] == [len(rank) for rank in ranks]
        together = list(itertools.chain(*parts))
        assert (
            len(set(together))
            == len(together)
            == (whole if remainder == "uneven" else whole // world * world)
        )
        assert set(together) <= set(range(whole))
        seen |= set(together)
        if not anew and epoch == 0 and -(-length // block) > WINDOW:  # of blocks each has a run
            borders = sorted((min(part), max(part)) for part in parts)
            assert all(a[1] < b[0] for a, b in itertools.pairwise(borders))


def test_in_a_mixture_each_part_has_its_own_blocks() -> None:
    a = stoker.from_arrays(np.arange(100)).shuffle(block=4)
    b = stoker.from_arrays(np.arange(100, 200)).shuffle()
    train = stoker.mix([a, b], seed=0)
    assert sorted(map(int, train)) == list(range(200))
    assert "shuffle(25 blocks)" in str(train)
    check_resume(lambda: train.batch(8), every=5)


def test_a_state_of_other_blocks_is_refused() -> None:
    rows = stoker.from_arrays(np.arange(1000), seed=1)
    train = rows.shuffle(block=59).batch(8)  # 17 blocks, as with 60
    with iter(train) as batches:
        next(batches)
        state = train.state_dict()
    rows.shuffle(block=59).batch(8).load_state_dict(state)
    with pytest.raises(stoker.StateError, match="another pipeline"):
        rows.shuffle(block=60).batch(8).load_state_dict(state)


def test_a_block_larger_than_any_number_is_the_whole() -> None:
    assert sorted(map(int, stoker.from_arrays(np.arange(20)).shuffle(block=1 << 70))) == list(
        range(20)
    )


def test_parquet_is_shuffled_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    table = pyarrow.table({"id": np.arange(2_000), "x": np.zeros(2_000)})
    parquet.write_table(table, file, row_group_size=20)
    reads: list[int] = []
    read = parquet.ParquetFile.read_row_group

    def counted(self: Any, number: int, **settings: Any) -> Any:
        reads.append(number)
        return read(self, number, **settings)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    # Room for some 40 groups of 100.
    monkeypatch.setattr(
        "stoker.sources.arrow.parquet.usable_memory_bytes", lambda: 4 * 40 * 20 * 16
    )
    monkeypatch.setattr("stoker.sources.arrow.parquet._WHOLE_BYTES", 2_000 * 16)
    train = stoker.from_parquet(file, seed=0).shuffle()
    assert "shuffle(100 blocks)" in str(train)
    assert sorted(int(row["id"]) for row in train.workers(0)) == list(range(2_000))
    assert len(reads) <= 100 + 2 * WINDOW
    assert "blocks" not in str(stoker.from_parquet(file).shuffle(block=False))
    other = stoker.from_parquet(file, seed=0).shuffle(block=False).state_dict()
    with pytest.raises(stoker.StateError, match="another pipeline"):
        train.load_state_dict(other)


@pytest.mark.parametrize("protocol", one_in(2, ["", "file://"]))
def test_small_parquet_files_are_shuffled_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Sorted by class, as such files often are; the order is the same with less memory."""
    import pyarrow
    from pyarrow import parquet

    labels = np.repeat(np.arange(100), 40)
    parquet.write_table(pyarrow.table({"y": labels}), tmp_path / "a.parquet", row_group_size=40)

    def batches() -> list[np.ndarray[Any, Any]]:
        train = stoker.from_parquet(f"{protocol}{tmp_path}/a.parquet", seed=0).shuffle()
        assert "blocks" not in str(train)
        return [batch["y"] for batch in train.batch(64)]

    ample = batches()
    classes = [len(np.unique(batch)) for batch in ample[:-1]]
    assert np.mean(classes) > 45
    # Room for some 20 of the 100 groups.
    monkeypatch.setattr("stoker.sources.arrow.parquet.usable_memory_bytes", lambda: 4 * 20 * 320)
    monkeypatch.setattr("stoker.sources.arrow.parquet._RARELY", 1_000)
    assert [each.tolist() for each in batches()] == [each.tolist() for each in ample]


def test_ends_of_blocks() -> None:
    assert runs(10, 4).tolist() == [4, 8, 10]
    assert runs(8, 4).tolist() == [4, 8]
    assert runs(3, 4).tolist() == [3]
    assert runs(0, 4).tolist() == []
    assert cut_to(np.array([4, 8, 10]), 5, 4).tolist() == [3, 4]
    large = not_too_large(np.array([5, 5 + 2 * LARGEST + 1, 10 + 2 * LARGEST]))
    assert np.diff(large, prepend=0).max() <= LARGEST
    assert {5, 5 + 2 * LARGEST + 1, 10 + 2 * LARGEST} <= set(large.tolist())


def test_ten_million_examples_begin_at_once_in_little_memory() -> None:
    order = BlockOrder(runs(10**9, 10**4), rng.key(0, 0, 0))
    far = order.at(range(5 * 10**8, 5 * 10**8 + 1000))
    assert len(set(far.tolist())) == 1000
    assert len(set((far // 10**4).tolist())) <= 2 * WINDOW


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: stoker.from_arrays(np.arange(9)).shuffle(block=True), ValueError, "no blocks"),
        (lambda: stoker.from_arrays(np.arange(9)).shuffle(block=0), ValueError, "at least one"),
        (lambda: stoker.from_arrays(np.arange(9)).shuffle(block=1.5), TypeError, "neighbours"),  # type: ignore[arg-type]
        (lambda: stoker.from_iterable([1]).shuffle(block=4), ValueError, "use buffer="),
        (lambda: stoker.from_arrays(np.arange(9)).shuffle(buffer=4), ValueError, "for streams"),
    ],
)
def test_wrong_blocks(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
