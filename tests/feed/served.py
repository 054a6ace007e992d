"""Pipelines that tests serve, by name, and what one process makes of them."""

from __future__ import annotations

import hashlib
import random
import threading
import warnings
from typing import Any

import numpy as np

import stoker
from stoker.basics import pytree

EXAMPLES = 150
SIDE = 40


@stoker.thread_safe
class Grids:
    """Examples ``(grid, index)``."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((SIDE, SIDE), float(index)), index


@stoker.thread_safe
def noisy(grid: Any, rng: np.random.Generator) -> Any:
    return grid + rng.random()


def batches() -> stoker.Pipeline:
    source = stoker.from_dataset(Grids(), seed=11)
    return source.shuffle().random_map(noisy, on=0).batch(8)


def rows() -> stoker.Pipeline:
    grids = np.arange(EXAMPLES * SIDE * SIDE, dtype=np.float32).reshape(EXAMPLES, SIDE * SIDE)
    return stoker.from_arrays(grids, np.arange(EXAMPLES), seed=12).shuffle().batch(12)


def echoed() -> stoker.Pipeline:
    source = stoker.from_dataset(Grids(), seed=13)
    return source.shuffle().echo(1.5, pool=32).random_map(noisy, on=0).batch(8)


def clocked() -> stoker.Pipeline:
    """A pipeline that no feed can serve."""
    return stoker.from_dataset(Grids(), seed=13).shuffle().echo("auto").batch(8)


def filtered() -> stoker.Pipeline:
    source = stoker.from_dataset(Grids(), seed=14)
    return (
        source.shuffle()
        .filter(stoker.thread_safe(lambda example: example[1] % 3 > 0))
        .batch(8, drop_last=True)
    )


def examples() -> stoker.Pipeline:
    return stoker.from_dataset(Grids(), seed=15).shuffle().random_map(noisy, on=0)


def _hang(index: int) -> int:
    while index == 7:
        threading.Event().wait(0.01)
    return index


def stuck() -> stoker.Pipeline:
    warnings.simplefilter("ignore")  # the feeder's own process is told of the example
    source = stoker.from_dataset(Grids(), seed=16).map(_hang, on=1, max_errors=1)
    return source.batch(8).workers(2, timeout_s=0.2)


class Many:
    """So many batches that they would never fit."""

    def __len__(self) -> int:
        return 2_000

    def __getitem__(self, index: int) -> Any:
        return np.full(10_000, float(index))


def many() -> stoker.Pipeline:
    return stoker.from_dataset(Many(), seed=16).batch(4)


class Drawn:
    """Draws from a generator of the whole process."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def drawn() -> stoker.Pipeline:
    return stoker.from_dataset(Drawn(), seed=20).batch(8)


@stoker.thread_safe
class Wide:
    """Of many arrays each, so that the messages on them are long."""

    def __len__(self) -> int:
        return 2_000

    def __getitem__(self, index: int) -> Any:
        names = ("image", "mask", "depth", "edges")
        return {name: np.full(5_000, index % 251, np.uint8) for name in names} | {"index": index}


def wide() -> stoker.Pipeline:
    return stoker.from_dataset(Wide(), seed=21)


def mixed() -> stoker.Pipeline:
    a = stoker.from_dataset(Grids()).shuffle().random_map(noisy, on=0)
    b = stoker.from_dataset(Grids()).shuffle(block=5)
    return stoker.mix([a, b], weights=[2, 1], seed=17).echo(2, pool=32).batch(8)


def packed() -> stoker.Pipeline:
    source = stoker.from_dataset(Grids(), seed=18).shuffle(block=5)
    return source.map(ragged).pack(100).batch(8)


def ragged(example: Any) -> Any:
    return np.arange(example[1] % 90)


def unlike_the_last(last: list[int], example: Any) -> tuple[list[int], Any]:
    """Leave out what is near to one of the last three."""
    if any(abs(example[1] - each) < 20 for each in last):
        return last, stoker.DROP
    return [*last, example[1]][-3:], example


def scanned() -> stoker.Pipeline:
    source = stoker.from_dataset(Grids(), seed=19).shuffle()
    return source.scan(unlike_the_last, []).echo(2, pool=32).random_map(noisy, on=0).batch(8)


KINDS = ("batches", "rows", "echoed", "filtered", "examples")


def digest(value: Any) -> str:
    """Return what tells an output from others."""
    made = hashlib.blake2b(digest_size=8)
    for leaf in pytree.leaves(value):
        made.update(np.ascontiguousarray(leaf).tobytes())
    return made.hexdigest()


_known: dict[tuple[str, int], list[str]] = {}


def expected(kind: str, epoch: int) -> list[str]:
    """Return the digests of an epoch's outputs, as one process makes them."""
    if (kind, epoch) not in _known:
        pipeline = globals()[kind]()
        pipeline.set_epoch(epoch)
        _known[kind, epoch] = [digest(value) for value in pipeline]
    return _known[kind, epoch]
