"""Echoing: a stage that keeps items and uses them again; the pool of an epoch, and its policy."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree, resources
from stoker.basics.resources import format_bytes
from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.echoing.adaptive import AdaptiveEcho, GreedyPolicy, Policy, Replay
from stoker.echoing.rank_sync import UNIT, WINDOW_STEPS, AgreedPolicy, Ranks
from stoker.echoing.stream import EchoStream, FixedEcho, PoolStart
from stoker.engine.checkpoint import Bounds, PoolSize
from stoker.engine.items import PolledStream
from stoker.engine.setup import StreamContext
from stoker.engine.work.step import Failure
from stoker.errors import CombinationError, StateError
from stoker.frameworks.rank import process_group
from stoker.schedule import rng
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.factor import EvenUses, exact_factor
from stoker.schedule.pools.adaptive import (
    MOST_DISTANCE,
    MOST_FACTOR,
    AdaptivePool,
    longest_distance,
)
from stoker.schedule.pools.fixed import Pool
from stoker.stages.stage import ChainStage, ChainView, StreamStage, Traits, first_with

Factor = float | Fraction | str
"""``"auto"``, or the mean uses of each fresh item, at least 1."""
# docs/evidence-method.md: pools of 4, 16 and 64 batches save 1.4, 2.2 and 1.9 before augmentation.
DEFAULT_POOL_BATCHES = 16
# Of usable memory: a pool of default size leaves nine tenths to the job. Chosen, not measured.
DEFAULT_POOL_MEMORY_FRACTION = 0.1
# docs/evidence-method.md, batch echoing at B = 32: 4 saves few fresh examples (1.1, 1.2), 8 needs
# more of them than no echo (0.72).
DEFAULT_MAX_FACTOR = 4
# docs/evidence.md, "How many uses": at R = 8, of examples before augmentation, 8 uses at most end
# with a lower loss than 4 on three tasks; 16 are level with 8. At R = 4, 8 are no worse.
DEFAULT_MAX_FACTOR_BEFORE_AUGMENTATION = 8
# Trained with a factor of 4: loss falls with the distance up to 4 to 8 steps (images), 8 to 16
# (text).
DEFAULT_MIN_DISTANCE = 8
# The share of memory that stays free, however large a pool the user asks for. Chosen, not measured.
_KEPT_FREE_FRACTION = 0.05
_log = logging.getLogger("stoker")


@dataclass(frozen=True)
class Echo(StreamStage):
    """The stage ``.echo(factor, pool=...)``.

    Attributes:
        counts: how often each item is used, by the exact factor (a factor of 1 makes no stage);
            None if the factor follows the stall.
        max_factor: how often an item is used at most.
        min_distance: the least number of steps between two uses of an item, if the factor follows
            the stall.
        pool: the pool's size in items, or None.
        pool_bytes: the pool's size in bytes, or None; with neither, the default.
    """

    counts: EvenUses | None
    max_factor: int
    min_distance: int
    pool: int | None
    pool_bytes: int | None
    awaits_augmentation: bool = field(default=False, compare=False)
    """Whether ``max_factor`` is the default still, which a random map behind it raises."""
    traits = Traits(repeats=True)
    kind = "echo"
    is_decided = False

    @staticmethod
    def of(
        factor: Factor,
        max_factor: Any,
        min_distance: Any,
        pool: Any,
    ) -> Echo | None:
        """Check the arguments of ``.echo()``; None for a factor of 1, which changes nothing."""
        size, size_bytes = _pool_size(pool)
        if factor == "auto":
            most, apart = _max_factor(max_factor), _min_distance(min_distance)
            waits = max_factor is None
            return Echo(None, most, apart, size, size_bytes, awaits_augmentation=waits)
        if isinstance(factor, str):
            raise TypeError(
                f'the echoing factor is "auto" or a number of at least 1, not {factor!r}'
            )
        if max_factor is not None or min_distance is not None:
            raise CombinationError('max_factor= and min_distance= go with .echo("auto")')
        counts = EvenUses(exact_factor(factor))
        if counts.most == 1:
            return None
        return Echo(counts, counts.most, DEFAULT_MIN_DISTANCE, size, size_bytes)

    @property
    def call(self) -> str:
        if self.counts is None:
            return f"echo(auto, max_factor={self.max_factor})"
        return f"echo({float(self.counts.factor):g})"

    @property
    def is_adaptive(self) -> bool:
        """True if the factor follows the stall."""
        return self.counts is None

    def bind(self, before: ChainView) -> Echo:
        """Note whether a random map stands before it.

        Raises ValueError after another echo.
        """
        other = first_with(before.stages, lambda t: t.repeats)
        if other is not None:
            raise CombinationError(
                f".{self.call} cannot follow {other.name}: echo once, with the product of the "
                "factors or a larger max_factor="
            )
        awaits = self.awaits_augmentation and not (
            before.is_batched or first_with(before.stages, lambda t: t.is_random)
        )
        return replace(self, awaits_augmentation=awaits)

    def followed_by(self, stage: ChainStage) -> Echo:
        if not (self.awaits_augmentation and stage.traits.is_random):
            return self
        most = DEFAULT_MAX_FACTOR_BEFORE_AUGMENTATION
        return replace(self, max_factor=most, awaits_augmentation=False)

    def begin(self, chain: ChainView) -> None:
        """Refuse an adaptive echo that nothing prepares for."""
        if self.is_adaptive and chain.follows_clock and not chain.has_workers:
            raise CombinationError(
                f"{self.name} needs workers that prepare data during training, and .workers(0) has "
                "none: give it workers, or a fixed factor"
            )

    def stream(self, upstream: PolledStream, context: StreamContext) -> EchoStream[Any]:
        layer, setup, tally = context.layer, context.setup, context.tally
        make = functools.partial(_make_pool, self, context)
        if not self.is_adaptive:
            return FixedEcho(layer, make, upstream, tally)
        policy = self._policy(upstream, context)
        steps = setup.steps if setup.flow.carries_pool and setup.ranks is None else None
        return AdaptiveEcho(layer, make, upstream, tally, context.worker_pool, policy, steps)

    def _policy(self, upstream: PolledStream, context: StreamContext) -> Policy:
        setup = context.setup
        if setup.record is not None:
            return Replay(setup.record.of(setup.epoch), context.planning)
        if setup.ranks is None:
            return GreedyPolicy()
        return self._agree_policy(upstream, context, setup.ranks)

    def _agree_policy(
        self, upstream: PolledStream, context: StreamContext, ranks: Ranks
    ) -> AgreedPolicy:
        """Return the policy that ranks agree on. Raises ValueError if they cannot agree."""
        setup, flow = context.setup, context.setup.flow
        total = upstream.total
        if upstream.leaves_out:
            total = context.skip_log.examples
        if flow.source.yields_batches:
            with contextlib.suppress(TypeError):
                total = flow.source.count()
        if (total is None or flow.has_filter) and setup.steps is None:
            raise ValueError(
                f"{self.name} across ranks: how many steps an epoch has cannot be known before "
                "its end here; .steps(n) says how many all ranks take"
            )
        share = flow.orders.selection.share
        uneven = flow.source.yields_batches or (share is not None and share.uneven)
        if flow.has_filter or (uneven and setup.steps is not None):  # .steps() ends epochs
            total = None
        return AgreedPolicy(
            ranks,
            self.max_factor,
            context.layer.group,
            total,
            setup.autotuner.factor or UNIT,
            context.planning,
            leaky=context.layer.leaks,
        )

    def read_node(self, saved: Any, bounds: Bounds) -> PoolStart:
        return PoolStart.from_json(self, saved, bounds)

    def check_leg(self, chain: ChainView) -> None:
        """Refuse a pool whose items only its own rank can make again."""
        if not chain.source.is_indexed:
            raise StateError(f"how far .{self.name} has read a stream is the rank's own")
        if self._holds_batches(chain):
            raise StateError(f"the batches in the pool of .{self.name} are the rank's own")
        joins = first_with(chain.stages, lambda t: t.joins)
        if joins is not None:
            raise StateError(
                f"what .{joins.name} joins before or behind the pool of .{self.name} is the rank's "
                "own"
            )
        if not chain.may_leave_out:
            return
        raise StateError(
            f"what is left out in front of the pool of .{self.name}, or behind it, is the rank's "
            "own"
        )

    def on_leg(self, leg: EpochRest, rank: int) -> Echo:
        """Return it with the uses that are left of the items that the pool holds at its begin."""
        if leg.held is None or self.counts is None:
            return self
        own = leg.held.of_rank(rank)
        counts = replace(self.counts, remaining=own.remaining, spent=own.spent)
        return replace(self, counts=counts)

    def count(self, items: int) -> int:
        """Return the uses of so many fresh items. Raises TypeError if it is unknown beforehand."""
        if self.counts is None:
            raise TypeError(
                'the number of batches is not known under .echo("auto"), which follows '
                "the stall; .steps(n) ends an epoch after n"
            )
        return self.counts.of_first(items)

    def signature(self) -> str:
        """Return its factor and pool; without the pool if it is adaptive, as that may change."""
        if self.counts is None:
            return f"echo(auto, max_factor={self.max_factor}, min_distance={self.min_distance})"
        size = self.pool if self.pool is not None else self.pool_bytes
        return f"echo({self.counts.factor}, pool={size})"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Describe its place in the echoing paper's words, its pool, and its policy."""
        place, pool = self._insertion_point(chain), self._pool(chain, pool_size)
        return f"  {place}; {pool}{self._decides(chain)}{self._describe_distance(chain, pool_size)}"

    def smallest_distinct(self, group: int) -> int:
        """Return the least pool, in items, that keeps the uses of a batch distinct.

        For an adaptive echo it is the least pool with which a batch may consist of repeats alone,
        none of them from the batch before.
        """
        return (2 if self.is_adaptive else self.max_factor) * group

    def check_holds(self, batch: int) -> None:
        """Raise ValueError if its pool is smaller than a batch."""
        if self.pool is not None and self.pool < batch:
            raise CombinationError(
                f"{self.name}: a pool of {self.pool} examples is smaller than a batch of "
                f"{batch}; give it at least {self.smallest_distinct(batch)} to keep the uses in "
                "a batch distinct"
            )

    def _insertion_point(self, chain: ChainView) -> str:
        """Name its place in the chain (Choi et al., arXiv 1907.05550, section 2)."""
        at = chain.stages.index(self)
        before, behind = chain.stages[:at], chain.stages[at:]
        if first_with(before, lambda t: t.moves):
            return "batch echoing on the device"
        if self._holds_batches(chain):
            return "batch echoing"
        if first_with(before, lambda t: t.is_random):
            return "example echoing after augmentation"
        if first_with(behind, lambda t: t.is_random):
            return "example echoing before augmentation"
        return "example echoing (nothing is augmented)"

    def _holds_batches(self, chain: ChainView) -> bool:
        before = chain.stages[: chain.stages.index(self)]
        return chain.source.yields_batches or bool(first_with(before, lambda t: t.batches))

    def _pool(self, chain: ChainView, pool_size: PoolSize) -> str:
        unit = "batches" if self._holds_batches(chain) else "examples"
        if pool_size.size:
            held = f", {format_bytes(pool_size.bytes)}" if pool_size.item_bytes else ""
            return f"pool of {pool_size.size:,} {unit}{held}"
        if self.pool is not None:
            return f"pool of {self.pool:,} {unit}"
        if self.pool_bytes is not None:
            return f"pool of {format_bytes(self.pool_bytes)}"
        unit = "batches" if chain.is_batched else "examples"
        return f"pool of {DEFAULT_POOL_BATCHES} {unit}, at most 10 % of usable memory"

    def _decides(self, chain: ChainView) -> str:
        """Name the policy, if the factor is not fixed."""
        if not self.is_adaptive:
            return ""
        if not chain.follows_clock:
            return "; replays a record"
        ranks = process_group()
        if ranks is None or ranks[1] == 1:
            return "; follows the stall, on demand"
        return f"; planned: {ranks[1]} ranks agree every {WINDOW_STEPS} batches"

    def _describe_distance(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Describe the distance of copies, if there is a rule."""
        if not self.is_adaptive:
            return ""
        size, steps = pool_size.size or self.pool, self.min_distance
        if size is not None:
            group = 1 if self._holds_batches(chain) else chain.batch_size
            steps = longest_distance(steps, size, group)
        return f", copies at least {steps} steps apart"


def _max_factor(most: Any) -> int:
    if most is None:
        return DEFAULT_MAX_FACTOR
    if not is_whole_number(most):
        raise TypeError(f"max_factor= takes a whole number, not {most!r}")
    if most < 2:
        raise ValueError(f"max_factor= is at least 2, not {most}: .echo(1) echoes nothing")
    if most > MOST_FACTOR:
        raise ValueError(f"max_factor= is at most {MOST_FACTOR:,}, not {most:,}")
    return int(most)


def _min_distance(steps: Any) -> int:
    if steps is None:
        return DEFAULT_MIN_DISTANCE
    if not is_whole_number(steps):
        raise TypeError(f"min_distance= takes a whole number of steps, not {steps!r}")
    if steps < 2:
        raise ValueError(
            f"min_distance= is at least 2 steps, not {steps}: an item is never used "
            "in two steps in a row"
        )
    if steps > MOST_DISTANCE:
        raise ValueError(f"min_distance= is at most {MOST_DISTANCE:,}, not {steps:,}")
    return int(steps)


def _pool_size(pool: Any) -> tuple[int | None, int | None]:
    if pool is None:
        return None, None
    if isinstance(pool, str):
        size = resources.parse_bytes(pool)
        if not size:
            raise ValueError(f"a pool of {pool!r} holds nothing")
        return None, size
    if not is_whole_number(pool):
        raise TypeError(f"pool= takes a number of items or a size such as '2GiB', not {pool!r}")
    if pool < 1:
        raise ValueError(f"a pool holds at least one item, not {pool}")
    return int(pool), None


def _make_pool(echo: Echo, context: StreamContext, stream: EchoStream[Any]) -> Any:
    """Return the pool of an epoch, at the first use: its size may depend on the first item."""
    setup, group = context.setup, context.layer.group
    known = setup.pool_size
    record = setup.record
    if record is not None and record.echo is not None and echo.is_adaptive:
        known.size = record.echo.size
    if not known.size:
        _choose_size(echo, context, stream)
    if known.size < echo.smallest_distinct(group):
        what = "repeat a batch at once" if group == 1 else "hold an example twice"
        what = "find nothing to use again" if echo.is_adaptive else what
        warn(
            f"{echo.name}: with a pool of {known.size} a batch may {what}; "
            f"at least {echo.smallest_distinct(group)} keep uses apart"
        )
    counts = echo.counts
    if counts is None:
        return AdaptivePool(echo.max_factor, echo.min_distance, known.size, group)
    assert isinstance(stream, FixedEcho)
    key = pool_key(setup.seed, setup.epoch, context.leg)
    # The pool takes a whole epoch of less than two groups at once.
    return Pool(counts, known.size, group, key, stream.count(2 * group if group > 1 else 0))


def _choose_size(echo: Echo, context: StreamContext, stream: EchoStream[Any]) -> None:
    """Choose the pool's size; a size in bytes needs its first item."""
    known, group = context.setup.pool_size, context.layer.group
    # Of a loader, and on a device, the first batch is looked at to say what the pool may take.
    looks = context.setup.flow.source.yields_batches or context.layer.on_device
    if echo.pool is not None and not looks:
        known.size = echo.pool
        return
    value = stream.first_value(context.worker_pool)
    if value is None or type(value) is Failure:  # of which nothing can be measured
        known.size = echo.pool or DEFAULT_POOL_BATCHES * group
        return
    each = max(1, pytree.nbytes(value))
    device = next((d for d in map(pytree.device_of, pytree.leaves(value)) if d), None)
    usable = stream.upstream.usable_bytes
    if device:
        usable = functools.partial(resources.usable_device_bytes, device)
    known.size, known.item_bytes = _size(echo, each, group, usable), each
    if device:
        _log.warning(
            "%s: the pool may hold %d batches, %s of the memory of %s (pool= sets it)",
            echo.name, known.size, resources.format_bytes(known.bytes), device,
        )  # fmt: skip


def pool_key(seed: int, epoch: int, leg: EpochRest | None) -> NDArray[np.uint64]:
    """Return the key of a pool's draws; each leg of an epoch has another one."""
    steps = 0 if leg is None else leg.before.steps
    return rng.key(seed, epoch, rng.ECHO, steps)


def _size(echo: Echo, each: int, group: int, usable: Callable[[], int]) -> int:
    """Return how many items of ``each`` bytes a pool holds.

    If memory is short, fewer than the user's bytes allow, with a warning. Raises ValueError if that
    is less than a batch.
    """
    if echo.pool is not None:
        return echo.pool
    if echo.pool_bytes is None:
        allowed = int(usable() * DEFAULT_POOL_MEMORY_FRACTION)
        return max(group, min(DEFAULT_POOL_BATCHES * group, allowed // each))
    room = int(usable() * (1 - _KEPT_FREE_FRACTION))
    allowed = min(echo.pool_bytes, room)
    size = allowed // each
    if size < group:
        raise ValueError(
            f"{echo.name}: a pool of {resources.format_bytes(allowed)} holds {size} "
            f"items of {resources.format_bytes(each)}, less than a batch of {group}; "
            "give the pool more, or make batches smaller"
        )
    if allowed < echo.pool_bytes:
        warn(
            f"{echo.name}: the pool takes {resources.format_bytes(allowed)} instead of "
            f"{resources.format_bytes(echo.pool_bytes)}: there is no more memory"
        )
    return size
