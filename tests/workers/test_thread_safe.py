"""What runs in threads of the training process: stoker's own code, and what the user declares."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import stoker
from stoker import images
from strategies import one_in

LENGTH = 48
EPOCHS = 8  # at most, until threads take part


def numbers(length: int = LENGTH) -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(length), seed=0)


def who() -> tuple[int, str]:
    return os.getpid(), threading.current_thread().name


@stoker.thread_safe
def costly(value: Any) -> tuple[int, str]:
    """Cost a millisecond, and tell who calls."""
    time.sleep(0.001)
    return who()


def makers(p: stoker.Pipeline[Any], epochs: int) -> set[tuple[int, str]]:
    """Return who makes the examples, in as many epochs, or fewer once others take part."""
    found: set[tuple[int, str]] = set()
    for _ in range(epochs):
        found |= {tuple(each) for batch in p for each in batch}
        if has_threads(found) or {pid for pid, _ in found} != {os.getpid()}:
            break
    return found


def has_threads(found: Iterable[tuple[int, str]]) -> bool:
    return any(pid == os.getpid() and thread.startswith("stoker-worker") for pid, thread in found)


def check_in_threads(p: stoker.Pipeline[Any]) -> None:
    """Check that all is made in this process, and in threads in the end."""
    found = makers(p.batch(4, collate=list_up), EPOCHS)
    assert {pid for pid, _ in found} == {os.getpid()}
    assert has_threads(found)


def check_in_processes(p: stoker.Pipeline[Any]) -> None:
    """Check that all is made in other processes."""
    found = makers(p.batch(4, collate=list_up).workers(2), 2)
    assert os.getpid() not in {pid for pid, _ in found}


@stoker.thread_safe
def list_up(examples: list[Any]) -> list[Any]:
    return list(examples)


# What is declared.


def plain(value: Any) -> Any:
    return costly(value)


@stoker.thread_safe
class Declared:
    def __call__(self, value: Any) -> Any:
        return costly(value)

    def method(self, value: Any) -> Any:
        return costly(value)


class Derived(Declared):
    pass


class Undeclared:
    def __call__(self, value: Any) -> Any:
        return costly(value)

    @stoker.thread_safe
    def method(self, value: Any) -> Any:
        return costly(value)


class WithSlots:
    __slots__ = ()

    def __call__(self, value: Any) -> Any:
        return costly(value)


class Texts:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return costly(index)


def added(other: Any, value: Any) -> Any:
    return costly(value)


@stoker.thread_safe
def declared_added(other: Any, value: Any) -> Any:
    return costly(value)


IN_THREADS: dict[str, Callable[[], stoker.Pipeline[Any]]] = {
    "function": lambda: numbers().map(costly),
    "lambda": lambda: numbers().map(stoker.thread_safe(lambda value: costly(value))),
    "class": lambda: numbers().map(Declared()),
    "instance": lambda: numbers().map(stoker.thread_safe(Undeclared())),
    "instance with slots": lambda: numbers().map(stoker.thread_safe(WithSlots())),
    "partial": lambda: numbers().map(stoker.thread_safe(functools.partial(added, 1))),
    "partial of a declared one": lambda: numbers().map(functools.partial(declared_added, 1)),
    "method of a declared class": lambda: numbers().map(Declared().method),
    "method": lambda: numbers().map(stoker.thread_safe(Derived().method)),
    "function behind a method": lambda: numbers().map(Undeclared().method),
    "dataset": lambda: stoker.from_dataset(stoker.thread_safe(Texts()), seed=0),
}


@pytest.mark.parametrize("name", IN_THREADS)
def test_what_is_declared_runs_in_threads(name: str) -> None:
    check_in_threads(IN_THREADS[name]())


IN_PROCESSES: dict[str, Callable[[], stoker.Pipeline[Any]]] = {
    "function": lambda: numbers().map(plain),
    "lambda": lambda: numbers().map(lambda value: costly(value)),
    "derived class": lambda: numbers().map(Derived()),
    "method of a derived class": lambda: numbers().map(Derived().method),
    "instance beside a declared one": lambda: (
        numbers().map(stoker.thread_safe(Undeclared())).map(Undeclared())
    ),
    "partial": lambda: numbers().map(functools.partial(added, 1)),
    "dataset": lambda: stoker.from_dataset(Texts(), seed=0),
    "beside declared ones": lambda: numbers().map(costly).map(lambda made: made).map(costly),
}


@pytest.mark.parametrize("name", one_in(3, IN_PROCESSES))
def test_what_is_not_declared_runs_in_processes(name: str) -> None:
    check_in_processes(IN_PROCESSES[name]())


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_threads_that_are_asked_for_run_what_is_not_declared(name: str) -> None:
    check_in_threads(IN_PROCESSES[name]().workers(4, kind="thread"))


def drawing(examples: list[Any]) -> Any:
    return {"x": np.asarray(examples) + random.random(), "pid": os.getpid()}


@stoker.thread_safe
def not_three(value: Any) -> bool:
    return bool(value != 3)


BEFORE_COLLATING: dict[str, Callable[[], stoker.Pipeline[Any]]] = {
    "nothing": numbers,
    "filter": lambda: numbers().filter(not_three),
    "echo": lambda: numbers().echo(2, pool=16),
    "errors": lambda: stoker.from_dataset(range(LENGTH), seed=0, max_errors=1),
}


@pytest.mark.parametrize("name", BEFORE_COLLATING)
def test_a_collate_function_runs_in_processes_whatever_stands_before_it(name: str) -> None:
    p = BEFORE_COLLATING[name]().batch(4, collate=drawing)
    alone, found = list(p.workers(0)), list(p.workers(2, kind="process"))
    assert [batch["x"].tolist() for batch in found] == [batch["x"].tolist() for batch in alone]
    assert os.getpid() not in {batch["pid"] for batch in found}


# What is stoker's own.


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(256, size=(LENGTH, 24, 24, 3), dtype=np.uint8)
    for i, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{i:02}.png")
    return str(folder / "*.png")


@stoker.thread_safe
def observed(value: Any) -> Any:
    """Cost a millisecond, and put who calls beside a value."""
    time.sleep(0.001)
    pid, thread = who()
    return {"x": value.data if hasattr(value, "path") else value, "pid": pid, "thread": thread}


def check_observed_in_threads(p: stoker.Pipeline[Any]) -> None:
    """Check who made the fields "pid" and "thread"."""
    found: set[tuple[int, str]] = set()
    for _ in range(EPOCHS):
        for batch in p:
            pids = np.asarray(batch["pid"]).tolist()
            found |= set(zip(pids, batch["thread"], strict=True))
        if has_threads(found):
            break
    assert {pid for pid, _ in found} == {os.getpid()}
    assert has_threads(found)


def test_image_functions_run_in_threads(pictures: str) -> None:
    p = (
        stoker.from_files(pictures, seed=0)
        .map(observed)
        .map(images.decode, on="x")
        .random_map(images.random_resized_crop((16, 16)), on="x")
        .random_map(images.random_hflip, on="x")
        .random_map(images.color_jitter(0.1), on="x")
        .map(images.resize((8, 8)), on="x")
        .map(images.normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), on="x")
        .random_map(images.random_erase, on="x")
        .map(images.to_chw, on="x")
        .batch(4)
    )
    check_observed_in_threads(p)


def test_padding_runs_in_threads() -> None:
    ragged = stoker.thread_safe(lambda i: np.arange(i % 5 + 1))
    p = numbers().map(ragged).map(observed).batch(4, collate=stoker.collate.pad(0))
    check_observed_in_threads(p)


def test_a_segment_of_ours_runs_in_threads_and_one_of_the_users_in_processes(
    pictures: str,
) -> None:
    @stoker.thread_safe
    def decoded(file: Any) -> Any:
        made = observed(file)
        return {"decoded": who(), "x": images.decode(made["x"])}

    def augmented(example: Any, rng: np.random.Generator) -> Any:
        time.sleep(0.001)
        noise = rng.integers(8, size=example["x"].shape, dtype=np.uint8)
        return {**example, "x": example["x"] // 2 + noise, "augmented": who()}

    def built() -> stoker.Pipeline[Any]:
        files = stoker.from_files(pictures, seed=0).shuffle().map(decoded).echo(2)
        return files.random_map(augmented).batch(4, collate=list)

    p = built().workers(2)
    decoders: set[tuple[int, str]] = set()
    alone = built().workers(0)
    for _ in range(2):
        found = [example for batch in p for example in batch]
        expected = [example for batch in alone for example in batch]
        assert len(found) == 2 * LENGTH
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one["x"], other["x"])
        assert os.getpid() not in {example["augmented"][0] for example in found}
        decoders |= {tuple(example["decoded"]) for example in found}
    assert {pid for pid, _ in decoders} == {os.getpid()}
    assert has_threads(decoders)


# Datasets of torch and Hugging Face.


class DerivedTensors(TensorDataset):
    pass


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(LENGTH))


def rows() -> Any:
    return datasets.Dataset.from_dict({"a": list(range(LENGTH))})


def transformed() -> Any:
    made = rows()
    made.set_transform(lambda found: found)
    return made


OF_OTHERS: dict[str, Callable[[], Any]] = {
    "TensorDataset": tensors,
    "Subset": lambda: Subset(tensors(), list(range(LENGTH))),
    "ConcatDataset": lambda: ConcatDataset([tensors(), Subset(tensors(), range(4))]),
    "Hugging Face": rows,
    "Hugging Face, with a format": lambda: rows().with_format("numpy"),
    "Subset of Hugging Face": lambda: Subset(rows(), list(range(LENGTH))),
}
OF_USERS: dict[str, Callable[[], Any]] = {
    "derived": lambda: DerivedTensors(torch.arange(LENGTH)),
    "Subset of a derived one": lambda: Subset(DerivedTensors(torch.arange(LENGTH)), range(LENGTH)),
    "ConcatDataset with a derived one": lambda: ConcatDataset(
        [tensors(), DerivedTensors(torch.arange(LENGTH))]
    ),
    "set_transform": transformed,
    "with_transform": lambda: rows().with_transform(lambda found: found),
    "Subset of a transformed one": lambda: Subset(transformed(), range(LENGTH)),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_datasets_that_only_index_are_read_in_threads(name: str) -> None:
    check_in_threads(stoker.from_dataset(OF_OTHERS[name](), seed=0).map(costly))


@pytest.mark.parametrize("name", one_in(3, OF_USERS))
def test_datasets_with_users_code_are_read_in_processes(name: str) -> None:
    check_in_processes(stoker.from_dataset(OF_USERS[name](), seed=0).map(costly))
