"""A report on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.analysis.report import Rate, Report

_BAR = 48
_PARTS = (("compute", "green", "█"), ("prep stall", "yellow", "▓"), ("fetch stall", "red", "░"))
_MEANING = {
    "G": "training takes in",
    "P": "preparation gives, from memory",
    "S": "storage delivers",
    "C": "the page cache delivers",
    "F": "fetching gives, as cached as it was",
}


def show(report: Report, console: Console) -> None:
    """Print a report: verdict, split, rates, scaling, actions, notes."""
    console.print()
    console.print(Text(report.verdict, style="bold"))
    console.print()
    console.print(_split(report))
    console.print(_rates(report))
    if len(report.prep) > 1:
        console.print(_scaling(report))
    if len(report.ranks) > 1:
        console.print(_ranks(report))
    if report.actions:
        console.print(_actions(report))
    for note in report.notes:
        console.print(Text(f"· {note}", style="dim"))


def _split(report: Report) -> Text:
    split = report.split
    text = Text()
    widths = []
    shares = (split.compute, split.prep_stall, split.fetch_stall)
    for share in shares:
        widths.append(round(_BAR * share))
    for (_, style, mark), width in zip(_PARTS, widths, strict=True):
        text.append(mark * width, style=style)
    text.append("\n")
    for (name, style, mark), share in zip(_PARTS, shares, strict=True):
        text.append(f"{mark} {name} {share:.0%}   ", style=style)
    if report.as_it_is is not None:
        seen = report.as_it_is
        text.append(
            f"\nas it is: {_rate(seen.rate)} examples/s, {seen.wait_fraction:.0%} of the time "
            f"inside next(); first batch after {seen.startup_s:.2f} s"
        )
        if report.predicted is not None:
            text.append(f"; the rates below predict {report.predicted:,.0f}")
    if report.cached_fraction is not None:
        text.append(f"; {report.cached_fraction:.0%} of the data was in the page cache")
    text.append("\n")
    return text


def _rates(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="Rates, examples/s", title_justify="left")
    for name in ("", "value", "95 % interval", "what it is"):
        table.add_column(name, justify="right" if name == "value" else "left")
    said: dict[str, str] = {}
    for name, meaning in _MEANING.items():
        rate = getattr(report.rates, name)
        if rate is None:
            why = report.reasons.get(name, meaning)
            if why in said:
                why = f"as {said[why]}"
            said.setdefault(why, name)
            table.add_row(name, "-", "", Text(why, style="dim"))
        else:
            table.add_row(
                name, f"{rate.value:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}", meaning
            )
    if report.copy_s is not None:
        table.caption = f"part of G: copying a batch to the device, {report.copy_s * 1e3:.2f} ms"
    return table


def _scaling(report: Report) -> Table:
    table = Table(
        box=box.SIMPLE,
        title="With the data in memory, examples/s by number of workers",
        title_justify="left",
    )
    table.add_column("workers", justify="right")
    table.add_column("P", justify="right")
    table.add_column("training on it", justify="right")
    table.add_column("")
    most = max(point.rate.value for point in report.prep)
    for point in report.prep:
        mark = " as it is" if point.workers == report.loader.workers else ""
        bar = "━" * max(1, round(30 * point.rate.value / most))
        trained = f"{point.trained.value:,.0f}" if point.trained else "-"
        table.add_row(str(point.workers), f"{point.rate.value:,.0f}", trained, bar + mark)
    return table


def _ranks(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="Ranks", title_justify="left")
    for name in ("rank", "P", "its own waiting", "waiting for other ranks"):
        table.add_column(name, justify="right")
    for rank in report.ranks:
        p = rank.rates.P
        table.add_row(
            str(rank.rank),
            f"{p.value:,.0f}" if p else "-",
            f"{rank.wait_fraction:.0%}",
            f"{rank.others_fraction:.0%}",
        )
    return table


def _actions(report: Report) -> Table:
    table = Table(box=box.SIMPLE, title="What would help", title_justify="left")
    table.add_column("")
    table.add_column("speed", justify="right")
    table.add_column("what, and how")
    for number, action in enumerate(report.actions, 1):
        gain = action.gain
        how = Text(f"{action.condition}: " if action.condition else "")
        how.append(action.title)
        how.append(f"\n{action.code}", style="cyan")
        how.append(f"\n{action.why}", style="dim")
        table.add_row(str(number), f"{gain.value:.2f}x\n({gain.low:.2f} to {gain.high:.2f})", how)
    return table


def _rate(rate: Rate) -> str:
    return f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"


def what_it_will_do(command: list[str], budget_s: float) -> str:
    """Say, beforehand, what an analysis does to a script."""
    return (
        f"stoker analyze will start\n    {' '.join(command)}\n"
        "once (up to three times if it ends early), let it run as it is for a few seconds, then "
        "hand it the same batches again and again, then read its data with no training step, cold "
        f"and warm, and end it. It takes {budget_s / 60:.3g} minutes at most. No file is edited; "
        "what the script itself writes, it writes. Ctrl-C ends everything."
    )
