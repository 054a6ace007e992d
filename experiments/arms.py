"""What is compared: the pipelines of the arms."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import stoker
from experiments.images import ImageSet
from experiments.storage import Source
from experiments.workloads import augment, augment_one
from stoker.echoing.stage import DEFAULT_MAX_FACTOR


@dataclass(frozen=True)
class Arm:
    """One way of feeding the same training."""

    place: str
    """Where the echo stands: "before" or "after" augmentation; "batch", of whole batches. "none":
    no echo; "memory": no storage either."""
    factor: int | Literal["auto"] = 1
    """Uses of each fresh example; "auto": as the stall asks for."""
    slowness: float = 4.0
    """R that storage is set for: the time of a fresh batch over that of a training step."""

    @property
    def key(self) -> str:
        """A short name for files."""
        name = f"{self.place}-{self.factor}" if self.echoes else self.place
        return name if self.slowness == 4.0 else f"{name}-R{self.slowness:g}"

    @property
    def label(self) -> str:
        """A name for people; that R is not 4 is not part of it."""
        if self.place == "none":
            return "no echoing"
        if self.place == "memory":
            return "in memory (bound)"
        where = {
            "batch": "batch echoing",
            "before": "before augmentation",
            "after": "after augmentation",
        }[self.place]
        return f"{where}, auto" if self.follows else f"{where}, e = {self.factor}"

    @property
    def echoes(self) -> bool:
        """Whether anything is used more than once."""
        return self.factor != 1

    @property
    def follows(self) -> bool:
        """Whether the factor follows the stall."""
        return self.factor == "auto"

    @property
    def is_compared(self) -> bool:
        """Whether it is one of the two arms that the claim compares."""
        return self.place == "none" or (self.place == FOLLOWING.place and self.follows)

    @property
    def most_uses(self) -> int:
        """Uses of a fresh example, at most: where the factor follows, 4 in every place."""
        return DEFAULT_MAX_FACTOR if self.factor == "auto" else self.factor


FOLLOWING = Arm("before", "auto")
"""The arm whose factor nobody chose. The claim holds it to training without echoing."""


def default_arms() -> list[Arm]:
    """Return what is compared unless more is asked for; the first is what others are held to."""
    return [
        Arm("none"),
        FOLLOWING,
        Arm("batch", 4),
        Arm("before", 4),
        Arm("memory"),
    ]


def full_arms() -> list[Arm]:
    """Return all arms, those with R = 1 last."""
    return [
        Arm("none"),
        FOLLOWING,
        Arm("batch", 2),
        Arm("batch", 4),
        Arm("after", 2),
        Arm("after", 4),
        Arm("before", 2),
        Arm("before", 4),
        Arm("before", 8),
        Arm("memory"),
        Arm("none", slowness=1.0),
        Arm("before", 4, slowness=1.0),
        Arm("before", "auto", slowness=1.0),
    ]


def pipeline_of(
    arm: Arm,
    source: Source,
    images: ImageSet,
    *,
    batch_size: int,
    pool_examples: int,
    seed: int,
) -> stoker.Pipeline:
    """Build the arm's pipeline: batches (uint8 [n, height, width, 3], int64 [n])."""
    pool = max(1, pool_examples // batch_size)  # batches

    def echo(p: stoker.Pipeline, items: int) -> stoker.Pipeline:
        most = arm.most_uses if arm.follows else None
        return p.echo(arm.factor, max_factor=most, pool=items)

    p = source(seed).shuffle()
    if arm.place != "memory":
        p = p.map(images.decode, on="image")
    if arm.place == "before":
        p = echo(p, pool * batch_size)
    if arm.place == "after":
        p = echo(p.random_map(augment_one, on="image"), pool * batch_size)
        return p.batch(batch_size, drop_last=True)
    p = p.batch(batch_size, drop_last=True).random_map(augment, on="image")
    return echo(p, pool) if arm.place == "batch" else p


def epoch_after_epoch(pipeline: stoker.Pipeline) -> Generator[Any, None, None]:
    """Yield the batches of a pipeline without end; closing the generator closes its iterator."""
    while True:
        with closing(iter(pipeline)) as batches:
            yield from batches


def upstream_of(source: Source, images: ImageSet, *, batch_size: int, seed: int) -> stoker.Pipeline:
    """Build what is above an echo before augmentation: reading and decoding, in batches."""
    p = source(seed).shuffle().map(images.decode, on="image")
    return p.batch(batch_size, drop_last=True)
