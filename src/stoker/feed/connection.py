"""A job's connection to one feeder: greeting, messages, and leases of the feeder's memory.

A job maps the feeder's memory privately, and anew for each hand-over, so that a page that it wrote
to is not taken for the next output. A finalizer of the mapping ends the lease: the job is done with
an output when nothing refers to its arrays any more. An output that the job still refers to when it
asks for the output after the next is copied into the job's own memory, by a write to each page, so
that the feeder need not wait.

``Ask`` has a number that all answers to it repeat; the job drops answers to older ones. An invalid
message is one ``FeedError``; it is not retried.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.errors import FeedError
from stoker.feed import messages
from stoker.feed.messages import (
    Begin,
    Done,
    FromFeeder,
    Hello,
    Malformed,
    Message,
    Peers,
    Refused,
    Welcome,
)
from stoker.transport.shared_memory import Stale, check_generation, detach

# A feeder that is just ending may be met once; another one is there by then.
_ATTEMPTS = 3
# So long a job waits for others before it says so: steps of most trainings take less.
_SAY_MS = 2000


@dataclass(frozen=True)
class FeedAddress:
    """The feed that a job reads, and how to connect to it.

    Attributes:
        name: of the feed.
        connect: connects to it; None where it is not there.
        target: the pipeline function that it must serve; empty for any.
        is_restarted: whether ``connect`` starts a feeder where there is none, so that a lost one is
            replaced.
        label: names the reader if that is not the connecting process; the process then prints
            nothing on its own stderr.
        note: called with the feeder's welcome message.
        goes_on_for: seed and outline of the feed that was taken before, for the first connection.
    """

    name: str
    connect: Callable[[], socket.socket | None]
    target: str = ""
    is_restarted: bool = False
    label: str = ""
    note: Callable[[Welcome], None] | None = None
    goes_on_for: tuple[int, list[str]] | None = None


class Interrupted(Exception):
    """A wait for the feeder was interrupted."""


class FeederConnection:
    """A connection to a feed's feeder, which has greeted this job; ``before`` was the last one.

    Attributes:
        welcome: the feeder's welcome message.
        wait_ns: nanoseconds that the job has waited for feeders.

    Raises FeedError when there is no feed, or the feed refuses this job.
    """

    def __init__(self, address: FeedAddress, before: FeederConnection | None = None) -> None:
        self.wait_ns: int = 0 if before is None else before.wait_ns
        self._name = address.name
        self._peers: list[int] = [] if before is None else before._peers
        known = address.goes_on_for
        if before is not None:
            welcome = before.welcome
            known = (welcome.seed, welcome.outline) if address.is_restarted else None
        self.welcome: Welcome
        self._socket, self.welcome = _greet(address, known, self._peers)
        if address.note is not None:
            address.note(self.welcome)
        # Until that was said, or something came.
        self._awaited_jobs = 0 if address.label else self.welcome.awaited_jobs

    def send(self, message: Message) -> None:
        """Send a message. If the feeder is gone, ``receive`` reports it, not this."""
        with contextlib.suppress(OSError):
            while not self.try_to_send(message):
                select.select([], [self._socket], [])

    def try_to_send(self, message: Message) -> bool:
        """Send a message unless that would block; True if it was sent or the feeder is gone."""
        try:
            messages.send(self._socket, message)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the next one who waits finds it out
        return True

    def receive(self, interrupt: int) -> tuple[Any, list[int]]:
        """Return the feeder's next message and its descriptors; None when the feeder is gone.

        Raises Malformed for an invalid message, Interrupted when the descriptor ``interrupt``
        becomes readable.
        """
        began = time.perf_counter_ns()
        try:
            while True:
                message, descriptors = self._receive(interrupt)
                if isinstance(message, Begin):
                    self._awaited_jobs = 0
                if not isinstance(message, Peers):
                    return message, descriptors
                self._peers = message.pids
        except OSError:
            return None, []
        finally:
            self.wait_ns += time.perf_counter_ns() - began

    def close(self) -> None:
        self._socket.close()

    def _receive(self, interrupt: int) -> tuple[FromFeeder | None, list[int]]:
        with contextlib.suppress(BlockingIOError):
            return messages.receive_as_job(self._socket)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(interrupt, select.POLLIN)
        while True:
            ready = [number for number, _ in poll.poll(_SAY_MS if self._awaited_jobs > 1 else None)]
            if not ready:
                self._say_who_is_awaited()
            if interrupt in ready:
                raise Interrupted
            with contextlib.suppress(BlockingIOError):
                return messages.receive_as_job(self._socket)

    def _say_who_is_awaited(self) -> None:
        """Print once, on stderr, that the feed waits for other jobs."""
        if len(self._peers) < self._awaited_jobs:
            print(
                f"stoker: the feed {self._name!r} waits for {self._awaited_jobs} jobs before its "
                "first epoch: start the others, or ask for fewer (jobs=, --jobs). It begins "
                "without them once its patience is over",
                file=sys.stderr,
            )
        self._awaited_jobs = 0


class Leases:
    """The hand-overs of one connection that the job still uses.

    Finalizers call it, in any thread, at any time.
    """

    def __init__(self, connection: FeederConnection) -> None:
        self._connection = connection
        self._owner = OwningProcess()
        self._lock = threading.RLock()  # a finaliser may come in between
        self._held: dict[int, _Lease] = {}
        self._finished: deque[int] = deque()  # to be given back

    def hold(self, number: int, mappings: list[mmap.mmap], generations: list[int]) -> None:
        """Give a hand-over back when nothing refers to its mappings any more."""
        if mappings:
            self._held[number] = _Lease(self, number, mappings, generations)
        else:
            self.give_back(number)

    def settle(self, most: int) -> None:
        """Hold fewer than ``most`` leases: copy outputs that would keep the feeder waiting.

        Raises FeedError when the feeder overwrote an output that this job still used.
        """
        while len(self._held) >= most:
            with self._lock:
                oldest = self._held.get(min(self._held, default=0))
            if oldest is not None:
                oldest.keep()
        self.give_back()

    def give_back(self, *numbers: int) -> None:
        """Tell the feeder which leases this job has finished with."""
        self._finished.extend(numbers)
        while self._finished and self._lock.acquire(blocking=False):
            try:
                leases: list[int] = []
                with contextlib.suppress(IndexError):
                    while len(leases) < messages.MOST_LEASES:
                        leases.append(self._finished.popleft())
                if not self._connection.try_to_send(Done(leases, self._connection.wait_ns)):
                    self._finished.extend(leases)  # with the next message
                    return
            finally:
                self._lock.release()

    def drop(self, number: int) -> None:
        """Take note that nothing refers to a hand-over any more."""
        if not self._owner.is_current:
            return  # the hand-over is the parent's, and the lock may be held for ever
        with self._lock:
            known = self._held.pop(number, None)
        if known is not None:
            self.give_back(number)

    def forget(self) -> None:
        """Return no more leases: held outputs stay valid as long as they are referred to."""
        for lease in self._held.values():
            lease.forget()
        self._held.clear()
        self._finished.clear()


class _Lease:
    """The mappings of one hand-over."""

    def __init__(
        self, leases: Leases, number: int, mappings: list[mmap.mmap], generations: list[int]
    ) -> None:
        self._leases = weakref.ref(leases)
        self._number = number
        self._left = len(mappings)
        self._mappings = [
            (weakref.ref(mapping, self._one_less), generation)
            for mapping, generation in zip(mappings, generations, strict=True)
        ]

    def keep(self) -> None:
        """Copy outputs that are still referred to into this process's memory, and return the lease.

        Raises FeedError when the feeder overwrote it meanwhile, which it must not do.
        """
        try:
            for reference, generation in self._mappings:
                mapping = reference()
                if mapping is not None:
                    detach(mapping)
                    check_generation(mapping, generation)
        except Stale:
            raise FeedError("a batch was overwritten while this job held it") from None
        self.forget()
        self._drop()

    def forget(self) -> None:
        """Release the mappings without telling the feeder."""
        self._mappings = []

    def _one_less(self, _: object) -> None:
        self._left -= 1
        if self._left <= 0:
            self._drop()

    def _drop(self) -> None:
        leases = self._leases()
        if leases is not None:
            leases.drop(self._number)


def _greet(
    address: FeedAddress, known: tuple[int, list[str]] | None, peers: list[int]
) -> tuple[socket.socket, Welcome]:
    """Connect, and exchange greetings; the feeder must go on for the one that ``known`` is of."""
    label = address.label or " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
    seed, outline = known or (None, [])
    hello = Hello(
        messages.VERSION,
        messages.plain(label, messages.LABEL_CHARACTERS),
        messages.plain(address.target),
        seed,
        outline,
        peers[: messages.MOST_PEERS],
    )
    for _ in range(_ATTEMPTS):
        connection = address.connect()
        if connection is None:
            raise FeedError(
                f"there is no feed {address.name!r} on this host: start it with stoker feed "
                f"FILE.py:FUNCTION --name {address.name}, or take stoker.share()"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            answer = _answer(connection, hello, address.name)
            if isinstance(answer, Welcome):
                connection.setblocking(False)
                undo.pop_all()
                return connection, answer
        if isinstance(answer, Refused):
            raise FeedError(answer.reason)
    raise FeedError(
        f"the feeder of {address.name!r} ends before it serves anybody: stoker feed "
        f"{address.target or 'FILE.py:FUNCTION'} --name {address.name} shows why"
    )


def _answer(connection: socket.socket, hello: Hello, name: str) -> FromFeeder | None:
    try:
        messages.send(connection, hello)
        return messages.receive_as_job(connection)[0]
    except OSError:
        return None
    except Malformed as error:
        raise damaged(name, str(error)) from None


def damaged(name: str, how: str) -> FeedError:
    """Return the error for an invalid message from a feeder."""
    return FeedError(f"what the feeder of {name!r} sent is damaged: {how}")
