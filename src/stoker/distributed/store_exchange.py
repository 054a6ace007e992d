"""Exchange between ranks over their job's key-value store.

Each rank writes its claim there. The first rank reads all claims and writes an answer, which all
ranks read. So every other rank can name a missing rank, and no collective operation or accelerator
is needed. A number in each key counts its rank's exchanges; the store holds the count, so it starts
again with a new store, and continues if a new process group uses the same store.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from stoker.basics.process import OwningProcess
from stoker.errors import StokerError
from stoker.frameworks.rank import own_rank, process_group

WAIT_S = 60.0
"""The default wait of ranks for each other. Ranks that start one after another come within seconds;
a rank that has ended never comes."""
# torch's own, of NCCL.
_LONG_WAIT_S = 600.0
# torch's default time-outs, of NCCL and of other backends: with them, the user has set none.
_TORCH_DEFAULTS_S = (600.0, 1800.0)
# To receive the first rank's list of missing ranks, which takes one answer of the store.
_GRACE_S = 5.0
_process = OwningProcess()  # a store's connection must not be used by a forked child


class RankStore(Protocol):
    """A key-value store that all ranks reach."""

    def count(self, key: str) -> int:
        """Add 1 to a number, and return it."""
        ...

    def put(self, key: str, text: str) -> None:
        """Set a value."""
        ...

    def look(self, key: str) -> str | None:
        """Return a value; None if it is not set."""
        ...

    def drop(self, key: str) -> None:
        """Delete a value."""
        ...


class TorchStore:
    """The store behind torch's process group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def count(self, key: str) -> int:
        return int(self._store.add(key, 1))

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def look(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def drop(self, key: str) -> None:
        self._store.delete_key(key)


class JaxStore:
    """The coordination service that ``jax.distributed.initialize()`` has connected to."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def count(self, key: str) -> int:
        return int(self._client.key_value_increment(key, 1))

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(key, text)

    def look(self, key: str) -> str | None:
        try:
            return str(self._client.key_value_try_get(key))
        except Exception as error:  # JAX's own, which there is no need to import
            if "NOT_FOUND" in str(error):
                return None
            raise

    def drop(self, key: str) -> None:
        self._client.key_value_delete(key)


class RankExchange:
    """Ranks that exchange values.

    Args:
        store: their key-value store.
        rank: this process's rank.
        among: all ranks; the first of them decides.
        name: what their keys begin with.
    """

    def __init__(self, store: RankStore, rank: int, among: Sequence[int], name: str) -> None:
        self._name = name
        self._store = store
        self._rank = rank
        self._among = among

    def answer(
        self, claim: Any, decide: Callable[[dict[int, Any]], Any], what: str, wait_s: float
    ) -> Any:
        """Return the first rank's decision from all claims; both are JSON values.

        Raises StokerError, on every rank that came, if one does not come within ``wait_s`` seconds.
        """
        try:
            return self._answer(claim, decide, what, wait_s)
        except RuntimeError as error:  # torch's and JAX's, where a connection broke
            raise StokerError(
                f"ranks could not compare {what}: the process that keeps their store has ended, or "
                "the process group is gone"
            ) from error

    def _answer(
        self, claim: Any, decide: Callable[[dict[int, Any]], Any], what: str, wait_s: float
    ) -> Any:
        store, first, name = self._store, self._among[0], self._name
        number = store.count(f"{name}/{self._rank}")
        store.put(f"{name}/{number}/{self._rank}", json.dumps(claim))
        answer = f"{name}/{number}/answer"
        if self._rank == first:
            keys = {rank: f"{name}/{number}/{rank}" for rank in self._among}
            claims = self._collect(keys, wait_s)
            missing = [rank for rank in self._among if rank not in claims]
            reply = {"missing": missing} if missing else {"decided": decide(claims)}
            store.put(answer, json.dumps(reply))
            with contextlib.suppress(Exception):  # a store that cannot forget
                for key in keys.values():
                    store.drop(key)
                store.drop(f"{name}/{number - 1}/answer")
        else:
            found = self._collect({0: answer}, wait_s + _GRACE_S)
            if not found and store.look(f"{name}/{number}/{first}") is not None:
                found = self._collect({0: answer}, wait_s + _GRACE_S)  # it came late
            reply = found.get(0, {"missing": [first]})
        if "missing" in reply:
            ranks = ", ".join(map(str, reply["missing"]))
            raise StokerError(
                f"rank{'s' * (len(reply['missing']) > 1)} {ranks} did not come to iter() of {what} "
                f"within {wait_s:g} s: all ranks iterate over sharded pipelines, in the same "
                "order. If one rank alone reads it, use .shard(rank=0, world_size=1); if ranks may "
                "come late, give init_process_group a timeout="
            )
        return reply["decided"]

    def _collect(self, keys: dict[int, str], wait_s: float) -> dict[int, Any]:
        """Return the values of keys that were set in time."""
        found: dict[int, Any] = {}
        began = time.monotonic()
        while True:
            for rank, key in keys.items():
                if rank not in found and (reply := self._store.look(key)) is not None:
                    found[rank] = json.loads(reply)
            passed = time.monotonic() - began
            if len(found) == len(keys) or passed > wait_s:
                return found
            time.sleep(min(0.5, 0.001 + passed / 20))  # by turns, so that Ctrl-C is heard


def exchange_among(among: Sequence[int]) -> RankExchange | None:
    """Return these ranks' exchange; None without a store, and in a forked child."""
    if not _process.is_current:
        return None
    group = process_group()
    rank, world = group or own_rank() or (0, 1)
    if rank not in among or len(among) > world:
        return None
    store = _torch_store() if group is not None else _jax_store()
    name = f"stoker/iter/{among[0]}+{len(among)}"
    return None if store is None else RankExchange(store, rank, among, name)


def _torch_store() -> RankStore | None:
    distributed: Any = sys.modules["torch.distributed"]
    if distributed.get_backend() == "fake":  # nobody else is there
        return None
    # Private, but there is no other way to the store by which the group has met.
    store = distributed.distributed_c10d._get_default_store()
    return None if store is None else TorchStore(store)


def _jax_store() -> RankStore | None:
    # Private, but JAX has no other way to its key-value store.
    distributed: Any = sys.modules.get("jax._src.distributed")
    client = getattr(getattr(distributed, "global_state", None), "client", None)
    return None if client is None else JaxStore(client)


def answer_timeout_s(*, long: bool) -> float:
    """Return how many seconds ranks wait for each other.

    The process group's timeout if the user set one. Otherwise ``WAIT_S``; or, with ``long``, the
    timeout of its other collective operations.
    """
    timeout_s = _torch_timeout_s()
    if timeout_s is not None and (long or timeout_s < WAIT_S or timeout_s not in _TORCH_DEFAULTS_S):
        return timeout_s
    return _LONG_WAIT_S if long else WAIT_S


def _torch_timeout_s() -> float | None:
    if process_group() is None:
        return None
    import torch

    world: Any = sys.modules["torch.distributed"].group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout_s = world._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout_s, timedelta):
                return timeout_s.total_seconds()
    return None
