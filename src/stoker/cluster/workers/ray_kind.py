"""``.workers(n, kind="ray")``: a worker pool whose workers are Ray actors."""

from __future__ import annotations

from stoker.cluster.workers.actor_pool import ActorPool, check
from stoker.cluster.workers.ray_workers import RayWorkers
from stoker.engine.plan.plan import Plan
from stoker.engine.work.work import Work
from stoker.engine.workers.make import KeptWorkers, Workers
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner

__all__ = ["check", "make_pool"]


def make_pool(
    workers: Workers, plan: Plan, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    """Return a pool of actors; reuses the previous epoch's actors if the work is the same."""
    actors = kept.actors
    if not isinstance(actors, ActorPool) or actors.plan is not plan or not actors.is_ours:
        actors = kept.actors = ActorPool(plan, workers.ray_options, insecure=workers.insecure)
    ray_workers = RayWorkers(actors, host, workers.count)
    try:
        ray_workers.start_actors()
    except BaseException:
        kept.actors = None
        raise
    threads, each = ray_workers.threads()
    pool = WorkerPool(threads, max(1, len(host)), autotuner, [ray_workers], threads_each=each)
    ray_workers.begin(pool)
    return pool
