"""What a feeder shows of itself: its jobs, how far behind they are, and who sets the pace."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from stoker.machine import format_bytes

if TYPE_CHECKING:
    from stoker.feed.server import ClientSession, FeedServer

_LABEL = 36


def headline(feeder: FeedServer) -> str:
    """Say what is served, and what it takes."""
    about = feeder.about
    what = "batches" if about.batched else "examples"
    length = "" if about.length is None else f", {about.length:,} an epoch"
    return (
        f"feed {feeder.name!r}: {what} of {feeder.target}{length}, seed {feeder.seed}\n"
        f"staging area: {feeder.staging.text()}; none of it in /dev/shm\n"
        f"in a job: for batch in stoker.from_feed({feeder.name!r}): ..."
    )


class View:
    """A picture of a feeder that is kept up to date; ``renderable`` is for rich."""

    def __init__(self, feeder: FeedServer) -> None:
        self._feeder = feeder
        self._at_s = time.monotonic()
        self._rows: dict[ClientSession, int] = {}
        self._made = 0
        self._rates: dict[ClientSession, float] = {}
        self._rate = 0.0
        self._moved = True

    def refresh(self) -> bool:
        """Take note of how fast everything went since the last time; tell whether anything did."""
        now = time.monotonic()
        spent = max(1e-9, now - self._at_s)
        feeder = self._feeder
        self._rates = {job: (job.rows - self._rows.get(job, 0)) / spent for job in feeder.jobs}
        self._rate = (feeder.rows_made - self._made) / spent
        before = self._rows, self._made
        self._rows = {job: job.rows for job in feeder.jobs}
        self._made, self._at_s = feeder.rows_made, now
        moved, self._moved = self._moved, before != (self._rows, self._made)
        return moved or self._moved  # once more behind the last move: the rates are 0 then

    def line(self) -> str:
        """Return what matters most, in one line."""
        feeder = self._feeder
        jobs = [job for job in feeder.jobs if job.welcome]
        text = f"{len(jobs)} jobs, {self._rate:,.0f} examples/s prepared once"
        slowest = max(jobs, key=lambda job: job.held_up_s, default=None)
        if slowest is not None and slowest.held_up_s > 0:
            alive_s = max(1e-9, time.monotonic() - slowest.since_s)
            text += (
                f"; process {slowest.pid} sets the pace: others waited for it "
                f"{min(1.0, slowest.held_up_s / alive_s):.0%} of its time"
            )
        return text

    def renderable(self) -> Any:
        """Return a table of the jobs."""
        from rich.table import Table
        from rich.text import Text

        feeder = self._feeder
        held = sum(len(line.lane.items) for line in feeder.lines)
        beside = len(feeder.lines) - 1
        title = (
            f"feed {feeder.name}: {self._rate:,.0f} examples/s prepared once, "
            f"{held} of {feeder.staging.text()} in use, "
            f"{format_bytes(feeder.blocks.held_bytes())} of shared memory"
        )
        if beside > 0:
            title += f"; {beside} beside, for jobs that catch up"
        # Without lines, which would take the room that a label needs in 80 columns.
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("pid", no_wrap=True)
        table.add_column("job")  # what gives way
        for column in ("epoch", "next", "behind", "holds", "examples/s", "waits", "holds up"):
            table.add_column(column, justify="right", no_wrap=True)
        for job in feeder.jobs:
            if job.welcome:
                label = Text(job.label[:_LABEL], no_wrap=True, overflow="ellipsis")
                table.add_row(str(job.pid), label, *self._row(job))
        table.caption = None if table.row_count else "no jobs yet"
        return table

    def _row(self, job: ClientSession) -> list[Any]:

        alive_s = max(1e-9, time.monotonic() - job.since_s)
        at, behind = ("", ""), ""
        if job.member is not None and job.line is not None:
            epoch, number = job.member.at
            at = f"{epoch:,}", f"{number:,}" if job.member.asked else "between"
            ahead = sum(1 for item in job.line.lane.items if item.begin >= job.member.at)
            behind = f"{ahead}"
        elif job.waits:
            at = "", "joins next"
        return [
            *at,
            behind,
            str(len(job.lent)),
            f"{self._rates.get(job, 0.0):,.0f}",
            f"{min(1.0, job.wait_ns / 1e9 / alive_s):.0%}",
            f"{job.held_up_s / alive_s:.0%}",
        ]
