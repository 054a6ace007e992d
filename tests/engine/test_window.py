"""The window: workers run ahead of the consumer, but no further than is said."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import pytest

import stoker
from strategies import small_pools_allowed

BATCH = 4


class Prefetcher:
    """Counts what was fetched and not yet used, and tells when there is enough."""

    def __init__(self, enough: int, length: int = 400) -> None:
        self.length, self.enough = length, enough
        self.lock = threading.Lock()
        self.fetched = self.used = self.most = 0
        self.reached = threading.Event()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)  # work that takes time and no processor: worth a thread
        with self.lock:
            self.fetched += 1
            self.most = max(self.most, self.fetched - self.used)
            if self.fetched - self.used >= self.enough:
                self.reached.set()
        return index


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_run_ahead_within_the_window(workers: int) -> None:
    data = Prefetcher(enough=2 * BATCH)
    pipeline = stoker.from_dataset(data, seed=0).shuffle().batch(BATCH).workers(workers)
    with iter(pipeline) as iterator:
        for number in range(60):
            next(iterator)
            with data.lock:
                data.used += BATCH
            if number == 40:  # threads take part by now; the window fills while nothing is asked
                data.reached.clear()
                assert data.reached.wait(60)
    # max(2 batches, 8 * workers * chunk), a chunk being at most a batch; and the one in use.
    assert data.most <= BATCH * max(2, 8 * workers) + BATCH


def test_without_workers_nothing_runs_ahead() -> None:
    data = Prefetcher(enough=1)
    with iter(stoker.from_dataset(data).batch(BATCH).workers(0)) as iterator:
        for number in range(1, 6):
            next(iterator)
            assert data.fetched == number * BATCH


class Token:
    """Something whose life can be seen; copies are seen, too."""

    alive: ClassVar[weakref.WeakSet[Token]] = weakref.WeakSet()

    def __init__(self) -> None:
        Token.alive.add(self)

    def __deepcopy__(self, memo: Any) -> Token:
        return Token()


class Tokens:
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Token:
        return Token()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pool", [8, 40])
def test_a_pool_keeps_no_more_than_its_size(workers: int, pool: int) -> None:
    gc.collect()
    Token.alive.clear()
    chain = stoker.from_dataset(Tokens(), seed=0).echo(3, pool=pool)
    pipeline = chain.random_map(lambda x, rng: x).batch(BATCH, collate=list).workers(workers)
    # Behind the pool: the window, copies of uses included, and the batch in use. Before it:
    # what is on its way in, which is no more.
    bound = pool + 2 * BATCH * max(2, 8 * workers) + 2 * BATCH if workers else pool + 2 * BATCH
    with small_pools_allowed():
        for batch in pipeline:
            assert len(batch) == BATCH
            assert len(Token.alive) <= bound
    del batch
    gc.collect()
    assert len(Token.alive) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_echo_nothing_is_kept(workers: int) -> None:
    gc.collect()
    Token.alive.clear()
    pipeline = stoker.from_dataset(Tokens()).batch(BATCH, collate=list).workers(workers)
    for batch in pipeline:
        assert len(batch) == BATCH
        assert len(Token.alive) <= BATCH * (max(2, 8 * workers) + 2)
    del batch
    gc.collect()
    assert len(Token.alive) == 0
