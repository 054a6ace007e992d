"""A worker process: it answers requests, one at a time, until its parent ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from stoker.basics import resources
from stoker.basics.process import end_with
from stoker.basics.resources import ThreadTimer
from stoker.engine.work.call_seeds import seeding_ns
from stoker.engine.work.step import WorkAddress
from stoker.engine.work.work import Work
from stoker.engine.work.worker_status import current_worker
from stoker.engine.workers.cost import SAMPLED_NS, TIMED
from stoker.engine.workers.processes.signs import Signs
from stoker.engine.workers.requests import (
    Compared,
    Comparison,
    GilQuestion,
    WorkExecutor,
    unloadable,
)
from stoker.transport import channel
from stoker.transport.channel import Arena

# Requests that are all sampled, as they decide whether the work is costly: the time in which other
# programs have the processor is left out. A sample costs 20 to 50 us.
_TRIAL_REQUESTS = 16
NO_DESCRIPTORS = 71
"""The exit code of a process that lacked file descriptors: EX_OSERR of sysexits.h."""
# Between two looks: of code that held the GIL 0, 47 and 100 % of its time this found 1, 44 and 94 %
# within 6 ms; with 1 ms between them there were too few.
_PAUSE_S = 0.0002
# By what a sleep that waits for no GIL is too long: the kernel's timer slack, and waking up.
_SLACK_S = 0.0001


class Epoch(NamedTuple):
    """Tells a process that another epoch begins, with the addresses of its works, by depth."""

    addresses: list[WorkAddress]


class Rest(NamedTuple):
    """Asks a process to have written all that it keeps back, and to answer: an epoch is over."""


def serve(
    connection: Connection,
    not_ours: list[Connection],
    slots: list[tuple[str, str]],
    works: list[Work],
    parent: int,
    places: Mapping[int, int],
    by_main_thread: bool,
    signs: Signs | None,
) -> None:
    """Answer requests for batches and chunks until the parent ends the process, or is gone.

    Args:
        connection: the pipe of requests and answers.
        not_ours: connections that a fork inherited from the parent.
        slots: for each thread, the arenas for the arrays of requests and of answers.
        works: the works, by depth.
        parent: the training process.
        places: the parent's files open for reading, inherited by a fork.
        by_main_thread: whether the parent's main thread started this process.
        signs: where it shows its state; None if nobody watches it.
    """
    for other in not_ours:  # inherited: an end that stays open here would hide the parent's death
        other.close()
    _reopen(places)
    end_with(parent, by_main_thread)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles signals to its group
        signal.signal(number, signal.SIG_IGN)
    if "torch" in sys.modules:
        # Workers share the cores, so torch's threads in each of them would wait for one another.
        sys.modules["torch"].set_num_threads(1)
    if signs is not None:
        signs.open()
    try:
        _serve(connection, slots, works)
    except OSError as error:
        if not resources.lacks_descriptors(error):
            raise
        sys.exit(NO_DESCRIPTORS)


def _reopen(places: Mapping[int, int]) -> None:
    """Reopen files that a fork inherits, each under its number and at its position.

    The user's objects hold the same numbers, so they need no change. A file that cannot be
    reopened (for instance, its owner has changed) stays as it is.
    """
    for number, place in places.items():
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~os.O_CREAT
            opened = os.open(f"/proc/self/fd/{number}", flags | os.O_CLOEXEC)
            try:
                os.lseek(opened, place, os.SEEK_SET)
                os.dup2(opened, number, os.get_inheritable(number))
            finally:
                os.close(opened)


def _serve(connection: Connection, slots: list[tuple[str, str]], works: list[Work]) -> None:
    inboxes, outboxes = (
        [Arena.open(handle) for handle in handles] for handles in zip(*slots, strict=True)
    )
    runner = WorkExecutor()
    known = {work.address.at: work for work in works}
    probe: GilProbe | None = None
    untimed_ns = requests = 0  # the very first one is no sample
    while True:
        try:
            slot, request = channel.receive(connection, inboxes)
        except (EOFError, ConnectionError):
            return
        except channel.Unloadable as error:
            channel.send(connection, (unloadable(error), []), error.slot, None)
            continue
        if request is None:
            return
        if isinstance(request, Epoch):
            works = [known[address.at].at(address) for address in request.addresses]
            continue
        if isinstance(request, Rest):
            for work in works:
                if work.segment.cache is not None:
                    work.segment.cache.cache.flush()
            channel.send(connection, None, slot, None)
            continue
        if isinstance(request, Comparison):
            work, request = works[request.request.depth], request.request
            differs = runner.depends_on_order(work, request)
            channel.send(connection, Compared(differs, seeding_ns()), slot, None)
            continue
        if isinstance(request, GilQuestion):
            channel.send(connection, probe and probe.free_fraction, slot, None)
            probe = GilProbe() if probe is None else None
            continue
        work = works[request.depth]
        ns = work.segment.counters()
        began_ns = time.perf_counter_ns()
        is_sampled = 0 < requests < _TRIAL_REQUESTS or untimed_ns > SAMPLED_NS
        timer = ThreadTimer() if is_sampled else None
        requests += 1
        with probe or contextlib.nullcontext():
            answer = runner.do(work, request, ns, outboxes[slot], slot)
        if current_worker.status is not None:
            current_worker.status.leave()
        untimed_ns += time.perf_counter_ns() - began_ns
        if timer is not None:
            ns[TIMED], untimed_ns = (len(request.places), *timer.read_ns()), 0
        try:
            channel.send(connection, (answer, ns), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            if isinstance(error, OSError) and resources.lacks_descriptors(error):
                raise
            sendable = runner.sendable(work, request, answer, error)
            channel.send(connection, (sendable, ns), slot, outboxes[slot])


class GilProbe:
    """Measures how much of the time within ``with`` other threads could have run Python code.

    A thread sleeps and wakes up, again and again; how much later than planned it gets on is how
    long it waited for the GIL. It calls nobody's code.
    """

    def __init__(self) -> None:
        self._waited_s = self._elapsed_s = 0.0
        self._is_over = False
        self._thread: threading.Thread

    @property
    def free_fraction(self) -> float | None:
        """The share of the time in which the GIL was free; None before any was measured."""
        if not self._elapsed_s:
            return None
        return max(0.0, 1.0 - self._waited_s / self._elapsed_s)

    def __enter__(self) -> Self:
        self._is_over = False
        self._thread = threading.Thread(target=self._look, name="stoker-gil-probe", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._thread.join()

    def _look(self) -> None:
        began = before = time.perf_counter()
        while not self._is_over:
            time.sleep(_PAUSE_S)
            now = time.perf_counter()
            self._waited_s += max(0.0, now - before - _PAUSE_S - _SLACK_S)
            before = now
        self._elapsed_s += before - began
