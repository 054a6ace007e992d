"""Measures what examples are at the places of a pipeline's caches, and what making them takes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stoker.engine.plan.segment import Segment
from stoker.engine.work.failure import REJECTED, Failure
from stoker.engine.work.work import Work

if TYPE_CHECKING:
    from stoker.chain.chain import Chain


class MadeForm(NamedTuple):
    """An example at one place."""

    value: Any
    """What it is there; None if a filter has left it out."""
    made_ns: int
    """The time that making it took, from the source on."""


def make_forms(chain: Chain, count: int, seconds: float) -> list[list[MadeForm]]:
    """Make examples, evenly spaced in the first epoch; return each at all places of caches.

    Examples that fail are left out. It ends early after so many seconds.
    """
    plan, first = chain.plan, chain.plan.segments[0]
    source = plan.indexed
    assert source is not None
    # Where the order is drawn by weights or a function, the source's own order is a fair sample.
    order = source.order(replace(plan.selection, drawing=None), chain.seed, 0)
    address = plan.address(first.at, chain.seed, 0)

    def work(operations: list[Any], reads: bool) -> Work:
        segment = Segment(source if reads else None, operations, at=first.at)
        return Work(segment, address, source, order)

    reading = work([], reads=True)
    ends = first.cache_ats
    stretches = [
        work(first.operations[start:end], reads=False)
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    count = min(count, len(order))
    ordinals = np.linspace(0, len(order) - 1, count).astype(np.int64).tolist()
    found: list[list[MadeForm]] = []
    deadline_s = time.monotonic() + seconds
    # The first one is made twice: imports and caches make it slow.
    for number, ordinal in enumerate([*ordinals[:1], *ordinals]):
        forms = _forms_of(reading, stretches, order, ordinal)
        if number and forms is not None:
            found.append(forms)
        if time.monotonic() > deadline_s and found:
            break
    return found


def _forms_of(
    reading: Work, stretches: list[Work], order: Any, ordinal: int
) -> list[MadeForm] | None:
    """Return an example at each place; None if it fails."""
    index = order.span(ordinal, ordinal + 1)
    place = reading.inputs.places([ordinal])
    began = time.perf_counter_ns()
    (value,) = reading.fetcher.fetch(index, reading.segment.counters())
    made_ns = time.perf_counter_ns() - began
    forms = []
    for work in stretches:
        values = [value]
        began = time.perf_counter_ns()
        if type(value) is not Failure:
            work.apply(values, place, None, work.segment.counters())
        made_ns += time.perf_counter_ns() - began
        (value,) = values
        if type(value) is Failure and value is not REJECTED:
            return None
        forms.append(MadeForm(None if value is REJECTED else value, made_ns))
    return forms
