"""``.workers(n, kind="ray")``: a worker pool whose workers are Ray actors."""

from __future__ import annotations

from stoker.cluster.workers.actor_pool import ActorPool, check
from stoker.cluster.workers.ray_workers import RayWorkers
from stoker.engine.plan import Plan
from stoker.engine.work import Work
from stoker.engine.workers.make import KeptWorkers, Workers
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner

__all__ = ["check", "make_pool"]


def make_pool(
    workers: Workers, plan: Plan, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    """Return a pool of actors; reuses the previous epoch's actors if the work is the same."""
    fleet = kept.actors
    if not isinstance(fleet, ActorPool) or fleet.plan is not plan or not fleet.is_ours:
        fleet = kept.actors = ActorPool(plan, workers.ray_options, insecure=workers.insecure)
    remote = RayWorkers(fleet, host, None if workers.count == "auto" else workers.count)
    try:
        remote.gather()
    except BaseException:
        kept.actors = None
        raise
    threads, each = remote.threads()
    pool = WorkerPool(threads, max(1, len(host)), autotuner, [remote], threads_each=each)
    remote.begin(pool)
    return pool
