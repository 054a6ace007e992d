"""Finds out when a run becomes slow, and why, from windows of some seconds."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Times as long as usual for a batch. Less is the spread of windows on a shared machine.
_SLOW = 1.5
# Back to so much: lower than _SLOW, or a run at the border would be told again and again.
_BACK = 1.2
# Windows in a row, so that a checkpoint or a single slow file is not told.
_IN_A_ROW = 2
# Earlier windows that say how fast the run usually is; at least, at most. Five minutes at most:
# longer ago, the data may have been other.
_USUAL = 3, 30
# Share of the time in which some process waits for memory, and what is left of it. Reading a lot
# through the page cache counts as waiting too (13 % on a host with 15 GiB to spare), so that both
# must hold. Chosen, not measured.
_SHORT_OF_MEMORY, _LOW_BYTES = 0.1, 1 << 30
# Times as many bytes as usual come from storage for a batch, and at least so many more: a page.
_MORE_READ, _PAGE_BYTES = 2.0, 4096
# Of the ticks in which the loop waited: at least so many more of them with workers that wait.
_MORE_BLOCKED = 0.2
# Part of what a batch takes longer that its processor time, or the wait for one, has to explain.
_EXPLAINS = 0.5


@dataclass(frozen=True)
class WatchWindow:
    """Some seconds of a run. Times are of one batch of the training loader."""

    seconds: float
    batches: int
    wait_s: float
    """Mean time in ``next()``; of a window without a batch, so far."""
    step_s: float
    """Median time between two calls of ``next()``: evaluations do not count."""
    cpu_s: float = 0.0
    """Processor time of the run for a batch."""
    queued_s: float = 0.0
    """Time for a batch in which processes of the run were ready and had no processor."""
    read_bytes: float = 0.0
    """Bytes from storage for a batch."""
    blocked_fraction: float = 0.0
    """Of the ticks in which the loop waited: the share in which no worker computed."""
    disk_fraction: float = 0.0
    """Of these, the share in which one waited for a disk."""
    others_cores: float = 0.0
    """Processors that other processes took."""
    memory_fraction: float = 0.0
    """Share of the time in which some process of the host waited for memory."""
    available_bytes: int = 0
    stopped: tuple[str, ...] = ()
    """Processes of the run that do not run, as they were stopped by a signal."""

    @property
    def cycle_s(self) -> float:
        """The time that a batch takes."""
        return self.wait_s + self.step_s


class SlowdownDetector:
    """Compares each window with the usual ones."""

    def __init__(self) -> None:
        self._usual: deque[WatchWindow] = deque(maxlen=_USUAL[1])
        self._slow: list[WatchWindow] = []
        self._is_told = False
        self._stopped: tuple[str, ...] = ()

    def add(self, window: WatchWindow) -> str | None:
        """Add a window; return a message if the run became slow with it, or as fast as before."""
        if window.stopped != self._stopped:
            self._stopped = window.stopped
            if window.stopped:
                return f"stopped by a signal, and to be continued: {', '.join(window.stopped)}"
        if window.cycle_s <= 0.0 or window.stopped:
            return None  # nothing was trained, or it is known why
        if len(self._usual) < _USUAL[0]:
            if window.batches:
                self._usual.append(window)
            return None
        usual = summarize(self._usual)
        ratio = window.cycle_s / usual.cycle_s
        if not window.batches and ratio < _SLOW:
            return None  # the batch has not come yet
        if self._is_told and ratio < _BACK:
            self._is_told, self._slow = False, []
            return "as fast as before again"
        if ratio < _SLOW:
            self._slow = []
            if not self._is_told:
                self._usual.append(window)
            return None
        self._slow.append(window)
        if self._is_told or len(self._slow) < _IN_A_ROW:
            return None
        self._is_told = True
        now = summarize(self._slow)
        return (
            f"slower: a batch takes {_ms(now.cycle_s)}, {_ms(usual.cycle_s)} before; "
            f"{explain(usual, now)}"
        )


def summarize(windows: Sequence[WatchWindow]) -> WatchWindow:
    """Return the medians of some windows."""

    def median(of: Callable[[WatchWindow], float]) -> float:
        return statistics.median(of(window) for window in windows)

    return WatchWindow(
        seconds=median(lambda w: w.seconds),
        batches=round(median(lambda w: w.batches)),
        wait_s=median(lambda w: w.wait_s),
        step_s=median(lambda w: w.step_s),
        cpu_s=median(lambda w: w.cpu_s),
        queued_s=median(lambda w: w.queued_s),
        read_bytes=median(lambda w: w.read_bytes),
        blocked_fraction=median(lambda w: w.blocked_fraction),
        disk_fraction=median(lambda w: w.disk_fraction),
        others_cores=median(lambda w: w.others_cores),
        memory_fraction=median(lambda w: w.memory_fraction),
        available_bytes=round(median(lambda w: w.available_bytes)),
    )


def explain(usual: WatchWindow, now: WatchWindow) -> str:
    """Name what changed with the speed: the surest cause first."""
    waits_for_memory = now.memory_fraction > max(_SHORT_OF_MEMORY, 2 * usual.memory_fraction)
    if waits_for_memory and now.available_bytes < _LOW_BYTES:
        return (
            f"memory is short: processes wait for it {now.memory_fraction:.0%} of the time, "
            f"{now.available_bytes / 2**20:,.0f} MiB are available"
        )
    waits_more = now.wait_s - usual.wait_s > now.step_s - usual.step_s
    more_blocked = now.blocked_fraction - usual.blocked_fraction > _MORE_BLOCKED
    mostly_blocked = now.blocked_fraction > 0.5
    if (
        waits_more
        and now.batches
        and now.read_bytes > _MORE_READ * usual.read_bytes + _PAGE_BYTES
        and now.disk_fraction > 0.5
        and (more_blocked or mostly_blocked)
    ):
        return (
            f"the page cache no longer holds the data: {_kib(now.read_bytes)} come from storage "
            f"for a batch, {_kib(usual.read_bytes)} before"
        )
    if waits_more and (more_blocked or mostly_blocked):
        rate = now.read_bytes * now.batches / now.seconds / 1e6
        return (
            f"storage or the network is slow: the workers wait {now.blocked_fraction:.0%} of the "
            f"time that the loop waits; {rate:,.1f} MB/s are read from local storage"
        )
    slower_s = now.cycle_s - usual.cycle_s
    computes_more_s = now.cpu_s - usual.cpu_s
    # On a busy host, what computes longer also waits longer for a processor: that is no cause.
    queues_more_s = now.queued_s - usual.queued_s * now.cpu_s / max(usual.cpu_s, 1e-9)
    others = f"other processes take {now.others_cores:.1f}, {usual.others_cores:.1f} before"
    if queues_more_s > max(_EXPLAINS * slower_s, computes_more_s):
        return f"the run waits for processors; {others}"
    if not waits_more:
        return f"not by its data: the step takes {_ms(now.step_s)}, {_ms(usual.step_s)} before"
    if computes_more_s > max(_EXPLAINS * slower_s, (_BACK - 1) * usual.cpu_s):
        return f"a batch takes {_ms(now.cpu_s)} of processor time, {_ms(usual.cpu_s)} before"
    # The workers are ready when the loop waits, and compute no longer. What those have waited that
    # ended is not known.
    return f"the workers wait for processors; {others}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _kib(count: float) -> str:
    return f"{count / 1024:,.0f} KiB"
