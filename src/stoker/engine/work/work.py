"""A segment's operations on its inputs, in any thread or process.

An exception becomes a ``Failure`` in place of the value, and is raised when an output that needs it
is handed out. The first calls of a random map are watched for draws from global generators. The
result goes into the tally, and the consumer warns.

A cache is one of the operations of the first segment. Misses (``fetcher``) go through the
operations before the cache one by one, which times them, are offered to the cache, and then go on
with all. The cache also stores that a filter dropped an example.

The time spent is added to ``ns``, which is a segment's ``counters()``.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.buffers import copy_lent_parts
from stoker.basics.signals import pass_on
from stoker.engine.plan.address import WorkAddress
from stoker.engine.plan.segment import Segment
from stoker.engine.work.failure import REJECTED, Failure
from stoker.engine.work.fetcher import Fetcher
from stoker.engine.work.generators import UndeclaredRng, device_generator
from stoker.engine.work.inputs import InputAddresses
from stoker.engine.work.spot import HERE
from stoker.engine.work.user_calls import FREELY, Call, Copies, Retry, lock_of
from stoker.errors import StageError
from stoker.images.image_map import Many
from stoker.replicas.user_lock import USER_LOCK
from stoker.schedule import rng
from stoker.schedule.dealing import RankOrder
from stoker.schedule.epoch_time import EpochTime, time_at
from stoker.schedule.rng import Rekeyed
from stoker.sources.origin import IndexedSource
from stoker.stages.batching.user_collate import Collate
from stoker.stages.cache import Halfway, LeftOutBefore, Miss
from stoker.stages.functions.operation import Operation
from stoker.stages.map import returned_nothing


class Work:
    """Executes a segment's operations in one epoch, in any thread or process.

    Args:
        segment: the segment.
        address: seed and epoch key its draws; rank and world assign places.
        source: the pipeline's source, if it is indexed.
        order: the epoch's order; None without an indexed source, and in another process or host,
            which does not need it (``for_another_process``).
        misdrawn: collects random maps that draw from global generators.

    Attributes:
        inputs: where its inputs are.
        fetcher: reads examples, in the first segment of an indexed source.
        retry: repeats the calls that a thread's copies of the user's objects failed on.
        legacy_key: keys the seeds of the global generators.
        stages: how many stages have a time of their own: behind these stand their counts of
            examples. ``batch_at`` and ``batched_at``: where the batch stage's are counted.
    """

    def __init__(
        self,
        segment: Segment,
        address: WorkAddress,
        source: IndexedSource | None,
        order: RankOrder | None,
        *,
        misdrawn: list[UndeclaredRng],
    ) -> None:
        self.segment = segment
        self.address = address
        self.misdrawn = misdrawn
        self._source = source
        if segment.renumbered or segment.batches_in:
            order = None
        self.inputs = InputAddresses(address, source, order, are_batches=segment.batches_in)
        self.legacy_key = rng.key(address.seed, address.epoch, rng.LEGACY)
        self._random = Rekeyed()
        self.retry: Retry[Work] = Retry()
        self._call(segment, [FREELY] * len(segment.callers))
        self._first = 1 if segment.source is not None else 0
        self._cache, self._cache_at = segment.cache, segment.cache_at
        self.batch_at = self._first + len(self._operations) + (self._cache is not None)
        self._after = self.batch_at + (segment.batch is not None)
        self.stages = len(segment.names)
        self.batched_at = self.stages + self.batch_at
        self.fetcher = Fetcher(
            source,
            segment.cache,
            segment.at,
            self.stages,
            self._first + segment.cache_at,
            segment.reads_what_is_cached,
        )

    def _call(self, segment: Segment, calls: Sequence[Call]) -> None:
        """Prepare the calls of a segment's user objects, one ``Call`` for each caller."""
        seed, epoch = self.address.seed, self.address.epoch
        rest = iter(calls)
        self._reading = FREELY if segment.source is None else next(rest)
        self._operations = [_prepare(each, seed, epoch, next(rest)) for each in segment.operations]
        self._collating = FREELY if segment.batch is None else next(rest)
        self._collate = None if segment.batch is None else segment.batch.collate
        self._batch_maps = [_prepare(each, seed, epoch, next(rest)) for each in segment.batch_maps]

    def with_calls(
        self,
        segment: Segment,
        source: IndexedSource | None,
        calls: Sequence[Call] | None = None,
        copies: Copies[Work] | None = None,
    ) -> Work:
        """Return the same work with other user objects.

        Args:
            segment: the segment with them.
            source: the pipeline's source with them.
            calls: the way of calling each caller's objects; None: without a lock.
            copies: the copies' owner, which a failed call asks for newer ones.
        """
        own = copy.copy(self)
        own.retry, own._random = Retry(self, copies), Rekeyed()
        own._source = source
        own.inputs = self.inputs.with_source(source)
        own._call(segment, calls or [FREELY] * len(segment.callers))
        own.fetcher = self.fetcher.with_calls(source, own._reading, own.retry)
        return own

    def for_another_process(self) -> Work:
        """Return this without the order, which may be large, or be the user's."""
        twin = copy.copy(self)
        twin.inputs = self.inputs.without_order()
        return twin

    def at(self, address: WorkAddress) -> Work:
        """Return what does the same in another epoch, in another process."""
        return Work(self.segment, address, self._source, None, misdrawn=[])

    @property
    def worth_sending(self) -> bool:
        """True if another process could do any of this, and joining is not part of it."""
        if self.segment.joins_batches:
            return False
        reads = self.segment.source is not None and self.fetcher.reader is None
        return reads or not self.segment.is_plain or bool(self._batch_maps)

    def stage_at(self, number: int) -> tuple[str, int]:
        """Return the name of a stage by its number among ``Segment.names``, and its skip budget."""
        at = number - self._first
        if self._cache is not None and at > self._cache_at:
            at -= 1
        operations = self.segment.operations
        account = operations[at].account if 0 <= at < len(operations) else 0
        names = self.segment.names  # a pipeline within a user's function has other stages
        return names[min(number, len(names) - 1)], account

    def batch_failure(self, error: Exception, number: int, places: Sequence[int] = ()) -> Failure:
        """Return an error in putting batch ``number`` together, of examples at these places."""
        assert self.segment.batch is not None
        return self.inputs.batch_failure(self.segment.batch.name, error, number, places)

    def apply(
        self,
        values: list[Any],
        places: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any] | None = None,
    ) -> None:
        """Run the maps over ``values``, in place, stage by stage.

        With ``copied`` the values belong to a pool; it copies those that maps would write to.
        """
        if copied is not None:
            return self._apply_to_lent(values, places, use_keys, ns, copied)
        behind = 0
        if self._cache is not None:
            behind = self._cache_at
            if not _UNFINISHED.isdisjoint(map(type, values)):
                for i, value in enumerate(values):
                    kind = type(value)
                    if kind is Miss:
                        values[i] = self._admit(value, places[i], ns)
                    elif kind is LeftOutBefore:
                        values[i] = REJECTED
                if Halfway in map(type, values):
                    self._go_on(values, places, ns)
        self._apply(slice(behind, None), values, places, use_keys, ns)

    def _apply_to_lent(
        self,
        values: list[Any],
        places: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any],
    ) -> None:
        """Run the maps over values that belong to a pool; the results share no memory with them.

        A last use gets a copy, too: while it writes, another use may still be reading.
        """
        originals, reading = list(values), self.segment.reading
        self._apply(slice(0, reading), values, places, use_keys, ns)
        if self.segment.stacks and reading == len(self._operations):
            return
        for i, value in enumerate(values):
            if type(value) is not Failure:
                try:
                    values[i] = copy_lent_parts(value, originals[i], copied)
                except Exception as error:
                    pass_on(error)
                    values[i] = self.inputs.copy_failure(error, places[i])
        self._apply(slice(reading, None), values, places, use_keys, ns)

    def _go_on(self, values: list[Any], places: Sequence[int], ns: list[int]) -> None:
        """Take what was found at earlier places through the operations before the last one."""
        for number, at in enumerate(self.segment.cache_ats):
            some = [
                i for i, each in enumerate(values) if type(each) is Halfway and each.place == number
            ]
            if some:
                found = [values[i].value for i in some]
                which = slice(at, self._cache_at)
                self._apply(which, found, [places[i] for i in some], None, ns)
                for i, value in zip(some, found, strict=True):
                    values[i] = value

    def _admit(self, miss: Miss, place: int, ns: list[int]) -> Any:
        """Run the operations before the cache on an example, and offer the result to the cache."""
        assert self._cache is not None
        one, at, spent_ns = [miss.value], 0, 0
        error: Exception | None = None
        for number, stop in enumerate(self.segment.cache_ats):
            start = time.perf_counter_ns()
            self._apply(slice(at, stop), one, [place], None, ns)
            began, at = time.perf_counter_ns(), stop
            miss.cost_ns += began - start
            try:
                if type(one[0]) is Failure and one[0] is not REJECTED:
                    break
                if stop == self._cache_at:
                    self.fetcher.offer(miss, one[0], lambda: self._again(miss, place))
                elif one[0] is not REJECTED:
                    self._cache.keep_form(miss, number, one[0])
            except Exception as caught:
                pass_on(caught)
                error = error or caught
            spent_ns += time.perf_counter_ns() - began
        ns[self._first + self._cache_at] += spent_ns
        if error is not None:
            # Nothing may skip it: once the cache is full, it would not even be noticed.
            return Failure(self.inputs.error(self._cache.name, error, place))
        return one[0]

    def _again(self, miss: Miss, place: int) -> tuple[Any, bool]:
        """Make an example again, up to the cache; return it, and whether a filter dropped it."""
        one = [self.fetcher.read_again(miss)]
        self._apply(slice(self._cache_at), one, [place], None, self.segment.counters())
        if type(one[0]) is Failure and one[0] is not REJECTED:
            raise one[0].error
        return one[0], one[0] is REJECTED

    def _apply(
        self,
        which: slice,
        values: list[Any],
        places: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
    ) -> None:
        draw_at = self._random.at
        on_device = device_generator if self.segment.on_device else None
        in_batches = self.segment.batches_in
        first = self._first + (which.start or 0)
        if self._cache is not None and (which.start or 0) >= self._cache_at:
            first += 1  # the cache's time is counted between
        spot = HERE.spot
        for number, (stage, compiled, key, call, many) in enumerate(self._operations[which], first):
            start = time.perf_counter_ns()
            fn = stage.watch(compiled, self._tell)
            others = self._others(stage, places)
            passed_by = 0
            can_reread = self._can_reread
            input_copies = None
            if call is not FREELY and not can_reread:
                input_copies = self.retry.keep_inputs(values, call)
            can_redo = bool(call.copies) and (can_reread or input_copies is not None)
            is_choosy, is_timed = others is not None or stage.repeats_only, stage.clock
            is_locked = call is not FREELY and call.is_locked
            if is_locked:
                USER_LOCK.acquire()  # by a worker, which no Ctrl-C interrupts: ``with`` costs more
            if spot is not None:
                spot.enter(number)
            try:
                spent = self.retry.failure if can_redo else None
                made = None
                if many is not None and fn is compiled and not is_choosy and len(values) > 1:
                    made = self._do_many(many, key, values, places, use_keys)
                for i, value in enumerate(values):
                    if type(value) is Failure:
                        passed_by += 1
                        continue
                    if made is not None and (result := made[i]) is not None:
                        values[i] = result
                        continue
                    use_key = use_keys[i] if use_keys is not None else 0
                    if is_choosy and (
                        (others is not None and others[i]) or (stage.repeats_only and not use_key)
                    ):
                        passed_by += 1
                        continue
                    failure = spent
                    if failure is None:
                        try:
                            if is_timed:
                                more: list[Any] = [self._time_at(places[i])]
                                if key is not None:
                                    more.insert(0, draw_at(key, places[i], use_key))
                                result = fn(value, *more)
                            elif key is None:
                                result = fn(value)
                            else:
                                generator = on_device and on_device(key, places[i], use_key, value)
                                if generator is None:  # a key of JAX has no truth
                                    generator = draw_at(key, places[i], use_key)
                                result = fn(value, generator)
                            if result is None and stage.makes_values:
                                raise returned_nothing("batch" if in_batches else "example")
                            values[i] = result
                            continue
                        except Exception as error:
                            pass_on(error)
                            failure = self.inputs.failure(
                                stage.name, error, places[i], stage.account
                            )
                    values[i] = failure
                    if call.copies:
                        at = number - first + (which.start or 0)
                        kept_input = None if input_copies is None else input_copies[i : i + 1]
                        values[i] = self._remake(failure, call, at, places[i], use_key, kept_input)
                        spent = self.retry.failure if can_redo else None
            finally:
                if is_locked:
                    USER_LOCK.release()
            if spot is not None:
                spot.leave()
            ns[number] += time.perf_counter_ns() - start
            ns[self.stages + number] += len(values) - passed_by

    def _do_many(
        self, many: Many, key: Any, values: list[Any], places: Sequence[int], use_keys: Any
    ) -> list[Any] | None:
        """Return what becomes of values in one call; None for those that are done one by one."""
        try:
            return many(values, None if key is None else (key, rng.counters(places, use_keys)))
        except Exception as error:  # it is raised again for the value that it belongs to
            pass_on(error)
            return None

    def _remake(
        self,
        failure: Failure,
        call: Call,
        at: int,
        place: int,
        use_key: int,
        input_copies: list[Any] | None,
    ) -> Any:
        """Return an original's result for an input of operation ``at``, on which a copy failed.

        The copy may have changed the input, so it is made again, or a kept copy of it is used.
        """
        if not self._can_reread and input_copies is None:
            return failure

        def do(work: Work) -> Any:
            one, start = input_copies, at
            if one is None:
                one, start = [work.fetcher.read_one(self.inputs.index_at(place))], 0
            ns = self.segment.counters()
            work._apply(slice(start, at + 1), one, [place], [use_key], ns)
            return one[0]

        return self.retry.call(failure, call, do)

    def _time_at(self, place: int) -> EpochTime:
        return time_at(self.address.epoch, place, self.address.paces)

    @property
    def _can_reread(self) -> bool:
        """True if inputs can be read again, by their places."""
        return self.segment.source is not None and self.inputs.has_order

    def _others(self, stage: Operation, places: Sequence[int]) -> list[bool] | None:
        """Mark the examples of other parts of a mixture; None if all are the stage's."""
        if stage.part is None:
            return None
        return [not is_own for is_own in stage.part.has(places)]

    def finish(
        self, batch: Any, number: int, use_key: int, ns: list[int], rows: int, first: int = 0
    ) -> Any:
        """Run the maps after the batching stage over a batch; may return a ``Failure``.

        Args:
            batch: the batch; ``number``: its number on this rank.
            rows: how many examples the batch has.
            first: the number of the first map to run.
        """
        maps = self._batch_maps[first:] if first else self._batch_maps
        spot = HERE.spot
        for at, (stage, fn, key, call, _) in enumerate(maps, self._after + first):
            start = time.perf_counter_ns()
            fn = stage.watch(fn, self._tell)
            input_copies = None if call is FREELY else self.retry.keep_inputs([batch], call)
            is_locked = call is not FREELY and call.is_locked
            if is_locked:
                USER_LOCK.acquire()  # by a worker, as in ``_apply``
            if spot is not None:
                spot.enter(at)
            try:
                if key is None:
                    batch = fn(batch)
                else:
                    place = self.inputs.batch_place(number)
                    batch = fn(batch, self._random.at(key, place, use_key))
                if batch is None:
                    raise returned_nothing("batch")
            except Exception as error:
                pass_on(error)
                failure = Failure(StageError(stage.name, error, batch=number))
                if input_copies is None:
                    return failure
                again = functools.partial(
                    Work.finish,
                    batch=input_copies[0],
                    number=number,
                    use_key=use_key,
                    ns=ns,
                    rows=rows,
                    first=at - self._after,
                )
                return self.retry.call(failure, call, again)
            finally:
                if is_locked:
                    USER_LOCK.release()
            if spot is not None:
                spot.leave()
            ns[at] += time.perf_counter_ns() - start
            ns[self.stages + at] += rows
        return batch

    @property
    def collate(self) -> Collate | None:
        """The user's ``collate``, with the lock if it needs one; None if there is none."""
        is_free = self._collating is FREELY
        return self._collate if self._collate is None or is_free else self._call_collate

    def _call_collate(self, examples: list[Any]) -> Any:
        call, collate = self._collating, self._collate
        assert collate is not None
        input_copies = self.retry.keep_inputs(examples, call)
        try:
            with lock_of(call):
                if HERE.spot is not None:
                    HERE.spot.enter(self.batch_at)
                return collate(examples)
        except Exception as error:
            pass_on(error)
            if input_copies is None:
                raise
            return self.retry.call(
                Failure(error), call, lambda work: work._call_collate(input_copies)
            )

    def _tell(self, found: int | Operation, names: str) -> None:
        self.misdrawn.append((found, names))


# Examples on their way to the cache, from it, or left out there.
_UNFINISHED = frozenset({Miss, Halfway, LeftOutBefore})


def _prepare(
    stage: Operation, seed: int, epoch: int, call: Call
) -> tuple[Operation, Callable[..., Any], NDArray[np.uint64] | None, Call, Many | None]:
    many = stage.compile_many()
    return stage, stage.compile(REJECTED), stage.key(seed, epoch), call, many
