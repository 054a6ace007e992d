"""Generators that users' objects hold: found wherever they are, seeded, and put back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.basics.generators import (
    GeneratorStates,
    SeededGenerator,
    generator_of,
    global_generators,
)
from stoker.engine.work.held_generators import find_generators

KINDS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.Random(0),
    "PCG64": lambda: np.random.default_rng(0),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(0)),
    "Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(0)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(0)),
    "RandomState": lambda: np.random.RandomState(0),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(0)),  # type: ignore[arg-type]
    "torch": torch.Generator,
}


def draw(generator: Any) -> list[float]:
    """Draw normal numbers, an odd count: older generators keep the second one of each two."""
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()  # type: ignore[no-any-return]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    return generator.standard_normal(3).tolist()  # type: ignore[no-any-return]


def wrapped(generator: Any) -> SeededGenerator:
    found = generator_of(generator, "here")
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(seeds=st.lists(st.integers(0, (1 << 63) - 1), min_size=2, max_size=4, unique=True))
def test_a_seed_decides_what_is_drawn(kind: str, seeds: list[int]) -> None:
    one, other = KINDS[kind](), KINDS[kind]()
    drawn = []
    for seed in seeds:
        wrapped(one).seed(seed)
        drawn.append(draw(one))
    for seed, expected in zip(reversed(seeds), reversed(drawn), strict=True):
        wrapped(other).seed(seed)
        assert draw(other) == expected
    if len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds):  # all that a RandomState takes
        assert len(set(map(tuple, drawn))) == len(seeds)


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.integers(0, 3), seed=st.integers(1, (1 << 32) - 1))
def test_a_generator_is_put_back(kind: str, before: int, seed: int) -> None:
    one, other = KINDS[kind](), KINDS[kind]()
    for _ in range(before):
        assert draw(one) == draw(other)
    held = wrapped(one)
    states = GeneratorStates([held])
    assert states.moved() == []
    held.seed(seed)
    draw(one)
    assert states.moved() == ["here"]
    states.restore()
    assert states.moved() == []
    assert draw(one) == draw(other)


def test_a_normal_number_that_was_left_is_a_draw_of_its_own() -> None:
    """It moves none of the bits."""
    for one, gauss in (
        (random.Random(0), lambda g: g.gauss(0, 1)),
        (np.random.RandomState(0), lambda g: g.randn()),
    ):
        gauss(one)
        states = GeneratorStates([wrapped(one)])
        gauss(one)
        assert states.moved() == ["here"]


@pytest.mark.parametrize("draws", [random.random, np.random.random, lambda: torch.rand(1)])
def test_the_global_generators_are_looked_at_and_put_back(draws: Callable[[], Any]) -> None:
    states = GeneratorStates(global_generators())
    assert states.moved() == []
    first = draws()
    assert len(states.moved()) == 1
    states.restore()
    assert states.moved() == []
    assert draws() == first


# Wherever a user may keep one. Each gives an object that holds it, and the path to it.
RNG: Any = None
helper = types.ModuleType("helper")  # a module of the user's


class Plain:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: Any) -> Any:
        return x


class Slotted:
    __slots__ = ("other", "rng", "unset")

    def __init__(self, rng: Any) -> None:
        self.other, self.rng = [0], rng


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    name: str
    rng: Any


class Pair(NamedTuple):
    name: str
    rng: Any


class Names:
    @functools.lru_cache  # noqa: B019
    def kept(self) -> Any:
        return RNG

    def __getitem__(self, index: int) -> Any:
        return self


class Property:
    @property
    def value(self) -> Any:
        raise AssertionError("nothing of the user's is run")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("nothing of the user's is run")

    def __init__(self, rng: Any) -> None:
        self.rng = rng


def by_global(rng: Any) -> Any:
    global RNG
    RNG = rng

    def augment(x: Any) -> Any:
        def within() -> Any:
            return [(lambda: RNG)() for _ in x]

        return within()

    return augment


def by_method_global(rng: Any) -> Any:
    global RNG
    RNG = rng
    return Names()


def by_module(rng: Any) -> Any:
    global RNG
    RNG = None
    helper.RNG = rng  # type: ignore[attr-defined]
    return lambda x: helper.RNG  # type: ignore[attr-defined]


def by_import(rng: Any) -> Any:
    global RNG
    RNG = None
    sys.modules["helper_of_this_test"] = helper
    helper.RNG = rng  # type: ignore[attr-defined]

    def augment(x: Any) -> Any:
        from helper_of_this_test import RNG  # type: ignore[import-not-found]

        return RNG

    return augment


def by_wrapper(rng: Any) -> Any:
    @functools.lru_cache
    def augment(x: Any) -> Any:
        return rng

    return augment


def in_array(rng: Any) -> Any:
    held = np.empty(2, object)
    held[1] = rng
    return Plain(held)


def in_cycle(rng: Any) -> Any:
    one = Plain(rng)
    one.me = [one]  # type: ignore[attr-defined]
    return one


def in_module(rng: Any) -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    module[1].rng = rng
    return module


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (Plain, "Plain.rng"),
    "attribute of an attribute": (lambda rng: Plain(Plain(rng)), "Plain.rng.rng"),
    "object with __getattr__": (Property, "Property.rng"),
    "slot": (Slotted, "Slotted.rng"),
    "frozen dataclass with slots": (lambda rng: Record("a", rng), "Record.rng"),
    "named tuple": (lambda rng: Plain(Pair("a", rng)), "Plain.rng[1]"),
    "class": (lambda rng: type("Transform", (), {"R": rng})(), "Transform.R"),
    "closure": (lambda rng: lambda x: [rng for _ in x], "<lambda>'s variable `rng`"),
    "default": (lambda rng: lambda x, rng=rng: x, "<lambda>'s default `rng`"),
    "keyword": (lambda rng: lambda x, *, rng=rng: x, "<lambda>'s default `rng`"),
    "partial": (lambda rng: functools.partial(draw, rng), "partial's arguments[0]"),
    "named partial": (lambda rng: functools.partial(draw, generator=rng), "partial's arguments[0]"),
    "partial of a holder": (lambda rng: functools.partial(Plain(rng)), "partial.rng"),
    "method": (lambda rng: Plain(rng).__call__, "__call__.rng"),
    "global": (by_global, "augment's global `RNG`"),
    "global of a method": (by_method_global, "Names.kept.__wrapped__'s global `RNG`"),
    "module": (by_module, "<lambda>'s global `helper.RNG`"),
    "import in a function": (by_import, "augment's global `helper_of_this_test.RNG`"),
    "cached function": (by_wrapper, "augment.__wrapped__'s variable `rng`"),
    "list": (lambda rng: Plain([1, rng]), "Plain.rng[1]"),
    "deque": (lambda rng: Plain(collections.deque([rng])), "Plain.rng[0]"),
    "dict": (lambda rng: Plain({"a": 1, "b": rng}), "Plain.rng['b']"),
    "set": (lambda rng: Plain({rng}), "Plain.rng[0]"),
    "long list": (lambda rng: Plain([*range(1000), rng]), "Plain.rng[...]"),
    "lists of lists": (lambda rng: Plain([[[i], [rng]] for i in "ab"]), "Plain.rng[0][1][0]"),
    "many objects": (lambda rng: [Record(str(i), [rng]) for i in range(100)], "list[...].rng[...]"),
    "array of objects": (in_array, "Plain.rng[1]"),
    "cycle": (in_cycle, "Plain.rng"),
    "module of torch": (in_module, "Sequential._modules['1'].rng"),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", ["random", "PCG64", "RandomState", "torch"])
def test_a_generator_is_found_wherever_it_is_held(holder: str, kind: str) -> None:
    rng = KINDS[kind]()
    make, path = HOLDERS[holder]
    found = find_generators([make(rng), rng])
    assert [each.path for each in found] == [path]
    assert found[0].generator is rng


def test_a_method_of_a_generator_leads_to_it() -> None:
    for rng, method in ((np.random.default_rng(0), "normal"), (random.Random(0), "random")):
        (found,) = find_generators([Plain(getattr(rng, method))])
        assert found.generator is rng


holders = st.recursive(
    st.sampled_from(sorted(set(HOLDERS) - {"set"})), lambda each: st.lists(each, max_size=3)
)


@given(holders)
def test_each_of_several_is_found_once_and_in_the_same_order(tree: Any) -> None:
    made: list[Any] = []

    def build(node: Any) -> Any:
        if isinstance(node, list):
            return [build(each) for each in node]
        if "global" in node or "module" in node or "import" in node:
            return node  # they share one name
        made.append(np.random.default_rng(0))
        return HOLDERS[node][0](made[-1])

    value = build(tree)
    found = find_generators([value])
    assert {id(each.generator) for each in found} == set(map(id, made))
    assert len(found) == len(made)
    assert [each.path for each in find_generators([value])] == [each.path for each in found]


def test_what_nobody_holds_is_not_found() -> None:
    def augment(x: Any) -> Any:
        return random.random() + np.random.random() + torch.rand(1), time.time()

    system, tensor = random.SystemRandom(), torch.nn.Parameter(torch.zeros(1))
    system.rng = random.Random(0)  # type: ignore[attr-defined]
    empty: types.CellType = types.CellType()
    assert find_generators([augment, random.gauss, np.random.normal, tensor, empty, None, 3]) == []
    found = find_generators([Plain([np.random.mtrand._rand, torch.default_generator, system])])
    assert [each.path for each in found] == ["Plain.rng[2].rng"]


def test_a_million_paths_cost_a_pass_over_their_types() -> None:
    class Folder:
        def __init__(self) -> None:
            self.samples = [(f"{i}.jpg", i) for i in range(300_000)]
            self.boxes = [{"id": i, "box": [0.5, 0.5]} for i in range(100_000)]
            self.paths = [Path("a")] * 300_000
            self.rng = random.Random(0)

    folder = Folder()
    began = time.process_time()
    (found,) = find_generators([folder])
    assert found.path == "Folder.rng"
    assert time.process_time() - began < 2  # one object after the other: about 5 s
