"""A feed of another host as a preparation, which this host's relay serves.

A relay is an ordinary feeder: it serves its jobs through shared memory, by the same rules for
delivery, eviction and restarts. Only its outputs come from another host. Each branch has a
connection, and receives contents straight into shared blocks. Positions are those of the feed, so
the relay forwards a job's request unchanged.

If a connection ends, even in the middle of a frame, the branch connects again and requests its next
output. Another connection, which the relay holds all the time, shows whether the feed still exists.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import resources
from stoker.basics.future import start_thread
from stoker.errors import FeedError
from stoker.feed.feeder.log import FeedPosition
from stoker.feed.feeder.preparation import FeedSpec, Output
from stoker.feed.messages import (
    Begin,
    End,
    EpochRequest,
    Failed,
    Malformed,
    Refused,
    Welcome,
    clip_text,
)
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import ItemTaken, Join, RelaySourceEnd, RemoteItem
from stoker.feed.relay.url import FeedUrl
from stoker.feed.token import find_token
from stoker.transport.codec.decoder import RecordView
from stoker.transport.link import LinkError, LinkRefused
from stoker.transport.shared_memory import Blocks

# How long a feed may take to start. Chosen, not measured.
_START_S = 10.0
# How long a lost feed may take to come back: one of its jobs may restart it. Chosen, not measured.
_RECONNECT_S = 10.0
# The wait between two tries to connect: short beside the start of a feeder, long beside a failed
# try. Chosen, not measured.
_RETRY_S = 0.1
# Connections in a row that may end with damaged messages: one may be the network's fault, five are
# a defect or another version. Chosen, not measured.
_MAX_DAMAGED = 5
# How long closing waits for a thread. A user would wait so long without an explanation. Chosen, not
# measured.
_JOIN_S = 5.0
_CONNECTION_ERRORS = (EOFError, OSError, Malformed)
Continues = tuple[int, list[str]]


class RelayPreparation:
    """A feed of another host. Raises FeedError or TokenError if the relay cannot join it.

    Attributes:
        target: the pipeline that the feed serves.
        is_closed: whether ``close`` was called.
    """

    start = None

    def __init__(
        self, url: FeedUrl, continues: Continues | None = None, *, insecure: bool = False
    ) -> None:
        self._url = url
        self._insecure = insecure
        self._continues = continues
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.is_closed = False
        self._end, welcome = self._connect_within(_START_S)
        self._continues = welcome.seed, welcome.signature
        self.target = welcome.target
        self.about = FeedSpec(
            welcome.batched, welcome.length, welcome.is_repeatable, welcome.signature
        )
        self._watch_thread: threading.Thread | None = None

    @property
    def seed(self) -> int:
        assert self._continues is not None
        return self._continues[0]

    def with_seed(self, seed: int) -> RelayPreparation:
        """Close this preparation; return one that joins the feed with another seed."""
        self.close()
        return RelayPreparation(self._url, (seed, self.about.signature), insecure=self._insecure)

    def outputs(self, blocks: Blocks) -> RemoteOutputs:
        return RemoteOutputs(self, blocks)

    def watch(self, lost: Callable[[], None]) -> None:
        self._watch_thread = start_thread("stoker-feed-watch", self._watch, lost)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._changed.notify()
            self._end.close()
        if self._watch_thread is not None:
            self._watch_thread.join(_JOIN_S)

    def connect(self) -> RelaySourceEnd:
        """Join the feed as one more job. Raises LinkError, EOFError, Malformed; FeedError if
        refused."""
        return self._connect()[0]

    def __str__(self) -> str:
        return str(self._url)

    def _connect(self) -> tuple[RelaySourceEnd, Welcome]:
        end = protocol.connect(self._url.address, find_token(), insecure=self._insecure)
        seed, signature = self._continues or (None, [])
        label = clip_text(f"relay on {socket.gethostname()}", 100)
        try:
            end.send(Join(protocol.VERSION, self._url.name, label, seed, signature))
            answer, _ = end.receive()
        except BaseException:
            end.close()
            raise
        if isinstance(answer, Welcome):
            return end, answer
        end.close()
        if isinstance(answer, Refused):
            raise FeedError(f"{self._url}: {answer.reason}")
        raise Malformed(f"the feed sent {type(answer).__name__} instead of Welcome")

    def _connect_within(self, patience_s: float) -> tuple[RelaySourceEnd, Welcome]:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                return self._connect()
            except LinkRefused as error:
                raise FeedError(f"cannot join {self._url}: {error}") from error
            except _CONNECTION_ERRORS as error:
                if self.is_closed or time.monotonic() > until_s:
                    raise FeedError(
                        f"there is no feed {self._url}: {error}. Start it there: stoker feed "
                        f"FILE.py:FUNCTION --name {self._url.name} --listen {self._url.address}"
                    ) from error
            with self._lock:
                self._changed.wait_for(lambda: self.is_closed, _RETRY_S)

    def _watch(self, lost: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(*_CONNECTION_ERRORS):
                self._end.receive()  # blocks until the connection ends: no epoch was requested
            self._end.close()
            try:
                end, _ = self._connect_within(_RECONNECT_S)
            except Exception:  # the jobs connect again, and get the error themselves
                if not self.is_closed:
                    lost()
                return
            with self._lock:
                self._end = end
                if self.is_closed:
                    end.close()
                    return


class RemoteOutputs:
    """The outputs of another host's feed, from any position on. For the feed it is one job.

    A thread receives items, at most ``max_leases`` ahead.
    """

    def __init__(self, feed: RelayPreparation, blocks: Blocks) -> None:
        self._feed = feed
        self._blocks = blocks
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._end: RelaySourceEnd | None = None
        # Messages with their contents; an exception if the connection has ended.
        self._received: deque[Any] = deque()
        self._position: FeedPosition | None = None
        self._turn = 0
        self._damaged_count = 0
        self._largest_seen_bytes = 0  # smaller items need no check of the free memory

    def begin(self, position: FeedPosition | None) -> FeedPosition:
        self._position = position
        return self._request_epoch()

    def next(self) -> Output | None:
        while True:
            try:
                message, contents = self._next_message()
                if isinstance(message, RemoteItem):
                    return self._take(message, contents)
                if isinstance(message, End):
                    if (message.epoch, message.total) != self._position:
                        raise Malformed("the epoch ends at another position")
                    return None
                if isinstance(message, Failed):
                    raise FeedError(message.reason)
                raise Malformed(f"the feed sent {type(message).__name__} in an epoch")
            except _CONNECTION_ERRORS as error:
                self._drop_connection(error)
            self._request_epoch()

    def interrupt(self) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify()
            if self._end is not None:
                self._end.close()

    def close(self) -> None:
        self.interrupt()
        self._received.clear()

    def _take(self, item: RemoteItem, contents: NDArray[np.uint8]) -> Output:
        is_one = not self._feed.about.batched or item.count == 1
        if (item.epoch, item.number) != self._position or not is_one:
            raise Malformed(
                f"the feed sent {item.number} of epoch {item.epoch}, but {self._position} was next"
            )
        assert self._end is not None
        self._damaged_count = 0
        self._position = item.epoch, item.number + item.count
        with contextlib.suppress(LinkError):  # the next `_next_message` reports it
            self._end.send(ItemTaken())
        return Output(RecordView(item.head, contents), item.count, item.rows)

    def _request_epoch(self) -> FeedPosition:
        """Request the next output until an epoch begins; return its position. Raises FeedError."""
        while True:
            try:
                end = self._end or self._connect()
                self._turn += 1
                end.send(EpochRequest(self._turn, *(self._position or (None, 0))))
                message, _ = self._next_message()
                if isinstance(message, Failed):
                    raise FeedError(message.reason)
                if not isinstance(message, Begin):
                    raise Malformed(f"the feed sent {type(message).__name__} instead of Begin")
                start = message.epoch, message.number
                if self._position not in (None, start):
                    raise FeedError(
                        f"{self._feed} begins at {start}, and cannot make {self._position}"
                    )
                self._position = start
                return start
            except _CONNECTION_ERRORS as error:
                self._drop_connection(error)

    def _connect(self) -> RelaySourceEnd:
        end = self._feed.connect()
        received: deque[Any] = deque()
        self._received = received
        with self._lock:
            self._end = end
            if self._is_closed:
                end.close()
        start_thread("stoker-feed-receive", self._receive, end, received)
        return end

    def _drop_connection(self, error: Exception) -> None:
        """Close the connection after an error, and pause. Raises FeedError if the feed is lost."""
        if self._end is not None:
            self._end.close()
        with self._lock:
            self._end = None
            self._changed.wait_for(lambda: self._is_closed, _RETRY_S)
            if self._is_closed or self._feed.is_closed:
                raise FeedError(f"the relay of {self._feed} is closed")
        if isinstance(error, Malformed):
            self._damaged_count += 1
            if self._damaged_count > _MAX_DAMAGED:
                raise FeedError(f"{self._feed} sends damaged messages: {error}") from error

    def _next_message(self) -> tuple[Any, NDArray[np.uint8]]:
        """Return the next message. Raises the error that ended the connection."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or self._received)
            if self._is_closed:
                raise LinkError("closed")
            message_or_error = self._received.popleft()
        if isinstance(message_or_error, BaseException):
            raise message_or_error
        message, contents = message_or_error
        if isinstance(message, (Begin, End, Failed)) and message.request_id != self._turn:
            raise Malformed("the feed replied to another request")
        return message, contents

    def _receive(self, end: RelaySourceEnd, received: deque[Any]) -> None:
        """Receive from a connection until it ends; runs in its own thread."""
        while True:
            message_or_error: Any
            try:
                message_or_error = end.receive(self._allocate)
            except BaseException as error:
                message_or_error = error
            with self._lock:
                received.append(message_or_error)
                self._changed.notify()
            if isinstance(message_or_error, BaseException):
                return

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        """Return shared memory for the contents of an item."""
        if size > self._largest_seen_bytes:
            usable = resources.usable_memory_bytes()
            if size > usable:
                raise FeedError(
                    f"an item of {resources.format_bytes(size)} does not fit into memory: the "
                    f"relay can use {resources.format_bytes(usable)}"
                )
            self._largest_seen_bytes = size
        try:
            return self._blocks.scratch(size)[:size]
        except OSError as error:
            raise FeedError(f"there is no memory for an item of {size:,} bytes: {error}") from error
