"""Streams that take examples in order, and after a resume again, from an earlier point on.

That is where a stage decides about each example by those before it. From the start that is saved,
the stream takes the inputs anew. Of the outputs that were handed out before, it keeps those that a
pool behind it needs, and drops the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from stoker.basics import pytree
from stoker.basics.compact_integers import check_integer
from stoker.basics.signals import pass_on
from stoker.engine.checkpoint import Count, Node, UpstreamRequest, damage_error
from stoker.engine.items import DoneTask, Item, done_item, with_value
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.survivors import OrderedStream
from stoker.engine.work.step import ENDED, Failure
from stoker.errors import CombinationError, StateError
from stoker.stages.stage import ChainView, refuse_behind


def check_in_order(call: str, before: ChainView) -> None:
    """Raise CombinationError unless single examples come here, each once."""
    if before.source.yields_batches:
        raise CombinationError(f".{call} works on single examples, and a loader yields batches")
    refuse_behind(
        call,
        before,
        lambda t: t.repeats or t.batches or t.joins,
        "it takes each example once, in order. Put it before .echo(), .pack() and .batch()",
    )


class StreamStart(Node):
    """A point from which a stream may go on.

    Attributes:
        input, output: the numbers of the next input and of the next output, from 0.
    """

    input: Count
    output: Count

    def check(self, most: int) -> None:
        """Raise ValueError unless it is a point among so many inputs."""
        check_integer(self.input, 0, most)
        check_integer(self.output, 0, self.input)


AnyStart = TypeVar("AnyStart", bound=StreamStart)


class ReplayedStream(OrderedStream, Generic[AnyStart]):
    """A stream of at most one output for each input, which it takes in order.

    Args:
        name: the stage's, for errors.
        upstream: the stream of its inputs.
        start: where an epoch begins.
    """

    keeps = True

    def __init__(self, name: str, upstream: SegmentStream, start: AnyStart) -> None:
        super().__init__(upstream)
        self._name, self._epoch_start = name, start
        self._first = self._least = 0  # outputs before a resume: at most, and at least
        self._replay_to: frozenset[int] = frozenset()  # outputs to keep from before a resume
        self._again: dict[int, Item] = {}
        self._begin(start)

    @abstractmethod
    def _start_for(self, output: int) -> AnyStart:
        """Return the last start at or before an output that was made, or is next."""

    @abstractmethod
    def _take(self, item: Item, value: Any) -> None:
        """Take the next input, whose value may be a ``Failure``: count it, ``_keep`` an output.

        An error ends the epoch, as it is not known how to go on.
        """

    @property
    def end(self) -> int | None:
        return self._outputs if self._has_ended else self.total

    def recompute(self, number: int) -> Item:
        """Return an output from before a resume, each time another copy."""
        item = self._again[number]
        value = item.task.values[0]
        if type(value) is not Failure:
            try:
                value = pytree.deep_copy(value)
            except Exception as error:
                pass_on(error)
                value = self.upstream.failure(self._name, error, item.place)
        return with_value(item, DoneTask([value]))

    def resume_point(self, output: int) -> tuple[AnyStart, int]:
        start = self._start_for(output)
        return start, start.input

    def forget_before(self, output: int) -> int:
        start = self._start_for(output)
        self._again = {n: item for n, item in self._again.items() if n >= start.output}
        return start.input

    def resume(self, node: AnyStart | None, request: UpstreamRequest) -> UpstreamRequest:
        start = node or self._epoch_start
        if start.output > min({*request.again, request.next}):
            raise damage_error(f"{self._name} in it goes on too late")
        self._begin(start)
        self._first, self._least, self._replay_to = request.next, request.least, request.again
        return UpstreamRequest(start.input, start.input, start.input)

    def catch_up(self) -> None:
        """Go on up to the run's position if earlier outputs are needed again.

        Raises errors on the way.
        """
        if not self._replay_to:
            return
        with self._planning.lock:
            self._planning.may_block = True
            self._have(1)
        failure = self._survivors[0].task.values[0] if self._survivors else None
        if self._outputs < self._first and type(failure) is Failure:
            raise failure.error

    def clear(self) -> None:
        super().clear()
        self._again.clear()

    def _begin(self, start: AnyStart) -> None:
        self._inputs, self._outputs = start.input, start.output

    def _end(self) -> None:
        if self._outputs < self._least:
            self._fail(
                StateError(
                    f"{self._name} makes fewer examples than before the resume: its function, and "
                    "what stands before it, must be deterministic"
                )
            )

    def _decide(self, arriving: deque[Item]) -> None:
        item = arriving.popleft()
        value, item.task.values[item.row] = item.task.values[item.row], None
        try:
            self._take(item, value)
        except Exception as error:
            pass_on(error)
            self._fail(self.upstream.failure(self._name, error, item.place).error)

    def _keep(self, item: Item, value: object) -> None:
        """Add an output; of outputs before a resume, only those that are needed again."""
        number = self._outputs
        self._outputs += 1
        result = with_value(item, DoneTask([value]))
        if number >= self._first:
            self._survivors.append(result)
        elif number in self._replay_to:
            self._again[number] = result

    def _fail(self, error: BaseException) -> None:
        """End the epoch with an error, as the next state is unknown."""
        failure = Failure(error, ENDED)
        self._survivors.append(done_item(failure, self._outputs, self.upstream.fresh, 1))
        self._has_ended = True
