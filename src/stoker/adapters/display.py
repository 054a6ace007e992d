"""``live``: the statistics of a running pipeline, kept up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from stoker.adapters.printing import printing_above
from stoker.basics.future import OneShot, start_thread
from stoker.basics.signals import defer_interrupts
from stoker.pipeline import Pipeline

# As often as people read; drawing takes time from the job.
_REFRESHES_PER_SECOND = 4
# As long as a user waits without a word for a thread that draws.
_JOIN_S = 5.0


@contextlib.contextmanager
def live(pipeline: Pipeline) -> Iterator[None]:
    """Keep the table of ``pipeline.stats()`` up to date in a terminal or a notebook.

    Other output appears above it. Without a terminal it is printed once, at the end.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if not (console.is_terminal or console.is_jupyter):
        try:
            yield
        finally:
            print(pipeline.stats())
        return

    if console.is_jupyter:
        with _in_notebook(lambda: pipeline.stats().as_text(console.width)):
            yield
        return

    def picture() -> Text:
        return Text(pipeline.stats().as_text(console.width), no_wrap=True, overflow="crop")

    drawing = Live(
        get_renderable=picture,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with drawing, printing_above(console):
        yield


@contextlib.contextmanager
def _in_notebook(picture: Callable[[], str]) -> Iterator[None]:
    """Keep a text in a cell's output up to date, with IPython but without ipywidgets."""
    import IPython.display

    display: Any = IPython.display.display

    def mime_bundle() -> dict[str, str]:
        return {"text/plain": picture()}

    def refresh() -> None:
        while True:
            try:
                return over.wait(1 / _REFRESHES_PER_SECOND)
            except TimeoutError:
                handle.update(mime_bundle(), raw=True)

    over: OneShot[None] = OneShot()
    handle = display(mime_bundle(), raw=True, display_id=True)
    with defer_interrupts():
        thread = start_thread("stoker-live", refresh)
    try:
        yield
    finally:
        over.give(None)
        thread.join(_JOIN_S)
        handle.update(mime_bundle(), raw=True)
