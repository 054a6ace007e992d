"""The window: workers run ahead of the consumer, but no further than is said."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

import stoker
from stoker.testing import check_resume, equal
from strategies import one_in, small_pools_allowed

BATCH = 4


@stoker.thread_safe  # one for all threads: it counts
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


class Counted(Prefetcher):
    """Each example has 1 MiB."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return np.full(1 << 18, index, np.int32)


@pytest.mark.parametrize("kind", one_in(2, ["thread", "process"]))
@pytest.mark.parametrize(
    ("batch", "ahead", "most"),
    one_in(
        3,
        [
            (1, 1, 1),
            (1, 5, 5),
            (4, 1, 4),
            (4, 3, 12),
            (None, 7, 7),
            (1, "5MiB", 5),
            (4, "9MiB", 8),
            (4, "1KiB", 4),  # one batch at least
        ],
    ),
)
def test_workers_are_no_further_ahead_than_was_said(
    kind: str, batch: int | None, ahead: int | str, most: int
) -> None:
    data = Counted(enough=1_000, length=60)
    pipeline = stoker.from_dataset(data, seed=0).shuffle()
    if batch is not None:
        pipeline = pipeline.batch(batch)
    pipeline = pipeline.workers(8, kind=kind, ahead=ahead)
    seen: list[int] = []
    with iter(pipeline) as iterator:
        for each in iterator:
            seen += np.atleast_2d(each)[:, 0].tolist()
            with data.lock:  # other processes count for themselves
                data.used += batch or 1
                assert data.fetched - data.used <= most
            window = pipeline.stats().window_size
            assert window * (batch or 1) <= most
    assert sorted(seen) == list(range(60))
    assert "ahead at most" in str(pipeline)


@pytest.mark.parametrize(
    ("ahead", "error", "says"),
    [
        (1.5, TypeError, "a number of batches, or a size"),
        (True, TypeError, "a number of batches, or a size"),
        ("much", ValueError, "'much' is not a size"),
    ],
)
def test_how_far_ahead_is_checked(ahead: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        stoker.from_dataset(range(8)).workers(2, ahead=ahead)


def test_without_workers_nothing_runs_ahead() -> None:
    data = Prefetcher(enough=1)
    with iter(stoker.from_dataset(data).batch(BATCH).workers(0)) as iterator:
        for number in range(1, 6):
            next(iterator)
            assert data.fetched == number * BATCH


@pytest.mark.parametrize("batch", [1, 4])
def test_without_workers_nothing_fast_runs_ahead_either(batch: int) -> None:
    asked: list[int] = []

    def noted(x: int) -> int:
        asked.append(x)
        return x

    pipeline = stoker.from_dataset(range(400)).map(noted).batch(batch).workers(0)
    for number, _ in enumerate(pipeline, 1):
        assert len(asked) == number * batch


@stoker.thread_safe
class Small:
    """Costs next to nothing to read; fails on one."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 403

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise LookupError(index)
        return np.full(2, index), index


@stoker.thread_safe
def drawn(example: Any, rng: np.random.Generator) -> Any:
    return (*example, int(rng.integers(1 << 40)))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_small_batches_are_the_same_however_many_are_made_at_once(n: int, drop_last: bool) -> None:
    def build(workers: int | None = None) -> stoker.Pipeline:
        chain = stoker.from_dataset(Small(), seed=0).shuffle().random_map(drawn)
        chain = chain.batch(n, drop_last=drop_last).random_map(
            stoker.thread_safe(lambda b, rng: (b, rng.random()))
        )
        return chain if workers is None else chain.workers(workers)

    one_by_one, several = build(0), build()
    for _ in range(2):  # the first epoch finds out what a batch costs
        assert all(equal(a, b) for a, b in zip(several, one_by_one, strict=True))
    assert check_resume(build, every=41) == -(-len(several) // 41)


@pytest.mark.parametrize("n", [1, 3])
def test_statistics_count_small_batches_once(n: int) -> None:
    pipeline = stoker.from_dataset(Small(), seed=0).map(lambda x: x).batch(n)
    with iter(pipeline) as batches:
        for number in range(1, 21):
            next(batches)
            assert pipeline.stats().fresh_examples == pipeline.stats().uses == number * n
    found = stoker.from_dataset(Small(), seed=0).map(lambda x: x).batch(n)
    list(found)
    assert [stage.examples for stage in found.stats().stages] == [403, 403, 403]


@pytest.mark.parametrize("what", ["read", "map", "collate", "batch map"])
def test_what_fails_among_small_batches_fails_at_its_own(what: str) -> None:
    def failing(name: str) -> Any:
        @stoker.thread_safe
        def fails(value: Any) -> Any:
            if what == name and np.max(value[1] if name == "map" else value) == 201:
                raise LookupError(201)
            return value

        return fails

    chain = stoker.from_dataset(Small(201 if what == "read" else None)).map(failing("map"))
    chain = chain.batch(
        2, collate=stoker.thread_safe(lambda some: failing("collate")([y for _, y in some]))
    )
    iterator = iter(chain.map(failing("batch map")))
    for number in range(100):
        assert next(iterator) == [2 * number, 2 * number + 1]
    with pytest.raises(stoker.StageError, match="LookupError: 201") as caught:
        next(iterator)
    failed = None if what == "batch map" else 201
    in_batch = None if what in ("read", "map") else 100
    assert (caught.value.index, caught.value.batch) == (failed, in_batch)


class Token:
    """Something whose life can be seen; copies are seen, too."""

    alive: ClassVar[weakref.WeakSet[Token]] = weakref.WeakSet()

    def __init__(self) -> None:
        Token.alive.add(self)

    def __deepcopy__(self, memo: Any) -> Token:
        return Token()


@stoker.thread_safe  # one for all threads: what is alive is known to the class
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
