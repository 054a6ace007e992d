"""How fast training runs, by arithmetic on measured rates.

Three effects are added to the ``min(F, P, G)`` of the paper that ``formulas.py`` names. All occur
in real jobs, and are measured:

- a worker reads an example and then decodes it: it waits for its misses (``miss_s``), even if
  storage as a whole could deliver more;
- training and preparation share the host's processors. ``H`` is the rate that these allow, by the
  processor time of one example on both sides;
- even with all data in memory, training is a little slower than ``min(G, P, H)``: batches come in
  bursts and in order, and take time to receive. ``efficiency`` is the fraction that it reaches, by
  number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stoker.analysis.model.formulas import (
    fetch_rate,
    interpolate,
    inverse,
    loader_rate,
    prep_rate,
    smallest_cache,
)

FED = 0.05
"""Stalls below this fraction of the time are not worth acting on: the split is off by up to 0.037
(bench/results/analyze_split.json)."""
MOST_CORES = 1024
"""The most cores for which a prediction is made: no host has more."""


@dataclass(frozen=True)
class Measured:
    """The measurements of an analysis, the input of every prediction. Rates in examples/s."""

    ingestion: float
    """G."""
    prep: tuple[tuple[int, float], ...]
    """P by number of workers, ascending; ``(0, P)`` where the training process prepares."""
    workers: int
    """Workers of the job as it is; 0: the training process prepares, and nothing overlaps."""
    cores: int
    """Processors that the job may use."""
    batch_size: float
    """Examples a batch."""
    storage: float | None = None
    """S; None if it could not be separated: then no question about fetching is answered."""
    cache: float | None = None
    """C, or None."""
    storage_most: float | None = None
    """S with a reader on each core, if measured: for more workers than the job has."""
    miss_s: float = 0.0
    """Seconds that a worker waits for an example that is not in the page cache, beyond reading it
    from there, while storage is not busy otherwise; 0: misses overlap preparing, as in the
    paper."""
    efficiency: tuple[tuple[int, float], ...] = ()
    """The fraction of ``min(G, P, H)`` that training reaches with its data in memory, at most 1, by
    number of workers, ascending. In between linear, outside as the nearest. Empty: 1."""
    cached_fraction: float = 0.0
    """x, as the analysis found it."""
    example_bytes: float | None = None
    """Mean bytes fetched for an example."""
    examples: int | None = None
    """Examples an epoch."""
    step_cpu_s: float = 0.0
    """Processor seconds that training takes for an example, beside the accelerator's."""
    prep_cpu: tuple[tuple[int, float], ...] = ()
    """Processor seconds that preparing an example takes, receiving it included, by number of
    workers, ascending: processors that are shared are slower each."""
    trains_on_cpu: bool = False
    """True if the accelerator is the host's own processor."""
    prep_fetches: bool = False
    """True if P includes fetching over a network: its loss is then counted as fetching."""
    echo_after_s: float = 0.0
    """Worker seconds an example behind an echo, which each use costs; 0: whole batches are
    echoed."""


@dataclass(frozen=True)
class Change:
    """The change of a job to predict. The defaults change nothing."""

    cores: int | None = None
    """Processors, each with a worker on it."""
    cache_bytes: int | None = None
    """Bytes of a never-evicting cache; None leaves the cached fraction as it was found."""
    storage_mbps: float | None = None
    """Storage bandwidth in MB/s (10^6 bytes)."""
    accelerator: float = 1.0
    """The accelerator's speed, as a multiple."""
    echo: float = 1.0
    """Echoing factor: mean uses of a fresh example."""


NOTHING = Change()


@dataclass(frozen=True)
class Prediction:
    """How fast a job runs. Rates in examples/s."""

    rate: float
    """Examples (uses, under echoing) that it trains on."""
    fresh_rate: float
    """The fresh ones of these examples. A repeat may be worth less than a fresh example."""
    steps_per_s: float
    """Batches a second."""
    bound: str
    """The limit: "compute" if less than FED is lost, else "prep", "fetch" or "processors"."""
    fetch: float
    """F, uses/s; infinite if fetching is unknown."""
    prep: float
    """P, uses/s."""
    ingestion: float
    """G."""
    processors: float
    """H, uses/s."""
    loader: float
    """The rate of fetch and prep together, uses/s."""
    compute: float
    """Fraction of the time that is compute: ``rate / G``."""
    prep_stall: float
    """Fraction lost to prep, with everything in memory."""
    fetch_stall: float
    """Fraction lost to fetch, in addition."""


def check_change(measured: Measured, change: Change) -> None:
    """Raise ValueError, with the reason, for a question that the analysis cannot answer."""
    for name, value, least in (
        ("cores", change.cores, 1),
        ("cache", change.cache_bytes, 0),
        ("echo", change.echo, 1),
    ):
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name}={value}: at least {least}")
    above_0 = {"storage-mbps": change.storage_mbps, "accelerator": change.accelerator}
    for name, number in above_0.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name}={number}: above 0")
    fetching = change.cache_bytes is not None or change.storage_mbps is not None
    if fetching and (measured.storage is None or measured.cache is None):
        raise ValueError(
            "cache, storage-mbps: the analysis could not separate fetching from "
            "preparation, so it cannot predict the effect of storage; the report says why"
        )
    if change.storage_mbps is not None and not measured.example_bytes:
        raise ValueError("storage-mbps: the report does not know how many bytes an example takes")
    if change.cache_bytes is not None and dataset_bytes(measured) is None:
        raise ValueError("cache: the report does not know how many bytes the dataset takes")


def cached_fraction(measured: Measured, change: Change) -> float:
    """Return x, of the change's cache or as the analysis found it."""
    size = dataset_bytes(measured)
    if change.cache_bytes is None or size is None:
        return measured.cached_fraction
    return min(1.0, change.cache_bytes / size)


def storage_rate(measured: Measured, change: Change) -> float | None:
    """Return S, of the change's storage or as the analysis found it; None: unknown.

    For more workers than the job has, it is S with a reader a core.
    """
    if change.storage_mbps is not None and measured.example_bytes:
        return change.storage_mbps * 1e6 / measured.example_bytes
    storage = measured.storage
    if (change.cores or 0) > max(1, measured.workers):
        storage = measured.storage_most or measured.storage
    return storage


def cache_rate(measured: Measured, change: Change) -> float | None:
    """Return C; for more workers than the job has, no less than S with a reader a core.

    C was measured with the job's own workers, and memory is no slower than storage.
    """
    if measured.cache is None or (change.cores or 0) <= max(1, measured.workers):
        return measured.cache
    return max(measured.cache, measured.storage_most or 0.0)


def miss_seconds(measured: Measured, change: Change) -> float:
    """Return the seconds that a worker waits for a miss.

    If the job's workers use all of storage's bandwidth (S = W / miss_s), the wait shrinks as
    storage gets faster. If they leave most of it unused, the wait is latency, and stays. In between
    it shrinks in proportion, which is an assumption.
    """
    if change.storage_mbps is None or not measured.example_bytes or not measured.storage:
        return measured.miss_s
    share = min(1.0, measured.miss_s * measured.storage / max(1, measured.workers))
    faster = change.storage_mbps * 1e6 / measured.example_bytes / measured.storage
    return measured.miss_s * (1.0 - share + share / faster)


def warm_rate(measured: Measured, workers: int) -> float:
    """Return ``min(G, P, H)`` for a number of workers; without any, ``1 / (1/G + 1/P)``."""
    prep = prep_rate(measured.prep, workers)
    if workers == 0:
        return inverse(inverse(measured.ingestion) + inverse(prep))
    cpu_s = measured.step_cpu_s + interpolate(measured.prep_cpu, workers)
    return min(measured.ingestion, prep, inverse(cpu_s / measured.cores))


def predict(measured: Measured, change: Change = NOTHING) -> Prediction:
    """Return how fast the job runs after ``change``.

    The rate is ``min(F, k * min(G, H, 1 / (1/P + w)))``, with ``k`` the efficiency for that many
    workers and ``w`` their wait for misses. Without workers, training waits while it prepares:
    ``k / (1/G + 1/loader)``.

    Under an echo of factor e, a use costs ``1/(e F)`` of fetching and
    ``1/P - (1 - 1/e) * t_before/W`` of preparation, where ``t_before`` are the worker seconds an
    example in front of the echo.

    Raises ValueError if the analysis cannot answer.
    """
    check_change(measured, change)
    echo = change.echo
    ingestion = measured.ingestion * change.accelerator

    workers = change.cores if change.cores is not None else measured.workers
    alone = workers == 0
    fresh_prep_s = inverse(prep_rate(measured.prep, workers))
    behind_s = min(measured.echo_after_s / max(1, workers), fresh_prep_s)
    prep_s = (fresh_prep_s - behind_s) / echo + behind_s

    x = cached_fraction(measured, change)
    fetch_s = waiting_s = 0.0
    storage, cache = storage_rate(measured, change), cache_rate(measured, change)
    if storage is not None and cache is not None:
        fetch_s = inverse(fetch_rate(x, storage, cache)) / echo
        waiting_s = (1.0 - x) * miss_seconds(measured, change) / max(1, workers) / echo
    loader = loader_rate(inverse(fetch_s), inverse(prep_s), waiting_s)

    cores = max(measured.cores, change.cores or 0)
    step_cpu_s = measured.step_cpu_s
    if measured.trains_on_cpu:
        step_cpu_s /= change.accelerator
    prep_cpu_s = interpolate(measured.prep_cpu, workers)
    prep_cpu_s *= prep_s / fresh_prep_s if fresh_prep_s > 0 else 1.0
    processors = inverse((step_cpu_s + prep_cpu_s) / cores)

    reached = interpolate(measured.efficiency, workers, 1.0)

    def trained_rate(fetch: float, waiting_s: float) -> float:
        if alone:
            loader = loader_rate(fetch, inverse(prep_s), waiting_s)
            return reached * min(processors, inverse(inverse(ingestion) + inverse(loader)))
        unfetched = loader_rate(math.inf, inverse(prep_s), waiting_s)
        return min(fetch, reached * min(ingestion, processors, unfetched))

    warm, rate = trained_rate(math.inf, 0.0), trained_rate(inverse(fetch_s), waiting_s)
    compute, fetch_stall = rate / ingestion, 1.0 - rate / warm
    prep_stall = max(0.0, 1.0 - compute - fetch_stall)
    if compute > 1.0 - FED:
        bound = "compute"
    elif alone:
        bound = "fetch" if fetch_stall > prep_stall else "prep"
    # 1e-9: above any rounding error of a stall of 0.
    elif fetch_stall > 1e-9 and (fetch_s >= prep_s or prep_stall <= 1e-9):
        # Misses that merely add to a longer preparation are not what limits.
        bound = "fetch"
    else:
        bound = "processors" if processors < min(ingestion, inverse(prep_s)) else "prep"
    if measured.prep_fetches:
        fetch_stall, prep_stall = fetch_stall + prep_stall, 0.0
        bound = "fetch" if bound == "prep" else bound
    return Prediction(
        rate=rate,
        fresh_rate=rate / echo,
        steps_per_s=rate / measured.batch_size,
        bound=bound,
        fetch=inverse(fetch_s),
        prep=inverse(prep_s),
        ingestion=ingestion,
        processors=processors,
        loader=loader,
        compute=compute,
        prep_stall=prep_stall,
        fetch_stall=fetch_stall,
    )


def dataset_bytes(measured: Measured) -> float | None:
    """Return the bytes of the whole dataset, or None if they are unknown."""
    if not measured.example_bytes or not measured.examples:
        return None
    return measured.example_bytes * measured.examples


def find_cache_needed(measured: Measured, change: Change, prediction: Prediction) -> float | None:
    """Return x* after ``change``; None where fetching was not told apart."""
    storage, cache = storage_rate(measured, change), cache_rate(measured, change)
    if storage is None or cache is None:
        return None
    uses = change.echo
    # Without workers, training waits for the loader's whole time.
    overlaps = measured.workers > 0 or change.cores is not None
    takes = min(prediction.ingestion, prediction.processors) if overlaps else math.inf
    workers = max(1, measured.workers if change.cores is None else change.cores)
    miss_s = miss_seconds(measured, change) / workers / uses
    return smallest_cache(storage * uses, cache * uses, prediction.prep, takes, miss_s)


def find_cores_needed(measured: Measured, change: Change, prediction: Prediction) -> int | None:
    """Return the fewest cores with which P reaches both F and G; None: more than MOST_CORES."""
    # Slightly less, against rounding.
    wanted = min(prediction.fetch, prediction.ingestion) * (1.0 - 1e-9)
    for cores in range(1, MOST_CORES + 1):
        if predict(measured, replace(change, cores=cores)).prep >= wanted:
            return cores
    return None
