"""Makes the worker pool of a run: threads, processes, actors, or the consumer alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stoker.basics import plugins
from stoker.basics.resources import format_bytes, format_seconds, parse_bytes
from stoker.basics.validate import is_number, is_whole_number
from stoker.basics.warn import warn
from stoker.engine.work.segment import Segment
from stoker.engine.work.work import Work
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner

if TYPE_CHECKING:
    from stoker.engine.workers.processes.starting import KeptProcesses

_LOCAL = (None, "thread", "process")


class WorkerKind(Protocol):
    """A kind of workers outside this host, registered in the group ``stoker.workers``."""

    def check(self, options: Any) -> None:
        """Check ``ray_options``, ``{}`` where none were given.

        Raises TypeError or ValueError for invalid options, ImportError for a missing package.
        """
        ...

    def make_pool(
        self,
        workers: Workers,
        host: list[Work],
        autotuner: Autotuner,
        kept: KeptWorkers,
    ) -> WorkerPool:
        """Return the pool of a run, as ``make_pool`` below does."""
        ...


class Ahead(NamedTuple):
    """The limit on outputs ahead of the consumer, in batches or in bytes: ``.workers(ahead=)``."""

    batches: int | None
    size_bytes: int | None = None

    @classmethod
    def of(cls, ahead: Any) -> Ahead | None:
        """Check ``.workers(ahead=)``."""
        if ahead is None:
            return None
        if isinstance(ahead, str):
            return cls(None, parse_bytes(ahead))
        if not is_whole_number(ahead):
            raise TypeError(
                f"ahead= is a number of batches, or a size such as '4GiB', not {ahead!r}"
            )
        if ahead < 1:
            raise ValueError(
                f"workers must be at least one batch ahead, not {ahead}. For none: .workers(0)"
            )
        return cls(int(ahead))

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return format_bytes(self.size_bytes)
        return f"{self.batches} batch" + ("" if self.batches == 1 else "es")


@dataclass(frozen=True)
class Workers:
    """The number and kind of workers: ``.workers(n, kind)``.

    Attributes:
        count: the number of workers, of threads the most.
        kind: "thread", "process", or a registered kind, such as "ray"; None: threads for what is
            stoker's own or declared thread-safe, processes for the user's Python code.
        ray_options: the options of Ray for each actor.
        insecure: whether traffic to actors is not encrypted.
        grows: whether the pool may have more workers that sleep: the user named no number.
        persistent: whether worker processes stay for later epochs.
        ahead: how far workers may be ahead of the consumer; None for no limit but the window.
        timeout_ns: how long a stage may work on one example; None: as long as it wants.
    """

    count: int
    kind: str | None = None
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    insecure: bool = False
    grows: bool = False
    ahead: Ahead | None = None
    timeout_ns: int | None = None
    persistent: bool = False

    @classmethod
    def of(
        cls,
        n: Any,
        kind: Any,
        *,
        persistent: Any,
        ahead: Any,
        timeout_s: Any,
        ray_options: Any,
        insecure: Any,
    ) -> Workers:
        """Check the arguments of ``.workers()``."""
        elsewhere = plugins.names(plugins.WORKERS)
        if kind not in (*_LOCAL, *elsewhere):
            *others, last = [repr(name) for name in (*_LOCAL[1:], *elsewhere)]
            instead = (
                f": kind='process' takes the method of multiprocessing.set_start_method({kind!r})"
                if kind in ("fork", "forkserver", "spawn")
                else ""
            )
            raise ValueError(f"kind must be {', '.join(others)} or {last}, not {kind!r}{instead}")
        if kind not in _LOCAL:
            _registered(kind).check(ray_options or {})
        elif ray_options is not None:
            raise ValueError("ray_options are for kind='ray'")
        elif insecure:
            raise ValueError("insecure=True is for kind='ray'")
        if persistent and kind not in (None, "process"):
            raise ValueError("persistent=True is for worker processes: leave kind= out")
        timeout_ns = _timeout_ns(timeout_s)
        if timeout_ns is not None and kind not in _LOCAL:
            raise ValueError("timeout_s= is for threads and processes, not for actors")
        if not is_whole_number(n):
            raise TypeError(f"a number of workers is a whole number, not {n!r}")
        least = 0 if kind in (None, "thread") else 1
        if n < least:
            raise ValueError(f".workers() takes a number from {least} on, not {n}")
        if timeout_ns is not None and not n:
            raise ValueError("timeout_s= needs workers: nothing can end what the loop itself does")
        return cls(
            int(n),
            kind,
            dict(ray_options or {}),
            bool(insecure),
            ahead=Ahead.of(ahead),
            timeout_ns=timeout_ns,
            persistent=bool(persistent),
        )

    def sends(self, segment: Segment) -> bool:
        """Whether worker processes or actors do the work of a segment, if there are any."""
        return bool(segment.users_code) if self.kind is None else self.kind != "thread"

    def __str__(self) -> str:
        kind = "" if self.kind is None else f"{self.kind} "
        text = f"{self.count} {kind}workers" if self.count else "no workers"
        if self.ahead is not None:
            text += f", {self.ahead} ahead at most"
        if self.timeout_ns is not None:
            text += f", timeout {format_seconds(self.timeout_ns / 1e9)}"
        return text


def _timeout_ns(timeout_s: Any) -> int | None:
    """Check ``.workers(timeout_s=)``."""
    if timeout_s is None:
        return None
    if not is_number(timeout_s):
        raise TypeError(f"timeout_s= is a number of seconds, not {timeout_s!r}")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s= must be more than 0 seconds, not {timeout_s!r}")
    return max(1, int(timeout_s * 1e9))


class KeptWorkers:
    """Workers that a pipeline keeps from epoch to epoch.

    Attributes:
        processes: its worker processes; None before it has had any that can stay.
        actors: what its kind of workers on other hosts keeps, with ``losses``, warnings about lost
            ones; None before it has any.
    """

    def __init__(self) -> None:
        self.processes: KeptProcesses | None = None
        self.actors: Any = None
        self._is_told = False

    def tell_of_cost(self, why: str) -> None:
        """Tell the user, once, why costly code of theirs does not run in worker processes."""
        if not self._is_told:
            self._is_told = True
            warn(
                "your Python code takes over a millisecond a batch, and runs in the training "
                f"loop's thread: {why}; or declare the code stoker.thread_safe, if threads may "
                "call it at once"
            )

    def warnings(self) -> list[str]:
        """Return new warnings: of actors that were lost."""
        if self.actors is None:
            return []
        found: list[str] = self.actors.losses
        self.actors.losses = []
        return found


def make_pool(
    workers: Workers, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    """Return the worker pool for the segments on the host.

    Args:
        workers: the number and kind.
        host: the works of the segments on the host, by depth.
        autotuner: the measured speeds.
        kept: the workers that earlier epochs have left.
    """
    pool = _made_pool(workers, host, autotuner, kept)
    if workers.timeout_ns is not None and workers.count:
        pool.watch_over(workers.timeout_ns)
    return pool


def _made_pool(
    workers: Workers, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    depths = max(1, len(host))
    if workers.count == 0:
        return WorkerPool(0, depths, autotuner)
    if workers.kind not in _LOCAL:
        assert workers.kind is not None
        return _registered(workers.kind).make_pool(workers, host, autotuner, kept)
    if not any(workers.sends(work.segment) for work in host):
        return WorkerPool(workers.count, depths, autotuner, grows=workers.grows)
    # These take their time to import.
    from stoker.engine.workers import local_processes
    from stoker.engine.workers.processes.starting import KeptProcesses

    if workers.persistent:
        kept.processes = kept.processes or KeptProcesses()
    return local_processes.make_pool(
        workers.count,
        host,
        autotuner,
        kept.processes,
        kept.tell_of_cost,
        is_asked=workers.kind == "process",
        grows=workers.grows,
        watched=workers.timeout_ns is not None,
    )


def _registered(kind: str) -> WorkerKind:
    found: WorkerKind = plugins.load(plugins.WORKERS, kind)
    return found
