"""The server behind ``serve``, by ``http.server``.

A thread accepts, and each connection has a thread of its own, so that a silent one delays no other.
No thread here takes a lock that the main thread waits for: Ctrl-C leaves none held.
"""

from __future__ import annotations

import contextlib
import html
import socket
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from stoker.adapters.monitored import Monitored
from stoker.basics import process
from stoker.basics.future import start_thread
from stoker.basics.signals import defer_interrupts

_HOST = "127.0.0.1"
# As long as a user waits without a word for a thread that answers.
_JOIN_S = 5.0
# Without descriptors, accepting fails at once: a loop without a pause would take a core.
_AGAIN_S = 0.05

# The page loads itself again; a reload by the browser would show an error once the run has ended.
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>stoker</title><style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
pre { overflow-x: auto; font-size: .85rem }
meter { width: 20rem; max-width: 100% } td { padding-right: 1.5rem }
:root { color-scheme: light dark }
</style><script>
setInterval(async () => {
  try {
    const text = await (await fetch(location)).text();
    document.body.innerHTML = new DOMParser().parseFromString(text, "text/html").body.innerHTML;
  } catch {
    document.getElementById("ended").hidden = false;
  }
}, 2000);
</script></head><body>
<p id="ended" hidden>The run has ended, or cannot be reached. Its last numbers:</p>
SOURCES</body></html>
"""


# What each number is, for whoever builds a board of them.
_HELP = {
    "epoch": "The epoch, from 0",
    "wait_fraction": "Share of this epoch's time that the consumer waited for data",
    "fresh_examples_per_s": "Examples per second of this epoch, repeats left out",
    "batches_per_s": "Batches per second of this pass",
    "realised_factor": "Uses per fresh example of this epoch",
    "copy_distance": "Mean steps between two uses of an example",
    "workers": "Threads or processes at work",
    "window_ready": "Outputs that are ready and wait for the consumer",
    "skipped_examples": "Examples of this epoch that failed and were left out",
    "feed_lag_outputs": "Outputs that the feed had ready beyond this job's last one",
    "cache_hit_fraction": "Share of lookups that the cache answered",
    "cache_used_bytes": "Bytes that the cache takes",
    "cache_limit_bytes": "Bytes that the cache may take",
    "fresh_examples_total": "Examples, repeats left out",
    "uses_total": "Examples, repeats included",
    "steps_total": "Batches",
    "elapsed_s_total": "Seconds in epochs",
    "consumer_wait_s_total": "Seconds in epochs that the consumer waited for data",
    "read_bytes_total": "Bytes from the source, a cache's left out",
    "cache_hits_total": "Examples from the cache",
    "cache_misses_total": "Examples that the cache did not have",
}


class MetricsServer(ThreadingHTTPServer):
    """Answers browsers and Prometheus; made by ``serve``.

    Attributes:
        port: its port.
        url: the URL of its page.
    """

    def __init__(self, sources: Mapping[str, Any], port: int) -> None:
        self.sources = sources
        with defer_interrupts():
            super().__init__((_HOST, port), _Handler)
            process.close_in_children(self.socket)
            self._thread = start_thread("stoker-metrics", self._answer)
        self.port: int = self.server_port
        self.url = f"http://{_HOST}:{self.port}/"

    def close(self) -> None:
        """Stop serving; waits for its thread, for at most 5 s. May be called again."""
        with contextlib.suppress(OSError):  # in a forked child it is closed already
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.socket.close()
        self._thread.join(_JOIN_S)
        self.sources = {}  # with pipelines, the threads of their caches would stay

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> None:
        # Not serve_forever: ending that waits for an Event, whose lock Ctrl-C may leave held.
        while self._is_listening():
            self.handle_request()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for the name of the host
        self.server_port = self.server_address[1]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            if self._is_listening():
                time.sleep(_AGAIN_S)  # no descriptors are left, or the client is gone
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client is gone
            super().handle_error(request, client_address)

    def _is_listening(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return False


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: MetricsServer
    # A client has so long for each piece of its request: half of Prometheus' limit for a scrape.
    timeout = 5.0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path == "/metrics":
                kind, text = "text/plain; version=0.0.4", expose(self.server.sources)
            elif path == "/":
                kind, text = "text/html", write_page(self.server.sources)
            else:
                return self.send_error(404)
        except Exception as error:  # the error is in the answer, and the next request tries again
            return self.send_error(500, explain=f"{type(error).__name__}: {error}")
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing into the job's output."""


def expose(sources: Mapping[str, Any]) -> str:
    """Return the numbers in Prometheus' text format, with the label ``pipeline``."""
    families: dict[str, list[str]] = {}
    for label, source in sources.items():
        escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in source.metrics("").items():
            full = f"stoker_{name}"
            kind = "counter" if name.endswith("_total") else "gauge"
            head = f"# HELP {full} {_HELP[name]}.\n# TYPE {full} {kind}\n"
            lines = families.setdefault(name, [head])
            lines.append(f'{full}{{pipeline="{escaped}"}} {value}\n')
    return "".join(line for lines in families.values() for line in lines)


def write_page(sources: Mapping[str, Any]) -> str:
    """Return a page with the waiting, the statistics and the numbers of each source."""
    parts = []
    for label, source in sources.items():
        numbers = source.metrics("")
        stats = source.total if isinstance(source, Monitored) else source.stats()
        waiting = numbers["wait_fraction"]
        rows = (f"<tr><td>{name}</td><td>{value:,.6g}</td></tr>" for name, value in numbers.items())
        parts.append(
            f"<h1>{html.escape(label)}</h1><p><meter value={waiting:.4f} low=0.05 high=0.3 "
            f"optimum=0></meter> waits {waiting:.0%} of this epoch's time for data</p>"
            f"<pre>{html.escape(str(stats))}</pre><table>{''.join(rows)}</table>"
        )
    return _PAGE.replace("SOURCES", "\n".join(parts))
