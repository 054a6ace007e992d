"""A job's end of a feed: what it is handed, what it holds, and where it is.

A job is handed batches in the memory that the feeder made them in, mapped privately. It is done
with one when nothing refers to its arrays any more. What it still refers to when it asks for the
batch after the next becomes its own memory then, by a copy.
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
from collections.abc import Callable, Iterator
from typing import Any

from stoker.errors import FeedError, StateError
from stoker.feed import messages
from stoker.feed.messages import (
    Ask,
    Begin,
    Done,
    End,
    Evicted,
    Failed,
    Hello,
    ItemMessage,
    Leave,
    Malformed,
    Peers,
    Refused,
    Welcome,
)
from stoker.ipc import payload

_ATTEMPTS = 3
_SAY_MS = 2000  # so long a job waits for others before it says so

Connect = Callable[[], socket.socket | None]


class FeedClient:
    """A connection to a feed, as its source: one epoch at a time is iterated.

    Args:
        name: of the feed.
        connect: connects to it; None where it is not there.
        target: what it must serve, empty for anything.
        founds: whether ``connect`` starts a feeder where there is none, so that a lost one is
            replaced.

    Raises FeedError when there is no feed, or it refuses.
    """

    def __init__(self, name: str, connect: Connect, *, target: str, founds: bool) -> None:
        self.name = name
        self._connect = connect
        self._target = target
        self._founds = founds
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a finaliser may come in between
        self._finished: deque[int] = deque()  # leases to be given back
        self._lent: dict[int, _Lease] = {}
        self._wait_ns = 0
        self._peers: list[int] = []
        self._descriptors: list[int] = []  # that came with the last item
        self._turn = 0
        self.passing = False  # whether an epoch was begun and has not ended
        self._pass: weakref.ref[Pass] | None = None
        self._welcome: Welcome | None = None
        self._gathers = 0  # how many jobs are waited for, while that is to be said
        self.at: tuple[int, int] | None = None  # what comes next; None for any epoch
        self._connection = self._met()
        assert self._welcome is not None
        self.about: Welcome = self._welcome

    def __iter__(self) -> Pass:
        """Begin the next epoch, or go on at a state that was loaded."""
        before = self._pass() if self._pass is not None else None
        if before is not None:
            before.close()
        if not self.is_own:
            self._begin_in_child()
        made = Pass(self)
        self._pass = weakref.ref(made)
        return made

    def __len__(self) -> int:
        """Return the outputs of an epoch; TypeError where only its end tells."""
        if self.about.length is None:
            raise TypeError(f"the feed {self.name!r} does not know the length of its epochs")
        return self.about.length

    def state_dict(self) -> dict[str, Any]:
        """Return where this job is: the feed's epoch, and what comes next in it."""
        epoch, number = (None, 0) if self.at is None else self.at
        if epoch is not None and number and number == self.about.length:
            epoch, number = epoch + 1, 0  # that was the last
        return {
            "feed": self.name,
            "seed": self.about.seed,
            "outline": self.about.outline,
            "epoch": epoch,
            "number": number,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a job was. What it missed is made again for it.

        Raises StateError when the feed serves something else, or cannot make it again.
        """
        if not isinstance(state, dict) or not {"seed", "outline", "epoch", "number"} <= set(state):
            raise StateError("this is no state of a job that a feed served")
        epoch, number = state["epoch"], state["number"]
        if state["outline"] != self.about.outline:
            raise StateError(f"the feed {self.name!r} serves another pipeline than the state's")
        most = messages.LARGEST if self.about.length is None else self.about.length
        if not _is_whole(number, most) or not (epoch is None or _is_whole(epoch, messages.LARGEST)):
            raise StateError(f"the feed {self.name!r} has no output {number!r} of epoch {epoch!r}")
        if epoch is None:
            self.at = None
            return
        if state["seed"] != self.about.seed:
            raise StateError(
                f"the feed {self.name!r} has seed {self.about.seed}, the state has "
                f"{state['seed']}: give the source a seed= to resume"
            )
        if not self.about.again and number:
            raise StateError(
                f"the feed {self.name!r} cannot make again what a loader or a stream gave: save "
                "between epochs"
            )
        self.at = epoch, number

    def close(self) -> None:
        """Leave the feed for good."""
        self._connection.close()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # -- what passes do

    def ask(self, interrupt: int | None) -> int:
        """Ask for what comes next, and wait until it begins; return its epoch."""
        self.passing = False
        message: Any = None
        try:
            while not isinstance(message, Begin):
                if message is None or isinstance(message, Evicted):
                    self._turn += 1
                    self._say(Ask(self._turn, *(self.at or (None, 0))))
                elif isinstance(message, Failed):
                    raise FeedError(message.reason)
                else:
                    raise self.damaged(f"{type(message).__name__} where an epoch was to begin")
                message = self.next_message(interrupt)
        except BaseException:  # nobody shall wait for who does not wait any more
            self._say(Leave())
            raise
        self._gathers = 0
        began = message.epoch, message.number
        if self.about.again and self.at not in (None, began):
            raise self.damaged(f"it begins at {began}, not at {self.at}")
        self.at = began
        self.passing = True
        return int(message.epoch)

    def _say_who_is_awaited(self) -> None:
        """Say once, on stderr, why nothing comes: the feed waits for other jobs."""
        if len(self._peers) < self._gathers:
            print(
                f"stoker: the feed {self.name!r} waits for {self._gathers} jobs before its first "
                "epoch: start the others, or ask for fewer (jobs=, --jobs). It begins without "
                "them once its patience is over",
                file=sys.stderr,
            )
        self._gathers = 0

    @property
    def is_own(self) -> bool:
        """Whether this process is the one that is served, and no forked child of it."""
        return os.getpid() == self._owner

    def leave(self) -> None:
        """Leave an epoch early: what comes next is the one after it."""
        if self.passing and self.at is not None:
            self.passing = False
            self.at = self.at[0] + 1, 0
            self._say(Leave())

    def next_message(self, interrupt: int | None) -> Any:
        """Return what the feeder says next; None from another feeder, which must be asked anew.

        Raises FeedError when the feeder is gone and nobody starts another one, or says what makes
        no sense.
        """
        while True:
            began = time.perf_counter_ns()
            try:
                message, descriptors = self._received(interrupt)
            except OSError:
                message, descriptors = None, []
            except Malformed as error:
                raise self.damaged(str(error)) from None
            finally:
                self._wait_ns += time.perf_counter_ns() - began
            if message is None:
                self._meet_again()
                return None
            self._descriptors += descriptors
            if isinstance(message, Peers):
                self._peers = message.pids
            elif isinstance(message, (Welcome, Refused)) or message.turn > self._turn:
                raise self.damaged(f"{type(message).__name__} that nothing asked for")
            elif message.turn == self._turn:
                return message
            elif isinstance(message, ItemMessage):  # of an epoch that was left
                self._drop()
                self._finished.append(message.lease)
                self.give_back()

    def take(self, item: ItemMessage) -> Any:
        """Return the value of the item that came last.

        Raises Stale if it came too late; FeedError when it is damaged, or needs a class that is not
        there.
        """
        memories = []
        try:
            for mark in item.marks:
                memories.append(payload.mapped(self._descriptors.pop(0), mark))
            value = payload.opened(item.outline, item.outline_at, item.places, memories)
            if not self.about.batched and (type(value) is not list or len(value) != item.count):
                raise ValueError(f"not the {item.count} examples that were announced")
        except BaseException as error:
            self._finished.append(item.lease)
            self.give_back()
            if isinstance(error, (FeedError, payload.Stale)) or not isinstance(error, Exception):
                raise
            raise self.damaged(f"{type(error).__name__}: {error}") from error
        finally:
            self._drop()
        if memories:
            self._lent[item.lease] = _Lease(self, item, memories)
        else:
            self._finished.append(item.lease)
            self.give_back()
        return value

    def damaged(self, how: str) -> FeedError:
        """Have no more to do with this feeder; return what to raise."""
        self._drop()
        self._connection.close()
        return FeedError(f"what the feeder of {self.name!r} sent is damaged: {how}")

    def _drop(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def settle(self) -> None:
        """Before asking for more: make one's own what would keep the feeder waiting.

        Raises FeedError when something was overwritten that could be seen here.
        """
        while len(self._lent) >= self.about.lent:
            with self._lock:
                oldest = self._lent.get(min(self._lent, default=0))
            if oldest is not None:
                oldest.keep()
        self.give_back()

    def give_back(self) -> None:
        """Tell the feeder what this job is done with. Called from finalisers, too."""
        while self._finished and self._lock.acquire(blocking=False):
            try:
                leases: list[int] = []
                with contextlib.suppress(IndexError):
                    while len(leases) < messages.MOST_LEASES:
                        leases.append(self._finished.popleft())
                try:
                    messages.send(self._connection, Done(leases, self._wait_ns))
                except BlockingIOError:
                    self._finished.extend(leases)  # with the next message
                    return
                except OSError:
                    pass  # the next message finds it out
            finally:
                self._lock.release()

    def _say(self, message: Any) -> None:
        """Send a message; that the feeder is gone is found out by who waits for an answer."""
        with self._lock, contextlib.suppress(OSError):
            while True:
                try:
                    return messages.send(self._connection, message)
                except BlockingIOError:
                    select.select([], [self._connection], [])

    def returned(self, lease: int) -> None:
        """Take note that nothing refers to a hand-over any more."""
        if not self.is_own:
            return  # a forked child: the hand-over is its parent's, who may hold the lock
        with self._lock:
            known = self._lent.pop(lease, None)
        if known is not None:
            self._finished.append(lease)
            self.give_back()

    # -- connecting

    def _received(self, interrupt: int | None) -> tuple[Any, list[int]]:
        try:
            return messages.receive_as_job(self._connection)
        except BlockingIOError:
            pass
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if interrupt is not None:
            poll.register(interrupt, select.POLLIN)
        while True:
            ready = [number for number, _ in poll.poll(_SAY_MS if self._gathers > 1 else None)]
            if not ready:
                self._say_who_is_awaited()
            if interrupt is not None and interrupt in ready:
                raise Interrupted
            with contextlib.suppress(BlockingIOError):
                return messages.receive_as_job(self._connection)

    def _met(self) -> socket.socket:
        """Connect, and exchange greetings."""
        for _ in range(_ATTEMPTS):
            connection = self._connect()
            if connection is None:
                raise FeedError(
                    f"there is no feed {self.name!r} on this host: start it with stoker feed "
                    f"FILE.py:FUNCTION --name {self.name}, or take stoker.share()"
                )
            known = self._welcome
            label = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
            hello = Hello(
                messages.VERSION,
                messages.plain(label, messages.LABEL_CHARACTERS),
                messages.plain(self._target),
                known.seed if known and self._founds else None,
                known.outline if known and self._founds else [],
                self._peers[: messages.MOST_PEERS],
            )
            try:
                messages.send(connection, hello)
                answer, _ = messages.receive_as_job(connection)
            except OSError:
                answer = None
            except Malformed as error:
                connection.close()
                raise FeedError(
                    f"what the feeder of {self.name!r} sent is damaged: {error}"
                ) from None
            except BaseException:
                connection.close()
                raise
            if isinstance(answer, Welcome):
                connection.setblocking(False)
                self._welcome = answer
                self._gathers = answer.gathers
                return connection
            connection.close()
            if isinstance(answer, Refused):
                raise FeedError(answer.reason)
        raise FeedError(
            f"the feeder of {self.name!r} ends before it serves anybody: stoker feed "
            f"{self._target or 'FILE.py:FUNCTION'} --name {self.name} shows why"
        )

    def _meet_again(self) -> None:
        """Find another feeder, and go on at the same position."""
        self._connection.close()
        self._finished.clear()
        for lease in self._lent.values():
            lease.forget()
        self._lent.clear()
        if not self._founds:
            where = "" if self.at is None else f" (epoch {self.at[0]}, {self.at[1]} handed out)"
            raise FeedError(
                f"the feeder of {self.name!r} has ended{where}. Start it again, and go on from "
                "the last state_dict()"
            )
        self._connection = self._met()

    def _begin_in_child(self) -> None:
        """After a fork the connection is the parent's: have one of one's own."""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._lent.clear()
        self._finished.clear()
        self.at = None
        self._connection = self._met()


class Interrupted(Exception):
    """Who waited for the feeder shall wait no more."""


class _Lease:
    """What a job holds of the feeder's memory by one hand-over."""

    def __init__(self, job: FeedClient, item: ItemMessage, memories: list[mmap.mmap]) -> None:
        self._job = weakref.ref(job)
        self._number = item.lease
        self._left = len(memories)
        self._memories = [
            (weakref.ref(memory, self._one_less), mark)
            for memory, mark in zip(memories, item.marks, strict=True)
        ]

    def keep(self) -> None:
        """Make what is still referred to this process's own, and give the lease back.

        Raises FeedError when it was overwritten meanwhile, which the feeder must not do.
        """
        try:
            for reference, mark in self._memories:
                memory = reference()
                if memory is not None:
                    payload.keep(memory)
                    payload.check(memory, mark)
        except payload.Stale:
            raise FeedError("a batch was overwritten while this job held it") from None
        self.forget()
        job = self._job()
        if job is not None:
            job.returned(self._number)

    def forget(self) -> None:
        """Let what is held go without notice: it stays valid as long as it is referred to."""
        self._memories = []

    def _one_less(self, _: Any) -> None:
        self._left -= 1
        job = self._job()
        if self._left <= 0 and job is not None:
            job.returned(self._number)


class Pass(Iterator[Any]):
    """An epoch of a feed, or what is left of it. ``close()`` leaves it early.

    Attributes:
        epoch: of the feed, once it has begun.
    """

    epoch: int | None = None

    def __init__(self, job: FeedClient) -> None:
        self._job = job
        self._began = False
        self._ready: deque[Any] = deque()  # examples of the item that came last
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._finish = weakref.finalize(self, _left, job, self._wake_read, self._wake_write)

    def __next__(self) -> Any:
        if not self._finish.alive:
            raise StopIteration
        job = self._job
        try:
            if not self._began:
                self.epoch = job.ask(self._wake_read)
                self._began = True
            assert job.at is not None
            if not self._ready:
                self._take_next()
            job.at = job.at[0], job.at[1] + 1
            return self._ready.popleft()
        except Interrupted:
            raise StopIteration from None

    def _take_next(self) -> None:
        """Wait for what comes next. Raises StopIteration at the end of the epoch."""
        job = self._job
        while not self._ready:
            job.settle()
            message = job.next_message(self._wake_read)
            assert job.at is not None
            epoch, number = job.at
            if message is None or isinstance(message, Evicted):
                job.ask(self._wake_read)
            elif isinstance(message, ItemMessage):
                skipped = number - message.number
                one = not job.about.batched or message.count == 1
                if message.epoch != epoch or not 0 <= skipped < message.count or not one:
                    raise job.damaged(
                        f"{message.count} from {message.number} of epoch {message.epoch} on, where "
                        f"{number} of epoch {epoch} was due"
                    )
                try:
                    value = job.take(message)
                except payload.Stale:  # have it made again
                    job.ask(self._wake_read)
                else:
                    self._ready.extend([value] if job.about.batched else value[skipped:])
            elif isinstance(message, Begin):
                raise job.damaged("an epoch begins in the middle of another")
            elif isinstance(message, End) and (message.epoch != epoch or message.total > number):
                raise job.damaged(
                    f"epoch {message.epoch} ends at {message.total}, where {number} of epoch "
                    f"{epoch} was due"
                )
            elif isinstance(message, (End, Failed)):
                job.at, job.passing = (epoch + 1, 0), False
                self.close()
                if isinstance(message, Failed):
                    raise FeedError(message.reason)
                raise StopIteration

    def interrupt(self) -> None:
        """Have who waits in ``next()``, in another thread, wait no more."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Leave the epoch. What was handed out stays valid as long as it is referred to."""
        self._finish()


def _is_whole(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def _left(job: FeedClient, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    if job.is_own:
        job.leave()
