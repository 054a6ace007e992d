"""Batches that are planned from sizes and keys.

That is ``.batch(tokens=...)`` and ``.batch(n, key=...)``. What is in them is decided by numbers
alone, before anything is read, so they stand where every example of the epoch comes by, once:
behind ``.shuffle()`` and ``.shard()``, caches and maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.compact_integers import check_integer
from stoker.basics.validate import is_whole_number
from stoker.engine.checkpoint import PoolSize
from stoker.engine.skip import RAISE
from stoker.errors import CombinationError
from stoker.schedule.batch_plan import BatchRule
from stoker.schedule.costs import Costs
from stoker.sources.origin import IndexedSource, keys_of, numbers_of
from stoker.stages.balance import Balance
from stoker.stages.batching.batch import Batch
from stoker.stages.shard import Shard
from stoker.stages.stage import ChainStage, ChainView, first_with

# A window has at least so many places, or so many global batches' worth of them. With fewer, a
# batch holds more padding, and more is carried on (bench/results/balance.json).
_WINDOW_PLACES = 2_000
_WINDOW_STEPS = 16
# A window of the whole epoch would put the same examples together in every epoch. Chosen, not
# measured; as is that a window of fewer steps would hold much padding.
_FEWEST_WINDOWS = 4
_FEWEST_STEPS = 4


MEASURED = 1_000
"""Examples whose sizes are handed over together. Chosen, not measured."""


def measured(parts: Sequence[Any]) -> NDArray[Any]:
    """Return what a function has measured of all examples, in one array.

    Raises TypeError where it did not return numbers.
    """
    arrays = [np.asarray(part) for part in parts] or [np.zeros(0, np.int32)]
    if any(part.ndim != 1 or part.dtype.kind not in "biuf" for part in arrays):
        raise TypeError("measure(fn): fn returns a number for each example")
    numbers = np.concatenate(arrays)
    if numbers.dtype.kind == "f":
        return numbers
    bounds = np.iinfo(np.int32)
    is_small = bounds.min <= numbers.min(initial=0) and numbers.max(initial=0) <= bounds.max
    return numbers.astype(np.int32 if is_small else np.int64)


@dataclass(frozen=True)
class Sizing:
    """The arguments of ``.batch()`` that say how large examples are, and which go together."""

    tokens: Any = None
    size: Any = None
    key: Any = None
    multiple_of: Any = None
    max_rows: Any = None
    padded: Any = True

    @property
    def is_given(self) -> bool:
        """Whether any was given."""
        return any(value is not None for value in (self.tokens, self.size, self.key)) or (
            (self.multiple_of, self.max_rows, self.padded) != (None, None, True)
        )

    def check(self, n: Any, drop_last: Any) -> None:
        """Raise ValueError or TypeError for what does not go together, or is no number."""
        if (n is None) == (self.tokens is None):
            raise TypeError(
                ".batch() takes the number of examples in a batch, n, or tokens= with size=, and "
                "not both (max_rows= limits the examples of a batch of tokens)"
            )
        if (self.tokens is None) != (self.size is None):
            arguments, lacks = ("tokens", "size") if self.size is None else ("size", "tokens")
            raise CombinationError(
                f".batch({arguments}=...) needs {lacks}=: a batch holds tokens= of what size= says"
            )
        if self.tokens is None and self.key is None:
            raise CombinationError(
                ".batch(n) plans nothing ahead: multiple_of=, max_rows= and padded= are for tokens="
            )
        if self.tokens is None and (self.multiple_of, self.max_rows, self.padded) != (
            None,
            None,
            True,
        ):
            raise CombinationError(
                ".batch(n, key=...) has no sizes: multiple_of=, max_rows=, padded= are for tokens="
            )
        if drop_last:
            raise CombinationError(
                ".batch(tokens=, key=) leaves out fewer examples than there are ranks, and no last "
                "batch: remove drop_last=True"
            )
        if not isinstance(self.padded, bool):
            raise TypeError(f".batch() takes padded=True or False, not {self.padded!r}")
        if self.multiple_of is not None and not self.padded:
            raise CombinationError(".batch(padded=False) pads nothing: remove multiple_of=")
        for name in ("tokens", "multiple_of", "max_rows"):
            value = getattr(self, name)
            if value is not None and not is_whole_number(value):
                raise TypeError(f".batch() takes {name}= as a whole number, not {value!r}")
            if value is not None and value < 1:
                raise ValueError(f".batch() takes {name}= from 1, not {value}")

    def costs(self, source: IndexedSource) -> tuple[Costs | None, Costs | None]:
        """Return the sizes of the examples of a source, and their keys."""
        sizes = keys = None
        if self.key is not None:
            keys = Costs.of(keys_of(source, self.key, ".batch(key=...)"), "key=", scaled=False)
        if self.size is not None:
            asked = ".batch(size=...)"
            sizes = Costs.of(numbers_of(source, self.size, asked), asked, scaled=False)
        return sizes, keys

    def rule(
        self, n: int | None, sizes: Costs | None, keys: Costs | None, examples: int, world: int
    ) -> tuple[BatchRule, int]:
        """Return how so many examples are batched, and about how many are in a batch."""
        budget = int(n if n is not None else self.tokens)
        multiple_of, typical = int(self.multiple_of or 1), budget
        if sizes is not None:
            mean = float(sizes.values.mean()) if len(sizes.values) else 1.0
            typical = max(1, int(budget / max(mean, multiple_of)))
        if self.max_rows is not None:
            typical = min(typical, int(self.max_rows))
        step = world * typical
        window = max(_WINDOW_PLACES, _WINDOW_STEPS * step)
        window = min(window, max(examples // _FEWEST_WINDOWS, _FEWEST_STEPS * step))
        most = None if self.max_rows is None else int(self.max_rows)
        rule = BatchRule(budget, sizes, keys, bool(self.padded), multiple_of, most, window)
        return rule, typical


def batch_stage(n: Any, drop_last: Any, collate: Any, sizing: Sizing) -> Batch:
    """Return the stage that the arguments of ``.batch()`` mean. Raises TypeError or ValueError."""
    if n is not None and not sizing.is_given:
        return Batch.of(n, drop_last, collate)
    sizing.check(n, drop_last)
    plain = Batch.of(1 if n is None else n, False, collate)
    asked = None if n is None else plain.n
    return PlannedBatch(plain.n, False, plain.collate, sizing=sizing, asked=asked)


@dataclass(frozen=True)
class PlannedBatch(Batch):
    """The stage ``.batch(tokens=..., size=...)``, or ``.batch(n, key=...)``.

    Attributes:
        n: about how many examples a batch has.
        sizing: its arguments; ``asked``: the ``n`` among them.
        rule: what follows from them for the source, once it is bound.
    """

    sizing: Sizing = field(default_factory=Sizing, compare=False, repr=False)
    asked: int | None = None
    rule: BatchRule | None = None

    @property
    def call(self) -> str:
        sizing, said = self.sizing, [] if self.asked is None else [str(self.asked)]
        for name in ("tokens", "size", "key", "multiple_of", "max_rows"):
            value = getattr(sizing, name)
            if value is not None:
                is_short = isinstance(value, (str, int, np.integer))
                said.append(f"{name}={value!r}" if is_short else f"{name}=...")
        said += ["padded=False"] * (not sizing.padded)
        return f"batch({', '.join(said)})"

    def bind(self, before: ChainView) -> Batch:
        """Check that all examples come here, once, in an order that all ranks know."""
        super().bind(before)
        source = before.source
        if not isinstance(source, IndexedSource):
            raise ValueError(
                f".{self.call} plans batches by the numbers of examples, and a stream has none: "
                "use .batch(n)"
            )
        stage = first_with(
            before.stages, lambda t: t.filters or t.skips or t.repeats or t.joins or t.scans
        )
        if stage is not None:
            raise ValueError(
                f".{self.call} plans batches before anything is read, and .{stage.name} before it "
                "decides later what comes: put an echo behind it, and leave examples out before "
                "(.select, or from_dataset of a list of the good ones)"
            )
        if before.budget != RAISE:
            raise ValueError(
                f".{self.call} plans batches before anything is read, and on_error="
                f"{before.budget} may leave examples out: remove on_error="
            )
        world = self._check_shard(before.stages)
        rule, typical = self.sizing.rule(self.asked, *self.sizing.costs(source), len(source), world)
        return replace(self, rule=rule, n=typical)

    def _check_shard(self, before: Sequence[ChainStage]) -> int:
        """Return the number of ranks.

        Raises ValueError where these get something else than their batches of each step.
        """
        at = next((i for i, stage in enumerate(before) if stage.traits.shards), None)
        shard = None if at is None else before[at]
        if at is None or not isinstance(shard, Shard):
            return 1
        for said, is_said in [
            ("remainder='uneven'", shard.uneven),
            (str(shard.padding), shard.padding is not None),
        ]:
            if is_said:
                raise ValueError(
                    f".{self.call} gives all ranks equally many steps of about equal work: leave "
                    f"{said} out of .shard()"
                )
        stage = first_with(before[at + 1 :], lambda t: t.selects)
        if isinstance(stage, Balance):
            raise ValueError(f".{self.call} gives all ranks about equal work: leave .balance() out")
        if stage is not None:
            raise ValueError(
                f".{self.call} plans the batches of all ranks together: put .{stage.name} "
                "before .shard()"
            )
        return shard.world

    @property
    def size(self) -> int | list[int]:
        """The budget, ``multiple_of=`` and ``max_rows=``, 0 for what is not given."""
        sizing, rule = self.sizing, self.rule
        assert rule is not None
        return [rule.budget, int(sizing.multiple_of or 0), int(sizing.max_rows or 0)]

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Batch:
        rule = self.rule
        assert rule is not None
        budget, multiple_of, max_rows = (check_integer(each) for each in batches)
        asked = None if self.asked is None else check_integer(budget, 1)
        tokens = check_integer(budget, 1) if asked is None else None
        limits = {"multiple_of": multiple_of or None, "max_rows": max_rows or None}
        sizing = replace(self.sizing, tokens=tokens, **limits)
        rule, typical = sizing.rule(asked, rule.sizes, rule.keys, examples, world)
        return replace(self, sizing=sizing, asked=asked, rule=rule, n=typical)

    def count(self, items: int) -> int:
        """Refuse: the plan of an epoch tells (``Chain.cuts``)."""
        raise AssertionError("batches that are planned are counted by their plan")

    @property
    def batch_rule(self) -> BatchRule | None:
        return self.rule

    def signature(self) -> str:
        """Return what decides which examples go together."""
        rule = self.rule
        assert rule is not None
        sizes = "" if rule.sizes is None else f", size={rule.sizes.digest}"
        keys = "" if rule.keys is None else f", key={rule.keys.digest}"
        what = "rows" if rule.sizes is None else "padded" if rule.is_padded else "sum"
        return (
            f"batch({what}={rule.budget}{sizes}{keys}, multiple_of={rule.multiple_of}, "
            f"max_rows={rule.max_rows})"
        )

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say how many examples a batch has, and among how many it is put together."""
        rule = self.rule
        assert rule is not None
        return (
            f"  about {self.n:,} examples, put together from {rule.window:,} that follow each other"
        )
