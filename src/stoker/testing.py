"""Checks that users can run on their own pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stoker.adapters.thread_checks import check_threads as check_threads
from stoker.basics import pytree
from stoker.basics.pytree import same as same
from stoker.pipeline import Pipeline


def check_resume(build: Callable[[], Pipeline], *, every: int = 1) -> int:
    """Save before every batch of an epoch, restore each state, and compare the rest.

    Each state goes through JSON into a pipeline from another ``build()``, which must then
    yield exactly the batches that the uninterrupted epoch had left.

    Args:
        build: makes the same pipeline with the same seed each time.
        every: check every n-th state only; an epoch of b batches takes about ``b**2 / 2 / n``.

    Returns:
        The number of states that were checked.

    Raises:
        AssertionError: the rest of an epoch differs; the message names the batch.
    """
    batches = [pytree.copied(batch) for batch in build()]
    pipeline = build()
    checked = 0
    with iter(pipeline) as iterator:
        for number in range(len(batches)):
            if number % every == 0:
                state = json.loads(json.dumps(pipeline.state_dict()))
                _check_tail(build, state, batches, number)
                checked += 1
            next(iterator)
    return checked


def _check_tail(
    build: Callable[[], Pipeline], state: dict[str, Any], batches: list[Any], start: int
) -> None:
    restored = build()
    restored.load_state_dict(state)
    at = start
    for batch in restored:
        if at == len(batches):
            raise AssertionError(f"restored before batch {start}: more batches than there were")
        if not same(batch, batches[at]):
            raise AssertionError(f"restored before batch {start}: batch {at} differs")
        at += 1
    if at < len(batches):
        raise AssertionError(
            f"restored before batch {start}: ended after {at} of {len(batches)} batches"
        )
