"""The corpus of users' programs at the defaults: every example is right, inline and in workers."""

from __future__ import annotations

import contextvars
import time
from pathlib import Path
from typing import Any

import pytest
from thread_programs import PROGRAMS, N, Program

import stoker

# The programs leave their files open, as users do.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.* is open, which all forked processes would share"),
    pytest.mark.timeout(120),  # a program that shares what it must not may wait for ever
]


def one_in(short: int) -> list[Any]:
    """Return the programs; the short profile tries one of so many."""
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.full] if at % short else [])
        for at, each in enumerate(PROGRAMS)
    ]


COSTLY_S = 0.0012
SHARED = {"OwnLoop", "Piped", "Sockets"}
"""Those that hold a running program or sockets: forks would take each other's answers."""


def spin(example: Any) -> Any:
    """Make the work worth worker processes; by the thread's own clock, so others do not count."""
    end = time.thread_time() + COSTLY_S
    while time.thread_time() < end:
        pass
    return example


@pytest.mark.parametrize("program", one_in(2))
def test_every_example_is_right(program: Program, tmp_path: Path) -> None:
    alone(check, program, tmp_path)


@pytest.mark.parametrize("program", one_in(4))
def test_every_example_is_right_where_processes_take_over(program: Program, tmp_path: Path) -> None:
    assert (alone(check, program, tmp_path, spin).stats().workers == 0) == (program.name in SHARED)


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_forked_processes_would_share_is_told(name: str, tmp_path: Path) -> None:
    (program,) = (each for each in PROGRAMS if each.name == name)
    with pytest.warns(UserWarning, match=rf"{name}\S+ is open, which all forked processes"):
        check(program, tmp_path, spin)


def alone(fn: Any, *args: Any) -> Any:
    """Call in a context of its own, as programs set print options and precisions for good."""
    return contextvars.copy_context().run(fn, *args)


def check(program: Program, folder: Path, *more: Any) -> stoker.Pipeline[Any]:
    """Check two epochs of a program, with functions of ours behind it."""
    dataset, *functions = program.make(folder)
    p = stoker.from_dataset(dataset, seed=0)
    for function in (*functions, *more):
        p = p.map(function)
    p = p.batch(4, collate=list)
    expected = [program.expected(i) for i in range(N)]
    for _ in range(2):
        found = [example for batch in p for example in batch]
        assert found[:N] == expected  # a program may have more than it foretells
    return p
