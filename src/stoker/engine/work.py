"""From stages to segments: what lies between two pools is one segment of work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import pytree, rng
from stoker.caution import warn
from stoker.errors import CacheError, StageError
from stoker.orders import Order, Share
from stoker.rng import Rekeyed
from stoker.signals import pass_on
from stoker.sources.source import ArraySource
from stoker.sources.stream import IterableSource, LoaderSource
from stoker.stages.batch import Batch
from stoker.stages.cache import CacheStage, Hit, Miss
from stoker.stages.echo import Echo
from stoker.stages.filter import Filter
from stoker.stages.map import Map, returned_nothing
from stoker.stages.shard import Shard
from stoker.stages.shuffle import Shuffle
from stoker.stages.skip import RAISE, Budget
from stoker.stages.to import To

Misdrawn = tuple[int, str]
"""A random map that draws from global generators: its position, and their names."""


@dataclass
class Segment:
    """Stages that run together: examples in, examples or batches out; or batches throughout.

    Attributes:
        source: the source, in the first segment of an addressed pipeline.
        maps: the maps and filters on the way in, and a cache (on batches, where those come in).
        batch: the batching stage, if it is in this segment.
        batch_maps: the maps behind it.
        batches_in: whether what comes in are batches already.
        on_device: whether it stands behind ``.to(device)``.
    """

    source: Any = None
    maps: list[Map | Filter | CacheStage] = field(default_factory=list)
    batch: Batch | None = None
    batch_maps: list[Map] = field(default_factory=list)
    batches_in: bool = False
    on_device: bool = False

    @property
    def gathers(self) -> bool:
        """Whether batches are gathered from arrays, with nothing done to single examples."""
        return (
            isinstance(self.source, ArraySource)
            and self.source.stacks
            and not self.maps
            and self.batch is not None
            and self.batch.collate is None
        )

    @property
    def only_stacks(self) -> bool:
        """Whether inputs are but copied into a batch, so that they need no copy before."""
        return not self.maps and self.batch is not None and self.batch.collate is None

    @property
    def cache(self) -> CacheStage | None:
        """The cache among the maps."""
        return next((m for m in self.maps if isinstance(m, CacheStage)), None)

    @property
    def names(self) -> list[str]:
        """The stages with a time of their own, in order."""
        names = [self.source.name] if self.source is not None else []
        names += [m.name for m in self.maps]
        if self.batch is not None:
            names.append(self.batch.name)
        return names + [m.name for m in self.batch_maps]


@dataclass(frozen=True)
class FilterPoint:
    """Stands behind a segment some of whose outputs do not survive.

    Attributes:
        budgets: the skip budgets, by account: 0 is the pipeline's, the others are those of stages
            that have one of their own.
    """

    budgets: Mapping[int, Budget]


@dataclass
class Plan:
    """A pipeline's stages, sorted for running.

    Attributes:
        source: a ``Source``, an ``IterableSource`` or a ``LoaderSource``.
        shuffled: whether the order is drawn anew every epoch.
        share: which part of the epoch is this rank's, None for all of it.
        parts: segments, echoes, sifts and a device in the order that data meets them. A segment
            stands first (unless a loader does), last, and between any two of the others, but
            that an echo may follow a sift.
        group: the number of examples in a batch, 1 where examples are never batched.
        buffer: how many examples of a stream are shuffled among each other, 1 for none.
    """

    source: Any
    shuffled: bool
    share: Share | None
    parts: list[Segment | FilterPoint | Echo | To]
    group: int
    buffer: int

    def group_of(self, echo: Echo) -> int:
        """Return how many items a step of an echo's pool has: one, where those are batches."""
        at = self.parts.index(echo)
        before = self.parts[at - 1] if at else None
        if isinstance(before, FilterPoint):
            return self.group
        if isinstance(before, Segment):
            return 1 if before.batch is not None or before.batches_in else self.group
        return 1


def compiled(source: Any, stages: Sequence[Any], budget: Budget) -> Plan:
    """Sort stages into segments; ``budget`` is the pipeline's own for skipping examples."""
    loader = isinstance(source, LoaderSource)
    batch = next((s for s in stages if isinstance(s, Batch)), None)
    shuffled = any(isinstance(s, Shuffle) for s in stages)
    parts: list[Segment | FilterPoint | Echo | To] = []
    addressed = None if isinstance(source, IterableSource) else source
    segment: Segment | None = None if loader else Segment(addressed)
    batches = loader
    for stage in stages:
        if isinstance(stage, (Shuffle, Shard)):
            continue
        if isinstance(stage, (Echo, To)):
            if segment is not None:
                parts.append(segment)
            elif parts and isinstance(parts[-1], Echo):
                parts.append(Segment(batches_in=batches))
            parts.append(stage)
            segment = None
        else:
            segment = segment or Segment(batches_in=batches)
            segment.on_device = any(isinstance(part, To) for part in parts)
            if isinstance(stage, Batch):
                segment.batch = stage
                batches = True
            elif segment.batch is not None:
                segment.batch_maps.append(stage)
            else:
                segment.maps.append(stage)
    if segment is not None or isinstance(parts[-1] if parts else None, Echo):
        parts.append(segment or Segment(batches_in=batches))
    parts = [piece for part in parts for piece in _sifted(part, budget)]
    if parts and isinstance(parts[-1], FilterPoint):
        parts.append(Segment())
    buffer = next((s.buffer for s in stages if isinstance(s, Shuffle)), 1)
    group = batch.n if batch else 1
    return Plan(source, shuffled, share_of(stages), parts, group, buffer)


def _sifted(part: Segment | FilterPoint | Echo | To, shared: Budget) -> list[Any]:
    """Split a segment behind its maps, if some of what comes out of them may not survive."""
    if not isinstance(part, Segment) or part.batches_in:
        return [part]
    budgets = {m.account: m.budget for m in part.maps if m.budget is not None} | {0: shared}
    filters = any(isinstance(m, Filter) for m in part.maps)
    if part.source is None and not part.maps:
        return [part]
    if not filters and all(budget == RAISE for budget in budgets.values()):
        return [part]
    pieces: list[Any] = [Segment(part.source, part.maps), FilterPoint(budgets)]
    if part.batch is not None:
        pieces.append(Segment(batch=part.batch, batch_maps=part.batch_maps))
    return pieces


def share_of(stages: Sequence[Any]) -> Share | None:
    """Return which part of the epoch ``.shard()`` leaves to this rank; None without it."""
    for at, stage in enumerate(stages):
        if isinstance(stage, Shard):
            anew = any(isinstance(s, Shuffle) for s in stages[:at])
            return Share(stage.rank, stage.world, stage.uneven, anew)
    return None


class Failure:
    """What stands for an example that a stage failed on, until a batch needs it.

    Attributes:
        error: what is raised then.
        part: the segment that failed, by its place among the parts: the sift behind it may skip
            the example, later ones not. None where nothing may.
        account: the skip budget that it counts against (see ``FilterPoint``).
    """

    def __init__(self, error: BaseException, part: int | None = None, account: int = 0) -> None:
        self.error = error
        self.part = part
        self.account = account


class Rejected(Exception):
    """The error of a failure that is none: a filter left the example out."""


REJECTED = Failure(Rejected())
ENDED = -1
"""The part of a failure that ended a stream: nothing may skip it, nor leave it out of a batch."""


class Work:
    """What a segment does to its inputs, in one epoch; runs in any thread or process.

    Args:
        segment: the segment.
        seed, epoch: they key the random maps.
        source: the pipeline's source: with ``order`` it names an example that failed.
        order: the epoch's order, or None where there is no addressed source.
        part: the segment's place among the plan's parts.
        rank: this process among those that share an epoch: their draws differ.
        misdrawn: where it is entered that a random map draws from global generators.
    """

    def __init__(
        self,
        segment: Segment,
        seed: int,
        epoch: int,
        source: Any,
        order: Order | None,
        *,
        part: int,
        rank: int,
        misdrawn: list[Misdrawn],
    ) -> None:
        self.segment = segment
        self._part = part
        self.misdrawn = misdrawn
        self.reader: Any = None
        self._source = source
        self._order = order
        self._random = Rekeyed()
        self._maps = [self._ready(m, seed, epoch, rank) for m in segment.maps]
        self._batch_maps = [self._ready(m, seed, epoch, rank) for m in segment.batch_maps]
        self._first = 1 if segment.source is not None else 0
        self._cache = segment.cache
        self._cache_at = segment.maps.index(self._cache) if self._cache is not None else 0
        self._expected: set[int] = set()
        self.batch_at = self._first + len(self._maps)  # where the batch stage's time is counted
        self._after = self.batch_at + (segment.batch is not None)

    @property
    def worth_sending(self) -> bool:
        """Whether another process could do any of this."""
        reads = self.segment.source is not None and self.reader is None
        return reads or bool(self._maps or self._batch_maps)

    def copy_failure(self, error: Exception, ordinal: int) -> Failure:
        """Wrap what went wrong while a stored item was copied for one of its uses."""
        return Failure(self._located("echo (copying an item)", error, ordinal), self._part)

    def send_failure(self, error: Exception, ordinal: int) -> Failure:
        """Wrap why what a worker process made of an example cannot be sent back."""
        return Failure(self._located("worker process", error, ordinal), self._part)

    def batch_failure(self, error: Exception, number: int) -> Failure:
        """Wrap what went wrong while batch ``number`` was put together."""
        assert self.segment.batch is not None
        return Failure(StageError(self.segment.batch.name, error, batch=number))

    @staticmethod
    def _ready(
        stage: Map | Filter | CacheStage, seed: int, epoch: int, rank: int
    ) -> tuple[Map | Filter | CacheStage, Any, NDArray[np.uint64] | None]:
        if isinstance(stage, CacheStage):
            return stage, None, None
        if isinstance(stage, Filter):
            return stage, stage.compiled(REJECTED), None
        key = None
        if stage.random:
            key = rng.key(seed, epoch, rng.MAP + stage.position, rank)
        return stage, stage.compiled(), key

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Have what will be fetched read ahead, where that is possible."""
        if self.reader is None:
            return
        if self._cache is not None:
            held = self._cache.holds(self._source, indices.tolist())
            indices = indices[~np.array(held, bool)]
            self._expected.update(indices.tolist())  # what is read ahead has to be taken
        self.reader.expect(indices)

    def fetch(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Return examples by index; those that fail as ``Failure``.

        Behind a cache, as what ``apply`` takes for them: ``Hit`` or ``Miss``.
        """
        if self._cache is None:
            return self._read(indices, self.segment.source.fetch, ns)
        found = self._found(indices, ns)
        missing = [at for at, miss in enumerate(found) if type(miss) is Miss]
        step = 1 if self._cache.weighs else max(1, len(missing))  # then each one's cost is asked
        for start in range(0, len(missing), step):
            some = missing[start : start + step]
            began = time.perf_counter_ns()
            values = self._read(indices[some], self._source.fetch, ns)
            cost_ns = (time.perf_counter_ns() - began) // len(some)
            for at, value in zip(some, values, strict=True):
                found[at].value, found[at].cost_ns = value, cost_ns
                self._expected.discard(int(indices[at]))
                if type(value) is Failure:
                    found[at] = value
        return found

    def _found(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Look examples up in the cache."""
        assert self._cache is not None
        start = time.perf_counter_ns()
        found: list[Any]
        try:
            found = self._cache.find(self._source, indices.tolist(), self._expected)
        except CacheError as error:  # no example's failure: nothing may skip it
            found = [Failure(error)] * len(indices)
        except Exception as error:
            pass_on(error)
            if len(indices) == 1:
                failed = self._error(self._cache.name, error, index=int(indices[0]))
                found = [Failure(failed, self._part)]
            else:  # one by one, to know which
                found = [
                    self._found(indices[i : i + 1], [0] * len(ns))[0] for i in range(len(indices))
                ]
        ns[self._first + self._cache_at] += time.perf_counter_ns() - start
        return found

    def _read(self, indices: NDArray[np.int64], fetch: Any, ns: list[int]) -> list[Any]:
        start = time.perf_counter_ns()
        reads = self.reader.fetch if self.reader is not None else fetch
        values: list[Any]
        try:
            values = reads(indices)
        except Exception as error:
            pass_on(error)
            if len(indices) == 1:
                failed = self._error(self.segment.source.name, error, index=int(indices[0]))
                values = [Failure(failed, self._part)]
            else:  # one by one, to know which
                each = (indices[i : i + 1] for i in range(len(indices)))
                values = [self._read(one, fetch, [0])[0] for one in each]
        ns[0] += time.perf_counter_ns() - start
        return values

    def apply(
        self,
        values: list[Any],
        ordinals: Sequence[int],
        use_keys: Sequence[int] | None,
        ns: list[int],
    ) -> None:
        """Run the maps over ``values``, in place, stage by stage."""
        behind = 0
        if self._cache is not None:
            behind = self._cache_at + 1
            for i, value in enumerate(values):
                if type(value) is Hit:
                    values[i] = REJECTED if value.left_out else value.value
                elif type(value) is Miss:
                    values[i] = self._admitted(value, ordinals[i], ns)
        self._apply(slice(behind, None), values, ordinals, use_keys, ns)

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
                    self._source,
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
        if self._source.path(miss.index) is None:
            (value,) = self._source.fetch(np.array([miss.index]))
        else:
            value = miss.value  # of a file: maps cannot have changed it
        one = [value]
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
        for number, (stage, fn, key) in enumerate(
            self._maps[which], self._first + (which.start or 0)
        ):
            start = time.perf_counter_ns()
            fn = self._watched(stage, fn)
            i = 0
            while i < len(values):
                try:
                    while i < len(values):
                        value = values[i]
                        if type(value) is not Failure:
                            if key is None:
                                made = fn(value)
                            else:
                                use_key = use_keys[i] if use_keys is not None else 0
                                rng = on_device and on_device(key, ordinals[i], use_key, value)
                                made = fn(value, rng or place(key, ordinals[i], use_key))
                            if made is None and type(stage) is Map:
                                raise returned_nothing("batch" if in_batches else "example")
                            values[i] = made
                        i += 1
                except Exception as error:
                    pass_on(error)
                    failed = self._located(stage.name, error, ordinals[i])
                    values[i] = Failure(failed, self._part, stage.account)
                    i += 1
            ns[number] += time.perf_counter_ns() - start

    def finish(self, batch: Any, ordinal: int, use_key: int, ns: list[int]) -> Any:
        """Run the maps behind the batching stage over a batch; may return a ``Failure``."""
        for number, (stage, fn, key) in enumerate(self._batch_maps, self._after):
            start = time.perf_counter_ns()
            fn = self._watched(stage, fn)
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

    def _watched(self, stage: Map | Filter | CacheStage, fn: Any) -> Any:
        """Return a stage's function; that of a random map is looked at in its first calls."""
        if not isinstance(stage, Map) or not stage.random or not stage.draws.looks:
            return fn
        position = stage.position

        def tell(names: str) -> None:
            self.misdrawn.append((position, names))

        return stage.draws.watched(fn, tell)

    def _located(self, stage: str, error: Exception, ordinal: int) -> StageError:
        if self.segment.batches_in:
            return StageError(stage, error, batch=ordinal)
        if self._order is None:
            return StageError(stage, error, number=ordinal)
        return self._error(stage, error, index=self._order.index(ordinal))

    def _error(self, stage: str, error: Exception, index: int) -> StageError:
        return StageError(stage, error, index=index, path=self._source.path(index))


def warn_of_misdrawn(plan: Plan, misdrawn: list[Misdrawn]) -> None:
    """Warn of random maps that draw from global generators, once of each."""
    segments = [part for part in plan.parts if isinstance(part, Segment)]
    maps = [m for s in segments for m in (*s.maps, *s.batch_maps) if isinstance(m, Map)]
    while misdrawn:
        position, names = misdrawn.pop()
        stage = next(m for m in maps if m.random and m.position == position)
        if stage.draws.settle():
            warn(
                f"{stage.name} drew from {names} in each of its first calls, and nothing from rng: "
                "only what rng draws is the same for any workers. Draw from rng alone"
            )


def device_generator(key: NDArray[np.uint64], ordinal: int, use_key: int, batch: Any) -> Any:
    """Return a ``torch.Generator`` placed on a batch's device, or None without tensors."""
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            import torch

            generator = torch.Generator(leaf.device)
            generator.manual_seed(rng.integer_at(key, ordinal, use_key))
            return generator
    return None
