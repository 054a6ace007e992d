"""What comes next is decided by one thread at a time, and what decides says so if it is not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import stoker
from stoker.engine.items import Planning

LENGTH = 400


def test_only_the_thread_that_holds_it_holds_it() -> None:
    planning = Planning()
    assert not planning.is_held()
    with planning.lock:
        seen: list[bool] = []
        other = threading.Thread(target=lambda: seen.append(planning.is_held()))
        other.start()
        other.join()
        with planning.lock:
            assert planning.is_held()
        assert planning.is_held()
    assert not planning.is_held()
    assert seen == [False]


def _examples() -> stoker.Pipeline:
    return stoker.from_dataset([np.full(8, i) for i in range(LENGTH)], seed=0).shuffle()


def _even(example: np.ndarray) -> bool:
    return example[0] % 2 == 0


def _recorded() -> stoker.Pipeline:
    pipeline = _examples().echo("auto").batch(8)
    list(pipeline)
    return _examples().echo("auto").batch(8).replay(pipeline.record())


CHAINS: dict[str, Callable[[], stoker.Pipeline]] = {
    "batches": lambda: _examples().batch(8),
    "a pool": lambda: _examples().echo(2).batch(8),
    "a pool of batches": lambda: _examples().batch(8).echo(2).map(lambda batch: batch),
    "a filter": lambda: _examples().filter(_even).batch(8),
    "a pool that follows": lambda: _examples().echo("auto").batch(8),
    "a record": _recorded,
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_plans_checks_that_it_may(
    chain: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = CHAINS[chain]().workers(workers)
    asked: set[str] = set()
    is_held = Planning.is_held

    def noted(planning: Planning) -> bool:
        asked.add(sys._getframe(1).f_code.co_qualname)
        return is_held(planning)

    monkeypatch.setattr(Planning, "is_held", noted)
    with iter(pipeline) as batches:
        next(batches)
        pipeline.state_dict()
    assert "SegmentStream._submit_next" in asked
    assert "resume_points" in asked
    assert ("OrderedStream._have" in asked) == (chain == "a filter")
    assert ("Replay.code" in asked) == (chain == "a record")


@pytest.mark.parametrize("chain", CHAINS)
def test_planning_without_the_lock_fails(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = CHAINS[chain]()
    monkeypatch.setattr(Planning, "is_held", lambda planning: False)
    with pytest.raises(AssertionError):
        list(pipeline)
