"""More workers than processors, which are worth a try where preparing mostly waits."""

from __future__ import annotations

import math

from stoker.analysis import measuring
from stoker.analysis.model import most_workers
from stoker.analysis.probe_record import RankRecord

_SPARE = 1.1  # times what training takes in


def more_workers(rank: RankRecord, workers: int, cores: int) -> int | None:
    """Return how many workers to try beyond the most that were drained warm; None: no more.

    So many as the processors have time for, by what preparing computed with that many
    ``workers``, and no more than training has a use for.
    """
    batch = measuring.batch_examples(rank)
    drains = rank.drains.get(f"warm-{workers}", [])
    rate, (takes, _) = measuring.drained(drains, batch), measuring.ingestion(rank, batch)
    if rate is None or takes is None:
        return None
    most = most_workers(cores, workers, rate.value, measuring.prep_cpu_s(drains, batch))
    wanted = min(most, math.ceil(_SPARE * takes.value / rate.value * workers))
    return wanted if wanted > workers else None
