"""A feeder in the foreground: ``stoker feed``."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType
from typing import Any

from stoker.errors import FeedError, StokerError
from stoker.feed import autostart
from stoker.feed.autostarted import SWITCH_S, refuse
from stoker.feed.server import FeedServer
from stoker.feed.target import made, target_of
from stoker.feed.view import View, headline
from stoker.printing import printing_above

_REFRESH_S = 0.5
_LINES_S = 10.0


def serve(
    target: str, *, name: str, staging: int | str | None, jobs: int, patience_s: float
) -> None:
    """Serve a pipeline until this process is interrupted, and show who takes it.

    Raises FeedError when the name is taken or the target cannot be served, ValueError for a wrong
    name or target or too little memory, and KeyboardInterrupt at the end.
    """
    autostart.check_name(name)
    target = target_of(target)
    listener = autostart.listening(name)
    if listener is None:
        raise FeedError(f"a feed {name!r} is there already: stop it, or take another name")
    signal.signal(signal.SIGTERM, _interrupt)
    sys.setswitchinterval(SWITCH_S)
    try:
        feeder = FeedServer(
            listener,
            made(target),
            name=name,
            target=target,
            staging=staging,
            jobs=jobs,
            patience_s=patience_s,
            founded=False,
        )
    except (StokerError, TypeError, ValueError) as error:
        refuse(listener, str(error))
        raise
    except BaseException:
        listener.close()
        raise
    _shown(feeder)


def _shown(feeder: FeedServer) -> None:
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
            _drawn(console, view, feeder)
        else:
            feeder.serve(lambda: _said(console, view), _LINES_S)


def _drawn(console: Any, view: View, feeder: FeedServer) -> None:
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


def _said(console: Any, view: View) -> None:
    view.refresh()
    console.print(view.line(), highlight=False, markup=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
