"""Which example each step uses: every way of repeating, for a given number of steps."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import stoker

SHARE = Fraction(1, 10)
"""Of the uses, so many are spent on a subset, or on copies spread evenly."""
BLOCKS = {"next step": 1, "8 steps": 8, "an epoch": None}
"""Batches that are passed over again and again before the next ones; None: all."""
POOLS = {"pool of 16": 16, "pool of 64": 64, "evenly": 16}
"""Batches that stoker's echo holds."""
FRESH = "fresh"
SUBSET = "a subset"


class Arm(NamedTuple):
    """One way of repeating, or a training on fresh data."""

    distance: str
    """A key of `BLOCKS` or `POOLS`, `SUBSET` or `FRESH`."""
    uses: int
    """k: of each example; of the subset's; 2 where a tenth is repeated evenly; 1 if fresh."""
    steps: int
    """T, or for fresh data its length."""


def order_of(arm: Arm, batch_size: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers of the examples of each step, [steps, batch_size].

    Fresh examples are numbered from 0 as they come, in a shuffled order where the order matters.
    """
    rng = np.random.default_rng([seed, 0x5EED])
    uses = arm.steps * batch_size
    if arm.distance == FRESH:
        found: Any = np.arange(uses)
    elif arm.distance == SUBSET:
        found = _with_subset(uses, arm.uses, rng)
    elif arm.distance in POOLS:
        pool = POOLS[arm.distance] * batch_size
        factor = Fraction(arm.uses) if arm.distance != "evenly" else 1 / (1 - SHARE)
        found = _echoed(uses, factor, pool, seed)
    else:
        block = BLOCKS[arm.distance]
        fresh = arm.steps // arm.uses
        found = [
            batch
            for first in range(0, fresh, block or fresh)
            for batch in _passes(first, min(fresh, first + (block or fresh)), arm, batch_size, rng)
        ]
    return np.asarray(found, np.int64).reshape(arm.steps, batch_size)


def _passes(
    first: int, end: int, arm: Arm, batch_size: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return k passes over the examples of some batches, each in an order of its own."""
    examples = np.arange(first * batch_size, end * batch_size)
    return [rng.permutation(examples) for _ in range(arm.uses)]


def _with_subset(uses: int, each: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return nine tenths that are used once, and a subset, all in any order."""
    few = max(1, round(SHARE * uses / each))
    return rng.permutation(
        np.concatenate([np.repeat(np.arange(few), each), _rest(few, each, uses)])
    )


def _rest(few: int, each: int, uses: int) -> NDArray[np.int64]:
    return np.arange(few, few + uses - few * each)


def _echoed(uses: int, factor: Fraction, pool: int, seed: int) -> list[int]:
    """Return the stream of stoker's echo."""
    fresh = -(-uses * factor.denominator // factor.numerator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # many uses of a small pool: registered
        stream = stoker.from_dataset(range(fresh), seed=seed).shuffle().echo(factor, pool=pool)
        return list(stream)[:uses]
