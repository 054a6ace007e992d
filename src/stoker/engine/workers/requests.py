"""Requests to workers outside the training process, and their execution: fetch, map and batch.

Worker processes and actors use it. Generators are seeded anew for each call of the user's code, so
a process does one request at a time.
"""

from __future__ import annotations

import copyreg
import pickle
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.batching.builder import Builder, Misfits, collated
from stoker.engine.work.step import SENDING, Failure, Rejected
from stoker.engine.work.work import Work
from stoker.engine.work.worker_status import current_worker
from stoker.errors import StageError, UnlikeError, describe_error, without_own_frames
from stoker.transport.flatten import Flattener

if TYPE_CHECKING:
    from stoker.transport.channel import Arena  # takes its time to import

SLOTS = 2
"""Requests that a worker process may have at a time: 0.985 of torch with two, 0.83 to 0.90
with one (bench/results/gil.json)."""
# Examples that are read together. 20,000 64x64 JPEGs: 1.7 s of a process, one by one 2.1 s. Not
# more: a worker would hold the raw bytes of a whole batch.
_AHEAD = 16
# Raw bytes that a worker holds beside the batch. Chosen, not measured.
_AHEAD_BYTES = 1 << 20
# Leaves by which two examples are compared; objects of other classes may have no equality.
_COMPARED = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


class Request(NamedTuple):
    """A request for rows of a task, sent to a worker process.

    Attributes:
        depth: the segment's number among the segments on the host.
        indices, values: the inputs of the rows: indices of examples in the source, or values.
        places, uses: the addresses of the rows.
        number: the task's number; ``whole``: whether these are all its rows.
    """

    depth: int
    indices: NDArray[np.int64] | None
    values: list[Any] | None
    places: Sequence[int]
    uses: list[int] | None
    number: int
    whole: bool

    def part(self, some: slice) -> Request:
        """Return the request for some of the rows, of a segment without batches."""
        return self._replace(
            indices=None if self.indices is None else self.indices[some],
            values=None if self.values is None else self.values[some],
            places=self.places[some],
            uses=None if self.uses is None else self.uses[some],
        )


class Comparison(NamedTuple):
    """Asks a process whether examples come out the same in two orders."""

    request: Request


class Compared(NamedTuple):
    """Answers a ``Comparison``.

    Attributes:
        differs: whether the examples differ.
        seeding_ns: the time in which a process seeds the global generators for one call.
    """

    differs: bool
    seeding_ns: int


class GilQuestion(NamedTuple):
    """Asks a process which share of the time of its requests left the GIL to other threads.

    The first question has it measure from then on; the second one is answered.
    """


class GivenUp(Exception):
    """A worker process was ended, because it was stuck in an example, and another is there."""


Answer = tuple[Any, list[int]]
"""A remote worker's answer to a request: values, and the counters of its segment."""


class WorkExecutor:
    """Answers requests, one at a time."""

    def __init__(self) -> None:
        self._recycler = Recycler()

    def do(
        self,
        work: Work,
        request: Request,
        ns: list[int],
        outbox: Arena | None = None,
        slot: int = 0,
    ) -> Any:
        """Answer the request of a slot.

        Arrays of the answer may lie in ``outbox``, which sends it.
        """
        work.seed_calls()
        values = self._examples(work, request, ns, slot)
        batch = work.segment.batch
        for i, value in enumerate(values):
            if isinstance(value, Failure) and not isinstance(value.error, Rejected):
                values[i] = _as_plain(value)
                if batch is not None:
                    return values[i]
        if batch is None:
            return values
        began_ns = time.perf_counter_ns()
        if not request.whole or (batch.collate is None and not work.segment.batch_maps):
            try:
                return collated(values, outbox or self._recycler)
            except Exception as error:
                if isinstance(error, UnlikeError) and not request.whole:
                    return Misfits(values)
                failure = work.batch_failure(error, request.number, request.places)
                return Failure(_plain(failure.error))
            finally:
                ns[work.batch_at] += time.perf_counter_ns() - began_ns
        if current_worker.status is not None and batch.collate is not None:
            current_worker.status.enter(work.batch_at)
        builder = Builder(len(values), batch.collate, self._recycler)
        try:
            builder.put(0, values)
            work.seed_collate(request.number)
            made = builder.finish()
        except Exception as error:
            failure = work.batch_failure(error, request.number, request.places)
            return Failure(_plain(failure.error))
        finally:
            ns[work.batch_at] += time.perf_counter_ns() - began_ns
        made = work.finish(made, request.number, ns, len(values))
        return Failure(_plain(made.error)) if isinstance(made, Failure) else made

    def depends_on_order(self, work: Work, request: Request) -> bool:
        """Whether the examples of a request differ if they are made in the other order.

        Only if they are surely other ones: not if they fail, or hold objects of users' classes.
        """
        back = slice(None, None, -1)
        work.seed_calls()
        try:
            there, again = (
                self._examples(work, pytree.deep_copy(each), work.segment.counters(), 0)
                for each in (request, request.part(back))
            )
            pairs = zip(there, again[back], strict=True)
            return any(
                all(isinstance(leaf, _COMPARED) or pytree.is_tensor(leaf) for leaf in leaves)
                and not pytree.equal(one, other)
                for one, other in pairs
                for leaves in [[*pytree.leaves(one), *pytree.leaves(other)]]
            )
        except Exception:  # it is raised when the example is made for good
            return False

    def sendable(self, work: Work, request: Request, answer: Any, error: Exception) -> Any:
        """Return an answer that can be sent, after ``error`` in sending the first one."""
        if work.segment.batch is None:  # say which
            return _sendable(work, answer, request.places)
        return Failure(StageError(SENDING, _plain(error), batch=request.number))

    def _examples(self, work: Work, request: Request, ns: list[int], slot: int) -> list[Any]:
        segment, indices, uses = work.segment, request.indices, request.uses
        values = _separate(request.values or [])
        source = segment.source
        draws = source is not None and source.runs_user_code
        if indices is None and segment.is_plain:
            return values
        if indices is not None and segment.is_plain and not draws and current_worker.status is None:
            return work.read(indices, request.places, ns)
        # Users' examples are read one by one anyway, or so that it is known which one is stuck.
        most = 1 if draws or current_worker.status is not None else _AHEAD
        coming = iter(values) if indices is None else _read(work, request, ns, most)
        # Of a pool's items, parts that share memory are copied one by one, as everywhere.
        is_lent = segment.source is None and segment.shares_items and not segment.joins
        copied = self._recycler.copy if is_lent else None
        examples = []
        status = current_worker.status
        for i, place in enumerate(request.places):
            if status is not None:
                status.at_row(i, slot)
            one = [next(coming)]
            if not segment.is_plain:
                work.apply(one, [place], uses and uses[i : i + 1], ns, copied)
            examples += one
        return examples


def _read(work: Work, request: Request, ns: list[int], most: int) -> Iterator[Any]:
    """Yield examples. Up to ``most`` are read together, but no more than a MiB of them."""
    start, count, indices = 0, 1, request.indices
    assert indices is not None
    while start < len(indices):
        before = ns[-1]
        stop = start + count
        values = work.read(indices[start:stop], request.places[start:stop], ns)
        start += len(values)
        each = (ns[-1] - before) // len(values)
        count = max(1, min(most, _AHEAD_BYTES // max(1, each)))
        values.reverse()
        while values:
            yield values.pop()


def unloadable(error: Exception) -> Failure:
    """Return the answer to a request that cannot be loaded here."""
    return Failure(StageError(SENDING, _plain(error.__cause__ or error)))


def _sendable(work: Work, values: list[Any], places: Sequence[int]) -> list[Any]:
    """Return values, with failures in place of those that cannot be sent."""
    checked = []
    for value, place in zip(values, places, strict=True):
        try:
            Flattener().flatten(value)
        except Exception as error:
            value = _as_plain(work.send_failure(error, place))
        checked.append(value)
    return checked


def _separate(values: list[Any]) -> list[Any]:
    """Copy repeated values: pickle keeps two uses of one item one object, and maps may write."""
    seen: set[int] = set()
    separate = []
    for value in values:
        separate.append(pytree.deep_copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return separate


def _portable(error: BaseException) -> BaseException:
    """Return the error if it survives pickling, made without its ``__init__`` if need be.

    Pickle calls a class with the error's ``args``, which are those of ``Exception.__init__``: other
    ones than its own takes, if that has parameters of its own. Else return a RuntimeError.
    """
    if _survives_pickling(error):
        return error
    copyreg.pickle(type(error), _reduced)
    if _survives_pickling(error):
        return error
    copyreg.dispatch_table.pop(type(error), None)
    return RuntimeError(describe_error(error))


def _survives_pickling(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def _reduced(error: BaseException) -> tuple[Any, ...]:
    return _made_without_init, (type(error), error.args, error.__dict__)


def _made_without_init(kind: type, args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    made = kind.__new__(kind, *args)
    BaseException.__setattr__(made, "args", args)  # which OSError leaves to its __init__
    made.__dict__.update(attributes)
    return made


def _as_plain(failure: Failure) -> Failure:
    return Failure(_plain(failure.error), failure.part, failure.account)


def _plain(error: BaseException) -> BaseException:
    """Return an exception that survives pickling, with the worker's traceback as a note."""
    cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
    lines = traceback.format_exception(without_own_frames(cause))
    note = "In a worker process:\n" + "".join(lines).rstrip()
    notes = [*getattr(cause, "__notes__", ()), note]
    BaseException.__setattr__(cause, "__notes__", notes)  # first, as it may be frozen
    cause = _portable(cause)
    behind = {"__traceback__": None, "__cause__": None, "__context__": None, "__notes__": notes}
    for name, value in behind.items():
        BaseException.__setattr__(cause, name, value)
    if isinstance(error, StageError):
        return StageError(
            error.stage,
            cause,
            index=error.index,
            path=error.path,
            batch=error.batch,
            number=error.number,
        )
    return cause
