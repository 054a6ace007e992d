"""Makes the worker pool of a run: threads, processes, or the consumer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.checks import is_whole_number
from stoker.engine.pool.autotune import Autotuner
from stoker.engine.pool.threads import WorkerPool
from stoker.engine.work import Work

_KINDS = ("thread", "process")


@dataclass(frozen=True)
class Workers:
    """How work is shared out: ``.workers(n, kind)``."""

    count: int
    kind: str

    @classmethod
    def of(cls, n: Any, kind: Any) -> Workers:
        """Check the arguments of ``.workers()``."""
        if kind not in _KINDS:
            raise ValueError(f"kind must be 'thread' or 'process', not {kind!r}")
        if not is_whole_number(n):
            raise TypeError(f"a number of workers is a whole number, not {n!r}")
        if n < (1 if kind == "process" else 0):
            raise ValueError(f"{kind} workers cannot be {n} in number")
        return cls(int(n), kind)


def make_pool(
    workers: Workers, host: list[Work], autotuner: Autotuner, *, seed: int, epoch: int, rank: int
) -> WorkerPool:
    """Return the worker pool for the segments on the host."""
    depths = max(1, len(host))
    if workers.count == 0:
        return WorkerPool(0, depths, autotuner)
    if workers.kind == "process":
        from stoker.engine.pool import processes  # multiprocessing takes its time to import

        remotes = processes.start(workers.count, host, seed, epoch, rank)
        return WorkerPool(len(remotes), depths, autotuner, remotes)
    return WorkerPool(workers.count, depths, autotuner)
