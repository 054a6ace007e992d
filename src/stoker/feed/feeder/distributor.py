"""Distribution to jobs: each job's branch, its hand-overs, and eviction of silent jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from stoker.feed.feeder.branch import Branch, Branches
from stoker.feed.feeder.log import Broken, EpochEnd, LogReader, StagedItem
from stoker.feed.feeder.memory_budget import MemoryBudget
from stoker.feed.feeder.session import ClientSession
from stoker.feed.feeder.start_barrier import StartBarrier
from stoker.feed.messages import Begin, End, Evicted, Failed


class Distributor:
    """Sends new outputs to the sessions that read them.

    Readers wait ``patience_s`` seconds for one that does not respond. ``rows_made`` counts
    examples.
    """

    def __init__(
        self, branches: Branches, staging: MemoryBudget, barrier: StartBarrier, patience_s: float
    ) -> None:
        self.rows_made = 0
        self._branches = branches
        self._staging = staging
        self._barrier = barrier
        self._patience_s = patience_s
        self._settled_s = time.monotonic()
        self._freed: list[StagedItem] = []
        self._leases = itertools.count(1)
        self._generations = itertools.count(1)

    def take_in(self) -> None:
        """Put a new output into its log."""
        for branch, what in self._branches.take_in():
            if isinstance(what, StagedItem):
                self._append(branch, what)
            else:
                branch.is_making = False
                if isinstance(what, Broken):
                    branch.log.broken = what
                else:
                    branch.log.end_epoch()

    def settle(self, sessions: Iterable[ClientSession]) -> None:
        """Do everything that is possible now: seat, merge, hand over, evict."""
        self._account()
        self._evict_silent()
        self._branches.close_deserted()
        self._seat([session for session in sessions if session.is_waiting and not session.is_lost])
        for branch in self._branches:
            self._merge(branch)
            self._hand_out(branch)
        if self._branches.close_deserted():  # others may have waited for what they were at
            self.settle(sessions)
            return
        logs = self._branches.logs
        for branch in self._branches:
            branch.go_on()
            branch.allow(self._staging.room(logs, branch.log), self._staging.lent)

    def retire(self) -> None:
        """Return freed memory to the system, late: no job should wait for that."""
        for item in self._freed:
            if item.payload is not None:
                item.payload.retire()
                item.payload = None
        self._freed.clear()

    def leave(self, session: ClientSession) -> None:
        """Stop serving a session; its leases stay lent."""
        session.is_waiting = False
        if session.branch is not None and session.reader is not None:
            self._free(*session.branch.log.leave(session.reader))
        session.branch = session.reader = None

    def take_back(self, session: ClientSession, lease: int) -> None:
        """Take back leases that a session has finished with."""
        item, reader = session.lent.pop(lease)
        item.leases.discard(lease)
        if session.branch is not None and session.reader is reader:
            session.branch.log.finish(reader, item)
        self._free(item)

    def forget(self, session: ClientSession) -> None:
        """Stop serving a session, and take back all its leases."""
        self.leave(session)
        for lease in list(session.lent):
            self.take_back(session, lease)

    def patience_ends_s(self) -> Iterator[float]:
        """Yield when readers will have waited too long for others."""
        for branch in self._branches:
            silent_s = branch.silent_since_s()
            if silent_s is not None:
                yield silent_s + self._patience_s

    def _append(self, branch: Branch, item: StagedItem) -> None:
        branch.arrived += 1
        self.rows_made += item.rows
        refusal = self._staging.note_size(item.nbytes)
        if refusal is not None:
            branch.log.broken = Broken(refusal)
        item.payload.mark(next(self._generations))
        if not branch.log.append(item):
            self._free(item)

    def _account(self) -> None:
        """Charge the time that readers waited to the slowest jobs."""
        now_s = time.monotonic()
        for branch in self._branches:
            waited_s = branch.waited_s(self._settled_s, now_s)
            for reader in branch.log.slowest() if waited_s else ():
                reader.owner.held_up_s += waited_s
        self._settled_s = now_s

    def _evict_silent(self) -> None:
        """Evict jobs that others waited for in vain; their leases stay valid."""
        now_s = time.monotonic()
        for branch in self._branches:
            for reader in branch.log.slowest():
                silent_s = branch.silent_since_s(reader)
                if silent_s is not None and now_s - silent_s >= self._patience_s:
                    session, asked = reader.owner, reader.has_asked
                    self.leave(session)
                    if asked:
                        session.send(Evicted(session.turn))

    def _seat(self, waiting: list[ClientSession]) -> None:
        """Find a branch for each job that waits for one."""
        self._barrier.note_asking([session.pid for session in waiting])
        if not self._barrier.is_open:
            return
        failed, self._branches.failed = self._branches.failed, None
        if failed is not None:
            for session in [session for session in waiting if session.want is None]:
                self._fail(session, failed)
        waiting = [session for session in waiting if session.is_waiting]
        for session in sorted(waiting, key=lambda s: (s.want is None, s.want or (0, 0))):
            found = self._branches.find(session.want)
            if found is not None:
                session.is_waiting = False
                self._join(session, *found)
                session.send(Begin(session.turn, *found[1]))
        self._branches.note_seated()

    def _merge(self, branch: Branch) -> None:
        """Move readers to an older branch that has their next output."""
        for reader in list(branch.log.readers):
            older = self._branches.older(branch, reader) if reader.has_asked else None
            if older is not None:
                self._free(*branch.log.leave(reader))
                self._join(reader.owner, older, reader.at)

    def _join(self, session: ClientSession, branch: Branch, at: tuple[int, int]) -> None:
        session.branch, session.reader = branch, branch.log.join(session, at)

    def _hand_out(self, branch: Branch) -> None:
        for reader in list(branch.log.readers):
            while reader.sent < self._staging.lent:
                due = branch.log.due(reader)
                if due is None or not self._hand_over(branch, reader, due):
                    break

    def _hand_over(
        self, branch: Branch, reader: LogReader, due: StagedItem | EpochEnd | Broken
    ) -> bool:
        """Hand over the due items; True if the reader goes on."""
        session: ClientSession = reader.owner
        if isinstance(due, Broken):
            self._fail(session, due)
            return False
        branch.log.hand_over(reader, due)
        if isinstance(due, EpochEnd):
            session.send(End(session.turn, due.epoch, due.total))
        else:
            session.lend(next(self._leases), due)
        return not session.is_lost

    def _fail(self, session: ClientSession, broken: Broken) -> None:
        session.send(Failed(session.turn, broken.reason))
        self.leave(session)

    def _free(self, *items: StagedItem) -> None:
        """Reuse the memory of items that no reader is owed and no job still maps."""
        self._freed += [item for item in items if not item.owed and not item.leases]
