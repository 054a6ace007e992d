"""Ray actors as the workers of an epoch, and the thread that manages them.

The thread adds actors as they start, and requests replacements for lost ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from stoker.basics.future import start_thread
from stoker.basics.resources import usable_cores
from stoker.cluster.workers.active_actors import CONNECTIONS_EACH, ActiveActors
from stoker.cluster.workers.actor_pool import ActorPool
from stoker.engine.work.work import Work
from stoker.engine.workers.requests import Answer, Request
from stoker.engine.workers.threads import WorkerPool

# For the first actor, whose process may take long to start: it imports the pipeline's modules.
_FIRST_S = 30.0
# Actors that come up take seconds; each look costs a call of Ray.
_LOOK_S = 0.2
# Ray had that long to find room for missing actors, before more are requested.
_REQUEST_AGAIN_S = 10.0
# As long as a user waits without a word for a thread that ends.
_JOIN_S = 5.0


class RayWorkers:
    """A worker pool's remote; all its threads share it.

    Args:
        actor_pool: the pool that actors come from.
        works: the work, by depth.
        count: the number of actors.
    """

    def __init__(self, actor_pool: ActorPool, works: Sequence[Work], count: int) -> None:
        self._pool = actor_pool
        self._active = ActiveActors(actor_pool, [work.address for work in works])
        self._count = count
        self._lock = threading.RLock()
        self._ending = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None

    def threads(self) -> tuple[int, int]:
        """Return the number of threads, and the number for each worker."""
        actors = len(self._active.actors)
        return (CONNECTIONS_EACH * actors, CONNECTIONS_EACH) if actors else (usable_cores(), 1)

    def start_actors(self) -> None:
        """Request the missing actors, and wait for the first, with a time limit.

        Raises an actor's error from unpickling the pipeline.
        """
        actor_pool = self._pool
        self._request_missing()
        until = time.monotonic() + _FIRST_S
        while not actor_pool.actors and actor_pool.requested and time.monotonic() < until:
            actor_pool.collect(_LOOK_S)
        while actor_pool.collect(0.0):
            pass
        if not actor_pool.actors:
            actor_pool.losses.append(
                f"no Ray actor has started within {_FIRST_S:g} s: check the room in the cluster "
                "(`ray status`). This process prepares until one has started"
            )
        for actor in actor_pool.actors:
            self._active.add(actor)

    def begin(self, pool: WorkerPool) -> None:
        """From now on report to the worker pool how many actors take part."""
        self._thread = start_thread("stoker-ray-watch", self._run, pool)

    def run(self, request: Request) -> AbstractContextManager[Answer | None]:
        """Run a request on an actor, as ``ActiveActors.run``."""
        return self._active.run(request)

    def stop(self) -> None:
        """Interrupt the requests under way."""
        with self._lock:
            self._closed = True
            self._ending.notify_all()
        self._active.stop()

    def close(self) -> None:
        """End the thread, and release the actors. They stay, for the next epoch."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        self._active.close()

    def _request_missing(self) -> None:
        actor_pool = self._pool
        missing = self._count - len(actor_pool.actors) - actor_pool.requested
        actor_pool.request(max(0, missing))

    def _run(self, pool: WorkerPool) -> None:
        try:
            requested_s = time.monotonic()
            while not self._ends():
                for actor in self._pool.collect(0.0):
                    self._active.add(actor)
                threads, each = self.threads()
                pool.resize(threads, threads_each=each)
                if time.monotonic() - requested_s > _REQUEST_AGAIN_S:
                    requested_s = time.monotonic()
                    self._request_missing()
        except BaseException as error:
            pool.fail(error)

    def _ends(self) -> bool:
        """Wait a moment; True if the epoch is over."""
        with self._lock:
            if not self._closed:
                self._ending.wait(_LOOK_S)
            return self._closed
