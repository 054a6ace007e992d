"""Nodes for tests: cache servers and clients, in this process or as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from scripts import PATH
from stoker.cluster.cache_server import CacheServer

TOKEN = bytes(range(32))
EXAMPLES = 60
NO_STORE = "no cache server on this host uses"  # said where a path says: no store on this host


@stoker.thread_safe  # one for all threads: it counts
class Numbered:
    """Examples that are functions of their numbers; counts how often it was read."""

    def __init__(self, length: int = EXAMPLES, floats: int = 900) -> None:
        self.length, self.floats, self.reads = length, floats, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"id": index, "x": np.full(self.floats, index, np.float64)}


def write_token(folder: Path, token: bytes = TOKEN) -> Path:
    path = folder / f"token-{token[:4].hex()}"
    path.write_text(token.hex())
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def servers(folder: Path, count: int = 3, *, size: str = "8MiB") -> Iterator[list[CacheServer]]:
    """Serve from this process."""
    with contextlib.ExitStack() as open_ones:
        made = []
        for number in range(count):
            path = str(folder / f"server-{number}")
            server = CacheServer(
                "127.0.0.1:0", TOKEN, limit=stoker.basics.resources.parse_bytes(size), folder=path
            )
            open_ones.callback(server.close)
            made.append(server)
        yield made


def over(
    pipeline: stoker.Pipeline[Any], servers: list[CacheServer], home: int | None = 0, **options: Any
) -> stoker.Pipeline[Any]:
    """Put a cache over cache servers, one of which is on this host."""
    folder = "/nowhere" if home is None else servers[home].folder
    settings = {"version": "test", "path": folder, **options}
    return pipeline.cache("8MiB", cluster=[k.address for k in servers], **settings)


def counted(train: stoker.Pipeline[Any]) -> stoker.types.CacheStats:
    """Return what a pipeline's cache has counted."""
    found = train.stats().cache
    assert found is not None
    return found


def epoch_of(train: stoker.Pipeline[Any]) -> stoker.types.CacheStats:
    """Go through an epoch; return what its cache has counted. Each example comes once, right."""
    ids = []
    for batch in train:
        ids += batch["id"].tolist()
        assert (batch["x"] == batch["id"][:, None]).all()
    assert sorted(ids) == list(range(EXAMPLES))
    return counted(train)


class ServerProcess:
    """``stoker cache serve``, behind the beginning of a command that says on which host."""

    def __init__(
        self,
        folder: Path,
        token: Path,
        *,
        address: str = "127.0.0.1:0",
        command: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        serve = "import sys; sys.argv[0] = 'stoker'; from stoker.cli import main; main()"
        arguments = ["--listen", address, "--folder", str(folder), "--size", "8MiB"]
        arguments += ["--token-file", str(token), *options]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", serve, "cache", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": PATH},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["keeps"], words
        self.address = words[words.index("at") + 1].rstrip(",")

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.send(number)
            self.send(signal.SIGCONT)
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def lose_all(self) -> None:
        """Be killed, with everything that was kept."""
        self.end(signal.SIGKILL)
        shutil.rmtree(self.folder)


CLIENT = """
import json, os, sys
import numpy as np
from stoker.cluster import cache_connection
import stoker
from nodes import Numbered
told = json.loads(sys.argv[1])
cache_connection.DEADLINE_S = told["deadline_s"]
train = stoker.from_dataset(Numbered(told["examples"]), seed=0).shuffle()
if "rank" in told:
    train = train.shard(rank=told["rank"], world_size=told["world"])
train = train.cache("8MiB", cluster=told["hosts"], version="test", path=told["path"],
                    insecure=told.get("insecure", False)).batch(7)
if "workers" in told:
    train = train.workers(told["workers"])
for word in sys.stdin:
    ids, wrong = [], 0
    for batch in train:
        ids += batch["id"].tolist()
        wrong += int((batch["x"] != batch["id"][:, None]).any())
    cache = train.stats().cache
    print(json.dumps({
        "ids": ids, "wrong": wrong, "misses": cache.misses, "hits": cache.hits,
        "peer_hits": cache.peer_hits, "damaged": cache.damaged, "alive": cache.members_alive,
        "members": cache.members, "admitted": cache.admitted, "refused": cache.refused,
    }), flush=True)
"""


class ClientProcess:
    """A job on one node that goes through its epochs when it is told to."""

    def __init__(
        self,
        hosts: list[str],
        path: Path,
        token: Path,
        *,
        command: Sequence[str] = (),
        **told: Any,
    ) -> None:
        told = {"examples": EXAMPLES, "deadline_s": 60.0, **told, "hosts": hosts, "path": str(path)}
        here = [str(Path(__file__).parents[up]) for up in (0, 1)]
        self.process = subprocess.Popen(
            [
                *[*command, sys.executable],
                *["-W", "error", "-W", f"ignore:{NO_STORE}"],
                *["-c", CLIENT],
                json.dumps(told),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*here, PATH]),
                "STOKER_TOKEN_FILE": str(token),
            },
            start_new_session=True,
        )

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("epoch\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        assert found["wrong"] == 0
        return found

    def epoch(self) -> dict[str, Any]:
        """Go through an epoch, in which every example comes once, and is right."""
        self.begin()
        found = self.result()
        assert sorted(found["ids"]) == list(range(EXAMPLES))
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Nodes:
    """Cache servers and jobs beside them, ended with the test."""

    def __init__(self, folder: Path, ends: contextlib.ExitStack) -> None:
        self._folder, self._ends = folder, ends
        self.token = write_token(folder)
        self.servers: list[ServerProcess] = []

    def keep(self, address: str = "127.0.0.1:0", **how: Any) -> ServerProcess:
        folder = self._folder / f"store-{len(self.servers)}"
        made = ServerProcess(folder, self.token, address=address, **how)
        self._ends.callback(made.end, signal.SIGKILL)
        self.servers.append(made)
        return made

    def client(
        self, home: int | None, hosts: list[str] | None = None, **told: Any
    ) -> ClientProcess:
        """Start a job beside a cache server, or on a host without one."""
        hosts = hosts or [server.address for server in self.servers]
        path = self._folder / "nowhere" if home is None else self.servers[home].folder
        made = ClientProcess(hosts, path, self.token, **told)
        self._ends.callback(made.end)
        return made
