"""``stoker feed``: a feeder in the foreground, with a table of its jobs and their progress."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from types import FrameType
from typing import Any

from stoker.adapters.entrypoint import target_of
from stoker.adapters.printing import printing_above
from stoker.basics.resources import format_bytes
from stoker.errors import FeedError
from stoker.feed.autostart import SWITCH_S
from stoker.feed.feeder.session import ClientSession
from stoker.feed.local_socket import check_name, listen
from stoker.feed.relay.url import FeedUrl
from stoker.feed.server import FeedServer, open_server
from stoker.feed.settings import FeedSettings

# People see a change within half a second; drawing more often only takes time from preparing.
_REFRESH_S = 0.5
# Lines stay in a log: six a minute.
_LINES_S = 10.0
# So a row of the view fits into 80 columns.
_LABEL_CHARACTERS = 36


def serve(
    target: str,
    *,
    name: str,
    staging: int | str | None,
    jobs: int,
    patience_s: float,
    listen_at: str,
    insecure: bool,
) -> None:
    """Serve a pipeline until this process is interrupted, and show its jobs.

    Raises FeedError when the name or the address ``listen_at`` is taken or the target cannot be
    served, TokenError, ValueError for a wrong name, address or target or too little memory, and
    KeyboardInterrupt at the end.
    """
    check_name(name)
    settings = FeedSettings(
        name, target_of(target), staging, jobs, patience_s, listen=listen_at, insecure=insecure
    )
    listener = listen(name)
    if listener is None:
        raise FeedError(f"a feed {name!r} is there already: stop it, or take another name")
    signal.signal(signal.SIGTERM, _interrupt)
    sys.setswitchinterval(SWITCH_S)
    _show(open_server(listener, settings))


def _show(feeder: FeedServer) -> None:
    """Serve to the end, and close the feeder."""
    from rich.console import Console

    console = Console()
    with contextlib.ExitStack() as shown:
        if console.is_terminal:
            shown.enter_context(printing_above(console))  # caches draw until the feeder is closed
        shown.enter_context(contextlib.closing(feeder))
        console.print(headline(feeder), highlight=False, markup=False)
        view = View(feeder)
        if console.is_terminal:
            _draw(console, view, feeder)
        else:
            feeder.serve(lambda: _say(console, view), _LINES_S)


def _draw(console: Any, view: View, feeder: FeedServer) -> None:
    from rich.live import Live

    live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    def refresh() -> None:
        if view.refresh():  # an idle feeder draws nothing
            live.update(view.renderable(), refresh=True)

    with live:
        feeder.serve(refresh, _REFRESH_S)


def _say(console: Any, view: View) -> None:
    view.refresh()
    console.print(view.line(), highlight=False, markup=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def headline(feeder: FeedServer) -> str:
    """Return the first lines: the feed, its memory, and how to read it."""
    about = feeder.about
    what = "batches" if about.batched else "examples"
    length = "" if about.length is None else f", {about.length:,} an epoch"
    elsewhere = ""
    if feeder.address:
        url = FeedUrl(feeder.address, feeder.name)
        elsewhere = f"\non another host: for batch in stoker.from_feed({str(url)!r}): ..."
    return (
        f"feed {feeder.name!r}: {what} of {feeder.target}{length}, seed {feeder.seed}\n"
        f"staging area: {feeder.staging.text()}; none of it in /dev/shm\n"
        f"in a job: for batch in stoker.from_feed({feeder.name!r}): ...{elsewhere}"
    )


class View:
    """A picture of a feeder that is kept up to date; ``renderable`` is for rich."""

    def __init__(self, feeder: FeedServer) -> None:
        self._feeder = feeder
        self._at_s = time.monotonic()
        # Of each job; of what is made, under None.
        self._rows: dict[ClientSession | None, int] = {None: 0}
        self._rates: dict[ClientSession | None, float] = {None: 0.0}
        self._moved = True

    def refresh(self) -> bool:
        """Measure the rates since the last call; True if any job made progress."""
        now_s = time.monotonic()
        rows: dict[ClientSession | None, int] = {None: self._feeder.rows_made}
        rows |= {session: session.rows for session in self._feeder.sessions}
        spent_s = max(1e-9, now_s - self._at_s)
        self._rates = {who: (n - self._rows.get(who, 0)) / spent_s for who, n in rows.items()}
        moved, self._moved = self._moved, rows != self._rows
        self._rows, self._at_s = rows, now_s
        return moved or self._moved  # once more behind the last move: the rates are 0 then

    def line(self) -> str:
        """Return the main figures in one line."""
        feeder = self._feeder
        jobs = [session for session in feeder.sessions if session.is_welcome]
        text = f"{len(jobs)} jobs, {self._rates[None]:,.0f} examples/s prepared once"
        slowest = max(jobs, key=lambda session: session.held_up_s, default=None)
        if slowest is not None and slowest.held_up_s > 0:
            text += (
                f"; process {slowest.pid} sets the pace: others waited for it "
                f"{min(1.0, slowest.held_up_s / _alive_s(slowest)):.0%} of its time"
            )
        return text

    def renderable(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        feeder = self._feeder
        held = sum(len(log.items) for log in feeder.branches.logs)
        beside = len(feeder.branches) - 1
        title = (
            f"feed {feeder.name}: {self._rates[None]:,.0f} examples/s prepared once, "
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
        for session in feeder.sessions:
            if session.is_welcome:
                label = Text(session.label[:_LABEL_CHARACTERS], no_wrap=True, overflow="ellipsis")
                table.add_row(str(session.pid), label, *self._row(session))
        table.caption = None if table.row_count else "no jobs yet"
        return table

    def _row(self, session: ClientSession) -> list[Any]:
        alive_s = _alive_s(session)
        at, behind = ("", ""), ""
        if session.reader is not None and session.branch is not None:
            epoch, number = session.reader.at
            at = f"{epoch:,}", f"{number:,}" if session.reader.has_asked else "between"
            begins = [item.begin for item in session.branch.log.items]
            behind = str(sum(begin >= session.reader.at for begin in begins))
        elif session.is_waiting:
            at = "", "joins next"
        return [
            *at,
            behind,
            str(len(session.lent)),
            f"{self._rates.get(session, 0.0):,.0f}",
            f"{min(1.0, session.wait_ns / 1e9 / alive_s):.0%}",
            f"{session.held_up_s / alive_s:.0%}",
        ]


def _alive_s(session: ClientSession) -> float:
    return max(1e-9, time.monotonic() - session.since_s)
