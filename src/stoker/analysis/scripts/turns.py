"""Training by turns on batches of several kinds, so that all meet the same load of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.analysis.model.rates import make_step
from stoker.analysis.model.trace import Step
from stoker.analysis.probe.records import Row

# Batches of a share that count: there are several turns. Chosen, not measured.
_FEWEST = 4


@dataclass(frozen=True)
class TurnShare:
    """A part of a turn: training on one kind of batches."""

    kind: str
    """"own", "replayed" or "kept"."""
    workers: int
    settle: int
    """The first batches, which are not measured: the workers had them ready."""
    measured: int
    each_s: float
    """How long a step is expected to last."""

    @property
    def batches(self) -> int:
        return self.settle + self.measured

    def shorten(self, batches: int) -> TurnShare:
        """Return the share with no more batches, but some to measure: whole rounds of workers."""
        period = max(1, self.workers)
        measured = max(_FEWEST, min(self.measured, batches - self.settle))
        return replace(self, measured=-(-measured // period) * period)


def split_into_turns(
    pairs: Sequence[tuple[Row, Row]], shares: Sequence[TurnShare]
) -> list[list[list[Step]]]:
    """Return the steps of each turn and share, without the first ones of both."""
    places = [
        (at, place >= share.settle)
        for at, share in enumerate(shares)
        for place in range(share.batches)
    ]
    turns: dict[int, list[list[Step]]] = {}
    for before, row in pairs:
        number, place = divmod(before.number - pairs[0][0].number, len(places))
        at, counts = places[place]
        if counts:
            step = make_step(before, row)
            turns.setdefault(number, [[] for _ in shares])[at].append(step)
    return [turn for turn in turns.values() if all(turn)]
