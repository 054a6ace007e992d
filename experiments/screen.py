"""What is shown: a live table on a terminal, a line for every run elsewhere.

An arm is drawn while its clock stands still for an evaluation, so that the display takes no time
from it. Only the scene, which is not compared with anything, is drawn as it goes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments.arms import Arm
from experiments.report import Summary, measured_ratios, to_target
from experiments.runs import RunRecord
from experiments.scene_view import SceneView

_PLAIN_WIDTH = 130
_PROGRESS_EVERY_S = 2.0
_REDRAW_EVERY_S = 0.1


class Screen:
    """Shows an experiment while it runs."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(highlight=False)
        if not console.is_terminal:
            console = Console(file=console.file, width=_PLAIN_WIDTH, highlight=False)
        self._console = console
        self._live: Live | None = None
        self._note = ""

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text.from_markup(text))

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show progress of one thing; yields `progress(done, total)`.

        Without a call of that, nothing is drawn after the start: no spinner's thread takes
        time from what is being measured.
        """
        terminal = self._console.is_terminal
        told_s = [time.monotonic()]
        every_s = _REDRAW_EVERY_S if terminal else _PROGRESS_EVERY_S
        live = Live(Text(what), console=self._console, auto_refresh=False, transient=True)

        def progress(done: int, total: int) -> None:
            if time.monotonic() - told_s[0] >= every_s:
                told_s[0] = time.monotonic()
                text = f"{what}: {done:,} of {total:,}"
                if terminal:
                    live.update(Text(text), refresh=True)
                else:
                    self._console.print(text)

        if not terminal:
            yield progress
            return
        with live:
            live.refresh()
            yield progress

    @contextmanager
    def runs(self, plan: Sequence[tuple[Arm, int]]) -> Iterator[RunsView]:
        """Show runs, of arms and seeds; yields what is to be told about them."""
        if not self._console.is_terminal:
            yield RunsView(self._console, None, plan)
            return
        live = Live(console=self._console, auto_refresh=False, transient=True)
        with live:
            view = RunsView(self._console, live, plan)
            view.refresh()
            yield view

    @contextmanager
    def scene(self, seconds: float) -> Iterator[SceneView]:
        """Show a scene of so many seconds; yields what is to be told about it."""
        width = self._console.width
        if not self._console.is_terminal:
            view = SceneView(None, width, seconds)
            yield view
            self._console.print(view.drawn())
            return
        with Live(console=self._console, auto_refresh=False) as live:
            view = SceneView(live, width, seconds)
            yield view
            view.refresh()

    def table(self, found: Sequence[Summary], target: float) -> None:
        """Print the comparison."""
        ratios = measured_ratios(found)
        for slowness in dict.fromkeys(s.arm.slowness for s in found):
            self._console.print()
            chosen = [s for s in found if s.arm.slowness == slowness]
            self._console.print(_comparison(chosen, target, ratios.get(slowness)))
        notes = (
            "Medians over the seeds, the range of speed-ups in brackets; a miss is the worst. "
            "R = 1 / (1 - time waited without echoing)."
        )
        self._console.print(Text(notes, style="dim"))
        self._console.print()


class RunsView:
    """The runs of an experiment, as far as they are."""

    def __init__(
        self, console: Console, live: Live | None, plan: Sequence[tuple[Arm, int]]
    ) -> None:
        self._console = console
        self._live = live
        self._planned = Counter(arm for arm, _ in plan)
        self._records: dict[Arm, dict[int, RunRecord]] = {arm: {} for arm in self._planned}
        self._running: Arm | None = None
        self._finished = 0
        self._target: float | None = None

    def started(self, arm: Arm, target: float | None) -> None:
        """Show what is run, to a target that is None while nobody knows it."""
        self._running = arm
        self._target = target
        self.refresh()

    def evaluated(self, record: RunRecord) -> None:
        """Show a run that was evaluated."""
        self._records[record.arm][record.seed] = record
        self.refresh()

    def finished(self, record: RunRecord) -> None:
        """Show a run that is over."""
        self._running = None
        self._finished += 1
        if self._live is not None:
            self.refresh()
            return
        last = record.evaluations[-1]
        hit = to_target(record, self._target) if self._target is not None else None
        reached = "no target yet"
        if self._target is not None:
            reached = (
                f"{self._target:.1%} after {hit.seconds:.1f} s, {hit.fresh:,} fresh"
                if hit
                else f"{self._target:.1%} missed"
            )
        slowness = "" if record.arm.slowness > 1 else f" (R = {record.arm.slowness:g})"
        self._console.print(
            f"[{self._finished}/{self._planned.total()}] {record.arm.label}{slowness}, "
            f"seed {record.seed}: {reached}; at the end {last.accuracy:.1%}, {last.fresh:,} fresh, "
            f"factor {last.factor:.1f}, {last.seconds:.1f} s, "
            f"{last.waited_s / last.seconds:.0%} waited",
            markup=False,
        )

    def refresh(self) -> None:
        """Draw."""
        if self._live is not None:
            total = self._planned.total()
            line = Text(f"run {min(self._finished + 1, total)} of {total}; Ctrl-C stops", "dim")
            self._live.update(Group(self._table(), line), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("", width=1)
        table.add_column("arm", min_width=24)
        for name in ("seeds", "accuracy", "fresh", "factor", "seconds", "waited", "to target"):
            table.add_column(name, justify="right", min_width=8)
        for arm, planned in self._planned.items():
            records = self._records[arm]
            name = arm.label if arm.slowness > 1 else f"{arm.label} (R = {arm.slowness:g})"
            running = self._running == arm
            mark, style = (">", "bold") if running else ("", None)
            if not records:
                table.add_row(mark, name, *["-"] * 7, style=style or "dim")
                continue
            last = list(records.values())[-1].evaluations[-1]
            hits = (
                [to_target(record, self._target) for record in records.values()]
                if self._target is not None
                else []
            )
            table.add_row(
                mark,
                name,
                f"{len(records)}/{planned}",
                f"{last.accuracy:.1%}",
                f"{last.fresh:,}",
                f"{last.factor:.1f}",
                f"{last.seconds:.1f} s",
                f"{last.waited_s / last.seconds:.0%}",
                " ".join(f"{hit.seconds:.1f}" for hit in hits if hit) + (" s" if any(hits) else ""),
                style=style,
            )
        return table


def _comparison(found: Sequence[Summary], target: float, ratio: float | None) -> Table:
    table = Table(
        title=("" if ratio is None else f"R = {ratio:.2f}: ") + f"to {target:.1%} test accuracy",
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in (
        "fresh\nexamples",
        "\nsteps",
        "\nseconds",
        "\nspeed-up",
        "\nfactor",
        "time\nwaited",
        "\nmissed",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for s in found:
        table.add_row(
            s.arm.label,
            *(
                [f"{s.fresh:,.0f}", f"{s.steps:,.0f}", f"{s.seconds:.2f}"]
                if s.fresh is not None and s.steps is not None and s.seconds is not None
                else ["missed"] * 3
            ),
            _speedup(s),
            f"{s.realised_factor:.1f}",
            f"{s.waited_fraction:.0%}",
            f"{s.misses} of {s.runs}",
        )
    return table


def _speedup(s: Summary) -> str:
    if s.arm.place == "none":
        return "1"
    if s.speedup is None:
        return "missed"
    low = f"{s.speedups[0]:.1f}" if s.speedups[0] else "missed"
    span = f" ({low} to {s.speedups[-1]:.1f})" if s.runs > 1 else ""
    sign = "≥ " if s.speedups_are_bounds else ""
    return f"{sign}{s.speedup:.1f}{span}"
