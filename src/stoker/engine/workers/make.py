"""Makes the worker pool of a run: threads, processes, actors, or the consumer alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from stoker.basics.validate import is_whole_number
from stoker.engine.plan import Plan
from stoker.engine.work import Work
from stoker.engine.workers.thread_copies import KeptCopies
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner

if TYPE_CHECKING:
    from stoker.engine.workers.ray.actor_pool import Fleet

_KINDS = ("thread", "process", "ray")


@dataclass(frozen=True)
class Workers:
    """How work is shared out: ``.workers(n, kind)``.

    Attributes:
        count: how many there are, of threads at most; "auto": as many as keep the consumer fed.
        kind: "thread", "process" or "ray".
        ray_options: what Ray is told of each actor.
        insecure: whether what crosses the network to actors is left as it is.
    """

    count: int | Literal["auto"]
    kind: str
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    insecure: bool = False

    @classmethod
    def of(cls, n: Any, kind: Any, ray_options: Any, insecure: Any) -> Workers:
        """Check the arguments of ``.workers()``."""
        if kind not in _KINDS:
            raise ValueError(f"kind must be 'thread', 'process' or 'ray', not {kind!r}")
        if kind == "ray":
            from stoker.engine.workers.ray import actor_pool

            actor_pool.check(ray_options or {})
        elif ray_options is not None:
            raise ValueError("ray_options are for kind='ray'")
        elif insecure:
            raise ValueError("insecure=True is for kind='ray'")
        if isinstance(n, str) and n == "auto":
            if kind != "ray":
                raise ValueError(
                    "'auto' is for kind='ray': of threads, as many as are faster take part anyway"
                )
            return cls("auto", kind, dict(ray_options or {}), bool(insecure))
        if not is_whole_number(n):
            raise TypeError(f"a number of workers is a whole number, not {n!r}")
        if n < (0 if kind == "thread" else 1):
            raise ValueError(f"{kind} workers cannot be {n} in number")
        return cls(int(n), kind, dict(ray_options or {}), bool(insecure))

    def __str__(self) -> str:
        if self.count == "auto":
            return "as many Ray actors as keep the consumer fed"
        return f"{self.count} {self.kind} workers" if self.count else "no workers"


class KeptWorkers:
    """Workers that a pipeline keeps from epoch to epoch.

    Attributes:
        copies: what its threads call in place of the user's own objects.
        fleet: its actors, once it has any.
    """

    def __init__(self) -> None:
        self.copies = KeptCopies()
        self.fleet: Fleet | None = None

    def warnings(self) -> list[str]:
        """Return what to warn of, once: what runs one call at a time, and actors that were lost."""
        if not self.copies.warnings and self.fleet is None:
            return []
        found, self.copies.warnings = self.copies.warnings, []
        if self.fleet is not None and self.fleet.losses:
            found, self.fleet.losses = found + self.fleet.losses, []
        return found


def make_pool(
    workers: Workers, plan: Plan, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    """Return the worker pool for the segments on the host.

    Args:
        workers: what is asked for.
        plan: the pipeline's.
        host: what there is to do, by depth.
        autotuner: what is known of speeds.
        kept: what the epochs before have left.
    """
    depths = max(1, len(host))
    if workers.count == 0:
        return WorkerPool(0, depths, autotuner)
    if workers.kind == "ray":
        return _pool_of_actors(workers, plan, host, autotuner, kept)
    assert workers.count != "auto"
    if workers.kind == "process":
        from stoker.engine.workers import processes  # multiprocessing takes its time to import

        remotes = processes.start(workers.count, host)
        each = len(remotes) // workers.count
        return WorkerPool(len(remotes), depths, autotuner, remotes, threads_each=each)
    return WorkerPool(workers.count, depths, autotuner)


def _pool_of_actors(
    workers: Workers, plan: Plan, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    from stoker.engine.workers.ray.actor_pool import Fleet
    from stoker.engine.workers.ray.ray_workers import RayWorkers

    fleet = kept.fleet
    if fleet is None or fleet.plan is not plan or not fleet.is_ours:
        fleet = kept.fleet = Fleet(plan, workers.ray_options, insecure=workers.insecure)
    remote = RayWorkers(fleet, host, None if workers.count == "auto" else workers.count)
    try:
        remote.gather()
    except BaseException:
        kept.fleet = None
        raise
    threads, each = remote.threads()
    pool = WorkerPool(threads, max(1, len(host)), autotuner, [remote], threads_each=each)
    remote.begin(pool)
    return pool
