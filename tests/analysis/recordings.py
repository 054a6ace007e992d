"""What analyses record, made up: the parts of a job as fast as one says, each for itself."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from stoker.analysis.model.trace import Drain, RankTrace, Step, Trace, Turn
from stoker.analysis.probe.records import (
    BATCH,
    LEARNED,
    REPLAYED,
    STARTED,
    TRAINS,
    Row,
    WorkRecord,
)

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
    S: float | None = None
    C: float = 1.0
    cached: float = 1.0
    prep_cpu_s: float = 0.0
    step_cpu_s: float = 0.0


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
        "changes": None,
    }
    rank = RankTrace(1, 0, {"loaders": [about]}, slot=0)
    rank.described = {"examples": EXAMPLES, "prefetch": 2, "cuda": False}
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


def keep(rank: RankTrace, trained: float, beside: float = 0.0) -> None:
    """Record that training on examples in a cache is so fast.

    ``beside``: the job's speed right before that, in turns of which the host was slower in some.
    """
    rank.described |= {"example_bytes": 40_000, "varies": False}
    rank.drains["kept"] = [_drain(rank.workers, 20_000.0, 0.0)]
    for slower in (1.0, 1.5, 0.7) if beside else (1.0,):
        own = [Step(slower * BATCH_SIZE / beside, 0.0)] * 9 if beside else []
        rank.kept_turns.append(Turn(own, [Step(slower * BATCH_SIZE / trained, 0.0)] * 9))


def evaluate_on_training_data(rank: RankTrace, faster: float) -> None:
    """Record that the loader is iterated once more in each phase, without a backward pass.

    Steps are so much faster then.
    """
    for rows in (rank.rows, rank.replayed):
        first, last = rows[1], rows[-1]
        every_ns = int((rows[2].entered_ns - first.entered_ns) / faster)
        rows[2:] = [row._replace(kind=row.kind | LEARNED) for row in rows[2:]]
        at = last.left_ns
        rows.append(last._replace(epoch=1, entered_ns=at, left_ns=at, kind=STARTED | TRAINS))
        for n in range(BATCHES):
            at = last.left_ns + n * every_ns
            rows.append(first._replace(epoch=1, number=BATCHES + n, entered_ns=at, left_ns=at))


def _rows(every_s: float, wait: float, cpu_s: float, flags: int) -> list[Row]:
    every_ns = int(1e9 * every_s)
    cpu_ns = int(1e9 * cpu_s * BATCH_SIZE)
    rows = [Row(0, 0, 0, 0, 0, STARTED | flags, 0)]
    for n in range(BATCHES):
        at = n * every_ns
        rows.append(Row(0, 0, n, at, at + int(wait * every_ns), BATCH | flags, n * cpu_ns))
    return rows


class MadeUpJob:
    """A ``DrivenJob`` that takes no time: what ``Parts`` say is recorded, phase by phase.

    Its workers wait for nothing but what they prepare: their number multiplies P.
    """

    def __init__(self, job: Parts) -> None:
        self.job = job
        self.trace = Trace(["train.py"], starts=1, cores=2)
        self.trace.reasons["files"] = "made up"
        self.unit_s, self.patience_s, self.worker_counts = 1.0, 60.0, 5
        self.done: set[str] = set()
        self.files: list[str] = []

    def say(self, text: str) -> None: ...

    def run_as_it_is(self) -> None:
        found = recorded(self.job).ranks[0]
        found.drains, found.trained, found.replayed = {}, {}, []
        self.trace.ranks = [found]

    def replay(self) -> None:
        self.trace.ranks[0].replayed = recorded(self.job).ranks[0].replayed

    def begin_drains(self) -> None: ...

    def drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        rate = self.job.P[1] * max(1, workers)
        drain = _drain(workers, rate, self.job.prep_cpu_s)
        self.trace.ranks[0].drains.setdefault(name, []).append(drain)

    def find_files(self) -> list[str]:
        return []

    def train(self, workers: int, left: int) -> None:
        lasts_s = BATCH_SIZE / min(self.job.G, self.job.P[1] * max(1, workers))
        steps = [Step(lasts_s, 0.0)] * (BATCHES - 1)
        self.trace.ranks[0].trained.setdefault(workers, []).append(steps)

    sample_stacks = alternate = look_at_example = keep_examples = begin_drains


def _drain(workers: int, rate: float, cpu_s: float) -> Drain:
    every_ns = int(1e9 * BATCH_SIZE / rate)
    each_ns = int(1e9 * cpu_s * BATCH_SIZE)
    many = max(1, workers)
    work = [
        WorkRecord(2 + n % many, n % many, 0, 0, (n // many) * each_ns, BATCH_SIZE, -1)
        for n in range(BATCHES)
    ]
    arrivals = [(n + 1) * every_ns for n in range(BATCHES)]
    return Drain(workers, arrivals, 0, 0.0, work)
