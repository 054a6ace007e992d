"""``stoker feed``: serves in the foreground, and prints a table of the feed's jobs."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.basics.resources import format_bytes
from stoker.errors import FeedError
from stoker.feeds.feeder.distributor import ClientSession
from stoker.feeds.local_feeds import FeedSettings, check_name, listen
from stoker.feeds.remote import join_url
from stoker.feeds.server import SWITCH_S, FeedServer, open_server

# How often the table is printed, unless nothing has changed. Chosen, not measured.
_PRINT_S = 10.0
# With labels of this length, a row of the table fits into 80 columns.
_LABEL_CHARACTERS = 36


def serve(settings: FeedSettings) -> None:
    """Serve a pipeline until this process is interrupted, and print its jobs.

    Raises FeedError if the feed's name or address is taken, or if the target cannot be served;
    TokenError; ValueError for an invalid name or address, or for too little memory;
    KeyboardInterrupt at the end.
    """
    check_name(settings.name)
    listener = listen(settings.name)
    if listener is None:
        raise FeedError(
            f"there is already a feed {settings.name!r}: stop it, or choose another name"
        )
    signal.signal(signal.SIGTERM, _interrupt)
    sys.setswitchinterval(SWITCH_S)
    console = Console()
    with contextlib.closing(open_server(listener, settings)) as feeder:
        console.print(_headline(feeder), highlight=False, markup=False)
        view = FeedView(feeder)

        def tick() -> None:
            if view.refresh():  # an idle feeder prints nothing
                console.print(view.table(), highlight=False)

        feeder.serve(tick, _PRINT_S)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _headline(feeder: FeedServer) -> str:
    """Return the first lines: what the feed serves, its memory, and how a job reads it."""
    about = feeder.about
    outputs = "batches" if about.batched else "examples"
    length = "" if about.length is None else f", {about.length:,} an epoch"
    remote_hint = ""
    if feeder.address:
        url = join_url(feeder.address, feeder.name)
        remote_hint = f"\non another host: for batch in stoker.from_feed({url!r}): ..."
    return (
        f"feed {feeder.name!r}: {outputs} of {feeder.target}{length}, seed {feeder.seed}\n"
        f"staging area: {feeder.staging.describe()}, not in /dev/shm\n"
        f"in a job: for batch in stoker.from_feed({feeder.name!r}): ...{remote_hint}"
    )


class FeedView:
    """The table of a feeder's jobs, and the feeder's rate between two calls of ``refresh``."""

    def __init__(self, feeder: FeedServer) -> None:
        self._feeder = feeder
        self._at_s = time.monotonic()
        self._rows = 0
        self._rate = 0.0
        self._shown: list[tuple[str, str, str]] = []

    def refresh(self) -> bool:
        """Measure the rate since the last call; True if anything but waits has changed."""
        now_s, rows = time.monotonic(), self._feeder.rows_made
        self._rate = (rows - self._rows) / max(1e-9, now_s - self._at_s)
        shown = [_position_of(job) for job in self._feeder.sessions if job.is_welcome]
        has_changed = (rows, shown) != (self._rows, self._shown)
        self._rows, self._at_s, self._shown = rows, now_s, shown
        return has_changed

    def table(self) -> Table:
        feeder = self._feeder
        items_held = sum(len(log.items) for log in feeder.branches.logs)
        title = (
            f"feed {feeder.name}: {self._rate:,.0f} examples/s prepared once, "
            f"{items_held} of {feeder.staging.describe()} in use, "
            f"{format_bytes(feeder.blocks.held_bytes())} of shared memory"
        )
        if len(feeder.branches) > 1:
            title += f"; {len(feeder.branches) - 1} more branches, for jobs that catch up"
        # No box lines: labels need the room in 80 columns.
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("pid", no_wrap=True)
        table.add_column("job")  # the only column that may be narrowed
        for column in ("epoch", "next", "behind", "holds up"):
            table.add_column(column, justify="right", no_wrap=True)
        for job in feeder.sessions:
            if job.is_welcome:
                label = Text(job.label[:_LABEL_CHARACTERS], no_wrap=True, overflow="ellipsis")
                alive_s = max(1e-9, time.monotonic() - job.since_s)
                held_up = f"{job.blocked_others_s / alive_s:.0%}"
                table.add_row(str(job.pid), label, *_position_of(job), held_up)
        return table


def _position_of(job: ClientSession) -> tuple[str, str, str]:
    """Return a job's epoch, its next output, and how many ready items it is behind."""
    if job.reader is not None and job.branch is not None:
        epoch, number = job.reader.position
        begins = [item.begin for item in job.branch.log.items]
        behind = sum(begin >= job.reader.position for begin in begins)
        return f"{epoch:,}", f"{number:,}" if job.reader.has_requested else "between", str(behind)
    return "", "joins next" if job.is_waiting else "", ""
