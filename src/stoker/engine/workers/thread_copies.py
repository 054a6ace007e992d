"""Each worker thread's own copies of the user's objects, kept from epoch to epoch.

The consumer calls the objects that the user gave; worker threads call copies (``replica``). A
thread makes its copies when it begins, under ``USER_LOCK``. When it ends, it leaves them, with the
files that they hold open, to a thread of the next epoch. If an original has changed by then, new
copies are made.

While threads of any run may call copies, the consumer takes ``USER_LOCK`` for its own calls: a
thread may be copying an original, or calling it in place of a copy that failed or cannot be made.
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
from stoker.replicas.replica import Replica, replicate, unset_attributes
from stoker.replicas.user_lock import USER_LOCK
from stoker.sources.origin import UserObject

CALLING: set[ThreadCopies] = set()
"""The copies of the runs whose threads may call copies now. Consumers then call originals under
``USER_LOCK``."""
_PARENTS: list[deque[Replica]] = []
"""Copies that a forked child inherited. Freeing them there could close what the parent uses."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALLING.clear)


class KeptCopies:
    """The copies that a pipeline keeps between epochs, and the objects that cannot be copied.

    Attributes:
        age: the number of times that copies turned out to be wrong; older copies are made anew.
        unset: the attributes that were not set when the first epoch began: later ones are handles
            that were opened since.
        unfit: the numbers of objects whose copies do not work, with the reasons.
        warnings: messages for the user.
    """

    def __init__(self) -> None:
        self.age = 0
        self.unset: UnsetAttributes | None = None
        self.unfit: dict[int, str] = {}
        self.warnings: list[str] = []
        self._has_warned: set[int] = set()
        self._are_private = False
        self._process = OwningProcess()
        self._free: deque[Replica] = deque()

    def __reduce__(self) -> tuple[type[KeptCopies], tuple[()]]:
        return KeptCopies, ()  # a copy of a pipeline, which an object may hold, begins without any

    def take(self, generation: object) -> Replica | None:
        """Return copies that a thread of an earlier epoch has left; None if none fit.

        ``generation`` is the same object for all threads of an epoch.
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
        """Keep a thread's copies for the next epoch."""
        self._free.append(replica)

    def distrust(self, replica: Replica, copies: Sequence[int], error: BaseException) -> None:
        """Record copies that failed although their originals do not; all copies are made anew.

        The new copies get large arrays of their own, as shared ones cannot be written to. If these
        copies fail, too, the originals are called in their place, one call at a time.
        """
        self._free.clear()
        self.age += 1
        if not self._are_private:
            self._are_private = True
            if replica.make_private():
                return
        error = error.__cause__ or error
        for number in copies:
            warning = f"{type(error).__name__}: {error}"
            self.unfit.setdefault(
                number, f"a copy of it raised {warning}, which it does not itself"
            )

    def tell(self, objects: Sequence[UserObject], replica: Replica) -> None:
        """Add a warning for each object that only one thread at a time may call, once for each."""
        for number, (each, reason) in enumerate(zip(objects, replica.locked, strict=True)):
            if reason is not None and number not in self._has_warned:
                self._has_warned.add(number)
                name = _name_to_declare(each.value)
                self.warnings.append(
                    f"{each.name} runs one call at a time: {reason}. Take .workers(n, "
                    f'kind="process"), or declare stoker.thread_safe({name}) if '
                    "calls at once are right"
                )


class _Mine(NamedTuple):
    """The copies of one thread, and the works that call them."""

    replica: Replica
    works: dict[Work, Work]
    age: int
    """The age of ``KeptCopies`` when the copies were made."""
    is_kept: bool
    """Whether a thread of an earlier epoch has used these copies."""


class _Here(threading.local):
    """Per thread: its copies.

    Attributes:
        works: whether the thread is a worker of the run.
    """

    works = False
    mine: _Mine | None = None


class ThreadCopies:
    """The copies that the threads of one run call: ``Copies``.

    Args:
        segments: the segments whose objects are copied, all at once.
        works: the consumer's works of these segments.
        kept: the copies that earlier epochs have left.
    """

    def __init__(
        self, segments: Sequence[Segment], works: Sequence[Work], kept: KeptCopies
    ) -> None:
        self._segments = segments
        self._works = works
        self._keeper = kept
        self._objects = [each for segment in segments for each in segment.user_objects]
        self._roots = [each.value for each in self._objects]
        if kept.unset is None:
            kept.unset = unset_attributes(self._roots)
        self._here = _Here()
        self._generation = object()
        self.copying_ns = 0  # the longest time that one thread spent on making its copies

    def begin(self) -> None:
        """From now on consumers call originals under the lock: threads begin to call copies."""
        CALLING.add(self)

    def end(self) -> None:
        """Let consumers call originals without the lock again: the threads have ended."""
        CALLING.discard(self)

    def join(self, *, at_once: bool) -> None:
        """Have the calling thread call copies, made now if ``at_once``, else at its first call."""
        self._here.works = True
        if at_once:
            self._own()

    def leave(self) -> None:
        """Keep the copies of the calling thread, which ends, for the next epoch."""
        mine, self._here.mine = self._here.mine, None
        if mine is not None and mine.age == self._keeper.age:
            self._keeper.give(mine.replica)

    def work(self, original: Work) -> Work:
        """Return the calling thread's version of the consumer's work."""
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
                self._here.mine = self._make_copies()
        return self.work(original)

    def distrust(self, copies: tuple[int, ...], error: BaseException) -> None:
        mine = self._here.mine
        with USER_LOCK:
            if mine is not None and mine.age == self._keeper.age:  # else another thread was faster
                self._keeper.distrust(mine.replica, copies, error)

    def _own(self) -> _Mine:
        mine = self._here.mine
        if mine is None or mine.age != self._keeper.age:
            with USER_LOCK:
                kept = self._keeper.take(self._generation)
                mine = self._here.mine = (
                    self._make_copies() if kept is None else self._calling(kept, True)
                )
        return mine

    def _make_copies(self) -> _Mine:
        began = time.thread_time_ns()
        replica = replicate(self._roots, self._keeper.unset, self._keeper.unfit)
        self.copying_ns = max(self.copying_ns, time.thread_time_ns() - began)
        self._keeper.tell(self._objects, replica)
        return self._calling(replica, False)

    def _calling(self, replica: Replica, is_kept: bool) -> _Mine:
        """Return copies, with the works that call them."""
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
        return _Mine(replica, works, self._keeper.age, is_kept)


def _name_to_declare(value: Any) -> str:
    """Return the name of an object for ``stoker.thread_safe()`` in a message."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if isinstance(name, str) and name.isidentifier() else "fn"
