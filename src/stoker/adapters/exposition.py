"""An endpoint for Prometheus on this host, with the metrics of pipelines.

One thread answers requests in the order of their arrival: it waits for all connections at once, so
a silent one delays no other, and is closed. The thread uses only its connections, and never a lock
that the main thread waits for, so that Ctrl-C leaves no lock held.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from stoker.adapters.scalars import metrics
from stoker.basics import process
from stoker.basics.signals import deferred
from stoker.basics.validate import is_whole_number
from stoker.transport.link import joined_address

_HOST = "127.0.0.1"
# As long as a user waits without a word for a thread that answers.
_JOIN_S = 5.0
# A client has so long to send its request, and to take the answer: half of Prometheus' scrape time-
# out.
_ANSWER_S = 5.0
# Without descriptors, accepting fails at once: a loop without a pause would take a core.
_AGAIN_S = 0.05
# How often to look whose time is over: a tenth of ``_ANSWER_S``.
_LOOK_S = 0.5
# Of a request, whose first line alone is read: browsers' headers have less.
_MOST_BYTES = 1 << 16
# At a time; for one more, the one that came first is closed. A monitoring server asks once in
# seconds.
_MOST_ASKING = 64
_LABEL = re.compile(r"[^\n\"\\]+")
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def serve_metrics(sources: Any, port: int = 9464) -> MetricsServer:
    """Serve the numbers of ``stoker.metrics`` to Prometheus, at ``http://127.0.0.1:PORT/metrics``.

    On this host only, without a password. Ends with ``close()``, at the end of a ``with`` block, or
    with the process; a forked child does not have it.

    Args:
        sources: what ``stoker.metrics`` takes, or a dict of these by name: the name becomes the
            label ``pipeline``, which is ``train`` for a single one.
        port: the port; 0: any free one (see ``.port``). Each process needs its own.

    Raises TypeError for an object without metrics, ValueError for a wrong name or port, OSError
    where the port is taken.
    """
    named = dict(sources) if isinstance(sources, Mapping) else {"train": sources}
    for name, source in named.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            raise ValueError(f"a name is a line of text without quotes, not {name!r}")
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
        with deferred():
            self._listening = listening = socket.create_server((_HOST, port))
            process.close_in_children(listening)
            self._thread = threading.Thread(
                target=_serve, args=(listening, sources), name="stoker-metrics", daemon=True
            )
            self._thread.start()
        self.port: int = listening.getsockname()[1]
        self.url = f"http://{joined_address(_HOST, self.port)}/metrics"

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


def exposed(sources: Mapping[str, Any]) -> str:
    """Return the numbers of sources, by label, in Prometheus's text format."""
    samples: dict[str, list[str]] = {}
    for label, source in sources.items():
        for name, value in metrics(source, "stoker_").items():
            samples.setdefault(name, []).append(f'{name}{{pipeline="{label}"}} {value!r}')
    lines = []
    for name, found in samples.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", *found]
    return "\n".join(lines) + "\n"


def _serve(listening: socket.socket, sources: Mapping[str, Any]) -> None:
    listening.setblocking(False)
    asking: dict[int, _Asking] = {}  # by descriptor, who came first in front
    with selectors.PollSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while listening.fileno() >= 0 and _is_listening(listening):
            for key, _ in selector.select(_LOOK_S):
                if key.fileobj is listening:
                    if len(asking) == _MOST_ASKING:
                        _dismiss(asking, next(iter(asking)), selector)
                    _welcome(asking, listening, selector)
                elif key.fd in asking:
                    is_done = asking[key.fd].go_on(sources)
                    if is_done:
                        _dismiss(asking, key.fd, selector)
                    else:
                        selector.modify(key.fd, asking[key.fd].waits_for)
            now_s = time.monotonic()
            for number in [n for n, each in asking.items() if each.until_s <= now_s]:
                _dismiss(asking, number, selector)
        for number in list(asking):
            _dismiss(asking, number, selector)


def _welcome(
    asking: dict[int, _Asking], listening: socket.socket, selector: selectors.BaseSelector
) -> None:
    try:
        connected, _ = listening.accept()
    except OSError:
        if _is_listening(listening):
            time.sleep(_AGAIN_S)  # no descriptors are left, or who asked is gone
        return
    connected.setblocking(False)
    number = connected.fileno()
    asking[number] = _Asking(connected)
    selector.register(number, asking[number].waits_for)


def _dismiss(asking: dict[int, _Asking], number: int, selector: selectors.BaseSelector) -> None:
    selector.unregister(number)
    asking.pop(number).connected.close()


class _Asking:
    """A client's connection: its request so far, or the rest of the answer.

    Attributes:
        connected: the connection.
        until_s: the deadline for request and answer, by the monotonic clock.
        waits_for: the events to wait for on the connection.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.until_s = time.monotonic() + _ANSWER_S
        self.waits_for = selectors.EVENT_READ
        self._said = b""
        self._left = memoryview(b"")

    def go_on(self, sources: Mapping[str, Any]) -> bool:
        """Receive or send a piece, without waiting; True if that was the last."""
        try:
            if self.waits_for == selectors.EVENT_READ and not self._hear():
                return False
            if self.waits_for == selectors.EVENT_READ:
                words = self._said.partition(b"\r\n")[0].decode("latin-1").split()
                self._left = memoryview(_answer(words, sources))
                self.until_s = time.monotonic() + _ANSWER_S
                self.waits_for = selectors.EVENT_WRITE
            self._left = self._left[self.connected.send(self._left) :]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not self._left

    def _hear(self) -> bool:
        """Receive available bytes; True if the request is complete."""
        more = self.connected.recv(4096)
        self._said += more
        return not more or b"\r\n\r\n" in self._said or len(self._said) >= _MOST_BYTES


def _is_listening(listening: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _answer(words: list[str], sources: Mapping[str, Any]) -> bytes:
    body, content, status = "", _CONTENT, "200 OK"
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        status = "400 Bad Request"
    elif words[0] not in ("GET", "HEAD"):
        status = "405 Method Not Allowed"
    elif words[1].partition("?")[0] != "/metrics":
        status = "404 Not Found"
    else:
        try:
            body = exposed(sources)
        except Exception as error:  # it is said there, and tried again with the next request
            body, status = f"{type(error).__name__}: {error}\n", "500 Internal Server Error"
    data = body.encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if words[:1] == ["HEAD"] else data)
