"""The feeder: makes the outputs of one pipeline once, and hands them to all jobs that ask.

One thread talks to the jobs and decides; each lane has a thread that makes its outputs. All of them
block where there is nothing to do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.chain import Chain
from stoker.errors import FeedError
from stoker.feed import fork_safety, messages
from stoker.feed.lines import Line, Lines
from stoker.feed.log import At, Broken, EpochEnd, Member, StagedItem
from stoker.feed.messages import (
    Ask,
    Begin,
    Done,
    End,
    Evicted,
    Failed,
    FromJob,
    Hello,
    ItemMessage,
    Leave,
    Malformed,
    Peers,
    Refused,
    Welcome,
)
from stoker.feed.producer import Made
from stoker.feed.served import Served, check_servable
from stoker.feed.staging import Staging
from stoker.feed.start_barrier import StartBarrier
from stoker.ipc.blocks import Blocks
from stoker.pipeline import Pipeline

_JOIN_S = 5.0
_HEARD_AT_ONCE = 64  # messages of one job, before others have their turn
_NEVER_SEATED_S = 30.0  # a founded feeder that nobody comes to ends


@dataclass(eq=False)
class ClientSession:
    """A job, seen from the feeder.

    Attributes:
        welcome, served: whether it was greeted; whether it has ever asked for an epoch.
        want: the position that it waits to be handed, None for any epoch's beginning.
        waits: whether it does.
        turn: of what it asked for last.
        lent: its hand-overs, by lease, with the membership that they belong to.
        heard_s: when it last said anything.
        wait_ns: how long it has waited for the feed, as it says.
        outputs, rows: what it was handed.
        held_up_s: for how long it alone kept the others waiting.
    """

    connection: socket.socket
    pid: int
    heard_s: float
    since_s: float = field(default_factory=time.monotonic)
    pidfd: int = -1
    label: str = ""
    welcome: bool = False
    served: bool = False
    waits: bool = False
    want: At | None = None
    turn: int = 0
    line: Line | None = None
    member: Member | None = None
    lent: dict[int, tuple[StagedItem, Member]] = field(default_factory=dict)
    wait_ns: int = 0
    rows: int = 0
    held_up_s: float = 0.0


class FeedServer:
    """Serves one pipeline to any number of jobs.

    Args:
        listener: where jobs connect.
        pipeline: what is served.
        name, target: of the feed.
        staging: how many items may stand in shared memory; with a string, how many bytes.
        jobs: how many to wait for before the first epoch begins.
        patience_s: how long the others wait for a job that says nothing.
        founded: whether to end with the last job.

    Raises FeedError or ValueError for a pipeline that cannot be served, or too little memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        pipeline: Pipeline,
        *,
        name: str,
        target: str,
        staging: int | str | None,
        jobs: int,
        patience_s: float,
        founded: bool,
    ) -> None:
        if pipeline.seed >= 1 << 64:
            raise FeedError(f"a feed's seed is below 2**64, not {pipeline.seed}")
        self.name = name
        self.target = messages.plain(target)
        self.patience_s = patience_s
        self.jobs: list[ClientSession] = []
        self.blocks = Blocks()
        self.about = Served.of(pipeline.chain)
        self.staging = Staging(staging, self.about.batched)
        self.rows_made = 0
        self._listener = listener
        self._founded = founded
        self._began_s = self._settled_s = time.monotonic()
        self._greeted = False
        self._freed: list[StagedItem] = []
        self._leases = itertools.count(1)
        self._generations = itertools.count(1)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._serve_from(check_servable(pipeline.chain, None))
        self._selector = selectors.DefaultSelector()
        self._gathering = StartBarrier(jobs, patience_s, self._selector)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        listener.setblocking(False)
        fork_safety.add(listener)

    def _serve_from(self, chain: Chain) -> None:
        self._chain = chain
        self.lines = Lines(chain, self.about, self.blocks, self.staging, self._wake)

    @property
    def seed(self) -> int:
        """The seed of the pipeline."""
        return self._chain.seed

    # -- the loop

    def serve(self, tick: Callable[[], None] | None = None, every_s: float = 0.25) -> None:
        """Serve until the last job of a founded feed is gone; others until they are interrupted.

        Args:
            tick: called about every ``every_s`` seconds.
        """
        next_tick_s = time.monotonic()
        while not self._over():
            wait_s = self._patience_left_s()
            if tick is not None:
                tick_s = max(0.0, next_tick_s - time.monotonic())
                wait_s = tick_s if wait_s is None else min(wait_s, tick_s)
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._take_in()
            self._settle()
            self._retire()
            if tick is not None and time.monotonic() >= next_tick_s:
                tick()
                next_tick_s = time.monotonic() + every_s

    def close(self) -> None:
        """End: jobs are told by the end of their connections."""
        self._gathering.close()
        self._selector.close()
        self._listener.close()
        for job in list(self.jobs):
            job.connection.close()
            if job.pidfd >= 0:
                os.close(job.pidfd)
        self.lines.close(_JOIN_S)
        os.close(self._wake)
        self.blocks.clear()

    def _over(self) -> bool:
        if not self._founded or self.jobs:
            return False
        return self._greeted or time.monotonic() - self._began_s > _NEVER_SEATED_S

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _take_in(self) -> None:
        """Put what was made into its lane."""
        while self.lines.arrivals:
            line, what = self.lines.arrivals.popleft()
            lane = line.lane
            if line not in self.lines:
                if isinstance(what, Made):
                    what.parcel.retire()
            elif what is None:
                lane.end_epoch()
                line.making = False
            elif isinstance(what, Made):
                line.arrived += 1
                self.rows_made += what.rows
                refusal = self.staging.take_note(what.parcel.nbytes)
                if refusal is not None:
                    lane.broken = Broken(refusal)
                what.parcel.mark(next(self._generations))
                item = StagedItem(
                    *lane.made, what.count, what.rows, what.parcel.nbytes, what.parcel
                )
                if not lane.add(item):
                    self._free(item)
            else:
                lane.broken = Broken(_described(what))
                line.making = False

    def _settle(self) -> None:
        """Do all that can be done now."""
        self._account()
        self._lose_patience()
        self.lines.close_deserted()
        self._seat()
        for line in self.lines:
            self._merge(line)
            self._hand_out(line)
        if self.lines.close_deserted():  # others may have waited for what they were at
            self._settle()
            return
        lanes = self.lines.lanes
        for line in self.lines:
            line.go_on()
            line.allow(self.staging.room(lanes, line.lane), self.staging.lent)

    def _account(self) -> None:
        """Put it down to the slowest jobs that others have waited for them."""
        now = time.monotonic()
        for line in self.lines:
            if line.blocked_since_s is not None:
                for member in line.lane.slowest():
                    member.owner.held_up_s += now - max(self._settled_s, line.blocked_since_s)
        self._settled_s = now

    # -- who comes and goes

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            pid, user = messages.peer_of(connection)
            if user != os.getuid():
                connection.close()
                return
            fork_safety.add(connection)
            job = ClientSession(connection, pid, time.monotonic())
            self.jobs.append(job)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(job))
            with contextlib.suppress(OSError):
                job.pidfd = os.pidfd_open(pid)
                self._selector.register(job.pidfd, selectors.EVENT_READ, lambda: self._drop(job))

    def _drop(self, job: ClientSession) -> None:
        """Forget a job, and all that it is owed and holds."""
        if job not in self.jobs:
            return
        self.jobs.remove(job)
        self._leave(job)
        for lease, (item, _) in job.lent.items():
            item.lent.discard(lease)
            self._free(item)
        job.lent.clear()
        self._selector.unregister(job.connection)
        job.connection.close()
        if job.pidfd >= 0:
            self._selector.unregister(job.pidfd)
            os.close(job.pidfd)
        self._tell_peers()

    def _hear(self, job: ClientSession) -> None:
        """Take what a job says; what is no message, or makes no sense, ends its connection."""
        try:
            for _ in range(_HEARD_AT_ONCE):
                if job not in self.jobs:
                    return
                message = messages.receive_as_feeder(job.connection)
                if message is None:
                    self._drop(job)
                    return
                job.heard_s = time.monotonic()
                self._answer(job, message)
        except BlockingIOError:
            pass
        except (OSError, Malformed):
            self._drop(job)

    def _answer(self, job: ClientSession, message: FromJob) -> None:
        if isinstance(message, Hello) != (not job.welcome):
            raise Malformed("Hello comes first, and once")
        if isinstance(message, Hello):
            self._greet(job, message)
        elif isinstance(message, Done):
            job.wait_ns = message.wait_ns
            for lease in message.leases:
                if lease not in job.lent:
                    raise Malformed("done with what it was not lent")
                self._done(job, lease)
        elif isinstance(message, Leave):
            self._leave(job)
        else:
            self._ask(job, message)

    def _greet(self, job: ClientSession, hello: Hello) -> None:
        reason = self._mismatch(hello)
        if reason is not None:
            self._send(job, Refused(messages.plain(reason)))
            self._drop(job)
            return
        job.label = "".join(c if c.isprintable() else "?" for c in hello.label)
        job.welcome = True
        self._greeted = True
        if self._founded and hello.outline:  # then those who were served before count
            self._gathering.again({*hello.peers} - {job.pid})
        self._send(
            job,
            Welcome(
                self.name,
                self.target,
                self.about.batched,
                self.about.length,
                self.seed,
                self.about.outline,
                self.about.again,
                self._founded,
                self.staging.lent,
                os.getpid(),
                self._gathering.awaits,
            ),
        )

    def _mismatch(self, hello: Hello) -> str | None:
        """Return why a job cannot be served; take over the seed of the feed it had before."""
        if hello.version != messages.VERSION:
            return "the job runs another version of stoker than the feeder"
        if hello.target and hello.target != self.target:
            return f"the feed {self.name!r} serves {self.target}, not {hello.target}"
        if hello.outline and hello.outline != self.about.outline:
            return "the feeder was started again with another pipeline"
        if hello.seed is not None and hello.seed != self.seed:
            if len(self.lines):
                return "the feeder was started again with another seed"
            try:
                self._serve_from(check_servable(self._chain, hello.seed))
            except FeedError as error:
                return str(error)
        return None

    def _tell_peers(self) -> None:
        if self._founded:
            pids = [job.pid for job in self.jobs if job.served]
            for job in list(self.jobs):
                if job.welcome:
                    self._send(job, Peers(pids))

    def _ask(self, job: ClientSession, ask: Ask) -> None:
        member = job.member
        at = None if ask.epoch is None else (ask.epoch, ask.number)
        if self.about.length is not None and ask.number > self.about.length:
            raise Malformed("no such position")
        job.turn = ask.turn
        if member is not None and not member.asked and at in (None, member.at):
            member.asked = True
            self._send(job, Begin(job.turn, *member.at))
            return
        self._leave(job)
        if not self.about.again and at is not None:
            if ask.number:
                self._send(
                    job,
                    Failed(
                        job.turn,
                        f"<stoker.Pipeline {self._chain}>: its batches cannot be made again",
                    ),
                )
                return
            at = None
        job.waits, job.want = True, at
        if not job.served:
            job.served = True
            self._tell_peers()

    def _leave(self, job: ClientSession) -> None:
        """Owe a job nothing more; what it was lent stays lent."""
        job.waits = False
        if job.line is not None and job.member is not None:
            for item in job.line.lane.leave(job.member):
                self._free(item)
        job.line = job.member = None

    # -- who is served from where

    def _seat(self) -> None:
        """Find a lane for each job that waits for one."""
        waiting = [job for job in self.jobs if job.waits]
        if self._gathering.goes_on([job.pid for job in waiting]):
            return
        waiting.sort(key=lambda job: (job.want is None, job.want or (0, 0)))
        for job in waiting:
            if not job.waits:  # it went while others were told something
                continue
            found = self.lines.place_for(job.want)
            if found is not None:
                line, at = found
                job.waits = False
                job.line, job.member = line, line.lane.join(job, at)
                self._send(job, Begin(job.turn, *at))

    def _merge(self, line: Line) -> None:
        """Move members to an older line that has what they need next."""
        for member in list(line.lane.members):
            other = self.lines.older(line, member) if member.asked else None
            if other is not None:
                job = member.owner
                for item in line.lane.leave(member):
                    self._free(item)
                job.line, job.member = other, other.lane.join(job, member.at)

    # -- handing over

    def _hand_out(self, line: Line) -> None:
        for member in list(line.lane.members):
            while member in line.lane.members and member.sent < self.staging.lent:
                due = line.lane.due(member)
                if due is None:
                    break
                job = member.owner
                if isinstance(due, Broken):
                    self._send(job, Failed(job.turn, due.reason))
                    self._leave(job)
                elif isinstance(due, EpochEnd):
                    line.lane.hand_over(member, due)
                    self._send(job, End(job.turn, due.epoch, due.total))
                else:
                    line.lane.hand_over(member, due)
                    self._lend(job, member, due)

    def _lend(self, job: ClientSession, member: Member, item: StagedItem) -> None:
        parcel = item.cargo
        lease = next(self._leases)
        item.lent.add(lease)
        job.lent[lease] = item, member
        job.rows += item.rows
        message = ItemMessage(
            job.turn,
            item.epoch,
            item.number,
            item.count,
            lease,
            [block.generation for block in parcel.blocks],
            parcel.outline,
            parcel.outline_at,
            parcel.places,
        )
        self._send(job, message, [block.descriptor for block in parcel.blocks])

    def _done(self, job: ClientSession, lease: int) -> None:
        item, member = job.lent.pop(lease)
        item.lent.discard(lease)
        if job.line is not None and job.member is member:
            job.line.lane.done(member, item)
        self._free(item)

    def _free(self, item: StagedItem) -> None:
        """Let the memory of an item be used again, once nobody is owed it or looks at it."""
        if not item.owed and not item.lent:
            self._freed.append(item)

    def _retire(self) -> None:
        """Give back the memory of what was freed: it takes time that nobody should wait for."""
        for item in self._freed:
            if item.cargo is not None:
                item.cargo.retire()
                item.cargo = None
        self._freed.clear()

    def _send(self, job: ClientSession, message: Any, descriptors: list[int] | None = None) -> None:
        """Send; a job that does not take it is gone, or does not keep to what was agreed."""
        try:
            messages.send(job.connection, message, descriptors or [])
        except OSError:
            self._drop(job)

    # -- patience

    def _patience_left_s(self) -> float | None:
        """Return when somebody will have been waited for too long; None while nobody waits."""
        ends_s = [line.silent_since_s() + self.patience_s for line in self.lines if line.stuck]
        if (gathered_s := self._gathering.ends_s()) is not None:
            ends_s.append(gathered_s)
        if self._founded and not self.jobs:
            ends_s.append(self._began_s + _NEVER_SEATED_S)
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def _lose_patience(self) -> None:
        """Go on without jobs that others waited for in vain; what they hold stays theirs."""
        now = time.monotonic()
        for line in self.lines:
            for member in line.lane.slowest() if line.stuck else ():
                if now - line.silent_since_s(member) >= self.patience_s:
                    job, asked = member.owner, member.asked
                    self._leave(job)
                    if asked:
                        self._send(job, Evicted(job.turn))


def _described(error: BaseException) -> str:
    return messages.plain(f"{type(error).__name__}: {error}")
