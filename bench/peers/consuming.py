"""A job that only consumes, for ``bench/share.py``: the same loop under every loader.

It says ``ready`` after a few batches, waits for a line that says how long to run, and prints when
each batch came, in seconds since then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def consume(batches: Callable[[], Iterator[Any]], warm: int) -> None:
    """Iterate what ``batches`` makes, which never ends; ``warm`` of it come first."""
    endless = batches()
    for _ in range(warm):
        next(endless)
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    began = time.perf_counter()
    came: list[Any] = []
    while len(came) < 2 or came[-1] < seconds:  # a rate takes two
        next(endless)
        came.append(time.perf_counter() - began)
    print(json.dumps(came), flush=True)
    sys.stdin.readline()  # others may still need what this process serves
