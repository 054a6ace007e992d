"""The feeder: it prepares each output of one pipeline once and sends it to all its jobs.

One thread, here, talks to the jobs and decides; each branch has a thread that prepares its outputs.
All threads block while there is nothing to do.

Each hand-over to a job is a lease. It ends with ``Done``, with the connection, or with the process
(pidfd). Leases outlive membership: a job that left or was evicted keeps its memory.

Patience: if a branch has no room, a reader waits, and the slowest readers have sent nothing for too
long, they receive ``Evicted``. They ask again, from their positions.

A job can end only its own connection by a wrong message: the schema bounds messages (``messages``),
so every decoded message can be answered.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from stoker.adapters.entrypoint import make_pipeline
from stoker.basics import process, resources
from stoker.errors import FeedError, StokerError
from stoker.feed import messages
from stoker.feed.feeder.branch import Branches
from stoker.feed.feeder.distributor import Distributor
from stoker.feed.feeder.local_preparation import LocalPreparation
from stoker.feed.feeder.memory_budget import MemoryBudget
from stoker.feed.feeder.preparation import Preparation
from stoker.feed.feeder.session import ClientSession
from stoker.feed.feeder.start_barrier import StartBarrier
from stoker.feed.messages import (
    Ask,
    Begin,
    Done,
    Failed,
    FromJob,
    Hello,
    Leave,
    Malformed,
    Peers,
    Refused,
    Welcome,
)
from stoker.feed.relay.server import RelayServer
from stoker.feed.relay.source import RelayPreparation
from stoker.feed.relay.url import FeedUrl, is_url
from stoker.feed.settings import FeedSettings
from stoker.transport.shared_memory import Blocks

# Messages of one job, before others have their turn: a job has few under way, unless it is hostile.
_HEARD_AT_ONCE = 64
# Then a feeder that a job has started ends: the job itself was killed.
_NOBODY_CAME_S = 30.0
# Jobs that connected while the target was loaded are told why; later ones start a feeder anew.
_REFUSING_S = 1.0
# Others wait meanwhile: a job sends its greeting at once.
_TURNING_AWAY_S = 0.5


class FeedServer:
    """Serves one preparation to any number of jobs, which connect at ``listener``.

    Attributes:
        sessions: the jobs that are connected.
        about: the description of the pipeline that jobs receive.
        blocks: all shared memory.
        branches: the outputs that are being prepared.

    Raises FeedError or ValueError where it cannot listen, or for too little memory.
    """

    def __init__(
        self, listener: socket.socket, prepared: Preparation, settings: FeedSettings
    ) -> None:
        self.name = settings.name
        self.target = messages.plain(settings.target)
        self._settings = settings
        self.sessions: list[ClientSession] = []
        self.blocks = Blocks()
        self.about = prepared.about
        self.staging = MemoryBudget(settings.staging, self.about.batched)
        self._listener = listener
        self._began_s = time.monotonic()
        self._has_greeted = self._is_stopped = False
        self._spare = _spare()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._barrier = StartBarrier(settings.jobs, settings.patience_s, self._selector)
        self._serve_from(prepared)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        listener.setblocking(False)
        process.close_in_children(listener)
        self._gateway = (
            RelayServer(settings.listen, self.name, insecure=settings.insecure)
            if settings.listen
            else None
        )

    def _serve_from(self, prepared: Preparation) -> None:
        self._prepared = prepared
        self.branches = Branches(prepared, self.blocks, self.staging, self._wake)
        patience_s = self._settings.patience_s
        self._distributor = Distributor(self.branches, self.staging, self._barrier, patience_s)
        prepared.watch(self.stop)

    @property
    def seed(self) -> int:
        return self._prepared.seed

    @property
    def address(self) -> str:
        """``host:port`` for other hosts; empty if it serves this host only."""
        return self._gateway.address if self._gateway is not None else ""

    @property
    def rows_made(self) -> int:
        return self._distributor.rows_made

    # -- the loop

    def serve(self, tick: Callable[[], None] | None = None, every_s: float = 0.25) -> None:
        """Serve until the last job is gone, if one has started this; else until interrupted.

        ``tick`` is called about every ``every_s`` seconds.
        """
        next_tick_s = time.monotonic()
        while not self._is_over():
            wait_s = self._patience_left_s()
            if tick is not None:
                tick_s = max(0.0, next_tick_s - time.monotonic())
                wait_s = tick_s if wait_s is None else min(wait_s, tick_s)
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._distributor.take_in()
            self._settle()
            self._distributor.retire()
            if tick is not None and time.monotonic() >= next_tick_s:
                tick()
                next_tick_s = time.monotonic() + every_s

    def stop(self) -> None:
        """Make ``serve`` return; may be called from any thread."""
        self._is_stopped = True
        with contextlib.suppress(OSError):  # it is closed already
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End: jobs notice by the end of their connections."""
        if self._gateway is not None:
            self._gateway.close()
        self._prepared.close()
        self._barrier.close()
        self._selector.close()
        self._listener.close()
        for session in self.sessions:
            session.close()
        self.branches.close()
        os.close(self._wake)
        os.close(self._spare)
        self.blocks.clear()

    def _is_over(self) -> bool:
        if self._is_stopped or not self._settings.autostarted or self.sessions:
            return self._is_stopped
        return self._has_greeted or time.monotonic() - self._began_s > _NOBODY_CAME_S

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _settle(self) -> None:
        self._drop_lost()
        self._distributor.settle(self.sessions)
        while self._drop_lost():  # others may have waited for them
            self._distributor.settle(self.sessions)

    def _patience_left_s(self) -> float | None:
        """Return the seconds until the patience with a job ends; None while no job waits."""
        ends_s = [*self._distributor.patience_ends_s(), *self._barrier.ends_s()]
        if self._settings.autostarted and not self.sessions:
            ends_s.append(self._began_s + _NOBODY_CAME_S)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    # -- who comes and goes

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if resources.lacks_descriptors(error):
                self._turn_away()
            return
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            pid, user = messages.peer_of(connection)
            if user != os.getuid():
                connection.close()
                return
            process.close_in_children(connection)
            session = ClientSession(connection, pid)
            self.sessions.append(session)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(session))
            if session.pidfd >= 0:
                self._selector.register(
                    session.pidfd, selectors.EVENT_READ, lambda: self._drop(session)
                )

    def _turn_away(self) -> None:
        """Refuse a job when the feeder can serve no more: it would wait for ever."""
        os.close(self._spare)
        try:
            _refuse_one(self._listener, resources.no_descriptors(), _TURNING_AWAY_S)
        finally:
            self._spare = _spare()

    def _drop(self, session: ClientSession) -> None:
        """Forget a job, its reader and its leases."""
        if session not in self.sessions:
            return
        session.is_lost = True
        self.sessions.remove(session)
        self._distributor.forget(session)
        self._selector.unregister(session.connection)
        if session.pidfd >= 0:
            self._selector.unregister(session.pidfd)
        session.close()
        self._tell_peers()

    def _drop_lost(self) -> bool:
        """Drop the jobs that are gone; True if there were any."""
        lost = [session for session in self.sessions if session.is_lost]
        for session in lost:
            self._drop(session)
        return bool(lost)

    def _hear(self, session: ClientSession) -> None:
        """Handle a job's message; an invalid one ends its connection."""
        for _ in range(_HEARD_AT_ONCE):
            message = None if session.is_lost else session.receive()
            if message is None:
                break
            try:
                self._answer(session, message)
            except Malformed:
                session.is_lost = True
        if session.is_lost:
            self._drop(session)

    def _answer(self, session: ClientSession, message: FromJob) -> None:
        if isinstance(message, Hello) != (not session.is_welcome):
            raise Malformed("Hello comes first, and once")
        if isinstance(message, Hello):
            self._greet(session, message)
        elif isinstance(message, Done):
            session.wait_ns = message.wait_ns
            for lease in message.leases:
                if lease not in session.lent:
                    raise Malformed("done with what it was not lent")
                self._distributor.take_back(session, lease)
        elif isinstance(message, Leave):
            self._distributor.leave(session)
        else:
            self._ask(session, message)

    def _greet(self, session: ClientSession, hello: Hello) -> None:
        reason = self._mismatch(hello)
        if reason is not None:
            session.send(Refused(messages.plain(reason)))
            session.is_lost = True
            return
        session.label = "".join(c if c.isprintable() else "?" for c in hello.label)
        session.is_welcome = True
        self._has_greeted = True
        if self._settings.autostarted and hello.outline:  # then those who were served before count
            self._barrier.wait_for({*hello.peers} - {session.pid})
        session.send(
            Welcome(
                self.name,
                self.target,
                self.about.batched,
                self.about.length,
                self.seed,
                self.about.outline,
                self.about.again,
                self._settings.autostarted,
                self.staging.lent,
                os.getpid(),
                self._barrier.awaited_jobs,
                self.address,
            ),
        )

    def _mismatch(self, hello: Hello) -> str | None:
        """Return why a job cannot be served, or None; take over the seed of its previous feeder."""
        if hello.version != messages.VERSION:
            return "the job runs another version of stoker than the feeder"
        if hello.target and hello.target != self.target:
            return f"the feed {self.name!r} serves {self.target}, not {hello.target}"
        if hello.outline and hello.outline != self.about.outline:
            return "the feeder was started again with another pipeline"
        if hello.seed is not None and hello.seed != self.seed:
            if len(self.branches):
                return "the feeder was started again with another seed"
            try:
                self._serve_from(self._prepared.with_seed(hello.seed))
            except FeedError as error:
                return str(error)
        return None

    def _tell_peers(self) -> None:
        if self._settings.autostarted:
            pids = [session.pid for session in self.sessions if session.has_asked]
            for session in self.sessions:
                if session.is_welcome:
                    session.send(Peers(pids))

    def _ask(self, session: ClientSession, ask: Ask) -> None:
        """Begin the epoch that a job asks for, or let the job wait."""
        reader = session.reader
        at = None if ask.epoch is None else (ask.epoch, ask.number)
        if self.about.length is not None and ask.number > self.about.length:
            raise Malformed("no such position")
        session.turn = ask.turn
        if reader is not None and not reader.has_asked and at in (None, reader.at):
            reader.has_asked = True
            session.send(Begin(session.turn, *reader.at))
            return
        self._distributor.leave(session)
        if not self.about.again and at is not None:
            if ask.number:
                reason = f"{self._prepared}: its batches cannot be made again"
                session.send(Failed(session.turn, reason))
                return
            at = None
        session.is_waiting, session.want = True, at
        if not session.has_asked:
            session.has_asked = True
            self._tell_peers()


def open_server(listener: socket.socket, settings: FeedSettings) -> FeedServer:
    """Make the pipeline of a feed's target, or find the feed of another host; open its server.

    If that fails, it closes the listener and tells connected jobs why.

    Raises FeedError, other StokerErrors, ValueError or TypeError when it cannot be served.
    """
    try:
        if not is_url(settings.target):
            pipeline = make_pipeline(settings.target)
            return FeedServer(listener, LocalPreparation(pipeline), settings)
        elsewhere = RelayPreparation(FeedUrl.of(settings.target))
        return FeedServer(listener, elsewhere, replace(settings, target=elsewhere.target))
    except (StokerError, TypeError, ValueError) as error:
        _refuse(listener, str(error))
        raise
    except BaseException:
        listener.close()
        raise


def _refuse(listener: socket.socket, reason: str) -> None:
    """Tell all connected jobs, and those that connect shortly, why there is no feed."""
    until_s = time.monotonic() + _REFUSING_S
    with contextlib.closing(listener):
        while (left_s := until_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            _refuse_one(listener, reason, left_s)


def _refuse_one(listener: socket.socket, reason: str, patience_s: float) -> None:
    with contextlib.suppress(OSError, Malformed):
        connection, _ = listener.accept()
        with connection:  # what is not read before the end would hide what is said
            connection.settimeout(patience_s)
            messages.receive_as_feeder(connection)
            messages.send(connection, Refused(messages.plain(reason)))


def _spare() -> int:
    """Open a spare descriptor; it is given up for a job that connects when none is left."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
