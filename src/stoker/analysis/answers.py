"""How the answer to a what-if question looks in a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.analysis.model import INFINITE, Change, predict
from stoker.analysis.questions import Answer, Curve, Outcome, dataset_bytes
from stoker.analysis.report import Report, measured, measured_apart
from stoker.machine import format_bytes

_BAR = 30
_PLAIN_WIDTH = 120
_LABELS = {
    "cache": "cache that never evicts (share of the dataset)",
    "cores": "cores (a worker on each)",
    "storage-mbps": "storage bandwidth (MB/s)",
    "accelerator": "accelerator (times as fast)",
    "jobs": "jobs at a time",
    "echo": "echoing factor",
}


def show(report: Report, answer: Answer, console: Console | None = None) -> None:
    """Print before and after, what would be needed, and the curves."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_PLAIN_WIDTH, highlight=False)
    console.print(Text(f"{report.loader.name}  {report.loader.describes}"))
    for doubt in report.doubts:
        console.print(Text(f"Uncertain: {doubt}", style="bold"))
    console.print(Text(_what(answer.change)))
    console.print()
    unit = report.loader.unit
    console.print(_table(answer.outcomes, unit))
    for line in _remarks(report, answer):
        console.print(Text(line))
    for curve in answer.curves:
        console.print()
        console.print(Text(f"{unit}/s over {_LABELS[curve.quantity]}", style="bold"))
        console.print(_drawn(report, curve))


def _what(change: Change) -> str:
    """Say what was asked."""
    if change == Change():
        return "nothing changed: the job as it was measured"
    parts = []
    if change.cores is not None:
        parts.append(f"{change.cores} cores")
    if change.cache_bytes is not None:
        parts.append(f"a cache of {format_bytes(change.cache_bytes)} that never evicts")
    if change.storage_mbps is not None:
        parts.append(f"storage of {change.storage_mbps:,g} MB/s")
    if change.accelerator != 1:
        parts.append(f"an accelerator {change.accelerator:g}x as fast")
    if change.jobs != 1:
        parts.append(f"{change.jobs} jobs at a time on this host")
    if change.echo != 1:
        parts.append(f"an echo of factor {change.echo:g} at {change.echo_at}")
    return "then: " + ", ".join(parts)


def _table(outcomes: tuple[Outcome, ...], unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")
    now = outcomes[0].prediction.rate
    echoes = any(o.prediction.fresh_rate < o.prediction.rate for o in outcomes)

    def row(name: str, of: Callable[[Outcome], str], style: str = "") -> None:
        table.add_row(name, *(of(outcome) for outcome in outcomes), style=style)

    row("uses/s" if echoes else f"{unit}/s", lambda o: _rate(o.prediction.rate), "bold")
    if len(outcomes) > 1:
        row("  of the speed as it is", lambda o: f"{o.prediction.rate / now:.2f}x")
    if echoes:
        row(f"  fresh {unit}/s of these", lambda o: _rate(o.prediction.fresh_rate))
    row("steps/s", lambda o: f"{o.prediction.steps_per_s:,.3g}")
    row("what limits", lambda o: o.prediction.bound, "bold")
    row("time in compute", lambda o: f"{o.prediction.compute:.1%}")
    row("  lost to prep", lambda o: f"{o.prediction.prep_stall:.1%}")
    row("  lost to fetch", lambda o: f"{o.prediction.fetch_stall:.1%}")
    row("F  fetch gives", lambda o: _rate(o.prediction.fetch))
    row("P  preparation gives", lambda o: _rate(o.prediction.prep))
    row("G  training takes", lambda o: _rate(o.prediction.ingestion))
    row("H  the host's processors allow", lambda o: _rate(o.prediction.processors))
    row("x* cache that is enough", _cache_needed)
    row("cores, for P to be no limit", lambda o: _cores_needed(o))
    return table


def _cache_needed(outcome: Outcome) -> str:
    if outcome.cache_needed is None:
        return "not known"
    size = outcome.cache_needed_bytes
    return f"{outcome.cache_needed:.1%}" + (f" = {format_bytes(size)}" if size is not None else "")


def _cores_needed(outcome: Outcome) -> str:
    return "beyond reach" if outcome.cores_needed is None else str(outcome.cores_needed)


def _remarks(report: Report, answer: Answer) -> list[str]:
    """Say what the table does not."""
    lines = _calibration(report)
    caches, change, unit = answer.caches, answer.change, report.loader.unit
    if caches:
        lines += [
            f"{format_bytes(caches.size_bytes)} hold {caches.holds:.1%} of the dataset.",
            f"  never evicting:    {caches.misses:6.1%} misses, {_rate(caches.rate)} {unit}/s",
            f"  page cache (LRU):  {caches.page_cache_misses:6.1%} misses, "
            f"{_rate(caches.page_cache_rate)} {unit}/s",
        ]
    if change.jobs > 1:
        lines.append(
            "Each job has an accelerator of its own; workers, storage and processors are divided "
            "among the jobs, or used once for all where they share. Speeds are of one job."
        )
    if change.echo > 1:
        lines.append(
            "A repeat may be worth less than a fresh example: uses/s are not progress by "
            f"themselves. Compare fresh {unit}/s too."
        )
    if len(report.ranks) > 1:
        lines.append(f"Speeds, cores and storage are those of one of {len(report.ranks)} ranks.")
    if report.rates.P is None:
        lines.append("P holds fetching over the network, too; what it lacks counts as fetching.")
    for name in ("S", "C"):
        if name in report.reasons:
            lines.append(f"{name} is not known: {report.reasons[name]}")
    return lines


def _calibration(report: Report) -> list[str]:
    """Say where the job as it ran corrected what was measured apart."""
    apart, found = predict(measured_apart(report)), predict(measured(report))
    changed = [
        f"{letter} is taken as {_rate(value)}, measured apart {_rate(before)}"
        for letter, value, before in (
            ("F", found.fetch, apart.fetch),
            ("P", found.prep, apart.prep),
            ("G", found.ingestion, apart.ingestion),
            ("H", found.processors, apart.processors),
        )
        if _rate(value) != _rate(before)
    ]
    if not changed:
        return []
    return [f"Calibrated to the job as it ran, at {_rate(found.rate)}/s: {'; '.join(changed)}."]


def _drawn(report: Report, curve: Curve) -> Table:
    table = Table(box=None, pad_edge=False, show_header=bool(curve.beside))
    table.add_column("", justify="right")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    table.add_column(curve.beside, justify="right")
    table.add_column("")
    most = max(point.rate for point in curve.points)
    for point in curve.points:
        table.add_row(
            _at(report, curve.quantity, point.at),
            "█" * max(1, round(_BAR * point.rate / most)),
            _rate(point.rate),
            point.bound,
            "" if point.beside is None else _rate(point.beside),
            f"<- {point.mark}" if point.mark else "",
            style="bold" if point.mark else "",
        )
    return table


def _at(report: Report, quantity: str, value: float) -> str:
    if quantity == "cache":
        return f"{value:.0%} = {format_bytes(value * (dataset_bytes(measured(report)) or 0.0))}"
    if quantity == "accelerator":
        return f"{value:g}x"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _rate(value: float) -> str:
    if value == INFINITE:
        return "no limit"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
