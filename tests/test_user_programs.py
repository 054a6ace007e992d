"""The corpus of users' programs through the engine: eight threads, and every example is right."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import stoker
from thread_programs import PROGRAMS, N, Program

# The programs leave their files open, as users do.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SHORT = 12
CASES = [
    pytest.param(each, id=each.name, marks=[] if at % (len(PROGRAMS) // SHORT) == 0 else FULL)
    for FULL in [[pytest.mark.full]]
    for at, each in enumerate(PROGRAMS)
    if each.name != "dictionary_subclass"  # which from_dataset refuses
]


@stoker.thread_safe
class Nap:
    """Makes the work worth threads."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, example: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.0012)
        return example


@pytest.mark.parametrize("program", CASES)
def test_every_example_is_right(program: Program, tmp_path: Path) -> None:
    """The consumer begins, then threads do, where that is faster."""
    nap = Nap()
    p = built(program, tmp_path).map(nap).batch(4, collate=list).workers(8)
    check(program, p, epochs=2)
    assert any("stoker-worker" in name for name in nap.threads)


@pytest.mark.parametrize("program", CASES)
def test_every_example_is_right_where_all_threads_meet(program: Program, tmp_path: Path) -> None:
    p = built(program, tmp_path).batch(4, collate=list).workers(8)
    p._cursor._autotuner.settle(8)  # from the first example on, and for good
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        check(program, p, epochs=6)
    finally:
        sys.setswitchinterval(before)


def built(program: Program, folder: Path) -> stoker.Pipeline[Any]:
    dataset, *functions = program.make(folder)
    p = stoker.from_dataset(dataset, seed=0)
    for function in functions:
        p = p.map(function)
    return p


def check(program: Program, p: stoker.Pipeline[Any], epochs: int) -> None:
    expected = [program.expected(i) for i in range(N)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            found = [example for batch in p for example in batch]
            assert found[:N] == expected  # a program may have more than it foretells
    said = [str(each.message) for each in caught if "one call at a time" in str(each.message)]
    if program.locked is not None:
        assert bool(said) == program.locked, said
