"""The phases of an analysis, for any job that can be driven through them.

The job as it is; G, the same batches handed over again and again; P, the loader alone with its
data in memory, at several numbers of workers, each time followed by training on that; S and C, the
loader and its files, cold and warm. What happens is noted in the job's trace.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from dataclasses import dataclass
from typing import Protocol

from stoker.analysis.model import rates
from stoker.analysis.model.formulas import most_workers
from stoker.analysis.model.trace import RankTrace, Trace
from stoker.analysis.trials import cold_reads
from stoker.analysis.trials.trial_shard import TrialShard, choose_sample, try_packing
from stoker.basics import resources

# Two, so that a disturbance shows as an interval; each costs the user as much time again.
_ROUNDS = 2
# Of the data may stay in the page cache: the measured rate is off by no more. Other programs map
# some files.
_MOST_COLD = 0.05
# Times as fast as preparing, where storage is to keep up: a margin for the spread of drains.
# Chosen, not measured.
_SPARE_STORAGE = 1.5
# Times the rate of training: a margin, smaller as that rate is known better. Chosen, not measured.
_SPARE_PREP = 1.1


class Stopped(Exception):
    """The job, or the time for the analysis, came to an end during a phase."""


class DrainFailed(Stopped):
    """A drain gave too few batches in its time, or none."""


@dataclass(frozen=True)
class PhaseLimits:
    """How long the phases last, in seconds, and how much is tried."""

    first_drain_s: float
    warm_drain_s: float
    other_warm_drain_s: float
    """At other numbers of workers than the job's."""
    cold_drain_s: float
    reading_s: float
    """Files alone; cold with the job's readers twice as long."""
    all_warm_drains_s: float
    """After that, no further number of workers is tried."""
    filling_s: float
    """Reading the drained files, where they are not all in memory."""
    worker_counts: int
    """Numbers of workers, the job's own among them."""


class DrivenJob(Protocol):
    """A training job that does what the phases ask for, in all its ranks at once.

    Every method may raise Stopped, and appends to ``trace``.
    """

    trace: Trace
    """``ranks`` are known once the job ran as it is."""
    limits: PhaseLimits
    done: set[str]
    """Of "as-it-is", "G" and "drains" those that need not be repeated."""
    files: list[str]
    """All that a drain may read; known after ``find_files``."""

    def say(self, text: str) -> None:
        """Tell what goes on."""

    def run_as_it_is(self) -> None:
        """Let the job train, left alone (``RankTrace.rows``)."""

    def replay(self) -> None:
        """Have it train on a few batches again and again (``RankTrace.replayed``)."""

    def begin_drains(self) -> None:
        """Stop training, but for what ``train`` asks for."""

    def drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        """Read the loader with no training step in between (``RankTrace.drains[name]``).

        ``fresh``: the first time; later drains read what this one read, round and round, or
        ``once``. May raise DrainFailed, and appends nothing then.
        """

    def find_files(self) -> list[str]:
        """Find the files; return those that the first drain read, where that is known."""

    def train(self, workers: int, left: int) -> None:
        """Have it train on drained data in memory, one of ``left`` times that are to come
        (``RankTrace.trained[workers]``)."""

    def look_at_example(self) -> None:
        """Look at one of the examples, after all drains."""

    def try_requests(self) -> None:
        """Try what a request takes, where examples are files behind URLs."""


def run_phases(job: DrivenJob) -> None:
    """Drive a job through all phases that are not done. Raises Stopped."""
    if "as-it-is" not in job.done:
        job.run_as_it_is()
    if "G" not in job.done:
        job.replay()
    job.begin_drains()
    _drain_warm(job)
    job.done.add("drains")
    _drain_cold(job)
    job.look_at_example()
    _try_packing(job)
    job.try_requests()


def _drain_warm(job: DrivenJob) -> None:
    """Drain with the data in memory, at several numbers of workers, and train on that."""
    trace, limits = job.trace, job.limits
    until = time.monotonic() + limits.all_warm_drains_s
    rank = trace.ranks[0]
    job.drain("found", rank.workers, limits.first_drain_s, fresh=True)
    drained = job.find_files()
    with contextlib.suppress(OSError):
        if trace.files and cold_reads.resident_fraction(drained) not in (None, 1.0):
            cold_reads.read_files(drained, 4, limits.filling_s)
    first = rank.drains["found"][-1]
    startup_s = (first.arrivals_ns[0] - first.began_ns) / 1e9 if first.arrivals_ns else 0.0
    # Where workers import a lot, they do so in each drain anew.
    rounds = 1 if startup_s > 2 * limits.warm_drain_s else _ROUNDS
    cores = max(1, resources.usable_cores() // len(trace.ranks))
    counts = _list_worker_counts(rank.workers, cores)[: limits.worker_counts]
    for again in range(rounds):
        if again and (more := _find_more_workers(rank, max(counts), cores)) is not None:
            counts.insert(0, more)
        for place, count in enumerate(counts):
            if time.monotonic() > until and (again or count != rank.workers):
                trace.note("the job is slow: a larger --budget tries more worker counts")
                break
            own = count == rank.workers
            turn = f"{count} worker{'s' * (count != 1)}, round {again + 1} of {rounds}"
            job.say(f"P: data in memory, {turn}")
            drain_s = limits.warm_drain_s if own else limits.other_warm_drain_s
            try:
                job.drain(f"warm-{count}", count, drain_s)
            except DrainFailed:
                if own and not again:
                    raise
                trace.note(f"{turn}: the loader gave too few batches, and this is left out")
                continue
            job.say(f"training on data in memory, {turn}")
            job.train(count, (rounds - again) * len(counts) - place)
    with contextlib.suppress(OSError):
        if drained:
            trace.warm_fraction = cold_reads.resident_fraction(drained)


def _list_worker_counts(workers: int, cores: int) -> list[int]:
    """Return the worker counts of the scaling curve: the job's own first, at most five."""
    counts = [workers, 1, cores]
    if cores > 4:
        # Between 1 and all, evenly in their ratios: where the curve bends is not known.
        counts += [round(cores**0.5), round(cores**0.75)]
    return list(dict.fromkeys(counts))


def _find_more_workers(rank: RankTrace, workers: int, cores: int) -> int | None:
    """Return how many workers to try beyond the most that were drained warm; None: no more.

    Where preparing mostly waits, more than processors are worth a try: so many as the processors
    have time for, by what preparing computed with that many ``workers``, and no more than training
    has a use for.
    """
    batch = rates.estimate_batch_size(rank)
    drains = rank.drains.get(f"warm-{workers}", [])
    rate = rates.estimate_drained(drains, batch)
    takes, _ = rates.estimate_ingestion(rank, batch)
    if rate is None or takes is None:
        return None
    cpu_s = rates.estimate_prep_cpu_s(drains, batch)
    most = most_workers(cores, workers, rate.value, cpu_s)
    wanted = min(most, math.ceil(_SPARE_PREP * takes.value / rate.value * workers))
    return wanted if wanted > workers else None


def _drain_cold(job: DrivenJob) -> None:
    """Drain the loader, and read its files, with nothing in the page cache."""
    reasons = job.trace.reasons
    if not job.files:
        reasons["S"] = reasons.get("files", "no file was seen")
        return
    try:
        for again in range(_ROUNDS):
            if not _drain_cold_once(job, f"round {again + 1} of {_ROUNDS}"):
                return
    except OSError as error:
        reasons["S"] = f"the loader's files cannot be read: {error}"


def _drain_cold_once(job: DrivenJob, turn: str) -> bool:
    """Do all of it once; return whether it could be done. Raises OSError."""
    trace, limits = job.trace, job.limits
    rank = trace.ranks[0]
    job.say(f"S: dropping the loader's files from the page cache, {turn}")
    cold_reads.drop_files(job.files)
    left = cold_reads.resident_fraction(trace.files or job.files)
    if left is None or left > _MOST_COLD:
        share = "an unknown part" if left is None else f"{left:.0%}"
        trace.reasons["S"] = (
            f"{share} of the data stayed in the page cache after it was asked to leave "
            "(files that are mapped, or belong to somebody else)"
        )
        return False
    job.say(f"S: reading the loader with nothing in memory, {turn}")
    job.drain("cold", rank.workers, limits.cold_drain_s, once=True)
    if not trace.files:
        return True
    trace.readers = max(1, rank.workers) * len(trace.ranks)
    job.say(f"S, C: reading {len(trace.files):,} files, cold and warm, {turn}")
    _read_files(trace, limits.reading_s)
    batch = rates.estimate_batch_size(rank)
    prep = rates.estimate_drained(rank.drains[f"warm-{rank.workers}"], batch)
    prep_files = prep.value * len(trace.files) / trace.files_examples if prep is not None else 0.0
    if _drop_part(trace, prep_files):
        job.say(f"S: reading the loader with a part not in memory, {turn}")
        job.drain("partly", rank.workers, limits.cold_drain_s, once=True)
        job.drain("whole", rank.workers, limits.cold_drain_s, once=True)
    return True


def _read_files(trace: Trace, seconds: float) -> None:
    """Read the job's files cold and warm, by as many readers as it has.

    And cold by a reader a core, where these are more. Raises OSError.
    """
    files = trace.files
    cold_reads.drop_files(files)
    reads = cold_reads.read_files(files, trace.readers, 2 * seconds)
    trace.cold_reads.append(reads)
    read = files[: round(sum(count for count, _ in reads))]
    trace.warm_reads.append(cold_reads.read_files(read, trace.readers, seconds))
    if resources.usable_cores() > trace.readers:
        cold_reads.drop_files(files)
        trace.most_reads.append(cold_reads.read_files(files, resources.usable_cores(), seconds))


def _try_packing(job: DrivenJob) -> None:
    """Read a sample of the job's files as they are, and from a trial shard."""
    trace = job.trace
    if not trace.cold_reads or "S" in trace.reasons:
        return
    try:
        # As many as storage gave in the time that reading has: writing them takes as long again.
        sample = choose_sample(trace.files, round(sum(count for count, _ in trace.cold_reads[-1])))
        job.say(f"packing: reading {len(sample):,} files as they are, and from a trial shard")
        with TrialShard(sample) as shard:
            for _ in range(_ROUNDS):
                trial = try_packing(sample, shard, trace.readers, job.limits.reading_s)
                trace.packing_trials.append(trial)
    except OSError as error:
        trace.reasons["packing"] = f"no trial shard can be written beside the files: {error}"


def _drop_part(trace: Trace, prep_files: float) -> bool:
    """Drop so many of the files that storage keeps up with preparing ``prep_files`` a second.

    So what misses cost then is the wait for each, and not that storage is short. Returns whether
    the kernel says what is in memory. Raises OSError.
    """
    counts, seconds = zip(*trace.cold_reads[-1], strict=True)
    rate = sum(counts) / max(1e-9, sum(seconds))
    share = min(1.0, rate / (_SPARE_STORAGE * max(1e-9, prep_files)))
    # At most a minute: what is not in memory by then is drained as it is.
    cold_reads.read_files(trace.files, resources.usable_cores(), 60.0)
    chosen = random.Random(0).sample(trace.files, max(1, round(share * len(trace.files))))
    cold_reads.drop_files(chosen)
    resident = cold_reads.resident_fraction(trace.files)
    if resident is None or resident == 1.0:
        return False
    trace.partly_fraction = resident
    return True
