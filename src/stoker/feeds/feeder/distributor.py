"""The jobs of a feeder: their sessions; who waits for whom, gets which output, and is evicted."""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator

from stoker.feeds import messages
from stoker.feeds.feeder.branch import Branch, Branches
from stoker.feeds.feeder.log import (
    EpochEnd,
    FeedPosition,
    LogReader,
    MemoryBudget,
    PipelineFailed,
    StagedItem,
)

# How long a feeder that replaces another waits for its jobs. A job that is later still gets all its
# outputs, but by a branch of its own until it has caught up. Chosen, not measured.
_REJOIN_S = 1.0
# Messages that a job may leave unreceived beside those in its socket: several times the 16 items
# that it may hold. Chosen, not measured.
_MOST_KEPT = 64


class ClientSession:
    """The connection of a job, from its beginning to its end.

    Attributes:
        pid: the job's process.
        label: the job's command line.
        is_welcome: whether it has got the welcome message.
        is_lost: whether it is gone, or has broken the protocol.
        is_waiting: whether its last request is still open.
        requested: the position that it requested; None for the beginning of any epoch.
        request_id: the id of its last request.
        branch, reader: the branch that it reads and its reader there; None while it reads nothing.
        leases: its items by lease, with the reader to which they were sent.
        last_message_s: the time of its last message.
        blocked_others_s: seconds for which other jobs have waited for it.
    """

    label = ""
    is_welcome = is_lost = is_waiting = False
    requested: FeedPosition | None = None
    branch: Branch | None = None
    reader: LogReader | None = None
    request_id = 0
    blocked_others_s = 0.0

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.since_s = self.last_message_s = time.monotonic()
        self.leases: dict[int, tuple[StagedItem, LogReader]] = {}
        self._unsent: deque[tuple[messages.Message, list[int]]] = deque()

    def receive(self) -> messages.FromJob | None:
        """Return the job's next message, or None; check ``is_lost`` afterwards."""
        try:
            message = messages.receive_as_feeder(self.connection)
        except BlockingIOError:
            return None
        except (OSError, messages.Malformed):
            message = None
        self.is_lost = self.is_lost or message is None
        self.last_message_s = time.monotonic()
        return message

    def send(self, message: messages.Message, descriptors: list[int] | None = None) -> None:
        """Send a message, or keep it until the job has received others.

        A job that is gone is lost, and so is one that asks and asks, and receives nothing.
        """
        self._unsent.append((message, descriptors or []))
        self.send_kept()

    def send_kept(self) -> None:
        """Send what was kept, as far as that is possible now."""
        try:
            while self._unsent:
                messages.send(self.connection, *self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self.is_lost = self.is_lost or len(self._unsent) > _MOST_KEPT
        except OSError:
            self.is_lost = True

    @property
    def keeps_messages(self) -> bool:
        """Whether messages wait until the job has received others."""
        return bool(self._unsent)

    def lend(self, lease: int, item: StagedItem) -> None:
        assert self.reader is not None
        payload = item.payload
        item.leases.add(lease)
        self.leases[lease] = item, self.reader
        message = messages.ItemMessage(
            self.request_id,
            item.epoch,
            item.number,
            item.count,
            lease,
            [block.generation for block in payload.blocks],
            payload.header,
            payload.places,
            self.branch.log.outputs_from(item.end) if self.branch is not None else 0,
        )
        self.send(message, [block.descriptor for block in payload.blocks])

    def close(self) -> None:
        self.connection.close()


class StartBarrier:
    """Delays the first epoch until ``jobs`` jobs have requested it; then ``is_open`` is True.

    Jobs wait at most ``timeout_s`` seconds for the others.
    """

    def __init__(self, jobs: int, timeout_s: float) -> None:
        self.is_open = False
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._since_s: float | None = None

    @property
    def awaited_jobs(self) -> int:
        """How many jobs must request the first epoch; 0 once it has begun."""
        return 0 if self.is_open else self._jobs

    def wait_for_former_jobs(self) -> None:
        """Wait a moment instead, for all jobs that an earlier feeder has served."""
        self._jobs, self._timeout_s = 0, _REJOIN_S

    def record_requests(self, waiting: int) -> None:
        """Record how many jobs request an epoch now; open if no other is awaited."""
        if not waiting:
            self._since_s = None  # a job that had requested one is gone
            return
        if self._since_s is None:
            self._since_s = time.monotonic()
        is_late = time.monotonic() - self._since_s >= self._timeout_s
        self.is_open = self.is_open or is_late or 0 < self._jobs <= waiting

    def deadlines_s(self) -> Iterator[float]:
        """Yield the time at which waiting ends, if a job waits."""
        if not self.is_open and self._since_s is not None:
            yield self._since_s + self._timeout_s


class Distributor:
    """Sends new outputs to the sessions that read them.

    Readers wait ``timeout_s`` seconds for a reader that does not respond. ``rows_made`` counts
    examples.
    """

    def __init__(
        self, branches: Branches, staging: MemoryBudget, barrier: StartBarrier, timeout_s: float
    ) -> None:
        self.rows_made = 0
        self._branches = branches
        self._staging = staging
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._distributed_s = time.monotonic()
        self._freed: list[StagedItem] = []
        self._leases = itertools.count(1)
        self._generations = itertools.count(1)

    def collect(self) -> None:
        """Put new outputs into their logs."""
        for branch, event in self._branches.collect():
            if isinstance(event, StagedItem):
                self._append(branch, event)
            else:
                branch.is_preparing = False
                if isinstance(event, PipelineFailed):
                    branch.log.broken = event
                else:
                    branch.log.end_epoch()

    def distribute(self, sessions: Iterable[ClientSession]) -> None:
        """Do everything that is possible now: evict, assign branches, and send items."""
        self._charge_waits()
        self._evict_silent()
        self._branches.close_unused()
        self._assign_branches(
            [session for session in sessions if session.is_waiting and not session.is_lost]
        )
        for branch in self._branches:
            self._move_to_older_branches(branch)
            self._send_ready(branch)
        if self._branches.close_unused():  # their room is free now: start again
            self.distribute(sessions)
            return
        logs = self._branches.logs
        is_awaited = self._barrier.is_open and any(
            session.is_waiting and not session.is_lost for session in sessions
        )
        for branch in self._branches:
            branch.start_next_epoch()
            room = self._staging.room(logs, branch.log)
            branch.allow(room, self._staging.max_leases, is_awaited=is_awaited)

    def retire(self) -> None:
        """Free the memory of unused items. Called last in a turn, so that no job waits for it."""
        for item in self._freed:
            if item.payload is not None:
                item.payload.retire()
                item.payload = None
        self._freed.clear()

    def leave(self, session: ClientSession) -> None:
        """Stop serving a session; it keeps its leases."""
        session.is_waiting = False
        if session.branch is not None and session.reader is not None:
            self._free(*session.branch.log.leave(session.reader))
        session.branch = session.reader = None

    def release(self, session: ClientSession, lease: int) -> None:
        """End a lease of a session."""
        item, reader = session.leases.pop(lease)
        item.leases.discard(lease)
        if session.branch is not None and session.reader is reader:
            session.branch.log.finish(reader, item)
        self._free(item)

    def drop(self, session: ClientSession) -> None:
        """Stop serving a session, and end all its leases."""
        self.leave(session)
        for lease in list(session.leases):
            self.release(session, lease)

    def eviction_times_s(self) -> Iterator[float]:
        """Yield the times at which silent readers will be evicted."""
        for branch in self._branches:
            silent_s = branch.silent_since_s()
            if silent_s is not None:
                yield silent_s + self._timeout_s

    def _append(self, branch: Branch, item: StagedItem) -> None:
        branch.item_count += 1
        self.rows_made += item.rows
        refusal = self._staging.record_size(item.payload.nbytes)
        if refusal is not None:
            branch.log.broken = PipelineFailed(refusal)
        item.payload.mark(next(self._generations))
        if not branch.log.append(item):
            self._free(item)

    def _charge_waits(self) -> None:
        """Charge the slowest jobs with the time for which others waited."""
        now_s = time.monotonic()
        for branch in self._branches:
            waited_s = branch.waited_s(self._distributed_s, now_s)
            for reader in branch.log.slowest() if waited_s else ():
                reader.owner.blocked_others_s += waited_s
        self._distributed_s = now_s

    def _evict_silent(self) -> None:
        """Evict jobs that did not respond while others waited; their leases stay valid."""
        now_s = time.monotonic()
        for branch in self._branches:
            for reader in branch.log.slowest():
                silent_s = branch.silent_since_s(reader)
                if silent_s is not None and now_s - silent_s >= self._timeout_s:
                    session, has_requested = reader.owner, reader.has_requested
                    self.leave(session)
                    if has_requested:
                        session.send(messages.Evicted(session.request_id))

    def _assign_branches(self, waiting: list[ClientSession]) -> None:
        """Find a branch for each waiting job."""
        self._barrier.record_requests(len(waiting))
        if not self._barrier.is_open:
            return
        for session in sorted(waiting, key=lambda s: (s.requested is None, s.requested or (0, 0))):
            found = self._branches.find(session.requested)
            if found is not None:
                session.is_waiting = False
                self._join(session, *found)
                session.send(messages.Begin(session.request_id, *found[1]))

    def _move_to_older_branches(self, branch: Branch) -> None:
        """Move readers to an older branch that has their next output."""
        for reader in list(branch.log.readers):
            older = self._branches.older(branch, reader) if reader.has_requested else None
            if older is not None:
                self._free(*branch.log.leave(reader))
                self._join(reader.owner, older, reader.position)

    def _join(self, session: ClientSession, branch: Branch, position: tuple[int, int]) -> None:
        session.branch, session.reader = branch, branch.log.join(session, position)

    def _send_ready(self, branch: Branch) -> None:
        for reader in list(branch.log.readers):
            while reader.sent < self._staging.max_leases:
                due = branch.log.next_for(reader)
                if due is None or not self._send_next(branch, reader, due):
                    break

    def _send_next(
        self, branch: Branch, reader: LogReader, due: StagedItem | EpochEnd | PipelineFailed
    ) -> bool:
        """Send a reader what is due; True if it may get more."""
        session: ClientSession = reader.owner
        if isinstance(due, PipelineFailed):
            session.send(messages.Failed(session.request_id, due.reason))
            self.leave(session)
            return False
        branch.log.advance(reader, due)
        if isinstance(due, EpochEnd):
            session.send(messages.End(session.request_id, due.epoch, due.total))
        else:
            session.lend(next(self._leases), due)
        return not session.is_lost

    def _free(self, *items: StagedItem) -> None:
        """Mark items for reuse if no reader still needs them and no job still maps them."""
        self._freed += [item for item in items if not item.pending_readers and not item.leases]
