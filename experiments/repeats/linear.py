"""The linear model: least squares on the first features of many, by SGD, with exact losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.repeats.orders import BLOCKS, FRESH, POOLS, SUBSET, Arm, order_of

Floats = NDArray[np.float32]

FEATURES, DECAY = 512, 1.5
WORLDS = {"misspecified": 0.0, "with noise": 1.0}
"""The variance of noise beside what the model does not see."""
BATCH_SIZE, STEPS = 8, 8_192
COUNTS = (2, 4, 8, 16, 32, 64)
BEYOND = (256, 1_024, 3_276)
"""Counts of the subset alone."""
RATES = tuple(2 ** (n / 2) for n in range(-16, 2))
SEEDS, TUNING_SEEDS = range(5), range(1_000, 1_002)


class World(NamedTuple):
    """What one seed trains on: n examples of P features, for each world their targets."""

    x: Floats
    """[n, P]."""
    y: Floats
    """[worlds, n]."""
    truth: Floats
    """The best weights, [P]."""


def arms(steps: int = STEPS) -> list[Arm]:
    """Return all arms, fresh data first."""
    found = [Arm(FRESH, 1, steps >> n) for n in range(9)]
    found += [Arm(name, k, steps) for name in (*BLOCKS, *POOLS, SUBSET) for k in COUNTS]
    found = [arm for arm in found if arm.distance != "evenly" or arm.uses == 2]
    return found + [Arm(SUBSET, k, steps) for k in BEYOND]


def variances(features: int) -> Floats:
    """Return those of the inputs, [features]."""
    return (np.arange(1, features + 1) ** -DECAY).astype(np.float32)


def world_of(seed: int, examples: int, features: int = FEATURES) -> World:
    """Make the examples of a seed; the same ones first, however many there are."""
    rng = np.random.default_rng([seed, 0x11EA])
    truth = rng.choice(np.array([-1, 1], np.float32), features)
    unseen = _unseen(features)
    noise = rng.standard_normal((examples, 2), np.float32)
    x = rng.standard_normal((examples, features), np.float32)
    x *= np.sqrt(variances(features))
    missed = x @ truth + math.sqrt(unseen) * noise[:, 0]
    y = [missed + math.sqrt(variance) * noise[:, 1] for variance in WORLDS.values()]
    return World(x, np.stack(y), truth)


def _unseen(features: int) -> float:
    """Return the variance of what the model does not see, from here to infinity."""
    return float((features + 0.5) ** (1 - DECAY) / (DECAY - 1))


def train(world: World, order: NDArray[np.int64], rates: Sequence[float]) -> NDArray[np.float64]:
    """Train with each rate; return the losses less what no weights can remove, [worlds, rates]."""
    steps, batch_size = order.shape
    count = len(world.truth)
    weights = np.zeros((len(world.y), len(rates), count), np.float32)
    scale = np.asarray(rates, np.float32)[:, None] / batch_size
    with np.errstate(over="ignore", invalid="ignore"):
        for step, items in enumerate(order):
            x = world.x[items]
            errors = weights @ x.T - world.y[:, None, items]
            falls = np.float32((1 + math.cos(math.pi * (step + 0.5) / steps)) / 2)
            weights -= (errors @ x) * (scale * falls)
        off = (weights - world.truth).astype(np.float64)
        lost: NDArray[np.float64] = (off**2 * variances(count)).sum(-1)
        return np.nan_to_num(lost, nan=math.inf, posinf=math.inf)


def rows(
    say: Callable[[str], None], steps: int = STEPS, features: int = FEATURES
) -> Iterator[dict[str, Any]]:
    """Yield a row for each world and arm: first all rates by two seeds, then the best by five."""
    every = arms(steps)
    tuned = {arm: np.zeros((len(WORLDS), len(RATES))) for arm in every}
    for seed in TUNING_SEEDS:
        world = world_of(seed, steps * BATCH_SIZE, features)
        for arm in every:
            tuned[arm] += train(world, order_of(arm, BATCH_SIZE, seed), RATES)
        say(f"seed {seed} has tuned")
    best = {arm: tuned[arm].argmin(1).tolist() for arm in every}
    found: dict[Arm, list[list[float]]] = {arm: [] for arm in every}
    for seed in SEEDS:
        world = world_of(seed, steps * BATCH_SIZE, features)
        for arm in every:
            chosen = [RATES[place] for place in best[arm]]
            losses = train(world, order_of(arm, BATCH_SIZE, seed), chosen)
            found[arm].append(losses.diagonal().tolist())
        say(f"seed {seed} counts")
    for place, name in enumerate(WORLDS):
        for arm in every:
            at = best[arm][place]
            yield {
                "model": name,
                **arm._asdict(),
                "rate": RATES[at],
                "is_at_edge": at in (0, len(RATES) - 1),
                "losses": [losses[place] for losses in found[arm]],
            }
