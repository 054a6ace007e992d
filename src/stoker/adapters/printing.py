"""Ordinary output above a table that is redrawn in the same terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.basics.process import OwningProcess

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def printing_above(console: Console) -> Iterator[None]:
    """Print this process's lines above a redrawn table in the same terminal.

    Meanwhile ``isatty()`` of stdout and stderr is False, so that no other library draws there.
    """
    from rich.file_proxy import FileProxy

    here = OwningProcess()

    class Above(FileProxy):
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            if not here.is_current:  # a worker process does not own the picture, or its lock
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
