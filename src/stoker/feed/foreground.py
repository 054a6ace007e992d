"""``stoker feed``: runs a feeder in the foreground, with a table of its jobs."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.adapters.entrypoint import target_of
from stoker.basics.process import OwningProcess
from stoker.basics.resources import format_bytes
from stoker.errors import FeedError
from stoker.feed.autostart import SWITCH_S
from stoker.feed.feeder.session import ClientSession
from stoker.feed.local_socket import check_name, listen
from stoker.feed.remote import FeedUrl
from stoker.feed.server import FeedServer, open_server
from stoker.feed.settings import FeedSettings

# How often the table is drawn: half a second is soon enough for people, and drawing takes time from
# preparing. Chosen, not measured.
_REFRESH_S = 0.5
# How often a line is printed if the output is no terminal: six lines a minute in a log.
_LINES_S = 10.0
# With labels of this length, a row of the table fits into 80 columns.
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

    Raises FeedError if the name or the address ``listen_at`` is taken, or if the target cannot be
    served; TokenError; ValueError for an invalid name, address or target, or for too little memory;
    KeyboardInterrupt at the end.
    """
    check_name(name)
    settings = FeedSettings(
        name, target_of(target), staging, jobs, patience_s, listen=listen_at, insecure=insecure
    )
    listener = listen(name)
    if listener is None:
        raise FeedError(f"there is already a feed {name!r}: stop it, or choose another name")
    signal.signal(signal.SIGTERM, _interrupt)
    sys.setswitchinterval(SWITCH_S)
    _serve_with_view(open_server(listener, settings))


def _serve_with_view(feeder: FeedServer) -> None:
    """Serve until the end, show the jobs, and close the feeder."""
    console = Console()
    with contextlib.ExitStack() as shown:
        if console.is_terminal:
            # Before the feeder's context: caches print until the feeder is closed.
            shown.enter_context(_printing_above(console))
        shown.enter_context(contextlib.closing(feeder))
        console.print(headline(feeder), highlight=False, markup=False)
        view = View(feeder)
        if console.is_terminal:
            _draw(console, view, feeder)
        else:
            feeder.serve(lambda: _print_line(console, view), _LINES_S)


class _AboveTable(FileProxy):
    """A stream whose lines are printed above the table that is redrawn in the same terminal.

    It is no terminal to other libraries, so that they do not draw there.
    """

    def __init__(self, console: Console, stream: Any) -> None:
        super().__init__(console, stream)
        self._here = OwningProcess()

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not self._here.is_current:  # a worker process does not own the table, or its lock
            return self.rich_proxied_file.write(text)
        return super().write(text)


@contextlib.contextmanager
def _printing_above(console: Console) -> Iterator[None]:
    """Print this process's lines above the table."""
    with contextlib.ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                above = _AboveTable(console, stream)
                undo.callback(setattr, sys, name, stream)
                undo.callback(above.flush)  # a line that was not ended
                setattr(sys, name, above)
        yield


def _draw(console: Console, view: View, feeder: FeedServer) -> None:
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


def _print_line(console: Console, view: View) -> None:
    view.refresh()
    console.print(view.line(), highlight=False, markup=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def headline(feeder: FeedServer) -> str:
    """Return the first lines: what the feed serves, its memory, and how a job reads it."""
    about = feeder.about
    outputs = "batches" if about.batched else "examples"
    length = "" if about.length is None else f", {about.length:,} an epoch"
    remote_hint = ""
    if feeder.address:
        url = FeedUrl(feeder.address, feeder.name)
        remote_hint = f"\non another host: for batch in stoker.from_feed({str(url)!r}): ..."
    return (
        f"feed {feeder.name!r}: {outputs} of {feeder.target}{length}, seed {feeder.seed}\n"
        f"staging area: {feeder.staging.describe()}, not in /dev/shm\n"
        f"in a job: for batch in stoker.from_feed({feeder.name!r}): ...{remote_hint}"
    )


class View:
    """The table of a feeder's jobs, and their rates; ``renderable`` returns it for rich."""

    def __init__(self, feeder: FeedServer) -> None:
        self._feeder = feeder
        self._at_s = time.monotonic()
        # By job; under None for the feeder's own output.
        self._rows: dict[ClientSession | None, int] = {None: 0}
        self._rates: dict[ClientSession | None, float] = {None: 0.0}
        self._has_changed = True

    def refresh(self) -> bool:
        """Measure the rates since the last call; True if the table has changed."""
        now_s = time.monotonic()
        rows: dict[ClientSession | None, int] = {None: self._feeder.rows_made}
        rows |= {session: session.rows for session in self._feeder.sessions}
        elapsed_s = max(1e-9, now_s - self._at_s)
        self._rates = {
            session: (n - self._rows.get(session, 0)) / elapsed_s for session, n in rows.items()
        }
        has_changed, self._has_changed = self._has_changed, rows != self._rows
        self._rows, self._at_s = rows, now_s
        return has_changed or self._has_changed  # and once more: then the rates are 0

    def line(self) -> str:
        """Return the main figures in one line."""
        feeder = self._feeder
        jobs = [session for session in feeder.sessions if session.is_welcome]
        text = f"{len(jobs)} jobs, {self._rates[None]:,.0f} examples/s prepared once"
        slowest = max(jobs, key=lambda session: session.blocked_others_s, default=None)
        if slowest is not None and slowest.blocked_others_s > 0:
            text += (
                f"; process {slowest.pid} is the slowest: others waited for it "
                f"{min(1.0, slowest.blocked_others_s / _alive_s(slowest)):.0%} of the time"
            )
        return text

    def renderable(self) -> Any:
        feeder = self._feeder
        items_held = sum(len(log.items) for log in feeder.branches.logs)
        other_branches = len(feeder.branches) - 1
        title = (
            f"feed {feeder.name}: {self._rates[None]:,.0f} examples/s prepared once, "
            f"{items_held} of {feeder.staging.describe()} in use, "
            f"{format_bytes(feeder.blocks.held_bytes())} of shared memory"
        )
        if other_branches > 0:
            title += f"; {other_branches} more branches, for jobs that catch up"
        # No box lines: labels need the room in 80 columns.
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("pid", no_wrap=True)
        table.add_column("job")  # the only column that may be narrowed
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
        position, behind = ("", ""), ""
        if session.reader is not None and session.branch is not None:
            epoch, number = session.reader.position
            position = f"{epoch:,}", f"{number:,}" if session.reader.has_requested else "between"
            begins = [item.begin for item in session.branch.log.items]
            behind = str(sum(begin >= session.reader.position for begin in begins))
        elif session.is_waiting:
            position = "", "joins next"
        return [
            *position,
            behind,
            str(len(session.leases)),
            f"{self._rates.get(session, 0.0):,.0f}",
            f"{min(1.0, session.wait_ns / 1e9 / alive_s):.0%}",
            f"{session.blocked_others_s / alive_s:.0%}",
        ]


def _alive_s(session: ClientSession) -> float:
    return max(1e-9, time.monotonic() - session.since_s)
