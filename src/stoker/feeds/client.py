"""A job's client of a feed: the epochs that it receives, its position in them, and its sources.

If a feeder dies, its jobs connect to another or start one. They send their positions, and the seed
and signature of the old feeder. The new feeder waits a moment for the others before it begins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from stoker.basics import resources
from stoker.basics.process import OwningProcess
from stoker.basics.signals import finalize
from stoker.chain.chain import Chain
from stoker.distributed.unsharded import warn_unsharded_feed
from stoker.errors import FeedError, StateError
from stoker.feeds import messages
from stoker.feeds.connection import FeedAddress, FeederConnection, Interrupted, Leases, damage_error
from stoker.feeds.shared_memory import Stale, from_payload, map_block
from stoker.pipeline import Pipeline
from stoker.sources.origin import SourceBase
from stoker.stages.iterable import IterableSource
from stoker.stages.loader import LoaderSource
from stoker.transport.codec import UnknownType


class FeedClient:
    """A feed as an iterable of outputs, one epoch at a time.

    Attributes:
        name: the feed's name.
        welcome: the feeder's welcome message.
        position: the position of the next output; None for the beginning of any epoch.
        lag_outputs: how many further outputs the feed had ready when it sent the last one.

    Raises FeedError if there is no feed, or if the feed refuses this job.
    """

    def __init__(self, address: FeedAddress) -> None:
        self.name = address.name
        self.position: tuple[int, int] | None = None
        self._address = address
        self.lag_outputs = 0
        self._request_id = 0
        self._loss_position: tuple[int, int] | None = None  # of the last feeder
        self._loss_count = 0
        self._is_in_epoch = False
        self._epoch: weakref.ref[FeedEpoch] | None = None
        self._descriptors: list[int] = []  # of the last item's blocks
        self._connect(None)
        self.welcome: messages.Welcome = self._connection.welcome

    def __iter__(self) -> FeedEpoch:
        """Begin the next epoch, or continue at a loaded state."""
        self._leave_epoch()
        if not self.is_owner:  # forked: the connection and the leases belong to the parent
            self.position = None
            self._connect(self._connection)
        epoch = FeedEpoch(self)
        self._epoch = weakref.ref(epoch)
        return epoch

    def _leave_epoch(self) -> None:
        if self._epoch is not None and (previous := self._epoch()) is not None:
            previous.supersede()

    def __len__(self) -> int:
        """Return the number of outputs in an epoch. Raises TypeError if it is not known."""
        if self.welcome.length is None:
            raise TypeError(f"the feed {self.name!r} does not know how long its epochs are")
        return self.welcome.length

    def state_dict(self) -> dict[str, Any]:
        """Return this job's position: the feed's epoch, and the number of the next output in it."""
        epoch, number = (None, 0) if self.position is None else self.position
        if epoch is not None and number and number == self.welcome.length:
            epoch, number = epoch + 1, 0  # the epoch has no more outputs
        return {
            "feed": self.name,
            "seed": self.welcome.seed,
            "signature": self.welcome.signature,
            "epoch": epoch,
            "number": number,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. The feeder prepares missed outputs again.

        Raises StateError if the feed serves another pipeline, or cannot prepare outputs again.
        """
        if not isinstance(state, dict) or not {"seed", "signature", "epoch", "number"} <= set(
            state
        ):
            raise StateError("this is not the state of a job that reads a feed")
        epoch, number = state["epoch"], state["number"]
        if state["signature"] != self.welcome.signature:
            raise StateError(
                f"the feed {self.name!r} serves another pipeline than when the state was saved"
            )
        largest = messages.MAX_NUMBER if self.welcome.length is None else self.welcome.length
        if not _is_whole_number(number, largest) or not (
            epoch is None or _is_whole_number(epoch, messages.MAX_NUMBER)
        ):
            raise StateError(f"the feed {self.name!r} has no output {number!r} of epoch {epoch!r}")
        self._leave_epoch()  # first: leaving an epoch changes the position
        if epoch is None:
            self.position = None
            return
        if state["seed"] != self.welcome.seed:
            raise StateError(
                f"the feed {self.name!r} has seed {self.welcome.seed}, but the state has "
                f"{state['seed']}: give the feeder's source seed= to resume"
            )
        if not self.welcome.is_repeatable and number:
            raise StateError(
                f"the feed {self.name!r} reads a loader or a stream, and cannot prepare outputs "
                "again: save states between epochs"
            )
        self.position = epoch, number

    @property
    def is_owner(self) -> bool:
        """True if this process owns the connection; False in a forked child of the owner."""
        return self._owner.is_current

    # -- used by epochs

    def request_epoch(self, interrupt: int) -> int:
        """Request the next epoch or position and wait until it begins; return its epoch."""
        self._is_in_epoch = False
        message: Any = None
        try:
            while not isinstance(message, messages.Begin):
                if message is None or isinstance(message, messages.Evicted):
                    self._request_id += 1
                    self._connection.send(
                        messages.EpochRequest(self._request_id, *(self.position or (None, 0)))
                    )
                elif isinstance(message, messages.Failed):
                    raise FeedError(message.reason)
                else:
                    raise self.damage_error(f"it sent {type(message).__name__} instead of Begin")
                message = self.next_message(interrupt)
        except BaseException:  # otherwise the feeder would wait for a job that has given up
            self._connection.send(messages.Leave())
            raise
        start = message.epoch, message.number
        if self.welcome.is_repeatable and self.position not in (None, start):
            raise self.damage_error(f"it begins at {start}, not at {self.position}")
        self.position = start
        self._is_in_epoch = True
        return int(message.epoch)

    def next_message(self, interrupt: int) -> Any:
        """Return the next message; None if another feeder took over and needs a new request.

        Raises FeedError if the feeder is gone and is not replaced, or sends an invalid message.
        """
        while True:
            try:
                message, descriptors = self._connection.receive(interrupt)
            except messages.Malformed as error:
                raise self.damage_error(str(error)) from None
            if message is None:
                self._replace_feeder()
                return None
            self._descriptors += descriptors
            if (
                isinstance(message, (messages.Welcome, messages.Refused))
                or message.request_id > self._request_id
            ):
                raise self.damage_error(f"it sent {type(message).__name__} without a request")
            if message.request_id == self._request_id:
                return message
            if isinstance(message, messages.ItemMessage):  # of an epoch that this job has left
                self._close_descriptors()
                self._leases.release(message.lease)

    def load_item(self, item: messages.ItemMessage) -> Any:
        """Return the value of the last received item.

        Raises Stale if its memory is already reused; FeedError if it is damaged, or if it needs a
        class that this process lacks.
        """
        mappings = []
        try:
            for generation in item.generations:
                mappings.append(map_block(self._descriptors.pop(0), generation))
            value = from_payload(item.header, item.places, mappings, _Unpickler)
            if not self.welcome.batched and (type(value) is not list or len(value) != item.count):
                raise ValueError(f"it does not hold the announced {item.count} examples")
        except BaseException as error:
            self._leases.release(item.lease)
            if isinstance(error, UnknownType):
                raise FeedError(
                    f"the feed's outputs need the class {error}, which this job has not imported: "
                    "import it, or use tuples or dicts in the pipeline"
                ) from None
            if isinstance(error, OSError) and resources.lacks_descriptors(error):
                raise FeedError(
                    f"an output of the feed cannot be mapped: {resources.no_descriptors()}"
                ) from None
            if isinstance(error, (FeedError, Stale)) or not isinstance(error, Exception):
                raise
            raise self.damage_error(f"{type(error).__name__}: {error}") from error
        finally:
            self._close_descriptors()
        self._leases.hold(item.lease, mappings, item.generations)
        self.lag_outputs = item.behind
        return value

    def release_leases(self) -> None:
        """Copy old outputs that the job still uses, so that the feeder can send more.

        Raises FeedError if the feeder has overwritten an output that is still in use.
        """
        self._leases.make_room(self.welcome.max_leases)

    def end_epoch(self, epoch: int) -> None:
        """Move the position to the next epoch."""
        self.position, self._is_in_epoch = (epoch + 1, 0), False

    def leave(self) -> None:
        """Leave an epoch early, and move the position to the next epoch."""
        if self._is_in_epoch and self.position is not None:
            self.end_epoch(self.position[0])
            self._connection.send(messages.Leave())

    def damage_error(self, how: str) -> FeedError:
        """Close the connection to this feeder; return the error to raise."""
        self._close_descriptors()
        _hang_up(self._connection, self._leases, self._owner)
        return damage_error(self.name, how)

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _connect(self, previous: FeederConnection | None) -> None:
        self._connection = FeederConnection(self._address, previous)
        self._leases = Leases(self._connection)
        self._owner = OwningProcess()
        finalize(self, _hang_up, self._connection, self._leases, self._owner)

    def _replace_feeder(self) -> None:
        """Connect to another feeder, and continue at the same position. Raises FeedError."""
        try:
            if self._owner.is_current:
                self._leases.make_room(1)  # if it lives after all, it uses that memory from now on
        finally:
            self._connection.close()
        if not self._address.max_losses:
            where = (
                ""
                if self.position is None
                else f" (in epoch {self.position[0]}, after {self.position[1]} outputs)"
            )
            raise FeedError(
                f"the feeder of {self.name!r} has ended{where}. Start it again, and resume this "
                "job from its last state_dict()"
            )
        self._loss_count = self._loss_count + 1 if self.position == self._loss_position else 1
        self._loss_position = self.position
        if self._loss_count > self._address.max_losses:
            where = (
                "its start"
                if self.position is None
                else f"output {self.position[1]} of epoch {self.position[0]}"
            )
            target = self._address.target or "FILE.py:FUNCTION"
            raise FeedError(
                f"the feeder of {self.name!r} has ended {self._loss_count} times at {where}. Run "
                f"stoker feed {target} --name {self.name} to see why"
            )
        self._connect(self._connection)


class FeedEpoch(Iterator[Any]):
    """An iterator over an epoch of a feed, or over the rest of one. ``close()`` leaves it early.

    Attributes:
        epoch: the number of the feed's epoch, once it has begun.
    """

    epoch: int | None = None
    _is_superseded = False  # whether its client, not its reader, closed it before its end

    def __init__(self, client: FeedClient) -> None:
        self._client = client
        self._ready: deque[Any] = deque()  # outputs of the last item that are not used yet
        self._waker = _Waker()
        self._finish = finalize(self, _leave, client, self._waker)

    def __next__(self) -> Any:
        if self._is_superseded:
            raise FeedError(
                f"this epoch of the feed {self._client.name!r} was closed before its end: another "
                "iterator over the same connection has begun, or a state was loaded. Give each "
                "loop a stoker.from_feed() of its own"
            )
        if not self._finish.alive:
            raise StopIteration
        self._fill()
        assert self._client.position is not None
        epoch, number = self._client.position
        self._client.position = epoch, number + 1
        return self._ready.popleft()

    def interrupt(self) -> None:
        """Wake a thread that waits in ``next()``; it then raises StopIteration."""
        self._waker.wake()

    def supersede(self) -> None:
        """Leave the epoch for something else than its own loop, which is told."""
        self._is_superseded = self._finish.alive
        self.close()

    def close(self) -> None:
        """Leave the epoch. Outputs that the job still refers to stay valid."""
        self._finish()

    def _fill(self) -> None:
        """Wait until there is an output. Raises StopIteration at the end of the epoch."""
        try:
            if self.epoch is None:
                self.epoch = self._client.request_epoch(self._waker.read)
            while not self._ready:
                self._receive_next()
        except Interrupted:
            raise StopIteration from None

    def _receive_next(self) -> None:
        """Handle the next message. Raises StopIteration at the end of the epoch."""
        client = self._client
        client.release_leases()
        message = client.next_message(self._waker.read)
        if message is None or isinstance(message, messages.Evicted):
            client.request_epoch(self._waker.read)
        elif isinstance(message, messages.ItemMessage):
            self._load(message)
        elif isinstance(message, messages.Begin):
            raise client.damage_error("it sent Begin in the middle of an epoch")
        else:
            self._end(message)

    def _load(self, item: messages.ItemMessage) -> None:
        client = self._client
        assert client.position is not None
        epoch, number = client.position
        skipped = number - item.number
        is_one = not client.welcome.batched or item.count == 1
        if item.epoch != epoch or not 0 <= skipped < item.count or not is_one:
            raise client.damage_error(
                f"it sent {item.count} outputs from {item.number} of epoch {item.epoch}, but "
                f"{number} of epoch {epoch} was next"
            )
        try:
            value = client.load_item(item)
            self._ready.extend([value] if client.welcome.batched else value[skipped:])
        except Stale:  # its memory is reused: request it again
            client.request_epoch(self._waker.read)

    def _end(self, message: messages.End | messages.Failed) -> None:
        client = self._client
        assert client.position is not None
        epoch, number = client.position
        if isinstance(message, messages.End) and (message.epoch != epoch or message.total > number):
            raise client.damage_error(
                f"it ended epoch {message.epoch} at {message.total}, but {number} of epoch {epoch} "
                "was next"
            )
        client.end_epoch(epoch)
        self.close()
        if isinstance(message, messages.Failed):
            raise FeedError(message.reason)
        raise StopIteration


class _Unpickler(pickle.Unpickler):
    """Finds classes of the job's script in ``__main__``."""

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules["__main__"]
        if os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py":
            # The feeder has imported the file that runs here as the script.
            with contextlib.suppress(AttributeError):
                found: Any = main
                for part in name.split("."):
                    found = getattr(found, part)
                return found
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise FeedError(
                f"the feed's outputs need {module}.{name}, which this job cannot import "
                f"({error}): put the class into a module that the feeder and the job can import, "
                "or use tuples or dicts"
            ) from error


def _is_whole_number(number: Any, largest: int) -> bool:
    return type(number) is int and 0 <= number <= largest


class _Waker:
    """A pipe: ``wake`` wakes a thread that polls ``read``.

    ``wake`` and ``close`` may run at once. They need a lock: after closing, the system reuses the
    descriptor numbers, and a late write would go to another file.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """Wake the polling thread; do nothing once closed."""
        with self._lock, contextlib.suppress(OSError):
            if self._write >= 0:
                os.write(self._write, b"x")

    def close(self) -> None:
        """Close both ends, once."""
        with self._lock:
            descriptors, self.read, self._write = (self.read, self._write), -1, -1
        for end in descriptors:
            os.close(end)


def _hang_up(connection: FeederConnection, leases: Leases, owner: OwningProcess) -> None:
    """Close a connection. Outputs in use are copied first, as the feeder then uses their memory."""
    if owner.is_current:
        with contextlib.suppress(FeedError):
            leases.make_room(1)
    connection.close()


def _leave(client: FeedClient, waker: _Waker) -> None:
    waker.close()
    if client.is_owner:
        client.leave()


def open_feed(address: FeedAddress, seed: int | None) -> Pipeline[Any]:
    client = FeedClient(address)
    source: SourceBase = FeedBatches(client) if client.welcome.batched else FeedExamples(client)
    return Pipeline(Chain.begin(source, seed))


class FeedBatches(LoaderSource):
    """The batches of a feed; the feed's client takes the place of a loader."""

    @property
    def name(self) -> str:
        return f"from_feed({self.loader.name!r})"

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if there are several ranks: each rank gets all batches of the feed."""
        warn_unsharded_feed()

    def lag_outputs(self) -> int:
        lag: int = self.loader.lag_outputs
        return lag

    def state_between(self, *, left: bool) -> Any:
        return _between(self.loader, left)


class FeedExamples(IterableSource):
    """The examples of a feed: a stream that can begin in the middle of an epoch."""

    is_counted = takes_state = True

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self._client = client

    @property
    def name(self) -> str:
        return f"from_feed({self._client.name!r})"

    def count(self) -> int:
        return len(self._client)

    def open(self, epoch: int, saved: Any = None, number: int = 0) -> FeedEpoch:
        if saved is not None:
            self._client.load_state_dict(saved)
        self._epoch = iter(self._client)
        return self._epoch

    def lag_outputs(self) -> int:
        return self._client.lag_outputs

    def state(self, number: int) -> Any:
        return {**self._client.state_dict(), "epoch": self._epoch.epoch, "number": number}

    def state_between(self, *, left: bool) -> Any:
        return _between(self._client, left)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the feed chooses the epoch."""


def _between(client: FeedClient, left: bool) -> dict[str, Any]:
    """Return a job's state between epochs: the beginning of the next one."""
    saved: dict[str, Any] = client.state_dict()
    if saved["number"] and (left or client.welcome.length is None):
        # Of unknown length, a position may be the end of its epoch.
        return {**saved, "epoch": saved["epoch"] + 1, "number": 0}
    return saved
