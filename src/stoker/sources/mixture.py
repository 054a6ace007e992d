"""A mixture: examples of several indexed sources, in exact proportions.

Its indices are the indices of its parts, one part after another. Stages of one part before mixing
follow it in the chain, and apply to that part only (``OfPart``).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CombinationError, StateError
from stoker.schedule import rng
from stoker.schedule.batch_plan import Planned
from stoker.schedule.orders.mixed import MixedOrder, interleave_places, part_bits, parts_and_numbers
from stoker.schedule.progress import Pace
from stoker.schedule.proportions import ChangingWeights, PartRow, PieceRow, Proportions
from stoker.schedule.selection import Selection
from stoker.schedule.sharding import (
    CarriedSharding,
    EpochIndices,
    PartSharding,
    PartwiseSharding,
)
from stoker.sources.origin import IndexedSource
from stoker.sources.over import SourceOver
from stoker.stats import PartStats

# Epochs whose weights are asked for to know what came before another: 50 ms each.
_MOST_EPOCHS = 100


@dataclass(frozen=True)
class MixedPart:
    """One part of a mixture: its source, and which examples its epochs have.

    ``described`` is it with its stages, for people; ``signature`` must equal a saved state's.
    """

    source: IndexedSource
    selection: Selection
    described: str
    signature: tuple[str, ...]


class MixtureSource(SourceOver):
    """Several sources in exact proportions.

    ``weights``: each part's, a whole number; or what says them for each piece of an epoch, which
    then has as many examples as all parts together. ``until_all``: whether an epoch ends when every
    part has been used once, rather than when the first one has.
    """

    has_own_order = True

    def __init__(
        self,
        parts: Sequence[MixedPart],
        weights: tuple[int, ...] | ChangingWeights,
        *,
        until_all: bool,
    ) -> None:
        super().__init__([part.source for part in parts])
        self.parts = tuple(parts)
        self._changing = weights if isinstance(weights, ChangingWeights) else None
        self.proportions = None if isinstance(weights, ChangingWeights) else Proportions(weights)
        # For epochs of so many places, of which so many are drawn: what was drawn before some.
        self._begun: dict[tuple[int, int], dict[int, NDArray[np.int64]]] = {}
        self._until_all = until_all
        self._lengths = [len(source) for source in self.sources]
        self._sizes = [part.selection.count(len(part.source)) for part in parts]
        for number, (part, size) in enumerate(zip(parts, self._sizes, strict=True), 1):
            if not size:
                raise ValueError(f"mix(): part {number}, {part.described}, has no examples")
        if self.proportions is None:
            return
        count = self.count()
        for number, drawn in enumerate(self.proportions.counts(count), 1):
            if not drawn:
                raise ValueError(
                    f"mix(): part {number}, {parts[number - 1].described}, would never be read: "
                    f"an epoch of {count:,} examples has none of it. Give it more weight, or "
                    "stop='all'"
                )

    @property
    def name(self) -> str:
        if self.proportions is None:
            return f"mix({len(self.parts)} parts, weights that change)"
        return f"mix({len(self.parts)} parts, stop={'all' if self._until_all else 'first'!r})"

    def count(self) -> int:
        return self.examples(Selection())

    def examples(self, selection: Selection) -> int:
        return selection.count(self._length(selection))

    def order(self, selection: Selection, seed: int, epoch: int, group: int = 1) -> EpochIndices:
        """Return the order of an epoch; a part's share of a global batch is dealt to all ranks."""
        share, count = selection.share, self.examples(selection)
        rank, world = (share.rank, share.world) if share is not None else (0, 1)
        row = self._row(selection, epoch)
        deal: Planned | PartSharding | PartwiseSharding
        if self._is_in_step(selection):
            deal = PartwiseSharding(row, rank, count)
            drawn = [world * own for own in row.counts(count)]
        else:
            begun = 0 if selection.leg is None else selection.leg.rest.first or 0
            dealt = count - (0 if selection.leg is None else selection.leg.head_each)
            deal = PartSharding(row, len(self.parts), rank, world, group, dealt, begun)
            drawn = row.counts(self._places_drawn(selection))
        make = [
            functools.partial(part.selection.order, length, seed, purpose=rng.SHUFFLE + number)
            for number, (part, length) in enumerate(zip(self.parts, self._lengths, strict=True))
        ]
        before = self._drawn_before(selection, epoch)
        if self._changing is not None:  # whatever is said of it later
            self._known(selection)[epoch + 1] = before + drawn
        order = MixedOrder(make, self._lengths, self._sizes, before.tolist(), drawn)
        head = np.empty(0, np.int64) if selection.leg is None else selection.leg.head_of(rank)
        found = EpochIndices(order, deal, count - len(head))
        if len(head):
            found = EpochIndices(order, CarriedSharding(head, found), count)
        if isinstance(row, PieceRow):
            found.digest = f"{zlib.crc32(np.append(row.before, before).tobytes()):08x}"
        return found

    def _row(self, selection: Selection, epoch: int) -> PartRow:
        """Return the parts of an epoch's places; in step, of those that each rank has."""
        if self.proportions is not None:
            return self.proportions
        assert self._changing is not None
        return self._changing.row(epoch, self.places(selection))

    def _places_drawn(self, selection: Selection) -> int:
        """Return how many places of an epoch are drawn, over all ranks."""
        if selection.share is not None and selection.between.stop is not None:
            return self.examples(selection) * selection.share.world
        return selection.first.count(self._length(selection))

    def _known(self, selection: Selection) -> dict[int, NDArray[np.int64]]:
        """Return the epochs of which it is known what was drawn of each part before them."""
        key = self.places(selection), self._places_drawn(selection)
        return self._begun.setdefault(key, {0: np.zeros(len(self.parts), np.int64)})

    def _drawn_before(self, selection: Selection, epoch: int) -> NDArray[np.int64]:
        """Return how many examples of each part earlier epochs have, each as many in all."""
        drawn = self._places_drawn(selection)
        if self.proportions is not None:
            return epoch * np.array(self.proportions.counts(drawn), np.int64)
        known = self._known(selection)
        first = max(at for at in known if at <= epoch)
        if epoch - first > _MOST_EPOCHS:
            raise ValueError(
                f"what a mixture whose weights change has drawn before epoch {epoch:,} is found by "
                f"asking for the weights of each epoch before, and of {epoch - first:,} that takes "
                "too long: load a state of that epoch, which says it"
            )
        for at in range(first, epoch):
            known[at + 1] = known[at] + self._row(selection, at).counts(drawn)
        return known[epoch]

    def drawn_before(self, selection: Selection, epoch: int) -> list[int] | None:
        return None if self._changing is None else [*map(int, self._drawn_before(selection, epoch))]

    def note_drawn(self, selection: Selection, epoch: int, drawn: list[int]) -> None:
        if self._changing is None:
            return super().note_drawn(selection, epoch, drawn)
        if len(drawn) != len(self.parts) or sum(drawn) != epoch * self._places_drawn(selection):
            raise ValueError("what was drawn of parts before its epoch does not fit")
        self._known(selection)[epoch] = np.array(drawn, np.int64)

    def _length(self, selection: Selection) -> int:
        """Return the number of examples in an epoch over all ranks, uncut."""
        if self.proportions is None:
            if self._is_in_step(selection):
                raise CombinationError(
                    "mix(): parts that are shuffled by blocks are read in runs by each rank, which "
                    "needs weights that stay: shuffle them as a whole, .shuffle(block=False)"
                )
            return sum(self._sizes)
        find = self.proportions.shortest if self._until_all else self.proportions.longest
        if not self._is_in_step(selection):
            return find(self._sizes)
        assert selection.share is not None
        world = selection.share.world
        each = [size // world for size in self._sizes]
        if 0 in each:
            number = each.index(0)
            raise ValueError(
                f"mix(): part {number + 1}, {self.parts[number].described}, has fewer examples "
                "than there are ranks"
            )
        return find(each) * world

    def _is_in_step(self, selection: Selection) -> bool:
        """True if all ranks read the same part at a time, each its own run of it, for blocks."""
        by_blocks = any(part.selection.blocks is not None for part in self.parts)
        return selection.share is not None and by_blocks

    def places(self, selection: Selection) -> int:
        return selection.first.count(self._length(selection))

    def places_of(self, numbers: range, selection: Selection, epoch: int) -> NDArray[np.int64]:
        parts = self._row(selection, epoch).parts(numbers.start, numbers.stop)
        return interleave_places(*parts, len(self.parts))

    def places_end(self, selection: Selection) -> int:
        return self.places(selection) << part_bits(len(self.parts))

    def check_leg(self, selection: Selection) -> None:
        if self._is_in_step(selection):
            raise StateError(
                "each rank has its own run of each part, because parts are shuffled by blocks"
            )

    def part_stats(self, order: EpochIndices, examples: int) -> tuple[PartStats, ...]:
        mixed, deal = order.order, order.deal
        head = np.empty(0, np.int64)
        if isinstance(deal, CarriedSharding):
            head, deal = deal.held[:examples], deal.within.deal
        of_head, _ = parts_and_numbers(head, len(self.parts))
        assert isinstance(mixed, MixedOrder)
        assert isinstance(deal, PartSharding | PartwiseSharding | Planned)
        fresh = deal.counts(examples - len(head))
        fresh = (np.bincount(of_head, minlength=len(fresh)) + fresh).tolist()
        weights = mixed.drawn if self.proportions is None else self.proportions.weights
        if self.proportions is None:
            whole = deal.counts(len(order) - len(head))
            of_all = [
                drawn * count // max(1, own)
                for drawn, count, own in zip(mixed.drawn, fresh, whole, strict=True)
            ]
        else:
            left = len(mixed) - deal.first
            of_all = self.proportions.counts(deal.first + left * examples // max(1, len(order)))
        rows = zip(self.parts, weights, fresh, mixed.begun, of_all, mixed.sizes, strict=True)
        return tuple(
            PartStats(part.source.name, weight / sum(weights), count, (begun + drawn) / each)
            for part, weight, count, begun, drawn, each in rows
        )

    def paces(self, selection: Selection, epoch: int) -> tuple[Pace, ...]:
        row = self._row(selection, epoch)
        if not isinstance(row, PieceRow):
            return tuple(map(Pace.even, row.counts(self.places(selection))))
        places = tuple(row.bounds.tolist())
        return tuple(Pace(tuple(own.tolist()), places) for own in row.before.T)

    @property
    def changes_shares(self) -> bool:
        return self.proportions is None

    @property
    def parts_count(self) -> int:
        return len(self.parts)

    def signature(self) -> str:
        # Weights that change are told by the order's digest.
        fixed = self.proportions
        weights = ["fn"] * len(self.parts) if fixed is None else list(map(str, fixed.weights))
        each = [
            f"{weight} of {'.'.join(part.signature)}"
            for weight, part in zip(weights, self.parts, strict=True)
        ]
        until = "all" if self._until_all else "first"
        until = "as many as all parts have" if fixed is None else until
        return f"mixture until {until}: {', '.join(each)}"

    def extent(self) -> str:
        lines = [f"{self.count():,} examples an epoch"]
        whole = Selection()
        drawn = self._row(whole, 0).counts(self.places(whole))
        weights = drawn if self.proportions is None else self.proportions.weights
        of = " of the first epoch" if self.proportions is None else ""
        for number, (part, weight) in enumerate(zip(self.parts, weights, strict=True), 1):
            share, extent = weight / sum(weights), part.source.extent()
            lines.append(f"part {number}, {share:.3%}{of}: {part.described}  {extent}")
        return "\n    ".join(lines)

    def read_of(
        self, selection: Selection | None
    ) -> Iterable[tuple[IndexedSource, Selection | None]]:
        """Return the examples of each part that this rank reads, roughly in their order."""
        if selection is None:
            return super().read_of(None)
        each, share = [part.selection for part in self.parts], selection.share
        if share is not None and not self._is_in_step(selection):  # else in runs
            each = [one.shard(share.rank, share.world, uneven=False) for one in each]
        return zip(self.sources, each, strict=True)
