"""The client of a feed in a job: the epochs that it receives, and its position in them.

When a feeder dies, jobs connect again, or start another. They send the seed and outline that they
had, their positions, and the process ids of the jobs that were served beside them. The new feeder
waits for the jobs that are still alive before it chooses its positions.
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

from stoker.basics.process import OwningProcess
from stoker.errors import FeedError, StateError
from stoker.feed import messages
from stoker.feed.connection import FeedAddress, FeederConnection, Interrupted, Leases, damaged
from stoker.feed.messages import (
    Ask,
    Begin,
    End,
    Evicted,
    Failed,
    ItemMessage,
    Leave,
    Malformed,
    Refused,
    Welcome,
)
from stoker.transport.codec import UnknownType
from stoker.transport.payload import from_payload
from stoker.transport.shared_memory import Stale, map_block

# An example that ends each feeder would have feeders started for ever; kills from outside hardly
# hit one place so often.
_MOST_ENDS = 3


class FeedClient:
    """A feed as the source of a job: one epoch at a time is iterated.

    Attributes:
        name: of the feed.
        about: the feeder's welcome message.
        at: the position of the next output; None for the beginning of any epoch.
        lag_outputs: how many outputs the feed had ready beyond the last hand-over.

    Raises FeedError when there is no feed, or the feed refuses this job.
    """

    def __init__(self, address: FeedAddress) -> None:
        self.name = address.name
        self.at: tuple[int, int] | None = None
        self._address = address
        self.lag_outputs = 0
        self._turn = 0
        self._ended_at: tuple[int, int] | None = None  # where a feeder ended, and how many there
        self._ends_here = 0
        self._is_in_epoch = False
        self._epoch: weakref.ref[FeedEpoch] | None = None
        self._descriptors: list[int] = []  # that came with the last item
        self._connect(None)
        self.about: Welcome = self._connection.welcome

    def __iter__(self) -> FeedEpoch:
        """Begin the next epoch, or continue at a loaded state."""
        self._leave_epoch()
        if not self.is_own:  # the connection and the leases are the parent's
            self.at = None
            self._connect(self._connection)
        epoch = FeedEpoch(self)
        self._epoch = weakref.ref(epoch)
        return epoch

    def _leave_epoch(self) -> None:
        if self._epoch is not None and (before := self._epoch()) is not None:
            before.close()

    def __len__(self) -> int:
        """Return the number of outputs in an epoch; TypeError where it is known only at the end."""
        if self.about.length is None:
            raise TypeError(f"the feed {self.name!r} does not know the length of its epochs")
        return self.about.length

    def state_dict(self) -> dict[str, Any]:
        """Return this job's position: the feed's epoch, and the number of the next output in it."""
        epoch, number = (None, 0) if self.at is None else self.at
        if epoch is not None and number and number == self.about.length:
            epoch, number = epoch + 1, 0  # that was the last
        return {
            "feed": self.name,
            "seed": self.about.seed,
            "outline": self.about.outline,
            "epoch": epoch,
            "number": number,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. The feeder prepares again the outputs that this job missed.

        Raises StateError when the feed serves another pipeline, or cannot prepare its outputs
        again.
        """
        if not isinstance(state, dict) or not {"seed", "outline", "epoch", "number"} <= set(state):
            raise StateError("this is no state of a job that a feed served")
        epoch, number = state["epoch"], state["number"]
        if state["outline"] != self.about.outline:
            raise StateError(f"the feed {self.name!r} serves another pipeline than the state's")
        most = messages.LARGEST if self.about.length is None else self.about.length
        if not _is_whole(number, most) or not (epoch is None or _is_whole(epoch, messages.LARGEST)):
            raise StateError(f"the feed {self.name!r} has no output {number!r} of epoch {epoch!r}")
        self._leave_epoch()  # later it would move on from where this goes
        if epoch is None:
            self.at = None
            return
        if state["seed"] != self.about.seed:
            raise StateError(
                f"the feed {self.name!r} has seed {self.about.seed}, the state has "
                f"{state['seed']}: give the source a seed= to resume"
            )
        if not self.about.again and number:
            raise StateError(
                f"the feed {self.name!r} cannot make again what a loader or a stream gave: save "
                "between epochs"
            )
        self.at = epoch, number

    def close(self) -> None:
        """End the connection: the feeder owes this job nothing more."""
        self._connection.close()

    def __del__(self) -> None:
        # There is none where ``__init__`` raised.
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    @property
    def is_own(self) -> bool:
        """Whether this process owns the connection, rather than a forked child of the owner."""
        return self._owner.is_current

    # -- what epochs do

    def ask(self, interrupt: int) -> int:
        """Request the next epoch or position, wait until it begins, and return its epoch."""
        self._is_in_epoch = False
        message: Any = None
        try:
            while not isinstance(message, Begin):
                if message is None or isinstance(message, Evicted):
                    self._turn += 1
                    self._connection.send(Ask(self._turn, *(self.at or (None, 0))))
                elif isinstance(message, Failed):
                    raise FeedError(message.reason)
                else:
                    raise self.damaged(f"{type(message).__name__} where an epoch was to begin")
                message = self.next_message(interrupt)
        except BaseException:  # the feeder must not wait for a job that has given up
            self._connection.send(Leave())
            raise
        begun = message.epoch, message.number
        if self.about.again and self.at not in (None, begun):
            raise self.damaged(f"it begins at {begun}, not at {self.at}")
        self.at = begun
        self._is_in_epoch = True
        return int(message.epoch)

    def next_message(self, interrupt: int) -> Any:
        """Return the next message; None if another feeder took over and must be asked again.

        Raises FeedError when the feeder is gone and nobody starts another one, or sends an invalid
        message.
        """
        while True:
            try:
                message, descriptors = self._connection.receive(interrupt)
            except Malformed as error:
                raise self.damaged(str(error)) from None
            if message is None:
                self._replace_feeder()
                return None
            self._descriptors += descriptors
            if isinstance(message, (Welcome, Refused)) or message.turn > self._turn:
                raise self.damaged(f"{type(message).__name__} that nothing asked for")
            if message.turn == self._turn:
                return message
            if isinstance(message, ItemMessage):  # of an epoch that was left
                self._close_descriptors()
                self._leases.give_back(message.lease)

    def take(self, item: ItemMessage) -> Any:
        """Return the value of the last item received.

        Raises Stale if it came too late; FeedError when it is damaged, or needs a class that this
        process lacks.
        """
        mappings = []
        try:
            for generation in item.generations:
                mappings.append(map_block(self._descriptors.pop(0), generation))
            value = from_payload(item.header, item.places, mappings, _Unpickler)
            if not self.about.batched and (type(value) is not list or len(value) != item.count):
                raise ValueError(f"not the {item.count} examples that were announced")
        except BaseException as error:
            self._leases.give_back(item.lease)
            if isinstance(error, UnknownType):
                raise FeedError(
                    f"what the feed hands out needs {error}, which this job has not imported: "
                    "import it, or hand out tuples or dicts"
                ) from None
            if isinstance(error, (FeedError, Stale)) or not isinstance(error, Exception):
                raise
            raise self.damaged(f"{type(error).__name__}: {error}") from error
        finally:
            self._close_descriptors()
        self._leases.hold(item.lease, mappings, item.generations)
        self.lag_outputs = item.behind
        return value

    def settle(self) -> None:
        """Before asking for more, copy batches that would keep the feeder waiting.

        Raises FeedError if a batch that is still in use was overwritten.
        """
        self._leases.settle(self.about.lent)

    def end_epoch(self, epoch: int) -> None:
        """Note that an epoch has ended: the position moves to the next epoch."""
        self.at, self._is_in_epoch = (epoch + 1, 0), False

    def leave(self) -> None:
        """Leave an epoch early: the position moves to the next epoch."""
        if self._is_in_epoch and self.at is not None:
            self.end_epoch(self.at[0])
            self._connection.send(Leave())

    def damaged(self, how: str) -> FeedError:
        """Disconnect from this feeder for good; return the error to raise."""
        self._close_descriptors()
        self._connection.close()
        return damaged(self.name, how)

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _connect(self, before: FeederConnection | None) -> None:
        self._connection = FeederConnection(self._address, before)
        self._leases = Leases(self._connection)
        self._owner = OwningProcess()

    def _replace_feeder(self) -> None:
        """Find another feeder, and go on at the same position."""
        self._connection.close()
        self._leases.forget()
        if not self._address.is_restarted:
            where = "" if self.at is None else f" (epoch {self.at[0]}, {self.at[1]} handed out)"
            raise FeedError(
                f"the feeder of {self.name!r} has ended{where}. Start it again, and go on from "
                "the last state_dict()"
            )
        self._ends_here = self._ends_here + 1 if self.at == self._ended_at else 1
        self._ended_at = self.at
        if self._ends_here > _MOST_ENDS:
            where = "it begins" if self.at is None else f"output {self.at[1]} of epoch {self.at[0]}"
            raise FeedError(
                f"the feeder of {self.name!r} has ended {self._ends_here} times, each time where "
                f"{where}: stoker feed {self._address.target} --name {self.name} shows why"
            )
        self._connect(self._connection)


class FeedEpoch(Iterator[Any]):
    """An epoch of a feed, or the rest of one. ``close()`` leaves it early.

    Attributes:
        epoch: the feed's epoch number, once the epoch has begun.
    """

    epoch: int | None = None

    def __init__(self, client: FeedClient) -> None:
        self._client = client
        self._has_begun = False
        self._ready: deque[Any] = deque()  # outputs of the item that came last
        self._waker = _Waker()
        self._finish = weakref.finalize(self, _leave, client, self._waker)

    def __next__(self) -> Any:
        if not self._finish.alive:
            raise StopIteration
        self._fill()
        self._advance(1)
        return self._ready.popleft()

    def begin(self) -> tuple[int, int]:
        """Wait until the epoch begins; return its first output's number. Raises StopIteration."""
        client = self._client
        if not self._has_begun:
            try:
                self.epoch = client.ask(self._waker.read)
            except Interrupted:
                raise StopIteration from None
            self._has_begun = True
        assert client.at is not None
        return client.at

    def take(self) -> list[Any]:
        """Return the outputs of the next hand-over. Raises StopIteration at the epoch's end."""
        self._fill()
        outputs = list(self._ready)
        self._ready.clear()
        self._advance(len(outputs))
        return outputs

    def interrupt(self) -> None:
        """Wake a thread that waits in ``next()``."""
        self._waker.wake()

    def close(self) -> None:
        """Leave the epoch. Outputs already handed out stay valid as long as they are referred
        to."""
        self._finish()

    def _fill(self) -> None:
        """Wait for outputs. Raises StopIteration if no more will come."""
        self.begin()
        try:
            while not self._ready:
                self._take_next()
        except Interrupted:
            raise StopIteration from None

    def _advance(self, outputs: int) -> None:
        assert self._client.at is not None
        epoch, number = self._client.at
        self._client.at = epoch, number + outputs

    def _take_next(self) -> None:
        """Wait for the next message. Raises StopIteration at the end of the epoch."""
        client = self._client
        client.settle()
        message = client.next_message(self._waker.read)
        if message is None or isinstance(message, Evicted):
            client.ask(self._waker.read)
        elif isinstance(message, ItemMessage):
            self._take(message)
        elif isinstance(message, Begin):
            raise client.damaged("an epoch begins in the middle of another")
        else:
            self._end(message)

    def _take(self, item: ItemMessage) -> None:
        client = self._client
        assert client.at is not None
        epoch, number = client.at
        skipped = number - item.number
        is_one = not client.about.batched or item.count == 1
        if item.epoch != epoch or not 0 <= skipped < item.count or not is_one:
            raise client.damaged(
                f"{item.count} from {item.number} of epoch {item.epoch} on, where {number} of "
                f"epoch {epoch} was due"
            )
        try:
            value = client.take(item)
            self._ready.extend([value] if client.about.batched else value[skipped:])
        except Stale:  # have it made again
            client.ask(self._waker.read)

    def _end(self, message: End | Failed) -> None:
        client = self._client
        assert client.at is not None
        epoch, number = client.at
        if isinstance(message, End) and (message.epoch != epoch or message.total > number):
            raise client.damaged(
                f"epoch {message.epoch} ends at {message.total}, where {number} of epoch {epoch} "
                "was due"
            )
        client.end_epoch(epoch)
        self.close()
        if isinstance(message, Failed):
            raise FeedError(message.reason)
        raise StopIteration


class _Unpickler(pickle.Unpickler):
    """Finds classes as this job has them."""

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules["__main__"]
        if os.path.basename(getattr(main, "__file__", None) or "") == f"{module}.py":
            # The feeder has loaded this very script, as a module.
            with contextlib.suppress(AttributeError):
                found: Any = main
                for part in name.split("."):
                    found = getattr(found, part)
                return found
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise FeedError(
                f"what the feed hands out needs {module}.{name}, which this job cannot import "
                f"({error}): put the class into a module that both can import, or hand out tuples "
                "or dicts"
            ) from error


def _is_whole(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


class _Waker:
    """A pipe: ``wake`` wakes a thread that polls ``read``. Closing and waking at once is safe.

    Once it is closed the system may reuse its descriptor numbers: a late write would go to another
    file.
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
            ends, self.read, self._write = (self.read, self._write), -1, -1
        for end in ends:
            os.close(end)


def _leave(client: FeedClient, waker: _Waker) -> None:
    waker.close()
    if client.is_own:
        client.leave()
