"""Who does the work of a run: threads, processes, or nobody but the consumer."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.engine.pool.threads import Autotuner, WorkerPool
from stoker.engine.work import Work


@dataclass
class Workers:
    """How work is shared out: ``.workers(n, kind)``."""

    count: int
    kind: str


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
