"""What a segment does to its inputs; runs in any thread or process.

An exception becomes a ``Failure`` in place of the value, and is raised when an output that needs it
is handed out. The first calls of a random map are looked at for draws from global generators,
wherever they run; what they tell goes into the tally, and the consumer warns.

A cache is one of the operations of the first segment. ``fetch`` looks examples up and returns what
was found or, read from the source, a ``Miss``. ``apply`` takes misses through the operations before
the cache one by one, which times them, offers them to the cache, and goes on with all. What a
filter left out is stored as such. A source that reads ahead is told only of what the cache does not
hold; what it was told of is taken from it, even if the cache has it by then.

What was spent is added to ``ns``, which is a segment's ``counters()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker import pytree, rng
from stoker.caution import warn
from stoker.engine.lower import Segment
from stoker.errors import CacheError, StageError
from stoker.lending import separated
from stoker.orders import Order
from stoker.rng import Rekeyed
from stoker.signals import pass_on
from stoker.sources.dataset import DatasetSource
from stoker.sources.source import IndexedSource, Reader
from stoker.stages.cache import CacheStage, LeftOutBefore, Miss
from stoker.stages.map import Map, returned_nothing
from stoker.stages.operation import Operation

if TYPE_CHECKING:
    from stoker.cluster.partitioned import Gather

Misdrawn = tuple[int, str]
"""A random map that draws from global generators: its position, and their names."""


class Failure:
    """Stands in place of an example that a stage failed on, until a batch needs it.

    Attributes:
        error: what is raised then.
        part: the segment that failed, by its place among the parts: the filter after it may skip
            the example, later ones not. None where nothing may.
        account: the skip budget that it counts against (see ``FilterPoint``).
    """

    def __init__(self, error: BaseException, part: int | None = None, account: int = 0) -> None:
        self.error = error
        self.part = part
        self.account = account


class Rejected(Exception):
    """Stands in place of an error: a filter left the example out."""


REJECTED = Failure(Rejected())
ENDED = -1
"""The part of a failure that ended a stream: nothing may skip it, nor leave it out of a batch."""


class WorkAddress(NamedTuple):
    """What tells a work from others of its pipeline.

    Attributes:
        at: its segment's place among the parts of the plan.
        seed, epoch, rank: what its order and its random draws are keyed by.
    """

    at: int
    seed: int
    epoch: int
    rank: int


class Work:
    """What a segment does to its inputs, in one epoch; runs in any thread or process.

    Args:
        segment: the segment.
        seed, epoch: they key the random maps.
        source: the pipeline's source, if it is indexed: with ``order`` it names an example that
            failed.
        order: the epoch's order, or None where there is no such source.
        rank: this process among those that share an epoch: their draws differ.
        misdrawn: where it is entered that a random map draws from global generators.
    """

    def __init__(
        self,
        segment: Segment,
        seed: int,
        epoch: int,
        source: IndexedSource | None,
        order: Order | None,
        *,
        rank: int,
        misdrawn: list[Misdrawn],
    ) -> None:
        self.segment = segment
        self.address = WorkAddress(segment.at, seed, epoch, rank)
        self._part = segment.at
        self.misdrawn = misdrawn
        self.reader: Reader | None = None
        self.gather: Gather | None = None
        self._source = source
        self._order = None if segment.renumbered else order
        self.legacy_key = rng.key(seed, epoch, rng.LEGACY, rank)  # of the global generators
        self._random = Rekeyed()
        self._operations = [_ready(each, seed, epoch, rank) for each in segment.operations]
        self._batch_maps = [_ready(each, seed, epoch, rank) for each in segment.batch_maps]
        self._first = 1 if segment.source is not None else 0
        self._cache, self._cache_at = segment.cache, segment.cache_at
        self._expected: set[int] = set()
        # Where the batch stage's time is counted.
        self.batch_at = self._first + len(self._operations) + (self._cache is not None)
        self._after = self.batch_at + (segment.batch is not None)

    @property
    def _indexed(self) -> IndexedSource:
        assert self._source is not None
        return self._source

    @property
    def worth_sending(self) -> bool:
        """Whether another process could do any of this."""
        reads = self.segment.source is not None and self.reader is None
        return reads or not self.segment.is_plain or bool(self._batch_maps)

    def copy_failure(self, error: Exception, ordinal: int) -> Failure:
        """Wrap what went wrong while a stored item was copied for one of its uses."""
        return Failure(self._located("echo (copying an item)", error, ordinal), self._part)

    def failure(self, stage: str, error: Exception, ordinal: int) -> Failure:
        """Wrap what went wrong where a value was to be used behind this segment."""
        return Failure(self._located(stage, error, ordinal), self._part)

    def send_failure(self, error: Exception, ordinal: int) -> Failure:
        """Wrap why what a worker process made of an example cannot be sent back."""
        return Failure(self._located("worker process", error, ordinal), self._part)

    def batch_failure(self, error: Exception, number: int) -> Failure:
        """Wrap what went wrong while batch ``number`` was put together."""
        assert self.segment.batch is not None
        return Failure(StageError(self.segment.batch.name, error, batch=number))

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Have what will be fetched read ahead, where that is possible."""
        if self.reader is None and self.gather is None:
            return
        if self._cache is not None:
            held = self._cache.holds(self._indexed, indices.tolist())
            indices = indices[~np.array(held, bool)]
            if self.gather is not None:
                return self._ask_others(self._cache, self.gather, indices)
        self._expect(indices)

    def _expect(self, indices: NDArray[np.int64]) -> None:
        if self.reader is None:
            return
        if self._cache is not None:
            self._expected.update(indices.tolist())  # what is read ahead has to be taken
        self.reader.expect(indices)

    def _ask_others(self, cache: CacheStage, gather: Gather, indices: NDArray[np.int64]) -> None:
        """Ask other nodes for what the cache lacks here; what they lack is read ahead."""
        keys = cache.keys(self._indexed, indices.tolist())
        places = {key: index for key, index in zip(keys, indices.tolist(), strict=True) if key}

        def read_ahead(missing: list[bytes]) -> None:
            self._expect(np.array([places[key] for key in missing], np.int64))

        gather.expect(list(places), read_ahead if self.reader is not None else None)

    def fetch(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Return examples by index; those that fail as ``Failure``.

        Behind a cache, as what ``apply`` takes for them: as they were found, or a ``Miss``.
        """
        if self._cache is None:
            return self._read(indices, ns)
        found = self._found(indices, ns)
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

    def _found(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Look examples up in the cache."""
        cache = self._cache
        assert cache is not None

        # What others were asked for is taken from there; only they say what is read ahead.
        expected: set[int] = self._expected if self.gather is None else set()

        def find(some: NDArray[np.int64]) -> list[Any]:
            try:
                return cache.find(self._indexed, some, expected, self.gather)
            except CacheError as error:  # no example's failure: nothing may skip it
                return [Failure(error)] * len(some)

        start = time.perf_counter_ns()
        found = self._each(find, cache, indices)
        ns[self._first + self._cache_at] += time.perf_counter_ns() - start
        return found

    def _read(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        start = time.perf_counter_ns()
        reads = self.reader or self._indexed
        values = self._each(reads.fetch, self._indexed, indices)
        ns[0] += time.perf_counter_ns() - start
        ns[-1] += self._weight(values)
        return values

    def _weight(self, values: list[Any]) -> int:
        """Return the bytes of what was read; a dataset's own examples count as large as the first.

        They may be of many small parts, which take longer to weigh than to read.
        """
        if isinstance(self._indexed, DatasetSource):
            return sum(map(pytree.data_bytes, values[:1])) * len(values)
        return sum(map(pytree.data_bytes, values))

    def _each(
        self,
        get: Callable[[NDArray[np.int64]], list[Any]],
        who: IndexedSource | CacheStage,
        indices: NDArray[np.int64],
    ) -> list[Any]:
        """Return what ``get`` does; where it fails, one by one, to know which."""
        try:
            return get(indices)
        except Exception as error:
            pass_on(error)
            if len(indices) == 1:
                return [Failure(self._error(who.name, error, index=int(indices[0])), self._part)]
            return [self._each(get, who, indices[i : i + 1])[0] for i in range(len(indices))]

    def apply(
        self,
        values: list[Any],
        ordinals: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any] | None = None,
    ) -> None:
        """Run the maps over ``values``, in place, stage by stage.

        With ``copied`` the values are lent by a pool; it copies what of them would be written to.
        """
        if copied is not None:
            return self._apply_to_lent(values, ordinals, use_keys, ns, copied)
        behind = 0
        if self._cache is not None:
            behind = self._cache_at
            for i, value in enumerate(values):
                kind = type(value)
                if kind is Miss:
                    values[i] = self._admitted(value, ordinals[i], ns)
                elif kind is LeftOutBefore:
                    values[i] = REJECTED
        self._apply(slice(behind, None), values, ordinals, use_keys, ns)

    def _apply_to_lent(
        self,
        values: list[Any],
        ordinals: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
        copied: Callable[[Any], Any],
    ) -> None:
        """Run the maps over values that a pool keeps; none of them comes out where it may be kept.

        A last use gets no more than the others: while it writes, another one may still be reading.
        """
        lent, reading = list(values), self.segment.reading
        self._apply(slice(0, reading), values, ordinals, use_keys, ns)
        if self.segment.stacks and reading == len(self._operations):
            return
        for i, value in enumerate(values):
            if type(value) is not Failure:
                try:
                    values[i] = separated(value, lent[i], copied)
                except Exception as error:
                    pass_on(error)
                    values[i] = self.copy_failure(error, ordinals[i])
        self._apply(slice(reading, None), values, ordinals, use_keys, ns)

    def _admitted(self, miss: Miss, ordinal: int, ns: list[int]) -> Any:
        """Do to an example what comes before the cache, and offer the cache what comes out."""
        assert self._cache is not None
        one = [miss.value]
        start = time.perf_counter_ns()
        self._apply(slice(self._cache_at), one, [ordinal], None, ns)
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
                    again=lambda: self._again(miss, ordinal),
                )
            except Exception as error:
                pass_on(error)
                # Nothing may skip it: once the cache is full, it would not even be noticed.
                value = Failure(self._located(self._cache.name, error, ordinal))
        ns[self._first + self._cache_at] += time.perf_counter_ns() - began
        return value

    def _again(self, miss: Miss, ordinal: int) -> tuple[Any, bool]:
        """Make an example again, up to the cache; return it, and whether it was left out."""
        one = [miss.value]  # of a file, mostly
        if not _is_immutable(miss.value):  # maps may have changed it
            one = self._indexed.fetch([miss.index])
        self._apply(slice(self._cache_at), one, [ordinal], None, [0] * self._after)
        if type(one[0]) is Failure and one[0] is not REJECTED:
            raise one[0].error
        return one[0], one[0] is REJECTED

    def _apply(
        self,
        which: slice,
        values: list[Any],
        ordinals: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
    ) -> None:
        place = self._random.at
        on_device = device_generator if self.segment.on_device else None
        in_batches = self.segment.batches_in
        first = self._first + (which.start or 0)
        if self._cache is not None and which.start is not None:
            first += 1  # the cache's time is counted between
        for number, (stage, fn, key) in enumerate(self._operations[which], first):
            start = time.perf_counter_ns()
            fn = stage.watched(fn, self._tell)
            others = self._others(stage, ordinals)
            for i, value in enumerate(values):
                if others is not None and others[i]:
                    continue
                use_key = use_keys[i] if use_keys is not None else 0
                if type(value) is Failure or (stage.repeats_only and not use_key):
                    continue
                try:
                    if key is None:
                        made = fn(value)
                    else:
                        drawn = on_device and on_device(key, ordinals[i], use_key, value)
                        if drawn is None:  # a key of JAX has no truth
                            drawn = place(key, ordinals[i], use_key)
                        made = fn(value, drawn)
                    if made is None and stage.makes_values:
                        raise returned_nothing("batch" if in_batches else "example")
                except Exception as error:
                    pass_on(error)
                    failed = self._located(stage.name, error, ordinals[i])
                    made = Failure(failed, self._part, stage.account)
                values[i] = made
            ns[number] += time.perf_counter_ns() - start

    def _others(self, stage: Operation, ordinals: Sequence[int]) -> list[bool] | None:
        """Tell which examples are of other parts of a mixture; None where all are the stage's."""
        if stage.part is None:
            return None
        assert self._order is not None
        first, behind = stage.part.indices.start, stage.part.indices.stop
        if isinstance(ordinals, range):
            indices = self._order.span(ordinals.start, ordinals.stop)
        else:
            indices = np.array([self._order.index(ordinal) for ordinal in ordinals], np.int64)
        others: list[bool] = ((indices < first) | (indices >= behind)).tolist()
        return others

    def finish(self, batch: Any, ordinal: int, use_key: int, ns: list[int]) -> Any:
        """Run the maps behind the batching stage over a batch; may return a ``Failure``."""
        for number, (stage, fn, key) in enumerate(self._batch_maps, self._after):
            start = time.perf_counter_ns()
            fn = stage.watched(fn, self._tell)
            try:
                batch = (
                    fn(batch) if key is None else fn(batch, self._random.at(key, ordinal, use_key))
                )
                if batch is None:
                    raise returned_nothing("batch")
            except Exception as error:
                pass_on(error)
                return Failure(StageError(stage.name, error, batch=ordinal))
            ns[number] += time.perf_counter_ns() - start
        return batch

    def _tell(self, position: int, names: str) -> None:
        self.misdrawn.append((position, names))

    def _located(self, stage: str, error: Exception, ordinal: int) -> StageError:
        if self.segment.batches_in:
            return StageError(stage, error, batch=ordinal)
        if self._order is None:
            return StageError(stage, error, number=ordinal)
        return self._error(stage, error, index=self._order.index(ordinal))

    def _error(self, stage: str, error: Exception, index: int) -> StageError:
        return StageError(stage, error, index=index, path=self._indexed.path(index))


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return value is None or type(value) in (bytes, str, int, float, bool)


def _ready(
    stage: Operation, seed: int, epoch: int, rank: int
) -> tuple[Operation, Callable[..., Any], NDArray[np.uint64] | None]:
    return stage, stage.compile(REJECTED), stage.key(seed, epoch, rank)


def warn_of_misdrawn(maps: Sequence[Map], misdrawn: list[Misdrawn]) -> None:
    """Warn of random maps that draw from global generators, once of each."""
    while misdrawn:
        position, names = misdrawn.pop()
        stage = maps[position]
        if stage.draws.settle():
            warn(
                f"{stage.name} drew from {names} in each of its first calls, and nothing from rng: "
                "only what rng draws is the same for any workers. Draw from rng alone"
            )


def device_generator(key: NDArray[np.uint64], ordinal: int, use_key: int, batch: Any) -> Any:
    """Return a ``torch.Generator`` on a batch's device, or a key of JAX, as its arrays are."""
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            import torch

            generator = torch.Generator(leaf.device)
            generator.manual_seed(rng.integer_at(key, ordinal, use_key))
            return generator
        if pytree.is_jax_array(leaf):
            import jax

            return jax.random.key(rng.integer_at(key, ordinal, use_key) >> 31)
    return None
