"""The phases of an analysis, for any ``DrivenJob``.

The phases are: the job as it is; G, training on the same batches again and again; P, the loader
alone with its data in memory, with several numbers of workers, each time followed by training on
that data; the job as it is and G once more, by turns; S and C, the loader and its files, not in the
page cache ("cold") and in it ("warm"). The job's trace records the results.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import Protocol

from stoker.analysis import cold_reads
from stoker.analysis.host_load import watch_host
from stoker.analysis.model import rates
from stoker.analysis.model.formulas import most_workers
from stoker.analysis.model.trace import RankTrace, Trace

# Rounds of each measurement. Two, so that a disturbance widens the interval; more would cost the
# user more time.
_ROUNDS = 2
# The fraction of the data that may stay in the page cache when it is dropped: other programs map
# some files. It makes the rate wrong by no more than this.
_MOST_COLD = 0.05
# Storage keeps up if it is this many times as fast as preparation: a margin for the spread of
# drains. Chosen, not measured.
_SPARE_STORAGE = 1.5
TURNS = 3
"""Turns of the job as it is and G, beside the first one: four values, for an interval."""
# Training by turns takes about as long as so many phases of training. Chosen, not measured.
_TURNS_TAKE = 4
# More workers are tried until preparation is this many times as fast as training: a smaller margin,
# as the rate of training is known better. Chosen, not measured.
_SPARE_PREP = 1.1


class Stopped(Exception):
    """The job ended during a phase, or the time for the analysis is over."""


class DrainFailed(Stopped):
    """A drain got no batch in its time, or too few."""


class DrivenJob(Protocol):
    """A training job that the phases control, in all its ranks at once.

    Each method may raise Stopped, and adds its results to ``trace``.
    """

    trace: Trace
    """The results; ``ranks`` are known once the job has run as it is."""
    unit_s: float
    """The time of a drain, in seconds; a cold one takes twice as long."""
    patience_s: float
    """After so many seconds of warm drains no further number of workers is tried."""
    worker_counts: int
    """How many numbers of workers are tried, including the job's own."""
    done: set[str]
    """The phases that need not be repeated, of "as-it-is", "G" and "drains"."""
    files: list[str]
    """The files that a drain may read; known after ``find_files``."""

    def say(self, text: str) -> None:
        """Report progress."""

    def run_as_it_is(self) -> None:
        """Let the job train without interference (``RankTrace.rows``)."""

    def replay(self) -> None:
        """Let it train on a few batches again and again (``RankTrace.replayed``)."""

    def begin_drains(self) -> None:
        """Stop training, except in ``train``."""

    def drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        """Read the loader without training steps in between (``RankTrace.drains[name]``).

        The first drain is ``fresh``. Later ones read the same data again, in a loop or ``once``.
        It may raise DrainFailed, and then adds no result.
        """

    def find_files(self) -> list[str]:
        """Find the files; return those that the first drain read, if known."""

    def train(self, workers: int, left: int) -> None:
        """Let it train on drained data in memory (``RankTrace.trained[workers]``).

        ``left`` is how many such calls are still to come, with this one.
        """

    def sample_stacks(self) -> None:
        """Drain once more, and look at the code that prepares (``RankTrace.sampled``).

        In a drain of its own: looking takes time from the workers, which is not to be in P.
        """

    def alternate(self) -> None:
        """Let it train by turns on its own data and on prepared batches (``RankTrace.turns``).

        The job as it is and G are measured again so: the load of a host changes, and a ratio of
        neighbours does not mind.
        """

    def look_at_example(self) -> None:
        """Inspect some of the examples, after the first drain has told what was cached."""

    def keep_examples(self) -> None:
        """Drain some examples kept in memory, where they are the same in each reading, and train on
        them, by turns with the job as it is (``RankTrace.drains["kept"]``, ``kept_turns``)."""


def run_phases(job: DrivenJob) -> None:
    """Run all phases of a job that are not done. Raises Stopped."""
    with watch_host(job.trace.host_loads):
        if "as-it-is" not in job.done:
            job.run_as_it_is()
        if "G" not in job.done:
            job.replay()
        job.begin_drains()
        _drain_warm(job)
        job.sample_stacks()
        job.alternate()
    job.done.add("drains")
    _drain_cold(job)
    job.keep_examples()


def _drain_warm(job: DrivenJob) -> None:
    """Drain with the data in memory, with several numbers of workers, and train on that data."""
    trace, rank = job.trace, job.trace.ranks[0]
    until = time.monotonic() + job.patience_s
    job.drain("found", rank.workers, job.unit_s, fresh=True)
    drained = job.find_files()
    job.look_at_example()
    with contextlib.suppress(OSError):
        if trace.files and cold_reads.resident_fraction(drained) not in (None, 1.0):
            cold_reads.read_files(drained, 4, job.patience_s / 4)
    first = rank.drains["found"][-1]
    startup_s = (first.arrivals_ns[0] - first.began_ns) / 1e9 if first.arrivals_ns else 0.0
    # Workers that import much do so in each drain again; then one round must be enough.
    rounds = 1 if startup_s > 2 * job.unit_s else _ROUNDS
    cores = trace.share_of_cores
    counts = _list_worker_counts(rank.workers, cores)[: job.worker_counts]
    for again in range(rounds):
        if again and (more := _find_more_workers(rank, max(counts), cores)) is not None:
            counts.insert(0, more)
        for place, count in enumerate(counts):
            if time.monotonic() > until and (again or count != rank.workers):
                trace.note("the job is slow: with more --max-seconds, more worker counts are tried")
                break
            own = count == rank.workers
            turn = f"{count} worker{'s' * (count != 1)}, round {again + 1} of {rounds}"
            job.say(f"P: data in memory, {turn}")
            try:
                job.drain(f"warm-{count}", count, job.unit_s)
            except DrainFailed:
                if own and not again:
                    raise
                trace.note(f"{turn}: left out, as the loader gave too few batches")
                continue
            job.say(f"training on data in memory, {turn}")
            job.train(count, (rounds - again) * len(counts) - place + _TURNS_TAKE)
    if not rank.trained:
        trace.note(
            "training on data in memory was not measured: predictions assume that it reaches the "
            "speed of its parts"
        )
    with contextlib.suppress(OSError):
        if drained:
            trace.warm_fraction = cold_reads.resident_fraction(drained)


def _list_worker_counts(workers: int, cores: int) -> list[int]:
    """Return the worker counts of the scaling curve, the job's own first; at most five."""
    counts = [workers, 1, cores]
    if cores > 4:
        # In equal ratios between 1 and all cores, as it is unknown where the curve bends.
        counts += [round(cores**0.5), round(cores**0.75)]
    return list(dict.fromkeys(counts))


def _find_more_workers(rank: RankTrace, workers: int, cores: int) -> int | None:
    """Return a larger number of workers to try; None if more cannot help.

    If preparing mostly waits, more workers than processors may help: as many as the processors
    have time for, by the processor time of ``workers``, but no more than training can use.
    """
    batch = rates.estimate_batch_size(rank)
    drains = rank.drains.get(f"warm-{workers}", [])
    rate = rates.estimate_drained(drains, batch)
    takes, _ = rates.estimate_ingestion(rank, batch)
    if rate is None or takes is None:
        return None
    most = most_workers(cores, workers, rate.value, rates.estimate_prep_cpu_s(drains, batch))
    wanted = min(most, math.ceil(_SPARE_PREP * takes.value / rate.value * workers))
    return wanted if wanted > workers else None


def _drain_cold(job: DrivenJob) -> None:
    """Drain the loader, and read its files, with nothing in the page cache."""
    reasons = job.trace.reasons
    if not job.files:
        reasons["S"] = reasons.get("files", "the job read no file")
        return
    try:
        for again in range(_ROUNDS):
            if not _drain_cold_once(job, f"round {again + 1} of {_ROUNDS}"):
                return
    except OSError as error:
        reasons["S"] = f"the loader's files cannot be read: {error}"


def _drain_cold_once(job: DrivenJob, turn: str) -> bool:
    """Do one round of cold measurements; True if it was possible. Raises OSError."""
    trace, rank = job.trace, job.trace.ranks[0]
    job.say(f"S: dropping the loader's files from the page cache, {turn}")
    cold_reads.drop_files(job.files)
    left = cold_reads.resident_fraction(trace.files or job.files)
    if left is None or left > _MOST_COLD:
        share = "an unknown part" if left is None else f"{left:.0%}"
        trace.reasons["S"] = (
            f"{share} of the data could not be dropped from the page cache (other programs map "
            "these files, or another user owns them)"
        )
        return False
    job.say(f"S: reading the loader with nothing in memory, {turn}")
    job.drain("cold", rank.workers, 2 * job.unit_s, once=True)
    if not trace.files:
        return True
    trace.readers = max(1, rank.workers) * len(trace.ranks)
    job.say(f"S, C: reading {len(trace.files):,} files, cold and warm, {turn}")
    _read_files(trace, job.unit_s)
    batch = rates.estimate_batch_size(rank)
    prep = rates.estimate_drained(rank.drains[f"warm-{rank.workers}"], batch)
    prep_files = prep.value * len(trace.files) / trace.files_examples if prep is not None else 0.0
    if _drop_part(trace, prep_files):
        job.say(f"S: reading the loader with a part not in memory, {turn}")
        job.drain("partly", rank.workers, 2 * job.unit_s, once=True)
        job.drain("whole", rank.workers, 2 * job.unit_s, once=True)
    return True


def _read_files(trace: Trace, seconds: float) -> None:
    """Read the job's files cold and warm, with as many readers as the job has.

    If there are more cores, also read them cold with one reader per core. Raises OSError.
    """
    files, read = trace.files, cold_reads.read_files
    cold_reads.drop_files(files)
    reads = read(files, trace.readers, 2 * seconds)
    trace.cold_reads.append(reads)
    have_read = files[: round(sum(count for count, _ in reads))]
    trace.warm_reads.append(read(have_read, trace.readers, seconds))
    if trace.cores > trace.readers:
        cold_reads.drop_files(files)
        trace.most_reads.append(read(files, trace.cores, seconds))


def _drop_part(trace: Trace, prep_files: float) -> bool:
    """Drop so many files that storage keeps up with the preparation of ``prep_files`` a second.

    Then a miss costs only its own wait, not storage's limit. True if the kernel says which files
    are in memory. Raises OSError.
    """
    counts, seconds = zip(*trace.cold_reads[-1], strict=True)
    rate = sum(counts) / max(1e-9, sum(seconds))
    share = min(1.0, rate / (_SPARE_STORAGE * max(1e-9, prep_files)))
    # For a minute at most; files that are not in memory by then stay as they are.
    cold_reads.read_files(trace.files, trace.cores, 60.0)
    chosen = random.Random(0).sample(trace.files, max(1, round(share * len(trace.files))))
    cold_reads.drop_files(chosen)
    resident = cold_reads.resident_fraction(trace.files)
    if resident is None or resident == 1.0:
        return False
    trace.partly_fraction = resident
    return True
