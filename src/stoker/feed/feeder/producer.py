"""The producer thread of a branch: it takes outputs while there is room for them.

Values outside shared blocks are copied there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from stoker.errors import FeedError
from stoker.feed import messages
from stoker.feed.feeder.log import At, Broken, EpochEnd, StagedItem
from stoker.feed.feeder.preparation import Outputs
from stoker.transport.payload import to_payload
from stoker.transport.shared_memory import Blocks


@dataclass(frozen=True)
class Begun:
    """The position at which an epoch begins, unknown until now."""

    at: At


Produced = Begun | StagedItem | EpochEnd | Broken


class Producer:
    """Takes outputs in order, from any position on.

    Its thread calls ``tell`` with each new output. Nothing comes after ``Broken``.
    """

    def __init__(self, outputs: Outputs, blocks: Blocks, tell: Callable[[Produced], None]) -> None:
        self._outputs = outputs
        self._blocks = blocks
        self._tell = tell
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._begin: list[At | None] = []  # what is to begin
        self._allowed = self._made = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stoker-feed", daemon=True)
        self._thread.start()

    def begin(self, at: At | None) -> None:
        """Continue at this output; with None at the beginning of an epoch, and report its
        position."""
        with self._lock:
            self._begin.append(at)
            self._changed.notify()

    def allow(self, items: int) -> None:
        """Set how many items there is room for, counted from the first."""
        with self._lock:
            if self._allowed != items:
                self._allowed = items
                self._changed.notify()

    def close(self) -> None:
        """Stop preparing; returns at once."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._outputs.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Wait for its thread and all workers to end; True if they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._begin)
                    if self._closed:
                        return
                    at = self._begin.pop()
                self._make_epoch(at)
                if self._closed:
                    return
        except FeedError as error:
            self._tell(Broken(messages.plain(str(error))))
        except BaseException as error:
            self._tell(Broken(messages.plain(f"{type(error).__name__}: {error}")))
        finally:
            self._outputs.close()

    def _make_epoch(self, at: At | None) -> None:
        epoch, number = self._outputs.begin(at)
        if at is None:
            self._tell(Begun((epoch, number)))
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._made < self._allowed)
                if self._closed:
                    return
            item = self._next(epoch, number)
            if item is None:
                break
            number = item.end[1]
            self._made += 1
            self._tell(item)
        self._tell(EpochEnd(epoch, number))

    def _next(self, epoch: int, number: int) -> StagedItem | None:
        made = self._outputs.next()
        if made is None:
            return None
        payload = to_payload(made.value, self._blocks)
        return StagedItem(epoch, number, made.count, made.rows, payload.nbytes, payload)
