"""A stage with a stream of its own is one file: nothing else knows it, and it runs and resumes."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

import stoker
from stoker.engine.checkpoint import Bounds, Count, Node, UpstreamRequest, damage_error
from stoker.engine.items import Item
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.survivors import OrderedStream
from stoker.stages.stage import ChainView, StreamStage, Traits
from strategies import opened, signed


@dataclass(frozen=True)
class Every(StreamStage):
    """Keeps one example in ``n``."""

    n: int
    traits = Traits(filters=True)
    kind = "every"

    @property
    def call(self) -> str:
        return f"every({self.n})"

    def bind(self, before: ChainView) -> Every:
        return self

    def count(self, items: int) -> int:
        return -(-items // self.n)

    def signature(self) -> str:
        return self.call

    def stream(self, upstream: SegmentStream, context: StreamContext) -> EveryStream:
        return EveryStream(self, upstream)

    def read_node(self, saved: Any, bounds: Bounds) -> EveryStart:
        bounds.most, bounds.exact = self.count(bounds.most), None
        return msgspec.convert(saved, EveryStart)


class EveryStart(Node, tag=Every.kind):
    """The number of the next output."""

    output: Count


class EveryStream(OrderedStream):
    """The stream of the examples that are kept."""

    keeps = True

    def __init__(self, stage: Every, upstream: SegmentStream) -> None:
        super().__init__(upstream)
        self._n = stage.n

    def recompute(self, number: int) -> Item:
        return self.upstream.recompute(number * self._n)

    def resume_point(self, output: int) -> tuple[EveryStart, int]:
        return EveryStart(output), self._input(output)

    def resume(self, node: EveryStart | None, request: UpstreamRequest) -> UpstreamRequest:
        if node is not None and node.output > min({*request.again, request.next}):
            raise damage_error("it goes on too late")
        self._inputs = start = self._input(request.next)
        again = frozenset(map(self._input, request.again))
        return UpstreamRequest(start, start, self._input(request.oldest), again)

    def _input(self, output: int) -> int:
        most = self.upstream.total
        return output * self._n if most is None else min(output * self._n, most)

    def _end(self) -> None:
        pass

    def _decide(self, arriving: deque[Item]) -> None:
        item = arriving.popleft()
        if self._inputs % self._n == 0:
            self._survivors.append(item)
        self._inputs += 1


def build(workers: int, *, echo: bool = False) -> stoker.Pipeline[Any]:
    pipeline = stoker.from_arrays(np.arange(100), seed=3).shuffle().map(np.negative)
    pipeline = pipeline._then(Every(3))
    if echo:
        pipeline = pipeline.echo(2, pool=8)
    return pipeline.map(np.negative).batch(4).workers(workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_keeps_what_it_says(workers: int) -> None:
    whole = np.concatenate(list(stoker.from_arrays(np.arange(100), seed=3).shuffle().batch(10)))
    assert np.concatenate(list(build(workers))).tolist() == whole[::3].tolist()


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_anywhere(workers: int, echo: bool) -> None:
    whole = [batch.tolist() for batch in build(0, echo=echo)]
    for stop in (0, 1, 2, len(whole) // 2, len(whole) - 1, len(whole)):
        pipeline = build(workers, echo=echo)
        with iter(pipeline) as batches:
            assert [batch.tolist() for batch in islice(batches, stop)] == whole[:stop]
            state = json.loads(json.dumps(pipeline.state_dict()))
        resumed = build(workers, echo=echo)
        resumed.load_state_dict(state)
        if stop < len(whole):
            assert [batch.tolist() for batch in resumed] == whole[stop:]


def test_its_node_is_checked_when_a_state_is_loaded() -> None:
    pipeline = build(0)
    with iter(pipeline) as batches:
        next(batches)
        state = pipeline.state_dict()
    fields = opened(state)
    fields["parts"] = [{**fields["parts"][0], "output": -1}]
    with pytest.raises(stoker.StateError, match=r"damaged.*output"):
        build(0).load_state_dict(signed(fields))
