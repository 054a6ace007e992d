"""Local preparation: the feeder runs the pipeline itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.seek import nearest
from stoker.engine.heads import batch_rows
from stoker.errors import FeedError
from stoker.feed.feeder.log import At
from stoker.feed.feeder.memory_budget import CHUNK_EXAMPLES
from stoker.feed.feeder.preparation import Output, Served
from stoker.pipeline import Pipeline
from stoker.transport.shared_memory import Blocks

# Examples are handed over together, up to so many bytes: some 28 crops of 224 x 224.
_CHUNK_BYTES = 1 << 22
# Making shared memory anew costs more than keeping the peak's: as many pieces as the staging area's
# ``CHUNKS``.
_SPARE = 64


class LocalPreparation:
    """A pipeline as a feed serves it: any of its outputs by number.

    Raises FeedError when other processes cannot receive its outputs, or when an output that should
    be reproducible by its number is not.
    """

    start = 0, 0

    def __init__(self, pipeline: Pipeline[Any]) -> None:
        self._chain = _checked(pipeline.chain)
        self.about = _about(self._chain)

    @property
    def seed(self) -> int:
        return self._chain.seed

    def with_seed(self, seed: int) -> LocalPreparation:
        """Return this with another seed; FeedError if the pipeline sets its own seed."""
        if not self._chain.is_seed_drawn and self.seed != seed:
            raise FeedError(f"the pipeline has seed {self.seed} now, and had seed {seed}")
        return LocalPreparation(Pipeline(self._chain.with_seed(seed)))

    def outputs(self, blocks: Blocks) -> PipelineOutputs:
        return PipelineOutputs(self._chain, blocks)

    def watch(self, lost: Callable[[], None]) -> None:
        """Do nothing: the pipeline lives in this process."""

    def close(self) -> None:
        """Do nothing: ``watch`` started nothing."""

    def __str__(self) -> str:
        return f"<stoker.Pipeline {self._chain}>"


class PipelineOutputs:
    """Iterates a copy of the pipeline, whose recycler takes memory from shared blocks."""

    def __init__(self, chain: Chain, blocks: Blocks) -> None:
        self._recycler = Recycler(_SPARE, blocks.allocate)
        self._cursor = Cursor(chain.apart(), self._recycler)
        self._outputs: Any = None
        self._failure: Exception | None = None

    def begin(self, at: At | None) -> At:
        self._end_epoch()
        epoch, number = at or (0, 0)
        if self._cursor.coming is not self._cursor.chain:
            raise FeedError(
                f"{self._cursor.chain.source.name} has another length than when the feed began: "
                "its jobs count on that one. Start the feed anew"
            )
        missed = go_near(self._cursor, epoch, number)
        self._outputs = self._cursor.begin()
        if missed:  # they are made again to get at what follows them
            next(itertools.islice(self._outputs, missed, missed), None)
        return epoch, number

    def next(self) -> Output | None:
        made = self._next_batch() if self._cursor.chain.is_batched else self._next_chunk()
        if made is None:
            self._end_epoch()
        return made

    def interrupt(self) -> None:
        """The pipeline's own functions cannot be interrupted."""

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it has failed before
            self._end_epoch()
        self._recycler.clear()

    def _end_epoch(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def _next_batch(self) -> Output | None:
        batch = next(self._outputs, self)
        return None if batch is self else Output(batch, 1, batch_rows(batch))

    def _next_chunk(self) -> Output | None:
        if self._failure is not None:
            raise self._failure
        examples: list[Any] = []
        size = 0
        while size < _CHUNK_BYTES and len(examples) < CHUNK_EXAMPLES:
            try:
                example = next(self._outputs, self)
            except Exception as error:
                if not examples:
                    raise
                self._failure = error  # behind what came before it
                break
            if example is self:
                break
            examples.append(example)
            size += pytree.nbytes(example)
        return Output(examples, len(examples), len(examples)) if examples else None


def _checked(chain: Chain) -> Chain:
    if chain.seed >= 1 << 64:
        raise FeedError(f"a feed's seed is below 2**64, not {chain.seed}")
    if chain.follows_clock:
        raise FeedError(
            "an adaptive echo decides by what is ready, and a feed must be able to make its "
            'batches again: put .echo("auto") behind stoker.from_feed(), in each job, or take a '
            "fixed factor"
        )
    if chain.flows:
        raise FeedError(
            "the epochs of a feed are passes over the data: put .repeat() behind "
            "stoker.from_feed(), in each job"
        )
    if chain.selection.share is not None and chain.selection.share.padded is not None:
        raise FeedError(
            "a feed hands all that it serves to each of its jobs, and padding is of ranks: leave "
            ".shard(pad=True) out of it, and evaluate without a feed"
        )
    if chain.is_on_device:
        raise FeedError(
            "a feed hands out batches in the host's memory: put .to(device) behind "
            "stoker.from_feed(), in each job"
        )
    return chain


def _about(chain: Chain) -> Served:
    try:
        length: int | None = chain.count()
    except TypeError:
        length = None
    return Served(chain.is_batched, length, chain.source.is_indexed, chain.outline())


def go_near(cursor: Cursor, epoch: int, number: int) -> int:
    """Have the next ``begin()`` start at an output of an epoch, or as near before it as it can.

    Returns how many outputs to prepare and drop before it: their number follows only from earlier
    outputs.
    """
    position, missed = nearest(cursor.chain, number)
    cursor.go_to(epoch, position)
    return missed
