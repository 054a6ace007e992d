"""Decides whether runs meet a condition: worse, not worse, or undecided; and says so.

A condition that the first runs meet is tried again, with as many new runs, and the job is worse if
they meet it too. Without any tolerance, one round calls a job worse than itself in 2.5 % of the
cases, and two in 0.06 %. A stricter interval of one round would take the spread of five runs too
seriously: on a machine of several speeds, all five may meet the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.analysis.gate.metrics import FALLS, Condition, RunFigures
from stoker.analysis.model.rates import estimate_interval
from stoker.analysis.model.report import HostLoad
from stoker.basics.resources import format_rounded

WORSE, FINE, UNDECIDED = "worse", "not worse", "undecided"
# A wait of no time at all has no logarithm: the clock counts nanoseconds.
_SHORTEST = 1e-9


class RunRound(NamedTuple):
    """Runs of a script, and with another version the run of it beside each."""

    own: list[RunFigures]
    base: list[RunFigures]


class Judgement(msgspec.Struct, frozen=True):
    """What the runs of all rounds say about one condition.

    ``value``, ``low`` and ``high`` are the mean over the runs and its 95 % interval: of the metric;
    with ``factor * base``, of the ratio to the other version; with ``base + more``, of the
    difference. ``threshold`` is in the same unit.
    """

    condition: str
    metric: str
    form: str
    """"value", "ratio" or "difference"."""
    value: float
    low: float
    high: float
    threshold: float
    verdict: str
    """"worse", "not worse" or "undecided"."""


def looks_worse(condition: Condition, found: RunRound) -> bool:
    """True if the runs of a round meet a condition: their 95 % interval is past the threshold."""
    _, values, threshold = _list_values(condition, found.own, found.base)
    return estimate_interval(values).low > threshold


def judge(condition: Condition, rounds: Sequence[RunRound]) -> Judgement:
    """Judge one or two rounds, of at least two runs each.

    Worse: there are two, and each of them looks worse. Not worse: the 95 % interval over all runs
    is not past the threshold.
    """
    own = [run for found in rounds for run in found.own]
    base = [run for found in rounds for run in found.base]
    form, values, threshold = _list_values(condition, own, base)
    found, verdict = estimate_interval(values), UNDECIDED
    if len(rounds) > 1 and all(looks_worse(condition, each) for each in rounds):
        verdict = WORSE
    elif found.high <= threshold:
        verdict = FINE
    sign = _sign(condition)
    low, high = sorted((sign * found.low, sign * found.high))
    at = math.exp if form == "ratio" else float
    return Judgement(
        condition=condition.text,
        metric=condition.metric,
        form=form,
        value=at(sign * found.value),
        low=at(low),
        high=at(high),
        threshold=at(sign * threshold),
        verdict=verdict,
    )


def _sign(condition: Condition) -> float:
    return -1.0 if condition.metric in FALLS else 1.0


def _list_values(
    condition: Condition, own: Sequence[RunFigures], base: Sequence[RunFigures]
) -> tuple[str, list[float], float]:
    """Return the form, a value for each run or pair, and the threshold.

    Ratios are logarithms. The sign is such that more is worse.
    """
    sign, metric = _sign(condition), condition.metric
    mine: list[float] = [getattr(run, metric) for run in own]
    if not condition.needs_base:
        return "value", [sign * value for value in mine], sign * condition.value
    pairs = list(zip(mine, (getattr(run, metric) for run in base), strict=True))
    if condition.value or metric == "stall":
        return "difference", [sign * (new - old) for new, old in pairs], sign * condition.value
    ratios = [math.log(max(new, _SHORTEST) / max(old, _SHORTEST)) for new, old in pairs]
    return "ratio", [sign * ratio for ratio in ratios], sign * math.log(condition.factor)


def combine(verdicts: Sequence[str]) -> str:
    """Return the verdict over all conditions: the worst."""
    return next((each for each in (WORSE, UNDECIDED) if each in verdicts), FINE)


class GateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a script, in the order in which they ran, and what they decide."""

    schema: str = "stoker-gate/1"
    stoker: str
    """The version of stoker that wrote the file."""
    made: str
    """Date and time, ISO 8601."""
    command: list[str]
    runs: list[RunFigures]
    base: list[RunFigures] = []
    """The other version's, each beside the run of the same number; empty without one."""
    judgements: list[Judgement]
    verdict: str
    """"worse", "not worse" or "undecided": the worst of the judgements."""
    host: HostLoad | None = None
    """Who used the processors during the runs; None where the kernel does not tell."""


def write_record(record: GateRecord, path: Path) -> None:
    """Write a record as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def write_text(record: GateRecord) -> str:
    """Describe the outcome for the terminal."""
    lines, host = [_describe(judgement) for judgement in record.judgements], record.host
    if host is not None and host.is_busy:
        lines.append(
            f"The machine was busy: others used {host.others_cores + host.steal_cores:.1f} of "
            f"{host.cores} processors during the runs."
        )
    return "\n".join(lines)


def show_figure(metric: str, value: float) -> str:
    """Return a metric's value with its unit."""
    if metric == "stall":
        return f"{value:.1%}"
    if metric in FALLS:
        return f"{format_rounded(value, 4)}/s"
    return f"{format_rounded(value * 1e3)} ms" if abs(value) < 1 else f"{format_rounded(value)} s"


def _describe(judgement: Judgement) -> str:
    """Describe a judgement in a line."""
    name = judgement.metric + {"ratio": " / base", "difference": " - base"}.get(judgement.form, "")
    # Student's t does not know that no time, share or speed is below 0.
    lowest = 0.0 if judgement.form == "value" else judgement.low
    ends = judgement.value, max(lowest, judgement.low), judgement.high, judgement.threshold
    value, low, high, threshold = (_show(judgement, each) for each in ends)
    return (
        f"{judgement.verdict}: {judgement.condition}: {name} {value} ({low} to {high}), threshold "
        f"{threshold}"
        + ("; more --runs narrow the interval" if judgement.verdict == UNDECIDED else "")
    )


def _show(judgement: Judgement, value: float) -> str:
    if judgement.form == "ratio":
        return f"{value:.3f}"
    shown = show_figure(judgement.metric, value)
    return f"+{shown}" if judgement.form == "difference" and value >= 0 else shown
