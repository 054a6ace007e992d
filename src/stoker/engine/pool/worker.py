"""What runs in a worker process: it does requests, one at a time, until its parent is gone."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from stoker import machine
from stoker.engine.pool.request_runner import RequestRunner, unloadable
from stoker.engine.pool.threads import SAMPLED_NS, TIMED
from stoker.engine.work import Work
from stoker.ipc import channel
from stoker.ipc.channel import Arena
from stoker.machine import ThreadTimer
from stoker.parentage import end_with
from stoker.replicas.reopening import reopen

NO_DESCRIPTORS = 71
"""The exit code of a process that lacked file descriptors: EX_OSERR of sysexits.h."""


def serve(
    connection: Connection,
    not_ours: list[Connection],
    slots: list[tuple[str | None, str | None]],
    works: list[Work],
    parent: int,
    places: Mapping[int, int],
    by_main_thread: bool,
) -> None:
    """Do requests for batches and chunks until the parent says that there are no more, or is gone.

    Args:
        connection: requests come and answers go here.
        not_ours: connections that were inherited by a fork.
        slots: the arenas for the arrays of requests, and of answers.
        works: what may be asked for, by depth.
        parent: the process that asks.
        places: files that it has open for reading, inherited by a fork.
        by_main_thread: whether its main thread has started this process.
    """
    for other in not_ours:  # inherited: an end that stays open here would hide the parent's death
        other.close()
    reopen(places)
    end_with(parent, by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        _serve(connection, slots, works)
    except OSError as error:
        if not machine.lacks_descriptors(error):
            raise
        sys.exit(NO_DESCRIPTORS)


def _serve(
    connection: Connection, slots: list[tuple[str | None, str | None]], works: list[Work]
) -> None:
    inboxes, outboxes = (
        [Arena.open(handle) if handle else None for handle in handles]
        for handles in zip(*slots, strict=True)
    )
    runner = RequestRunner()
    untimed_ns = SAMPLED_NS  # the first request that is not the very first is a sample
    while True:
        try:
            slot, request = channel.receive(connection, inboxes)
        except (EOFError, ConnectionError):
            return
        except channel.Unloadable as error:
            channel.send(connection, (unloadable(error), [], []), error.slot, None)
            continue
        if request is None:
            return
        work = works[request.depth]
        ns = work.segment.counters()
        began_ns = time.perf_counter_ns()
        timer = ThreadTimer() if untimed_ns > SAMPLED_NS else None
        answer = runner.do(work, request, ns, outboxes[slot])
        untimed_ns += time.perf_counter_ns() - began_ns
        if timer is not None:
            ns[TIMED], untimed_ns = (len(request.ordinals), *timer.read_ns()), 0
        misdrawn = work.misdrawn
        try:
            channel.send(connection, (answer, ns, misdrawn), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            if isinstance(error, OSError) and machine.lacks_descriptors(error):
                raise
            sendable = runner.sendable(work, request, answer, error)
            channel.send(connection, (sendable, ns, misdrawn), slot, outboxes[slot])
        misdrawn.clear()
