"""Choosing examples by number: select, split and folds, without reading what is not chosen."""

from __future__ import annotations

import io
import itertools
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import stoker
from stoker.errors import StageError
from stoker.schedule.orders.subset import EligibleIndices, Subset
from stoker.testing import check_resume
from strategies import few


@st.composite
def sets(draw: st.DrawFn) -> NDArray[np.bool_]:
    """A mask with an example at least: sparse, dense, or in runs, across the ends of blocks."""
    length = draw(st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 5000])))
    density = draw(st.sampled_from([0.01, 0.03, 0.1, 0.5, 0.97, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask: NDArray[np.bool_] = random.random(length) < density
    if draw(st.booleans()):
        mask[: length // 3] = False
    mask[draw(st.integers(0, length - 1))] = True
    return mask


@few(100)
@given(mask=sets(), seed=st.integers(0, 2**32), step=st.sampled_from([1, 2, 7, 100]))
def test_a_set_answers_as_its_numbers_do(mask: NDArray[np.bool_], seed: int, step: int) -> None:
    numbers, random = np.flatnonzero(mask), np.random.default_rng(seed)
    by_mask, by_numbers = Subset.of_mask(mask), Subset(numbers, len(mask))
    assert by_mask.digest == by_numbers.digest
    assert by_mask.nbytes == by_numbers.nbytes <= min(4 * len(numbers), len(mask) // 7) + 200
    start, stop = np.sort(random.integers(0, len(numbers) + 1, 2)).tolist()
    places = random.integers(0, len(numbers), 50)
    ends = np.sort(random.integers(0, len(mask) + 1, 20))
    asked = random.integers(0, len(mask), 50)
    for chosen in (by_mask, by_numbers):
        assert len(chosen) == len(numbers)
        assert np.array_equal(chosen.at(places), numbers[places])
        span = range(start, stop, step)
        assert np.array_equal(chosen.at(span), numbers[start:stop:step])
        assert np.array_equal(chosen.has(asked), mask[asked])
        assert np.array_equal(chosen.count_below(ends), np.searchsorted(numbers, ends))
        cut = EligibleIndices(chosen, start, stop)
        assert np.array_equal(cut.has(asked), np.isin(asked, numbers[start:stop]))


def test_a_hundred_million_examples_take_thirteen_megabytes() -> None:
    mask = np.ones(100_000_000, np.bool_)
    mask[::7] = False
    tracemalloc.start()
    try:
        train = stoker.from_dataset(range(len(mask)), seed=0).select(mask).shuffle().batch(4)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 12_500_000 < kept < 14_000_000
    assert len(train) == -(-85_714_285 // 4)
    batch = next(iter(train))
    assert (batch % 7).all()


class Reads:
    """A dataset that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, [0] * length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == 42:
            raise ValueError("a bad example")
        self.read[index] += 1
        return index

    def __deepcopy__(self, memo: Any) -> Reads:
        return self


WAYS: dict[str, Any] = {
    "numbers": [77, 3, 50, 21],
    "mask": np.isin(np.arange(100), [3, 21, 50, 77]),
    "function": lambda number, name: number in (3, 21, 50, 77) and name == str(number),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_chosen_is_read_in_the_order_of_the_source(way: str) -> None:
    data = Reads(100)
    train = stoker.from_dataset(data, seed=0).select(WAYS[way]).workers(0)
    assert len(train) == 4
    assert list(train) == [3, 21, 50, 77]
    assert sum(data.read) == 4
    assert "select(4 of 100)" in str(train)


def test_errors_name_the_number_in_the_source() -> None:
    train = stoker.from_dataset(Reads(100), seed=0).select([41, 42, 43]).batch(3)
    with pytest.raises(StageError, match="example 42: ValueError: a bad example"):
        list(train)


def test_numbers_are_those_of_the_source_behind_other_choices() -> None:
    data = stoker.from_arrays(np.arange(100), seed=0)
    some = data.skip(10).take(50).select(np.arange(0, 100, 5)).select(lambda number, _: number > 20)
    assert [int(x) for x in some] == [25, 30, 35, 40, 45, 50, 55]
    assert [int(x) for x in some.take(2)] == [25, 30]


@stoker.thread_safe
def digits(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.integers(10)


BEHIND: dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]] = {
    "plain": lambda p: p.batch(8),
    "shuffled": lambda p: p.shuffle().random_map(digits).batch(8),
    "blocks": lambda p: p.shuffle(block=3).shard(rank=1, world_size=2).batch(8),
    "fixed part": lambda p: p.shard(rank=1, world_size=3).shuffle().batch(8),
    "uneven": lambda p: p.shuffle().shard(rank=0, world_size=3, remainder="uneven").batch(8),
    "padded": lambda p: p.shard(rank=2, world_size=3, remainder="pad").batch(8),
    "echo": lambda p: p.shuffle().shard(rank=1, world_size=2).echo(1.5).random_map(digits).batch(8),
    "filter": lambda p: p.shuffle().filter(stoker.thread_safe(lambda x: x % 3)).batch(8),
    "threads": lambda p: p.shuffle().map(stoker.thread_safe(lambda x: x + 1)).batch(8).workers(2),
    "cut": lambda p: p.take(70).shuffle().take(50).batch(8),
}


@pytest.mark.parametrize("behind", BEHIND)
def test_what_follows_sees_the_chosen_alone(behind: str) -> None:
    """It is as over a source that has no others, and resumes at every batch."""
    numbers = np.flatnonzero(np.arange(200) % 7 < 3)
    whole = stoker.from_arrays(np.arange(200), seed=5).select(numbers)
    alone = stoker.from_arrays(numbers, seed=5)
    if behind != "blocks":  # the ends of blocks lie elsewhere
        for expected, found in zip(BEHIND[behind](alone), BEHIND[behind](whole), strict=True):
            assert stoker.testing.equal(expected, found)
    assert check_resume(lambda: BEHIND[behind](whole.take(200))) > 0


def test_blocks_keep_neighbours_together() -> None:
    source = stoker.from_arrays(np.arange(4_000), seed=1)
    mask = np.arange(4_000) % 3 > 0
    train = source.select(mask).shuffle(block=40)
    found = [int(x) for x in train]
    assert sorted(found) == np.flatnonzero(mask).tolist()
    window = [x // 40 for x in found[200:220]]
    assert len(set(window)) <= 17


def test_parts_of_a_mixture_are_chosen() -> None:
    a = stoker.from_arrays(np.arange(100)).select(np.arange(100) < 40).shuffle()
    b = stoker.from_arrays(np.arange(1_000, 1_100)).select([7, 5])
    train = stoker.mix([a, b], stop="all", seed=0).batch(10)
    seen = {int(x) for batch in train for x in batch}
    assert seen == {*range(40), 1_005, 1_007}


def test_a_cache_keeps_the_chosen_alone() -> None:
    data = Reads(100)
    train = stoker.from_dataset(data, seed=0).select(range(50, 90)).shuffle()
    train = train.cache("1MiB", version="1").batch(8).workers(0)
    first, second = list(train), list(train)
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(50, 90))
    assert sum(data.read) < 60  # a few are read twice, to see that they do not change
    assert not any(data.read[:50])


def test_a_state_of_other_examples_is_refused() -> None:
    source = stoker.from_arrays(np.arange(100), seed=1)
    train = source.select(range(50)).batch(4)
    next(iter(train))
    other = source.select(range(1, 51)).batch(4)
    with pytest.raises(stoker.StateError, match="select"):
        other.load_state_dict(train.state_dict())


@few(30)
@given(
    length=st.integers(10, 300),
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    classes=st.integers(1, 6),
    seed=st.integers(0, 2**40),
)
def test_parts_are_disjoint_and_hold_all(
    length: int, shares: list[int], classes: int, seed: int
) -> None:
    total = sum(shares)
    fractions = [share / total for share in shares]
    labels = np.random.default_rng(seed).integers(0, classes, length)
    data = stoker.from_arrays(np.arange(length))
    for stratify in (None, labels):
        if stratify is None and any(fraction * length < 1.5 for fraction in fractions):
            continue  # a part would be empty
        if stratify is not None and any(fraction * length < 2 * classes for fraction in fractions):
            continue
        parts = data.split(*fractions, seed=seed, stratify=stratify)
        found = [[int(x) for x in part] for part in parts]
        assert sorted(itertools.chain(*found)) == list(range(length))
        for part, fraction in zip(found, fractions, strict=True):
            assert part == sorted(part)
            if stratify is None:
                assert abs(len(part) - fraction * length) < 1
                continue
            for label in range(classes):
                wanted = fraction * np.count_nonzero(labels == label)
                have = np.count_nonzero(labels[part] == label)
                assert np.floor(wanted - 1e-6) <= have <= np.ceil(wanted + 1e-6)


@few(20)
@given(length=st.integers(40, 200), k=st.integers(2, 5), seed=st.integers(0, 2**40))
def test_each_example_is_validated_in_one_fold(length: int, k: int, seed: int) -> None:
    labels = np.arange(length) % 3
    data = stoker.from_arrays(np.arange(length)).select(np.arange(length) > 4)
    folds = data.folds(k, seed=seed, stratify=labels)
    valid = [[int(x) for x in part] for _, part in folds]
    assert sorted(itertools.chain(*valid)) == list(range(5, length))
    for (train, _), held_out in zip(folds, valid, strict=True):
        assert [int(x) for x in train] == sorted({*range(5, length)} - {*held_out})
        counts = np.bincount(labels[held_out], minlength=3)
        assert np.ptp(counts - np.bincount(labels[5:], minlength=3) / k) < 2
    with pytest.raises(ValueError, match="from 2"):
        data.folds(1)


def cats_and_dogs(folder: Path, count: int) -> stoker.Pipeline[Any]:
    """Return a folder of so many of each, which say what they are."""
    for kind in ("cat", "dog"):
        (folder / kind).mkdir()
        for number in range(count):
            (folder / kind / f"{number:02}.txt").write_text(kind)
    return stoker.from_folder(folder, extensions=[".txt"], seed=0)


def test_the_first_examples_of_a_folder_are_said_to_be_of_one_class(tmp_path: Path) -> None:
    data = cats_and_dogs(tmp_path, 4)
    with pytest.warns(UserWarning, match=r"one class, 'cat'.* \.take\(3, seed=0\)"):
        assert [x.label for x in data.take(3)] == [0, 0, 0]
    for mixed in (data.take(5), data.take(4, seed=1), data.shuffle().take(3), data.skip(2).take(3)):
        assert len({x.label for x in mixed}) == 2


def test_a_seed_takes_examples_of_all_classes() -> None:
    data = stoker.from_arrays(np.arange(90) // 30, seed=5)
    first, drawn = data.take(12), data.take(12, seed=1)
    assert {int(x) for x in first} == {0}
    assert {int(x) for x in drawn} == {0, 1, 2}
    assert [int(x) for x in drawn] == [int(x) for x in data.take(12, seed=1)]
    assert len(data.take(500, seed=1)) == 90
    with pytest.raises(ValueError, match="from 1"):
        data.take(0, seed=1)


def test_a_split_depends_on_its_own_seed_alone() -> None:
    def of(pipeline_seed: int, seed: int) -> list[int]:
        data = stoker.from_arrays(np.arange(100), seed=pipeline_seed)
        return [int(x) for x in data.split(0.9, seed=seed)[1]]

    assert of(1, 0) == of(2, 0)
    assert of(1, 0) != of(1, 1)


def test_a_part_is_split_again() -> None:
    data = stoker.from_arrays(np.arange(200))
    labels = np.arange(200) % 2
    rest, test = data.split(0.9, stratify=labels)
    train, valid = rest.split(0.5, stratify=labels)  # labels are by number in the source
    together = [int(x) for part in (train, valid, test) for x in part]
    assert sorted(together) == list(range(200))
    assert [sum(int(x) % 2 for x in part) for part in (train, valid, test)] == [45, 45, 10]


def test_a_folder_is_split_by_its_classes(tmp_path: Path) -> None:
    data = cats_and_dogs(tmp_path, 20)
    with pytest.warns(UserWarning, match="keeps examples of one class, 'dog'"):
        assert len(data.skip(35).take(20)) == 5  # fewer are left
    train, test = data.split(0.8, stratify=lambda number, name: name.split("/")[0])
    assert [sum(label for _, label in part) for part in (train, test)] == [16, 4]
    cats = data.select(lambda number, name: name.startswith("cat"))
    assert {text for text, _ in cats} == {b"cat"}


@few(30)
@given(
    groups=st.lists(st.integers(0, 30), min_size=80, max_size=200),
    fractions=st.sampled_from([(0.5,), (0.7, 0.3), (0.2,) * 5]),
    seed=st.integers(0, 9),
)
def test_a_group_lies_in_one_part(
    groups: list[int], fractions: tuple[float, ...], seed: int
) -> None:
    shares = fractions if len(fractions) > 1 else (fractions[0], 1 - fractions[0])
    largest = max(map(groups.count, groups))
    assume(largest < min(shares) * len(groups))  # else a part may be empty
    data = stoker.from_arrays(np.arange(len(groups)))
    parts = data.split(*fractions, seed=seed, groups=groups)
    found = [[int(x) for x in part] for part in parts]
    assert sorted(itertools.chain(*found)) == [*range(len(groups))]
    of_part = [{groups[x] for x in part} for part in found]
    assert sum(map(len, of_part)) == len(set(groups))
    for share, part in zip(shares, found, strict=True):
        assert abs(len(part) - share * len(groups)) <= largest + 1e-6
    for label in (
        lambda number, name: groups[number],
        lambda number, name: (groups[number], "a"),
        lambda number, name: (groups[number], None),
    ):
        by_name = data.split(*fractions, seed=seed, groups=label)
        assert [[int(x) for x in part] for part in by_name] == found


def test_groups_that_cannot_be_kept_together() -> None:
    data = stoker.from_arrays(np.arange(8))
    with pytest.raises(ValueError, match=r"part 2 of 2, 0\.1 of 8 examples, would be empty"):
        data.split(0.9, groups=[1] * 8)
    with pytest.raises(ValueError, match=r"stratify= or groups="):
        data.split(0.5, groups=[1] * 8, stratify=[1] * 8)
    with pytest.raises(ValueError, match=r"groups= has the shape \(3,\)"):
        data.split(0.5, groups=[1, 2, 3])
    with pytest.raises(ValueError, match="a label for each"):
        data.split(0.5, stratify=[1, 2])
    with pytest.raises(ValueError, match=r"\.folds\(\): groups= gives \[\d\]: return a number"):
        data.folds(2, groups=lambda number, name: [number])
    with pytest.raises(ValueError, match=r"groups= has no label for example 2, but None"):
        data.folds(2, groups=lambda number, name: None if number == 2 else (number, name))
    with pytest.raises(TypeError, match=r"\.split\(\): stratify= is called as fn\(number, name\)"):
        data.split(0.5, stratify=lambda number: 1)


def test_shards_are_chosen_by_the_names_of_their_members(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"d/{number:02}.txt")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"%02d" % number))
    data = stoker.from_tar(tmp_path / "a.tar")
    some = data.select(lambda number, name: name.endswith(("03", "07")))
    assert [example["txt"] for example in some] == [b"03", b"07"]


WRONG: list[tuple[Any, str]] = [
    ([], "leaves none of 10"),
    (np.zeros(10, np.bool_), "leaves none of 10"),
    ([1, 2, 1], "1 is given twice"),
    ([0, 10], "no example 10; the source has examples 0 to 9"),
    ([-1], "no example -1"),
    (np.ones(9, np.bool_), "9 entries, and the source has 10"),
    ([0.5], "numbers of examples, a mask"),
    ("abc", "numbers of examples, a mask"),
    (lambda number: True, "fn\\(number, name\\)"),
]


@pytest.mark.parametrize(("which", "message"), WRONG)
def test_what_chooses_nothing_is_refused(which: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stoker.from_arrays(np.arange(10)).select(which)


def test_what_a_function_raises_names_the_example() -> None:
    with pytest.raises(StageError, match="example 0: ZeroDivisionError"):
        stoker.from_arrays(np.arange(10)).select(lambda number, name: 1 / number)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ((0.5, 0.6), "1 together, not 1.1"),
        ((1.0,), "between 0 and 1"),
        ((-0.1, 1.1), "between 0 and 1"),
        ((), "1 together, not 0"),
        ((0.01,), "part 1 of 2, 0.01 of 10 examples, would be empty"),
        (("a",), "fraction of each part, .* not 'a'"),
    ],
)
def test_fractions_that_split_nothing_are_refused(fractions: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stoker.from_arrays(np.arange(10)).split(*fractions)


PLACES: dict[str, tuple[Callable[[], stoker.Pipeline], str]] = {
    "shuffle": (lambda: stoker.from_arrays(np.arange(10)).shuffle(), "cannot follow shuffle"),
    "shard": (
        lambda: stoker.from_arrays(np.arange(10)).shard(rank=0, world_size=2),
        "cannot follow",
    ),
    "filter": (lambda: stoker.from_arrays(np.arange(10)).filter(bool), "cannot follow filter"),
    "batch": (lambda: stoker.from_arrays(np.arange(10)).batch(2), "cannot follow batch"),
    "stream": (lambda: stoker.from_iterable(lambda: iter([1])), "a stream has none"),
    "loader": (lambda: stoker.from_loader([[1], [2]]), "a loader yields batches"),
    "mixture": (lambda: stoker.mix([stoker.from_arrays(np.arange(10))]), "choose in its parts"),
}
CALLS: dict[str, Callable[[stoker.Pipeline], Any]] = {
    "select": lambda p: p.select([0]),
    "split": lambda p: p.split(0.5),
    "sample": lambda p: p.sample(np.ones(10)),
    "order": lambda p: p.order(lambda epoch, rng: range(10)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_what_chooses_and_orders_stands_behind_a_source_with_numbers(call: str, place: str) -> None:
    build, message = PLACES[place]
    with pytest.raises(ValueError, match=message) as caught:
        CALLS[call](build())
    if place == "mixture" and call in ("sample", "order"):
        assert "in its parts, stoker.mix([a.sample(weights), b])" in str(caught.value)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Two files, with row groups of 100; a column is sorted, another has nulls."""
    import pyarrow as arrow
    from pyarrow import parquet

    rows = arrow.table(
        {
            "height": range(1_000),
            "kind": [None if i % 5 == 0 else i % 7 for i in range(1_000)],
            "text": [str(i) for i in range(1_000)],
        }
    )
    parquet.write_table(rows.slice(0, 450), tmp_path / "0.parquet", row_group_size=100)
    parquet.write_table(rows.slice(450), tmp_path / "1.parquet", row_group_size=100)
    return str(tmp_path / "*.parquet")


FILTERS: dict[str, tuple[Any, Callable[[int, int | None], bool], int]] = {
    "range": ([("height", ">=", 250), ("height", "<", 300)], lambda h, _: 250 <= h < 300, 1),
    "equal": ([("height", "=", 700)], lambda h, _: h == 700, 1),
    "or": ([[("height", "<=", 30)], [("height", "==", 999)]], lambda h, _: h <= 30 or h == 999, 2),
    "in": ([("height", "in", [5, 995])], lambda h, _: h in (5, 995), 2),
    "not in": ([("height", "not in", range(10, 1_000))], lambda h, _: h < 10, 11),
    "unequal": ([("kind", "!=", 3)], lambda _, kind: kind is not None and kind != 3, 11),
    "two columns": ([("height", ">", 899), ("kind", "=", 2)], lambda h, k: h > 899 and k == 2, 2),
}


@pytest.mark.parametrize("name", FILTERS)
def test_rows_are_filtered_by_statistics_and_the_columns_named(
    name: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.sources.arrow.parquet import ParquetSource

    filters, holds, groups = FILTERS[name]
    read: list[tuple[int, list[str]]] = []
    plain = ParquetSource._read

    def counted(self: ParquetSource, group: int) -> Any:
        read.append((group, list(self._columns)))
        return plain(self, group)

    monkeypatch.setattr(ParquetSource, "_read", counted)
    some = stoker.from_parquet(table, ["text"], filters=filters)
    named = {each[0] for one in filters for each in (one if isinstance(one, list) else [one])}
    assert len(read) == groups
    assert all(set(columns) == named for _, columns in read)
    expected = [str(i) for i in range(1_000) if holds(i, None if i % 5 == 0 else i % 7)]
    assert [row["text"] for row in some] == expected
    again = stoker.from_parquet(table, ["text"], filters=filters, seed=1).shuffle().batch(8)
    assert sorted(int(text) for batch in again for text in batch["text"]) == list(
        map(int, expected)
    )


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("width", "=", 1)], "no column 'width', but height, kind, text"),
        ([("height", "~", 1)], '"~" is not a valid operator'),
        ([("height", ">", "x")], "filters="),
        ([("height", "=", -1)], "no row of .* matches"),
        ("height > 1", "a list of conditions"),
        ([("height", ">")], "a list of conditions"),
    ],
)
def test_filters_that_do_not_fit_are_refused(filters: Any, message: str, table: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stoker.from_parquet(table, filters=filters)
