"""Answers Prometheus with the numbers of ``metrics``, by ``prometheus_client``.

A thread accepts, and each connection has a thread of its own, so that a silent one delays no other.
No thread here takes a lock that the main thread waits for: Ctrl-C leaves none held.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from stoker.adapters.scalars import metrics

# Without descriptors, accepting fails at once: a loop without a pause would take a core.
_AGAIN_S = 0.05


class PrometheusServer(ThreadingHTTPServer):
    """Listens at an address; ``serve`` answers requests."""

    def __init__(self, address: tuple[str, int], sources: Mapping[str, Any]) -> None:
        self._sources = dict(sources)
        registry = CollectorRegistry()
        registry.register(SourceCollector(self._sources))
        super().__init__(address, ScrapeHandler.factory(registry))

    def find_page(self) -> str | None:
        """Return the page of the first source that has one, as HTML."""
        return next((s.page() for s in list(self._sources.values()) if hasattr(s, "page")), None)

    def serve(self) -> None:
        """Answer until the socket is shut down."""
        # Not serve_forever: ending that waits for an Event, whose lock Ctrl-C may leave held.
        while self._is_listening():
            self.handle_request()
        # The handler's class is a cycle of references, which would keep the sources, and with them
        # the threads of their caches, until the collector comes by.
        self._sources.clear()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for the name of the host

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            if self._is_listening():
                time.sleep(_AGAIN_S)  # no descriptors are left, or the client is gone
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # who asked is gone
            super().handle_error(request, client_address)

    def _is_listening(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return False


class ScrapeHandler(MetricsHandler):  # type: ignore[misc, unused-ignore]
    """Answers one request, in one of the formats that it asks for."""

    # A client has so long for each piece of its request: half of Prometheus' limit for a scrape.
    timeout = 5.0

    def do_GET(self) -> None:
        try:
            assert isinstance(self.server, PrometheusServer)
            page = self.server.find_page() if self.path == "/" else None
            if page is None:
                return super().do_GET()
            content = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            raise
        except Exception as error:  # the error is in the answer, and the next request tries again
            self.send_error(500, explain=f"{type(error).__name__}: {error}")


class SourceCollector:
    """Hands the numbers of sources to ``prometheus_client``, with the label ``pipeline``."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for label, source in list(self._sources.items()):
            for name, value in metrics(source, "stoker_").items():
                if name not in families:
                    is_counter = name.endswith("_total")
                    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                    families[name] = kind(name, name, labels=["pipeline"])
                families[name].add_metric([label], value)
        yield from families.values()
