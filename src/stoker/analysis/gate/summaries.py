"""The outcome of a gate in words: for the terminal, as Markdown, and as JUnit's XML."""

from __future__ import annotations

import shlex
from xml.etree import ElementTree

from stoker.analysis.gate.conditions import FALLS, METRICS
from stoker.analysis.gate.judging import FINE, UNDECIDED, WORSE, Judgement
from stoker.analysis.gate.record import GateRecord
from stoker.basics.resources import format_rounded

_MARKS = {WORSE: "❌ worse", FINE: "✅ not worse", UNDECIDED: "❔ undecided"}


def describe(judgement: Judgement) -> str:
    """Describe a judgement in a line."""
    text = (
        f"{judgement.verdict}: {judgement.condition}: {_name(judgement)} "
        f"{_interval(judgement)}, threshold {_show(judgement, judgement.threshold)}"
    )
    return text + (f"; {_advise(judgement)}" if judgement.verdict == UNDECIDED else "")


def write_text(record: GateRecord) -> str:
    """Describe the outcome for the terminal."""
    lines = [describe(judgement) for judgement in record.judgements]
    return "\n".join([*lines, *list_remarks(record)])


def write_markdown(record: GateRecord) -> str:
    """Describe the outcome as Markdown, such as a job summary of GitHub Actions."""
    lines = [
        f"### stoker gate: {_MARKS[record.verdict]}",
        "",
        f"`{shlex.join(record.command)}`, {_count_runs(record)}",
        "",
        "| worse if | | mean and 95 % interval over the runs | threshold | |",
        "|---|---|---|---|---|",
    ]
    for judgement in record.judgements:
        advice = _advise(judgement) if judgement.verdict == UNDECIDED else ""
        cells = (
            f"`{judgement.condition}`",
            _MARKS[judgement.verdict],
            f"{_name(judgement)} {_interval(judgement)}",
            _show(judgement, judgement.threshold),
            advice,
        )
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    lines += [f"\n{remark}" for remark in list_remarks(record)]
    lines += ["", "<details><summary>All runs</summary>", ""]
    lines += [f"| run | {' | '.join(METRICS)} |", "|---" * (len(METRICS) + 1) + "|"]
    named = [(f"{number}", run) for number, run in enumerate(record.runs, 1)]
    named += [(f"{number}, base", run) for number, run in enumerate(record.base, 1)]
    for name, run in named:
        figures = (show_figure(metric, getattr(run, metric)) for metric in METRICS)
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join([*lines, "", "</details>", ""])


def write_junit(record: GateRecord) -> bytes:
    """Return the outcome as JUnit's XML: a test for each condition, skipped if undecided."""
    failed = sum(judgement.verdict == WORSE for judgement in record.judgements)
    skipped = sum(judgement.verdict == UNDECIDED for judgement in record.judgements)
    suite = ElementTree.Element(
        "testsuite",
        name="stoker gate",
        tests=str(len(record.judgements)),
        failures=str(failed),
        errors="0",
        skipped=str(skipped),
        timestamp=record.made,
    )
    for judgement in record.judgements:
        case = ElementTree.SubElement(
            suite, "testcase", classname="stoker.gate", name=judgement.condition
        )
        if judgement.verdict != FINE:
            kind = "failure" if judgement.verdict == WORSE else "skipped"
            ElementTree.SubElement(case, kind, message=describe(judgement))
        ElementTree.SubElement(case, "system-out").text = describe(judgement)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return bytes(ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)) + b"\n"


def list_remarks(record: GateRecord) -> list[str]:
    """Return remarks on the machine."""
    host = record.host
    if host is None or not host.is_busy:
        return []
    taken = host.others_cores + host.steal_cores
    return [
        f"The machine was busy: others used {taken:.1f} of {host.cores} processors during the runs."
    ]


def show_figure(metric: str, value: float) -> str:
    """Return a metric's value with its unit."""
    if metric == "stall":
        return f"{value:.1%}"
    if metric in FALLS:
        return f"{format_rounded(value, 4)}/s"
    return f"{format_rounded(value * 1e3)} ms" if abs(value) < 1 else f"{format_rounded(value)} s"


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


def _count_runs(record: GateRecord) -> str:
    runs = len(record.runs)
    return f"{runs} runs of each version, by turns" if record.base else f"{runs} runs"
