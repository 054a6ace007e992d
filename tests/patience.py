"""Waiting for what comes late on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WITHIN_S = 200.0
"""After which something does not come."""


def wait_until(true: Callable[[], Any], tell: Callable[[], Any] = lambda: "") -> None:
    """Wait for something to become true; ``tell`` says what there is where it does not."""
    until = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < until, tell()
        time.sleep(0.005)
