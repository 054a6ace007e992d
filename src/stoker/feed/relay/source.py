"""A feed of another host as a preparation: the relay on this host serves it.

A relay is an ordinary feeder: it serves its jobs through shared memory, and the rules for what jobs
are owed, how long it waits for them and how they continue after a kill are the feeder's. Only its
outputs come from another host: each branch has a connection, and receives contents straight into
shared blocks. Positions are the feed's, so the relay forwards a job's request unchanged.

When a connection ends, in the middle of a frame or not, the branch connects again and asks for its
next output. One place decides whether the feed still exists: a separate connection that the relay
holds from beginning to end.
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
from stoker.errors import FeedError
from stoker.feed.feeder.log import At
from stoker.feed.feeder.preparation import Output, Served
from stoker.feed.messages import Ask, Begin, End, Failed, Malformed, Refused, Welcome, plain
from stoker.feed.relay import protocol
from stoker.feed.relay.protocol import Join, RelaySourceEnd, RemoteItem, Taken
from stoker.feed.relay.url import FeedUrl
from stoker.feed.token import find_token
from stoker.transport.codec import RecordView
from stoker.transport.link import LinkError, LinkRefused
from stoker.transport.shared_memory import Blocks

# How long a feed may take until it is there.
_STARTING_S = 10.0
# And until it is back, started again by one of its jobs perhaps.
_LOST_S = 10.0
# Short beside a feeder's start, long beside a connection that fails.
_AGAIN_S = 0.1
# Connections in turn that may end by damaged messages: one is a network's fault, so many are a
# version's.
_DAMAGED = 5
# As long as a user waits without a word for a thread that ends.
_JOIN_S = 5.0
_GONE = (EOFError, OSError, Malformed)
GoesOnFor = tuple[int, list[str]]


class RelayPreparation:
    """A feed of another host. Raises FeedError or TokenError where it cannot be joined.

    Attributes:
        target: the pipeline that the feed serves.
        is_closed: whether ``close`` was called.
    """

    start = None

    def __init__(self, url: FeedUrl, goes_on_for: GoesOnFor | None = None) -> None:
        self._url = url
        self._goes_on_for = goes_on_for
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.is_closed = False
        self._end, welcome = self._connect_within(_STARTING_S)
        self._goes_on_for = welcome.seed, welcome.outline
        self.target = welcome.target
        self.about = Served(welcome.batched, welcome.length, welcome.again, welcome.outline)
        self._watching: threading.Thread | None = None

    @property
    def seed(self) -> int:
        assert self._goes_on_for is not None
        return self._goes_on_for[0]

    def with_seed(self, seed: int) -> RelayPreparation:
        """Ask the feed to continue with another seed; return the replacement."""
        self.close()
        return RelayPreparation(self._url, (seed, self.about.outline))

    def outputs(self, blocks: Blocks) -> RemoteOutputs:
        return RemoteOutputs(self, blocks)

    def watch(self, lost: Callable[[], None]) -> None:
        self._watching = threading.Thread(
            target=self._watch, args=(lost,), name="stoker-feed-watch", daemon=True
        )
        self._watching.start()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._changed.notify()
            self._end.close()
        if self._watching is not None:
            self._watching.join(_JOIN_S)

    def connect(self) -> RelaySourceEnd:
        """Join as one more job. Raises LinkError, EOFError or Malformed; FeedError if refused."""
        return self._connect()[0]

    def __str__(self) -> str:
        return str(self._url)

    def _connect(self) -> tuple[RelaySourceEnd, Welcome]:
        end = protocol.connect(self._url.address, find_token())
        seed, outline = self._goes_on_for or (None, [])
        label = plain(f"relay on {socket.gethostname()}", 100)
        try:
            end.send(Join(protocol.VERSION, self._url.name, label, seed, outline))
            answer, _ = end.receive()
        except BaseException:
            end.close()
            raise
        if isinstance(answer, Welcome):
            return end, answer
        end.close()
        if isinstance(answer, Refused):
            raise FeedError(f"{self._url}: {answer.reason}")
        raise Malformed(f"{type(answer).__name__} where Welcome was due")

    def _connect_within(self, patience_s: float) -> tuple[RelaySourceEnd, Welcome]:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                return self._connect()
            except LinkRefused as error:
                raise FeedError(f"{self._url} cannot be joined: {error}") from error
            except _GONE as error:
                if self.is_closed or time.monotonic() > until_s:
                    raise FeedError(
                        f"there is no feed {self._url}: {error}. (If none runs there: stoker feed "
                        f"FILE.py:FUNCTION --name {self._url.name} --listen {self._url.address})"
                    ) from error
            with self._lock:
                self._changed.wait_for(lambda: self.is_closed, _AGAIN_S)

    def _watch(self, lost: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(*_GONE):
                self._end.receive()  # nothing was asked for: nothing comes but the end
            self._end.close()
            try:
                end, _ = self._connect_within(_LOST_S)
            except Exception:  # whoever is served here joins anew, and is told why that fails
                if not self.is_closed:
                    lost()
                return
            with self._lock:
                self._end = end
                if self.is_closed:
                    end.close()
                    return


class RemoteOutputs:
    """The outputs of another host's feed, from any position on; the feed sees it as one job.

    A thread receives items, at most ``lent`` ahead.
    """

    def __init__(self, feed: RelayPreparation, blocks: Blocks) -> None:
        self._feed = feed
        self._blocks = blocks
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._end: RelaySourceEnd | None = None
        self._received: deque[Any] = deque()  # messages with contents, or what ended the connection
        self._at: At | None = None
        self._turn = 0
        self._damaged = 0
        self._largest = 0  # bytes that an item may have without a look at the memory

    def begin(self, at: At | None) -> At:
        self._at = at
        return self._ask()

    def next(self) -> Output | None:
        while True:
            try:
                message, contents = self._wait()
                if isinstance(message, RemoteItem):
                    return self._take(message, contents)
                if isinstance(message, End):
                    if (message.epoch, message.total) != self._at:
                        raise Malformed("the epoch ends elsewhere")
                    return None
                if isinstance(message, Failed):
                    raise FeedError(message.reason)
                raise Malformed(f"{type(message).__name__} in the middle of an epoch")
            except _GONE as error:
                self._lose(error)
            self._ask()

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
        if (item.epoch, item.number) != self._at or not is_one:
            raise Malformed(f"{item.number} of epoch {item.epoch}, where {self._at} was due")
        assert self._end is not None
        self._damaged = 0
        self._at = item.epoch, item.number + item.count
        with contextlib.suppress(LinkError):  # the next one who waits finds it out
            self._end.send(Taken())
        return Output(RecordView(item.head, contents), item.count, item.rows)

    def _ask(self) -> At:
        """Request the next position until an epoch begins; return its start. Raises FeedError."""
        while True:
            try:
                end = self._end or self._connect()
                self._turn += 1
                end.send(Ask(self._turn, *(self._at or (None, 0))))
                message, _ = self._wait()
                if isinstance(message, Failed):
                    raise FeedError(message.reason)
                if not isinstance(message, Begin):
                    raise Malformed(f"{type(message).__name__} where an epoch was to begin")
                begun = message.epoch, message.number
                if self._at not in (None, begun):
                    raise FeedError(f"{self._feed} begins at {begun}, and cannot make {self._at}")
                self._at = begun
                return begun
            except _GONE as error:
                self._lose(error)

    def _connect(self) -> RelaySourceEnd:
        end = self._feed.connect()
        received: deque[Any] = deque()
        self._received = received
        with self._lock:
            self._end = end
            if self._is_closed:
                end.close()
        threading.Thread(
            target=self._receive, args=(end, received), name="stoker-feed-receive", daemon=True
        ).start()
        return end

    def _lose(self, error: Exception) -> None:
        """Give up a connection, and pause. Raises FeedError when the feed is lost."""
        if self._end is not None:
            self._end.close()
        with self._lock:
            self._end = None
            self._changed.wait_for(lambda: self._is_closed, _AGAIN_S)
            if self._is_closed or self._feed.is_closed:
                raise FeedError(f"nobody takes {self._feed} any more")
        if isinstance(error, Malformed):
            self._damaged += 1
            if self._damaged > _DAMAGED:
                raise FeedError(f"what comes from {self._feed} is damaged: {error}") from error

    def _wait(self) -> tuple[Any, NDArray[np.uint8]]:
        """Return the next message. Raises the error that ended the connection."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or self._received)
            if self._is_closed:
                raise LinkError("closed")
            found = self._received.popleft()
        if isinstance(found, BaseException):
            raise found
        message, contents = found
        if isinstance(message, (Begin, End, Failed)) and message.turn != self._turn:
            raise Malformed("an answer to what was not asked")
        return message, contents

    def _receive(self, end: RelaySourceEnd, received: deque[Any]) -> None:
        """Receive from a connection until it ends; runs in its own thread."""
        while True:
            found: Any
            try:
                found = end.receive(self._place)
            except BaseException as error:
                found = error
            with self._lock:
                received.append(found)
                self._changed.notify()
            if isinstance(found, BaseException):
                return

    def _place(self, size: int) -> NDArray[np.uint8]:
        """Return shared memory for the contents of an item."""
        if size > self._largest:
            usable = resources.usable_memory_bytes()
            if size > usable:
                raise FeedError(
                    f"an item of {resources.format_bytes(size)} does not fit into the "
                    f"{resources.format_bytes(usable)} of memory that are left to the relay"
                )
            self._largest = size
        try:
            return self._blocks.scratch(size)[:size]
        except OSError as error:
            raise FeedError(f"no memory for an item of {size:,} bytes: {error}") from error
