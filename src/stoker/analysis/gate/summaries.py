"""The outcome of a gate in words, for the terminal."""

from __future__ import annotations

from stoker.analysis.gate.conditions import FALLS
from stoker.analysis.gate.judging import UNDECIDED, Judgement
from stoker.analysis.gate.record import GateRecord
from stoker.basics.resources import format_rounded


def write_text(record: GateRecord) -> str:
    """Describe the outcome for the terminal."""
    lines = [_describe(judgement) for judgement in record.judgements]
    return "\n".join([*lines, *_list_remarks(record)])


def show_figure(metric: str, value: float) -> str:
    """Return a metric's value with its unit."""
    if metric == "stall":
        return f"{value:.1%}"
    if metric in FALLS:
        return f"{format_rounded(value, 4)}/s"
    return f"{format_rounded(value * 1e3)} ms" if abs(value) < 1 else f"{format_rounded(value)} s"


def _describe(judgement: Judgement) -> str:
    """Describe a judgement in a line."""
    text = (
        f"{judgement.verdict}: {judgement.condition}: {_name(judgement)} "
        f"{_interval(judgement)}, threshold {_show(judgement, judgement.threshold)}"
    )
    return text + (f"; {_advise(judgement)}" if judgement.verdict == UNDECIDED else "")


def _list_remarks(record: GateRecord) -> list[str]:
    """Return remarks on the machine."""
    host = record.host
    if host is None or not host.is_busy:
        return []
    taken = host.others_cores + host.steal_cores
    return [
        f"The machine was busy: others used {taken:.1f} of {host.cores} processors during the runs."
    ]


def _show(judgement: Judgement, value: float) -> str:
    if judgement.form == "ratio":
        return f"{value:.3f}"
    shown = show_figure(judgement.metric, value)
    return f"+{shown}" if judgement.form == "difference" and value >= 0 else shown


def _name(judgement: Judgement) -> str:
    if judgement.form == "ratio":
        return f"{judgement.metric} / base"
    return f"{judgement.metric} - base" if judgement.form == "difference" else judgement.metric


def _interval(judgement: Judgement) -> str:
    # Student's t does not know that no time, share or speed is below 0.
    lowest = 0.0 if judgement.form == "value" else judgement.low
    ends = judgement.value, max(lowest, judgement.low), judgement.high
    value, low, high = (_show(judgement, each) for each in ends)
    return f"{value} ({low} to {high})"


def _advise(judgement: Judgement) -> str:
    if judgement.runs_needed is None:
        return "more runs would hardly decide it: the mean is near the threshold"
    return f"about --runs {judgement.runs_needed} would decide it"
