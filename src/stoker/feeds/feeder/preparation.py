"""Preparation: the feeder's process runs the pipeline, and can prepare any output again."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.seek import seek
from stoker.errors import FeedError
from stoker.feeds.feeder.log import FeedPosition
from stoker.feeds.feeder.memory_budget import CHUNK_EXAMPLES
from stoker.feeds.shared_memory import Blocks

# Examples are sent together, up to this many bytes: about 28 crops of 224 x 224. Chosen, not
# measured.
_CHUNK_BYTES = 1 << 22
# Free arrays of shared memory that are kept: as many as the staging area holds (``CHUNKS``). Making
# shared memory costs more than keeping it.
_MAX_SPARE = 64


@dataclass(frozen=True)
class FeedSpec:
    """The description of a feed's outputs; its fields are those of ``messages.Welcome``."""

    batched: bool
    length: int | None
    is_repeatable: bool
    signature: list[str]


@dataclass(frozen=True)
class Output:
    """A value that holds ``count`` outputs with ``rows`` examples."""

    value: Any
    count: int
    rows: int


def reseeded(chain: Chain, seed: int) -> Chain:
    """Return the chain with another seed. Raises FeedError if the user set the seed."""
    if not chain.is_seed_drawn and chain.seed != seed:
        raise FeedError(
            f"the pipeline now has seed {chain.seed}, but the earlier feeder had seed {seed}: "
            "restart the jobs"
        )
    return chain.with_seed(seed)


class PipelineOutputs:
    """Iterates over a copy of the pipeline, whose batches lie in shared blocks."""

    def __init__(self, chain: Chain, blocks: Blocks) -> None:
        self._recycler = Recycler(_MAX_SPARE, blocks.allocate)
        self._cursor = Cursor(chain.apart(), self._recycler)
        self._outputs: Any = None
        self._failure: Exception | None = None

    def begin(self, position: FeedPosition) -> None:
        """Go to a position. Raises FeedError if the source has another length by now."""
        self._end_epoch()
        epoch, number = position
        if self._cursor.next_chain is not self._cursor.chain:
            raise FeedError(
                f"{self._cursor.chain.source.name} has another length than when the feed began, "
                "and its jobs rely on that length. Restart the feed and its jobs"
            )
        start, skip_count = seek(self._cursor.chain, epoch, number)
        self._cursor.go_to(epoch, start)
        self._outputs = self._cursor.begin()
        if skip_count:  # behind filters and echoes, the next output follows only from these
            next(itertools.islice(self._outputs, skip_count, skip_count), None)

    def next(self) -> Output | None:
        """Return the next output; None at the end of the epoch. Raises the pipeline's errors."""
        output = self._next_batch() if self._cursor.chain.is_batched else self._next_chunk()
        if output is None:
            self._end_epoch()
        return output

    def close(self) -> None:
        """End the iteration, and free all resources."""
        with contextlib.suppress(Exception):  # the error was raised before
            self._end_epoch()
        self._recycler.clear()

    def _end_epoch(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def _next_batch(self) -> Output | None:
        batch = next(self._outputs, self)
        return None if batch is self else Output(batch, 1, pytree.batch_rows(batch))

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
                self._failure = error  # raised next time, after the examples before it
                break
            if example is self:
                break
            examples.append(example)
            size += pytree.nbytes(example)
        return Output(examples, len(examples), len(examples)) if examples else None


def check_servable(chain: Chain) -> None:
    """Raise FeedError if a chain's outputs cannot be sent to jobs, or prepared again by number."""
    if chain.seed >= 1 << 64:
        raise FeedError(f"a feed's seed must be below 2**64, not {chain.seed}")
    if chain.follows_clock:
        raise FeedError(
            'a feed cannot serve .echo("auto"): its choices depend on the clock, but a feed must '
            "be able to prepare batches again. Put it behind stoker.from_feed() in each job, or "
            "use a fixed factor"
        )
    if chain.late is not None:
        raise FeedError(
            "a feed cannot serve .late(): what is late depends on the clock, but a feed "
            "must be able to prepare batches again. Take .batch(n)"
        )
    if chain.flows:
        raise FeedError(
            "a feed cannot serve .repeat(): its epochs are passes over the data. Put .repeat() "
            "behind stoker.from_feed() in each job"
        )
    if chain.selection.share is not None and chain.selection.share.padding is not None:
        raise FeedError(
            "a feed cannot serve .shard(remainder='pad'): padding is for ranks, but each job of a "
            "feed gets all outputs. Evaluate without a feed"
        )
    if any(stage.traits.moves for stage in chain.stages):
        raise FeedError(
            "a feed cannot serve .to_torch(device): its batches are in the host's memory. Put "
            ".to_torch(device) behind stoker.from_feed() in each job"
        )


def describe(chain: Chain) -> FeedSpec:
    try:
        # Of planned batches, epochs have different numbers.
        length = None if chain.plans_batches and not chain.flows else chain.count(0)
    except TypeError:
        length = None
    return FeedSpec(chain.is_batched, length, chain.source.is_indexed, chain.signature())
