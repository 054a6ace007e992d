"""The stream of a scan: a function with a state makes items from inputs, one after another.

A scan is called with inputs in order, by the thread that plans, with the planning lock held. So it
runs ahead of the consumer, and a position needs an earlier state. States are therefore dumped now
and then. A resume begins with the newest dump before all items that it needs. It calls the scan
again with the inputs from there. It keeps the outputs that a pool after it needs, and drops the
others that were handed out before.
"""

from __future__ import annotations

import bisect
import time
from base64 import b64decode, b64encode
from collections import deque
from dataclasses import dataclass
from typing import Any

from stoker.basics import compact_integers, pytree
from stoker.basics.compact_integers import check_integer
from stoker.basics.signals import pass_on
from stoker.engine.checkpoint import Bounds, Node, UpstreamRequest, damage_error
from stoker.engine.items import DoneTask, EpochCounters, Item, done_item, with_value
from stoker.engine.plan.points import ScanPoint
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.survivors import OrderedStream
from stoker.engine.work.failure import ENDED, Failure
from stoker.errors import StateError
from stoker.stages.scan import DROP, Scan, ScanState

_DUMP_EACH = 30
"""The time between two dumps, as a multiple of a dump's: dumps cost at most 3 % of planning."""
_KEPT_DUMPS = 16
"""The most dumps that are kept. Their memory is bounded, and of the inputs between the oldest
needed item and a position, a resume scans about an eighth in vain."""


@dataclass
class ScanStart(Node):
    """A point from which a scan may go on.

    Attributes:
        input, output: the numbers of the next input and of the next output, from 0.
        state: the scan's.
    """

    input: int
    output: int
    state: ScanState

    @classmethod
    def from_json(cls, scan: Scan, saved: Any, bounds: Bounds) -> ScanStart:
        """Read the result of ``to_json``; the scan checks the state."""
        number = check_integer(saved["input"], 0, bounds.most)
        output = check_integer(saved["output"], 0, number)
        text = saved["json"] if "json" in saved else saved["bytes"]
        if type(text) is not str:
            raise TypeError(f"{compact_integers.short_repr(text)} is no text")
        state = text if "json" in saved else b64decode(text, validate=True)
        scan.check(state)
        bounds.exact = None
        return cls(number, output, state)

    def to_json(self) -> dict[str, Any]:
        # As text, not as JSON in JSON: sorting the keys of the whole must not sort those in here.
        state = self.state
        state_json = (
            {"json": state} if isinstance(state, str) else {"bytes": b64encode(state).decode()}
        )
        return {"kind": ScanPoint.kind, "input": self.input, "output": self.output, **state_json}


class ScannedStream(OrderedStream):
    """The stream of a scan's outputs.

    Args:
        point: the scan.
        upstream: the stream of its inputs.
        tally: counts the time in the scan.
    """

    keeps = True

    def __init__(self, point: ScanPoint, upstream: SegmentStream, tally: EpochCounters) -> None:
        super().__init__(upstream)
        self._scan, self._part = point.scan, point.at
        self._tally = tally
        self._first = self._least = 0  # outputs before a resume: at most, and at least
        self._replay_to: frozenset[int] = frozenset()  # outputs to keep from before a resume
        self._again: dict[int, Item] = {}
        self._begin(ScanStart(0, 0, point.scan.initial))

    @property
    def dropped(self) -> int:
        """The number of inputs that the scan has dropped."""
        return self._inputs - self._outputs

    @property
    def end(self) -> int | None:
        return self._outputs if self._has_ended else None

    def recompute(self, number: int) -> Item:
        """Return an output from before a resume, each time another copy."""
        item = self._again[number]
        value = item.task.values[0]
        if type(value) is not Failure:
            try:
                value = pytree.deep_copy(value)
            except Exception as error:
                pass_on(error)
                value = self.upstream.failure(self._scan.name, error, item.ordinal)
        return with_value(item, DoneTask([value]))

    def resume_point(self, output: int) -> tuple[ScanStart, int]:
        start = self._starts[self._before(output)]
        return start, start.input

    def forget_before(self, output: int) -> int:
        del self._starts[: self._before(output)]
        start = self._starts[0]
        self._again = {n: item for n, item in self._again.items() if n >= start.output}
        return start.input

    def resume(self, node: ScanStart | None, request: UpstreamRequest) -> UpstreamRequest:
        start = node or ScanStart(0, 0, self._scan.initial)
        if start.output > min({*request.again, request.next}):
            raise damage_error("a scan in it goes on too late")
        self._begin(start)
        self._first, self._least, self._replay_to = request.next, request.least, request.again
        return UpstreamRequest(start.input, start.input, start.input)

    def catch_up(self) -> None:
        """Scan up to the run's position if earlier outputs are needed again.

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

    def _before(self, output: int) -> int:
        return bisect.bisect_right(self._starts, output, key=lambda start: start.output) - 1

    def _begin(self, start: ScanStart) -> None:
        self._state = self._scan.load_state(start.state)
        self._inputs, self._outputs = start.input, start.output
        self._starts = [start]
        self._dumped_at_ns = self._dump_ns = 0

    def _end(self) -> None:
        if self._outputs < self._least:
            self._fail(
                StateError(
                    f"{self._scan.name} makes fewer examples than before the resume: the function "
                    "of .scan(), and what stands before it, must be deterministic"
                )
            )

    def _decide(self, arriving: deque[Item]) -> None:
        item = arriving.popleft()
        value, item.task.values[item.row] = item.task.values[item.row], None
        if type(value) is Failure:
            self._inputs += 1
            self._keep(item, value)
            return
        began_ns = time.perf_counter_ns()
        try:
            self._state, result = self._scan.step(self._state, value)
        except Exception as error:
            pass_on(error)
            self._fail(self.upstream.failure(self._scan.name, error, item.ordinal).error)
            return
        now_ns = time.perf_counter_ns()
        self._tally.add(self._part, [now_ns - began_ns, 1, 0, 0, 0, 0, 0])
        self._inputs += 1
        if result is not DROP:
            self._keep(item, result)
        if now_ns - self._dumped_at_ns >= _DUMP_EACH * self._dump_ns:
            self._dump(now_ns)

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

    def _dump(self, now_ns: int) -> None:
        """Dump the state, so that a resume may begin here."""
        try:
            state = self._scan.dump_state(self._state)
        except TypeError as error:
            pass_on(error)
            self._fail(error)
            return
        self._starts.append(ScanStart(self._inputs, self._outputs, state))
        if len(self._starts) > _KEPT_DUMPS:
            del self._starts[1:-1:2]
        self._dumped_at_ns = time.perf_counter_ns()
        self._dump_ns = self._dumped_at_ns - now_ns
