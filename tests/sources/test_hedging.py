"""Hedged requests: never more than 2 % of them, and never later than without."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from experiments.server import Fault, serving
from stoker.sources.remote.hedging import Hedge


class Clock(selectors.SelectSelector):
    """An event loop's selector that passes time instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self.now_s += timeout
        return found


def run(main: Callable[[Callable[[], float]], Coroutine[Any, Any, None]]) -> None:
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]
    try:
        loop.run_until_complete(main(loop.time))
    finally:
        loop.close()


def after(seconds: float, answer: bytes | Exception) -> Callable[[], Awaitable[bytes]]:
    async def attempt() -> bytes:
        await asyncio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return attempt


def in_turn(*attempts: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
    each = iter(attempts)
    return lambda: next(each)()


@given(st.lists(st.sampled_from([0.01, 0.011, 0.012, 5.0]), min_size=90, max_size=400))
def test_no_more_than_two_in_a_hundred_and_never_later(durations: list[float]) -> None:
    async def main(time: Callable[[], float]) -> None:
        hedge = Hedge(time)
        for count, duration in enumerate(durations, 1):
            began, before = time(), hedge.hedged
            attempt = in_turn(after(duration, b"first"), after(0.01, b"second"))
            answer = await hedge.request(attempt, 3000)
            hedged = hedge.hedged > before
            assert not hedged or count > 100
            assert hedge.hedged <= 0.02 * count
            assert time() - began <= duration + 1e-9
            assert answer == b"first" or (hedged and answer == b"second")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


async def warmed(time: Callable[[], float], nbytes: int = 3000) -> Hedge:
    hedge = Hedge(time)
    for count in range(150):
        await hedge.request(after(0.012 if count in (0, 25, 50, 75) else 0.01, b""), nbytes)
    assert hedge.hedged == 0
    return hedge


def test_a_stuck_request_is_answered_by_the_second() -> None:
    async def main(time: Callable[[], float]) -> None:
        hedge = await warmed(time)
        began = time()
        attempt = in_turn(after(1e6, b"never"), after(0.02, b"second"))
        assert await hedge.request(attempt, 3000) == b"second"
        assert time() - began == pytest.approx(0.032)
        assert hedge.hedged == 1

    run(main)


def test_another_size_has_other_durations() -> None:
    async def main(time: Callable[[], float]) -> None:
        hedge = await warmed(time)
        assert await hedge.request(in_turn(after(1.0, b"large")), 1 << 20) == b"large"
        assert hedge.hedged == 0

    run(main)


def test_failures() -> None:
    async def main(time: Callable[[], float]) -> None:
        hedge = await warmed(time)
        broken, gone = OSError("broken"), OSError("gone")
        attempt = in_turn(after(0.02, broken), after(0.02, b"second"))
        assert await hedge.request(attempt, 3000) == b"second"
        with pytest.raises(OSError, match="broken"):
            await hedge.request(in_turn(after(0.001, broken)), 3000)
        with pytest.raises(OSError, match="gone"):
            await hedge.request(in_turn(after(0.5, broken), after(0.1, gone)), 3000)

    run(main)


def test_a_request_that_is_cancelled_takes_both_with_it() -> None:
    async def main(time: Callable[[], float]) -> None:
        hedge = await warmed(time)
        asked = asyncio.ensure_future(
            hedge.request(in_turn(after(9.0, b""), after(9.0, b"")), 3000)
        )
        await asyncio.sleep(1.0)
        assert hedge.hedged == 1
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


def test_from_a_server_the_same_bytes_come(tmp_path: Path) -> None:
    contents = [bytes([number]) * 500 for number in range(200)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number:03}.bin").write_bytes(content)
    with serving(tmp_path) as server:
        hedged = stoker.from_files(f"{server.url}/*.bin", hedge=True, seed=0).workers(2)
        assert [file.data for file in hedged] == contents
        server.set_faults(Fault("reset", rate=0.05))
        assert [file.data for file in hedged] == contents
