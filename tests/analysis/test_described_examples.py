"""The examples that a loader's dataset gives."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stoker.analysis.probe.example import describe_example
from stoker.transport.codec import encode

Tensor: Any = torch.Tensor


class Drawn:
    """One example, drawn in some way."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(self._draw())), "y": np.int64(index)}


@pytest.mark.parametrize(
    ("draw", "varies"),
    [
        (lambda: 3, False),
        (lambda: random.random() < 0.5, True),
        (lambda: np.random.random(), True),
        (lambda: np.random.default_rng().random(), True),
        (lambda: torch.rand(1), True),
    ],
)
def test_examples_that_are_drawn_at_random_are_told(draw: Callable[[], Any], varies: bool) -> None:
    size = 4 * 4 + 8
    assert describe_example(Drawn(draw)) == {"example_bytes": size, "varies": varies, "moves": []}
    assert describe_example({}) == {}


class Subclass(Tensor):
    pass


@dataclass
class Record:
    x: Any


Pair = namedtuple("Pair", "x y")
Local: Any = namedtuple("NotFound", "x")  # type: ignore[name-match]


@pytest.mark.parametrize(
    "example",
    [
        lambda: torch.ones(4).as_subclass(Subclass),
        lambda: UserDict(x=np.ones(4)),
        lambda: (Image.new("L", (4, 4)), np.ones(4)),
        lambda: (np.ones(4), np.array([object()])),
        lambda: torch.ones(4).to_sparse(),
        lambda: Local(np.ones(4)),
        lambda: {"x": {1}, "y": np.ones(4)},
    ],
)
def test_what_no_cache_holds_has_no_size(example: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        encode(example())
    found = describe_example([example()])
    assert found == {"example_bytes": None, "varies": False, "moves": []}


@pytest.mark.parametrize(
    "example",
    [
        Pair(np.ones(4), "a"),
        Record(torch.ones(4)),
        {"x": [np.full(4, np.nan), np.float32("nan"), float("nan")], 1: None},
        (np.array(["a", "b"]), np.array("NaT", "datetime64[s]"), torch.full((4,), torch.nan)),
        (np.ones(3, [("a", "<f4")]), b"bytes", 1j, 1 << 70),
    ],
)
def test_what_a_cache_holds_is_equal_to_itself(example: Any) -> None:
    encode(example)
    found = describe_example([example])
    assert found["example_bytes"] > 0
    assert not found["varies"]


def test_a_label_that_is_drawn_makes_another_example() -> None:
    class Labelled:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.ones(4), random.randrange(1000)

    assert describe_example(Labelled())["varies"]


class SomeDrawn:
    """Draws for one example in a hundred, and never another value for the first."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        if index == 150:
            self._draw()
        return np.full(index + 1, 1.0)


@pytest.mark.parametrize(
    ("draw", "varies"),
    [
        (random.random, True),
        (np.random.random, True),
        (lambda: torch.rand(1), True),
        (lambda: None, False),
    ],
)
def test_a_draw_for_some_examples_is_told_by_the_generators(
    draw: Callable[[], Any], varies: bool
) -> None:
    found = describe_example(SomeDrawn(draw))
    assert found["varies"] == varies
    assert found["example_bytes"] == 8 * 76  # the mean of every tenth
