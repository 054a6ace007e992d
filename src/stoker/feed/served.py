"""What a feed needs of a pipeline: a twin in shared memory, any of its outputs by number."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.buffers import Recycler
from stoker.engine.position import Position
from stoker.errors import FeedError
from stoker.pipeline import Pipeline
from stoker.sources.stream import IterableSource, LoaderSource
from stoker.stages.batch import Batch
from stoker.stages.echo import Echo
from stoker.stages.to import To


def served(pipeline: Pipeline, recycler: Recycler | None, seed: int | None) -> Pipeline:
    """Return a twin for a feed: its batches lie in the memory of ``recycler``.

    Args:
        pipeline: what is to be served.
        recycler: its memory outlasts epochs.
        seed: of the feed that it goes on for, None if it is the first.

    Raises FeedError when its outputs cannot be handed to other processes, cannot be made again by
    number though they should be, or when it has another seed.
    """
    if pipeline._follows() is not None:
        raise FeedError(
            "an adaptive echo decides by what is ready, and a feed must be able to make its "
            'batches again: put .echo("auto") behind stoker.from_feed(), in each job, or take a '
            "fixed factor"
        )
    if pipeline._has(To):
        raise FeedError(
            "a feed hands out batches in the host's memory: put .to(device) behind "
            "stoker.from_feed(), in each job"
        )
    if seed is not None and pipeline._given_seed not in (None, seed):
        raise FeedError(f"the pipeline has seed {pipeline._given_seed} now, and had seed {seed}")
    twin = pipeline._with()
    twin._recycler = recycler
    if seed is not None:
        twin._reset(seed)
    return twin


@dataclass(frozen=True)
class Served:
    """What jobs are told of a pipeline that they are served from.

    Attributes:
        batched: whether its outputs are batches.
        length: outputs of an epoch, where that is known.
        again: whether any output can be made again by epoch and number.
        outline: what must be alike for its outputs to be alike, as in states.
    """

    batched: bool
    length: int | None
    again: bool
    outline: list[str]


def described(pipeline: Pipeline) -> Served:
    """Return what jobs are told of a pipeline."""
    loader = isinstance(pipeline._source, LoaderSource)
    try:
        length: int | None = len(pipeline)
    except TypeError:
        length = None
    again = not isinstance(pipeline._source, (LoaderSource, IterableSource))
    return Served(loader or pipeline._has(Batch), length, again, pipeline._outline())


def beginning(pipeline: Pipeline, epoch: int, number: int) -> int:
    """Have the next ``iter()`` begin at an output of an epoch, or as near before it as it can.

    Returns how many outputs come before it: those of which only what came before can tell.
    """
    position = None
    missed = number
    echoes = any(isinstance(stage, Echo) for stage in pipeline._stages)
    if number and described(pipeline).again and not pipeline._sifts() and not echoes:
        batch = next((stage.n for stage in pipeline._stages if isinstance(stage, Batch)), 1)
        examples = min(number * batch, pipeline._examples())
        position, missed = Position(number, examples, fresh=examples), 0
    pipeline._cursor.go_to(epoch, position)
    return missed
