"""How fast training runs, by arithmetic on measured rates.

Three things are added to the ``min(F, P, G)`` of the paper that ``formulas.py`` names, for all are
seen in real jobs, and measured:

- a worker reads an example and then decodes it: it waits for its misses (``miss_s``), however much
  storage as a whole could deliver;
- training and preparation share the host's processors. ``H`` is what these allow, by the
  processor time that one example takes on both sides;
- even with all data in memory, training reaches a little less than ``min(G, P, H)``: batches come
  in bursts and in order, and take time to receive. How much less, by number of workers, is
  ``efficiency``.

The report page uses the same functions, translated by ``javascript.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker.analysis.model.formulas import (
    INFINITE,
    fetch_rate,
    interpolate,
    inverse,
    loader_rate,
    page_cache_misses,
    partitioned_rate,
    prep_rate,
    smallest_cache,
)

PLACES = ("batch", "after-augmentation", "before-augmentation")
RECORDS = ("by offset", "in runs")
"""How examples are read from shards: any of them, or neighbours together (a shuffle by blocks)."""
FED = 0.05
"""Stalls below this share of the time are not worth acting on. bench/analyze_split.py: the split
is off by up to 0.037."""
NETWORK_MBPS = 1250.0
"""Network of a host in MB/s unless the user gives one: 10 Gbit/s, as hosts of clusters have at
least."""
MOST_CORES = 1024
"""More cores than that are not looked for: no host has them."""


@dataclass(frozen=True)
class Measured:
    """What an analysis found: the input of every prediction. Rates in examples/s."""

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
    """S, or None where it could not be told apart: then no question about fetching is answered."""
    cache: float | None = None
    """C, or None."""
    storage_most: float | None = None
    """S with a reader a core, where that was measured: for more workers than the job has."""
    miss_s: float = 0.0
    """Seconds that a worker waits for an example that is not in the page cache, beyond reading it
    from there, while storage is not busy otherwise; 0: misses overlap preparing, as in the
    paper."""
    efficiency: tuple[tuple[int, float], ...] = ()
    """What training reaches of ``min(G, P, H)`` with its data in memory, at most 1, by number of
    workers, ascending; straight in between, and outside that of the nearest. Empty: all of it."""
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
    """True if P holds fetching too, over a network: what it lacks then is counted as fetching."""
    packed: tuple[tuple[str, float], ...] = ()
    """How many times as fast storage gives examples from shards, for each order of ``RECORDS`` that
    was tried on a sample of the files."""
    prep_share: float = 0.0
    """Where P holds fetching: what waiting for it is of the time that preparing takes."""
    after_s: tuple[tuple[str, float], ...] = (("batch", 0.0),)
    """For each place of an echo whose split was measured: worker seconds an example that are
    paid behind it, for every use."""


@dataclass(frozen=True)
class Change:
    """What would be different. The defaults change nothing."""

    cores: int | None = None
    """Processors, each with a worker on it."""
    cache_bytes: int | None = None
    """Bytes of a never-evicting cache; None leaves the cached fraction as it was found."""
    storage_mbps: float | None = None
    """Storage bandwidth in MB/s (10^6 bytes)."""
    accelerator: float = 1.0
    """The accelerator's speed, as a multiple."""
    jobs: int = 1
    """Jobs at a time on this host, each with an accelerator of its own, on the same data."""
    sharing: bool = False
    """True if these jobs share one preparation."""
    echo: float = 1.0
    """Echoing factor: mean uses of a fresh example."""
    echo_at: str = "batch"
    """Where the echo stands: one of PLACES."""
    hosts: int = 1
    """Hosts like this one that train together, and whose caches hold a part of the data each."""
    network_mbps: float = NETWORK_MBPS
    """What each of these takes from the others' memories, in MB/s."""
    records: str = ""
    """How examples are read from shards that the files were packed into: one of RECORDS; empty:
    the files are as they are."""


NOTHING = Change()


@dataclass(frozen=True)
class Prediction:
    """How fast one job runs. Rates in examples/s."""

    rate: float
    """Examples (uses, under echoing) that a job trains on."""
    fresh_rate: float
    """Fresh examples of these. A use of a repeat may be worth less than a fresh example."""
    steps_per_s: float
    """Batches a second."""
    bound: str
    """What limits: "compute" where less than FED is lost, else "prep", "fetch" or "processors"."""
    fetch: float
    """F, uses/s; infinite where fetching is not known."""
    prep: float
    """P, uses/s."""
    ingestion: float
    """G."""
    processors: float
    """H, uses/s."""
    loader: float
    """What fetch and prep give together, uses/s."""
    compute: float
    """Share of the time that is compute: ``rate / G``."""
    prep_stall: float
    """Share lost to prep, as it would be with everything in memory."""
    fetch_stall: float
    """Share lost to fetch, on top."""


def check_change(measured: Measured, change: Change) -> None:
    """Raise ValueError for a question that the analysis cannot answer, saying why."""
    for name, value, least in (
        ("cores", change.cores, 1),
        ("cache", change.cache_bytes, 0),
        ("jobs", change.jobs, 1),
        ("echo", change.echo, 1),
        ("hosts", change.hosts, 1),
    ):
        if value is not None and not least <= value < INFINITE:
            raise ValueError(f"{name}={value}: at least {least}")
    above_0 = {
        "storage-mbps": change.storage_mbps,
        "accelerator": change.accelerator,
        "network-mbps": change.network_mbps,
    }
    for name, number in above_0.items():
        if number is not None and not 0 < number < INFINITE:
            raise ValueError(f"{name}={number}: above 0")
    if change.echo_at not in PLACES:
        raise ValueError(f"echo-at={change.echo_at!r}: one of {', '.join(PLACES)}")
    if change.echo > 1 and change.echo_at not in dict(measured.after_s):
        raise ValueError(
            f"echo-at={change.echo_at}: the analysis could not measure what is paid before and "
            "after that place (a dataset's __getitem__ is one piece, seen from outside); analyze "
            "a stoker pipeline, whose stages are known, or ask for one of: "
            + ", ".join(place for place, _ in measured.after_s)
        )
    fetching = change.cache_bytes is not None or change.storage_mbps is not None
    fetching = fetching or change.hosts > 1
    if fetching and (measured.storage is None or measured.cache is None):
        raise ValueError(
            "cache, storage-mbps, hosts: the analysis could not tell fetching apart from "
            "preparation, so that nothing can be said about storage; the report says why"
        )
    if change.records:
        _check_records(measured, change)
    if change.storage_mbps is not None and not measured.example_bytes:
        raise ValueError("storage-mbps: the report does not know how many bytes an example takes")
    if change.hosts > 1 and not measured.example_bytes:
        raise ValueError("hosts: the report does not know how many bytes an example takes")
    if change.cache_bytes is not None and dataset_bytes(measured) is None:
        raise ValueError("cache: the report does not know how many bytes the dataset takes")


def _check_records(measured: Measured, change: Change) -> None:
    if change.records not in dict(measured.packed):
        raise ValueError(
            "format: packing was not tried by this analysis, or could not be; the report says why"
        )
    if change.storage_mbps is not None:
        raise ValueError("format: it was tried on the storage that there is: no storage-mbps")
    if measured.prep_share == 0.0 and (measured.storage is None or measured.cache is None):
        raise ValueError(
            "format: the analysis could not tell fetching apart from preparation, so that nothing "
            "can be said about storage; the report says why"
        )


def packing_gain(measured: Measured, change: Change) -> float:
    """Return how many times as fast examples come from storage, packed as the change says."""
    for name, faster in measured.packed:
        if name == change.records:
            return faster
    return 1.0


def cached_fraction(measured: Measured, change: Change) -> float:
    """Return x: what the change's cache holds, or what the analysis found; of hosts, together."""
    size = dataset_bytes(measured)
    if change.cache_bytes is None or size is None:
        return min(1.0, change.hosts * measured.cached_fraction)
    return min(1.0, change.hosts * change.cache_bytes / size)


def storage_rate(measured: Measured, change: Change) -> float | None:
    """Return S: what the change's storage gives, or what the analysis found; None: not known.

    For more workers than the job has, it is S with a reader a core.
    """
    if change.storage_mbps is not None and measured.example_bytes:
        return change.storage_mbps * 1e6 / measured.example_bytes
    storage = measured.storage
    if (change.cores or 0) > max(1, measured.workers):
        storage = measured.storage_most or measured.storage
    return None if storage is None else storage * packing_gain(measured, change)


def cache_rate(measured: Measured, change: Change) -> float | None:
    """Return C; for more workers than the job has, no less than S with a reader a core.

    C was measured with the job's own workers, and memory is no slower than storage. Of several
    hosts, what their memories give one of them.
    """
    if measured.cache is None:
        return None
    own = measured.cache
    if (change.cores or 0) > max(1, measured.workers):
        own = max(own, measured.storage_most or 0.0)
    network = change.network_mbps * 1e6 * inverse(measured.example_bytes or 0.0)
    return partitioned_rate(own, network, change.hosts)


def miss_seconds(measured: Measured, change: Change) -> float:
    """Return what a miss makes a worker wait.

    Where the job's workers, waiting, take all that storage gives (S = W / miss_s), the wait
    shrinks as storage gets faster; where they leave most of it, the wait is latency, and stays.
    In between: in proportion, an assumption. From shards a miss is taken to be as much shorter as
    reading an example is.
    """
    if change.storage_mbps is None or not measured.example_bytes or not measured.storage:
        return measured.miss_s / packing_gain(measured, change)
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


def worker_seconds_behind(measured: Measured, place: str) -> float:
    """Return the worker seconds an example that are paid behind an echo at a place."""
    for name, seconds in measured.after_s:
        if name == place:
            return seconds
    return 0.0


def predict(measured: Measured, change: Change = NOTHING) -> Prediction:
    """Return how fast each job runs after ``change``.

    ``min(F, k * min(G, H, 1 / (1/P + w)))``, with ``k`` the efficiency for that many workers and
    ``w`` what they wait for misses; without workers, where training waits while it prepares,
    ``k / (1/G + 1/loader)``.

    With K jobs that do not share, each gets a K-th of the preparation, of the storage and of the
    processors; with sharing, all of it is used once for all. Under an echo of factor e, a use
    costs ``1/(e F)`` of fetching and ``1/P - (1 - 1/e) * t_before/W`` of preparation, where
    ``t_before`` are the worker seconds an example in front of the echo.

    From shards, what storage gives, and what P holds of fetching, is faster by what was tried.

    With several hosts this is the speed of one of them. Each is taken to be like the one that was
    measured, its storage too; serving the others is taken to cost nothing but the network.

    Raises ValueError where the analysis cannot answer.
    """
    check_change(measured, change)
    echo = change.echo
    divided_by = 1 if change.sharing else change.jobs
    ingestion = measured.ingestion * change.accelerator

    workers = change.cores if change.cores is not None else measured.workers
    alone = workers == 0
    unpacked = 1.0 - 1.0 / packing_gain(measured, change)
    fresh_prep_s = inverse(prep_rate(measured.prep, workers)) * (
        1.0 - measured.prep_share * unpacked
    )
    behind_s = worker_seconds_behind(measured, change.echo_at) / max(1, workers)
    behind_s = min(behind_s, fresh_prep_s)
    use_prep_s = (fresh_prep_s - behind_s) / echo + behind_s
    prep_divided_by = 1 if alone else divided_by  # each training process prepares by itself
    prep_s = prep_divided_by * use_prep_s

    x = cached_fraction(measured, change)
    fetch_s = waiting_s = 0.0
    storage, cache = storage_rate(measured, change), cache_rate(measured, change)
    if storage is not None and cache is not None:
        fetch_s = divided_by * inverse(fetch_rate(x, storage, cache)) / echo
        waiting_s = miss_seconds(measured, change) / max(1, workers)
        waiting_s *= prep_divided_by * (1.0 - x) / echo
    loader = loader_rate(inverse(fetch_s), inverse(prep_s), waiting_s)

    cores = max(measured.cores, change.cores or 0)
    step_cpu_s = measured.step_cpu_s
    if measured.trains_on_cpu:
        step_cpu_s /= change.accelerator
    prep_cpu_s = interpolate(measured.prep_cpu, workers)
    prep_cpu_s *= use_prep_s / fresh_prep_s if fresh_prep_s > 0 else 1.0
    processors = inverse((change.jobs * step_cpu_s + divided_by * prep_cpu_s) / cores)

    reached = interpolate(measured.efficiency, workers, 1.0)

    def trained_rate(fetch: float, waiting_s: float) -> float:
        if alone:
            loader = loader_rate(fetch, inverse(prep_s), waiting_s)
            return reached * min(processors, inverse(inverse(ingestion) + inverse(loader)))
        unfetched = loader_rate(INFINITE, inverse(prep_s), waiting_s)
        return min(fetch, reached * min(ingestion, processors, unfetched))

    warm, rate = trained_rate(INFINITE, 0.0), trained_rate(inverse(fetch_s), waiting_s)
    compute, fetch_stall = rate / ingestion, 1.0 - rate / warm
    prep_stall = max(0.0, 1.0 - compute - fetch_stall)
    if compute > 1.0 - FED:
        bound = "compute"
    elif alone:
        bound = "fetch" if fetch_stall > prep_stall else "prep"
    # 1e-9: above what rounding leaves of a stall that is none.
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


def predict_with_page_cache(measured: Measured, change: Change) -> Prediction:
    """Return the same for a page cache of that size, whose misses are ``page_cache_misses``.

    Page caches of several hosts are each host's own.
    """
    check_change(measured, change)
    alone = replace(change, hosts=1)
    x = 1.0 - page_cache_misses(cached_fraction(measured, alone))
    return predict(replace(measured, cached_fraction=x), replace(alone, cache_bytes=None))


def dataset_bytes(measured: Measured) -> float | None:
    """Return the bytes of the whole dataset, or None where they are not known."""
    if not measured.example_bytes or not measured.examples:
        return None
    return measured.example_bytes * measured.examples


def find_cache_needed(measured: Measured, change: Change, prediction: Prediction) -> float | None:
    """Return x* after ``change``; None where fetching was not told apart."""
    storage, cache = storage_rate(measured, change), cache_rate(measured, change)
    if storage is None or cache is None:
        return None
    # Uses per fetch of an example: more of them under an echo, fewer where jobs divide it.
    uses = change.echo / (1 if change.sharing else change.jobs)
    # Without workers, training waits for whatever the loader takes.
    overlaps = measured.workers > 0 or change.cores is not None
    takes = min(prediction.ingestion, prediction.processors) if overlaps else INFINITE
    workers = max(1, measured.workers if change.cores is None else change.cores)
    miss_s = miss_seconds(measured, change) / workers / uses
    return smallest_cache(storage * uses, cache * uses, prediction.prep, takes, miss_s)


def find_cores_needed(measured: Measured, change: Change, prediction: Prediction) -> int | None:
    """Return the fewest cores with which P reaches both F and G; None: more than MOST_CORES."""
    # Less by what rounding may take.
    wanted = min(prediction.fetch, prediction.ingestion) * (1.0 - 1e-9)
    for cores in range(1, MOST_CORES + 1):
        if predict(measured, replace(change, cores=cores)).prep >= wanted:
            return cores
    return None
