"""A picture of a running pipeline, kept up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stoker.pipeline import Pipeline

_REFRESHES_PER_SECOND = 4


@contextlib.contextmanager
def live(pipeline: Pipeline) -> Iterator[None]:
    """Keep the drawing of ``pipeline.stats()`` up to date in a terminal or a notebook.

    Where there is no terminal, it is printed once, at the end.
    """
    from rich.live import Live
    from rich.text import Text

    with Live(
        get_renderable=lambda: Text(str(pipeline.stats()), no_wrap=True, overflow="crop"),
        refresh_per_second=_REFRESHES_PER_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield
