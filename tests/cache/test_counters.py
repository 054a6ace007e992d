"""Counts that all processes of a store see: nothing is lost, and nobody counts for another."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import PRELUDE

from scripts import run
from stoker.cache.counters import NAMES, ROWS, Counters
from stoker.stats import CacheCounts

ONE, OTHER = (11, 12), (11, 13)  # alike by half


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "counters")


@contextmanager
def opened(path: str) -> Iterator[Counters]:
    counters = Counters(path)
    try:
        yield counters
    finally:
        counters.close()


def play(tmp_path: Path, path: str, body: str) -> list[Any]:
    here = tmp_path / f"script-{secrets.token_hex(4)}"
    here.mkdir()
    begin = f"from stoker.cache.counters import *\npath = {path!r}\n"
    return run(here, PRELUDE + begin + body)


def total(counters: Counters) -> CacheCounts:
    """Return what the users of all rows have counted."""
    return sum((counters.of((n, n)) for n in range(1, ROWS + 1)), CacheCounts())


users = st.sampled_from([ONE, OTHER, (12, 11), (1, 2**63 - 1)])


@given(
    st.lists(
        st.tuples(
            users,
            st.dictionaries(st.sampled_from(NAMES), st.integers(-5, 2**40), max_size=8),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_users_are_told_apart_and_add_up(steps: list[tuple[Any, dict[str, int], bool]]) -> None:
    """Whenever the file is closed and opened again in between."""
    expected: dict[Any, CacheCounts] = {}
    with tempfile.TemporaryDirectory() as folder:
        counters = Counters(os.path.join(folder, "counters"))
        for user, counts, again in steps:
            if again:
                counters.close()
                counters = Counters(os.path.join(folder, "counters"))
            counters.add(user, **counts)
            expected[user] = expected.get(user, CacheCounts()) + CacheCounts(**counts)
            assert counters.of(user) == expected[user]
        for user in (ONE, OTHER, (12, 11), (1, 2**63 - 1), (99, 99)):
            assert counters.of(user) == expected.get(user, CacheCounts())
        counters.close()


def test_threads_lose_nothing(path: str) -> None:
    with opened(path) as counters:

        def work(user: tuple[int, int]) -> None:
            for _ in range(3000):
                counters.add(user, hits=1, saved_bytes=3)

        threads = [threading.Thread(target=work, args=[(ONE, OTHER)[i % 2]]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for user in (ONE, OTHER):
            assert counters.of(user) == CacheCounts(hits=6000, saved_bytes=18_000)


def test_counts_of_several_processes_add_up(tmp_path: Path, path: str) -> None:
    body = f"""
def work(user):
    counters = Counters(path)
    for _ in range(3000):
        counters.add(user, hits=1, misses=2)

pids = [forked(lambda: work(({ONE}, {OTHER})[i % 2])) for i in range(6)]
counters = Counters(path)
for _ in range(3000):
    counters.add({ONE}, admitted=1)
say(json.dumps(ended(pids)))
say(json.dumps([counters.of(user).all()[:3] for user in ({ONE}, {OTHER})]))
"""
    codes, seen = play(tmp_path, path, body)
    assert codes == [0] * 6
    assert seen == [[9000, 18_000, 3000], [9000, 18_000, 0]]
    with opened(path) as counters:  # they stay, with nobody left who counted them
        assert [counters.of(user).hits for user in (ONE, OTHER)] == [9000, 9000]


def test_rows_of_processes_that_ended_are_used_again(tmp_path: Path, path: str) -> None:
    """One row is left: processes that are killed one after the other all count in it."""
    with opened(path) as counters:
        for n in range(1, ROWS):
            counters.add((n, n), misses=1)
        body = f"""
def work(signal_):
    Counters(path).add({(ROWS, ROWS)}, hits=1)
    if signal_:
        os.kill(os.getpid(), signal_)

say(json.dumps([ended([forked(lambda: work(9 * (i % 2)))])[0] for i in range(10)]))
"""
        assert play(tmp_path, path, body) == [[0, -9] * 5]
        assert counters.of((ROWS, ROWS)).hits == 10
        assert total(counters) == CacheCounts(hits=10, misses=ROWS - 1)


def test_a_row_is_never_shared_by_the_living(tmp_path: Path, path: str) -> None:
    """One row is left, and its user lives: another process of that user does not write into it."""
    with opened(path) as counters:
        for n in range(1, ROWS + 1):
            counters.add((n, n), misses=1)
        body = f"""
counters = Counters(path)
counters.add({(ROWS, ROWS)}, hits=7)
say(json.dumps(counters.of({(ROWS, ROWS)}).hits))
"""
        # Without a row its counts are seen there alone, and nobody else's are harmed.
        assert play(tmp_path, path, body) == [7]
        assert counters.of((ROWS, ROWS)) == CacheCounts(misses=1)
        assert total(counters) == CacheCounts(misses=ROWS)
