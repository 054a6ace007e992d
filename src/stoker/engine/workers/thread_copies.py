"""Copies of the user's objects, for each thread its own; kept from epoch to epoch.

The consumer calls the objects that the user gave, worker threads call copies (``replica``). A
thread makes its own as it begins, under ``USER_LOCK``, and hands them on to the next epoch as it
ends: while the originals stay as they were, that goes on with them, and with the files that they
hold open. They are made anew where an original has changed.

While threads of any run may call copies, the consumer takes ``USER_LOCK`` for its own calls: an
original is then copied, called in place of a copy that failed, or called by threads one at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker.basics.process import OwningProcess
from stoker.engine.plan.segment import Segment
from stoker.engine.work.user_calls import Call, Retry
from stoker.engine.work.work import Work
from stoker.replicas.copying.attributes import UnsetAttributes
from stoker.replicas.replica import USER_LOCK, Replica, replicate, unset_attributes
from stoker.sources.origin import UserObject

CALLING: set[ThreadCopies] = set()
"""Those of the runs whose threads may call copies now. The consumer then calls originals under
``USER_LOCK``."""
_PARENTS: list[deque[Replica]] = []
"""What a forked child inherited. It is never freed there: that could end what the parent uses."""


def _in_child() -> None:
    CALLING.clear()
    lock: Any = USER_LOCK
    if not lock._is_owned():  # a thread of the parent may hold it, for ever
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class KeptCopies:
    """What a pipeline keeps of its threads' copies from epoch to epoch.

    Attributes:
        age: how often copies were found to be of no use; those of an earlier age are made anew.
        unset: what was not there yet when the first epoch began: handles are opened since.
        unfit: the numbers of objects whose copies are of no use, with the reasons.
        warnings: what the user is to be told.
    """

    def __init__(self) -> None:
        self.age = 0
        self.unset: UnsetAttributes | None = None
        self.unfit: dict[int, str] = {}
        self.warnings: list[str] = []
        self._told: set[int] = set()
        self._are_private = False
        self._process = OwningProcess()
        self._free: deque[Replica] = deque()

    def __reduce__(self) -> tuple[type[KeptCopies], tuple[()]]:
        return KeptCopies, ()  # a pipeline that an object holds is copied without its copies

    def take(self, generation: object) -> Replica | None:
        """Return copies that a thread of an earlier epoch called, None if there are none to use.

        ``generation`` is the same for all threads of an epoch.
        """
        if not self._process.is_current:
            _PARENTS.append(self._free)
            self._process, self._free = OwningProcess(), deque()
        while self._free:
            replica = self._free.popleft()
            if replica.is_current(generation):
                return replica
        return None

    def give(self, replica: Replica) -> None:
        """Keep what a thread has called for the next epoch."""
        self._free.append(replica)

    def distrust(self, replica: Replica, copies: Sequence[int], error: BaseException) -> None:
        """Have no copies used any more as those are that failed where their originals do not.

        At first large arrays are given to each copy for itself: it cannot write to shared ones.
        Then the originals are called in place of such copies, one call at a time.
        """
        self._free.clear()
        self.age += 1
        if not self._are_private:
            self._are_private = True
            if replica.make_private():
                return
        error = error.__cause__ or error
        for number in copies:
            said = f"{type(error).__name__}: {error}"
            self.unfit.setdefault(number, f"a copy of it raised {said}, which it does not itself")

    def tell(self, objects: Sequence[UserObject], replica: Replica) -> None:
        """Have the user told of what is called by one thread at a time, once of each."""
        for number, (each, reason) in enumerate(zip(objects, replica.locked, strict=True)):
            if reason is not None and number not in self._told:
                self._told.add(number)
                self.warnings.append(
                    f"{each.name} runs one call at a time: {reason}. Take .workers(n, "
                    f'kind="process"), or declare stoker.thread_safe({_called(each.value)}) if '
                    "calls at once are right"
                )


class _Mine(NamedTuple):
    """What one thread calls."""

    replica: Replica
    works: dict[Work, Work]
    age: int
    """That of ``KeptCopies`` when it was made."""
    is_kept: bool
    """Whether a thread of an earlier epoch has called it."""


class _Here(threading.local):
    """The calling thread.

    Attributes:
        works: whether it is a worker of the run.
    """

    works = False
    mine: _Mine | None = None


class ThreadCopies:
    """The copies that the threads of one run call: ``Copies``.

    Args:
        segments: those whose objects are copied, all together.
        works: the consumer's, of these segments.
        kept: what earlier epochs have left.
    """

    def __init__(
        self, segments: Sequence[Segment], works: Sequence[Work], kept: KeptCopies
    ) -> None:
        self._segments = segments
        self._works = works
        self._kept = kept
        self._objects = [each for segment in segments for each in segment.user_objects]
        self._roots = [each.value for each in self._objects]
        if kept.unset is None:
            kept.unset = unset_attributes(self._roots)
        self._here = _Here()
        self._generation = object()
        self.copying_ns = 0

    def begin(self) -> None:
        """Have consumers call originals under the lock: threads begin to call copies."""
        CALLING.add(self)

    def end(self) -> None:
        """The threads have ended."""
        CALLING.discard(self)

    def join(self, *, at_once: bool) -> None:
        self._here.works = True
        if at_once:
            self._own()

    def leave(self) -> None:
        """Keep what the calling thread has called: it ends."""
        mine, self._here.mine = self._here.mine, None
        if mine is not None and mine.age == self._kept.age:
            self._kept.give(mine.replica)

    def work(self, original: Work) -> Work:
        """Return the work that the calling thread is to do in place of the consumer's."""
        if not self._here.works:
            return original
        return self._own().works.get(original, original)

    def fresh(self, failed: Retry[Work], original: Work) -> Work | None:
        mine = self._own()
        current = mine.works.get(original)
        if current is not None and current.retry is failed:
            if not mine.is_kept:
                return None
            with USER_LOCK:
                self._here.mine = self._made()
        return self.work(original)

    def distrust(self, copies: tuple[int, ...], error: BaseException) -> None:
        mine = self._here.mine
        with USER_LOCK:
            if mine is not None and mine.age == self._kept.age:  # else somebody was faster
                self._kept.distrust(mine.replica, copies, error)

    def _own(self) -> _Mine:
        mine = self._here.mine
        if mine is None or mine.age != self._kept.age:
            with USER_LOCK:
                kept = self._kept.take(self._generation)
                mine = self._here.mine = self._made() if kept is None else self._calling(kept, True)
        return mine

    def _made(self) -> _Mine:
        began = time.thread_time_ns()
        replica = replicate(self._roots, self._kept.unset, self._kept.unfit)
        self.copying_ns = max(self.copying_ns, time.thread_time_ns() - began)
        self._kept.tell(self._objects, replica)
        return self._calling(replica, False)

    def _calling(self, replica: Replica, is_kept: bool) -> _Mine:
        """Return the works of a thread that calls these copies."""
        number, segments = 0, {}
        calls: dict[int, list[Call]] = {}
        for segment in self._segments:
            count = len(segment.user_objects)
            values = replica.values[number : number + count]
            segments[segment.at] = segment.with_user_objects(values)
            calls[segment.at] = []
            for caller in segment.callers:
                own = range(number, number + len(caller.user_objects()))
                copies = [at for at in own if replica.values[at] is not self._roots[at]]
                is_locked = any(replica.locked[at] is not None for at in own)
                calls[segment.at].append(Call(is_locked, tuple(copies)))
                number = own.stop
        source = segments[self._segments[0].at].source
        works = {
            work: work.with_calls(segments[work.address.at], source, calls[work.address.at], self)
            for work in self._works
        }
        return _Mine(replica, works, self._kept.age, is_kept)


def _called(value: Any) -> str:
    """Return what a declaration would name."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if isinstance(name, str) and name.isidentifier() else "fn"
