"""Cluster membership under torchrun: the first rank of each host starts a cache server.

Addresses and the token travel through the job's key-value store at ``MASTER_ADDR:MASTER_PORT``.
Under torchrun it exists from the start; otherwise it exists once the script has called
``torch.distributed.init_process_group()``. All ranks must open their caches in the same order: the
n-th cache of each rank is the same cache. A cache server is a process of its own, and ends with the
rank that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import msgspec

from stoker.basics.process import end_with
from stoker.cache.location import Limit
from stoker.cache.store_dir import boot_id
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Members, has_moved
from stoker.cluster.owners import Member
from stoker.distributed.store_exchange import RankExchange, TorchStore
from stoker.errors import CacheError, StokerError
from stoker.transport.link import join_address, local_host_towards
from stoker.transport.secret import new_token

WAIT_S = 300.0
"""How long ranks wait for each other: the default timeout of torch's stores."""
# How long to try to reach the store. It exists from the start or not at all, so without torchrun
# the user sees the error soon. Chosen, not measured.
_REACH_S = 15.0
_SERVER = "from stoker.cluster.torchrun import main; main()"
_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_opened_count = 0
_servers: list[subprocess.Popen[bytes]] = []  # kept, because each ends when its input closes


class Start(msgspec.Struct):
    """The settings of a cache server's process."""

    host: str
    token: bytes
    limit: int | str
    folder: str | None
    parent: int
    insecure: bool


class Started(msgspec.Struct):
    """A started cache server: its address and store, or why it did not start."""

    address: str = ""
    folder: str = ""
    limit_bytes: int = 0
    error: str = ""


class LaunchedHosts:
    """The hosts of a job, one member each. They do not change while the job runs."""

    def __init__(
        self, token: bytes, members: Members, local_member: str, folder: str, *, insecure: bool
    ) -> None:
        self.token = token
        self.insecure = insecure
        self.local_member: str | None = local_member
        self.folder: str | None = folder
        self._members = members
        self._boot = boot_id()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if has_moved(self._boot, self.folder):  # a worker on a host outside the job
            self.local_member = self.folder = None

    def members(self, *, at_once: bool = False) -> Members:
        return self._members


def join(
    spec: CacheSpec, limit: Limit, path: str | None, *, insecure: bool = False
) -> LaunchedHosts:
    """Start this host's cache server if this is its first rank, and wait for the cache servers of
    all hosts.

    With ``insecure``, connections are not encrypted.

    Raises CacheError outside such a job, or if a host's cache server does not start.
    """
    global _opened_count
    missing = [name for name in _REQUIRED if name not in os.environ]
    if missing:
        raise CacheError(
            f"cluster='torchrun' needs a torchrun job, but {', '.join(missing)} is not set in the "
            "environment: start the script with torchrun"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_first_here = os.environ["LOCAL_RANK"] == "0"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = int(os.environ.get("GROUP_RANK", rank // ranks_here))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _opened_count += 1
    name = f"stoker/cache/{attempt}/{_opened_count}"
    ranks = RankExchange(TorchStore(_reach_store()), rank, range(world), name)
    what = "a cache with cluster='torchrun'"
    address = local_host_towards(os.environ["MASTER_ADDR"])
    try:
        met = ranks.answer({"host": host, "address": address}, _introduce, what, WAIT_S)
        token, started = bytes.fromhex(met["token"]), None
        if is_first_here:
            if host == 0 and met["other"]:  # the master: its route to itself is the loopback
                address = local_host_towards(met["other"])
            started = _start(Start(address, token, limit, path, os.getpid(), insecure))
        own = started and {"host": host, **msgspec.to_builtins(started)}
        answers = ranks.answer(own, _list_started, what, WAIT_S)
    except StokerError as error:
        raise CacheError(
            "the hosts of this job did not find each other's caches. Open the same caches in the "
            f"same order on every rank ({error})"
        ) from error
    entries = msgspec.convert(answers, list[Started], strict=False)
    for number, entry in enumerate(entries):
        if entry.error:
            raise CacheError(f"the cache server of host {number} did not start: {entry.error}")
    members = tuple(
        Member(f"host-{number}", entry.address, max(1, entry.limit_bytes))
        for number, entry in enumerate(entries)
    )
    here = f"host-{host}", entries[host].folder
    return LaunchedHosts(token, Members(1, members), *here, insecure=insecure)


def _reach_store() -> Any:
    """Return a client of the job's key-value store."""
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    except ImportError as error:
        raise CacheError(f"cluster='torchrun' needs torch ({error})") from error
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_REACH_S))
    except RuntimeError as error:
        raise CacheError(
            f"the job's key-value store at {address}:{port} does not answer: start the script with "
            "torchrun, or call torch.distributed.init_process_group() before the first epoch"
        ) from error
    return store


def _introduce(claims: dict[int, dict[str, Any]]) -> dict[str, str]:
    """Return a new token, and the address of a host that is not the first."""
    others = [claim["address"] for claim in claims.values() if claim["host"]]
    return {"token": new_token().hex(), "other": others[0] if others else ""}


def _list_started(claims: dict[int, dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the cache servers in the order of their hosts."""
    return sorted(filter(None, claims.values()), key=lambda claim: claim["host"])


def _start(start: Start) -> Started:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,  # Ctrl-C reaches the parent only, which ends the cache server
    )
    _servers.append(server)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(msgspec.json.encode(start) + b"\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    server.stdout.close()
    if not answer:
        return Started(error=f"its process ended with exit code {server.wait()}")
    return msgspec.json.decode(answer, type=Started)


def main() -> None:
    """Read the settings from standard input, and serve until standard input is closed.

    This runs in the cache server's process.
    """
    from stoker.cluster.cache_server import CacheServer  # here: other ranks do not need it

    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    try:
        server = CacheServer(
            join_address(start.host, 0),
            start.token,
            limit=start.limit,
            folder=start.folder,
            insecure=start.insecure,
        )
    except (OSError, ValueError, ImportError, StokerError) as error:
        _say(Started(error=str(error)))
        return
    end_with(start.parent, by_main_thread=False, before_exit=server.close)
    try:
        _say(Started(server.address, server.folder, server.limit_bytes))
        while os.read(0, 1):  # the parent sends nothing more: wait until it closes the pipe
            pass
    finally:
        server.close()


def _say(started: Started) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(started) + b"\n")
    sys.stdout.flush()
