"""What somebody hears on the network between two hosts, and what a cache does there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from networks import Namespaces
from nodes import EXAMPLES, TOKEN, Nodes

HEAR = """
import select, socket, sys
heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
SO_RCVBUFFORCE = 33
heard.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)  # or what comes at once is dropped
print("hears", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        ready, _, _ = select.select([heard, sys.stdin], [], [])
        if heard in ready:
            file.write(heard.recv(1 << 17))
        elif sys.stdin in ready:
            break
"""


@contextlib.contextmanager
def overheard(network: Namespaces, path: Path) -> Iterator[None]:
    """Write all that crosses the network to a file."""
    command = ["ip", "netns", "exec", f"{network._name}-switch", sys.executable, "-c", HEAR]
    hearing = subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert hearing.stdout is not None
    assert hearing.stdout.readline() == b"hears\n"
    yield
    hearing.communicate(b"end\n", timeout=60)


@pytest.mark.parametrize("options", [(), ("--insecure",)], ids=["by default", "insecure"])
def test_examples_cannot_be_read_between_hosts(options: tuple[str, ...], tmp_path: Path) -> None:
    if not Namespaces.are_there():
        pytest.skip("may not make networks")
    with contextlib.ExitStack() as ends:
        network = Namespaces(2, ends)
        nodes = Nodes(tmp_path, ends)
        nodes.keep(network.listens(0), command=network.command(0), options=options)
        with overheard(network, tmp_path / "heard"):
            client = nodes.client(None, command=network.command(1), insecure=bool(options))
            assert client.epoch()["peer_hits"] == 0
            assert client.epoch()["peer_hits"] == EXAMPLES
    heard = (tmp_path / "heard").read_bytes()
    contents = np.full(60, 30, np.float64).tobytes()
    assert len(heard) > 2 * EXAMPLES * 7_200
    assert (contents in heard) == bool(options)
    assert TOKEN not in heard
    assert TOKEN.hex().encode() not in heard
