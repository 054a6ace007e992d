"""How many threads take part, by what was measured; no thread runs here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.pool.autotune import (
    IMAGE_ROW_NS,
    INLINE_BATCH_NS,
    Autotuner,
    Tuning,
    choose_threads,
)

CHEAP = INLINE_BATCH_NS / 2
COSTLY = 4 * INLINE_BATCH_NS


@pytest.mark.parametrize(
    ("work_ns", "inline_ns", "threads"),
    [
        ({4: 1.1 * COSTLY, 1: COSTLY}, COSTLY, 4),  # four are nearly four times as fast
        ({4: 4.0 * COSTLY, 1: COSTLY}, COSTLY, 1),  # they only wait for each other
        ({4: 3.5 * COSTLY, 1: COSTLY}, COSTLY, 4),  # clearly faster
        ({4: 3.7 * COSTLY, 1: COSTLY}, COSTLY, 1),  # faster, but not clearly
        ({4: COSTLY}, COSTLY, 4),  # they slept: one alone was not tried
        ({1: COSTLY}, COSTLY, 4),  # tried alone, on other work: nothing to compare with
        ({4: 4.0 * CHEAP, 1: CHEAP}, CHEAP, 0),  # cheap, and no faster with threads
        ({4: 1.2 * CHEAP, 1: CHEAP}, CHEAP, 4),  # cheap, and faster all the same
        ({4: 8.0 * CHEAP, 1: 0.5 * CHEAP}, CHEAP, 1),  # one thread is faster than the consumer
        ({4: 40.0 * CHEAP}, CHEAP, 0),
        ({4: 4.0 * CHEAP, 1: CHEAP}, 0.0, 1),  # the consumer never did it
    ],
)
def test_threads_are_chosen_by_what_a_batch_takes(
    work_ns: dict[int, float], inline_ns: float, threads: int
) -> None:
    assert choose_threads(4, work_ns, inline_ns) == threads


times = st.floats(1.0, 1e9)


@given(st.integers(2, 64), times, times, times | st.just(0.0))
def test_nothing_clearly_slower_is_chosen(
    limit: int, many_ns: float, one_ns: float, inline_ns: float
) -> None:
    takes_ns = {limit: many_ns / limit, 1: one_ns}
    chosen = choose_threads(limit, {limit: many_ns, 1: one_ns}, inline_ns)
    if 0 < inline_ns < INLINE_BATCH_NS:
        takes_ns[0] = inline_ns
    assert chosen in takes_ns
    assert 0.9 * takes_ns[chosen] <= min(takes_ns.values()) / 0.9


def test_what_was_learnt_while_a_cache_was_filled_is_forgotten() -> None:
    autotuner = Autotuner()
    autotuner.begin_epoch(0)
    filled = autotuner.cost(0, 32)
    filled.note(32, int(COSTLY))
    autotuner.active, autotuner.factor = 4, 2
    autotuner.begin_epoch(100)  # all examples were missing in the epoch before
    assert autotuner.active is None
    assert autotuner.cost(0, 32).row_ns is None
    autotuner.active = 1
    autotuner.begin_epoch(100)  # none was
    assert (autotuner.active, autotuner.factor) == (1, 2)


@pytest.mark.parametrize(("row_ns", "at_once"), [(2 * IMAGE_ROW_NS, True), (30_000, False)])
def test_what_needs_no_gil_takes_all_threads_without_a_trial(row_ns: int, at_once: bool) -> None:
    autotuner = Autotuner()
    cost = autotuner.cost(0, 64)
    cost.releases_gil, cost.gil_row_ns = True, IMAGE_ROW_NS
    tuning = Tuning(4, autotuner)
    cost.note(200, 200 * row_ns)
    assert tuning.note(cost, 200, 200 * row_ns, 0)
    assert tuning.active == 4
    assert tuning.is_over is at_once
