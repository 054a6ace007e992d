"""``serve``: a page and Prometheus' text about pipelines and monitored loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker.adapters.monitored import Monitored
from stoker.basics.validate import is_whole_number
from stoker.pipeline import Pipeline

if TYPE_CHECKING:  # http.server takes 20 ms of every start, for those alone that serve
    from stoker.adapters.metrics_server import MetricsServer

Source = Pipeline[Any] | Monitored[Any]


def serve(sources: Source | Mapping[str, Source], port: int = 9464) -> MetricsServer:
    """Serve a page for a browser at ``http://127.0.0.1:PORT/``, for Prometheus at ``/metrics``.

    Both show the numbers of ``metrics()``; the page also has the table of ``stats()``. On this host
    only, without a password. Ends with ``close()``, at the end of a ``with`` block, or with the
    process; a forked child does not have it.

    Example: ``stoker.serve({"train": train, "val": val})``

    Args:
        sources: a pipeline or the result of ``stoker.monitor``, or a dict of them by name. The name
            becomes the label ``pipeline``, which is ``train`` for a single one.
        port: the port; 0: any free one. Each process needs its own, such as ``9464 + rank``.

    Returns:
        The server: ``url`` of the page, ``port``, ``close()``.

    Raises TypeError for another object, ValueError for a wrong name or port, OSError if the port is
    taken.
    """
    from stoker.adapters.metrics_server import MetricsServer

    named = dict(sources) if isinstance(sources, Mapping) else {"train": sources}
    for name, source in named.items():
        if not isinstance(name, str):
            raise ValueError(f"a name is text, not {name!r}")
        if not isinstance(source, Pipeline | Monitored):
            raise TypeError(
                "serve takes pipelines and monitored loaders, not "
                f"{type(source).__name__}: wrap it, stoker.monitor(loader)"
            )
    if not is_whole_number(port) or not 0 <= port < 1 << 16:
        raise ValueError(f"a port is a whole number from 0 to 65535, not {port!r}")
    return MetricsServer(named, int(port))
