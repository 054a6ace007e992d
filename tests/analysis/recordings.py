"""What analyses record, made up: the parts of a job as fast as one says, each for itself."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from stoker.analysis.model.trace import Drain, RankTrace, Step, Trace
from stoker.analysis.probe.records import BATCH, REPLAYED, STARTED, TRAINS, Row, WorkRecord

BATCH_SIZE = 10
BATCHES = 200
EXAMPLES = 100_000


@dataclass(frozen=True)
class Parts:
    """A job: what it did, and what its parts gave when they were looked at one by one."""

    rate: float
    """Examples/s as it ran."""
    wait: float
    """Share of that time inside ``next()``."""
    G: float
    P: dict[int, float]
    """By number of workers; with those of the job."""
    trained: dict[int, float]
    workers: int
    S: float | None
    C: float
    cached: float
    prep_cpu_s: float
    step_cpu_s: float


rates = st.floats(5.0, 5_000.0)


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    """Return jobs whose parts agree with the whole, or do not."""
    counts = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
    workers = draw(st.sampled_from([0, *counts]))
    P = {count: draw(rates) for count in [*([0] if workers == 0 else []), *counts]}
    S = draw(st.none() | rates)
    return Parts(
        rate=draw(rates),
        wait=draw(st.floats(0.0, 1.0)),
        G=draw(rates),
        P=P,
        trained={count: rate * draw(st.floats(0.5, 1.2)) for count, rate in P.items()},
        workers=workers,
        S=S,
        C=(S or 1.0) * draw(st.floats(1.0, 50.0)),
        cached=draw(st.floats(0.0, 1.0)),
        prep_cpu_s=draw(st.floats(0.0, 1e-2)),
        step_cpu_s=draw(st.floats(0.0, 1e-2)),
    )


def recorded(job: Parts) -> Trace:
    """Return the record of an analysis of such a job."""
    about = {
        "slot": 0,
        "site": "train.py:41",
        "describes": f"Photographs, batch {BATCH_SIZE}, {job.workers} workers",
        "batch_size": BATCH_SIZE,
        "workers": job.workers,
    }
    rank = RankTrace(1, 0, {"loaders": [about]}, slot=0)
    rank.described = {"examples": EXAMPLES, "prefetch": 2, "ordered": True, "cuda": False}
    rank.rows = _rows(BATCH_SIZE / job.rate, job.wait, 0.0, TRAINS)
    rank.replayed = _rows(BATCH_SIZE / job.G, 0.0, job.step_cpu_s, TRAINS | REPLAYED)
    for count, rate in job.P.items():
        rank.drains[f"warm-{count}"] = [_drain(count, rate, job.prep_cpu_s)]
        lasts_s = BATCH_SIZE / job.trained[count]
        rank.trained[count] = [[Step(lasts_s, job.wait * lasts_s)] * (BATCHES - 1)]
    record = Trace(["train.py"], [rank], starts=1)
    if job.S is not None:
        cold = min(job.S, job.P[job.workers])
        rank.drains["cold"] = [_drain(job.workers, cold, job.prep_cpu_s)]
        record.files, record.files_examples = [f"{n}.jpg" for n in range(80)], 80
        record.cold_reads = [[(10, 10 / job.S)] * 8]
        record.warm_reads = [[(10, 10 / job.C)] * 8]
        pages = [round(1000 * job.cached), 1000]
        rank.opened = [
            {"kind": "file", "name": name, "bytes": 100_000, "pages": pages, "unread": True}
            for name in record.files
        ]
    return record


def _rows(every_s: float, wait: float, cpu_s: float, flags: int) -> list[Row]:
    every_ns = int(1e9 * every_s)
    cpu_ns = int(1e9 * cpu_s * BATCH_SIZE)
    rows = [Row(0, 0, 0, 0, 0, STARTED | flags, 0)]
    for n in range(BATCHES):
        at = n * every_ns
        rows.append(Row(0, 0, n, at, at + int(wait * every_ns), BATCH | flags, n * cpu_ns))
    return rows


def _drain(workers: int, rate: float, cpu_s: float) -> Drain:
    every_ns = int(1e9 * BATCH_SIZE / rate)
    each_ns = int(1e9 * cpu_s * BATCH_SIZE)
    many = max(1, workers)
    work = [
        WorkRecord(2 + n % many, n % many, 0, 0, (n // many) * each_ns, 0, BATCH_SIZE, -1)
        for n in range(BATCHES)
    ]
    arrivals = [(n + 1) * every_ns for n in range(BATCHES)]
    return Drain(workers, arrivals, 0, 0.0, work)
