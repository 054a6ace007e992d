"""Computes rates with intervals from a trace."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stoker.analysis.cold_reads import Reads
from stoker.analysis.model.report import AsItIs, Cost, Rate
from stoker.analysis.model.trace import Drain, RankTrace, Step, Turn
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row, WorkRecord
from stoker.analysis.probe.step_parts import PARTS

# The number of blocks of a measurement: each is long enough for whole bursts of workers, and eight
# are enough for an interval (Student's t is then 2.4).
_BLOCKS = 8
# Fewer looks tell nothing: 100 looks alone give intervals of up to 20 percent. Pieces with less of
# the time are not worth naming. Chosen, not measured.
_FEWEST_LOOKS, _SMALLEST_SHARE = 100, 0.03
# Of a step.
_SMALLEST_PART = 0.005


# Student's t of a two-sided 95 % interval, for 1 to 30 degrees of freedom. Not a bootstrap: that of
# five values holds the mean in some 80 % of the cases.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def estimate_interval(values: Sequence[float]) -> Rate:
    """Return the mean of at least two values, and its 95 % interval."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    half = find_t(freedom) * statistics.stdev(values) / math.sqrt(len(values))
    return Rate(mean, mean - half, mean + half)


def find_t(freedom: int) -> float:
    """Return Student's t for a two-sided 95 % interval; ``freedom`` is at least 1."""
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.46 / freedom


def estimate_rate(blocks: Sequence[tuple[float, float]]) -> Rate | None:
    """Return the rate of (amount, seconds) blocks, and its 95 % interval by their spread.

    None for no block. For a single one, the interval is from 0 to twice the rate.
    """
    blocks = [(amount, seconds) for amount, seconds in blocks if seconds > 0 and amount > 0]
    if not blocks:
        return None
    value = sum(amount for amount, _ in blocks) / sum(seconds for _, seconds in blocks)
    if len(blocks) == 1:
        return Rate(value, 0.0, 2 * value)
    found = estimate_interval([amount / seconds for amount, seconds in blocks])
    half = found.value - found.low
    return Rate(value, max(0.0, value - half), value + half)


def _estimate_step_rate(seconds: Sequence[float], batch: float, period: int) -> Rate | None:
    """Return the rate of steps of ``batch`` examples each, by about eight blocks of whole periods.

    Waits come in bursts with the number of workers as their period, so only whole periods are
    samples. A rest is left out, unless there is nothing else.
    """
    period = max(1, period)
    size = max(period, len(seconds) // _BLOCKS // period * period)
    blocks = [
        (batch * size, sum(seconds[at : at + size]))
        for at in range(0, len(seconds) - size + 1, size)
    ]
    return estimate_rate(blocks or [(batch * len(seconds), sum(seconds))])


def estimate_batch_size(rank: RankTrace) -> float:
    """Return the mean examples of a batch."""
    work = [w for drains in rank.drains.values() for drain in drains for w in drain.work]
    if work:
        return sum(w.examples for w in work) / len(work)
    about = rank.loader(rank.slot)
    return float(about["batch_size"] or about.get("sampled") or 1)


def count_ahead(rank: RankTrace) -> int:
    """Return how many batches the job's workers are given ahead."""
    prefetch: int = rank.described.get("prefetch") or 2
    return rank.workers * prefetch


def estimate_steady(rank: RankTrace, batch: float) -> tuple[AsItIs | None, float]:
    """Return the job as it is, without start-up and evaluations.

    Also return the fraction of that time inside the ``next()`` of other training loaders.
    """
    steps, startup_s = _list_steady(rank)
    rate = _estimate_step_rate([step.lasted_s for step in steps], batch, rank.workers)
    if rate is None:
        return None, 0.0
    total = sum(step.lasted_s for step in steps)
    waited, others = sum(step.waited_s for step in steps), sum(step.others_s for step in steps)
    return AsItIs(rate, waited / total, startup_s or 0.0), others / total


def estimate_step_costs(rank: RankTrace) -> list[Cost]:
    """Return where the time of a step goes in the job as it is; none if PyTorch tells nothing."""
    steps, _ = _list_steady(rank)
    if not any(sum(step.parts_ns) for step in steps):
        return []
    blocks = []
    for number in range(min(_BLOCKS, len(steps))):
        some = steps[number::_BLOCKS]
        spent_s = {"waiting for data": sum(step.waited_s + step.others_s for step in some)}
        for part, name in enumerate(PARTS):
            spent_s[name] = sum(step.parts_ns[part] for step in some) / 1e9
        total_s = sum(step.lasted_s for step in some)
        blocks.append((spent_s | {"the rest": total_s - sum(spent_s.values())}, total_s))
    costs = []
    for name in blocks[0][0]:
        # A block without the part counts, too.
        share = estimate_rate([(spent_s[name] + 1e-12, total_s) for spent_s, total_s in blocks])
        if share is not None and share.value >= _SMALLEST_PART:
            seconds = share.value * sum(total_s for _, total_s in blocks) / len(steps)
            costs.append(Cost(name, share, seconds))
    return sorted(costs, key=lambda cost: -cost.seconds)


class _SteadyStep(NamedTuple):
    """A step of the job as it is."""

    ends: bool
    """Whether it is the last one of its epoch."""
    lasted_s: float
    waited_s: float
    others_s: float
    """Inside the ``next()`` of other training loaders."""
    parts_ns: tuple[int, ...]


def _list_steady(rank: RankTrace) -> tuple[list[_SteadyStep], float | None]:
    """Return the steps of the job as it is, and the seconds to its first batch.

    If an epoch is too short for a steady state, everything after its first batch counts. The last
    step of an epoch is none, as in ``find_steps``.
    """
    ahead = count_ahead(rank)
    steps: list[_SteadyStep] = []
    startup_s = None
    started_ns = 0
    evaluations = _find_evaluations(rank.rows, rank.slot)
    for epoch in _split_epochs(rank.rows, rank.slot):
        if epoch[0][0].epoch in evaluations:
            continue
        skip = ahead if len(epoch) > 3 * ahead else 1
        for place, (row, following, between) in enumerate(epoch):
            if row.event == records.STARTED:
                started_ns = row.entered_ns
                continue
            if row.event != records.BATCH:
                continue
            if startup_s is None:
                startup_s = (row.left_ns - started_ns) / 1e9
            if place <= skip or following is None:
                continue
            if any(not other.trains for other in between):
                continue  # an evaluation
            lasted_s = (following.entered_ns - row.entered_ns) / 1e9
            others_s = sum((other.left_ns - other.entered_ns) / 1e9 for other in between)
            wait_s = (row.left_ns - row.entered_ns) / 1e9
            pairs = zip(row.parts_ns, following.parts_ns, strict=True)
            parts_ns = tuple(after - before for before, after in pairs)
            ends = following.event == records.END
            steps.append(_SteadyStep(ends, lasted_s, wait_s, others_s, parts_ns))
    return [step for step in steps if not step.ends] or steps, startup_s


def _find_evaluations(rows: Sequence[Row], slot: int) -> set[int]:
    """Return the epochs of a loader without a backward pass, if others have some.

    An epoch whose second batch was not asked for yet is none.
    """
    asked = Counter(row.epoch for row in rows if row.slot == slot and row.event == records.BATCH)
    trained = {row.epoch for row in rows if row.slot == slot and row.has_learned}
    return {epoch for epoch, count in asked.items() if count > 1} - trained if trained else set()


def _split_epochs(rows: Sequence[Row], slot: int) -> list[list[tuple[Row, Row | None, list[Row]]]]:
    """Return the rows of each iterator of a loader.

    Each row comes with the next one, and with the rows of other loaders in between."""
    epochs: dict[int, list[tuple[Row, Row | None, list[Row]]]] = {}
    latest: dict[int, tuple[Row, list[Row]]] = {}
    for row in rows:
        if row.slot != slot:
            for _, between in latest.values():
                between.append(row)
            continue
        before = latest.pop(row.epoch, None)
        if before is not None:
            epochs.setdefault(row.epoch, []).append((before[0], row, before[1]))
        latest[row.epoch] = (row, [])
    for number, (row, between) in latest.items():
        epochs.setdefault(number, []).append((row, None, between))
    return [epochs[number] for number in sorted(epochs)]


def make_step(before: Row, after: Row) -> Step:
    """Return the step from a call of ``next()`` to the next one."""
    return Step(
        (after.entered_ns - before.entered_ns) / 1e9, (before.left_ns - before.entered_ns) / 1e9
    )


def find_steps(rows: Sequence[Row], slot: int) -> list[tuple[Row, Row]]:
    """Return the batches that the probe handed over, each with the next call for one.

    The time between two epochs is not a step, nor is a step with an evaluation in it. Nor the last
    one of an epoch, unless it is the only one: loops that count batches (Ignite) evaluate and
    write checkpoints before they ask for the epoch's end.
    """
    found: list[tuple[Row, Row]] = []
    before: Row | None = None
    disturbed = False
    evaluations = _find_evaluations(rows, slot)
    for row in rows:
        if row.slot != slot or row.epoch in evaluations:
            disturbed = disturbed or row.slot == slot or not row.trains
            continue
        if before is not None and row.epoch == before.epoch and not disturbed:
            is_only = not found or found[-1][0].epoch != row.epoch
            if row.event != records.END or is_only:
                found.append((before, row))
        before = row if row.is_replayed else None
        disturbed = False
    return found


def estimate_startup_s(rank: RankTrace) -> float:
    """Return the seconds from ``iter()`` to the first batch: the median of all epochs but the
    first, which starts more, if there are others."""
    starts = []
    for epoch in _split_epochs(rank.rows, rank.slot):
        began = [row.entered_ns for row, _, _ in epoch if row.event == records.STARTED]
        came = [row.left_ns for row, _, _ in epoch if row.event == records.BATCH]
        if began and came:
            starts.append((came[0] - began[0]) / 1e9)
    return statistics.median(starts[1:] or starts or [0.0])


def estimate_ingestion(rank: RankTrace, batch: float) -> tuple[Rate | None, float]:
    """Return G, and the processor seconds that training takes for an example.

    The time of handing a batch over is left out, unless a device works on meanwhile.
    """
    device = rank.described.get("cuda", False)
    seconds: list[float] = []
    cpu_ns = 0
    for before, row in find_steps(rank.replayed, rank.slot)[3:]:
        start_ns = before.entered_ns if device else before.left_ns
        seconds.append((row.entered_ns - start_ns) / 1e9)
        cpu_ns += row.cpu_ns - before.cpu_ns
    rate = _estimate_step_rate(seconds, batch, 1)
    return rate, cpu_ns / 1e9 / (batch * len(seconds)) if seconds else 0.0


def estimate_turns(rank: RankTrace, batch: float) -> list[tuple[float, float, float]]:
    """Return the rate of the job, G, and the fraction inside ``next()``, of each turn."""
    device = rank.described.get("cuda", False)
    found = []
    for own, replayed in rank.turns:
        lasted_s = sum(step.lasted_s for step in own)
        waited_s = sum(step.waited_s for step in own)
        steps_s = sum(step.lasted_s - (0.0 if device else step.waited_s) for step in replayed)
        if lasted_s > 0 and steps_s > 0:
            rates = batch * len(own) / lasted_s, batch * len(replayed) / steps_s
            found.append((*rates, waited_s / lasted_s))
    return found


def estimate_kept(
    turns: Sequence[Turn], workers: int, batch: float, as_it_is: Rate | None
) -> Rate | None:
    """Return the rate of training on a cache: how many times as fast as the job beside it.

    In a turn both meet the same load of the host. The middle turn counts, and the interval is of
    all. Without the job beside it, it is the rate itself.
    """
    if as_it_is is None or not turns or not all(turn.own for turn in turns):
        steps = [step.lasted_s for turn in turns for step in turn.other]
        return _estimate_step_rate(steps, batch, max(1, workers))
    gains = [
        statistics.mean(step.lasted_s for step in turn.own)
        / statistics.mean(step.lasted_s for step in turn.other)
        for turn in turns
    ]
    found = (statistics.median(gains), min(gains), max(gains))
    return Rate(*(as_it_is.value * gain for gain in found))


def estimate_mean(values: Sequence[float]) -> Rate:
    """Return the mean of several values, and where one more would lie in 95 % of the cases.

    That is wider than the interval of their mean: another analysis meets another load of the host.
    """
    if len(values) < 2:
        return Rate(values[0], values[0], values[0])
    found = estimate_interval(values)
    mean, half = found.value, (found.value - found.low) * math.sqrt(len(values) + 1)
    return Rate(mean, mean - half, mean + half)


def estimate_drained(drains: Sequence[Drain], batch: float, *, once: bool = False) -> Rate | None:
    """Return the rate of drains of one kind, without their start and the end of a last round."""
    seconds: list[float] = []
    period = max((drain.workers for drain in drains), default=1)
    for drain in drains:
        arrivals = drain.arrivals_ns
        if drain.workers == 0:
            arrivals = [drain.began_ns, *arrivals]
        skip = min(2 * period if drain.workers else 1, max(0, (len(arrivals) - 2) // 2))
        end = len(arrivals) - (period - 1 if once else 0)
        times = arrivals[skip : max(skip + 2, end)]
        whole = (len(times) - 1) // max(1, period) * max(1, period) or len(times) - 1
        seconds += [(b - a) / 1e9 for a, b in itertools.pairwise(times[: whole + 1])]
    return _estimate_step_rate(seconds, batch, period)


def estimate_trained(
    rounds: Sequence[Sequence[Step]], workers: int, batch: float
) -> tuple[Rate | None, float]:
    """Return the rate of training on data in memory, without the batches prefetched first.

    Also return the seconds an example that it spent outside of ``next()``.
    """
    steps: list[Step] = []
    period = max(1, workers)
    for found in rounds:
        later = found[min(4 * period if workers else 2, len(found) // 3) :]
        steps += later[: len(later) // period * period]
    rate = _estimate_step_rate([step.lasted_s for step in steps], batch, period)
    outside_s = sum(step.lasted_s - step.waited_s for step in steps)
    return rate, outside_s / (batch * len(steps)) if steps else 0.0


def estimate_prep_cpu_s(drains: Sequence[Drain], batch: float) -> float:
    """Return the processor seconds of preparing an example, receiving it included.

    It is a worker's processor time between two batches, sending them included.
    """
    cpu_ns = examples = 0
    for drain in drains:
        latest: dict[int, WorkRecord] = {}
        for work in drain.work:
            if work.pid in latest:
                cpu_ns += work.cpu_ns - latest[work.pid].cpu_ns
                examples += work.examples
            latest[work.pid] = work
    received = [drain for drain in drains if drain.workers and len(drain.arrivals_ns) > 1]
    count = sum(len(drain.arrivals_ns) - 1 for drain in received) * batch
    return (cpu_ns / 1e9 / examples if examples else 0.0) + (
        sum(drain.cpu_s for drain in received) / count if count else 0.0
    )


def estimate_more_s(these: Sequence[Drain], those: Sequence[Drain], batch: float) -> float:
    """Return a worker's additional seconds for an example in ``these`` drains, beyond ``those``.

    At least 0. The drains read the same batches in the same order: each is compared with itself.
    """
    more_ns = examples = 0
    for one, other in zip(these, those, strict=False):
        for worker in range(max(1, one.workers)):
            pairs = zip(
                [w for w in one.work if w.worker == worker],
                [w for w in other.work if w.worker == worker],
                strict=False,
            )
            for a, b in pairs:
                more_ns += (a.ended_ns - a.started_ns) - (b.ended_ns - b.started_ns)
                examples += a.examples
    if more_ns:
        return max(0.0, more_ns / 1e9 / examples)
    rates = [estimate_drained(drains, batch, once=True) for drains in (these, those)]
    if rates[0] is None or rates[1] is None:
        return 0.0
    return max(1, these[0].workers) * max(0.0, 1 / rates[0].value - 1 / rates[1].value)


def estimate_costs(batches: Sequence[Mapping[str, int]], drains: Sequence[Drain]) -> list[Cost]:
    """Return the cost of each piece of work, the largest first, from looks at each batch.

    None if there are too few looks.
    """
    work = [w for drain in drains for w in drain.work]
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(batch)
    if total.total() < _FEWEST_LOOKS or len(batches) < _BLOCKS or not work:
        return []
    blocks = []
    for number in range(_BLOCKS):
        blocks.append(Counter[str]())
        for batch in batches[number::_BLOCKS]:
            blocks[-1].update(batch)
    made_s = sum(w.ended_ns - w.started_ns for w in work) / 1e9 / sum(w.examples for w in work)
    costs = []
    for name, looks in total.most_common():
        value = looks / total.total()
        # A block without the piece counts, too.
        spread = estimate_rate([(block[name] + 1e-9, block.total()) for block in blocks])
        if spread is not None and value >= _SMALLEST_SHARE:
            share = Rate(value, min(value, spread.low), max(value, min(1.0, spread.high)))
            costs.append(Cost(name, share, value * made_s))
    return costs


def estimate_stage_costs(stages: Mapping[str, Rate]) -> list[Cost]:
    """Return the cost of each stage of a pipeline, from examples/s on one worker."""
    total_s = sum(1.0 / rate.value for rate in stages.values())
    costs = []
    for name, rate in stages.items():
        ends = 1.0 / rate.high / total_s, min(1.0, 1.0 / max(rate.low, 1e-9) / total_s)
        share = Rate(1.0 / rate.value / total_s, *ends)
        if share.value >= _SMALLEST_SHARE:
            costs.append(Cost(name, share, 1.0 / rate.value))
    return costs


def estimate_reads(reads: Sequence[Reads], examples_a_file: float) -> Rate | None:
    """Return the rate of reading files again, in examples/s."""
    return estimate_rate([(n * examples_a_file, seconds) for read in reads for n, seconds in read])
