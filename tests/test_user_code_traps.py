"""Datasets and functions that are hard to copy for threads: what they hold, and how they end."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch

import stoker
from descriptors import open_descriptors

LENGTH = 120
NUMBERS = list(range(LENGTH))


def wait() -> None:
    """Let others run, and make the work worth threads."""
    time.sleep(0.002)


class Numbers:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index


class Scratch(Numbers):
    """Is wrong where threads share it."""

    def __init__(self) -> None:
        self.kept = [0]

    def __getitem__(self, index: int) -> Any:
        self.kept[0] = index
        wait()
        return self.kept[0]

    def __call__(self, given: int) -> int:
        return int(self[given])


def made(pipeline: stoker.Pipeline[Any], epochs: int = 3) -> list[Any]:
    """Return the examples of the last of some epochs, which threads took part in."""
    epoch: list[Any] = []
    for _ in range(epochs):
        epoch = list(pipeline)
    assert pipeline.stats().workers > 1
    return epoch


def threads(dataset: Any, *functions: Callable[[Any], Any]) -> stoker.Pipeline[Any]:
    p = stoker.from_dataset(dataset)
    for fn in functions:
        p = p.map(fn)
    p = p.workers(8)
    p._cursor._autotuner.settle(8)  # however busy the machine is
    return p


class Cyclic(Scratch):
    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Any] = {"me": self}
        self.table["table"] = self.table
        self.items: list[Any] = [self, self.table]
        self.items.append(self.items)


def test_what_refers_to_itself_is_copied() -> None:
    assert made(threads(Cyclic())) == NUMBERS


class Single(Scratch):
    instance: Any = None
    made: list[Any] = []  # noqa: RUF012

    def __new__(cls) -> Single:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.made.append(cls.instance)
        found: Single = cls.instance
        return found


def test_what_makes_but_one_of_itself_is_copied_without_asking_it() -> None:
    assert made(threads(Numbers(), Single())) == NUMBERS
    assert len(Single.made) == 1


class Named(Scratch):
    def __reduce__(self) -> str:
        return "NAMED"


NAMED = Named()


def test_what_is_pickled_by_name_is_called_by_one_thread_at_a_time() -> None:
    with pytest.warns(UserWarning, match="map\\(Named\\) runs one call at a time"):
        assert made(threads(Numbers(), NAMED)) == NUMBERS


class Owner(Scratch):
    """Deletes its file with itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.scale = 1
        path.write_bytes(bytes(range(LENGTH)))

    def __getitem__(self, index: int) -> Any:
        wait()
        return self.path.read_bytes()[index] * self.scale

    def __del__(self) -> None:
        self.path.unlink()


def test_copies_do_not_end_what_the_original_owns(tmp_path: Path) -> None:
    path = tmp_path / "owned"
    dataset = Owner(path)
    p = threads(dataset)
    for scale in (1, 2, 3):
        dataset.scale = scale
        assert made(p, 2) == [scale * each for each in NUMBERS]
    del p
    assert path.exists()
    del dataset
    assert not path.exists()


class Opened(Owner):
    """Says itself what a copy of it is, which has a file of its own."""

    def __reduce__(self) -> Any:
        return Opened, (self.path.with_name(f"{time.monotonic_ns()}"),)


def test_copies_that_own_something_end_it(tmp_path: Path) -> None:
    dataset = Opened(tmp_path / "owned")
    p = threads(dataset)
    assert made(p) == NUMBERS
    assert len(list(tmp_path.iterdir())) > 1
    del p
    assert list(tmp_path.iterdir()) == [dataset.path]


class Wrapper:
    """Passes everything on, which never ends before it has something."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, given: int) -> int:
        return int(self.inner(given))


class Local(threading.local):
    def __init__(self) -> None:
        self.kept = [0]


class OfEachThread(Numbers):
    def __init__(self) -> None:
        self.local = Local()

    def __getitem__(self, index: int) -> Any:
        self.local.kept[0] = index
        wait()
        return self.local.kept[0]


class Cells(Scratch):
    def __init__(self) -> None:
        super().__init__()
        self.table = pd.DataFrame({"boxes": [[each, each] for each in NUMBERS]})

    def __getitem__(self, index: int) -> Any:
        return self.table.iloc[super().__getitem__(index)]["boxes"][0]


MEAN = [0.5, 0.25]
NAMES = ["a", "b"]


class OfConstants(Scratch):
    """Hands a module's constants to functions of others, which read them."""

    def __getitem__(self, index: int) -> Any:
        zero = len(torch.tensor(MEAN)) - len(MEAN)
        return super().__getitem__(index) + zero * len(random.choice(NAMES))


class Shuffling(Scratch):
    """Hands one to a function that writes to it."""

    def __getitem__(self, index: int) -> Any:
        random.shuffle(NAMES)
        return super().__getitem__(index)


def test_what_functions_of_others_write_to_is_not_shared() -> None:
    with pytest.warns(UserWarning, match="uses the global 'NAMES'"):
        assert made(threads(Shuffling())) == NUMBERS


@pytest.mark.parametrize("kind", [lambda: Wrapper(Scratch()), OfEachThread, Cells, OfConstants])
def test_these_are_copied_or_shared(kind: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = kind()
        p = threads(Numbers(), given) if callable(given) else threads(given)
        assert made(p) == NUMBERS


class Trainer:
    """Trains what its map can reach, and keeps the pipeline and a log."""

    def __init__(self, path: Path) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.log = path.open("w")
        self.added = 1
        self.scratch = Scratch()
        self.loader = threads(Numbers(), lambda x: self.scratch(x) + self.added)
        self.scores = threads(Numbers(), self.score)

    def score(self, _: int) -> float:
        wait()
        return float(self.model.weight.item())


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "log")
    yield trainer
    trainer.log.close()


def test_a_function_that_reaches_the_training_loop_is_copied_without_it(trainer: Trainer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(trainer.loader) == [each + 1 for each in NUMBERS]
        trainer.added = 2
        assert made(trainer.loader) == [each + 2 for each in NUMBERS]


def test_a_model_is_the_one_that_is_trained(trainer: Trainer) -> None:
    for _ in range(2):
        made(trainer.scores)
        seen: list[float] = []
        for number, score in enumerate(trainer.scores):
            seen.append(score)
            with torch.no_grad():
                trainer.model.weight[:] = number
        assert max(seen) > 40


class Tensors(Scratch):
    """Holds many tensors, and writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [torch.full((20_000,), each) for each in range(400)]

    def __getitem__(self, index: int) -> Any:
        scratch = self.tensors[-1]
        scratch[:] = self.tensors[index]
        wait()
        return int(scratch[-1])


def test_many_tensors_take_few_descriptors() -> None:
    p = threads(Tensors())
    before = open_descriptors()
    assert made(p) == NUMBERS
    assert len(open_descriptors() - before) < 32


@pytest.mark.full
def test_a_hundred_thousand_small_arrays_begin_in_seconds() -> None:
    """It took hours once: each was compared with all others."""

    class Arrays(Scratch):
        def __init__(self) -> None:
            super().__init__()
            self.arrays = [np.full(4, each) for each in range(100_000)]

        def __getitem__(self, index: int) -> Any:
            return int(self.arrays[super().__getitem__(index)][0])

    assert made(threads(Arrays())) == NUMBERS
