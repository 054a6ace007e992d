"""A job's session in the feeder: its connection, its last request, and its leases."""

from __future__ import annotations

import os
import socket
import time

from stoker.feed import messages
from stoker.feed.feeder.branch import Branch
from stoker.feed.feeder.log import FeedPosition, LogReader, StagedItem
from stoker.feed.messages import FromJob, ItemMessage, Malformed, Message


class ClientSession:
    """The connection of a job, from its beginning to its end.

    Attributes:
        pid: the job's process.
        pidfd: readable once the process has ended; -1 if the kernel has no pidfd.
        label: the job's command line.
        is_welcome: whether it has got the welcome message.
        is_lost: whether it is gone, or has broken the protocol.
        is_waiting: whether its last request is still open.
        requested: the position that it requested; None for the beginning of any epoch.
        request_id: the id of its last request.
        branch, reader: the branch that it reads and its reader there; None while it reads nothing.
        leases: its items by lease, with the reader to which they were sent.
        last_message_s: the time of its last message.
        wait_ns: nanoseconds for which it has waited for the feed, by its own count.
        rows: examples that it has received.
        blocked_others_s: seconds for which other jobs have waited for it.
    """

    label = ""
    is_welcome = is_lost = is_waiting = False
    requested: FeedPosition | None = None
    branch: Branch | None = None
    reader: LogReader | None = None
    request_id = wait_ns = rows = 0
    blocked_others_s = 0.0

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self.pidfd = -1
        self.since_s = self.last_message_s = time.monotonic()
        self.leases: dict[int, tuple[StagedItem, LogReader]] = {}

    def receive(self) -> FromJob | None:
        """Return the job's next message, or None; check ``is_lost`` afterwards."""
        try:
            message = messages.receive_as_feeder(self.connection)
        except BlockingIOError:
            return None
        except (OSError, Malformed):
            message = None
        self.is_lost = self.is_lost or message is None
        self.last_message_s = time.monotonic()
        return message

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        """Send a message; a job that cannot receive it is lost."""
        try:
            messages.send(self.connection, message, descriptors or [])
        except OSError:
            self.is_lost = True

    def lend(self, lease: int, item: StagedItem) -> None:
        assert self.reader is not None
        payload = item.payload
        item.leases.add(lease)
        self.leases[lease] = item, self.reader
        self.rows += item.rows
        message = ItemMessage(
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
        if self.pidfd >= 0:
            os.close(self.pidfd)
