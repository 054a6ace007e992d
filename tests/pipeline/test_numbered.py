"""Where an example comes from: its number in batches, its name, and the example made again."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import stoker
from stoker.errors import StageError
from stoker.testing import check_resume, equal
from strategies import few, one_in

N = 120
Point = collections.namedtuple("Point", ["x", "y"])


@stoker.thread_safe
class Data:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        x = np.float32(index) / 2
        return {"dict": {"x": x}, "tuple": (x, 1), "named": Point(x, 1), "bare": x}[self.kind]


def number_of(example: Any) -> Any:
    return example["id"] if isinstance(example, dict) else example[-1]


@pytest.mark.parametrize("kind", ["dict", "tuple", "named", "bare"])
@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_a_field_of_examples_and_batches(kind: str, workers: int) -> None:
    train = stoker.from_dataset(Data(kind), seed=3).with_index().shuffle().workers(workers)
    for example in train:
        first = example["x"] if kind == "dict" else example[0]
        assert first == number_of(example) / 2
    numbers: list[int] = []
    for batch in train.batch(8):
        ids = number_of(batch)
        assert ids.dtype == np.int64
        first = batch["x"] if kind == "dict" else batch[0]
        assert np.array_equal(first, ids / 2)
        numbers += ids.tolist()
        assert kind != "named" or batch._fields == ("x", "y", "id")
    assert sorted(numbers) == list(range(N))


ARRAYS: dict[str, Callable[[], stoker.Pipeline]] = {
    "one array": lambda: stoker.from_arrays(np.arange(N), seed=1),
    "two arrays": lambda: stoker.from_arrays(np.arange(N), np.arange(N) % 3, seed=1),
    "large": lambda: stoker.from_arrays(np.arange(N), np.zeros((N, 3_000)), seed=1),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_rows_of_arrays_are_gathered_with_their_numbers(name: str) -> None:
    plain, numbered = ARRAYS[name](), ARRAYS[name]().with_index("nr")
    kept = []
    pairs = zip(plain.shuffle().batch(7), numbered.shuffle().batch(7), strict=True)
    for batch, with_numbers in pairs:
        *rest, numbers = with_numbers
        assert equal(rest[0] if name == "one array" else tuple(rest), batch)
        assert np.array_equal(rest[0], numbers)
        kept.append((numbers, numbers.copy()))
    assert all(np.array_equal(now, then) for now, then in kept)  # memory is not used again
    assert check_resume(lambda: ARRAYS[name]().with_index().shuffle().echo(2).batch(7)) > 0


def test_rows_of_tables_are_numbered(tmp_path: Path) -> None:
    rows = arrow.table({"n": range(N), "text": [str(n) for n in range(N)]})
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    for data in (
        stoker.from_parquet(tmp_path / "a.parquet", seed=0),
        stoker.from_parquet(f"file://{tmp_path}/a.parquet", seed=0),
        stoker.from_table(rows, seed=0),
    ):
        for batch in data.with_index().select(range(3, N)).shuffle().batch(16):
            assert np.array_equal(batch["n"], batch["id"])
            assert batch["text"] == [str(n) for n in batch["id"].tolist()]
    assert stoker.from_parquet(tmp_path / "a.parquet").name_of(35) == "a.parquet, row 35"


@pytest.mark.parametrize("kind", ["dict", "named"])
def test_a_cache_keeps_them(tmp_path: Path, kind: str) -> None:
    for name in ("id", "nr"):  # other examples, so another store
        train = stoker.from_dataset(Data(kind), seed=0).with_index(name).shuffle()
        train = train.cache("1MiB", path=tmp_path, version="1").batch(10).workers(0)
        for _ in range(2):
            for batch in train:
                fields = batch if kind == "dict" else batch._asdict()
                assert np.array_equal(fields["x"], fields[name] / 2)
        stats = train.stats().cache
        assert stats is not None
        assert stats.hits == N


def test_parts_of_a_mixture_and_mixtures_are_numbered() -> None:
    a = stoker.from_arrays(np.arange(40)).shuffle()
    b = stoker.from_arrays(np.arange(100, 140)).shuffle()
    own = stoker.mix([a.with_index(), b.with_index()], seed=0).batch(8)
    for x, numbers in own:
        assert np.array_equal(x % 100, numbers)
    mixed = stoker.mix([a, b], seed=0).with_index()
    for x, numbers in mixed.echo(2).batch(8):
        assert np.array_equal(np.where(x < 100, x, x - 60), numbers)
    assert mixed.name_of(41) == "1/1"
    other = stoker.mix([a.with_index("x"), b.with_index("y")], seed=0).batch(8)
    assert len(list(other)) > 0


def test_whatever_a_source_may_answer_is_passed_on() -> None:
    """A new method of sources has a default, which would be wrong here."""
    from stoker.sources.origin import IndexedSource, SourceBase
    from stoker.sources.over import NumberedSource
    from stoker.sources.source import Source

    # What is the same for any indexed source, or changes with the numbers in it.
    same = {"lower", "set_epoch", "lag_outputs", "state_between", "takes_state", "class_names",
            "warn_unsharded", "yields_batches", "is_indexed", "is_counted",
            "lengths"}  # fmt: skip
    names = {
        name
        for kind in (IndexedSource, Source, SourceBase)
        for name in vars(kind)
        if not name.startswith("_") and name not in same
    }
    made = stoker.from_arrays(np.arange(1)).with_index().chain.source
    own = {*vars(NumberedSource), *vars(made)}
    assert names - own == set()


def test_names_are_the_same_on_every_host(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "01.txt").write_text("x")
    data = stoker.from_folder(tmp_path, extensions=(".txt",))
    assert data.name_of(0) == "cat/01.txt"
    for number, error in ((1, LookupError), (-1, LookupError), ("a", TypeError)):
        with pytest.raises(error, match="example"):
            data.name_of(number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: stoker.from_arrays(np.arange(9)).map(lambda x: x), "cannot follow map"),
        (lambda: stoker.from_arrays(np.arange(9)).with_index("a"), "field 'a' already"),
        (lambda: stoker.from_table(arrow.table({"id": [1]})), "have a field 'id'"),
        (lambda: stoker.from_iterable(lambda: iter([1])), "have no numbers"),
        (lambda: stoker.from_loader([[1]]), "have no numbers"),
    ],
)
def test_where_numbers_do_not_fit_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build().with_index()
    with pytest.raises(TypeError, match="name of a field"):
        stoker.from_arrays(np.arange(9)).with_index("")


def test_a_field_of_that_name_in_an_example_names_the_example() -> None:
    class Clash(Data):
        def __getitem__(self, index: int) -> Any:
            return {"id": 5}

    with pytest.raises(StageError, match=r"example 0: ValueError: there is a field 'id' already"):
        list(stoker.from_dataset(Clash("dict")).with_index())


@stoker.thread_safe
def noisy(x: Any, rng: np.random.Generator) -> Any:
    return {**x, "noise": rng.integers(1 << 40)}


@stoker.thread_safe
def doubled(x: Any) -> Any:
    return {**x, "x": 2 * x["x"]}


@stoker.thread_safe
def crowded(x: Any, rng: np.random.Generator) -> Any:
    return {**x, "more": rng.integers(1 << 40)}


MADE: dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]] = {
    "plain": lambda p: p.shuffle().random_map(noisy),
    "rank": lambda p: p.shuffle().shard(rank=1, world_size=3).random_map(noisy),
    "fixed part": lambda p: p.shard(rank=1, world_size=3).shuffle().random_map(noisy),
    "echo": lambda p: p.shuffle().map(doubled).echo(2, pool=24).random_map(noisy),
    "echo behind": lambda p: p.random_map(noisy).echo(1.5, pool=24).random_map(crowded),
    "filter": lambda p: (
        p.shuffle().filter(stoker.thread_safe(lambda x: x["id"] % 3)).echo(2).random_map(noisy)
    ),
    "weights": lambda p: p.sample(np.arange(N) % 2, num_samples=N // 2).random_map(noisy),
    "planned": lambda p: p.shuffle().shard(rank=1, world_size=2).random_map(noisy),
    "selected": lambda p: p.select(np.arange(N) % 2 > 0).shuffle().random_map(noisy),
    "cache": lambda p: p.shuffle().map(doubled).cache("1MiB", version="1").random_map(noisy),
    "threads": lambda p: p.shuffle().random_map(noisy).workers(2),
    "processes": lambda p: p.shuffle().random_map(noisy).workers(1, kind="process"),
}


@pytest.mark.parametrize("made", one_in(3, MADE))
@few(3)
@given(epoch=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_every_row_of_a_batch_is_made_again(made: str, epoch: int, seed: int) -> None:
    train = MADE[made](stoker.from_dataset(Data("dict"), seed=seed).with_index())
    train = train.batch_by_tokens(30, np.arange(N) % 7 + 1) if made == "planned" else train.batch(8)
    train.set_epoch(epoch)
    seen = 0
    for step, batch in enumerate(train):
        uses = train.last.number.tolist()
        for row, number in enumerate(batch["id"].tolist()):
            if step % 4:
                continue
            again = train.example(number, use=uses[row])
            assert {key: batch[key][row] for key in again} == again
            seen += 1
    assert seen > 5


def test_repeats_are_made_again_by_their_places() -> None:
    weights = np.ones(N)
    weights[7] = 50
    data = stoker.from_dataset(Data("dict"), seed=0).with_index()
    train = data.sample(weights).random_map(noisy).batch(N)
    (batch,) = list(train)
    train.set_epoch(0)
    again = [train.example(number, place=at) for at, number in enumerate(batch["id"].tolist())]
    assert [each["noise"] for each in again] == batch["noise"].tolist()
    first = batch["id"].tolist().index(7)
    assert train.example(7)["noise"] == batch["noise"][first]


def failing(x: Any) -> Any:
    if x["id"] == 42:
        raise ValueError("a bad example")
    return x


def test_what_is_no_example_of_the_epoch_is_refused() -> None:
    data = stoker.from_dataset(Data("dict"), seed=0).with_index()
    with pytest.raises(LookupError, match="example 3 does not come in epoch 0"):
        data.select([1, 2]).batch(2).example(3)
    with pytest.raises(LookupError, match="on this rank"):
        data.shard(rank=0, world_size=2).batch(2).example(3)
    with pytest.raises(LookupError, match="example 3 is left out by a filter"):
        data.filter(lambda x: x["id"] != 3).batch(2).example(3)
    with pytest.raises(LookupError, match="there is no example 500"):
        data.example(500)
    with pytest.raises(StageError, match=r"failing\) failed on example 42: ValueError"):
        data.map(failing).example(42)
    for wrong in ({"epoch": -1}, {"place": -1}, {"use": 0}):
        with pytest.raises(ValueError, match=f"takes {next(iter(wrong))}="):
            data.example(3, **wrong)
    with pytest.raises(ValueError, match="by its number"):
        stoker.from_iterable(lambda: iter([1])).example(0)
    with pytest.raises(ValueError, match="by its number"):
        stoker.from_loader([[1]]).name_of(0)


PEEKED: dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]] = {
    "examples": lambda p: p.shuffle().random_map(noisy),
    "batches": lambda p: p.shuffle().random_map(noisy).batch(8),
    "rank": lambda p: p.shuffle().shard(rank=1, world_size=2).random_map(noisy).batch(8),
    "echo": lambda p: p.shuffle().echo(2, pool=24).random_map(noisy).batch(8),
    "filter": lambda p: p.filter(lambda x: x["id"] % 3).random_map(noisy).batch(8),
    "steps": lambda p: p.shuffle().random_map(noisy).batch(8).repeat().steps(10),
    "threads": lambda p: p.shuffle().random_map(noisy).batch(8).workers(2),
    "order": lambda p: p.order(lambda epoch, rng: rng.permutation(N)).batch(8),
}


@pytest.mark.parametrize("peeked", PEEKED)
def test_what_was_peeked_at_comes_next(peeked: str) -> None:
    def build() -> stoker.Pipeline:
        return PEEKED[peeked](stoker.from_dataset(Data("dict"), seed=5).with_index())

    train, plain = build(), build()
    expected = [*list(plain)[:4], *list(plain)[:2]]
    found = []
    for epoch_batches in (4, 2):
        assert train.epoch == (0 if epoch_batches == 4 else 1) or peeked == "steps"
        found.append(train.peek())
        assert equal(train.peek(), found[-1])
        with iter(train) as batches:
            assert equal(next(batches), found[-1])
            for _ in range(epoch_batches - 1):
                found.append(train.peek())
                assert equal(next(batches), found[-1])
            if epoch_batches == 4:
                for _ in batches:
                    pass
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_cannot_be_made_twice_is_not_peeked_at() -> None:
    for data in (stoker.from_iterable(lambda: iter([1])), stoker.from_loader([[1]])):
        with pytest.raises(ValueError, match="can be read once"):
            data.peek()
    with pytest.raises(ValueError, match="the next epoch is empty"):
        stoker.from_arrays(np.arange(3)).batch(4, drop_last=True).peek()
    two = stoker.from_arrays(np.arange(30)).shard(rank=0, world_size=2).echo("auto").batch(2)
    with pytest.raises(ValueError, match="ranks decide together"):
        two.peek()
