"""Ray actors as the workers of an epoch, and the thread that manages them.

The thread adds actors as they start, requests replacements for lost ones, and where the number is
"auto" requests more or dismisses some.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from stoker.basics.resources import usable_cores
from stoker.cluster.workers.active_actors import SEATS, ActiveActors
from stoker.cluster.workers.actor_pool import ActorPool
from stoker.cluster.workers.autoscaler import SPAN_S, Span
from stoker.engine.work import Work
from stoker.engine.workers.threads import Answer, Request, WorkerPool

# For the first actor, whose process may take long to start: it imports the pipeline's modules.
_FIRST_S = 30.0
# Actors that come up take seconds; each look costs a call of Ray.
_LOOK_S = 0.2
# Ray had that long to find room: missing actors are ordered anew, or given up.
_ORDER_AGAIN_S = 10.0
# As long as a user waits without a word for a thread that ends.
_JOIN_S = 5.0


class RayWorkers:
    """A worker pool's remote; all its threads share it.

    Args:
        fleet: the pool that actors come from.
        works: the work, by depth.
        count: the number of actors; None: as many as the consumer needs.
    """

    def __init__(self, fleet: ActorPool, works: Sequence[Work], count: int | None) -> None:
        self._fleet = fleet
        self._team = ActiveActors(fleet, [work.address for work in works])
        self._count = count
        self._lock = threading.RLock()
        self._ending = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    def threads(self) -> tuple[int, int]:
        """Return the number of threads, and the number for each worker."""
        actors = len(self._team.actors)
        return (SEATS * actors, SEATS) if actors else (usable_cores(), 1)

    def gather(self) -> None:
        """Request the missing actors, and wait for the first, with a time limit.

        Raises an actor's error from unpickling the pipeline.
        """
        fleet = self._fleet
        self._order_missing()
        until = time.monotonic() + _FIRST_S
        while not fleet.actors and fleet.ordered and time.monotonic() < until:
            fleet.collect(_LOOK_S)
        while fleet.collect(0.0):
            pass
        if not fleet.actors:
            fleet.losses.append(
                f"no actor of Ray has come up within {_FIRST_S:g} s: is there room in the cluster "
                "(`ray status`)? This process prepares until one is there"
            )
        for actor in fleet.actors:
            self._team.add(actor)

    def begin(self, pool: WorkerPool) -> None:
        """From now on report to the worker pool how many actors take part."""
        self._thread = threading.Thread(
            target=self._run, args=(pool,), name="stoker-ray-watch", daemon=True
        )
        self._thread.start()

    def run(self, request: Request) -> AbstractContextManager[Answer | None]:
        """Run a request on an actor, as ``ActiveActors.run``."""
        return self._team.run(request)

    def stop(self) -> None:
        """Interrupt the requests under way."""
        with self._lock:
            self._closed = True
            self._ending.notify_all()
        self._team.stop()

    def close(self) -> None:
        """End the thread, and release the actors. They stay, for the next epoch."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        self._team.close()

    def _order_missing(self) -> None:
        fleet = self._fleet
        fleet.order(max(0, (self._count or 1) - len(fleet.actors) - fleet.ordered))

    def _run(self, pool: WorkerPool) -> None:
        try:
            auto = self._count is None
            ordered_s = time.monotonic()
            start = self._read(pool)
            while not self._ends():
                for actor in self._fleet.collect(0.0):
                    self._team.add(actor)
                threads, each = self.threads()
                pool.resize(threads, threads_each=each)
                now = self._read(pool)
                if now.actors != start.actors:
                    start = now
                is_late = now.elapsed_s - ordered_s > _ORDER_AGAIN_S
                if is_late and auto:
                    self._fleet.cancel_orders()  # what had room has none any more
                if is_late or (auto and not now.actors and not self._fleet.ordered):
                    ordered_s = now.elapsed_s
                    self._order_missing()
                if auto and now.elapsed_s - start.elapsed_s >= SPAN_S:
                    if not self._fleet.ordered:
                        self._borrow(_between(start, now))
                        ordered_s = now.elapsed_s
                    start = now
        except BaseException as error:
            pool.fail(error)

    def _ends(self) -> bool:
        """Wait a moment; True if the epoch is over."""
        with self._lock:
            if not self._closed:
                self._ending.wait(_LOOK_S)
            return self._closed

    def _read(self, pool: WorkerPool) -> Span:
        """Return the measurements up to now."""
        now_ns = time.monotonic_ns()
        team = self._team
        return Span(
            now_ns / 1e9, pool.waited_ns() / 1e9, team.busy_ns / 1e9, team.rows, len(team.actors)
        )

    def _borrow(self, span: Span) -> None:
        """Request more actors, or dismiss some."""
        if not span.actors:
            return
        wanted = self._fleet.borrowing.decide(span, self._fleet.room())
        self._fleet.order(max(0, wanted - span.actors))
        for actor in self._team.actors[wanted:]:
            self._team.send_away(actor)


def _between(start: Span, end: Span) -> Span:
    return Span(
        end.elapsed_s - start.elapsed_s,
        end.waited_s - start.waited_s,
        end.busy_s - start.busy_s,
        end.rows - start.rows,
        end.actors,
    )
