"""Draws of users' code: distinct, and the same for any workers and after a resume."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker

ROWS, BATCH = 24, 4


class Holder:
    """Draws from all kinds of generators: three global ones, and four of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.others: list[Any] = [
            np.random.RandomState(0),
            random.Random(0),
            torch.Generator().manual_seed(0),
        ]

    def draw(self, kind: str) -> float:
        old, python, of_torch = self.others
        draws: dict[str, Callable[[], float]] = {
            "random": random.random,
            "gauss": lambda: random.gauss(0, 1),
            "numpy": np.random.random,
            "randn": np.random.randn,
            "torch": lambda: torch.rand((), dtype=torch.float64).item(),
            "own": self.rng.random,
            "own old": lambda: old.randn(),
            "own python": lambda: python.random(),
            "own torch": lambda: torch.rand((), dtype=torch.float64, generator=of_torch).item(),
            "nothing": lambda: -1.0,
        }
        return draws[kind]()


KINDS = [
    *("random", "gauss", "numpy", "randn", "torch"),
    *("own", "own old", "own python", "own torch", "nothing"),
]  # fmt: skip


class Data(Holder):
    """Examples: their index, and draws."""

    def __init__(self, kinds: list[str], fetches: bool = False) -> None:
        super().__init__()
        self.kinds = kinds
        if fetches:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index, *map(self.draw, self.kinds)], np.float64)


class Append(Holder):
    """A map that also writes into what it is given: it must not be given that twice."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x[..., 0] += 100
        drawn = np.array([self.draw(kind) for kind in self.kinds])
        return np.concatenate([x, np.broadcast_to(drawn, (*x.shape[:-1], len(drawn)))], -1)


class Collate(Append):
    """A collate function that writes into the examples, too."""

    def __call__(self, examples: Any) -> np.ndarray:
        for each in examples:
            each[0] += 1000
        drawn = [self.draw(kind) for kind in self.kinds]
        return np.stack([np.concatenate([each, drawn]) for each in examples])


class Stream:
    """Examples that are made anew in each epoch, as functions write into them."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array([float(i)]) for i in range(ROWS))


@dataclass(frozen=True)
class Program:
    """A pipeline whose code draws."""

    source: str
    kinds: list[list[str]] = field(default_factory=lambda: [[], [], [], []])
    echo: bool = False
    collates: bool = False

    def pipeline(self) -> Any:
        of_source, of_map, of_collate, of_batch = self.kinds
        p: Any
        if self.source == "stream":
            p = stoker.from_iterable(Stream(), seed=5)
        else:
            p = stoker.from_dataset(Data(of_source, self.source == "many"), seed=5).shuffle()
        if self.echo:
            p = p.echo(2, pool=8)
        p = p.map(Append(of_map))
        p = p.batch(BATCH, collate=Collate(of_collate)) if self.collates else p.batch(BATCH)
        return p.map(Append(of_batch))


kinds = st.lists(st.sampled_from(KINDS), max_size=2)
programs = st.builds(
    Program,
    st.sampled_from(["one", "many", "stream"]),
    st.lists(kinds, min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)


def epoch(p: Any) -> list[list[Any]]:
    return [batch.tolist() for batch in p]


@contextlib.contextmanager
def own_draws_untouched() -> Iterator[None]:
    def states() -> Any:
        old = np.random.get_state(legacy=False)
        rest = (old["has_gauss"], old["gauss"], old["state"]["pos"])
        return random.getstate(), old["state"]["key"].tolist(), rest, torch.get_rng_state().tolist()

    random.gauss(0, 1)
    np.random.randn()
    before = states()
    yield
    assert states() == before


@given(programs, st.integers(0, 3))
@settings(max_examples=8)
def test_draws_are_the_same_for_any_workers_and_after_a_resume(program: Program, at: int) -> None:
    with own_draws_untouched():
        p = program.pipeline().workers(0)
        first, second = epoch(p), epoch(p)
        if program.source != "stream":  # which has no state in the middle of an epoch
            again, resumed = program.pipeline().workers(0), program.pipeline().workers(0)
            iterator = iter(again)
            begun = [next(iterator).tolist() for _ in range(at)]
            resumed.load_state_dict(again.state_dict())
            iterator.close()
            assert begun + epoch(resumed) == first
            assert epoch(resumed) == second
        processes = program.pipeline().workers(2, kind="process")
        assert [epoch(processes), epoch(processes)] == [first, second]


@given(st.lists(st.sampled_from(KINDS[:-1]), min_size=1, max_size=2), st.booleans())
@settings(max_examples=8)
def test_draws_are_distinct(kinds: list[str], echo: bool) -> None:
    """Of examples, uses, callers, epochs, and of generators of one call."""
    program = Program("one", [kinds, kinds, kinds, kinds], echo, collates=True)
    p = program.pipeline().workers(0)
    rows = np.concatenate([np.concatenate(list(p)) for _ in range(2)])
    n = len(kinds)
    assert len(rows) == 2 * ROWS * (1 + echo)
    reads = 2 * ROWS  # an echo reads once, and augments each use
    for of, count in ((slice(1, 1 + n), reads), (slice(1 + n, 1 + 2 * n), len(rows))):
        drawn = rows[:, of]
        assert len(np.unique(drawn[:, 0])) == count
        assert n == 1 or kinds[0] == kinds[1] or not np.isin(drawn[:, 0], drawn[:, 1]).any()
    of_read, of_map, of_collate, of_batch = (set(rows[:, 1 + at * n]) for at in range(4))
    assert len(of_collate) == len(of_batch) == len(rows) // BATCH
    for one, other in ((of_read, of_map), (of_map, of_collate), (of_collate, of_batch)):
        assert one.isdisjoint(other)


def test_a_user_s_own_generator_is_not_disturbed() -> None:
    data = Data(["own", "own old", "own python", "own torch"])
    expected = [data.draw(kind) for kind in data.kinds]
    data = Data(data.kinds)
    p = stoker.from_dataset(data, seed=0).batch(BATCH)
    for workers in (p.workers(0), p.workers(1, kind="process"), p):
        assert len(list(workers)) == ROWS // BATCH
    assert [data.draw(kind) for kind in data.kinds] == expected


def test_one_example_is_drawn_as_in_a_run() -> None:
    program = Program("one", [["random", "own"], ["torch", "own old"], [], []])
    data, fn = Data(program.kinds[0]), Append(program.kinds[1])
    p = stoker.from_dataset(data, seed=5).map(fn)
    with own_draws_untouched():
        assert [p.example(i).tolist() for i in range(4)] == epoch(p.workers(0))[:4]


def train(draws: bool, workers: int | None) -> list[float]:
    """Train a small model with dropout and noise; return the losses."""

    class Labelled(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> torch.Tensor:
            if draws:  # and not used
                np.random.random(), torch.rand(1), random.random()
            return torch.full((4,), index / 32)

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    p: Any = stoker.from_dataset(Labelled(), seed=0).shuffle().batch(8)
    losses = []
    for batch in p if workers is None else p.workers(workers):
        noise = random.random() + np.random.randn()
        loss = ((model(torch.as_tensor(batch)) - noise) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_losses_of_a_training_do_not_depend_on_the_loader_s_draws() -> None:
    expected = train(draws=False, workers=0)
    assert train(draws=True, workers=0) == expected
    assert train(draws=True, workers=None) == expected


RNG = np.random.default_rng(0)


def rows() -> Any:
    return stoker.from_arrays(np.zeros((8, 1)), seed=0)


def from_global(x: Any) -> Any:
    return x + RNG.random()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda p: stoker.from_dataset(Data(["own"])).workers(2, kind="thread"), "Data.rng"),
        (lambda p: p.map(from_global).workers(2, kind="thread"), "from_global's global `RNG`"),
        (lambda p: rows().map(stoker.thread_safe(Append(["own"]))), "Append.rng"),
        (lambda p: p.batch(2, collate=Collate(["own"])).workers(2, kind="thread"), "Collate.rng"),
    ],
)
def test_threads_are_refused_where_code_holds_a_generator(make: Any, path: str) -> None:
    p = make(stoker.from_dataset([np.zeros(1)] * 8, seed=0))
    with pytest.raises(TypeError, match=r"random_map\(fn\)") as caught:
        iter(p)
    assert path in str(caught.value)


def test_a_pipeline_says_which_generators_it_found() -> None:
    p = stoker.from_dataset(Data(["own"]), seed=0).map(from_global).batch(BATCH)
    text = str(p)
    assert "Data.rng, Data.others[0], Data.others[1], Data.others[2]" in text.splitlines()[0]
    assert "from_global's global `RNG`" in text.splitlines()[1]
    assert "seeds" not in text.splitlines()[2]


def test_code_that_draws_is_made_again_once() -> None:
    """Later batches, and later epochs, are seeded from the start."""
    seen: list[int] = []

    def draws(x: Any) -> Any:
        seen.append(int(x))
        return x + random.random()

    p = stoker.from_dataset([float(i) for i in range(16)], seed=0).map(draws).batch(4).workers(0)
    for _ in range(2):
        assert len(list(p)) == 4
    assert sorted(set(seen)) == list(range(16))
    assert 32 < len(seen) <= 36


def test_a_stage_s_counts_do_not_tell_what_was_made_again() -> None:
    p = stoker.from_dataset([np.zeros(1)] * 16, seed=0).map(Append(["random"])).batch(4).workers(0)
    assert len(list(p)) == 4
    assert [stage.examples for stage in p.stats().stages] == [16, 16, 16]


class Uncopyable:
    """A value that cannot be made twice."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it cannot be copied")


def test_what_cannot_be_copied_is_seeded_at_once() -> None:
    def draws(x: Uncopyable) -> np.ndarray:
        x.number += 100
        return np.array([x.number, random.random()])

    def made() -> Any:
        rows = [Uncopyable(i) for i in range(8)]
        return epoch(stoker.from_iterable(rows, seed=0).map(draws).batch(4).workers(0))

    found = made()
    assert [row[0] for batch in found for row in batch] == [100 + i for i in range(8)]
    random.random()
    assert made() == found
