"""A job, as the feeder sees it: its connection, what it asked for, and what it was lent."""

from __future__ import annotations

import os
import socket
import time

from stoker.feed import messages
from stoker.feed.feeder.branch import Branch
from stoker.feed.feeder.log import At, LogReader, StagedItem
from stoker.feed.messages import FromJob, ItemMessage, Malformed, Message


class ClientSession:
    """The connection of a job, from its beginning to its end.

    Attributes:
        pid: the job's process.
        pidfd: readable once that has ended; -1 where the kernel has none.
        label: its command line.
        is_welcome: whether it was greeted.
        has_asked: whether it has ever asked for an epoch.
        is_lost: whether it is gone, or does not keep to what was agreed.
        is_waiting: whether it waits to be handed what it asked for last.
        want: the position that it waits for, None for any epoch's beginning.
        turn: of what it asked for last.
        branch, reader: what it reads, and as whom; None while it reads nothing.
        lent: its hand-overs, by lease, with the reader that they were due to.
        heard_s: when it last said anything.
        wait_ns: how long it has waited for the feed, as it says.
        rows: examples that it was handed.
        held_up_s: for how long others have waited for it.
    """

    label = ""
    is_welcome = has_asked = is_lost = is_waiting = False
    want: At | None = None
    branch: Branch | None = None
    reader: LogReader | None = None
    turn = wait_ns = rows = 0
    held_up_s = 0.0

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1
        self.since_s = self.heard_s = time.monotonic()
        self.lent: dict[int, tuple[StagedItem, LogReader]] = {}

    def receive(self) -> FromJob | None:
        """Return what the job says next, None while that is nothing; it may be lost then."""
        try:
            message = messages.receive_as_feeder(self.connection)
        except BlockingIOError:
            return None
        except (OSError, Malformed):
            message = None
        self.is_lost = self.is_lost or message is None
        self.heard_s = time.monotonic()
        return message

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        """Tell the job something; one that does not take it is lost."""
        try:
            messages.send(self.connection, message, descriptors or [])
        except OSError:
            self.is_lost = True

    def lend(self, lease: int, item: StagedItem) -> None:
        assert self.reader is not None
        payload = item.payload
        item.leases.add(lease)
        self.lent[lease] = item, self.reader
        self.rows += item.rows
        message = ItemMessage(
            self.turn,
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
        if self.pidfd >= 0:
            os.close(self.pidfd)
