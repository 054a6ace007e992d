"""Trying again: how long is waited, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import stoker
from stoker.sources.remote import failures
from stoker.sources.remote.failures import StatusError, retry


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []
        patch.setattr(failures.time, "monotonic", lambda: self.now_s)
        patch.setattr(failures.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def tried(failures: list[Any], timeout_s: float = 60.0) -> str:
    """Run an attempt that fails so often before it works."""

    async def attempt() -> str:
        if failures:
            raise failures.pop(0)
        return "read"

    return asyncio.run(retry(attempt, "http://x/y", timeout_s))


def test_a_server_that_says_how_long_is_left_alone_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert tried([StatusError(429, "Too Many", "7"), StatusError(503, None)]) == "read"
    assert clock.slept_s[0] == 7
    assert clock.slept_s[1] < 1  # it did not say, the second time


@pytest.mark.parametrize("said", [None, "", "Fri, 20 Nov 2026 10:00:00 GMT", "-3", "soon"])
def test_what_is_no_number_of_seconds_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    clock = Clock(monkeypatch)
    assert tried([StatusError(503, None, said)]) == "read"
    assert 0 < clock.slept_s[0] <= 0.1


def test_no_server_is_waited_for_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(stoker.RemoteError, match=r"HTTP 503 after 2 attempts in 5 s"):
        tried([StatusError(503, None, "3600")] * 3, timeout_s=5.0)
    assert clock.slept_s == [5.0]
