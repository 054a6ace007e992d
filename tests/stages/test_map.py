"""Maps: on examples, fields and batches; what draws, and from where."""

from __future__ import annotations

import os
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from strategies import Examples, frozen, one_in, stream


class Labeled(NamedTuple):
    image: Any
    label: int


def numbers(length: int = 12) -> list[Labeled]:
    return [Labeled(np.full(2, float(i)), i) for i in range(length)]


def test_maps_apply_in_order() -> None:
    chain = stoker.from_dataset(list(range(5))).map(lambda x: x + 1).map(lambda x: x * 10)
    assert list(chain) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("on", ["label", 1, -1])
def test_a_field_is_replaced_and_the_others_kept(on: Any) -> None:
    found = list(stoker.from_dataset(numbers()).map(stoker.thread_safe(lambda x: -x), on=on))
    assert [e.label for e in found] == [-i for i in range(12)]
    assert [e.image[0] for e in found] == list(range(12))
    assert type(found[0]) is Labeled


def test_maps_behind_the_batch_are_given_batches() -> None:
    chain = stoker.from_dataset(numbers()).batch(5).map(lambda x: x.sum(), on="image")
    assert [b.image for b in chain] == [2 * (0 + 1 + 2 + 3 + 4), 2 * (5 + 6 + 7 + 8 + 9), 42]


def draw(x: Any, rng: np.random.Generator) -> Any:
    assert isinstance(rng, np.random.Generator)
    return rng.integers(1 << 62)


@given(st.integers(0, 99), st.integers(0, 3))
def test_draws_depend_on_seed_epoch_example_use_and_place(seed: int, epoch: int) -> None:
    def run(seed: int, epoch: int, *, shuffled: bool = False) -> dict[int, list[int]]:
        chain = stoker.from_dataset(Examples(8), seed=seed)
        chain = (chain.shuffle() if shuffled else chain).echo(2)
        chain = chain.map(lambda e: (e["id"], 0, 0)).random_map(draw, on=1).random_map(draw, on=2)
        pipeline = chain.workers(0)
        pipeline.set_epoch(epoch)
        found: dict[int, list[int]] = {}
        example: Any
        for example in pipeline:
            found.setdefault(int(example[0]), []).extend(example[1:])
        return found

    drawn = run(seed, epoch)
    everything = [d for found in drawn.values() for d in found]
    assert len(everything) == 32
    for others in (drawn, run(seed + 1, epoch), run(seed, epoch + 1)):
        everything += [d for found in others.values() for d in found]
    assert len(set(everything)) == 3 * 32  # run twice alike, elsewhere different everywhere
    assert run(seed, epoch) == drawn


def test_batches_draw_by_their_number_and_use() -> None:
    chain = stoker.from_arrays(np.arange(12), seed=0).batch(4).echo(3).random_map(draw).workers(0)
    first = list(chain)
    assert len(set(first)) == 9
    chain.set_epoch(0)
    assert list(chain) == first


def test_random_maps_behind_to_cpu_draw_reproducibly() -> None:
    def noise(batch: torch.Tensor, rng: Any) -> torch.Tensor:
        if isinstance(rng, torch.Generator):
            return batch + torch.rand(batch.shape, generator=rng)
        return batch + torch.from_numpy(rng.random(batch.shape))

    def chain() -> stoker.Pipeline:
        data = stoker.from_arrays(np.zeros((12, 2)), seed=0).batch(4).to_torch().echo(2)
        return data.random_map(noise)

    first = stream(chain())
    assert stream(chain().workers(2)) == first
    assert len(set(first)) == 6


def test_methods_partials_and_classes_are_named() -> None:
    from functools import partial

    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Any) -> Any:
            return x * self.by

        def method(self, x: Any, rng: Any) -> Any:
            return x

    scale = Scale(2)
    chain = stoker.from_arrays(np.ones(3)).map(scale).random_map(scale.method)
    chain = chain.map(partial(np.multiply, 3)).map(np.negative).map(float)
    assert list(chain) == [-6.0] * 3
    shown = str(chain)
    for name in ("map(Scale)", "random_map(method)", "map(partial)", "map(negative)", "map(float)"):
        assert name in shown


def test_a_map_that_returns_what_it_was_given_in_a_pool_keeps_uses_apart() -> None:
    def grow(x: Any, rng: Any) -> Any:
        x.append(rng.integers(9))  # lists, not arrays: copied all the same
        return x

    chain = stoker.from_dataset([[i] for i in range(6)], seed=0).map(list).echo(3).random_map(grow)
    assert [len(x) for x in chain.workers(0)] == [2] * 18
    assert frozen(list(chain.workers(0))) == frozen(list(chain.workers(2)))


def worked(chain: stoker.Pipeline, kind: str) -> stoker.Pipeline:
    if kind == "inline":
        return chain.workers(0)
    return chain.workers(2, kind=kind)


def forgets(x: Any, *rng: Any) -> None:
    str(x)  # and returns nothing


ROWS = np.arange(8.0)
NOTHING: dict[str, tuple[Callable[[stoker.Pipeline], stoker.Pipeline], str]] = {
    "map": (lambda p: p.map(forgets).batch(4), "map(forgets)"),
    "on": (lambda p: p.map(forgets, on=0).batch(4), "map(forgets, on=0)"),
    "random_map": (lambda p: p.random_map(forgets).batch(4), "random_map(forgets)"),
    "random_map on": (
        lambda p: p.random_map(forgets, on=0).batch(4), "random_map(forgets, on=0)"
    ),
    "batch": (lambda p: p.batch(4).map(forgets), "map(forgets)"),
    "batch on": (lambda p: p.batch(4).map(forgets, on=0), "map(forgets, on=0)"),
    "loader": (lambda _: stoker.from_loader([ROWS], seed=0).map(forgets), "map(forgets)"),
    "collate": (lambda p: p.batch(4, collate=lambda examples: None), "batch(4)"),
}  # fmt: skip


@pytest.mark.parametrize("where", one_in(3, NOTHING))
@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_function_that_returns_nothing_is_an_error_of_its_stage(where: str, kind: str) -> None:
    build, stage = NOTHING[where]
    chain = build(stoker.from_arrays(ROWS, ROWS, seed=0))
    if where != "loader":
        chain = worked(chain, kind)
    with pytest.raises(stoker.StageError, match="returned None: return the") as caught:
        list(chain)
    assert caught.value.stage == stage
    assert isinstance(caught.value.__cause__, TypeError)
    assert (".filter" in str(caught.value)) == (where in ("map", "random_map"))


def test_none_inside_of_what_a_function_returns_is_a_value() -> None:
    def hidden(example: dict[str, Any]) -> dict[str, Any]:
        return example | {"caption": None}

    chain = stoker.from_dataset([{"caption": "a", "n": 1}] * 4, seed=0).map(hidden).batch(4)
    assert next(iter(chain))["caption"] == [None] * 4
    source = stoker.from_dataset([(None, 1), (None, 2)], seed=0).map(lambda x: x + 1, on=1)
    assert list(source) == [(None, 2), (None, 3)]
    bare = stoker.from_dataset([None, 3], seed=0).filter(lambda x: x is None)
    assert list(bare) == [None]


def test_a_function_that_returns_nothing_counts_against_a_skip_budget() -> None:
    chain: stoker.Pipeline = stoker.from_dataset(list(range(6)), seed=0, max_errors=2)
    chain = chain.map(lambda x: None if x in (1, 4) else x)
    assert list(chain) == [0, 2, 3, 5]
    assert ["returned None" in skip.cause for skip in chain.stats().skips] == [True, True]


def draws_elsewhere(x: Any, rng: Any) -> Any:
    return x + random.random()


def draws_elsewhere_numpy(x: Any, rng: Any) -> Any:
    return x + np.random.rand()


def draws_elsewhere_torch(x: Any, rng: Any) -> Any:
    return x + float(torch.rand(()))


ELSEWHERE = {
    "random": draws_elsewhere,
    "numpy.random": draws_elsewhere_numpy,
    "torch": draws_elsewhere_torch,
}


@pytest.mark.parametrize("names", ELSEWHERE)
@pytest.mark.parametrize("where", ["examples", "field", "batches"])
def test_a_random_map_that_draws_from_elsewhere_is_seeded_too(names: str, where: str) -> None:
    fn = ELSEWHERE[names]

    def made(workers: int) -> list[Any]:
        examples = stoker.from_dataset([(float(i),) for i in range(16)], seed=0)
        chain = {
            "examples": lambda: examples.map(lambda e: e[0]).random_map(fn).batch(2),
            "field": lambda: examples.random_map(fn, on=0).batch(2),
            "batches": lambda: examples.batch(2).random_map(fn, on=0),
        }[where]()
        chain = chain.workers(workers, kind="process") if workers else chain.workers(0)
        return [np.asarray(batch).tolist() for batch in chain]

    found = made(0)
    assert made(1) == found
    assert len(set(np.ravel(found))) == 16


def draws_both(x: Any, rng: Any) -> Any:
    random.seed(int(rng.integers(1 << 32)))  # as libraries that draw from there need it
    return x + random.random()


def draws_at_times(x: Any, rng: Any) -> Any:
    return x + (random.random() if x % 2 else 0)  # of any two calls of a batch, in one


def draws_nothing(x: Any, rng: Any) -> Any:
    return x


@pytest.mark.parametrize("fn", [draw, draws_both, draws_at_times, draws_nothing])
@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_no_global_generator_is_touched(fn: Any, kind: str) -> None:
    chain = stoker.from_dataset([float(i) for i in range(64)], seed=0).random_map(fn).batch(2)
    chain = chain.workers(
        0 if kind == "inline" else 2, kind=kind if kind == "process" else "thread"
    )

    def states() -> Any:
        return (
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
            torch.get_rng_state().tolist(),
        )

    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(chain)) == 32
    if fn in (draw, draws_nothing) or kind != "thread":
        assert states() == before


def of_one(draws: Any) -> Any:
    """The same function without a generator of its own."""

    def drawn(x: Any) -> Any:
        return draws(x, None)

    return drawn


def test_a_worker_process_gives_each_use_global_generators_of_its_own() -> None:
    chain = stoker.from_dataset([float(i) for i in range(64)], seed=0)
    chain = chain.map(of_one(draws_elsewhere)).batch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for this is right
        found = [np.concatenate(list(chain.workers(n, kind="process"))).tolist() for n in (1, 2)]
    assert found[0] == found[1]


def _fails(x: Any) -> Any:
    raise ValueError(f"{x} is wrong")


def _calls(x: Any) -> Any:
    try:
        return [][x]
    except IndexError:
        _fails(x)


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (1, "thread"), (1, "process")])
@pytest.mark.parametrize("place", ["map", "dataset", "collate"])
def test_a_traceback_begins_in_the_user_s_function(
    monkeypatch: pytest.MonkeyPatch, place: str, workers: int, kind: Any
) -> None:
    class Failing(Examples):
        def __getitem__(self, index: int) -> Any:
            return _calls(index)

    def collate(examples: list[Any]) -> Any:
        return _calls(examples[0])

    def fail() -> str:
        chain = {
            "map": lambda: stoker.from_dataset([3, 4]).map(_calls),
            "dataset": lambda: stoker.from_dataset(Failing(4)).batch(2),
            "collate": lambda: stoker.from_dataset([3, 4]).batch(2, collate=collate),
        }[place]()
        with pytest.raises(stoker.StageError) as caught:
            next(iter(chain.workers(workers, kind=kind)))
        return "".join(traceback.format_exception(caught.value))

    package = os.path.dirname(stoker.__file__)
    short = fail()
    assert short.count(package) == 1, "that of __next__"
    assert short.index(__file__) < short.index(package)
    assert "in _calls" in short
    assert "in _fails" in short
    monkeypatch.setenv("STOKER_TRACEBACK", "full")
    assert fail().count(package) > 2


def test_what_an_example_lacks_has_public_errors() -> None:
    with pytest.raises(stoker.FieldError, match="no field 'image'"):
        stoker.from_arrays(np.arange(4)).map(abs, on="image")
    with pytest.raises(stoker.StageError) as caught:
        list(stoker.from_dataset([[1], [1, 2]]).batch(2))
    assert isinstance(caught.value.__cause__, stoker.UnlikeError)
    assert issubclass(stoker.UnlikeError, ValueError)
    assert issubclass(stoker.FieldError, LookupError)
