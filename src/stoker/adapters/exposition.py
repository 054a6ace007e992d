"""An endpoint for Prometheus on this host, with the metrics of pipelines."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from stoker.adapters.scalars import metrics
from stoker.basics import process
from stoker.basics.future import start_thread
from stoker.basics.signals import defer_interrupts
from stoker.basics.validate import is_whole_number
from stoker.transport.address import join_address

_HOST = "127.0.0.1"
# As long as a user waits without a word for a thread that answers.
_JOIN_S = 5.0


def serve_metrics(sources: Any, port: int = 9464) -> MetricsServer:
    """Serve the numbers of ``stoker.metrics`` to Prometheus, at ``http://127.0.0.1:PORT/metrics``.

    On this host only, without a password. Ends with ``close()``, at the end of a ``with`` block, or
    with the process; a forked child does not have it.

    Args:
        sources: an object that ``stoker.metrics`` takes, or a dict of them by name. The name
            becomes the label ``pipeline``, which is ``train`` for a single object.
        port: the port; 0: any free one (see ``.port``). Each process needs its own.

    Raises ImportError without ``stoker[prometheus]``, TypeError for an object without metrics,
    ValueError for a wrong name or port, OSError if the port is taken.
    """
    named = dict(sources) if isinstance(sources, Mapping) else {"train": sources}
    for name, source in named.items():
        if not isinstance(name, str):
            raise ValueError(f"a name is text, not {name!r}")
        metrics(source)  # what is wrong with it is said now
    if not is_whole_number(port) or not 0 <= port < 1 << 16:
        raise ValueError(f"a port is a whole number from 0 to 65535, not {port!r}")
    return MetricsServer(named, int(port))


class MetricsServer:
    """Answers Prometheus; made by ``serve_metrics``.

    Attributes:
        port: its port.
        url: its URL, for Prometheus or a browser.
    """

    def __init__(self, sources: Mapping[str, Any], port: int) -> None:
        try:
            from stoker.adapters.prometheus import PrometheusServer
        except ImportError as error:
            raise ImportError(
                f"stoker.serve_metrics: {error}: pip install 'stoker[prometheus]'"
            ) from error
        with defer_interrupts():
            server = PrometheusServer((_HOST, port), sources)
            self._listening = server.socket
            process.close_in_children(self._listening)
            self._thread = start_thread("stoker-metrics", server.serve)
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://{join_address(_HOST, self.port)}/metrics"

    def close(self) -> None:
        """Stop serving; waits for its thread, for at most 5 s. May be called again."""
        with contextlib.suppress(OSError):  # in a forked child it is closed already
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
