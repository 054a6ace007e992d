"""Preparation: the feeder's process runs the pipeline, and can prepare any output again."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.future import start_thread
from stoker.chain.chain import Chain
from stoker.chain.cursor import Cursor
from stoker.chain.seek import seek
from stoker.engine.segments.own_thread import take_turns
from stoker.errors import FeedError
from stoker.feeds import messages
from stoker.feeds.feeder.log import (
    CHUNK_EXAMPLES,
    EpochEnd,
    FeedPosition,
    PipelineFailed,
    StagedItem,
)
from stoker.feeds.shared_memory import Blocks, to_payload

# Examples are sent together, up to this many bytes: about 28 crops of 224 x 224. Chosen, not
# measured.
_CHUNK_BYTES = 1 << 22
# Free arrays of shared memory that are kept: as many as the staging area holds (``CHUNKS``). Making
# shared memory costs more than keeping it.
_MAX_SPARE = 64

Event = StagedItem | EpochEnd | PipelineFailed


@dataclass(frozen=True)
class FeedSpec:
    """The description of a feed's outputs; its fields are those of ``messages.Welcome``."""

    batched: bool
    length: int | None
    is_repeatable: bool
    signature: list[str]


def reseeded(chain: Chain, seed: int) -> Chain:
    """Return the chain with another seed. Raises FeedError if the user set the seed."""
    if not chain.is_seed_drawn and chain.seed != seed:
        raise FeedError(
            f"the pipeline now has seed {chain.seed}, but the earlier feeder had seed {seed}: "
            "restart the jobs"
        )
    return chain.with_seed(seed)


class Producer:
    """Prepares outputs in order, from any position on, by a copy of the pipeline.

    Its batches lie in shared blocks. Its thread calls ``report`` with each new output. Nothing
    comes after ``PipelineFailed``.
    """

    def __init__(self, chain: Chain, blocks: Blocks, report: Callable[[Event], None]) -> None:
        self._blocks, self._report = blocks, report
        self._recycler = Recycler(_MAX_SPARE, blocks.allocate)
        self._cursor = Cursor(chain.apart(), self._recycler)
        self._outputs: Any = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._start: FeedPosition | None = None
        self._allowed = self._produced = 0
        self._closed = False
        self._thread = start_thread("stoker-feed", self._run)

    def begin(self, position: FeedPosition) -> None:
        """Continue at this position, once the epoch before has ended."""
        with self._lock:
            self._start = position
            self._changed.notify()

    def allow(self, items: int) -> None:
        """Set how many items may be prepared in all, counted from the first."""
        with self._lock:
            if self._allowed != items:
                self._allowed = items
                self._changed.notify()

    def close(self) -> None:
        """Stop; returns at once."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until its thread and all workers have ended; True if they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        take_turns()  # with other branches, which call the same objects
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._start is not None)
                    position, self._start = self._start, None
                if self._closed or position is None:
                    return
                self._produce_epoch(position)
        except FeedError as error:
            self._report(PipelineFailed(messages.clip_text(str(error))))
        except BaseException as error:
            self._report(PipelineFailed(messages.clip_text(f"{type(error).__name__}: {error}")))
        finally:
            with contextlib.suppress(Exception):  # the error was raised before
                self._end_epoch()
            self._recycler.clear()

    def _produce_epoch(self, position: FeedPosition) -> None:
        self._go_to(position)
        epoch, number = position
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._produced < self._allowed)
                if self._closed:
                    return
            made = self._next_batch() if self._cursor.chain.is_batched else self._next_chunk()
            if made is None:
                break
            value, count, rows = made
            self._produced += 1
            self._report(StagedItem(epoch, number, count, rows, to_payload(value, self._blocks)))
            number += count
        self._end_epoch()
        self._report(EpochEnd(epoch, number))

    def _go_to(self, position: FeedPosition) -> None:
        """Raises FeedError if the source has another length by now."""
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

    def _end_epoch(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def _next_batch(self) -> tuple[Any, int, int] | None:
        """Return a value, how many outputs it holds, and how many examples; None at the end."""
        batch = next(self._outputs, self)
        return None if batch is self else (batch, 1, pytree.batch_rows(batch))

    def _next_chunk(self) -> tuple[Any, int, int] | None:
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
        return (examples, len(examples), len(examples)) if examples else None


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
