"""``.workers(n, kind="ray")``: Ray actors, on any node, as the workers of a pipeline.

Ray starts the actors, and alone ends them: when the last reference to an actor is dropped, and when
the process that requested it has ended, in whatever way. They stay from epoch to epoch. A thread of
the pool that takes a request looks for actors that have started meanwhile.

A connection to an actor is for one epoch. Each actor has two, so that its next request is there
when it finishes one. A lost actor's requests go to another actor: a request holds all that is
needed to do it again. If no actor is left, the thread does the work itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.basics.resources import usable_cores
from stoker.cluster.workers.link_channel import FlatValue, Inbox
from stoker.cluster.workers.ray_actor import PURPOSE, ActorPlace, PreparingActor, WorkerSpec
from stoker.engine.work.work import Work
from stoker.engine.workers.make import KeptWorkers, Workers
from stoker.engine.workers.requests import Answer, Request
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import WorkerDied
from stoker.transport.link import Link, LinkError
from stoker.transport.ray_session import check_installed, require_ray
from stoker.transport.secret import Secret, new_token

# An actor does one request at a time; Ray is told so unless the user says otherwise.
_ONE_CORE = {"num_cpus": 1}
_OURS = {"lifetime", "name", "namespace", "get_if_exists", "max_restarts", "max_task_retries"}
_FEATURE = '.workers(kind="ray")'
# For the first actor, whose process may take long to start: it imports the pipeline's modules.
_FIRST_S = 30.0
# Actors that come up take seconds; each look costs a call of Ray.
_LOOK_S = 0.2
# An actor that is at work says so every second: ten words in a row do not get lost.
SILENCE_S = 10.0
# As many as requests that a process has: bench/results/gil.json, 0.985 of torch with two, 0.83 to
# 0.90 with one.
CONNECTIONS_EACH = 2
# A busy actor accepts a moment later; that is short beside a request.
_RETRY_S = 0.05
# Two may be lost by chance, when a node ends; three over the same examples are not.
_FATAL_LOSSES = 3
_inherited: list[ActorPool] = []
"""Pools that a forked child inherited. Freeing them would end the parent's actors."""
_pools: weakref.WeakSet[ActorPool] = weakref.WeakSet()


def check(options: Any) -> None:
    """Raise ImportError without Ray, TypeError and ValueError for invalid options."""
    check_installed(_FEATURE)
    if not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise TypeError(f"ray_options are a dict with names of Ray's options, not {options!r}")
    refused = sorted(_OURS & options.keys())
    if refused:
        raise ValueError(f"actors end with their pipeline: {', '.join(refused)} cannot be given")


def make_pool(
    workers: Workers, host: list[Work], autotuner: Autotuner, kept: KeptWorkers
) -> WorkerPool:
    """Return a pool of actors; reuses the previous epoch's actors if the work is the same."""
    actors = kept.actors
    if not isinstance(actors, ActorPool) or not actors.does(host):
        actors = kept.actors = ActorPool(host, workers)
    try:
        actors.start()
    except BaseException:
        kept.actors = None
        raise
    remote = RayWorkers(actors, host)
    threads, each = remote.threads()
    pool = WorkerPool(threads, max(1, len(host)), autotuner, [remote], threads_each=each)
    remote.pool = weakref.ref(pool)
    return pool


class Actor:
    """An actor that has started.

    Attributes:
        handle: Ray's actor handle.
        place: its address, node and process.
    """

    def __init__(self, handle: Any, place: ActorPlace) -> None:
        self.handle = handle
        self.place = place

    def __str__(self) -> str:
        name = self.handle._actor_id.hex()[:12]
        return f"actor {name} (process {self.place.pid} on node {self.place.node})"


class ActorPool:
    """The actors of one pipeline.

    Args:
        host: the works of the segments on the host; each actor gets their segments once.
        workers: how many actors, and Ray's options for them: placement and resources.

    Attributes:
        token: the secret of connections to them.
        insecure: whether these are not encrypted.
        actors: the started ones that are not known to be lost.
        losses: texts of warnings, one a lost actor.
    """

    def __init__(self, host: list[Work], workers: Workers) -> None:
        ray = require_ray(_FEATURE)
        self._segments = {work.segment.at: work.segment for work in host}
        self._owner = OwningProcess()
        self.token = new_token()
        self.insecure = workers.insecure
        self.actors: list[Actor] = []
        self.losses: list[str] = []
        self._lock = threading.RLock()
        self._requested: dict[Any, Any] = {}  # actors by what tells that they have come up
        self._count = workers.count
        self._options = {**_ONE_CORE, **workers.ray_options}
        spec = WorkerSpec(tuple(self._segments.values()), host[0].source)
        # As bytes: arrays would come out of Ray's own memory, and could not be written to.
        self._spec = ray.put(ray.cloudpickle.dumps(spec))
        _pools.add(self)

    def does(self, host: list[Work]) -> bool:
        """Whether its actors are this process's, and do these works."""
        own = self._segments
        return self.is_ours and all(own.get(each.segment.at) is each.segment for each in host)

    @property
    def is_ours(self) -> bool:
        """True if this process made it, rather than a process that forked this one."""
        return self._owner.is_current

    def start(self) -> None:
        """Request the missing actors, and wait for the first, with a time limit.

        Raises as ``collect`` does.
        """
        for _ in range(self._count - len(self.actors) - len(self._requested)):
            self._request()
        until_s = time.monotonic() + _FIRST_S
        while not self.actors and self._requested and time.monotonic() < until_s:
            self.collect(_LOOK_S)
        while self.collect(0.0):
            pass
        if not self.actors:
            self.losses.append(
                f"no Ray actor has started within {_FIRST_S:g} s: check the room in the cluster "
                "(`ray status`). This process prepares until one has started"
            )

    def _request(self) -> None:
        import ray

        handle = ray.remote(PreparingActor).options(**self._options).remote()
        self._requested[handle.begin.remote(self._spec, self.token, self.insecure)] = handle

    def collect(self, wait_s: float) -> list[Actor]:
        """Return newly started actors; wait up to this many seconds for the first.

        Raises an actor's error from unpickling the pipeline; Ray's error for an actor that it
        cannot start.
        """
        import ray

        if not self._requested:
            return []
        up, _ = ray.wait(list(self._requested), num_returns=1, timeout=wait_s)
        found = []
        for each in up:
            handle = self._requested.pop(each)
            try:
                place = ray.get(each)
            except ray.exceptions.RayTaskError as error:
                cause = error.as_instanceof_cause()
                cause.add_note(
                    "In an actor, which received the pipeline: the modules and files that the "
                    "pipeline uses must be on the cluster's nodes (ray.init(runtime_env=...) can "
                    "install them)."
                )
                raise cause from None
            except ray.exceptions.RayActorError as error:
                self.losses.append(f"an actor was lost before it came up: {error}")
                continue
            found.append(Actor(handle, ActorPlace(*place)))
        self.actors += found
        return found

    def lose(self, actor: Actor, why: object) -> None:
        """Count an actor as lost, and have Ray end its process and start another."""
        import ray

        with self._lock:
            if actor not in self.actors:
                return
            self.actors.remove(actor)
            rest = len(self.actors)
            by = f"{rest} others" if rest > 1 else "another one" if rest else "this process"
            self.losses.append(f"{actor} was lost: {why}. Its work is done by {by}")
            self._request()
        ray.kill(actor.handle)


class RayWorkers:
    """The actors that take part in an epoch: a worker pool's remote, which all its threads share.

    Args:
        actor_pool: the pool that they come from.
        works: the work, by depth.

    Attributes:
        pool: the worker pool, which has as many threads as the actors have connections.
    """

    pool: weakref.ref[WorkerPool]

    def __init__(self, actor_pool: ActorPool, works: list[Work]) -> None:
        self._actor_pool = actor_pool
        self._works = FlatValue([work.address for work in works])
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._free: deque[_ActorConnection] = deque()
        self._taken: set[_ActorConnection] = set()
        self._closed = False
        self._looking = threading.Lock()
        self._looked_s = time.monotonic()
        self._add(actor_pool.actors)

    def threads(self) -> tuple[int, int]:
        """Return the number of threads, and the number for each worker."""
        with self._lock:
            actors = len({each.actor for each in (*self._free, *self._taken) if each.is_usable})
        return (CONNECTIONS_EACH * actors, CONNECTIONS_EACH) if actors else (usable_cores(), 1)

    @contextlib.contextmanager
    def run(self, request: Request) -> Iterator[Answer | None]:
        """Run a request on an actor; the answer's arrays are valid within the ``with`` only.

        Yields None where no actor is left. Raises WorkerDied where one actor after another was lost
        over this request, and as ``ActorPool.collect`` does.
        """
        self._look_for_actors()
        flat = FlatValue(request)
        losses = 0
        while (connection := self._take()) is not None:
            try:
                answer = self._ask(connection, flat, anew=losses > 0)
                if answer is not None:
                    yield answer
                    return
            finally:
                self._give_back(connection)
            losses += connection.was_asked
            if losses == _FATAL_LOSSES:
                raise WorkerDied(
                    f"{losses} actors in a row were lost over the same examples, "
                    f"{connection.actor} last: the pipeline probably crashes on them, or memory "
                    "is short"
                )
        yield None

    def stop(self) -> None:
        """Interrupt the requests under way."""
        with self._lock:
            self._closed = True
            for connection in (*self._free, *self._taken):
                connection.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connections. The actors stay, for the next epoch."""
        with self._lock:
            self._free.clear()

    def _ask(
        self, connection: _ActorConnection, request: FlatValue, *, anew: bool
    ) -> Answer | None:
        """Return an answer; None if the actor was lost."""
        try:
            answer: Answer = connection.ask(self._works, request, anew=anew)
            return answer
        except (OSError, EOFError) as error:
            self._lose(connection, error)
            return None

    def _take(self) -> _ActorConnection | None:
        with self._lock:
            while self._taken and not self._free and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the iterator was closed")
            if not self._free:
                return None
            connection = self._free.popleft()
            self._taken.add(connection)
            return connection

    def _give_back(self, connection: _ActorConnection) -> None:
        with self._lock:
            self._taken.discard(connection)
            if connection.is_usable:
                self._free.append(connection)
            self._changed.notify_all()

    def _lose(self, connection: _ActorConnection, why: Exception) -> None:
        """Stop using an actor."""
        connection.is_usable = False
        with self._lock:
            if self._closed:  # that is why
                return
            self._free = deque(each for each in self._free if each.actor is not connection.actor)
            for other in self._taken:
                if other.actor is connection.actor:
                    other.close()  # which wakes its thread
        self._actor_pool.lose(connection.actor, why)
        self._resize()

    def _look_for_actors(self) -> None:
        """Have actors that have started take part; one thread looks at a time."""
        if time.monotonic() - self._looked_s < _LOOK_S or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked_s = time.monotonic()
            if started := self._actor_pool.collect(0.0):
                self._add(started)
                self._resize()
        finally:
            self._looking.release()

    def _add(self, actors: list[Actor]) -> None:
        secret = Secret.of_host(self._actor_pool.token, insecure=self._actor_pool.insecure)
        with self._lock:
            self._free.extend(
                _ActorConnection(actor, secret) for actor in actors for _ in range(CONNECTIONS_EACH)
            )
            self._changed.notify_all()

    def _resize(self) -> None:
        """Have as many threads as the actors that take part can use."""
        pool = self.pool()
        if pool is not None:
            threads, each = self.threads()
            pool.resize(threads, threads_each=each)


class _ActorConnection:
    """A connection to an actor, made on first use; one thread at a time uses it.

    Attributes:
        was_asked: whether the actor was there when the last request was sent.
        is_usable: whether it has not failed so far.
    """

    def __init__(self, actor: Actor, secret: Secret) -> None:
        self.actor = actor
        self.was_asked = False
        self.is_usable = True
        self._secret = secret
        self._link: Link | None = None
        self._inbox = Inbox()
        self._closed = False

    def ask(self, works: FlatValue, request: FlatValue, *, anew: bool) -> Any:
        """Send a request and wait for its answer.

        Args:
            works: the actor's work in this epoch.
            request: the request.
            anew: whether to connect for it, so that the actor is known to be there.

        Raises LinkError, TimeoutError, EOFError.
        """
        self.was_asked = False
        if self._link is None or anew:
            self._link = self._connect()
            if self._closed:
                raise LinkError("the iterator was closed")
            works.send(self._link)
            self.was_asked = True
        request.send(self._link)
        return self._inbox.receive(self._link, wait_s=SILENCE_S)

    def _connect(self) -> Link:
        """Connect, as long as the actor may be alive but too busy to answer."""
        address = self.actor.place.address
        until = time.monotonic() + SILENCE_S
        while True:
            try:
                return Link.connect(address, self._secret, PURPOSE, timeout_s=SILENCE_S)
            except LinkError as error:
                is_gone = isinstance(error.__cause__, ConnectionRefusedError)
                if is_gone or self._closed or time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)

    def close(self) -> None:
        """End the connection, from any thread."""
        self._closed = True
        link = self._link
        if link is not None:
            link.close()


def _keep_in_children() -> None:
    _inherited.extend(_pools)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_children)
