"""What runs in a worker process: it does requests, one at a time, until its parent is gone."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

from stoker.engine.pool.request_runner import RequestRunner
from stoker.engine.work import Work
from stoker.ipc import channel
from stoker.ipc.channel import Arena

_PR_SET_PDEATHSIG = 1


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
    _die_with(parent, by_main_thread)
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
        ns = [0] * len(work.segment.names)
        answer = runner.do(work, request, ns)
        misdrawn = work.misdrawn
        try:
            channel.send(connection, (answer, ns, misdrawn), slot, outboxes[slot])
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            sendable = runner.sendable(work, request, answer, error)
            channel.send(connection, (sendable, ns, misdrawn), slot, outboxes[slot])
        misdrawn.clear()


def _die_with(parent: int, by_main_thread: bool) -> None:
    """Have this process end with its parent, however that dies and whatever it is doing.

    The kernel's own signal comes at once, but tells of the thread that forked, and under
    forkserver of the server; a pidfd tells of the process.
    """
    if not sys.platform.startswith("linux"):
        return
    if by_main_thread and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    end_with(parent)


def end_with(parent: int) -> None:
    """Have this process end when another one has. Linux alone has a way to wait for that."""
    if not sys.platform.startswith("linux"):
        return
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel or a sandbox without it
        return

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="stoker-parent-watch", daemon=True).start()
