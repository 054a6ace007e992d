"""Calls users' code in a thread of the training process, and leaves the trainer's draws alone.

Work may be made twice, where the first try drew numbers (``OwnThread``). In a process that trains
nothing, several threads call the code by turns, and seed it for each call (``take_turns``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from stoker.basics.generators import GeneratorStates, global_generators
from stoker.engine.work.work import Work

Made = TypeVar("Made")


class CannotRepeat(Exception):
    """Work cannot be made a second time."""


class _Turns(threading.local):
    """Whether a thread waits for its turn to call users' code in its own process."""

    are_taken = False


_TURNS, _TURN = _Turns(), threading.RLock()


def _end_turns() -> None:
    """Take no turns in a forked child, where nobody would give the lock back."""
    global _TURNS, _TURN
    _TURNS, _TURN = _Turns(), threading.RLock()


os.register_at_fork(after_in_child=_end_turns)


def take_turns() -> None:
    """Have this thread call users' code by turns with all others that have called this.

    It is for a process where nobody else calls that code, or draws: its global generators are
    seeded for each call, as in a worker process.
    """
    _TURNS.are_taken = True


class OwnThread:
    """Has the consumer's thread call the user's code, and leaves the trainer's draws as they are.

    Nearly all code draws nothing from the global generators, and seeding them takes longer than
    many a call. So their states are compared after each piece of work. If it drew, they are put
    back, and it is made again with seeds, as all is from then on.

    In other threads than the main thread, global generators are left alone, as the main thread may
    draw from them meanwhile; but for threads that take turns.
    """

    def __init__(self) -> None:
        self._before: GeneratorStates | None = None

    def make(self, work: Work, make: Callable[[bool], Made], ns: list[int]) -> Made:
        """Return what ``make`` returns.

        Args:
            work: calls the code.
            make: makes it, and is told whether it may be asked to make it again. It may raise
                CannotRepeat before it calls any code.
            ns: the counters that it adds to.
        """
        if _TURNS.are_taken:
            with _TURN:
                return self._make(work, make, ns, with_global=True)
        is_main = threading.current_thread() is threading.main_thread()
        return self._make(work, make, ns, with_global=is_main)

    def _make(
        self, work: Work, make: Callable[[bool], Made], ns: list[int], *, with_global: bool
    ) -> Made:
        while with_global and not work.segment.draws:
            counters, before = list(ns), self._states()
            try:
                if work.holds_generators:
                    with work.seeding(with_global=False):
                        made = make(True)
                else:
                    made = make(True)
            except CannotRepeat:
                work.segment.draws = True
                break
            has_drawn = before.have_moved()
            if not has_drawn and before.generators is global_generators():
                return made
            # It drew; or torch was imported by it, and is looked at the next time.
            before.restore()
            ns[:] = counters
            work.segment.draws = has_drawn
        with work.seeding(with_global=with_global):
            return make(False)

    def _states(self) -> GeneratorStates:
        """Return the states of the global generators, which are rarely read in full."""
        kept, now = self._before, global_generators()
        if kept is None or kept.generators is not now or kept.have_moved():
            kept = self._before = GeneratorStates(now)
        return kept
