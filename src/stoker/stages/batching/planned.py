"""Batches that are planned from sizes and keys.

That is ``.batch_by_tokens(max_tokens, sizes)`` and ``.bucket(batch_size, key)``. Numbers alone
decide what is in them, before anything is read, so they stand where every example of the epoch
comes by, once: behind ``.shuffle()`` and ``.shard()``, caches and maps.
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
from stoker.stages.stage import ChainView, first_with

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
class PlannedBatch(Batch):
    """The stages ``.batch_by_tokens()`` and ``.bucket()``.

    Attributes:
        n: about how many examples a batch has.
        max_tokens: the most tokens in a batch; None where each has ``n`` examples, or fewer.
        sizes, key, multiple_of, max_rows, padded: the other arguments.
        rule: what follows from them for the source, once it is bound.
    """

    max_tokens: int | None = None
    sizes: Any = field(default=None, compare=False, repr=False)
    key: Any = field(default=None, compare=False, repr=False)
    multiple_of: int | None = None
    max_rows: int | None = None
    padded: bool = True
    rule: BatchRule | None = None

    @staticmethod
    def by_tokens(
        max_tokens: Any, sizes: Any, key: Any, multiple_of: Any, max_rows: Any, padded: Any,
        collate: Any,
    ) -> PlannedBatch:  # fmt: skip
        """Check the arguments of ``.batch_by_tokens()``."""
        if not isinstance(padded, bool):
            raise TypeError(f".batch_by_tokens() takes padded=True or False, not {padded!r}")
        if multiple_of is not None and not padded:
            raise CombinationError(
                ".batch_by_tokens(padded=False) pads nothing: remove multiple_of="
            )
        given = {"max_tokens": max_tokens, "multiple_of": multiple_of, "max_rows": max_rows}
        for name, value in given.items():
            if value is None and name != "max_tokens":
                continue
            if not is_whole_number(value):
                raise TypeError(
                    f".batch_by_tokens() takes {name}= as a whole number, not {value!r}"
                )
            if value < 1:
                raise ValueError(f".batch_by_tokens() takes {name}= from 1, not {value}")
        numbers: dict[str, Any] = {k: v if v is None else int(v) for k, v in given.items()}
        plain = Batch.of(1, False, collate)
        return PlannedBatch(1, False, plain.collate, sizes=sizes, key=key, padded=padded, **numbers)

    @staticmethod
    def by_key(batch_size: Any, key: Any, collate: Any) -> PlannedBatch:
        """Check the arguments of ``.bucket()``."""
        plain = Batch.of(batch_size, False, collate)
        return PlannedBatch(plain.n, False, plain.collate, key=key)

    @property
    def call(self) -> str:
        if self.max_tokens is None:
            return f"bucket({self._budget}, key={_shown(self.key)})"
        said = [str(self.max_tokens), f"sizes={_shown(self.sizes)}"]
        said += [] if self.key is None else [f"key={_shown(self.key)}"]
        limits = {"multiple_of": self.multiple_of, "max_rows": self.max_rows}
        said += [f"{name}={value}" for name, value in limits.items() if value is not None]
        said += ["padded=False"] * (not self.padded)
        return f"batch_by_tokens({', '.join(said)})"

    @property
    def _budget(self) -> int:
        """The most tokens, or examples, in a batch."""
        return self.n if self.max_tokens is None else self.max_tokens

    def _rule_of(
        self, sizes: Costs | None, keys: Costs | None, examples: int, world: int
    ) -> PlannedBatch:
        """Return this with what it means for so many examples."""
        multiple_of, typical = int(self.multiple_of or 1), self._budget
        if sizes is not None:
            mean = float(sizes.values.mean()) if len(sizes.values) else 1.0
            typical = max(1, int(typical / max(mean, multiple_of)))
        typical = typical if self.max_rows is None else min(typical, self.max_rows)
        step = world * typical
        window = max(_WINDOW_PLACES, _WINDOW_STEPS * step)
        window = min(window, max(examples // _FEWEST_WINDOWS, _FEWEST_STEPS * step))
        rule = BatchRule(self._budget, sizes, keys, self.padded, multiple_of, self.max_rows, window)
        return replace(self, rule=rule, n=typical)

    def bind(self, before: ChainView) -> Batch:
        """Check that all examples come here, once, in an order that all ranks know."""
        super().bind(before)
        (source, world), sizes, keys = check_planned(f".{self.call}", before), None, None
        if self.key is not None:
            asked = ".bucket()" if self.max_tokens is None else ".batch_by_tokens(key=...)"
            keys = Costs.of(keys_of(source, self.key, asked), asked, scaled=False)
        if self.max_tokens is not None:
            asked = ".batch_by_tokens()"
            sizes = Costs.of(numbers_of(source, self.sizes, asked), asked, scaled=False)
        return self._rule_of(sizes, keys, len(source), world)

    @property
    def size(self) -> int | list[int]:
        """The budget, ``multiple_of=`` and ``max_rows=``, 0 for what is not given."""
        return [self._budget, self.multiple_of or 0, self.max_rows or 0]

    def of_ranks(self, rank: int, world: int, batches: Any, examples: int) -> Batch:
        rule = self.rule
        assert rule is not None
        budget, multiple_of, max_rows = (check_integer(each) for each in batches)
        budget = check_integer(budget, 1)
        limits: dict[str, Any] = {"multiple_of": multiple_of or None, "max_rows": max_rows or None}
        limits["n" if self.max_tokens is None else "max_tokens"] = budget
        return replace(self, **limits)._rule_of(rule.sizes, rule.keys, examples, world)

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
        name = "bucket" if rule.sizes is None else "batch_by_tokens"
        sizes = "" if rule.sizes is None else f", sizes={rule.sizes.digest}"
        keys = "" if rule.keys is None else f", key={rule.keys.digest}"
        return (
            f"{name}({rule.budget}{sizes}{keys}, multiple_of={rule.multiple_of}, "
            f"max_rows={rule.max_rows}, padded={rule.is_padded})"
        )

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say how many examples a batch has, and among how many it is put together."""
        rule = self.rule
        assert rule is not None
        return (
            f"  about {self.n:,} examples, put together from {rule.window:,} that follow each other"
        )


def check_planned(call: str, before: ChainView) -> tuple[IndexedSource, int]:
    """Return the source and the number of ranks, where all examples come, once.

    Raises ValueError where something decides later what comes, or ranks get something else than
    their part of what is planned.
    """
    source = before.source
    if not isinstance(source, IndexedSource):
        raise CombinationError(
            f"{call} plans by the numbers of examples, and a stream has none: leave sizes out "
            "(.batch(n), .pack(length))"
        )
    stage = first_with(
        before.stages, lambda t: t.filters or t.skips or t.repeats or t.joins or t.scans
    )
    if stage is not None:
        raise CombinationError(
            f"{call} plans before anything is read, and .{stage.name} before it decides later what "
            "comes: put an echo behind it, and leave examples out before (.select, or "
            "from_dataset of a list of the good ones)"
        )
    if before.budget != RAISE:
        raise CombinationError(
            f"{call} plans before anything is read, and max_errors={before.budget} may leave "
            "examples out: remove max_errors="
        )
    at = next((i for i, stage in enumerate(before.stages) if stage.traits.shards), None)
    shard = None if at is None else before.stages[at]
    if at is None or not isinstance(shard, Shard):
        return source, 1
    said = "remainder='uneven'" if shard.uneven else str(shard.padding)
    if shard.uneven or shard.padding is not None:
        raise CombinationError(
            f"{call} gives all ranks equally many steps of about equal work: leave {said} out of "
            ".shard()"
        )
    stage = first_with(before.stages[at + 1 :], lambda t: t.selects)
    if isinstance(stage, Balance):
        raise CombinationError(f"{call} deals all ranks' work together: leave .balance() out here")
    if stage is not None:
        raise CombinationError(
            f"{call} plans what all ranks get together: put .{stage.name} before .shard()"
        )
    return source, shard.world


def _shown(given: Any) -> str:
    """Return a field's name as it is, and ``...`` for numbers."""
    return repr(given) if given is None or isinstance(given, (str, int)) else "..."
