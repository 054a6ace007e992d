"""What the runs of a gate decide: conditions, intervals and verdicts, without running anything."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.analysis.gate.judging import (
    FINE,
    UNDECIDED,
    WORSE,
    GateRecord,
    RunRound,
    combine,
    judge,
    looks_worse,
    write_text,
)
from stoker.analysis.gate.metrics import METRICS, Condition, RunFigures, parse_condition
from stoker.analysis.model.rates import estimate_interval, find_t


def figures(stall: float = 0.2, rate: float = 100.0, wait_s: float = 0.01) -> RunFigures:
    return RunFigures(
        stall=stall,
        rate=rate,
        wait_p50=wait_s,
        wait_p95=2 * wait_s,
        wait_p99=3 * wait_s,
        startup=0.5,
        batches=100,
    )


@pytest.mark.parametrize(
    ("text", "factor", "value"),
    [
        ("stall>10%", 0.0, 0.1),
        ("stall > 0.1", 0.0, 0.1),
        ("stall>base+5%", 1.0, 0.05),
        ("stall>base", 1.0, 0.0),
        ("rate<200", 0.0, 200.0),
        ("rate<base", 1.0, 0.0),
        ("rate<0.95*base", 0.95, 0.0),
        ("rate<base-20", 1.0, -20.0),
        ("wait_p99>50ms", 0.0, 0.05),
        ("wait_p50>200us", 0.0, 0.0002),
        ("wait_p95>1.5*base", 1.5, 0.0),
        ("startup>.5s", 0.0, 0.5),
        ("startup>base+2s", 1.0, 2.0),
    ],
)
def test_conditions_are_read(text: str, factor: float, value: float) -> None:
    found = parse_condition(text)
    assert (found.factor, found.needs_base) == (factor, factor > 0)
    assert math.isclose(found.value, value, abs_tol=1e-12)
    assert text.startswith(found.metric)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "for example: stall>10%"),
        ("stall", "for example: stall>10%"),
        ("stall>=10%", "for example"),
        ("stall>10% or rate<3", "for example"),
        ("stalls>10%", "there is no metric 'stalls', only stall, rate, wait_p50"),
        ("stall<10%", "more is worse for stall: write stall>"),
        ("rate>10", "less is worse for rate: write rate<"),
        ("stall>10", "write 10%"),
        ("stall>110%", "a share is below 1"),
        ("stall>10ms", "stall is a share"),
        ("wait_p99>50", "give a unit, such as 50ms"),
        ("wait_p99>50%", "give a unit"),
        ("rate<20%", "without a unit"),
        ("stall>2*base", "by points, for example stall>base+5%"),
        ("rate<0*base", "must be above 0"),
        ("rate<0.9*base-5", "not both"),
    ],
)
def test_a_condition_that_cannot_be_read_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_condition(text)
    assert repr(text) in str(caught.value)


@given(st.text(alphabet="stalrewi_p9<>*+-.0123456789%ms base", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_condition(text)
    except ValueError:
        return
    assert found.metric in METRICS
    assert math.isfinite(found.value)
    assert found.factor >= 0


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (4, 2.7764), (30, 2.0423), (31, 2.0395), (120, 1.9799)]
)
def test_students_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    assert find_t(freedom) == pytest.approx(expected, abs=8e-4)
    assert find_t(freedom + 1) < find_t(freedom)


RATES = st.lists(st.floats(1.0, 1000.0), min_size=5, max_size=12)


@given(RATES, RATES, st.floats(0.5, 1.5), st.randoms(use_true_random=False))
def test_a_verdict_agrees_with_the_mean_and_ignores_the_order_of_pairs_and_the_unit(
    new: list[float], old: list[float], factor: float, rng: random.Random
) -> None:
    pairs = list(zip(new, old, strict=False))
    condition = Condition("rate<...", "rate", factor, 0.0)
    ratios = [one / other for one, other in pairs]
    assume(max(ratios) - min(ratios) > 1e-6)  # else rounding decides

    def decide(pairs: Sequence[tuple[float, float]]) -> tuple[bool, str]:
        own, base = zip(*pairs, strict=True)
        found = RunRound([figures(rate=r) for r in own], [figures(rate=r) for r in base])
        judged = judge(condition, [found])
        assert judged.low <= judged.value <= judged.high
        assert judged.verdict != WORSE, "one round does not prove it"
        if judged.verdict == FINE:
            assert judged.low >= judged.threshold * (1 - 1e-9)
        again = judge(condition, [found, found])
        assert (again.verdict == WORSE) == looks_worse(condition, found)
        if again.verdict == WORSE:
            assert again.high < again.threshold
        return looks_worse(condition, found), judged.verdict

    decided = decide(pairs)
    assert decide(rng.sample(pairs, len(pairs))) == decided
    assert decide([(1000 * one, 1000 * other) for one, other in pairs]) == decided


STALLS = st.lists(st.floats(0.0, 1.0), min_size=5, max_size=10)


@given(STALLS, STALLS, st.floats(0.0, 1.0))
def test_both_rounds_must_look_worse(
    first: list[float], second: list[float], threshold: float
) -> None:
    condition = Condition("stall>...", "stall", 0.0, threshold)
    rounds = [RunRound([figures(stall=s) for s in stalls], []) for stalls in (first, second)]
    found = judge(condition, rounds)
    assert (found.verdict == WORSE) == all(looks_worse(condition, each) for each in rounds)
    if found.verdict == FINE:
        assert statistics.fmean(first + second) <= threshold + 1e-9


def test_equal_runs_are_not_worse_than_themselves() -> None:
    same = RunRound([figures(stall=0.0, wait_s=0.0)] * 5, [figures(stall=0.0, wait_s=0.0)] * 5)
    for text in ("stall>base", "rate<base", "wait_p99>base", "stall>0%"):
        assert judge(parse_condition(text), [same]).verdict == FINE


def draw_round(rng: random.Random, kind: str) -> RunRound:
    """Return five runs of a job on a noisy machine, beside five of the same job."""

    def draw() -> float:
        if kind == "normal":
            return rng.gauss(0, 0.1)
        if kind == "busy now and then":
            return rng.gauss(0, 0.02) - (rng.random() < 0.2) * rng.uniform(0, 1)
        return rng.choice([-0.5, 0.0]) + rng.gauss(0, 0.01)  # a machine of two speeds

    rates = [100 * math.exp(draw()) for _ in range(10)]
    return RunRound([figures(rate=r) for r in rates[:5]], [figures(rate=r) for r in rates[5:]])


@pytest.mark.parametrize("kind", ["normal", "busy now and then", "two speeds"])
def test_a_job_compared_with_itself_is_hardly_ever_worse(kind: str) -> None:
    rng, condition = random.Random(7), parse_condition("rate<base")
    once = [looks_worse(condition, draw_round(rng, kind)) for _ in range(1000)]
    assert sum(once) <= 45, "one round alone: 25 are expected, without any tolerance"
    # Rounds are independent, so that two meet by chance in the square of the cases.
    assert (sum(once) / 1000) ** 2 < 0.0025


def test_more_runs_decide() -> None:
    rates = [80.0, 110.0, 90.0, 120.0, 85.0]
    condition = parse_condition("rate<90")
    found = judge(condition, [RunRound([figures(rate=rate) for rate in rates], [])])
    assert found.verdict == UNDECIDED
    longer = [figures(rate=rate) for rate in rates * 10]
    assert judge(condition, [RunRound(longer, [])]).verdict == FINE


@given(st.floats(-10, 10), st.floats(0.01, 10))
def test_an_interval_moves_and_stretches_with_its_values(shift: float, scale: float) -> None:
    values = [1.0, 2.0, 4.0, 8.0, 3.0]
    plain = estimate_interval(values)
    moved = estimate_interval([shift + scale * value for value in values])
    assert moved.low == pytest.approx(shift + scale * plain.low)
    assert moved.high == pytest.approx(shift + scale * plain.high)


def test_the_text_names_each_condition_and_its_verdict() -> None:
    runs = [figures(stall=0.2 + at / 100, rate=100 + at) for at in range(5)]
    rounds = [RunRound(runs, runs)] * 2
    texts = ("stall>10%", "rate<50", "stall>22%", "rate<0.9*base")
    judgements = [judge(parse_condition(text), rounds) for text in texts]
    verdicts = [judgement.verdict for judgement in judgements]
    assert verdicts == [WORSE, FINE, UNDECIDED, FINE]
    assert combine(verdicts) == WORSE
    record = GateRecord(
        stoker="1",
        made="2026-11-26T11:00:00+00:00",
        command=["train.py"],
        runs=runs,
        base=runs,
        judgements=judgements,
        verdict=WORSE,
    )

    lines = write_text(record).splitlines()
    named = [f"{j.verdict}: {j.condition}" for j in record.judgements]
    assert [": ".join(line.split(": ")[:2]) for line in lines] == named
    assert lines[0] == "worse: stall>10%: stall 22.0% (20.9% to 23.1%), threshold 10.0%"
    assert lines[3].startswith("not worse: rate<0.9*base: rate / base 1.000 (1.000 to 1.000)")
