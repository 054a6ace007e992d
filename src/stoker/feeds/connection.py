"""A job's connection to one feeder: greeting, messages, and leases of the feeder's memory.

A job maps the feeder's memory privately, and maps it again for each item: otherwise a page that the
job wrote would hide the next output. The mapping's finalizer ends the lease, so a job is done with
an output when nothing refers to its arrays any more. If the job still refers to an output when it
requests the one after the next, the output is copied into the job's own memory, by a write to each
page. So the feeder need not wait.

An ``EpochRequest`` has an id that all replies repeat; the job drops replies to older requests. An
invalid message raises one ``FeedError``, without a retry.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.basics.process import OwningProcess
from stoker.basics.signals import finalize
from stoker.basics.warn import say
from stoker.errors import FeedError
from stoker.feeds import messages
from stoker.feeds.shared_memory import Stale, check_generation, detach

# The first try may meet a feeder that is just ending, and by the second another one is there. The
# third is a margin.
_ATTEMPTS = 3
# How long a job waits for other jobs before it prints a message: longer than most training steps.
_REPORT_MS = 2000


@dataclass(frozen=True)
class FeedAddress:
    """The address of a feed, and how a job connects to it.

    Attributes:
        name: the feed's name.
        connect: connects to it, or returns None if there is no feed.
        target: the pipeline function that it must serve; empty for any.
        max_losses: how many feeders or connections may be lost at one position, as ``connect``
            finds or starts another; with 0 the first loss is an error.
        remote_name: the feed's name at a feeder on another host; empty if it is on this host.
    """

    name: str
    connect: Callable[[], socket.socket | None]
    target: str = ""
    max_losses: int = 0
    remote_name: str = ""


class Interrupted(Exception):
    """Another thread has interrupted a wait for the feeder."""


class FeederConnection:
    """A connection to a feeder, after the greeting; ``previous`` is the job's last connection.

    Attributes:
        welcome: the feeder's welcome message.

    Raises FeedError if there is no feed, or if the feed refuses this job.
    """

    def __init__(self, address: FeedAddress, previous: FeederConnection | None = None) -> None:
        self._name = address.name
        continues: tuple[int, list[str]] | None = None
        if previous is not None and address.max_losses:
            continues = previous.welcome.seed, previous.welcome.signature
        self.welcome: messages.Welcome
        self._socket, self.welcome = _greet(address, continues)
        # 0 once the message is printed, or once an epoch has begun.
        self._awaited_jobs = self.welcome.awaited_jobs

    def send(self, message: messages.Message) -> None:
        """Send a message. If the feeder is gone, the next ``receive`` reports it, not this call."""
        with contextlib.suppress(OSError):
            while not self.try_to_send(message):
                poll = select.poll()  # as `select` takes no descriptor above 1023
                poll.register(self._socket, select.POLLOUT)
                poll.poll()

    def try_to_send(self, message: messages.Message) -> bool:
        """Send a message unless that would block; True if it is sent, or if the feeder is gone."""
        try:
            messages.send(self._socket, message)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the next `receive` reports it
        return True

    def receive(self, interrupt: int) -> tuple[Any, list[int]]:
        """Return the feeder's next message and its descriptors; None if the feeder is gone.

        Raises Malformed for an invalid message, Interrupted if the descriptor ``interrupt`` becomes
        readable.
        """
        try:
            message, descriptors = self._receive(interrupt)
            if isinstance(message, messages.Begin):
                self._awaited_jobs = 0
            return message, descriptors
        except OSError:
            return None, []

    def close(self) -> None:
        self._socket.close()

    def _receive(self, interrupt: int) -> tuple[messages.FromFeeder | None, list[int]]:
        with contextlib.suppress(BlockingIOError):
            return messages.receive_as_job(self._socket)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(interrupt, select.POLLIN)
        while True:
            ready = [
                number for number, _ in poll.poll(_REPORT_MS if self._awaited_jobs > 1 else None)
            ]
            if not ready:
                self._report_missing_jobs()
            if interrupt in ready:
                raise Interrupted
            with contextlib.suppress(BlockingIOError):
                return messages.receive_as_job(self._socket)

    def _report_missing_jobs(self) -> None:
        """Print once to stderr that the feed waits for other jobs."""
        say(
            f"stoker: the feed {self._name!r} waits for {self._awaited_jobs} jobs before its "
            "first epoch. Start the others, or give a smaller jobs= (--jobs). Without them it "
            "begins after timeout_s (--timeout-s)"
        )
        self._awaited_jobs = 0


class Leases:
    """The items of one connection that the job still uses.

    Finalizers call its methods, in any thread and at any time.
    """

    def __init__(self, connection: FeederConnection) -> None:
        self._connection = connection
        self._owner = OwningProcess()
        self._lock = threading.RLock()  # a finalizer may run in a thread that holds it
        self._held: dict[int, _Lease] = {}
        self._finished: deque[int] = deque()  # leases to release with the next message
        _LEASES.add(self)

    def hold(self, number: int, mappings: list[mmap.mmap], generations: list[int]) -> None:
        """Release a lease when nothing refers to its mappings any more."""
        if mappings:
            self._held[number] = _Lease(self, number, mappings, generations)
        else:
            self.release(number)

    def make_room(self, max_held: int) -> None:
        """Hold fewer than ``most`` leases: copy outputs that would keep the feeder waiting.

        Raises FeedError if the feeder has overwritten an output that this job still uses.
        """
        while len(self._held) >= max_held:
            with self._lock:
                oldest = self._held.get(min(self._held, default=0))
            if oldest is not None:
                oldest.copy_out()
        self.release()

    def release(self, *numbers: int) -> None:
        """Tell the feeder which leases this job no longer needs."""
        self._finished.extend(numbers)
        while self._finished and self._lock.acquire(blocking=False):
            try:
                leases: list[int] = []
                with contextlib.suppress(IndexError):
                    while len(leases) < messages.MAX_LEASES:
                        leases.append(self._finished.popleft())
                if not self._connection.try_to_send(messages.Release(leases)):
                    self._finished.extend(leases)  # the socket is full: send them later
                    return
            finally:
                self._lock.release()

    def on_unused(self, number: int) -> None:
        """Release a lease: nothing refers to its item any more."""
        if not self._owner.is_current:
            return  # forked: the lease is the parent's, and the lock may be held for ever
        with self._lock:
            lease = self._held.pop(number, None)
        if lease is not None:
            self.release(number)

    def copy_for_child(self) -> None:
        """Copy what the job holds before a fork: a child has no leases, and may use it."""
        if self._owner.is_current:
            with contextlib.suppress(FeedError):  # nobody could catch it here
                self.make_room(1)


_LEASES: weakref.WeakSet[Leases] = weakref.WeakSet()


def _copy_for_child() -> None:
    for leases in list(_LEASES):
        leases.copy_for_child()


os.register_at_fork(before=_copy_for_child)


class _Lease:
    """The mappings of one item."""

    def __init__(
        self, leases: Leases, number: int, mappings: list[mmap.mmap], generations: list[int]
    ) -> None:
        self._leases = weakref.ref(leases)
        self._number = number
        self._left = len(mappings)
        self._mappings = [
            (weakref.ref(mapping), generation)
            for mapping, generation in zip(mappings, generations, strict=True)
        ]
        self._finish = [finalize(mapping, self._on_mapping_freed) for mapping in mappings]
        for each in self._finish:
            each.atexit = False  # the feeder sees that this process is gone

    def copy_out(self) -> None:
        """Copy the item into this process's memory if the job still uses it; release the lease.

        Raises FeedError if the feeder has overwritten it, which would be a defect.
        """
        try:
            for reference, generation in self._mappings:
                mapping = reference()
                if mapping is not None:
                    detach(mapping)
                    check_generation(mapping, generation)
        except Stale:
            raise FeedError("the feeder has overwritten a batch that this job still used") from None
        self.forget()
        self._drop()

    def forget(self) -> None:
        """Release the mappings without telling the feeder."""
        self._mappings = []
        for each in self._finish:
            each.detach()

    def _on_mapping_freed(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._drop()

    def _drop(self) -> None:
        leases = self._leases()
        if leases is not None:
            leases.on_unused(self._number)


def _greet(
    address: FeedAddress, continues: tuple[int, list[str]] | None
) -> tuple[socket.socket, messages.Welcome]:
    """Connect and exchange greetings; the feeder must serve what ``continues`` names, if given."""
    label = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
    if address.remote_name:
        label = f"{socket.gethostname()}: {label}"
    seed, signature = continues or (None, [])
    hello = messages.Hello(
        messages.VERSION,
        messages.clip_text(label, messages.LABEL_CHARACTERS),
        messages.clip_text(address.target),
        address.remote_name,
        seed,
        signature,
    )
    for _ in range(max(_ATTEMPTS, address.max_losses)):
        connection = address.connect()
        if connection is None:
            raise FeedError(
                f"there is no feed {address.name!r} on this host: start it with stoker feed "
                f"FILE.py:FUNCTION --name {address.name}, or use stoker.feed()"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            answer = _exchange_greetings(connection, hello, address.name)
            if isinstance(answer, messages.Welcome):
                connection.setblocking(False)
                undo.pop_all()
                return connection, answer
        if isinstance(answer, messages.Refused):
            raise FeedError(answer.reason)
    raise FeedError(
        f"the feeder of {address.name!r} ends before it serves any job. Run stoker feed "
        f"{address.target or 'FILE.py:FUNCTION'} --name {address.name} to see why"
    )


def _exchange_greetings(
    connection: socket.socket, hello: messages.Hello, name: str
) -> messages.FromFeeder | None:
    try:
        messages.send(connection, hello)
        return messages.receive_as_job(connection)[0]
    except OSError:
        return None
    except messages.Malformed as error:
        raise damage_error(name, str(error)) from None


def damage_error(name: str, how: str) -> FeedError:
    """Return the error for an invalid message from a feeder."""
    return FeedError(f"the feeder of {name!r} sent an invalid message: {how}")
