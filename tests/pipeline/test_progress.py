"""``.map(fn, progress=True)``: where an example stands in training, by its own place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import testing
from strategies import few

Build = Callable[..., stoker.Pipeline]


@stoker.thread_safe
def told(x: Any, progress: stoker.types.Progress) -> Any:
    return x, progress.epoch, progress.fraction


@stoker.thread_safe
def told_beside(x: Any, rng: np.random.Generator, progress: stoker.types.Progress) -> Any:
    return x, progress.epochs, rng.random()


@stoker.thread_safe
def doubled(x: Any) -> Any:
    return x, x


@stoker.thread_safe
def share(_: Any, progress: stoker.types.Progress) -> float:
    return progress.fraction


@stoker.thread_safe
def is_kept(x: Any) -> bool:
    return bool(x % 3)


def begun(rank: int = 0, world: int = 1, n: int = 60) -> stoker.Pipeline:
    source = stoker.from_arrays(np.arange(n), seed=4).shuffle()
    return source.shard(rank=rank, world_size=world)


def part(n: int) -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(n), seed=4).shuffle()


def rows(train: stoker.Pipeline) -> list[tuple[Any, ...]]:
    return [row for batch in train for row in zip(*(x.tolist() for x in batch), strict=True)]


@few(8)
@given(n=st.integers(8, 80), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_all_ranks_tell_of_the_same_places(n: int, world: int, epoch: int) -> None:
    whole = begun(n=n).map(told, progress=True).batch(8)
    whole.set_epoch(epoch)
    expected = {x: (x, epoch, at / n) for at, (x, _, _) in enumerate(rows(whole))}
    found = []
    for rank in range(world):
        train = begun(rank, world, n).map(told, progress=True).batch(3)
        train.set_epoch(epoch)
        found += rows(train)
    assert len(found) == n // world * world
    assert all(row == expected[row[0]] for row in found)


KINDS: dict[str, Build] = {
    "plain": lambda: begun(1, 2).map(told, progress=True).batch(4),
    "beside": lambda: begun(1, 2).random_map(told_beside, progress=True).batch(4),
    "echo": lambda: begun().echo(2, pool=16).random_map(told_beside, progress=True).batch(4),
    "field": lambda: begun().map(doubled).map(share, on=1, progress=True)
    .batch(4),
    "filter": lambda: begun().filter(is_kept).map(told, progress=True).batch(4),
    "tokens": lambda: begun(1, 2).map(told, progress=True).batch_by_tokens(9, np.arange(60) % 5),
    "repeat": lambda: begun().map(told, progress=True).batch(4).repeat().steps(7),
    "pad": lambda: stoker.from_arrays(np.arange(7), seed=1)
    .shard(rank=1, world_size=2, remainder="pad")
    .map(told, progress=True).batch(2),
    "mix": lambda: stoker.mix([part(40), part(30)], weights=[2, 1], seed=3)
    .shard(rank=0, world_size=2).map(told, progress=True).batch(4),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_resumes_tell_the_same(kind: str) -> None:
    build = KINDS[kind]
    assert rows(build().workers(2)) == rows(build().workers(0))
    testing.check_resume(build, every=3)


@pytest.mark.parametrize("count", [1, 2])
def test_worker_processes_tell_the_same(count: int) -> None:
    build = KINDS["plain"]
    assert rows(build().workers(count, kind="process")) == rows(build().workers(0))


def test_uses_tell_of_their_example_and_mixtures_of_each_part() -> None:
    seen: dict[int, set[float]] = {}
    for x, epochs, _ in rows(KINDS["echo"]()):
        seen.setdefault(x, set()).add(epochs)
    assert {len(times) for times in seen.values()} == {1}
    progress = [p for _, _, p in rows(KINDS["mix"]())]
    assert max(abs(p - at / len(progress)) for at, p in enumerate(progress)) < 0.15
    padded = [p for _, _, p in rows(KINDS["pad"]())]
    assert padded[-1] == 6 / 7


def test_epochs_go_on() -> None:
    train = begun().map(told, progress=True).batch(8)
    times = [(epoch, p) for _ in range(3) for _, epoch, p in rows(train)]
    assert times == sorted(times)
    assert times[-1] == (2, 59 / 60)


def test_pools_that_go_on_tell_of_their_own_epoch() -> None:
    train = begun().echo(max_factor=4).random_map(told_beside, progress=True).batch(4)
    for epoch in range(3):
        assert all(epoch - 1 <= epochs < epoch + 1 for _, epochs, _ in rows(train))


def test_what_has_no_place_is_refused() -> None:
    def one(x: Any) -> Any:
        return x

    with pytest.raises(TypeError, match=r"calls fn\(x, progress\)"):
        begun().map(one, progress=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"calls fn\(x, rng, progress\)"):
        begun().random_map(told, progress=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="progress=True or False"):
        begun().map(told, progress=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="a stream's length"):
        stoker.from_iterable(range(3)).map(told, progress=True)
    with pytest.raises(ValueError, match=r"put it before batch\(4\)"):
        begun().batch(4).map(told, progress=True)
    with pytest.raises(ValueError, match="changes in every epoch"):
        begun().map(told, progress=True).cache("2MiB", version="1")
    with pytest.raises(ValueError, match="cannot follow map"):
        begun().map(told, progress=True).sizes()
