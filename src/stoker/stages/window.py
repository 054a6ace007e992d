"""Windows: each output is made of some inputs, which their numbers tell.

A value may be in several windows. Each of these gets a copy, the last one the value itself.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.basics import pytree
from stoker.engine.checkpoint import Bounds, PoolSize
from stoker.engine.items import Item
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.work.step import Failure
from stoker.errors import StateError
from stoker.stages.replayed import ReplayedStream, StreamStart, check_in_order
from stoker.stages.stage import ChainView, StreamStage, Traits


@dataclass(frozen=True)
class Windows(StreamStage):
    """The first half of a ``WindowStage``: lists of examples.

    Attributes:
        stage: says which inputs an output is made of.
    """

    stage: Any
    traits = Traits(filters=True, scans=True, by_number=True)
    kind = "window"

    @property
    def call(self) -> str:
        return "window"

    def bind(self, before: ChainView) -> Windows:
        """Check that single examples come here, and the first windows of them."""
        check_in_order(self.stage.describe(), before)
        for output in (0, 1):
            self.inputs(output)
        return self

    def stream(self, upstream: SegmentStream, context: StreamContext) -> WindowStream:
        return WindowStream(self, upstream)

    def read_node(self, saved: Any, bounds: Bounds) -> WindowStart:
        start = msgspec.convert(saved, WindowStart)
        start.check(bounds.most)
        if start != self.start_at(start.output):
            raise ValueError("where a window begins does not fit")
        bounds.most = self.count(bounds.most)
        bounds.exact = None if bounds.exact is None else self.count(bounds.exact)
        return start

    def check_leg(self, chain: ChainView) -> None:
        raise StateError(f"what .{self.name} is at the middle of is the rank's own")

    def count(self, items: int) -> int:
        """Return the number of windows whose inputs are all there."""
        return bisect.bisect_left(range(items), items, key=lambda n: self.inputs(n)[-1])

    def signature(self) -> str:
        return f"{self.stage.describe()}: {self.inputs(0)}, {self.inputs(1)}"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        return f"  of the examples {self.inputs(0)}, {self.inputs(1)} and so on"

    def inputs(self, output: int) -> range:
        """Return the numbers of a window's inputs.

        Raises TypeError for what is no range of numbers, ValueError if windows go backwards.
        """
        found: range = self.stage.inputs(output)
        before = range(-1, 0)
        if output:
            before = self.stage.inputs(output - 1)
        for each in (found, before):
            if type(each) is not range or not each or each.step < 0:
                raise TypeError(
                    f"inputs({output}) of {self.stage.describe()} returned {each!r}: return a "
                    "range of the numbers of examples, one at least, ascending"
                )
        if found[0] <= before[0] or found[-1] <= before[-1]:
            raise ValueError(
                f"inputs({output}) of {self.stage.describe()} are {found}, behind {before}: each "
                "begins, and ends, behind the one before it"
            )
        return found

    def start_at(self, output: int) -> WindowStart:
        """Return where to go on for the sake of a window: behind the one before, at the latest."""
        end = self.inputs(output - 1)[-1] + 1 if output else 0
        return WindowStart(min(self.inputs(output)[0], end), output)


class WindowStart(StreamStart, tag=Windows.kind):
    """A point from which windows may go on."""


class WindowStream(ReplayedStream[WindowStart]):
    """The stream of the lists of examples in windows."""

    def __init__(self, stage: Windows, upstream: SegmentStream) -> None:
        self._stage = stage
        super().__init__(stage.name, upstream, WindowStart(0, 0))
        self.total = None if upstream.total is None else stage.count(upstream.total)

    def _start_for(self, output: int) -> WindowStart:
        return self._stage.start_at(min(output, self._outputs))

    def _begin(self, start: WindowStart) -> None:
        super()._begin(start)
        self._window = self._stage.inputs(start.output)  # the next one
        self._values: deque[Any] = deque()  # of the inputs from its first on

    def _take(self, item: Item, value: Any) -> None:
        number, window, values = self._inputs, self._window, self._values
        self._inputs += 1
        if number >= window[0]:
            values.append(value)
        if number < window[-1]:
            return
        following = self._stage.inputs(self._outputs + 1)
        examples = [values[each - window[0]] for each in window]
        failure = next((each for each in examples if type(each) is Failure), None)
        if failure is None:  # a copy of what later windows may have, too
            examples = [
                value if each < following[0] else pytree.deep_copy(value)
                for each, value in zip(window, examples, strict=True)
            ]
        self._window = following
        for _ in range(min(len(values), following[0] - window[0])):
            values.popleft()
        self._keep(item, examples if failure is None else failure)

    def clear(self) -> None:
        super().clear()
        self._values.clear()
