"""A pipeline's outputs, made by a thread of their own as there is room for them.

The thread iterates a copy of the pipeline. Its recycler takes memory from shared blocks, so a batch
is made where the jobs will see it. What lies elsewhere is copied into a block.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

from stoker import pytree
from stoker.buffers import Recycler
from stoker.chain import Chain
from stoker.cursor import Cursor
from stoker.engine.foreign import batch_rows
from stoker.feed import messages
from stoker.feed.log import Broken, EpochEnd, StagedItem
from stoker.feed.served import go_near
from stoker.feed.staging import CHUNK_EXAMPLES
from stoker.ipc.payload import pack
from stoker.ipc.shared_memory import Blocks

_CHUNK_BYTES = 1 << 22  # examples are handed over together, up to so many bytes
_SPARE = 64  # making shared memory anew costs more than keeping what there was at the peak

Produced = StagedItem | EpochEnd | Broken


class Producer:
    """Makes the outputs of a pipeline in order, from any position on.

    Its thread calls ``tell`` with all that is made. Nothing comes after ``Broken``.
    """

    def __init__(
        self, chain: Chain, blocks: Blocks, batched: bool, tell: Callable[[Produced], None]
    ) -> None:
        self._recycler = Recycler(_SPARE, blocks.allocate)
        self._cursor = Cursor(chain, self._recycler)
        self._blocks = blocks
        self._batched = batched
        self._tell = tell
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._begin: tuple[int, int] | None = None
        self._allowed = self._made = 0
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stoker-feed", daemon=True)
        self._thread.start()

    def begin(self, epoch: int, number: int) -> None:
        """Go on with this epoch, from this output on."""
        with self._lock:
            self._begin = epoch, number
            self._changed.notify()

    def allow(self, items: int) -> None:
        """Say how many items there is room for, of all that are made."""
        with self._lock:
            if self._allowed != items:
                self._allowed = items
                self._changed.notify()

    def close(self) -> None:
        """Make no more; returns at once."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until its thread and all workers are gone; tell whether they are."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._begin is not None)
                    if self._closed:
                        return
                    at, self._begin = self._begin, None
                assert at is not None
                self._make_epoch(*at)
                if self._closed:
                    return
        except BaseException as error:
            self._tell(Broken(messages.plain(f"{type(error).__name__}: {error}")))
        finally:
            self._recycler.clear()

    def _make_epoch(self, epoch: int, number: int) -> None:
        missed = go_near(self._cursor, epoch, number)
        with contextlib.closing(self._cursor.begin()) as outputs:
            if missed:  # they are made again to get at what follows them
                next(itertools.islice(outputs, missed, missed), None)
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._closed or self._made < self._allowed)
                    if self._closed:
                        return
                item = self._next(outputs, epoch, number)
                if item is None:
                    break
                number = item.end[1]
                self._made += 1
                self._tell(item)
        self._tell(EpochEnd(epoch, number))

    def _next(self, outputs: Any, epoch: int, number: int) -> StagedItem | None:
        if self._batched:
            value = next(outputs, self)
            if value is self:
                return None
            count, rows = 1, batch_rows(value)
        else:
            value = self._next_chunk(outputs)
            if not value:
                return None
            count = rows = len(value)
        payload = pack(value, self._blocks)
        return StagedItem(epoch, number, count, rows, payload.nbytes, payload)

    def _next_chunk(self, outputs: Any) -> list[Any]:
        """Return the next examples, none at the end of the epoch."""
        if self._failure is not None:
            raise self._failure
        examples: list[Any] = []
        size = 0
        while size < _CHUNK_BYTES and len(examples) < CHUNK_EXAMPLES:
            try:
                example = next(outputs, self)
            except Exception as error:
                if not examples:
                    raise
                self._failure = error  # behind what came before it
                break
            if example is self:
                break
            examples.append(example)
            size += pytree.nbytes(example)
        return examples
