"""``check_threads``: runs a pipeline's user code in many threads, and compares with one.

It runs in a forked child, since code that is not thread-safe may crash the process. There each of
the user's objects is called as worker threads call it: a copy for each thread, a lock if it cannot
be copied, a declared object directly. So it finds the errors that training would have.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import reprlib
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.basics.pytree import equal
from stoker.basics.warn import warn
from stoker.engine.plan.segment import Segment
from stoker.engine.work.failure import REJECTED, Failure
from stoker.engine.work.user_calls import Call
from stoker.engine.work.work import Work
from stoker.pipeline import Pipeline
from stoker.replicas.replica import Replica, replicate, unset_attributes
from stoker.replicas.user_lock import USER_LOCK
from stoker.stages.batching.builder import Builder

# More than cores, so that threads are interrupted in the middle of things. Chosen, not measured.
_THREADS = 8
_SWITCH_S = 1e-6
"""How long a thread keeps the GIL: with Python's own 5 ms most races take hours to show."""
# After the end of a trial; threads that take longer wait for each other.
_PATIENCE_S = 60.0
# Differing examples in the message: one may look like chance, three are a pattern.
_SHOWN = 3


def check_threads(pipeline: Pipeline[Any], *, examples: int = 32, seconds: float = 5.0) -> int:
    """Call a pipeline's dataset and functions from many threads, and compare with one thread.

    In a child process, eight threads make the first examples again and again for ``seconds``, in
    random order, switching as often as Python can. They call the same objects as worker threads:
    copies, originals under the lock, and objects declared by :func:`stoker.thread_safe` directly.
    Their results are compared with one thread's, bit for bit, after every stage.

    A stage whose results already differ in one thread (it draws random numbers, or counts) cannot
    be compared; a warning names it. Rare errors take long to show: a passed check is not a proof.

    Args:
        pipeline: over an indexed source. It is not changed; the child has a copy of everything.
        examples: how many examples are made.
        seconds: how long threads make them.

    Returns:
        The number of examples that were compared.

    Raises:
        AssertionError: threads made another result, raised, crashed the process or hung. It names
        the stage, the example and the field, and the objects declared safe for threads.
        ValueError: the source is a stream or a loader, whose examples have no numbers.
    """
    if not isinstance(pipeline, Pipeline):
        raise TypeError(f"check_threads() takes a pipeline, not {pipeline!r:.80}")
    if pipeline.chain.plan.indexed is None:
        raise ValueError(
            f"check_threads needs examples by number, and {pipeline.chain.source.name} has none"
        )
    steps = _steps(pipeline)
    running = mmap.mmap(-1, _THREADS)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.close(ours)
            report = _Trial(pipeline, steps, examples, running).report(seconds)
            with open(theirs, "w") as out:
                json.dump(report, out)
            status = 0
        os._exit(status)
    os.close(theirs)
    try:
        text, ended = _read(ours, seconds + _PATIENCE_S)
    finally:
        os.close(ours)
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    at = sorted({each for each in running[:] if each})
    busy = " and ".join(steps[each - 1].name for each in at) or "making examples alone"
    if not ended:
        raise AssertionError(f"threads that called {busy} did not return: they wait for each other")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise AssertionError(f"{name} ended the process while {_THREADS} threads called {busy}")
    if status != 0:
        raise AssertionError(f"the process ended by itself (status {status}) in {busy}")
    report = json.loads(text)
    for each in report["unclear"]:
        warn(
            f"{each} gives two different results in one thread, so check_threads cannot compare it"
        )
    if report["found"]:
        raise AssertionError("; ".join(report["found"]))
    return int(report["compared"])


@dataclass(frozen=True)
class _Step:
    """One stage of a pipeline, or its source.

    Attributes:
        name: for people.
        segment: a segment of this stage alone.
        run: runs it, by a work, an ordinal, and its input.
        joins: how many examples it joins to a batch; 0 if it takes one.
    """

    name: str
    segment: Segment
    run: Callable[[Work, int, Any], Any]
    joins: int = 0


def _steps(pipeline: Pipeline[Any]) -> list[_Step]:
    """Return a pipeline's steps on the host, up to a point that joins, scans or moves examples."""
    plan = pipeline.chain.plan
    indexed = plan.indexed
    assert indexed is not None
    order = indexed.order(replace(plan.selection, drawing=None), pipeline.seed, 0)

    def fetch(work: Work, ordinal: int, _: Any) -> Any:
        return work.fetcher.fetch(order.span(ordinal, ordinal + 1), work.segment.counters())[0]

    def apply(work: Work, ordinal: int, value: Any) -> Any:
        values = [value]
        work.apply(values, work.inputs.places([ordinal]), None, work.segment.counters())
        return values[0]

    def collate(work: Work, ordinal: int, values: Any) -> Any:
        try:
            assert work.collate is not None
            return work.collate(values)
        except Exception as error:
            return Failure(error)

    def stack(work: Work, ordinal: int, values: Any) -> Any:
        builder = Builder(len(values), None, Recycler())
        builder.put(0, values)
        return builder.finish()

    def finish(work: Work, ordinal: int, batch: Any) -> Any:
        return work.finish(batch, ordinal, 0, work.segment.counters(), 1)

    steps: list[_Step] = []
    for segment in takewhile(lambda part: part.is_one_to_one, plan.parts):
        if not isinstance(segment, Segment):
            continue
        if segment.on_device:
            break
        bare = replace(
            segment, source=None, operations=[], cache=None, cache_ats=(), batch=None, batch_maps=[]
        )
        if segment.source is not None:
            own = replace(bare, source=segment.source)
            steps.append(_Step(segment.source.name, own, fetch))
        for operation in segment.operations:
            steps.append(_Step(operation.name, replace(bare, operations=[operation]), apply))
        if segment.batch is not None:
            own, name = replace(bare, batch=segment.batch), segment.batch.name
            if segment.batch.collate is None:
                steps.append(_Step(name, own, stack, segment.batch.n))
            else:
                steps.append(_Step(f"collate of {name}", own, collate, segment.batch.n))
        for batch_map in segment.batch_maps:
            steps.append(_Step(batch_map.name, replace(bare, batch_maps=[batch_map]), finish))
    return steps


def _read(descriptor: int, patience_s: float) -> tuple[str, bool]:
    """Return a child's output until its end, and whether it ended in time."""
    end = time.monotonic() + patience_s
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return "", False
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts).decode(), True
        parts.append(part)


class _Trial:
    """The trial in the child: one thread makes all examples, then several do.

    Args:
        pipeline, steps: the pipeline under trial, and its steps.
        examples: how many examples are made.
        running: for each thread the number of the step that it is in, from 1.
    """

    def __init__(
        self, pipeline: Pipeline[Any], steps: Sequence[_Step], examples: int, running: mmap.mmap
    ) -> None:
        plan = pipeline.chain.plan
        assert plan.indexed is not None
        self._indexed = plan.indexed
        self._order = plan.indexed.order(replace(plan.selection, drawing=None), pipeline.seed, 0)
        self._steps = steps
        self._running = running
        self._objects = [each for step in steps for each in step.segment.user_objects]
        self._roots = [each.value for each in self._objects]
        self._unset = unset_attributes(self._roots)
        self._works = [
            Work(
                step.segment,
                plan.address(step.segment.at, pipeline.seed, 0),
                self._indexed,
                self._order,
                misdrawn=[],
            )
            for step in steps
        ]
        self._examples = min(examples, len(self._order))
        self._unclear: list[str] = []
        self._tasks: list[tuple[int, int, Any, Any]] = []
        self._found: list[list[str]] = [[] for _ in steps]
        self._calls = 0

    def report(self, seconds: float) -> dict[str, Any]:
        """Make examples in one thread, then in several; return the report."""
        self._run_alone()
        sys.setswitchinterval(_SWITCH_S)
        end = time.monotonic() + seconds
        makers = [_Maker(self, number) for number in range(_THREADS if self._tasks else 0)]
        threads = [threading.Thread(target=each.make, args=(end,)) for each in makers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        declared = sorted({each for maker in makers for each in maker.replica.declared})
        note = f" (declared safe for threads: {', '.join(declared)})" if declared else ""
        found = [
            f"{self._steps[at].name}: {each}{note}"
            for at, those in enumerate(self._found)
            for each in those[:_SHOWN]
        ]
        return {"found": found, "unclear": self._unclear, "compared": self._calls}

    def _run_alone(self) -> None:
        """Make every example twice after every step, and note which steps can be compared."""
        values: dict[int, Any] = dict.fromkeys(range(self._examples))
        for at, (step, work) in enumerate(zip(self._steps, self._works, strict=True)):
            if step.joins:
                values = {0: list(values.values())[: step.joins]} if values else {}
            made, tasks, is_clear = {}, [], True
            for ordinal, value in values.items():
                once = step.run(work, ordinal, _copy_input(value))
                again = step.run(work, ordinal, _copy_input(value))
                if _has_failed(once) and _has_failed(again):
                    continue  # nothing to compare
                is_clear &= equal(once, again)
                tasks.append((at, ordinal, value, once))
                if type(once) is not Failure:
                    made[ordinal] = once
            if not is_clear:
                self._unclear.append(step.name)
            elif step.segment.user_objects:
                self._tasks += tasks
            values = made

    @property
    def has_enough(self) -> bool:
        """True if enough differences were found."""
        return any(len(each) >= _SHOWN for each in self._found)

    def works(self, replica: Replica) -> list[Work]:
        """Return the works of a thread, which call the copies in its replica."""
        rest = iter(zip(replica.values, replica.locked, strict=True))
        works = []
        for work, step in zip(self._works, self._steps, strict=True):
            own = [next(rest) for _ in step.segment.user_objects]
            segment = step.segment.with_user_objects([value for value, _ in own])
            call = Call(any(why is not None for _, why in own))
            source = segment.source or self._indexed
            works.append(work.with_calls(segment, source, [call] * len(segment.callers)))
        return works

    def replica(self) -> Replica:
        return replicate(self._roots, self._unset)

    def one(self, maker: _Maker, order: random.Random) -> None:
        """Make one value again in a thread, and compare it."""
        at, ordinal, value, expected = order.choice(self._tasks)
        step = self._steps[at]
        self._running[maker.number] = at + 1
        made = step.run(maker.works[at], ordinal, _copy_input(value))
        self._running[maker.number] = 0
        if _has_failed(made) and maker.replica.make_private():
            with USER_LOCK:  # as worker threads do
                maker.begin()
            return
        self._calls += 1
        if not equal(made, expected):
            (number,) = self._order.span(ordinal, ordinal + 1)
            what = "the batch" if step.joins else f"example {number}"
            self._found[at].append(f"{what}{_difference(made, expected)}")


class _Maker:
    """One thread of a trial."""

    def __init__(self, trial: _Trial, number: int) -> None:
        self.number = number
        self._trial = trial
        self.begin()

    def begin(self) -> None:
        """Call this thread's own copies from now on."""
        self.replica = self._trial.replica()
        self.works = self._trial.works(self.replica)

    def make(self, end: float) -> None:
        """Make values until a time; at least one, however late this thread begins."""
        order = random.Random(self.number)
        while not self._trial.has_enough:
            self._trial.one(self, order)
            if time.monotonic() >= end:
                break


def _has_failed(made: Any) -> bool:
    return type(made) is Failure and made is not REJECTED


def _copy_input(value: Any) -> Any:
    """Return a copy of a step's input, as the step may write to it."""
    try:
        return pytree.deep_copy(value)
    except Exception:  # of a type of the user's own
        return value


def _difference(made: Any, expected: Any, at: str = "") -> str:
    """Describe the first field in which two values differ."""
    if _has_failed(made):
        return f" raises {made.error.__cause__ or made.error!r} under threads"
    mine, yours = pytree.children(made), pytree.children(expected)
    if mine and yours and [name for name, _ in mine] == [name for name, _ in yours]:
        for (name, one), (_, other) in zip(mine, yours, strict=True):
            if not equal(one, other):
                return _difference(one, other, f"{at}.{name}" if at else name)
    field = f", field {at}" if at else ""
    return f"{field} is {reprlib.repr(made)} under threads, {reprlib.repr(expected)} alone"
