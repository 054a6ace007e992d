"""A picture of a running pipeline, kept up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stoker.pipeline import Pipeline
from stoker.printing import printing_above

_REFRESHES_PER_SECOND = 4


@contextlib.contextmanager
def live(pipeline: Pipeline) -> Iterator[None]:
    """Keep the drawing of ``pipeline.stats()`` up to date in a terminal or a notebook.

    What is printed meanwhile stands above it. Where there is no terminal, it is printed once, at
    the end.
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

    def picture() -> Text:
        return Text(pipeline.stats().drawn(console.width), no_wrap=True, overflow="crop")

    drawing = Live(
        get_renderable=picture,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with drawing, printing_above(console):
        yield
