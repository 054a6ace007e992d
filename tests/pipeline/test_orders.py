"""Orders by weight, and a user's own: how often examples come, resuming, ranks, workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import stoker
from stoker.errors import StageError, StateError
from stoker.testing import check_resume
from strategies import few, opened, signed

N = 150


def counts(pipeline: stoker.Pipeline, length: int) -> NDArray[np.int64]:
    """Return how often each example comes in an epoch."""
    seen = [int(x) for x in pipeline]
    assert len(seen) == len(pipeline)
    return np.bincount(seen, minlength=length)


def assert_even(found: NDArray[np.int64], weights: Any, places: int) -> None:
    """Check that each example comes as often as its share, rounded down or up."""
    shares = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64) * places
    assert found.sum() == places
    assert (found >= np.floor(shares - 1e-6)).all()
    assert (found <= np.ceil(shares + 1e-6)).all()


@st.composite
def weightings(draw: st.DrawFn) -> NDArray[Any]:
    """Weights of many kinds: equal, with zeros, of heavy tails, of all numbers of one kind."""
    length = draw(st.one_of(st.integers(1, 100), st.integers(100, 400)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["equal", "zeros", "pareto", "tiny", "integers", "one"]))
    weights: NDArray[Any] = np.full(length, 0.1)
    if kind == "zeros":
        weights = random.random(length) * (random.random(length) < 0.3)
    elif kind == "pareto":
        weights = random.pareto(0.8, length).astype(np.float32)
    elif kind == "tiny":
        weights = random.random(length) * 1e-300
    elif kind == "integers":
        weights = random.integers(0, 5, length)
    elif kind == "one":
        weights = np.zeros(length)
    if not weights.sum() > 0:
        weights[draw(st.integers(0, length - 1))] = 3
    return weights


@few(100)
@given(weights=weightings(), share=st.sampled_from([0.3, 1.0, 2.5]), seed=st.integers(0, 2**40))
def test_each_example_comes_as_often_as_its_share(
    weights: NDArray[Any], share: float, seed: int
) -> None:
    length = len(weights)
    places = max(1, int(share * length))
    data = stoker.from_arrays(np.arange(length), seed=seed)
    train = data.sample(weights, num_samples=places)
    orders = []
    for _ in range(2):
        orders.append([int(x) for x in train])
        assert_even(np.bincount(orders[-1], minlength=length), weights, places)
    if len(set(orders[0])) > 5:
        assert orders[0] != orders[1]


@few(30)
@given(weights=weightings(), seed=st.integers(0, 2**40))
def test_chosen_examples_alone_are_weighed(weights: NDArray[Any], seed: int) -> None:
    length = len(weights)
    random = np.random.default_rng(seed)
    mask = random.random(length) < random.choice([0.02, 0.5])
    mask[int(np.argmax(weights))] = True
    data = stoker.from_arrays(np.arange(length), seed=seed).select(mask)
    assert_even(
        counts(data.sample(weights, num_samples=length), length),
        np.where(mask, weights, 0),
        length,
    )


@few(30)
@given(weights=weightings(), world=st.integers(2, 4), seed=st.integers(0, 2**40))
def test_ranks_share_out_the_draws(weights: NDArray[Any], world: int, seed: int) -> None:
    length = len(weights)
    data = stoker.from_arrays(np.arange(length), seed=seed).sample(weights)
    seen: list[int] = []
    for rank in range(world):
        seen += [int(x) for x in data.shard(rank=rank, world_size=world, remainder="uneven")]
    assert_even(np.bincount(seen, minlength=length), weights, length)


def test_the_shares_of_classes_are_exact() -> None:
    labels = np.sort(np.random.default_rng(0).integers(0, 10, 10_000) ** 2 // 10)  # as in a folder
    weights = 1 / np.bincount(labels)[labels]
    train = stoker.from_arrays(labels, seed=1).sample(weights, num_samples=9_000)
    found = np.bincount(np.concatenate(list(train.batch(1_000))))
    kinds = np.unique(labels)
    assert abs(found[kinds] - 9_000 / len(kinds)).max() < 1


@stoker.thread_safe
def noisy(x: Any, rng: np.random.Generator) -> Any:
    return x, rng.integers(1_000)


def weighted(data: stoker.Pipeline) -> stoker.Pipeline:
    return data.sample(np.arange(N) % 5)


def by_epoch(data: stoker.Pipeline) -> stoker.Pipeline:
    return data.sample(lambda epoch: np.arange(N) % (epoch + 3), num_samples=100)


def own(data: stoker.Pipeline) -> stoker.Pipeline:
    return data.order(lambda epoch, rng: rng.integers(0, N, 120), length=120)


class Backwards:
    """An order without a list."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return N

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return (self.first - places) % N


def lazy(data: stoker.Pipeline) -> stoker.Pipeline:
    return data.order(lambda epoch, rng: Backwards(epoch))


ORDERS = {"weighted": weighted, "by epoch": by_epoch, "own": own, "lazy": lazy}


@pytest.mark.parametrize("order", ORDERS)
def test_passes_flow_on_beneath_epochs_of_steps_that_are_found_by_arithmetic(order: str) -> None:
    def build() -> stoker.Pipeline:
        train = ORDERS[order](stoker.from_arrays(np.arange(N), seed=3))
        return train.random_map(noisy).batch(8).repeat().steps(25)  # more than an epoch

    assert check_resume(build) == 25
    whole, other, train = build(), build(), build()
    list(whole)
    expected = [batch[0].tolist() for batch in whole]
    train.set_epoch(1)  # it begins within a pass
    other.load_state_dict(json.loads(json.dumps(train.state_dict())))
    assert [batch[0].tolist() for batch in other] == expected
    assert [batch[0].tolist() for batch in train] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_an_echo_that_follows_the_stall_runs_on(order: str) -> None:
    def build() -> stoker.Pipeline:
        train = ORDERS[order](stoker.from_arrays(np.arange(N), seed=3))
        return train.echo("auto", pool=64).random_map(noisy).batch(8).steps(12)

    train, again = build(), build()
    for _ in range(3):
        assert len(list(train)) == 12
    again.load_state_dict(json.loads(json.dumps(train.state_dict())))
    assert len(list(again)) == 12


def test_weights_that_stay_go_into_mixtures() -> None:
    a = stoker.from_arrays(np.arange(100)).sample(np.arange(100) % 2)
    b = stoker.from_arrays(np.arange(1_000, 1_100)).shuffle()

    def build() -> stoker.Pipeline:
        return stoker.mix([a, b], seed=0).random_map(noisy).batch(10)

    assert check_resume(build) > 0
    seen = np.concatenate([ids for ids, _ in build()])
    assert_even(np.bincount(seen[seen < 1_000], minlength=100), np.arange(100) % 2, 100)
    with pytest.raises(ValueError, match=r"part 1, .* is ordered by a function"):
        stoker.mix([stoker.from_arrays(np.arange(9)).order(lambda epoch, rng: range(9)), b])


def test_a_function_is_called_once_an_epoch_on_each_rank() -> None:
    called: list[int] = []

    def told(epoch: int, rng: np.random.Generator) -> Any:
        called.append(epoch)
        return rng.permutation(N)

    data = stoker.from_arrays(np.arange(N), seed=0)
    train = data.order(told).echo(2).batch(10).workers(2)
    assert not called
    str(train), len(train)
    for _ in range(3):
        list(train)
    assert called == [0, 1, 2]
    other = data.order(told).shard(rank=1, world_size=2).batch(10).workers(1, kind="process")
    list(other)
    assert called == [0, 1, 2, 0]


def test_what_a_function_returned_is_copied() -> None:
    numbers = np.arange(N)
    train = stoker.from_arrays(np.arange(N), seed=0).order(lambda epoch, rng: numbers).batch(10)
    found = []
    for batch in train:
        numbers[:] = 0
        found += batch.tolist()
    assert found == list(range(N))


def test_weights_are_copied_unless_nobody_can_write_to_them(tmp_path: Path) -> None:
    weights = np.ones(N)
    train = stoker.from_arrays(np.arange(N), seed=0).sample(weights)
    weights[:] = 0
    assert sorted(map(int, train)) == list(range(N))
    np.save(tmp_path / "w.npy", np.arange(N) % 3)
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r")
    assert_even(counts(stoker.from_arrays(np.arange(N), seed=0).sample(mapped), N), mapped, N)


def test_an_order_that_changed_before_a_resume_is_refused() -> None:
    losses = np.arange(N)

    def build() -> stoker.Pipeline:
        data = stoker.from_arrays(np.arange(N), seed=0)
        return data.order(lambda epoch, rng: np.argsort(-losses)).batch(10)

    train = build()
    batches = iter(train)
    before = train.state_dict()
    next(batches)
    state = json.loads(json.dumps(train.state_dict()))
    rest = [batch.tolist() for batch in batches]
    between = train.state_dict()
    losses = losses[::-1].copy()
    changed = build()
    changed.load_state_dict(state)
    with pytest.raises(StateError, match=r"the order of epoch 0 is another one now.*losses"):
        list(changed)
    for no_middle in (before, between):  # an epoch that has not begun has no order yet
        changed.load_state_dict(no_middle)
        assert len(list(changed)) == 15
    losses = losses[::-1].copy()
    changed.load_state_dict(state)
    assert [batch.tolist() for batch in changed] == rest


def test_other_ranks_go_on_with_the_same_order_alone() -> None:
    first = 5

    def build(rank: int, world: int) -> stoker.Pipeline:
        data = stoker.from_arrays(np.arange(N), seed=0)
        train = data.order(lambda epoch, rng: np.roll(np.arange(N), first))
        return train.shard(rank=rank, world_size=world).batch(5)

    train = build(0, 3)
    next(iter(train))
    state = json.loads(json.dumps(train.state_dict()))
    others = [build(rank, 2) for rank in range(2)]
    for other in others:
        other.load_state_dict(state)
    again = [json.loads(json.dumps(other.state_dict())) for other in others]  # before any batch
    seen = np.concatenate([batch for other in others for batch in other])
    assert sorted(seen.tolist()) == sorted(np.roll(np.arange(N), 5)[15:149].tolist())
    first = 6
    for of_leg in (state, again[0]):
        others[0].load_state_dict(of_leg)
        with pytest.raises(StateError, match="order of epoch 0 is another one"):
            next(iter(others[0]))


def test_weights_of_another_function_are_refused_at_a_resume() -> None:
    data = stoker.from_arrays(np.arange(N), seed=0)
    train = data.sample(lambda epoch: np.arange(N)).batch(10)
    next(iter(train))
    other = data.sample(lambda epoch: np.arange(N) + 1).batch(10)
    other.load_state_dict(train.state_dict())
    with pytest.raises(StateError, match="order of epoch 0 is another one"):
        list(other)
    given = data.sample(np.arange(N)).batch(10)
    next(iter(given))
    for weights in (np.arange(N) + 1, np.arange(N)[::-1]):  # others, or the same elsewhere
        with pytest.raises(StateError, match="belongs to another pipeline"):
            data.sample(weights).batch(10).load_state_dict(given.state_dict())


@pytest.mark.parametrize("digest", [None, 5, "", "123456789", []])
def test_a_digest_that_is_none_is_damage(digest: Any) -> None:
    train = own(stoker.from_arrays(np.arange(N), seed=0)).batch(10)
    next(iter(train))
    fields = opened(train.state_dict())
    if digest is None:
        del fields["order"]
    else:
        fields["order"] = digest
    with pytest.raises(StateError, match="damaged"):
        train.load_state_dict(signed(fields))


RETURNED: list[tuple[Any, str]] = [
    (lambda epoch, rng: range(5), "returned 5 numbers, and an epoch has 10 .*length=5"),
    (lambda epoch, rng: np.arange(1, 11), "example 10, and the source has examples 0 to 9"),
    (lambda epoch, rng: np.arange(-1, 9), "example -1"),
    (lambda epoch, rng: np.arange(10.0), "float64: return whole numbers"),
    (lambda epoch, rng: np.zeros((10, 1), int), "an array of shape \\(10, 1\\)"),
    (lambda epoch, rng: None, "NoneType: return an array"),
    (lambda epoch, rng: 1 / epoch, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("fn", "message"), RETURNED)
def test_what_is_no_order_names_the_stage(fn: Any, message: str) -> None:
    with pytest.raises(StageError, match=rf"order\(<lambda>\) failed: .*{message}"):
        list(stoker.from_arrays(np.arange(10)).order(fn))


def test_an_order_may_be_of_any_kind_of_numbers() -> None:
    import pandas  # type: ignore[import-untyped]

    for kind in (list, tuple, np.array, pandas.Series):
        numbers: Any = kind(range(9, -1, -1))

        def fixed(epoch: int, rng: Any, made: Any = numbers) -> Any:
            return made

        train = stoker.from_arrays(np.arange(10)).order(fixed)
        assert [int(x) for x in train] == [*range(9, -1, -1)]


def test_an_order_names_what_was_not_selected() -> None:
    data = stoker.from_arrays(np.arange(10)).select([1, 3, 5])
    assert [int(x) for x in data.order(lambda epoch, rng: [5, 1, 5])] == [5, 1, 5]
    with pytest.raises(StageError, match="example 4, which is not among those"):
        list(data.order(lambda epoch, rng: [5, 4, 1]))


class Wrong(Backwards):
    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places[:1] if self.first == 0 else places + (places > 140) * N


@pytest.mark.parametrize(("first", "message"), [(0, "for 150 places"), (1, "example 299")])
def test_an_object_that_maps_places_wrongly_names_the_stage(first: int, message: str) -> None:
    with pytest.raises(StageError, match=message):
        list(stoker.from_arrays(np.arange(N)).order(lambda epoch, rng: Wrong(first)))


WEIGHTS: list[tuple[Any, str]] = [
    (np.ones(9), "9 weights, and the source has 10"),
    (np.array([1.0] * 9 + [-1]), "example 9 is -1.0"),
    (np.array([1.0] * 9 + [np.inf]), "example 9 is inf"),
    (np.zeros(10), "all weights are 0"),
    (np.ones((10, 1)), r"shape \(10, 1\)"),
    (["a"] * 10, "a number for each example"),
    (lambda: None, "give it one parameter"),
]


@pytest.mark.parametrize(("weights", "message"), WEIGHTS)
def test_weights_that_draw_nothing_are_refused(weights: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stoker.from_arrays(np.arange(10)).sample(weights)
    if not callable(weights):
        train = stoker.from_arrays(np.arange(10)).sample(lambda epoch: weights)
        with pytest.raises(StageError, match=message):
            list(train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replacement": 1}, "True or False"),
        ({"num_samples": 0}, "at least one example"),
        ({"num_samples": 1.5}, "whole number"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stoker.from_arrays(np.arange(10)).sample(np.ones(10), **arguments)


def test_an_epoch_has_one_order() -> None:
    ordered = stoker.from_arrays(np.arange(10)).order(lambda epoch, rng: range(10))
    with pytest.raises(ValueError, match="cannot follow order"):
        ordered.shuffle()
    with pytest.raises(ValueError, match="cannot follow order"):
        ordered.select([1])
    with pytest.raises(ValueError, match="evaluation"):
        ordered.shard(rank=0, world_size=2, remainder="pad")


@pytest.mark.parametrize("fn", [3, lambda epoch: range(10)])
def test_what_is_no_function_of_epoch_and_rng_is_refused(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"fn\(epoch, rng\)|epoch and rng"):
        stoker.from_arrays(np.arange(10)).order(fn)


def test_print_tells_of_repeats_in_a_batch() -> None:
    data = stoker.from_arrays(np.arange(1_000), seed=0)
    heavy = np.random.default_rng(0).pareto(1.5, 1_000)
    train = data.sample(heavy).batch(256)
    told = int(str(train).partition(" of 256 in a batch are repeats")[0].rpartition("about ")[2])
    repeats = [256 - len(set(batch.tolist())) for batch in train if len(batch) == 256]
    assert abs(told - np.mean(repeats)) < 0.2 * told
    assert "repeats" not in str(data.sample(np.ones(1_000)).batch(256))
    assert "repeats" not in str(data.sample(heavy, replacement=False).batch(256))
    assert "order(hard, length=5)" in str(data.order(hard, length=5))


def hard(epoch: int, rng: np.random.Generator) -> Any:
    return rng.integers(0, 1_000, 5)


def test_repeats_come_from_a_cache() -> None:
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    weights = np.where(np.arange(20) == 7, 30.0, 1.0)
    train = stoker.from_dataset(Data(), seed=0).sample(weights, num_samples=50)
    train = train.cache("1MiB", version="1").batch(10).workers(0)
    list(train)
    first = len(read)  # while an example is being written it may be read again
    list(train)
    assert len(read) - first < 3


@few(20)
@given(st.integers(0, 2**40), st.integers(1, 40))
def test_without_replacement_no_example_comes_twice_in_an_epoch(seed: int, count: int) -> None:
    weights = np.arange(60) % 4  # 45 of them above 0
    train = stoker.from_arrays(np.arange(60), seed=seed).sample(
        weights, num_samples=count, replacement=False
    )
    epochs = [[int(x) for x in train] for _ in range(3)]
    for epoch in epochs:
        assert len({*epoch}) == len(epoch) == count
        assert weights[epoch].min() > 0
    check_resume(lambda: train.batch(4), every=3)


def test_without_replacement_heavy_examples_come_more_often() -> None:
    weights = np.r_[np.ones(90), np.full(10, 30.0)]
    train = stoker.from_arrays(np.arange(100), seed=0).sample(
        weights, num_samples=10, replacement=False
    )
    heavy = [np.mean([int(x) >= 90 for x in train]) for _ in range(200)]
    assert 0.6 < np.mean(heavy) < 0.75  # drawn by NumPy's choice(replace=False): 0.678
    too_many = stoker.from_arrays(np.arange(100)).sample(weights * (weights > 2), replacement=False)
    with pytest.raises(ValueError, match="only 10 have a weight above 0"):
        list(too_many)


def test_weights_may_be_a_field() -> None:
    data = {"x": np.arange(40), "w": np.arange(40) % 3}
    named, given = (
        stoker.from_table(pa.table(data), seed=2).sample(weights) for weights in ("w", data["w"])
    )
    assert [x["x"] for x in named] == [x["x"] for x in given]
