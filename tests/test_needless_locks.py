"""Code that is called by several threads at once, and code alike that is not: it writes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from stoker.replicas.replica import replicate
from stoker.replicas.user_lock import USER_LOCK

LENGTH = 64
NAMES = ["a", "b", "c"]
COUNTED = ["a", "b", "c"]
PATHS = [(f"{number}.jpg", number) for number in range(20_000)]
BY_CLASS = {f"class {number}": [number, number + 1] for number in range(12_000)}
USED = {f"class {number}": [number, number + 1] for number in range(12_000)}


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: Any) -> Any:
        return value * self.factor


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Remembering(Scale):
    """Keeps its last input, in an attribute."""

    last: Any = None

    def __call__(self, value: Any) -> Any:
        self.last = value
        return super().__call__(self.last)


class Filling(Scale):
    """Keeps its last input, in a list that another name stands for."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.kept = [0]

    def __call__(self, value: Any) -> Any:
        kept = self.kept
        kept[0] = value
        return kept[0] * self.factor


class Passing(Scale):
    """Gives itself to a function, which writes."""

    def __call__(self, value: Any) -> Any:
        remember(self, value)
        return value * self.factor


def remember(held: Any, value: Any) -> None:
    held.last = value


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2

    def forward(self, value: Any) -> Any:
        return value * self.factor


class Outer(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Any) -> Any:
        return self.inner(value)


class RememberingModule(Module):
    def forward(self, value: Any) -> Any:
        self.last = value
        return self.last * self.factor


TRANSFORM = Compose([Scale(2), Compose([Scale(1)])])
REMEMBERING = Compose([Scale(2), Remembering(1)])
FILLING = Compose([Scale(1), Filling(2)])
PASSING = Passing(2)
DRAWING = Compose([Scale(2), random.Random(0).uniform])
MODULE = Compose([Outer(Module())])
REMEMBERING_MODULE = Outer(RememberingModule())
BAR = tqdm(disable=True)


class Handler(logging.Handler):
    """The user's, which logging calls under a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


class Counting(logging.Handler):
    """Counts before it has its lock."""

    count = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.count += 1
        return bool(super().handle(record))


def logger(name: str, handler: logging.Handler) -> logging.Logger:
    made = logging.getLogger(f"stoker tests.{name}")
    made.propagate = False
    made.addHandler(handler)
    return made


KEEPING = Handler()
LOG = logger("safe", KEEPING)
COUNTING_LOG = logger("counting", Counting())


class Data:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.example(index)

    def example(self, index: int) -> Any:
        raise NotImplementedError


def of(example: Callable[[Any, int], Any]) -> type[Data]:
    return type("Of", (Data,), {"example": example, "__module__": __name__})


SAFE: dict[str, Callable[[Any, int], Any]] = {
    "a transform": lambda self, index: TRANSFORM(index),
    "a module": lambda self, index: MODULE(index),
    "a large list of tuples": lambda self, index: PATHS[index][1] + len(PATHS[index][0]),
    "a large dict of lists": lambda self, index: BY_CLASS[f"class {index}"][1],
    "a handler": lambda self, index: LOG.warning("at %s", index),
    "a joined list": lambda self, index: ",".join(NAMES),
    "a choice": lambda self, index: np.random.default_rng(index).choice(NAMES),
    "a choice by a name": lambda self, index: by_name(index, np.random.default_rng(index)),
    "a progress bar": lambda self, index: BAR.update(),
}


def by_name(extra: int, rng: Any) -> Any:
    return [*rng.permutation(NAMES), extra]


def takes(names: list[str]) -> None:
    names.append("d")


class Own:
    """Whose method is called as one that only reads is."""

    def choice(self, names: list[str]) -> str:
        names.append("d")
        return names[-1]


def counted(self: Any, index: int) -> Any:
    takes(COUNTED)
    return index


def own_choice(self: Any, index: int) -> Any:
    return self.choice(COUNTED)


def used(self: Any, index: int) -> Any:
    USED[f"class {index}"].append(index)
    return index


def read_handler(self: Any, index: int) -> Any:
    LOG.warning("at %s", index)
    return KEEPING.seen[-1]


def set_attribute(self: Any, index: int) -> Any:
    TRANSFORM.transforms[0].factor = 2
    return TRANSFORM(index)


WRITING: dict[str, Callable[[Any, int], Any]] = {
    "an attribute": lambda self, index: REMEMBERING(index),
    "a list of its own": lambda self, index: FILLING(index),
    "a function that it is given to": lambda self, index: PASSING(index),
    "a generator": lambda self, index: DRAWING(index),
    "a module": lambda self, index: REMEMBERING_MODULE(index),
    "a handler": lambda self, index: COUNTING_LOG.warning("at %s", index),
    "a handler that is read": read_handler,
    "a list that is handed on": counted,
    "a large dict of lists": used,
    "an attribute from without": set_attribute,
}


def locked(*datasets: Any) -> list[str | None]:
    """Return why each is called by one thread at a time; None where it need not be."""
    return list(replicate(datasets).locked)


def meet(dataset: Any) -> list[Any]:
    """Return what two threads get, which meet while each of them calls its copy."""
    barrier, found = threading.Barrier(2), []

    def call() -> None:
        own = replicate([dataset])
        with contextlib.nullcontext() if own.locked[0] is None else USER_LOCK:
            barrier.wait(60)
            found.append(own.values[0][3])

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("name", SAFE)
def test_what_only_reads_is_called_by_several_threads_at_once(name: str) -> None:
    dataset = of(SAFE[name])()
    assert locked(dataset) == [None]
    assert meet(dataset) == [dataset[3]] * 2


@pytest.mark.parametrize("name", WRITING)
def test_what_writes_is_called_by_one_thread_at_a_time(name: str) -> None:
    (why,) = locked(of(WRITING[name])())
    assert why is not None
    assert "which its copies would share" in why


def test_a_method_that_is_named_as_a_reader_may_write() -> None:
    (why,) = locked(type("Own", (Data, Own), {"example": own_choice, "__module__": __name__})())
    assert why is not None
    assert "'COUNTED'" in why


def test_two_datasets_of_a_class_that_writes_are_both_locked() -> None:
    cls = of(WRITING["an attribute"])
    assert None not in locked(cls(), cls())


class Node:
    """Is wrong where threads share it."""

    def __init__(self, following: Any) -> None:
        self.following = following
        self.kept = 0


class Chain(Data):
    def __init__(self, length: int) -> None:
        self.first: Any = None
        for _ in range(length):
            self.first = Node(self.first)

    def example(self, index: int) -> Any:
        node, nodes = self.first, set()
        while node is not None:
            node.kept = index
            nodes.add(id(node))
            node = node.following
        node, kept = self.first, set()
        while node is not None:
            kept.add(node.kept)
            node = node.following
        assert kept == {index}
        return len(nodes)


@pytest.mark.parametrize("length", [150, 400, 3_000])
def test_a_long_chain_of_objects_is_copied(length: int) -> None:
    dataset = Chain(length)
    assert locked(dataset) == [None]
    assert meet(dataset) == [length] * 2
    node = dataset.first
    while node is not None:
        assert node.kept == 0  # only the copies' are set
        node = node.following


@pytest.mark.parametrize("is_installed", [True, False])
def test_packages_that_pip_put_in_a_folder_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    name = f"doubling_{is_installed}"
    (tmp_path / f"{name}.py").write_text(
        "seen = []\ndef double(x):\n    seen[:] = [x]\n    return 2 * x\n"
    )
    if is_installed:
        (tmp_path / "doubling-1.0.dist-info").mkdir()
        (tmp_path / "doubling-1.0.dist-info" / "RECORD").write_text(f"{name}.py,sha256=0,70\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)

    def use(value: Any) -> Any:
        return module.double(value)

    (reason,) = locked(use)
    assert (reason is None) is is_installed, reason
