"""A local HTTP server of a folder, in a process of its own: remote storage to try things on.

It has a latency, a bandwidth that all connections share, and faults on demand. The process runs
this very file, with the standard library alone; its orders come by stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

_CHUNK_BYTES = 1 << 18
_LATE_S = 0.0005  # on average, timers are: they count in milliseconds, rounded up
_HEADERS_BYTES = 1 << 16
_BACKLOG = 1024
_RANGE = re.compile(rb"\nrange: bytes=(\d+)-(\d*)", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with requests."""

    what: str | int
    """``"stall"``: half the body, then nothing more. ``"truncate"``: half the body, then the
    end. ``"reset"``: no answer, the connection is reset. Or an HTTP status, such as 503."""
    path: str | None = None
    """The path in the folder that it happens to, such as ``cat/a.jpg``; None: to any."""
    first: int | None = None
    """To how many requests of each path, the first ones; None: to all."""
    rate: float = 1.0
    """To what share of them, at random: by path and number of the request, and the seed."""


@dataclass(frozen=True)
class ServerStats:
    """What a server has done since it started, or since its faults were set."""

    requests: int
    peak: int
    """The most requests that were under way at once."""


class Server:
    """A running server, seen from the process that asked for it. See ``serving``."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._settings = {**settings, "folder": folder, "parent": os.getpid()}
        self._process: subprocess.Popen[str] | None = None
        self.start()
        self.url = f"http://127.0.0.1:{self._settings['port']}"

    def start(self) -> None:
        """Start the process; after ``kill``, on the same port."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self._answer()  # it listens
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once, connections and all."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stats(self) -> ServerStats:
        """Tell what it has done."""
        return ServerStats(**self._asked({}))

    def set_faults(self, *faults: Fault) -> None:
        """Have these faults from now on, and none of those before; counting begins anew."""
        self._settings["faults"] = [dataclasses.astuple(fault) for fault in faults]
        self._asked({"faults": self._settings["faults"]})

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Have no time pass there within a block: nothing is sent, and nothing gets due."""
        try:
            self._asked({"stopped": True})
            yield
        finally:
            self._asked({"stopped": False})

    def _asked(self, order: dict[str, Any]) -> Any:
        if self._process is None:
            raise RuntimeError("the server is not running")
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended, exit code {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def serving(
    folder: str | os.PathLike[str],
    *,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
) -> Iterator[Server]:
    """Serve a folder over HTTP at ``server.url`` while the block runs.

    The process ends with the block, and with this process, however that ends.

    Args:
        folder: what is served: files, and parts of them.
        latency_s: how long each request waits before it is answered.
        bandwidth_bytes_per_s: of bodies, all connections together; None: no limit.
        faults: what goes wrong; the first that fits a request happens to it.
        seed: for faults with a rate.

    Raises NotADirectoryError when there is no such folder.
    """
    if not os.path.isdir(folder):
        raise NotADirectoryError(os.fspath(folder))
    with socket.socket() as place:
        # Bound all the time, so that nobody else gets the port while the process is killed.
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        server = Server(
            os.path.abspath(folder),
            {
                "port": place.getsockname()[1],
                "latency_s": latency_s,
                "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
                "faults": [dataclasses.astuple(fault) for fault in faults],
                "seed": seed,
            },
        )
        try:
            yield server
        finally:
            server.kill()


# What follows runs in the server's process.


class _Site:
    """The folder, what goes wrong with it, and what has been counted."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._folder = os.fsencode(settings["folder"])
        self._latency_s = settings["latency_s"]
        self._rate = settings["bandwidth_bytes_per_s"]
        self._seed = settings["seed"]
        self._free_at = 0.0  # by when what was promised will have been sent
        self._active = 0
        self._goes = asyncio.Event()
        self._goes.set()
        self._stopped_at: float | None = None
        self._lost_s = 0.0
        self.begin(settings["faults"])

    def begin(self, faults: list[Any]) -> None:
        self._faults = [Fault(*fault) for fault in faults]
        self._asked: Counter[bytes] = Counter()
        self._requests = self._peak = 0

    def stop(self) -> None:
        self._stopped_at = asyncio.get_running_loop().time()
        self._goes.clear()

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._lost_s += asyncio.get_running_loop().time() - self._stopped_at
            self._stopped_at = None
            self._goes.set()

    def _now(self) -> float:
        if self._stopped_at is not None:
            return self._stopped_at - self._lost_s
        return asyncio.get_running_loop().time() - self._lost_s

    async def _wait_until(self, due: float) -> None:
        await self._goes.wait()
        while (wait_s := due - self._now() - _LATE_S) > 0:
            await asyncio.sleep(wait_s)
            await self._goes.wait()

    def stats(self) -> ServerStats:
        return ServerStats(self._requests, self._peak)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            stays = True
            while stays:
                head = await reader.readuntil(b"\r\n\r\n")
                self._requests += 1
                self._active += 1
                self._peak = max(self._peak, self._active)
                try:
                    stays = await self._answer(head, reader, writer)
                finally:
                    self._active -= 1
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; returns whether the connection stays open."""
        words = head[: head.index(b"\r\n")].split(b" ")
        method, target = words[0], words[1] if len(words) == 3 else b""
        path = unquote_to_bytes(target.partition(b"?")[0])
        due = self._now() + self._latency_s
        fault = self._fault(path)
        if fault == "reset":
            await self._wait_until(due)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        part = None
        if isinstance(fault, int):
            status, body = fault, b""
        elif method not in (b"GET", b"HEAD"):
            status, body = 501, b""
        else:
            status, body, part = self._found(path, _RANGE.search(head))
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "Content-Type: application/octet-stream",
            f"Content-Length: {len(body)}",
        ]
        if part is not None:
            lines += ["Accept-Ranges: bytes", f"Content-Range: {part}"]
        if method == b"HEAD":
            body = b""
        elif isinstance(fault, str):
            body = body[: len(body) // 2]
        await self._send("\r\n".join([*lines, "", ""]).encode(), body, due, writer)
        if fault == "stall":
            await reader.read(1)
        return not isinstance(fault, str) and b"\nconnection: close" not in head.lower()

    def _fault(self, path: bytes) -> str | int | None:
        self._asked[path] += 1
        number = self._asked[path]
        for fault in self._faults:
            if fault.path is not None and b"/" + os.fsencode(fault.path) != path:
                continue
            if fault.first is not None and number > fault.first:
                continue
            dice = random.Random(f"{self._seed} {number} {path!r}") if fault.rate < 1 else None
            if dice is None or dice.random() < fault.rate:
                return fault.what
        return None

    async def _send(
        self, head: bytes, body: bytes, due: float, writer: asyncio.StreamWriter
    ) -> None:
        for start in range(0, max(1, len(body)), _CHUNK_BYTES):
            chunk = body[start : start + _CHUNK_BYTES]
            if self._rate is not None and chunk:
                # By when it ought to go, not by when it went: nothing adds up.
                self._free_at = due = max(self._free_at, due) + len(chunk) / self._rate
            await self._wait_until(due)
            writer.write(chunk if start else head + chunk)
            await writer.drain()

    def _found(self, path: bytes, asked: re.Match[bytes] | None) -> tuple[int, bytes, str | None]:
        """Return status, body, and of a part of a file which it is."""
        place = os.path.join(self._folder, path.lstrip(b"/"))
        try:
            if b".." in path.split(b"/"):
                raise FileNotFoundError
            with open(place, "rb", buffering=0) as file:
                if asked is None:
                    return 200, file.read(), None
                size = os.fstat(file.fileno()).st_size
                start = int(asked[1])
                stop = min(int(asked[2]) + 1 if asked[2] else size, size)
                if start >= stop:
                    return 416, b"", f"bytes */{size}"
                body = os.pread(file.fileno(), stop - start, start)
                return 206, body, f"bytes {start}-{stop - 1}/{size}"
        except PermissionError:
            return HTTPStatus.FORBIDDEN, b"", None
        except (OSError, ValueError):
            return HTTPStatus.NOT_FOUND, b"", None


async def _serve(settings: dict[str, Any]) -> None:
    """Serve until stdin, or the parent, ends."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a sandbox without it
        loop.add_reader(os.pidfd_open(settings["parent"]), os._exit, 1)
    if os.getppid() != settings["parent"]:
        return
    site = _Site(settings)
    await asyncio.start_server(
        site.connected, "127.0.0.1", settings["port"], limit=_HEADERS_BYTES, backlog=_BACKLOG
    )
    print("null", flush=True)  # it listens
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        if "faults" in order:
            site.begin(order["faults"])
        if "stopped" in order:
            site.stop() if order["stopped"] else site.go_on()
        print(json.dumps(dataclasses.asdict(site.stats())), flush=True)
    os._exit(0)  # connections are not waited for


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    asyncio.run(_serve(json.loads(sys.argv[1])))
