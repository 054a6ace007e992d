"""The producer thread of a branch: it prepares outputs while the log has room for them.

Values outside shared blocks are copied into blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stoker.basics.future import start_thread
from stoker.errors import FeedError
from stoker.feed import messages
from stoker.feed.feeder.log import EpochEnd, FeedPosition, PipelineFailed, StagedItem
from stoker.feed.feeder.preparation import PipelineOutputs
from stoker.transport.payload import to_payload
from stoker.transport.shared_memory import Blocks

Event = StagedItem | EpochEnd | PipelineFailed


class Producer:
    """Prepares outputs in order, from any position on.

    Its thread calls ``report`` with each new output. Nothing comes after ``PipelineFailed``.
    """

    def __init__(
        self, outputs: PipelineOutputs, blocks: Blocks, report: Callable[[Event], None]
    ) -> None:
        self._outputs = outputs
        self._blocks = blocks
        self._report = report
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._requested_starts: list[FeedPosition] = []
        self._allowed = self._produced = 0
        self._closed = False
        self._thread = start_thread("stoker-feed", self._run)

    def begin(self, position: FeedPosition) -> None:
        """Continue at this position."""
        with self._lock:
            self._requested_starts.append(position)
            self._changed.notify()

    def allow(self, items: int) -> None:
        """Set how many items may be prepared in all, counted from the first."""
        with self._lock:
            if self._allowed != items:
                self._allowed = items
                self._changed.notify()

    def close(self) -> None:
        """Stop; returns at once."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until its thread and all workers have ended; True if they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._requested_starts)
                    if self._closed:
                        return
                    position = self._requested_starts.pop()
                self._produce_epoch(position)
                if self._closed:
                    return
        except FeedError as error:
            self._report(PipelineFailed(messages.clip_text(str(error))))
        except BaseException as error:
            self._report(PipelineFailed(messages.clip_text(f"{type(error).__name__}: {error}")))
        finally:
            self._outputs.close()

    def _produce_epoch(self, position: FeedPosition) -> None:
        self._outputs.begin(position)
        epoch, number = position
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._produced < self._allowed)
                if self._closed:
                    return
            item = self._next(epoch, number)
            if item is None:
                break
            number = item.end[1]
            self._produced += 1
            self._report(item)
        self._report(EpochEnd(epoch, number))

    def _next(self, epoch: int, number: int) -> StagedItem | None:
        output = self._outputs.next()
        if output is None:
            return None
        payload = to_payload(output.value, self._blocks)
        return StagedItem(epoch, number, output.count, output.rows, payload.nbytes, payload)
