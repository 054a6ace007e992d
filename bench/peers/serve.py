"""Times a peer in an environment of its own: orders on stdin, answers on stdout, JSON lines.

``environment.Peer`` is the other end. Nothing but the standard library is needed here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

Epochs = Callable[[], Iterable[Any]]


def timed(epoch: Epochs, least_s: float = 0.0) -> dict[str, float]:
    """Run whole epochs, one at least, until so many seconds are over.

    Returns ``epochs`` and ``examples``; ``total_s``, everything included; ``first_s``, until the
    first batches were there; ``steady_examples`` and ``steady_s``, from there to the last ones.
    """
    examples = first_examples = 0
    epochs = total_ns = first_ns = steady_ns = 0
    while not epochs or total_ns < 1e9 * least_s:
        began = time.perf_counter_ns()
        first = last = 0
        for batch in epoch():
            last = time.perf_counter_ns()
            size = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[1])
            examples += size
            if not first:
                first = last
                first_examples += size
        total_ns += time.perf_counter_ns() - began
        first_ns += first - began
        steady_ns += last - first
        epochs += 1
    return {
        "epochs": epochs,
        "examples": examples,
        "total_s": total_ns / 1e9,
        "first_s": first_ns / 1e9,
        "steady_examples": examples - first_examples,
        "steady_s": steady_ns / 1e9,
    }


def whole_rates(samples: list[dict[str, float]]) -> list[float]:
    """Return examples/s of what ``timed`` found, everything included."""
    return [each["examples"] / each["total_s"] for each in samples]


def steady_rates(samples: list[dict[str, float]]) -> list[float]:
    """Return examples/s of what ``timed`` found, behind the first batches."""
    return [each["steady_examples"] / each["steady_s"] for each in samples]


def serve(about: dict[str, Any], epoch: Epochs) -> None:
    """Tell what is known, then time epochs for as many seconds as each line of input says."""
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what peers print is no answer
    answer: dict[str, Any] = about
    while True:
        print(json.dumps(answer), file=out, flush=True)
        order = sys.stdin.readline().strip()
        if order in ("", "end"):
            return
        answer = timed(epoch, float(order))
