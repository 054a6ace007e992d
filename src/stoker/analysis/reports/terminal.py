"""Reports, and answers to what-if questions, on a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import asdict
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from stoker.analysis.model.model import NOTHING, Change
from stoker.analysis.model.report import Cost, Report
from stoker.analysis.model.what_if import Answer, Curve, Outcome, is_asked
from stoker.basics.resources import format_bytes, format_rounded, format_seconds

# With name and share beside it, a bar fits into 80 columns.
_BAR = 48
_SHARES = {"compute": ("green", "█"), "prep_stall": ("yellow", "▓"), "fetch_stall": ("red", "░")}
_MEANING = {
    "G": "training takes in",
    "P": "preparation gives, from memory",
    "S": "storage delivers",
    "C": "the page cache delivers",
    "F": "fetching gives, as cached as it was",
}
_NUMBER = partial(Column, justify="right")
_TITLED = partial(Table, box=box.SIMPLE, title_justify="left")
# With two figures beside it, a bar fits into 80 columns.
_CURVE_BAR = 30
# Without a terminal: wide enough for the table, and the same in every log.
_PLAIN_WIDTH = 120
_QUANTITIES = {  # a curve's label, and what is asked
    "cores": ("cores (a worker on each)", "{cores} cores"),
    "cache": (
        "cache that never evicts (share of the dataset)",
        "a cache of {size} that never evicts",
    ),
    "storage-mbps": ("storage bandwidth (MB/s)", "storage of {storage_mbps:,g} MB/s"),
    "accelerator": ("accelerator (times as fast)", "an accelerator {accelerator:g}x as fast"),
    "echo": ("echoing factor", "an echo of factor {echo:g}"),
}


def show_report(report: Report, console: Console, *, details: bool) -> None:
    """Print a report in about ten lines; with ``details`` also split, rates, scaling, actions."""
    console.print(Text(f"\n{report}\n"))
    if not details:
        console.print("--details shows all rates, actions and notes; --html FILE as a page.")
        return
    for doubt in report.doubts:
        console.print(Text(f"Uncertain: {doubt}"))
    for part in list_parts(report):
        console.print(part)


def list_parts(report: Report) -> Iterator[Text | Table]:
    """Return what is shown of a report, but for its verdict and doubts."""
    yield _draw_split(report)
    yield _make_rates_table(report)
    if report.step:
        title = "Where the time of a step goes" + (
            "" if report.trains_on_cpu else ", on the host: a GPU works on when a call has returned"
        )
        yield _make_costs_table(report.step, "step", title)
    if report.transforms:
        title = "Cost of each transform, with the data in memory"
        yield _make_costs_table(report.transforms, "example", title)
    if len(report.prep) > 1:
        yield _make_scaling_table(report)
    if len(report.ranks) > 1:
        yield _make_ranks_table(report)
    if report.actions:
        yield _make_actions_table(report)
    for note in report.notes:
        yield Text(f"· {note}", style="dim")


def _draw_split(report: Report) -> Text:
    shares, seen = asdict(report.split), report.as_it_is
    text = Text()
    for name, (style, mark) in _SHARES.items():
        text.append(mark * round(_BAR * shares[name]), style=style)
    text.append("\n")
    for name, (style, mark) in _SHARES.items():
        found = getattr(report.split_intervals, name, None)
        within = f" ({100 * found.low:.0f} to {found.high:.0%})" if found else ""
        text.append(f"{mark} {name.replace('_', ' ')} {shares[name]:.0%}{within}   ", style=style)
    if seen is not None:
        text.append(
            f"\nas it is: {seen.rate} examples/s, {seen.wait_fraction:.0%} of "
            f"the time inside next(); first batch after {seen.startup_s:.2f} s"
        )
        if report.predicted is not None:
            text.append(f"; the rates below predict {report.predicted:,.0f}")
    if report.cached_fraction is not None:
        text.append(f"; {report.cached_fraction:.0%} of the data was in the page cache")
    text.append("\n")
    return text


def _make_rates_table(report: Report) -> Table:
    columns = ("", _NUMBER("value"), "95 % interval", "what it is")
    table = _TITLED(*columns, title="Rates, examples/s")
    unknown: dict[str, list[str]] = {}
    for name, rate in asdict(report.rates).items():
        if rate is None:
            unknown.setdefault(report.reasons.get(name, "not measured"), []).append(name)
        else:
            interval = f"{rate.low:,.0f} to {rate.high:,.0f}"
            table.add_row(name, f"{rate.value:,.0f}", interval, _MEANING[name])
    captions = [f"{', '.join(names)} not known: {why}" for why, names in unknown.items()]
    if report.copy_s is not None:
        captions.append(f"part of G: copying a batch to the device, {report.copy_s * 1e3:.2f} ms")
    table.caption = Text("\n".join(captions)) if captions else None
    return table


def _make_costs_table(costs: list[Cost], of: str, title: str) -> Table:
    columns = map(_NUMBER, (f"ms a{'n' * (of[0] == 'e')} {of}", "share", "95 % interval"))
    # On a phone, too, names of one word have a line.
    table = _TITLED(Column(min_width=12), *columns, title=title)
    for cost in costs:
        share = cost.share
        interval = f"{100 * share.low:.0f} to {share.high:.0%}"
        table.add_row(Text(cost.name), f"{1e3 * cost.seconds:.3g}", f"{share.value:.0%}", interval)
    return table


def _make_scaling_table(report: Report) -> Table:
    columns = map(_NUMBER, ("workers", "P", "training on it"))
    title = "With the data in memory, examples/s by number of workers"
    table = _TITLED(*columns, "", title=title)
    most = max(point.rate.value for point in report.prep)
    for point in report.prep:
        mark = " as it is" if point.workers == report.loader.workers else ""
        bar = "━" * max(1, round(30 * point.rate.value / most))
        trained = f"{point.trained.value:,.0f}" if point.trained else "-"
        table.add_row(str(point.workers), f"{point.rate.value:,.0f}", trained, bar + mark)
    return table


def _make_ranks_table(report: Report) -> Table:
    columns = map(_NUMBER, ("rank", "P", "its own waiting", "waiting for other ranks"))
    table = _TITLED(*columns, title="Ranks")
    for rank in report.ranks:
        p = f"{rank.rates.P.value:,.0f}" if rank.rates.P else "-"
        waits = f"{rank.wait_fraction:.0%}", f"{rank.others_fraction:.0%}"
        table.add_row(str(rank.rank), p, *waits)
    return table


def _make_actions_table(report: Report) -> Table:
    table = _TITLED("", _NUMBER("speed"), "what, and how", title="What would help")
    for number, action in enumerate(report.actions, 1):
        gain = action.gain
        how = Text(f"{action.condition}: " if action.condition else "")
        how.append(action.title)
        how.append(f"\n{action.code}", style="cyan")
        why = f"{action.safety}; {action.why}" if action.safety else action.why
        how.append(f"\n{why}", style="dim")
        table.add_row(str(number), f"{gain.value:.2f}x\n({gain.low:.2f} to {gain.high:.2f})", how)
    return table


def describe_plan(command: list[str], max_seconds: float) -> str:
    """Describe, beforehand, what an analysis does to a script."""
    return (
        f"stoker analyze will start\n    {' '.join(command)}\nonce (up to three times if it ends "
        "early), let it run as it is for a few seconds, then hand it the same batches again and "
        "again, then read its data with no training step, cold and warm, and end it. It takes "
        f"{format_seconds(max_seconds)} at most. It edits no file; the script itself writes its "
        "files as always. Ctrl-C ends everything."
    )


def show_answer(report: Report, answer: Answer, console: Console | None = None) -> None:
    """Print the speed before and after, the needs of a faster job, and the curves."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_PLAIN_WIDTH, highlight=False)
    for doubt in report.doubts:
        console.print(Text(f"Uncertain: {doubt}", style="bold"))
    for part in list_answer_parts(report, answer):
        console.print(part)


def list_answer_parts(report: Report, answer: Answer) -> Iterator[Text | Table]:
    """Return what is shown of an answer, but for doubts."""
    unit = report.loader.unit
    yield Text(f"{report.loader.name}  {report.loader.describes}")
    yield Text(_describe_change(answer.change) + "\n")
    yield _make_outcomes_table(answer.outcomes, unit)
    yield from map(Text, _write_remarks(report, answer))
    for curve in answer.curves:
        yield Text(f"\n{unit}/s over {_QUANTITIES[curve.quantity][0]}", style="bold")
        yield _draw_curve(curve)


def _describe_change(change: Change) -> str:
    if change == NOTHING:
        return "no change: the job as it was measured"
    asked = [template for name, (_, template) in _QUANTITIES.items() if is_asked(change, name)]
    values = dataclasses.asdict(change) | {"size": format_bytes(change.cache_bytes or 0)}
    return "then: " + ", ".join(template.format(**values) for template in asked)


def _make_outcomes_table(outcomes: tuple[Outcome, ...], unit: str) -> Table:
    columns = (_NUMBER(outcome.name) for outcome in outcomes)
    table = Table("", *columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    now = outcomes[0].prediction.rate
    echoes = any(o.prediction.fresh_rate < o.prediction.rate for o in outcomes)

    def row(name: str, of: Callable[[Outcome], str], style: str = "") -> None:
        table.add_row(name, *(of(outcome) for outcome in outcomes), style=style)

    row("uses/s" if echoes else f"{unit}/s", lambda o: _format_rate(o.prediction.rate), "bold")
    if len(outcomes) > 1:
        row("  of the speed as it is", lambda o: f"{o.prediction.rate / now:.2f}x")
    if echoes:
        row(f"  fresh {unit}/s of these", lambda o: _format_rate(o.prediction.fresh_rate))
    row("steps/s", lambda o: format_rounded(o.prediction.steps_per_s))
    row("what limits", lambda o: o.prediction.bound, "bold")
    row("time in compute", lambda o: f"{o.prediction.compute:.1%}")
    row("  lost to prep", lambda o: f"{o.prediction.prep_stall:.1%}")
    row("  lost to fetch", lambda o: f"{o.prediction.fetch_stall:.1%}")
    if any(o.prediction.fetch < math.inf for o in outcomes):
        row("F  fetch gives", lambda o: _format_rate(o.prediction.fetch))
    row("P  preparation gives", lambda o: _format_rate(o.prediction.prep))
    row("G  training takes", lambda o: _format_rate(o.prediction.ingestion))
    row("H  the host's processors allow", lambda o: _format_rate(o.prediction.processors))
    if any(o.cache_needed is not None for o in outcomes):
        row("x* cache that is enough", _format_cache_needed)
    row("cores, for P to be no limit", lambda o: str(o.cores_needed or "beyond reach"))
    return table


def _format_cache_needed(outcome: Outcome) -> str:
    if outcome.cache_needed is None:
        return "not known"
    size = outcome.cache_needed_bytes
    return f"{outcome.cache_needed:.1%}" + (f" = {format_bytes(size)}" if size is not None else "")


def _write_remarks(report: Report, answer: Answer) -> list[str]:
    """Return remarks on the table."""
    lines: list[str] = []
    change = answer.change
    if change.cache_bytes is not None:
        (whole,) = (each.whole_bytes for each in answer.curves if each.quantity == "cache")
        holds = min(1.0, change.cache_bytes / whole)
        lines.append(f"{format_bytes(change.cache_bytes)} hold {holds:.1%} of the dataset.")
    if change.echo > 1:
        lines.append(
            "A repeat may be worth less than a fresh example: uses/s are not progress by "
            f"themselves. Compare fresh {report.loader.unit}/s too."
        )
    if len(report.ranks) > 1:
        lines.append(f"Speeds, cores and storage are those of one of {len(report.ranks)} ranks.")
    if report.rates.P is None:
        lines.append("P includes fetching over the network; its shortfall counts as fetching.")
    return lines


def _draw_curve(curve: Curve) -> Table:
    columns = _NUMBER(), "", _NUMBER(), "", ""
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    most = max(point.rate for point in curve.points)
    for point in curve.points:
        table.add_row(
            _format_value(curve, point.at),
            "█" * max(1, round(_CURVE_BAR * point.rate / most)),
            _format_rate(point.rate),
            point.bound,
            f"<- {point.mark}" if point.mark else "",
            style="bold" if point.mark else "",
        )
    return table


def _format_value(curve: Curve, value: float) -> str:
    if curve.quantity == "cache":
        return f"{value:.0%} = {format_bytes(value * curve.whole_bytes)}"
    if curve.quantity == "accelerator":
        return f"{value:g}x"
    return format_rounded(value)


def _format_rate(value: float) -> str:
    if value == math.inf:
        return "no limit"
    return format_rounded(value)
