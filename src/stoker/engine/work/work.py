"""A segment's operations on its inputs, in any thread or process.

An exception becomes a ``Failure`` in place of the value, and is raised when an output that needs it
is handed out.

A cache is one of the operations of the first segment. Misses (``fetcher``) go through the
operations before the cache one by one, are offered to the cache, and then go on with all. The cache
also stores that a filter dropped an example.

The time spent is added to ``ns``, which is a segment's ``counters()``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import copy_lent_parts
from stoker.basics.generators import (
    SeededGenerator,
    device_generator,
    global_generators,
    put_back,
)
from stoker.basics.signals import pass_on
from stoker.batching.user_collate import Collate, RowError
from stoker.engine.work.cached import LeftOutBefore, Miss
from stoker.engine.work.call_seeds import CallSeeds, Place
from stoker.engine.work.fetcher import Fetcher
from stoker.engine.work.segment import Segment
from stoker.engine.work.step import (
    DROP,
    REJECTED,
    SENDING,
    Failure,
    RowStep,
    WorkAddress,
    returned_nothing,
)
from stoker.engine.work.worker_status import current_worker
from stoker.errors import StageError, UnlikeError
from stoker.images.image_map import Many
from stoker.schedule import rng
from stoker.schedule.progress import progress_at
from stoker.schedule.rng import AddressedGenerator
from stoker.schedule.sharding import EpochIndices
from stoker.sources.origin import IndexedSource


class Work:
    """Executes a segment's operations in one epoch, in any thread or process.

    Args:
        segment: the segment.
        address: seed and epoch key its draws; rank and world assign places.
        source: the pipeline's source, if it is indexed.
        order: the epoch's order; None without an indexed source, and in another process or host,
            which does not need it (``for_another_process``).
        held: the generators that the user's objects hold, by caller; None to find them.

    Attributes:
        source: as above.
        index_before: returns the index of a fresh example of an earlier epoch that a pool holds, by
            its number, which is below 0; None if no pool holds any.
        fetcher: reads examples, in the first segment of an indexed source.
        stages: how many stages have a time of their own: behind these stand their counts of
            examples. ``batch_at`` and ``batched_at``: where the batch stage's are counted.
    """

    def __init__(
        self,
        segment: Segment,
        address: WorkAddress,
        source: IndexedSource | None,
        order: EpochIndices | None,
        held: Sequence[Sequence[SeededGenerator]] | None = None,
    ) -> None:
        self.segment = segment
        self.address = address
        self._held = held
        self._seeds: CallSeeds | None = None
        self.source = source
        # Only examples of the source have an index, which the order tells.
        self._order = None if segment.renumbered or segment.batches_in else order
        self.index_before: Callable[[int], int] | None = None
        self._random = AddressedGenerator()
        seed, epoch = address.seed, address.epoch
        self._operations = [_prepare(each, seed, epoch) for each in segment.operations]
        self._batch_maps = [_prepare(each, seed, epoch) for each in segment.batch_maps]
        self._first = 1 if segment.source is not None else 0
        self._cache, self._cache_at = segment.cache, segment.cache_at
        self.batch_at = self._first + len(self._operations) + (self._cache is not None)
        self._after = self.batch_at + (segment.batch is not None)
        self.stages = len(segment.names)
        self.batched_at = self.stages + self.batch_at
        cache_counter, behind = (
            self._first + segment.cache_at,
            segment.operations[segment.cache_at :],
        )
        # Image functions alone read what the cache has, before it is stacked.
        lends = segment.stacks and all(each.only_reads and each.releases_gil for each in behind)
        self.fetcher = Fetcher(source, segment.cache, segment.at, self.stages, cache_counter, lends)

    def for_thread(self) -> Work:
        """Return this for one thread, with a generator of its own."""
        twin = copy.copy(self)
        twin._random, twin._seeds = AddressedGenerator(), None
        return twin

    def for_another_process(self) -> Work:
        """Return this without the order, which may be large, or be the user's."""
        twin = copy.copy(self)
        twin._order = twin.index_before = None
        return twin

    def at(self, address: WorkAddress) -> Work:
        """Return what does the same in another epoch, in another process."""
        return Work(self.segment, address, self.source, None, self._held)

    @property
    def held(self) -> Sequence[Sequence[SeededGenerator]]:
        """The generators that the user's objects hold, by caller."""
        if self._held is None:
            self._held = self.segment.find_generators()
        return self._held

    @functools.cached_property
    def holds_generators(self) -> bool:
        """Whether the user's objects hold any."""
        return any(self.held)

    def seed_calls(self) -> None:
        """Seed generators before each call of the user's code, in a process where nobody draws."""
        if self._seeds is None:
            self._seeds = CallSeeds(self.segment, self.address, self.held, with_global=True)

    @contextlib.contextmanager
    def seeding(self, *, with_global: bool) -> Iterator[None]:
        """Seed generators before each call of the user's code meanwhile, and put them back."""
        by_id = {id(each.generator): each for held in self.held for each in held}
        generators = [*by_id.values(), *(global_generators() if with_global else ())]
        with put_back(generators):
            self._seeds = CallSeeds(self.segment, self.address, self.held, with_global=with_global)
            try:
                yield
            finally:
                self._seeds = None

    def read(self, indices: NDArray[np.int64], places: Sequence[int], ns: list[int]) -> list[Any]:
        """Return examples by index, as ``Fetcher.fetch`` does, from their places in the epoch."""
        place = self._place(0)
        if place is None:
            return self.fetcher.fetch(indices, ns)
        return self.fetcher.fetch(indices, ns, lambda row: place(places[row], 0))

    def _place(self, caller: int) -> Place | None:
        return None if self._seeds is None else self._seeds.of(caller)

    @property
    def worth_sending(self) -> bool:
        """True if another process could do any of this, and joining is not part of it."""
        if self.segment.joins_batches:
            return False
        segment = self.segment
        reads = segment.source is not None and self.fetcher.reader is None
        collates = segment.batch is not None and segment.batch.collate is not None
        return reads or collates or not segment.is_plain or bool(self._batch_maps)

    def stage_at(self, number: int) -> tuple[str, int]:
        """Return the name of a stage by its number among ``Segment.names``, and its budget."""
        at = number - self._first
        if self._cache is not None and at > self._cache_at:
            at -= 1
        operations = self.segment.operations
        account = operations[at].account if 0 <= at < len(operations) else 0
        names = self.segment.names  # a pipeline within a user's function has other stages
        return names[min(number, len(names) - 1)], account

    def places(self, rows: range) -> Sequence[int]:
        """Return the places of fresh examples by their numbers on this rank."""
        assert self._order is not None
        found = self._order.places(rows)
        return found if isinstance(found, range) else found.tolist()

    def error(
        self, stage: str, error: BaseException, place: int, batch: int | None = None
    ) -> StageError:
        """Return an error of a stage that names the input at a place."""
        if self.segment.batches_in:
            return StageError(stage, error, batch=self.address.batch_number(place))
        if self._order is None:
            return StageError(stage, error, number=place, batch=batch)
        if place >= 0:
            index = int(self._order.at(np.array([place], np.int64))[0])
        elif self.index_before is not None:
            index = self.index_before(self.address.batch_number(place))
        else:
            return StageError(stage, error, batch=batch)
        assert self.source is not None
        return StageError(stage, error, index=index, path=self.source.path(index), batch=batch)

    def failure(self, stage: str, error: BaseException, place: int, account: int = 0) -> Failure:
        """Return an error of a stage as the failure of the input at a place."""
        return Failure(self.error(stage, error, place), self.address.at, account)

    def copy_failure(self, error: Exception, place: int) -> Failure:
        """Return an error in copying a stored item for one of its uses as that use's failure."""
        return self.failure("echo (copying an item)", error, place)

    def send_failure(self, error: Exception, place: int) -> Failure:
        """Return an error in sending back a worker process's result as an example's failure."""
        return self.failure(SENDING, error, place)

    def batch_failure(self, error: Exception, number: int, places: Sequence[int] = ()) -> Failure:
        """Return an error in putting batch ``number`` together as its failure.

        ``places`` are those of its rows: a single one is to blame, else the error may name one.
        """
        assert self.segment.batch is not None
        stage = self.segment.batch.name
        row = 0 if len(places) == 1 else None
        if isinstance(error, (UnlikeError, RowError)):
            row = error.row
        if isinstance(error, RowError):
            error = error.error
        if row is not None and row < len(places):
            return Failure(self.error(stage, error, places[row], batch=number))
        return Failure(StageError(stage, error, batch=number))

    def add_index(self, failure: Failure) -> Failure:
        """Add the example's index to a failure from another process, which knew only its place."""
        error = failure.error
        if not isinstance(error, StageError) or error.number is None or self._order is None:
            return failure
        cause = error.__cause__
        assert cause is not None
        located = self.error(error.stage, cause, error.number, error.batch)
        return Failure(located, failure.part, failure.account)

    def apply(
        self,
        values: list[Any],
        places: Sequence[int],
        uses: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any] | None = None,
    ) -> None:
        """Run the maps over ``values``, in place, stage by stage.

        With ``copied`` the values belong to a pool; it copies those that maps would write to. The
        results share no memory with them. A last use gets a copy, too: while it writes, another use
        may still be reading.
        """
        behind = 0
        if copied is not None:
            originals, behind = list(values), self.segment.reading
            self._apply(slice(0, behind), values, places, uses, ns)
            if self.segment.stacks and behind == len(self._operations):
                return
            for i, value in enumerate(values):
                if type(value) is not Failure:
                    try:
                        values[i] = copy_lent_parts(value, originals[i], copied)
                    except Exception as error:
                        pass_on(error)
                        values[i] = self.copy_failure(error, places[i])
        elif self._cache is not None:
            behind = self._cache_at
            if not _UNFINISHED.isdisjoint(map(type, values)):
                for i, value in enumerate(values):
                    kind = type(value)
                    if kind is Miss:
                        values[i] = self._admit(value, places[i], ns)
                    elif kind is LeftOutBefore:
                        values[i] = REJECTED
        self._apply(slice(behind, None), values, places, uses, ns)

    def _admit(self, miss: Miss, place: int, ns: list[int]) -> Any:
        """Run the operations before the cache on an example, and offer the result to the cache."""
        assert self._cache is not None
        assert self.source is not None
        one = [miss.value]
        self._apply(slice(self._cache_at), one, [place], None, ns)
        if type(one[0]) is Failure and one[0] is not REJECTED:
            return one[0]
        start = time.perf_counter_ns()
        try:
            left_out, again = one[0] is REJECTED, functools.partial(self._again, miss, place)
            self._cache.offer(self.source, miss, one[0], left_out=left_out, again=again)
        except Exception as error:
            pass_on(error)
            # Nothing may skip it: once the cache is full, it would not even be noticed.
            return Failure(self.error(self._cache.name, error, place))
        finally:
            ns[self._first + self._cache_at] += time.perf_counter_ns() - start
        return one[0]

    def _again(self, miss: Miss, place: int) -> tuple[Any, bool]:
        """Make an example again, up to the cache; return it, and whether a filter dropped it."""
        one = [self.fetcher.read_again(miss)]
        unseeded = copy.copy(self)
        unseeded._seeds = None  # so that random examples differ
        unseeded._apply(slice(self._cache_at), one, [place], None, self.segment.counters())
        if type(one[0]) is Failure and one[0] is not REJECTED:
            raise one[0].error
        return one[0], one[0] is REJECTED

    def _apply(
        self,
        which: slice,
        values: list[Any],
        places: Sequence[int],
        uses: Sequence[int] | None,
        ns: list[int],
    ) -> None:
        draw_at = self._random.at
        on_device = self.segment.on_device
        in_batches = self.segment.batches_in
        first, shift = self._first + (which.start or 0), 0
        if self._cache is not None and (which.start or 0) >= self._cache_at:
            first, shift = first + 1, 1  # the cache's time is counted between
        status, seeds = current_worker.status, self._seeds
        for number, (stage, fn, key, many) in enumerate(self._operations[which], first):
            start = time.perf_counter_ns()
            place = None if seeds is None else seeds.of(number - shift)
            own = None if stage.part is None else stage.part.has(places)  # its part of a mixture
            passed_by = 0
            is_choosy, is_timed = own is not None or stage.repeats_only, stage.progress
            if status is not None:
                status.enter(number)
            made = None
            if many is not None and not is_choosy and len(values) > 1:
                made = self._do_many(many, key, values, places, uses)
            for i, value in enumerate(values):
                if type(value) is Failure:
                    passed_by += 1
                    continue
                if made is not None and (result := made[i]) is not None:
                    values[i] = result
                    continue
                use = uses[i] if uses is not None else 0
                if is_choosy and (
                    (own is not None and not own[i]) or (stage.repeats_only and not use)
                ):
                    passed_by += 1
                    continue
                try:
                    if place is not None:
                        place(places[i], use)
                    if is_timed:
                        at = progress_at(self.address.epoch, places[i], self.address.paces)
                        more: list[Any] = [at]
                        if key is not None:
                            more.insert(0, draw_at(key, places[i], use))
                        result = fn(value, *more)
                    elif key is None:
                        result = fn(value)
                    else:
                        generator = None
                        if on_device:
                            seed = rng.integer_at(key, places[i], use)
                            generator = device_generator(value, seed)
                        if generator is None:  # a key of JAX has no truth
                            generator = draw_at(key, places[i], use)
                        result = fn(value, generator)
                    if (result is None or result is DROP) and stage.makes_values:
                        raise returned_nothing(result, "batch" if in_batches else "example")
                    values[i] = result
                except Exception as error:
                    pass_on(error)
                    values[i] = self.failure(stage.name, error, places[i], stage.account)
            if status is not None:
                status.leave()
            ns[number] += time.perf_counter_ns() - start
            ns[self.stages + number] += len(values) - passed_by

    def _do_many(
        self, many: Many, key: Any, values: list[Any], places: Sequence[int], uses: Any
    ) -> list[Any] | None:
        """Return what becomes of values in one call; None for those that are done one by one."""
        try:
            return many(values, None if key is None else (key, rng.counters(places, uses)))
        except Exception as error:  # it is raised again for the value that it belongs to
            pass_on(error)
            return None

    def finish(self, batch: Any, number: int, ns: list[int], rows: int) -> Any:
        """Run the maps after the batching stage over a batch; may return a ``Failure``.

        Args:
            batch: the batch; ``number``: its number on this rank.
            rows: how many examples the batch has.
        """
        status = current_worker.status
        shift = int(self._cache is not None)  # it has a time of its own, and calls nothing
        for at, (stage, fn, key, _) in enumerate(self._batch_maps, self._after):
            start = time.perf_counter_ns()
            if status is not None:
                status.enter(at)
            try:
                if (seed := self._place(at - shift)) is not None:
                    seed(self.address.batch_place(number), 0)
                if key is None:
                    batch = fn(batch)
                else:
                    place = self.address.batch_place(number)
                    batch = fn(batch, self._random.at(key, place))
                if batch is None or batch is DROP:
                    raise returned_nothing(batch, "batch")
            except Exception as error:
                pass_on(error)
                return Failure(StageError(stage.name, error, batch=number))
            if status is not None:
                status.leave()
            ns[at] += time.perf_counter_ns() - start
            ns[self.stages + at] += rows
        return batch

    def seed_collate(self, number: int) -> None:
        """Seed generators for the user's ``collate`` of batch ``number``."""
        place = self._place(self._first + len(self._operations))
        if place is not None:
            place(self.address.batch_place(number), 0)

    @property
    def collate(self) -> Collate | None:
        """The user's ``collate``; None if there is none."""
        collate = None if self.segment.batch is None else self.segment.batch.collate
        is_watched = collate is not None and current_worker.status is not None
        return self._watched_collate if is_watched else collate

    def _watched_collate(self, examples: list[Any]) -> Any:
        assert self.segment.batch is not None
        assert self.segment.batch.collate is not None
        assert current_worker.status is not None
        current_worker.status.enter(self.batch_at)
        return self.segment.batch.collate(examples)


# Examples on their way to the cache, or left out there.
_UNFINISHED = frozenset({Miss, LeftOutBefore})


def _prepare(
    stage: RowStep, seed: int, epoch: int
) -> tuple[RowStep, Callable[..., Any], NDArray[np.uint64] | None, Many | None]:
    many = stage.compile_many()
    return stage, stage.compile(REJECTED), stage.key(seed, epoch), many
