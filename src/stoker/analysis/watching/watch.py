"""A watched process: its counters, the thread that reads the kernel, and what it says."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from stoker.adapters.exposition import MetricsServer
from stoker.analysis.watching import readings
from stoker.analysis.watching.histogram import DurationHistogram
from stoker.analysis.watching.page import write_watch_page
from stoker.analysis.watching.slowdown import SlowdownDetector, WatchWindow
from stoker.analysis.watching.stats import WatchStats
from stoker.basics.future import OneShot, start_thread
from stoker.basics.process import WORKER_NAME
from stoker.basics.resources import process_group
from stoker.basics.signals import defer_interrupts
from stoker.basics.warn import say

# Four looks a second: a stall of some seconds is split, and a look takes some 0.1 ms.
_TICK_S = 0.25
# The most that the thread takes of a processor: with many workers, it looks less often.
_SHARE = 0.005
# Long enough for some batches of slow jobs, short enough to hear of a slowdown within half a
# minute.
_WINDOW_S = 10.0
# As often as people look.
_TELL_S = 60.0
# Looks while the loop waited: fewer do not split a stall.
_FEWEST_LOOKS = 20
# Waits that are kept for the page.
_LONGEST_COURSE = 360

_clock = time.perf_counter_ns


class LoaderTimes:
    """The times of one kind of loader, over all its epochs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits = DurationHistogram()
        self.steps = DurationHistogram()
        # While a loop waited for it: what its workers did.
        self.looks = Counter(computed=0, asleep=0, disk=0)


class ReaderTimes:
    """The times of a thread that iterates loaders.

    Attributes:
        entered_ns: when it began to wait for the present batch; 0 while it does not wait.
        wait_ns: time spent waiting, over the whole run.
        left_ns: when it last ended to wait.
        times: of the loader that it waits for, or has waited for last.
    """

    __slots__ = ("_since_ns", "entered_ns", "left_ns", "task", "times", "wait_ns")

    def __init__(self) -> None:
        self._since_ns = self.left_ns = _clock()
        self.entered_ns = self.wait_ns = 0
        self.task = f"self/task/{threading.get_native_id()}"
        self.times = LoaderTimes("")

    def leave(self) -> int:
        """End a wait; return the time."""
        self.left_ns = now_ns = _clock()
        self.wait_ns += now_ns - self.entered_ns
        self.entered_ns = 0
        return now_ns

    def measure_ns(self, now_ns: int, *, goes_on: bool) -> tuple[int, int]:
        """Return its waiting so far, and its time: up to now if it goes on, else while it read."""
        entered_ns = self.entered_ns
        waits_ns = self.wait_ns + (now_ns - entered_ns if entered_ns else 0)
        until_ns = now_ns if goes_on or entered_ns else self.left_ns
        return waits_ns, until_ns - self._since_ns


class EpochTimes:
    """Times the calls of one iterator."""

    __slots__ = ("_left_ns", "_times", "_watch")

    def __init__(self, watch: RunWatch, times: LoaderTimes) -> None:
        self._watch, self._times = watch, times
        self._left_ns = 0

    def next(self, advance: Callable[[Any], Any], iterator: Any) -> Any:
        """Return ``advance(iterator)``, and count its time, unless another iterator's is it."""
        watch, left_ns = self._watch, self._left_ns
        reader = watch.reader()
        if reader.entered_ns:
            return advance(iterator)
        reader.times = self._times
        entered_ns = reader.entered_ns = _clock()
        try:
            batch = advance(iterator)
        except StopIteration:
            self._left_ns = 0
            raise
        except BaseException:
            watch.tell_dead(iterator)
            raise
        finally:
            now_ns = reader.leave()
        self._left_ns = now_ns
        with watch.lock:
            watch.batches += 1
            if left_ns:  # else it is the first of its epoch
                self._times.waits.add(now_ns - entered_ns)
                self._times.steps.add(entered_ns - left_ns)
        return batch


class RunWatch:
    """A watched process; made by ``stoker.watch``.

    Attributes:
        batches: of all loaders.
        lock: held while they are counted: several threads may read loaders.
        is_closed: True once it watches no more.
    """

    def __init__(self, port: int | None = None) -> None:
        self.batches = 0
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.is_closed = False
        self._loaders: dict[str, LoaderTimes] = {}
        self._since_ns = 0
        self._readers: list[ReaderTimes] = []
        self._thread_local = threading.local()
        self._warnings: list[str] = []
        self._detector = SlowdownDetector()
        self._course: list[WatchWindow] = []
        self._children = readings.list_children()
        self._is_stale = True  # of the children
        self._server = None if port is None else MetricsServer({"watch": self}, port)
        if self._server is not None:
            self._say(f"{self._server.url.removesuffix('metrics')} shows this run")
        self._last: WatchStats | None = None  # of a closed watch
        self._over: OneShot[None] = OneShot()
        # Not atexit, which children of multiprocessing leave out.
        self._end = util.Finalize(None, self.close, exitpriority=0)
        with defer_interrupts():
            self._thread = start_thread("stoker-watch", self._look_on)

    @property
    def url(self) -> str | None:
        """The page's URL; None without a port."""
        return None if self._server is None else self._server.url.removesuffix("metrics")

    def close(self) -> None:
        """Stop watching, and say how the run was. May be called again."""
        if self.is_closed or os.getpid() != self.pid:
            return
        self.is_closed = True
        self._over.give(None)
        self._thread.join(_WINDOW_S)
        self._last = self.stats()
        if self._server is not None:
            self._server.close()
        if self._since_ns:
            self._say(str(self.stats()))

    # What the hooks call

    def reader(self) -> ReaderTimes:
        """Return the times of the thread that calls."""
        try:
            found: ReaderTimes = self._thread_local.reader
        except AttributeError:
            found = self._thread_local.reader = ReaderTimes()
            self._readers.append(found)
        return found

    def begin(self, name: str) -> EpochTimes:
        """Begin an epoch of a loader of this name."""
        if not self._since_ns:
            self._since_ns = _clock()
        self._is_stale = True
        times = self.reader().times = self._loaders.setdefault(name, LoaderTimes(name))
        return EpochTimes(self, times)

    def tell_dead(self, iterator: Any) -> None:
        """Warn of workers that are gone, as an iterator failed."""
        workers = [worker.pid for worker in getattr(iterator, "_workers", ())]
        dead = [f"worker {pid}" for pid in workers if readings.read_state(str(pid)) in "XZ"]
        if dead:
            free = readings.read_host().available_bytes / 2**20
            self._warn(
                f"{', '.join(dead)} ended while the loop waited for a batch: killed, perhaps, as "
                f"memory was short ({free:,.0f} MiB are available now)"
            )

    # What it knows

    def stats(self) -> WatchStats:
        """Return the run so far, or up to ``close()``. May be called from any thread."""
        if self._last is not None:
            return self._last
        now_ns = _clock()
        latest = max([*self._readers], key=lambda reader: reader.left_ns, default=None)
        times = [each.measure_ns(now_ns, goes_on=each is latest) for each in [*self._readers]]
        together_ns = sum(lasted_ns for _, lasted_ns in times)
        stall = min(1.0, sum(waited_ns for waited_ns, _ in times) / max(1, together_ns))
        prep = fetch = None
        looks = sum((times.looks for times in [*self._loaders.values()]), Counter())
        if looks.total() >= _FEWEST_LOOKS:
            fetch = stall * (1 - looks["computed"] / looks.total())
            prep = stall - fetch
        main = self._find_main()
        waits = DurationHistogram() if main is None else main.waits
        return WatchStats(
            rank=_read_rank()[0],
            elapsed_s=(now_ns - self._since_ns) / 1e9 if self._since_ns else 0.0,
            batches=self.batches,
            compute_fraction=1.0 - stall,
            stall_fraction=stall,
            prep_stall_fraction=prep,
            fetch_stall_fraction=fetch,
            wait_p50_s=waits.quantile(0.5),
            wait_p95_s=waits.quantile(0.95),
            wait_p99_s=waits.quantile(0.99),
            warnings=list(self._warnings),
        )

    def metrics(self) -> dict[str, float]:
        """Return the run so far as numbers, for ``stoker.metrics``."""
        found = self.stats()
        numbers: dict[str, float] = {
            "stall_fraction": found.stall_fraction,
            "compute_fraction": found.compute_fraction,
            "wait_p50_s": found.wait_p50_s,
            "wait_p95_s": found.wait_p95_s,
            "wait_p99_s": found.wait_p99_s,
            "batches_total": found.batches,
            "elapsed_s_total": found.elapsed_s,
            "wait_s_total": found.stall_fraction * found.elapsed_s,
            "warnings_total": len(found.warnings),
        }
        if found.prep_stall_fraction is not None and found.fetch_stall_fraction is not None:
            numbers["prep_stall_fraction"] = found.prep_stall_fraction
            numbers["fetch_stall_fraction"] = found.fetch_stall_fraction
        return numbers

    def page(self) -> str:
        """Return the run so far as a page for a browser, which loads itself again."""
        return write_watch_page(Path(sys.argv[0]).name, self.stats(), list(self._course))

    def _find_main(self) -> LoaderTimes | None:
        """Return the loader with most batches."""
        return max([*self._loaders.values()], key=lambda times: times.waits.count, default=None)

    # The thread

    def _look_on(self) -> None:
        try:
            self._look_until_over()
        except Exception as error:  # a script does not fail because nobody watches it
            self._say(f"the causes of a slowdown are not known: {type(error).__name__}: {error}")

    def _look_until_over(self) -> None:
        window = _WindowStart(self)
        pause_s, told_ns = _TICK_S, _clock()
        while True:
            try:
                return self._over.wait(pause_s)
            except TimeoutError:
                began_s = time.thread_time()
            self._look()
            if _clock() - window.began_ns >= _WINDOW_S * 1e9:
                found, window = window.end(), _WindowStart(self)
                self._course = [*self._course, found][-_LONGEST_COURSE:]
                said = self._detector.add(found)
                if said is not None:
                    self._warn(said)
            if _clock() - told_ns >= _TELL_S * 1e9 and self._since_ns:
                told_ns = _clock()
                if _read_rank()[0] == 0:
                    self._say(str(self.stats()))
            pause_s = max(_TICK_S, (time.thread_time() - began_s) / _SHARE)

    def _list_waiting(self) -> list[ReaderTimes]:
        return [reader for reader in [*self._readers] if reader.entered_ns]

    def _look(self) -> None:
        """See what the workers do while a loop waits."""
        waiting = self._list_waiting()
        if not waiting:
            return
        if self._is_stale:
            self._is_stale, self._children = False, readings.list_children()
        # Without workers, it is the reader that computes or waits.
        threads = [one for one in threading.enumerate() if one.name.startswith(WORKER_NAME)]
        tasks = [reader.task for reader in waiting]
        tasks += [f"self/task/{thread.native_id}" for thread in threads]
        tasks += map(str, self._children)
        states = {readings.read_state(task) for task in tasks}
        found = "computed" if "R" in states else "disk" if "D" in states else "asleep"
        for times in {reader.times for reader in self._list_waiting()}:  # still
            times.looks[found] += 1

    def _warn(self, text: str) -> None:
        self._warnings.append(f"{time.strftime('%H:%M:%S')} {text}")
        self._say(text)

    def _say(self, text: str) -> None:
        rank, ranks = _read_rank()
        who = f" [rank {rank}]" if ranks > 1 else ""
        say(f"stoker watch{who}: {text}")


class _WindowStart:
    """The counters at the begin of a window."""

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch
        self.began_ns = _clock()
        self._main = watch._find_main()
        self._waits = DurationHistogram() if self._main is None else self._main.waits
        self._waited_ns, self._count = self._waits.total_ns, self._waits.count
        if self._main is not None:
            self._main.steps = DurationHistogram()  # for the median of this window
        self._looks = Counter() if self._main is None else self._main.looks.copy()
        self._run = readings.read_run(watch._children)
        self._host = readings.read_host()

    def end(self) -> WatchWindow:
        """Return what happened since."""
        watch, main, before = self._watch, self._main, self._run
        seconds = (_clock() - self.began_ns) / 1e9
        batches = self._waits.count - self._count
        wait_s = (self._waits.total_ns - self._waited_ns) / 1e9 / max(1, batches)
        if not batches:
            entered_ns = [each.entered_ns for each in watch._list_waiting() if each.times is main]
            wait_s = (_clock() - min(entered_ns)) / 1e9 if entered_ns else 0.0
        watch._children = readings.list_children()
        after = readings.read_run(watch._children)
        cpu_s = max(0.0, after.cpu_s - before.cpu_s)
        queued_s = sum(now - before.queued_s.get(pid, 0.0) for pid, now in after.queued_s.items())
        host = readings.read_host()
        looks = Counter() if main is None else main.looks - self._looks
        blocked = looks["asleep"] + looks["disk"]
        states = ((pid, readings.read_state(str(pid))) for pid in watch._children)
        return WatchWindow(
            seconds=seconds,
            batches=batches,
            wait_s=wait_s,
            step_s=0.0 if main is None else main.steps.quantile(0.5),
            cpu_s=cpu_s / max(1, batches),
            queued_s=queued_s / max(1, batches),
            read_bytes=max(0, after.read_bytes - before.read_bytes) / max(1, batches),
            blocked_fraction=blocked / max(1, looks.total()),
            disk_fraction=looks["disk"] / max(1, blocked),
            others_cores=max(0.0, host.busy_s - self._host.busy_s - cpu_s) / seconds,
            memory_fraction=(host.memory_s - self._host.memory_s) / seconds,
            available_bytes=host.available_bytes,
            stopped=tuple(f"process {pid}" for pid, state in states if state in "Tt"),
        )


def _read_rank() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and ranks.isdigit():
        return int(rank), int(ranks)
    return process_group() or (0, 1)
