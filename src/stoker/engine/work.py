"""Executes a segment's operations on its inputs, in any thread or process.

An exception becomes a ``Failure`` in place of the value, and is raised when an output that needs it
is handed out. The first calls of a random map are watched for draws from global generators. The
result goes into the tally, and the consumer warns.

A cache is one of the operations of the first segment. ``fetch`` looks examples up and returns the
found values; examples that it reads from the source come as a ``Miss``. ``apply`` takes misses
through the operations before the cache one by one, which times them, offers them to the cache, and
goes on with all. The cache also stores that a filter dropped an example. A source that reads ahead
is told only of examples that the cache does not hold, and these are then taken from it, even if the
cache has them by then.

The time spent is added to ``ns``, which is a segment's ``counters()``.

Each worker thread has a work of its own, made from the consumer's, which calls copies of the user's
objects (``thread_copies``). If a copy fails on an input, the original is tried, under
``USER_LOCK``. Objects that cannot be copied are called under that lock from the beginning.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import copy_lent_parts
from stoker.basics.signals import pass_on
from stoker.basics.warn import warn
from stoker.engine.plan import Segment, WorkAddress
from stoker.errors import CacheError, StageError
from stoker.replicas.replica import USER_LOCK
from stoker.schedule import rng
from stoker.schedule.dealing import RankOrder, Stride
from stoker.schedule.orders.order import as_array
from stoker.schedule.rng import Rekeyed
from stoker.sources.origin import IndexedSource
from stoker.sources.source import Reader
from stoker.stages.batching.batch import Collate, RowError, UnlikeError
from stoker.stages.cache import CacheStage, LeftOutBefore, Miss
from stoker.stages.functions.epoch_time import EpochTime, time_at
from stoker.stages.functions.operation import Operation
from stoker.stages.map import Map, returned_nothing

if TYPE_CHECKING:
    from stoker.stages.cache import Lookups

UndeclaredRng = tuple[int | Operation, str]
"""The positions of random maps that draw from global generators, and the generators' names."""


class Failure:
    """Stands in place of an example that a stage failed on, until a batch needs it.

    Attributes:
        error: the error to raise then.
        part: the number of the failed segment among the parts: only the filter after it may skip
            the example. None if it must not be skipped.
        account: the skip budget that it counts against (see ``FilterPoint``).
    """

    def __init__(self, error: BaseException, part: int | None = None, account: int = 0) -> None:
        self.error = error
        self.part = part
        self.account = account


class Rejected(Exception):
    """Stands in place of an error: a filter dropped the example."""


REJECTED = Failure(Rejected())
ENDED = -1
"""The part of a failure that ended a stream: it is never skipped, nor left out of a batch."""


class Call(NamedTuple):
    """The way in which a work calls the user's objects of a stage, or of the source.

    Attributes:
        is_locked: whether only one such call at a time may run in the process.
        copies: the numbers of the copied objects, among all of the pipeline.
    """

    is_locked: bool = False
    copies: tuple[int, ...] = ()


class Copies(Protocol):
    """A thread's copies of the user's objects."""

    def fresh(self, failed: Work, original: Work) -> Work | None:
        """Return a work with new copies, if the failed ones are of an earlier epoch, or old."""
        ...

    def distrust(self, copies: tuple[int, ...], error: BaseException) -> None:
        """Take note of copies that raised an error which their originals do not raise."""
        ...


_FREELY = Call()


class Work:
    """Executes a segment's operations in one epoch, in any thread or process.

    Inputs are identified by their places (``schedule.orders.order``), of which each rank has
    others. Without an order (streams and batches), ranks take turns.

    Args:
        segment: the segment.
        address: seed and epoch key its draws; rank and world assign places.
        source: the pipeline's source, if it is indexed: with ``order`` it names an example that
            failed.
        order: the epoch's order; None without an indexed source, and in another process or host,
            which does not need it (``for_another_process``).
        misdrawn: collects random maps that draw from global generators.
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
        self._part = segment.at
        self.misdrawn = misdrawn
        self.reader: Reader | None = None
        self.lookups: Lookups | None = None
        # Indices of fresh examples of earlier epochs that a pool holds, by number.
        self.index_before: Callable[[int], int] | None = None
        self._source = source
        self._order = None if segment.renumbered or segment.batches_in else order
        first = address.rank + address.batches * segment.batches_in
        taking_turns = Stride(first, address.world)  # of streams and batches
        self._stride = taking_turns if self._order is None else self._order.stride
        # Of the global generators.
        self.legacy_key = rng.key(address.seed, address.epoch, rng.LEGACY)
        self._random = Rekeyed()
        self._original: Work | None = None  # in a work that calls copies
        self._copies: Copies | None = None
        # The reason why its copies are no longer called: one failed and may be half changed, and
        # new copies have replaced them.
        self._spent: Failure | None = None
        self._call(segment, [_FREELY] * len(segment.callers))
        self._first = 1 if segment.source is not None else 0
        self._cache, self._cache_at = segment.cache, segment.cache_at
        self._expected: set[int] = set()
        # Where the batch stage's time is counted.
        self.batch_at = self._first + len(self._operations) + (self._cache is not None)
        self._after = self.batch_at + (segment.batch is not None)
        self.stages = len(segment.names)  # behind their times stand their counts of examples
        self.batched_at = self.stages + self.batch_at

    def _call(self, segment: Segment, calls: Sequence[Call]) -> None:
        """Set up the calls of the user's objects of a segment, by the way of each caller."""
        seed, epoch = self.address.seed, self.address.epoch
        rest = iter(calls)
        self._reading = _FREELY if segment.source is None else next(rest)
        self._operations = [_prepare(each, seed, epoch, next(rest)) for each in segment.operations]
        self._collating = _FREELY if segment.batch is None else next(rest)
        self._collate = None if segment.batch is None else segment.batch.collate
        self._batch_maps = [_prepare(each, seed, epoch, next(rest)) for each in segment.batch_maps]
        self._proven: set[Call] = set()

    def with_calls(
        self,
        segment: Segment,
        source: IndexedSource | None,
        calls: Sequence[Call] | None = None,
        copies: Copies | None = None,
    ) -> Work:
        """Return the same work with other user objects.

        Args:
            segment: the segment with them.
            source: the pipeline's source with them.
            calls: the way of calling each caller's objects; None: without a lock.
            copies: the copies' owner, which a failed call asks for newer ones.
        """
        own = copy.copy(self)
        own._original, own._copies = self, copies
        own._source, own._random = source, Rekeyed()
        own._call(segment, calls or [_FREELY] * len(segment.callers))
        if own.reader is not None:
            assert source is not None
            own.reader = source.with_own(own.reader)
        return own

    def for_another_process(self) -> Work:
        """Return this without the order, which may be large, or be the user's."""
        twin = copy.copy(self)
        twin._order = twin.index_before = None
        return twin

    def at(self, address: WorkAddress) -> Work:
        """Return what does the same in another epoch, in another process."""
        return Work(self.segment, address, self._source, None, misdrawn=[])

    def places(self, ordinals: range | list[int]) -> Sequence[int]:
        """Return the places of inputs by their ordinals in this process.

        Inputs of an earlier epoch have ordinals, and places, below 0.
        """
        stride = self._stride
        if stride is not None:
            first, step = stride.first, stride.step
            if step == 1 and not first:
                return ordinals
            if isinstance(ordinals, range):
                return range(first + ordinals.start * step, first + ordinals.stop * step, step)
            if step == self.address.world:
                return [first + step * each for each in ordinals]
        assert self._order is not None
        rows = ordinals if isinstance(ordinals, range) else np.array(ordinals, np.int64)
        if isinstance(rows, range) or not len(rows) or rows.min() >= 0:
            found = self._order.places(rows)
        else:
            there = as_array(self._order.places(np.maximum(rows, 0)))
            found = np.where(rows < 0, self.batch_place(rows), there)
        places: list[int] = as_array(found).tolist()
        return places

    def batch_place(self, number: Any) -> Any:
        """Return the place of a batch, or of several, by its number on this rank."""
        return self.address.batches + number * self.address.world + self.address.rank

    @property
    def _indexed(self) -> IndexedSource:
        assert self._source is not None
        return self._source

    @property
    def worth_sending(self) -> bool:
        """True if another process could do any of this."""
        reads = self.segment.source is not None and self.reader is None
        return reads or not self.segment.is_plain or bool(self._batch_maps)

    def copy_failure(self, error: Exception, place: int) -> Failure:
        """Wrap an error in copying a stored item for one of its uses."""
        return Failure(self._locate("echo (copying an item)", error, place), self._part)

    def failure(self, stage: str, error: Exception, ordinal: int) -> Failure:
        """Wrap an error in using a value after this segment."""
        (place,) = self.places([ordinal])
        return Failure(self._locate(stage, error, place), self._part)

    def add_number(self, failure: Failure) -> Failure:
        """Add the example's number to a failure from another process, which knew only its place."""
        error = failure.error
        if not isinstance(error, StageError) or error.number is None or self._order is None:
            return failure
        cause = error.__cause__
        assert cause is not None
        found = self._locate(error.stage, cause, error.number, error.batch)
        return Failure(found, failure.part, failure.account)

    def send_failure(self, error: Exception, place: int) -> Failure:
        """Wrap the error in sending back a worker process's result for an example."""
        return Failure(self._locate("worker process", error, place), self._part)

    def batch_failure(self, error: Exception, number: int, places: Sequence[int] = ()) -> Failure:
        """Wrap an error in putting batch ``number`` together.

        ``places`` are those of its rows: a single one is to blame, else the error may name one.
        """
        assert self.segment.batch is not None
        stage, row = self.segment.batch.name, 0 if len(places) == 1 else None
        if isinstance(error, (UnlikeError, RowError)):
            row = error.row
        if isinstance(error, RowError):
            error = error.error
        if row is not None and row < len(places):
            return Failure(self._locate(stage, error, places[row], batch=number))
        return Failure(StageError(stage, error, batch=number))

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Have examples read ahead that will be fetched, if that is possible."""
        if self.reader is None and self.lookups is None:
            return
        if self._cache is not None:
            held = self._cache.holds(self._indexed, indices.tolist())
            indices = indices[~np.array(held, bool)]
            if self.lookups is not None:
                return self._ask_others(self._cache, self.lookups, indices)
        self._expect(indices)

    def _expect(self, indices: NDArray[np.int64]) -> None:
        if self.reader is None:
            return
        if self._cache is not None:
            self._expected.update(indices.tolist())  # what is read ahead has to be taken
        self.reader.expect(indices)

    def _ask_others(self, cache: CacheStage, lookups: Lookups, indices: NDArray[np.int64]) -> None:
        """Ask other nodes for examples that this host's cache lacks; read ahead what they lack."""
        keys = cache.keys(self._indexed, indices.tolist())
        places = {key: index for key, index in zip(keys, indices.tolist(), strict=True) if key}

        def read_ahead(missing: list[bytes]) -> None:
            self._expect(np.array([places[key] for key in missing], np.int64))

        lookups.expect(list(places), read_ahead if self.reader is not None else None)

    def fetch(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Return examples by index; failed ones as ``Failure``.

        With a cache, they come as ``apply`` needs them: as they were found, or as a ``Miss``.
        """
        if self._cache is None:
            return self._read(indices, ns)
        found = self._look_up(indices, ns)
        missing = [at for at, miss in enumerate(found) if type(miss) is Miss]
        step = 1 if self._cache.weighs else max(1, len(missing))  # then each one's cost is asked
        for start in range(0, len(missing), step):
            some = missing[start : start + step]
            began = time.perf_counter_ns()
            values = self._read(indices[some], ns)
            cost_ns = (time.perf_counter_ns() - began) // len(some)
            for at, value in zip(some, values, strict=True):
                found[at].value, found[at].cost_ns = value, cost_ns
                self._expected.discard(int(indices[at]))
                if type(value) is Failure:
                    found[at] = value
        return found

    def _look_up(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Look examples up in the cache."""
        cache = self._cache
        assert cache is not None

        # Examples that other nodes were asked for come from there; only nodes start reading ahead.
        expected: set[int] = self._expected if self.lookups is None else set()

        def find(some: NDArray[np.int64]) -> list[Any]:
            try:
                lends = self.segment.reads_what_is_cached
                return cache.find(self._indexed, some, expected, self.lookups, lends=lends)
            except CacheError as error:  # no example's failure: nothing may skip it
                return [Failure(error)] * len(some)

        start, at = time.perf_counter_ns(), self._first + self._cache_at
        found = self._each(find, cache, indices)
        ns[at] += time.perf_counter_ns() - start
        ns[self.stages + at] += len(indices)
        return found

    def _read(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        start = time.perf_counter_ns()
        values = self._fetch_source(indices, self.reader or self._indexed)
        ns[0] += time.perf_counter_ns() - start
        ns[self.stages] += len(indices)
        ns[-1] += self._weight(values)
        return values

    def _fetch_source(self, indices: NDArray[np.int64], reads: Reader | IndexedSource) -> list[Any]:
        """Read examples. If a copy fails on one, the original reads it."""
        if reads is self._indexed and not self._indexed.takes_many:
            return self._ask(indices, self._indexed)
        call = self._reading
        with _turn(call):
            values = self._each(reads.fetch, self._indexed, indices)
        if call.copies:
            for at, value in enumerate(values):
                if type(value) is Failure:
                    values[at] = self._read_by_original(value, int(indices[at]))
        return values

    def _ask(self, indices: NDArray[np.int64], source: IndexedSource) -> list[Any]:
        """Return examples of a user's object, which is asked for each once, whatever it raises.

        After an error it may be half changed, and asked again it could silently give wrong values.
        So a copy that failed where its original does not is not asked for the rest either.
        """
        values: list[Any] = []
        while len(values) < len(indices):
            failure = self._spent
            if failure is None:
                rest = indices[len(values) :] if values else indices
                if self._reading.is_locked:
                    with USER_LOCK:
                        error = source.read_into(values, rest)
                else:  # without a ``with``: worker processes come here for each example
                    error = source.read_into(values, rest)
                if error is None:
                    break
                pass_on(error)
                index = int(indices[len(values)])
                failure = Failure(self._error(self._indexed.name, error, index), self._part)
            if self._reading.copies:
                failure = self._read_by_original(failure, int(indices[len(values)]))
            values.append(failure)
        return values

    def _read_by_original(self, failure: Failure, index: int) -> Any:
        again = functools.partial(Work._read_anew, index=index)
        return self._by_original(failure, self._reading, again)

    def _read_anew(self, index: int) -> Any:
        return self._fetch_source(np.array([index], np.int64), self._indexed)[0]

    def _by_original(self, failure: Failure, call: Call, do: Callable[[Work], Any]) -> Any:
        """Return the original's result, called alone, for an input that a copy failed on.

        Copies of an earlier epoch, which may hold objects of that epoch's thread, are made anew
        first. If the original fails as well, its failure is returned.

        Args:
            failure: the copy's failure.
            call: the way in which the copy was called.
            do: makes the result with another work.
        """
        original, copies = self._original, self._copies
        assert original is not None
        assert copies is not None
        fresh = copies.fresh(self, original)
        if fresh is not None:
            self._spent = failure
            return do(fresh)
        with USER_LOCK:
            made = do(original)
        if type(made) is not Failure or made is REJECTED:
            self._spent = failure
            copies.distrust(call.copies, failure.error)
        return made

    def _keep_inputs(self, values: list[Any], call: Call) -> list[Any] | None:
        """Return copies of the first inputs of a new copy of a function; None for later inputs.

        A function may change its input before it fails.
        """
        if not call.copies or call in self._proven:
            return None
        self._proven.add(call)
        try:
            return [
                value if type(value) is Failure else pytree.deep_copy(value) for value in values
            ]
        except Exception:  # of types of the user's own
            return None

    def _weight(self, values: list[Any]) -> int:
        """Return the bytes of read examples; all of a dataset's own count as large as the first.

        An example may have many small parts, and take longer to weigh than to read.
        """
        if self._indexed.runs_user_code:
            return pytree.data_bytes(values[0]) * len(values) if values else 0
        return sum(map(pytree.data_bytes, values))

    def _each(
        self,
        get: Callable[[NDArray[np.int64]], list[Any]],
        who: IndexedSource | CacheStage,
        indices: NDArray[np.int64],
    ) -> list[Any]:
        """Return the results of ``get``; if it fails, get them one by one, to know which fails."""
        try:
            found = get(indices)
            if len(found) != len(indices):
                raise ValueError(f"{len(found)} examples came, and {len(indices)} were asked for")
            return found
        except Exception as error:
            pass_on(error)
            if len(indices) == 1:
                return [Failure(self._error(who.name, error, index=int(indices[0])), self._part)]
            return [self._each(get, who, indices[i : i + 1])[0] for i in range(len(indices))]

    def apply(
        self,
        values: list[Any],
        places: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any] | None = None,
    ) -> None:
        """Run the maps over ``values``, in place, stage by stage.

        With ``copied`` the values are lent by a pool; it copies those that would be written to.
        """
        if copied is not None:
            return self._apply_to_lent(values, places, use_keys, ns, copied)
        behind = 0
        if self._cache is not None:
            behind = self._cache_at
            for i, value in enumerate(values):
                kind = type(value)
                if kind is Miss:
                    values[i] = self._admit(value, places[i], ns)
                elif kind is LeftOutBefore:
                    values[i] = REJECTED
        self._apply(slice(behind, None), values, places, use_keys, ns)

    def _apply_to_lent(
        self,
        values: list[Any],
        places: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any],
    ) -> None:
        """Run the maps over values that a pool keeps; none of these values may come out.

        A last use gets a copy like the others: while it writes, another one may still be reading.
        """
        lent, reading = list(values), self.segment.reading
        self._apply(slice(0, reading), values, places, use_keys, ns)
        if self.segment.stacks and reading == len(self._operations):
            return
        for i, value in enumerate(values):
            if type(value) is not Failure:
                try:
                    values[i] = copy_lent_parts(value, lent[i], copied)
                except Exception as error:
                    pass_on(error)
                    values[i] = self.copy_failure(error, places[i])
        self._apply(slice(reading, None), values, places, use_keys, ns)

    def _admit(self, miss: Miss, place: int, ns: list[int]) -> Any:
        """Run the operations before the cache on an example, and offer the result to the cache."""
        assert self._cache is not None
        one = [miss.value]
        start = time.perf_counter_ns()
        self._apply(slice(self._cache_at), one, [place], None, ns)
        began = time.perf_counter_ns()
        miss.cost_ns += began - start
        value = one[0]
        if type(value) is not Failure or value is REJECTED:
            try:
                self._cache.offer(
                    self._indexed,
                    miss,
                    value,
                    left_out=value is REJECTED,
                    again=lambda: self._again(miss, place),
                )
            except Exception as error:
                pass_on(error)
                # Nothing may skip it: once the cache is full, it would not even be noticed.
                value = Failure(self._locate(self._cache.name, error, place))
        ns[self._first + self._cache_at] += time.perf_counter_ns() - began
        return value

    def _again(self, miss: Miss, place: int) -> tuple[Any, bool]:
        """Make an example again, up to the cache; return it, and whether a filter dropped it."""
        if self._indexed.path(miss.index) is not None and pytree.is_frozen(miss.value):
            one = [miss.value]  # of a file, and maps cannot have changed it
        else:
            with _turn(self._reading):
                one = self._indexed.fetch([miss.index])
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
        if self._cache is not None and which.start is not None:
            first += 1  # the cache's time is counted between
        for number, (stage, fn, key, call) in enumerate(self._operations[which], first):
            start = time.perf_counter_ns()
            fn = stage.watch(fn, self._tell)
            others = self._others(stage, places)
            passed_by = 0
            kept = (
                None if call is _FREELY or self._is_addressed else self._keep_inputs(values, call)
            )
            can_redo = bool(call.copies) and (self._is_addressed or kept is not None)
            is_choosy, is_timed = others is not None or stage.repeats_only, stage.clock
            is_locked = call is not _FREELY and call.is_locked
            if is_locked:
                USER_LOCK.acquire()  # by a worker, which no Ctrl-C interrupts: ``with`` costs more
            try:
                spent = self._spent if can_redo else None
                for i, value in enumerate(values):
                    if type(value) is Failure:
                        passed_by += 1
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
                                made = fn(value, *more)
                            elif key is None:
                                made = fn(value)
                            else:
                                drawn = on_device and on_device(key, places[i], use_key, value)
                                if drawn is None:  # a key of JAX has no truth
                                    drawn = draw_at(key, places[i], use_key)
                                made = fn(value, drawn)
                            if made is None and stage.makes_values:
                                raise returned_nothing("batch" if in_batches else "example")
                            values[i] = made
                            continue
                        except Exception as error:
                            pass_on(error)
                            failed = self._locate(stage.name, error, places[i])
                            failure = Failure(failed, self._part, stage.account)
                    values[i] = failure
                    if call.copies:
                        at = number - first + (which.start or 0)
                        given = None if kept is None else kept[i : i + 1]
                        values[i] = self._remake(failure, call, at, places[i], use_key, given)
                        spent = self._spent if can_redo else None
            finally:
                if is_locked:
                    USER_LOCK.release()
            ns[number] += time.perf_counter_ns() - start
            ns[self.stages + number] += len(values) - passed_by

    def _remake(
        self,
        failure: Failure,
        call: Call,
        at: int,
        place: int,
        use_key: int,
        kept: list[Any] | None,
    ) -> Any:
        """Return an original's result for an input of operation ``at``, on which a copy failed.

        The copy may have changed the input, so it is made again, or a kept copy of it is used.
        """
        if not self._is_addressed and kept is None:
            return failure

        def do(work: Work) -> Any:
            one, start = kept, at
            if one is None:
                one, start = [work._read_anew(self._number_at(place))], 0
            ns = self.segment.counters()
            work._apply(slice(start, at + 1), one, [place], [use_key], ns)
            return one[0]

        return self._by_original(failure, call, do)

    def _time_at(self, place: int) -> EpochTime:
        return time_at(self.address.epoch, place, self.address.places)

    @property
    def _is_addressed(self) -> bool:
        """True if inputs can be read again, by their places."""
        return self.segment.source is not None and self._order is not None

    def _others(self, stage: Operation, places: Sequence[int]) -> list[bool] | None:
        """Mark the examples of other parts of a mixture; None if all are the stage's."""
        if stage.part is None:
            return None
        return [not is_own for is_own in stage.part.has(places)]

    def _number_at(self, place: int) -> int:
        assert self._order is not None
        return int(self._order.at(np.array([place], np.int64))[0])

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
        for at, (stage, fn, key, call) in enumerate(maps, self._after + first):
            start = time.perf_counter_ns()
            fn = stage.watch(fn, self._tell)
            kept = None if call is _FREELY else self._keep_inputs([batch], call)
            is_locked = call is not _FREELY and call.is_locked
            if is_locked:
                USER_LOCK.acquire()  # by a worker, as in ``_apply``
            try:
                if key is None:
                    batch = fn(batch)
                else:
                    place = self.batch_place(number)
                    batch = fn(batch, self._random.at(key, place, use_key))
                if batch is None:
                    raise returned_nothing("batch")
            except Exception as error:
                pass_on(error)
                failure = Failure(StageError(stage.name, error, batch=number))
                if kept is None:
                    return failure
                again = functools.partial(
                    Work.finish,
                    batch=kept[0],
                    number=number,
                    use_key=use_key,
                    ns=ns,
                    rows=rows,
                    first=at - self._after,
                )
                return self._by_original(failure, call, again)
            finally:
                if is_locked:
                    USER_LOCK.release()
            ns[at] += time.perf_counter_ns() - start
            ns[self.stages + at] += rows
        return batch

    @property
    def collate(self) -> Collate | None:
        """The user's ``collate``, with the lock if it needs one; None if there is none."""
        is_free = self._collating is _FREELY
        return self._collate if self._collate is None or is_free else self._call_collate

    def _call_collate(self, examples: list[Any]) -> Any:
        call, collate = self._collating, self._collate
        assert collate is not None
        kept = self._keep_inputs(examples, call)
        try:
            with _turn(call):
                return collate(examples)
        except Exception as error:
            pass_on(error)
            if kept is None:
                raise
            return self._by_original(Failure(error), call, lambda work: work._call_collate(kept))

    def _tell(self, found: int | Operation, names: str) -> None:
        self.misdrawn.append((found, names))

    def _locate(
        self, stage: str, error: BaseException, place: int, batch: int | None = None
    ) -> StageError:
        if self.segment.batches_in:
            return StageError(
                stage, error, batch=(place - self.address.batches) // self.address.world
            )
        if self._order is None:
            return StageError(stage, error, number=place, batch=batch)
        if place >= 0:
            index = self._number_at(place)
        elif self.index_before is not None:
            index = self.index_before(place // self.address.world)
        else:
            return StageError(stage, error, batch=batch)
        return self._error(stage, error, index, batch)

    def _error(
        self, stage: str, error: BaseException, index: int, batch: int | None = None
    ) -> StageError:
        path = self._indexed.path(index)
        return StageError(stage, error, index=index, path=path, batch=batch)


def _prepare(
    stage: Operation, seed: int, epoch: int, call: Call
) -> tuple[Operation, Callable[..., Any], NDArray[np.uint64] | None, Call]:
    return stage, stage.compile(REJECTED), stage.key(seed, epoch), call


_NO_TURN = contextlib.nullcontext()


def _turn(call: Call) -> contextlib.AbstractContextManager[Any]:
    return USER_LOCK if call.is_locked else _NO_TURN


def warn_of_misdrawn(maps: Sequence[Map], misdrawn: list[UndeclaredRng]) -> None:
    """Warn once of each map and filter that draws from global generators."""
    while misdrawn:
        found, names = misdrawn.pop()
        stage = maps[found] if isinstance(found, int) else found
        if stage.draws.settle():
            warn(stage.says_of(names))


def device_generator(key: NDArray[np.uint64], place: int, use_key: int, batch: Any) -> Any:
    """Return a ``torch.Generator`` on a batch's device; for arrays of JAX, a key of JAX."""
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            import torch

            generator = torch.Generator(leaf.device)
            generator.manual_seed(rng.integer_at(key, place, use_key))
            return generator
        if pytree.is_jax_array(leaf):
            import jax

            # JAX takes seeds of 32 bits, unless 64-bit numbers are switched on.
            return jax.random.key(rng.integer_at(key, place, use_key) >> 31)
    return None
