"""The stage ``.balance(sizes)``: each global batch is dealt so that ranks have equal work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stoker.engine.checkpoint import PoolSize
from stoker.errors import CombinationError
from stoker.schedule.costs import Costs
from stoker.schedule.packing import PackRule
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, numbers_of
from stoker.stages.shard import Shard
from stoker.stages.stage import ChainStage, ChainView, Traits, first_with


@dataclass(frozen=True)
class Balance(ChainStage):
    """The stage ``.balance(sizes)``; behind ``.pack(length, sizes=)``, ``.balance()``.

    Attributes:
        sizes: a number for each example, or the field of the source that has it.
        cost: makes costs of sizes; None where they are costs.
        costs: of the source's examples, once it is bound.
        world: the number of ranks then.
        rule: how the packed sequences before it are planned, with the costs of documents by size.
    """

    sizes: Any = field(compare=False, repr=False)
    cost: Callable[[Any], Any] | None = field(compare=False, repr=False)
    costs: Costs | None = None
    world: int = 1
    rule: PackRule | None = None
    traits = Traits(selects=True, keeps_fields=True)

    @staticmethod
    def of(sizes: Any, cost: Any) -> Balance:
        """Check the arguments of ``.balance()``."""
        if cost is not None and not callable(cost):
            raise TypeError(f".balance() takes cost= as a function, not {cost!r}")
        return Balance(sizes, cost)

    @property
    def call(self) -> str:
        return "balance(...)"

    def bind(self, before: ChainView) -> Balance:
        """Find the costs of the source's examples, behind a shard that deals a shuffled epoch.

        Raises ValueError, TypeError or LookupError where there is no such number for each, or
        where examples cannot be dealt by it.
        """
        packs = first_with(before.stages, lambda t: t.joins)
        if packs is not None and packs is before.stages[-1] and packs.batch_rule is not None:
            return self._of_packs(packs.batch_rule, before)
        source = before.source
        if not isinstance(source, IndexedSource):
            raise CombinationError(
                ".balance() deals examples by their numbers, and a stream has none"
            )
        if source.has_own_order:
            raise CombinationError(
                ".balance() deals by cost, and the examples of a mixture are dealt by part: leave "
                "it out"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.repeats or t.batches or t.joins
        ) or next((each for each in before.stages if isinstance(each, Balance)), None)
        if stage is not None:
            more = ", or give .pack() its sizes=" if stage is packs else ""
            raise CombinationError(
                f".balance() cannot follow {stage.name}: put it behind .shard(){more}"
            )
        if first_with(before.stages, lambda t: t.shuffles) is None:
            raise CombinationError(".balance() deals a shuffled epoch: put .shuffle() before it")
        shard = first_with(before.stages, lambda t: t.shards)
        if not isinstance(shard, Shard):
            raise CombinationError(".balance() deals what ranks get: put .shard() before it")
        if shard.uneven or shard.padding is not None:
            other = "remainder='uneven'" if shard.padding is None else str(shard.padding)
            raise CombinationError(
                ".balance() gives ranks equally many examples of each global batch: leave "
                f"{other} out of .shard()"
            )
        if self.sizes is None:
            raise TypeError(".balance() takes a number for each example")
        sizes = numbers_of(source, self.sizes, ".balance()")
        return replace(self, costs=self._costs(sizes, self.cost), world=shard.world)

    def _of_packs(self, rule: Any, before: ChainView) -> Balance:
        """Return it for packed sequences, which cost what their documents do."""
        shard = first_with(before.stages, lambda t: t.shards)
        if self.sizes is not None or not isinstance(shard, Shard):
            instead = "put .shard() before .pack()" if self.sizes is None else "leave sizes out"
            raise CombinationError(f".balance() deals what .pack() made by its sizes=: {instead}")
        costs = self._costs(np.arange(rule.length + 1), self.cost or np.square)
        rule = replace(rule, costs=costs)
        return replace(self, costs=costs, world=shard.world, rule=rule)

    def _costs(self, sizes: Any, cost: Callable[[Any], Any] | None) -> Costs:
        made = sizes if cost is None else np.asarray(cost(sizes))
        if made.shape != sizes.shape or made.dtype.kind not in "iuf":
            raise ValueError(
                f".balance(cost=) is called with all sizes, {sizes.dtype} {list(sizes.shape)}, "
                f"and returns as many numbers, not {made.dtype} {list(made.shape)}"
            )
        return Costs.of(made, ".balance()", scaled=True)

    @property
    def batch_rule(self) -> PackRule | None:
        return self.rule

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Balance:
        return replace(self, world=world)

    def select(self, selection: Selection) -> Selection:
        assert self.costs is not None
        return selection if self.rule is not None else selection.balance(self.costs)

    def signature(self) -> str:
        assert self.costs is not None
        return f"balance({self.costs.digest})"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say what is dealt by cost, and where that gains little or nothing."""
        each = chain.batch_size
        if each == 1 or self.world == 1:
            few = "one rank" if self.world == 1 else "one example a rank in a step"
            return f"  with {few} there is nothing to balance"
        text = f"  inside each {self.world * each:,} examples, so that ranks have equal work"
        if each == 2:
            text += "; two examples a rank leave little to choose: batches by length gain more"
        return text
