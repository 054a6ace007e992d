"""A segment: stages whose work on an item is done in one task, between two streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

from stoker.basics.generators import SeededGenerator
from stoker.basics.thread_safety import is_thread_safe
from stoker.engine.work.cached import Cached
from stoker.engine.work.held_generators import find_generators
from stoker.engine.work.step import RowStep, Stack
from stoker.sources.origin import IndexedSource, UserObject
from stoker.sources.source import Rows


class Behind(NamedTuple):
    """What stands behind a layer of a flow (``engine/flow.py``).

    Attributes:
        into_pool: whether a pool keeps its outputs.
        is_followed: whether an adaptive echo follows, directly or behind a device.
        in_turn: whether each output is waited for in its turn; False if later ones may come first.
        leaks: whether something further on may drop items.
    """

    into_pool: bool = False
    is_followed: bool = False
    in_turn: bool = True
    leaks: bool = False


_NOTHING = Behind()


@dataclass
class Segment:
    """Stages that run together: examples in, examples or batches out; or batches throughout.

    Attributes:
        source: the source, in the first segment of an indexed chain; else None.
        operations: the maps and filters on single inputs, in order.
        cache: the cache among them, before operation number ``cache_at``.
        batch: the batching stage, if it is in this segment.
        batch_maps: the maps behind the batching stage.
        batches_in: whether the inputs are batches.
        on_device: whether the segment comes after ``.to_torch(device)``.
        at: the segment's place among the parts.
        behind: what stands behind it.
        renumbered: whether the inputs were packed, and so have numbers of their own.
        joins: the length of the full sequences that come as pieces, and are joined here; 0 if none
            do.
        draws: whether its code was seen to draw from global generators, in the consumer's thread.
    """

    source: IndexedSource | None = None
    operations: list[RowStep] = field(default_factory=list)
    cache: Cached | None = None
    cache_at: int = 0
    batch: Stack | None = None
    batch_maps: list[RowStep] = field(default_factory=list)
    batches_in: bool = False
    on_device: bool = False
    at: int = 0
    behind: Behind = _NOTHING
    renumbered: bool = False
    joins: int = 0
    draws: bool = False
    kind: ClassVar[None] = None
    needs_work_behind: ClassVar[bool] = False
    is_decided: ClassVar[bool] = False

    @property
    def ends_examples(self) -> bool:
        return self.batches_in

    def look_behind(self, behind: Behind) -> Behind:
        """Note what stands behind it; return what stands behind the layer before it."""
        self.behind = behind
        return Behind(leaks=behind.leaks)

    def read(self, nodes: Any, bounds: Any) -> list[Any]:
        """Change the ``Bounds`` of a saved state to those behind it; it has no node there."""
        if self.batch is not None:
            bounds.pass_batch(self.batch)
        return []

    def open(self, upstream: Any, epoch: Any) -> Any:
        """Return its stream in an ``EpochStreams``."""
        return epoch.open_segment(self, upstream)

    @property
    def is_plain(self) -> bool:
        """Whether the segment does nothing to single inputs."""
        return not self.operations and self.cache is None

    @property
    def has_filter(self) -> bool:
        """Whether a filter may drop inputs."""
        return any(not operation.makes_values for operation in self.operations)

    @property
    def rows(self) -> Rows | None:
        """Gathers batches straight from arrays; None if something is done to single examples."""
        if self.source is None or not self.only_stacks or (self.batch and self.batch.is_planned):
            return None
        return self.source.rows

    @property
    def releases_gil(self) -> bool:
        """Whether all user code in it is image functions, which release the GIL."""
        if self.is_plain or self.batch_maps or self.cache is not None:
            return False
        is_own = self.source is None or not self.source.runs_user_code
        collates = self.batch is not None and self.batch.collate is not None
        return is_own and not collates and all(each.releases_gil for each in self.operations)

    @property
    def stacks(self) -> bool:
        """Whether outputs are batches of copies."""
        return self.batch is not None and self.batch.collate is None

    @property
    def stacks_cached(self) -> bool:
        """Whether what this host's cache holds is only copied into a batch."""
        if self.cache is None or self.cache.cache.is_shared_by_nodes or self.has_filter:
            return False
        return self.cache_at == len(self.operations) and self.stacks and not self.batch_maps

    @property
    def only_stacks(self) -> bool:
        """Whether inputs are only copied into a batch."""
        return self.is_plain and self.stacks

    @property
    def joins_batches(self) -> bool:
        """Whether full sequences are joined straight into the rows of a batch.

        Not for users' maps of batches: processes get the sequences, joined, and make the batch.
        """
        return self.joins > 0 and self.only_stacks and not self.users_code

    @cached_property
    def reading(self) -> int:
        """The number of first operations that only read their inputs."""
        return sum(1 for _ in takewhile(lambda each: each.only_reads, self.operations))

    @property
    def shares_items(self) -> bool:
        """Whether a pool may lend it items without copies: its first operation only reads them."""
        return self.reading > 0 or self.only_stacks

    @property
    def names(self) -> list[str]:
        """The names of the stages with a time of their own, in order."""
        names = [operation.name for operation in self.operations]
        if self.cache is not None:
            names.insert(self.cache_at, self.cache.name)
        if self.source is not None:
            names.insert(0, self.source.name)
        if self.batch is not None:
            names.append(self.batch.name)
        return names + [stage.name for stage in self.batch_maps]

    @property
    def callers(self) -> list[IndexedSource | RowStep | Stack]:
        """The source and the stages, which may call the user's objects, in order."""
        each = [self.source, *self.operations, self.batch, *self.batch_maps]
        return [one for one in each if one is not None]

    @cached_property
    def users_code(self) -> list[UserObject]:
        """The user's objects that it calls, in order, but for what is declared thread-safe."""
        return [
            each
            for one in self.callers
            for each in one.user_objects()
            if not is_thread_safe(each.value)
        ]

    @cached_property
    def calls_users(self) -> list[bool]:
        """Whether each of the callers calls code that is not stoker's own."""
        return [any(map(_is_users, one.user_objects())) for one in self.callers]

    def find_generators(self) -> list[list[SeededGenerator]]:
        """Return the generators that the user's objects hold, by caller."""
        return [
            find_generators(each.value for each in one.user_objects() if _is_users(each))
            for one in self.callers
        ]

    def parts(self) -> list[tuple[str, object]]:
        """Return the source and the stages, each by its name."""
        parts = [self.source, *self.operations, self.cache, self.batch, *self.batch_maps]
        return [(part.name, part) for part in parts if part is not None]

    def counters(self) -> list[int]:
        """Return zeros: nanoseconds in each stage, examples through each, ``TIMED``, bytes read."""
        return [0] * (2 * len(self.names) + 5)


def _is_users(of: UserObject) -> bool:
    return str(getattr(of.value, "__module__", "")).partition(".")[0] != "stoker"
