"""Checks for users' tests: of resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stoker.basics import pytree
from stoker.basics.pytree import equal as equal
from stoker.basics.validate import whole_from
from stoker.pipeline import Pipeline


def check_resume(build: Callable[[], Pipeline], *, every: int = 1) -> int:
    """Check that a pipeline resumes exactly: save before each batch, restore, compare the rest.

    Each state goes through JSON into a pipeline from another ``build()``. That pipeline must then
    yield exactly the remaining batches of the uninterrupted epoch.

    Example: ``assert check_resume(make_pipeline) > 0``

    Args:
        build: returns the same pipeline with the same seed each time.
        every: check only every n-th state. An epoch of b batches takes about ``b**2 / 2 / n``
            batches.

    Returns:
        The number of checked states.

    Raises:
        AssertionError: the rest of an epoch differs; the message names the batch.
    """
    every = whole_from(1, every, "check_resume(every=) takes")
    if not callable(build):
        raise TypeError(f"check_resume() takes a function that builds the pipeline, not {build!r}")
    batches = [pytree.deep_copy(batch) for batch in build()]
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
            raise AssertionError(
                f"after restoring the state before batch {start}, the epoch has more than "
                f"{len(batches)} batches"
            )
        if not equal(batch, batches[at]):
            raise AssertionError(
                f"after restoring the state before batch {start}, batch {at} differs"
            )
        at += 1
    if at < len(batches):
        raise AssertionError(
            f"after restoring the state before batch {start}, the epoch ends after {at} of "
            f"{len(batches)} batches"
        )
