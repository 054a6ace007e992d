"""Padding for evaluation: every example once over all ranks, and equal rows on each.

What it changes is which rows are whose (``orders.PaddedDeal``); this says where it may stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.stages.skip import RAISE
from stoker.stages.stage import first_with

if TYPE_CHECKING:
    from stoker.chain import Chain


@dataclass(frozen=True)
class Padding:
    """What ``.shard(pad=, mask=)`` says.

    Attributes:
        fills: whether the last batch is padded to its full size.
        mask: the field of batches that tells what is padding, None for none.
    """

    fills: bool
    mask: str | None

    @staticmethod
    def of(pad: Any, mask: Any) -> Padding | None:
        """Check the arguments; None where nothing is padded."""
        if not isinstance(pad, bool) and pad != "full":
            raise ValueError(f".shard() takes pad=True, pad='full' or nothing, not {pad!r}")
        if mask is not None and (not isinstance(mask, str) or not mask):
            raise TypeError(f".shard(pad=True) takes mask= as a field's name, not {mask!r}")
        if not pad:
            if mask is not None:
                raise ValueError(f".shard(mask={mask!r}) marks padding: add pad=True")
            return None
        return Padding(pad == "full", mask)

    @property
    def to(self) -> str:
        """What of it decides which rows there are."""
        return "full" if self.fills else "equal"

    def __str__(self) -> str:
        mask = "" if self.mask is None else f", mask={self.mask!r}"
        return ("pad='full'" if self.fills else "pad=True") + mask

    def check_before(self, before: Chain) -> None:
        """Raise ValueError where what comes has no order that all ranks know, or another one."""
        source = before.source
        if not source.is_indexed:
            raise ValueError(
                f".shard({self}) deals examples by their numbers, and a stream has none: "
                ".shard(uneven=True) keeps all of them"
            )
        if source.has_own_order:
            raise ValueError(
                f".shard({self}) is for evaluation, and an epoch of a mixture does not have each "
                "example once: evaluate its parts one after another"
            )
        if first_with(before.stages, lambda t: t.shuffles) is not None:
            raise ValueError(
                f".shard({self}) is for evaluation, in the order of the data: leave .shuffle() out"
            )

    def check_behind(self, chain: Chain) -> None:
        """Raise ValueError where something behind it leaves examples out, or repeats them."""
        at = next(i for i, stage in enumerate(chain.stages) if stage.traits.shards)
        behind = chain.stages[at + 1 :]
        stage = first_with(behind, lambda t: t.selects)
        if stage is not None:
            instead = "leave it out of evaluation"
            if not stage.traits.shuffles:
                instead = f"put .{stage.name} before .shard(), to evaluate fewer"
            raise ValueError(f".shard({self}) deals the examples in their order: {instead}")
        stage = first_with(behind, lambda t: t.filters or t.skips or t.repeats or t.joins)
        if stage is not None:
            raise ValueError(
                f".shard({self}) hands out every example once, and .{stage.name} after it does "
                "not: leave it out of evaluation, or use .shard(uneven=True)"
            )
        if chain.budget != RAISE:
            raise ValueError(
                f".shard({self}) hands out every example once, and on_error={chain.budget} may "
                "leave some out: remove on_error=, or use .shard(uneven=True)"
            )
        if chain.flows or chain.steps is not None:
            said = ".repeat()" if chain.flows else f".steps({chain.steps})"
            raise ValueError(
                f".shard({self}) hands out every example once in an epoch: remove {said} "
                "(.take(n) before .shard() evaluates fewer)"
            )
        if chain.drops_last and not self.fills:
            raise ValueError(
                f".shard({self}) hands out every example once, and drop_last=True leaves the last "
                "ones out: remove it, or use pad='full', which fills the last batch"
            )
        if self.mask is not None and not chain.is_batched:
            raise ValueError(
                f".shard({self}): the mask is a field of batches: add .batch(n), or read "
                "pipeline.last.valid"
            )
