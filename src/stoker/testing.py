"""Checks that users can run on their own pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from stoker import pytree
from stoker.pipeline import Pipeline


def check_resume(build: Callable[[], Pipeline], *, every: int = 1) -> int:
    """Save before every batch of an epoch, restore each state, and compare the rest.

    Each state goes through JSON into a pipeline from another ``build()``, which must then
    yield exactly the batches that the uninterrupted epoch had left.

    Args:
        build: makes the pipeline, alike and with the same seed each time.
        every: check every n-th state only; an epoch of b batches takes about ``b**2 / 2 / n``.

    Returns:
        The number of states that were checked.

    Raises:
        AssertionError: a tail differs; says where.
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


def same(left: Any, right: Any) -> bool:
    """Tell whether two structures are equal bit for bit, types and dtypes included."""
    mine, yours = pytree.children(left), pytree.children(right)
    if mine is None or yours is None:
        return mine is yours and _same_leaf(left, right)
    if isinstance(left, Mapping):
        mine, yours = sorted(mine, key=itemgetter(0)), sorted(yours, key=itemgetter(0))
    return (
        type(left) is type(right)
        and [name for name, _ in mine] == [name for name, _ in yours]
        and all(same(a, b) for (_, a), (_, b) in zip(mine, yours, strict=True))
    )


def _same_leaf(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if pytree.is_tensor(left):
        left, right = left.detach().cpu(), right.detach().cpu()
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if pytree.is_jax_array(left):
        left, right = np.asarray(left), np.asarray(right)
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype.hasobject:
            return all(same(a, b) for a, b in zip(left.ravel(), right.ravel(), strict=True))
        return bool(left.tobytes() == right.tobytes())
    return bool(left == right)
