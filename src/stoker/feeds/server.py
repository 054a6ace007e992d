"""The feeder: it prepares each output of one pipeline once, and sends it to all its jobs.

One thread, which runs this module, talks to the jobs and makes all decisions. Each branch has a
thread that prepares its outputs. All threads block while there is nothing to do.

A job gets each item with a lease, which ends with ``Release`` or with the connection, which the
kernel ends with the process. A job that leaves or is evicted keeps its leases, and so its memory.

Eviction: if a branch is full, a reader waits, and the slowest readers have sent nothing for
``timeout_s``, they receive ``Evicted``. They may request their positions again.

An invalid message ends only the connection of the job that sent it. The schema bounds messages
(``messages``), so every decoded message has a reply.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from stoker.adapters.entrypoint import make_pipeline
from stoker.basics import process, resources
from stoker.chain.chain import Chain
from stoker.errors import FeedError, StokerError
from stoker.feeds import messages
from stoker.feeds.feeder.branch import Branches
from stoker.feeds.feeder.distributor import ClientSession, Distributor, StartBarrier
from stoker.feeds.feeder.log import MemoryBudget
from stoker.feeds.feeder.preparation import check_servable, describe, reseeded
from stoker.feeds.local_feeds import FEEDER_VARIABLE, FeedSettings
from stoker.feeds.remote import listen_for_hosts
from stoker.feeds.shared_memory import Blocks
from stoker.pipeline import Pipeline

SWITCH_S = 0.0005
"""The interpreter's switch interval in feeders, a tenth of Python's default: messages to jobs must
not wait long for threads that prepare. Chosen, not measured."""
# Messages of one job before other jobs have their turn. A job has a few on the way, unless it is
# hostile. Chosen, not measured.
_MAX_MESSAGES_IN_TURN = 64
# How long a feeder that a job has started waits for its first job. After that it ends: the job was
# killed. Chosen, not measured.
_FIRST_JOB_S = 30.0
# The longest wait for a deadline: timeout_s= may be infinite, which no system call takes.
_MOST_WAIT_S = 3600.0
# How long a feeder that cannot start tells jobs why. Later jobs start another feeder. Chosen, not
# measured.
_REFUSING_S = 1.0
# How long to wait for the greeting of a job that is refused: jobs send it at once, and other jobs
# wait meanwhile. Chosen, not measured.
_REFUSE_ONE_S = 0.5


class FeedServer:
    """Serves the outputs of one pipeline to any number of jobs, which connect to ``listener``.

    Attributes:
        sessions: the connected jobs.
        about: the description of the pipeline that jobs receive.
        blocks: all shared memory.
        branches: the outputs that are being prepared.

    ``token`` is the secret of connections from other hosts; by default it is the user's own.

    Raises FeedError or ValueError if it cannot listen, or if there is too little memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        pipeline: Pipeline[Any],
        settings: FeedSettings,
        token: bytes | None = None,
    ) -> None:
        self.name = settings.name
        self.target = messages.clip_text(settings.target)
        self._settings = settings
        self.sessions: list[ClientSession] = []
        self.blocks = Blocks()
        check_servable(pipeline.chain)
        self.about = describe(pipeline.chain)
        self.staging = MemoryBudget(settings.staging, self.about.batched)
        self._listener = listener
        self._began_s = time.monotonic()
        self._has_welcomed = False
        self._spare_descriptor = _spare_descriptor()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._barrier = StartBarrier(settings.jobs, settings.timeout_s)
        self._use_chain(pipeline.chain)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain_wake)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        listener.setblocking(False)
        process.close_in_children(listener)
        self._remote_listener = (
            listen_for_hosts(settings.listen, self.name, token, insecure=settings.insecure)
            if settings.listen
            else None
        )

    def _use_chain(self, chain: Chain) -> None:
        self._chain = chain
        self.branches = Branches(chain, self.about, self.blocks, self.staging, self._wake)
        timeout_s = self._settings.timeout_s
        self._distributor = Distributor(self.branches, self.staging, self._barrier, timeout_s)

    @property
    def seed(self) -> int:
        return self._chain.seed

    @property
    def address(self) -> str:
        """``host:port`` for other hosts; empty if it serves this host only."""
        return self._remote_listener.address if self._remote_listener is not None else ""

    @property
    def rows_made(self) -> int:
        return self._distributor.rows_made

    # -- the loop

    def serve(self, tick: Callable[[], None] | None = None, every_s: float = 0.25) -> None:
        """Serve until the last job is gone if a job started this feeder, else until interrupted.

        ``tick`` is called about every ``every_s`` seconds.
        """
        next_tick_s = time.monotonic()
        while not self._has_ended():
            wait_s = self._select_timeout_s()
            if tick is not None:
                wait_s = min(wait_s, max(0.0, next_tick_s - time.monotonic()))
            self._watch_sockets()
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._distributor.collect()
            self._distribute()
            self._distributor.retire()
            if tick is not None and time.monotonic() >= next_tick_s:
                tick()
                next_tick_s = time.monotonic() + every_s

    def close(self) -> None:
        """Close all connections; jobs notice that."""
        if self._remote_listener is not None:
            self._remote_listener.close()
        self._selector.close()
        self._listener.close()
        for session in self.sessions:
            session.close()
        self.branches.close()
        os.close(self._wake)
        os.close(self._spare_descriptor)
        self.blocks.clear()

    def _has_ended(self) -> bool:
        if not self._settings.autostarted or self.sessions:
            return False
        return self._has_welcomed or time.monotonic() - self._began_s > _FIRST_JOB_S

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _distribute(self) -> None:
        self._drop_lost()
        self._distributor.distribute(self.sessions)
        while self._drop_lost():  # sending may find more lost jobs, for which others waited
            self._distributor.distribute(self.sessions)

    def _select_timeout_s(self) -> float:
        """Return the seconds until the next deadline, or until it is time to look again."""
        deadlines_s = [*self._distributor.eviction_times_s(), *self._barrier.deadlines_s()]
        if self._settings.autostarted and not self.sessions:
            deadlines_s.append(self._began_s + _FIRST_JOB_S)
        now_s = time.monotonic()
        return max(0.0, min([*deadlines_s, now_s + _MOST_WAIT_S]) - now_s)

    # -- jobs that connect and leave

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if resources.lacks_descriptors(error):
                self._refuse_without_descriptors()
            return
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            pid, user = messages.peer_credentials(connection)
            if user != os.getuid():
                connection.close()
                return
            process.close_in_children(connection)
            session = ClientSession(connection, pid)
            self.sessions.append(session)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda: self._serve_session(session)
            )

    def _refuse_without_descriptors(self) -> None:
        """Refuse a job when the feeder has no descriptor for it: the job would wait for ever."""
        os.close(self._spare_descriptor)
        try:
            _refuse_one(self._listener, resources.no_descriptors(), _REFUSE_ONE_S)
        finally:
            self._spare_descriptor = _spare_descriptor()

    def _drop(self, session: ClientSession) -> None:
        """Remove a job, its reader and its leases."""
        if session not in self.sessions:
            return
        session.is_lost = True
        self.sessions.remove(session)
        self._distributor.drop(session)
        self._selector.unregister(session.connection)
        session.close()

    def _drop_lost(self) -> bool:
        """Drop the jobs that are gone; True if there were any."""
        lost = [session for session in self.sessions if session.is_lost]
        for session in lost:
            self._drop(session)
        return bool(lost)

    def _serve_session(self, session: ClientSession) -> None:
        session.send_kept()
        self._receive_messages(session)

    def _watch_sockets(self) -> None:
        """Have the selector tell where kept messages can be sent."""
        for session in self.sessions:
            key = self._selector.get_key(session.connection)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * session.keeps_messages
            if key.events != events:
                self._selector.modify(session.connection, events, key.data)

    def _receive_messages(self, session: ClientSession) -> None:
        """Handle a job's messages; an invalid one ends its connection."""
        for _ in range(_MAX_MESSAGES_IN_TURN):
            message = None if session.is_lost else session.receive()
            if message is None:
                break
            try:
                self._handle(session, message)
            except messages.Malformed:
                session.is_lost = True
        if session.is_lost:
            self._drop(session)

    def _handle(self, session: ClientSession, message: messages.FromJob) -> None:
        if isinstance(message, messages.Hello) != (not session.is_welcome):
            raise messages.Malformed("Hello must come first, and only once")
        if isinstance(message, messages.Hello):
            self._greet(session, message)
        elif isinstance(message, messages.Release):
            for lease in message.leases:
                if lease not in session.leases:
                    raise messages.Malformed("it releases a lease that it does not have")
                self._distributor.release(session, lease)
        elif isinstance(message, messages.Leave):
            self._distributor.leave(session)
        else:
            self._handle_request(session, message)

    def _greet(self, session: ClientSession, hello: messages.Hello) -> None:
        reason = self._mismatch(hello)
        if reason is not None:
            session.send(messages.Refused(messages.clip_text(reason)))
            session.is_lost = True
            return
        session.label = "".join(c if c.isprintable() else "?" for c in hello.label)
        session.is_welcome = True
        self._has_welcomed = True
        if self._settings.autostarted and hello.signature:  # an earlier feeder served this job
            self._barrier.wait_for_former_jobs()
        session.send(
            messages.Welcome(
                self.about.batched,
                self.about.length,
                self.seed,
                self.about.signature,
                self.about.is_repeatable,
                self.staging.max_leases,
                os.getpid(),
                self._barrier.awaited_jobs,
            ),
        )

    def _mismatch(self, hello: messages.Hello) -> str | None:
        """Return why a job cannot be served, or None. Adopt the seed of its previous feeder."""
        if hello.version != messages.VERSION:
            return "the job runs another version of stoker than the feeder"
        if hello.target and hello.target != self.target:
            return f"the feed {self.name!r} serves {self.target}, not {hello.target}"
        if hello.name and hello.name != self.name:
            return f"there is no feed {hello.name!r} at this address: its feed is {self.name!r}"
        if hello.signature and hello.signature != self.about.signature:
            return "the feeder was restarted with another pipeline: restart this job"
        if hello.seed is not None and hello.seed != self.seed:
            if len(self.branches):
                return "the feeder was restarted with another seed: restart this job"
            try:
                self._use_chain(reseeded(self._chain, hello.seed))
            except FeedError as error:
                return str(error)
        return None

    def _handle_request(self, session: ClientSession, request: messages.EpochRequest) -> None:
        """Begin the epoch that a job requests, or let the job wait."""
        reader = session.reader
        position = None if request.epoch is None else (request.epoch, request.number)
        if self.about.length is not None and request.number > self.about.length:
            raise messages.Malformed("it requests a position behind the end of an epoch")
        session.request_id = request.request_id
        if reader is not None and not reader.has_requested and position in (None, reader.position):
            reader.has_requested = True
            session.send(messages.Begin(session.request_id, *reader.position))
            return
        self._distributor.leave(session)
        if not self.about.is_repeatable and position is not None:
            if request.number:
                reason = (
                    f"{self._chain.source.name} cannot prepare its batches again, so a job cannot "
                    "resume in the middle of an epoch"
                )
                session.send(messages.Failed(session.request_id, reason))
                return
            position = None
        session.is_waiting, session.requested = True, position


def open_server(
    listener: socket.socket, settings: FeedSettings, token: bytes | None = None
) -> FeedServer:
    """Build a target's pipeline, and open the server for it.

    If that fails, close the listener, and tell connected jobs why.

    Raises FeedError, another StokerError, ImportError, ValueError or TypeError if the target cannot
    be served.
    """
    try:
        return FeedServer(listener, make_pipeline(settings.target), settings, token)
    except (ImportError, StokerError, TypeError, ValueError) as error:
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


def _refuse_one(listener: socket.socket, reason: str, timeout_s: float) -> None:
    with contextlib.suppress(OSError, messages.Malformed):
        connection, _ = listener.accept()
        with connection:
            # Read the greeting first: closing a socket with unread data would discard the refusal.
            connection.settimeout(timeout_s)
            messages.receive_as_feeder(connection)
            messages.send(connection, messages.Refused(messages.clip_text(reason)))


def _spare_descriptor() -> int:
    """Open a descriptor that can be closed to accept, and refuse, a job when none is left."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def main(descriptor: int, text: str) -> NoReturn:
    """Serve on a listening socket until the last job is gone."""
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    settings = FeedSettings(**json.loads(text))
    become_feeder(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the feeder is closed, too
    try:
        feeder = open_server(listener, settings)
        with contextlib.closing(feeder):
            feeder.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        end_what_is_kept()
        os._exit(0)  # a thread of the user's may never end


def become_feeder(settings: FeedSettings) -> None:
    """Have this process import modules as the job does, and not be taken for a job."""
    os.environ[FEEDER_VARIABLE] = str(os.getpid())
    sys.path[:] = settings.path
    sys.argv = [settings.target.rpartition(":")[0]]
    sys.setswitchinterval(SWITCH_S)


def end_what_is_kept() -> None:
    """End the pipeline's processes, and close its caches: `os._exit` runs no finalizers."""
    if (starting := sys.modules.get("stoker.engine.workers.processes.starting")) is not None:
        starting.end_kept()
    if (caching := sys.modules.get("stoker.cache.handles")) is not None:
        caching.HANDLES.close_all()
