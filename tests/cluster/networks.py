"""Networks for tests, whose hosts can be cut off and slowed down.

Namespaces of the kernel, where this process may make them: hosts have addresses of their own, and
what is sent to one that is cut off is lost without an answer. Everywhere: lines of this process in
front of cache servers, which pass on what they may, and hold back what they may not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Protocol


class Network(Protocol):
    """Hosts by number."""

    def listens(self, host: int) -> str:
        """Return the address at which a host's cache server listens."""

    def reached(self, host: int, listens: str) -> str:
        """Return the address at which the others reach it."""

    def command(self, host: int) -> list[str]:
        """Return what a command of that host begins with."""

    def cut(self, host: int) -> None: ...

    def mend(self, host: int) -> None: ...

    def limit(self, host: int, bytes_per_s: int) -> None:
        """Bound what that host sends."""


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


class Namespaces:
    """Hosts in network namespaces, connected by a bridge in one more."""

    _PORT = 7117

    def __init__(self, count: int, ends: contextlib.ExitStack) -> None:
        self._name = f"stoker-{os.getpid()}"
        switch = f"{self._name}-switch"
        self._add(switch, ends)
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for number in range(count):
            name = f"{self._name}-{number}"
            self._add(name, ends)
            _ip(f"link add eth0 netns {name} type veth peer name port{number} netns {switch}")
            _ip(f"-n {switch} link set port{number} master bridge up")
            _ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")

    @staticmethod
    def are_there() -> bool:
        """Tell whether this process may make them."""
        if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
            return False
        with contextlib.ExitStack() as ends:
            try:
                made = Namespaces(1, ends)
                made.limit(0, 1_000_000)
            except subprocess.CalledProcessError:
                return False
        return True

    def listens(self, host: int) -> str:
        return f"10.77.0.{host + 1}:{self._PORT}"

    def reached(self, host: int, listens: str) -> str:
        return listens

    def command(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self._name}-{host}"]

    def cut(self, host: int) -> None:
        _ip(f"-n {self._name}-switch link set port{host} nomaster")

    def mend(self, host: int) -> None:
        _ip(f"-n {self._name}-switch link set port{host} master bridge")

    def limit(self, host: int, bytes_per_s: int) -> None:
        rate = f"tc qdisc add dev eth0 root tbf rate {8 * bytes_per_s}bit burst 64kb limit 1mb"
        subprocess.run([*self.command(host), *rate.split()], check=True, capture_output=True)

    def _add(self, name: str, ends: contextlib.ExitStack) -> None:
        _ip(f"netns add {name}")
        ends.callback(_ip, f"netns del {name}")


class Lines:
    """Hosts that are this one; each cache server is reached through a line with a token bucket."""

    def __init__(self, count: int, ends: contextlib.ExitStack) -> None:
        self._open = [threading.Event() for _ in range(count)]
        self._rates = [float("inf")] * count
        self._ends = ends
        for each in self._open:
            each.set()
            ends.callback(each.set)

    def listens(self, host: int) -> str:
        return "127.0.0.1:0"

    def reached(self, host: int, listens: str) -> str:
        listening = self._ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._ends.callback(listening.shutdown, socket.SHUT_RDWR)
        port = int(listens.rpartition(":")[2])
        threading.Thread(target=self._accept, args=(host, listening, port), daemon=True).start()
        return f"127.0.0.1:{listening.getsockname()[1]}"

    def command(self, host: int) -> list[str]:
        return []

    def cut(self, host: int) -> None:
        self._open[host].clear()

    def mend(self, host: int) -> None:
        self._open[host].set()

    def limit(self, host: int, bytes_per_s: int) -> None:
        self._rates[host] = bytes_per_s

    def _accept(self, host: int, listening: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = listening.accept()[0]
                two = socket.create_connection(("127.0.0.1", port))
                for ends, rated in (((one, two), False), ((two, one), True)):
                    threading.Thread(
                        target=self._pass_on, args=(host, *ends, rated), daemon=True
                    ).start()

    def _pass_on(self, host: int, from_whom: socket.socket, to: socket.socket, rated: bool) -> None:
        with contextlib.suppress(OSError):
            while data := from_whom.recv(1 << 14):
                self._open[host].wait()
                if rated:
                    time.sleep(len(data) / self._rates[host])
                to.sendall(data)
        for each in (from_whom, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


KINDS: list[type[Namespaces] | type[Lines]] = [Lines]
if Namespaces.are_there():
    KINDS.append(Namespaces)


@contextlib.contextmanager
def network(kind: type[Namespaces] | type[Lines], count: int) -> Iterator[Network]:
    """Make a network of so many hosts."""
    with contextlib.ExitStack() as ends:
        yield kind(count, ends)
