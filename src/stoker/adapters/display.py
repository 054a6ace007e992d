"""A picture of a running pipeline, kept up to date."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.fork_safety import OwningProcess
from stoker.pipeline import Pipeline

if TYPE_CHECKING:
    from rich.console import Console

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


@contextlib.contextmanager
def printing_above(console: Console) -> Iterator[None]:
    """Have lines that this process prints come above a live picture in the same terminal.

    To who asks, stdout and stderr are no terminals meanwhile: nobody else draws there.
    """
    from rich.file_proxy import FileProxy

    here = OwningProcess()

    class Above(FileProxy):
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            if not here.is_current:  # a worker process: the picture, and its lock, are not its own
                return self.rich_proxied_file.write(text)
            return super().write(text)

    def above(stream: Any) -> Any:
        terminal = stream is not None and stream.isatty() and not console.is_jupyter
        return Above(console, stream) if terminal else stream

    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = map(above, before)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Above):
                stream.flush()  # a line that was not ended
        sys.stdout, sys.stderr = before
