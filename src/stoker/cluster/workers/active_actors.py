"""The actors of an epoch: each thread with a request takes a free connection to one of them.

A connection is for one epoch. Each actor has two, so that its next request is there when it
finishes one. A lost actor's requests go to another actor: a request holds all that is needed to do
it again. If no actor is left, the thread does the work itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.cluster.workers.actor_pool import Actor, ActorPool
from stoker.cluster.workers.link_channel import FlatValue, Inbox
from stoker.cluster.workers.ray_actor import PURPOSE
from stoker.engine.plan.address import WorkAddress
from stoker.engine.workers.requests import Answer, Request
from stoker.errors import WorkerDied
from stoker.transport.link import Link, LinkError
from stoker.transport.secret import Secret

# An actor that is at work says so every second: ten words in a row do not get lost.
SILENCE_S = 10.0
# As many as requests that a process has: bench/results/gil.json, 0.985 of torch with two, 0.83 to
# 0.90 with one.
CONNECTIONS_EACH = 2
# A busy actor accepts a moment later; that is short beside a request.
_RETRY_S = 0.05
# Two may be lost by chance, when a node ends; three over the same examples are not.
_FATAL_LOSSES = 3


class ActiveActors:
    """The actors that take part in an epoch; a worker pool's remote.

    Args:
        pool: the pool that they come from.
        works: their work, by depth.
    """

    def __init__(self, pool: ActorPool, works: Sequence[WorkAddress]) -> None:
        self._pool = pool
        self._works = FlatValue(list(works))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._free: deque[_ActorConnection] = deque()
        self._taken: set[_ActorConnection] = set()
        self._closed = False

    @property
    def actors(self) -> list[Actor]:
        """The actors that take part."""
        with self._lock:
            connections = (*self._free, *self._taken)
            return list(dict.fromkeys(connection.actor for connection in connections))

    def add(self, actor: Actor) -> None:
        with self._lock:
            pool = self._pool
            self._free.extend(
                _ActorConnection(actor, pool.token, insecure=pool.insecure)
                for _ in range(CONNECTIONS_EACH)
            )
            self._changed.notify_all()

    @contextlib.contextmanager
    def run(self, request: Request) -> Iterator[Answer | None]:
        """Run a request on an actor; the answer's arrays are valid within the ``with`` only.

        Yields None where no actor is left. Raises WorkerDied where one actor after another was lost
        over this request.
        """
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
            self._drop_free(connection.actor)
            for other in self._taken:
                if other.actor is connection.actor:
                    other.close()  # which wakes its thread
        self._pool.lose(connection.actor, why)

    def _drop_free(self, actor: Actor) -> None:
        self._free = deque(connection for connection in self._free if connection.actor is not actor)


class _ActorConnection:
    """A connection to an actor, made on first use; one thread at a time uses it.

    Attributes:
        was_asked: whether the actor was there when the last request was sent.
        is_usable: whether it has not failed so far.
    """

    def __init__(self, actor: Actor, token: bytes, *, insecure: bool) -> None:
        self.actor = actor
        self.was_asked = False
        self.is_usable = True
        self._token = token
        self._insecure = insecure
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
        secret = Secret.of_host(self._token, insecure=self._insecure)
        until = time.monotonic() + SILENCE_S
        while True:
            try:
                return Link.connect(address, secret, PURPOSE, timeout_s=SILENCE_S)
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
