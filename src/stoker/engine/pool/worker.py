"""What runs in a worker process: it does requests, one at a time, until its parent is gone."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from stoker.engine.pool.request_runner import RequestRunner
from stoker.engine.work import Work
from stoker.ipc import channel
from stoker.ipc.channel import Arena
from stoker.parentage import end_with


def serve(
    connection: Connection,
    not_ours: list[Connection],
    slots: list[tuple[str | None, str | None]],
    works: list[Work],
    parent: int,
    by_main_thread: bool,
) -> None:
    """Do requests for batches and chunks until the parent says that there are no more, or is gone.

    Args:
        connection: requests come and answers go here.
        not_ours: connections that were inherited by a fork.
        slots: the arenas for the arrays of requests, and of answers.
        works: what may be asked for, by depth.
        parent: the process that asks.
        by_main_thread: whether its main thread has started this process.
    """
    for other in not_ours:  # inherited: an end that stays open here would hide the parent's death
        other.close()
    end_with(parent, by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    inboxes, outboxes = (
        [Arena.open(handle) if handle else None for handle in handles]
        for handles in zip(*slots, strict=True)
    )
    runner = RequestRunner()
    while True:
        try:
            slot, request = channel.receive(connection, inboxes)
        except (EOFError, OSError):
            return
        if request is None:
            return
        work = works[request.depth]
        ns = work.segment.counters()
        answer = runner.do(work, request, ns, outboxes[slot])
        misdrawn = work.misdrawn
        try:
            channel.send(connection, (answer, ns, misdrawn), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            sendable = runner.sendable(work, request, answer, error)
            channel.send(connection, (sendable, ns, misdrawn), slot, outboxes[slot])
        misdrawn.clear()
