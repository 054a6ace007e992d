"""Chains that choose, order, number, deal and plan examples, each with one other thing.

Programs that tests start build them, too: this needs nothing of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import stoker

N = 90
SIZES = np.random.default_rng(1).integers(1, 20, N)
Build = Callable[[Any], Any]
Thing = Mapping[str, Build]


@stoker.thread_safe
class Data:
    """Its numbers."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int64(index)}


@stoker.thread_safe
def drawing(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "drawn": rng.integers(1 << 40)}


@stoker.thread_safe
def telling(example: dict[str, Any], time: Any) -> dict[str, Any]:
    return {**example, "time": time.epochs}


def counting(state: int, example: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return state + 1, {**example, "state": state}


@stoker.thread_safe
def few_fail(x: Any) -> Any:
    if x % 17 == 3:
        raise ValueError("a bad example")
    return x


def halved(data: Any) -> Any:
    return data.split(0.5, seed=3)[0]


# Such as all choices below leave.
LEFT = [
    int(each["x"])
    for each in halved(stoker.from_dataset(Data(), seed=0)).shard(rank=0, world_size=1)
]
LEFT = [x for x in LEFT if x % 3 and 3 <= x < 83]


def own(epoch: int, rng: np.random.Generator) -> Any:
    return rng.choice(LEFT[epoch:], 70)


# Where a thing stands in a chain: in this order.
PLACES = (
    "source", "number", "choose", "order", "cut", "deal", "keep", "map", "echo", "draw", "batch",
    "behind", "end", "work",
)  # fmt: skip
PLAIN: Thing = {
    "source": lambda _: stoker.from_dataset(Data(), seed=5),
    "number": lambda p: p.with_index("id"),
    "order": lambda p: p.shuffle(),
    "draw": lambda p: p.random_map(drawing),
    "batch": lambda p: p.batch(8),
}
NEW: dict[str, Thing] = {
    "select": {"choose": lambda p: p.select(np.arange(N) % 3 > 0)},
    "split": {"choose": halved},
    "weights": {"order": lambda p: p.sample(1 + np.arange(N) % 4)},
    "changing weights": {
        "order": lambda p: p.sample(lambda epoch: (np.arange(N) + epoch) % 3 + 0.5, num_samples=60)
    },
    "order": {"order": lambda p: p.order(own, length=70)},
    "balance": {"deal": lambda p: p.shard(rank=1, world_size=2).balance(SIZES)},
    "tokens": {"batch": lambda p: p.batch_by_tokens(64, SIZES)},
    "keys": {"batch": lambda p: p.bucket(8, SIZES // 10)},
    "clock": {"map": lambda p: p.map(telling, progress=True)},
}
OLD: dict[str, Thing] = {
    "workers": {"work": lambda p: p.workers(3)},
    "processes": {"work": lambda p: p.workers(1, kind="process")},
    "cache": {"keep": lambda p: p.cache("1MiB", version="1")},
    "map": {"map": lambda p: p.map(stoker.thread_safe(lambda x: x + 0), on="x")},
    "device": {"behind": lambda p: p.to_torch()},
    "echo": {"echo": lambda p: p.echo(2, pool=24)},
    "late echo": {"behind": lambda p: p.echo(2, pool=3)},
    "filter": {"map": lambda p: p.filter(stoker.thread_safe(lambda x: x % 5 > 0), on="x")},
    "skips": {"map": lambda p: p.map(few_fail, on="x", max_errors="50%")},
    "scan": {"map": lambda p: p.scan(counting, 0)},
    "fraction": {"echo": lambda p: p.echo(1.5)},
    "rank": {"deal": lambda p: p.shard(rank=1, world_size=3)},
    "first ones": {"choose": lambda p: p.skip(3).take(80)},
    "cut": {"cut": lambda p: p.skip(2).take(50)},
    "steps": {"end": lambda p: p.steps(4)},
    "repeat": {"end": lambda p: p.repeat().steps(13)},
}


def built(*things: Thing) -> Any:
    """Build a chain of things, and of what is plain where none stands."""
    made: Any = None
    for place in PLACES:
        here = [thing[place] for thing in things if place in thing]
        for build in here or [PLAIN.get(place, lambda p: p)]:
            made = build(made)
    return made


def seen(batches: Iterable[Any]) -> list[dict[str, list[Any]]]:
    return [{name: np.asarray(b[name]).tolist() for name in b} for b in batches]
