"""What would help, by reports of jobs of every kind."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from analysis.reports import ALONE, COMPUTE, FETCH, PREP, REPORTS
from stoker.analysis.advice import actions
from stoker.analysis.model import predict
from stoker.analysis.report import Report, measured
from stoker.analysis.verdict import verdict

CODES = {
    "workers": "num_workers=",
    "cache": "stoker.cached(",
    "storage": "--storage-mbps",
    "accelerator": "--accelerator",
    "sharing": "stoker feed",
    "echo": "echo(",
}


def named(report: Report) -> list[str]:
    """Return the kinds of actions, in their order."""
    return [
        next(kind for kind, code in CODES.items() if code in action.code)
        for action in actions(report)
    ]


@pytest.mark.parametrize("name", REPORTS)
def test_every_action_helps_and_the_best_comes_first(name: str) -> None:
    found = actions(REPORTS[name])
    for action in found:
        assert action.gain.value >= 1.02
        assert action.gain.low <= action.gain.value <= action.gain.high
        assert action.title
        assert action.why
    kinds = named(REPORTS[name])
    apart = [kind for kind in kinds if kind in ("sharing", "echo")]
    ranked = [a.gain.value for a in found[: len(found) - len(apart)]]
    assert ranked == sorted(ranked, reverse=True)
    assert kinds[len(ranked) :] == apart  # what needs several jobs; and what is not fresh: last
    assert apart in ([], ["sharing"], ["echo"], ["sharing", "echo"])


def test_what_limits_is_what_the_advice_is_about() -> None:
    assert named(COMPUTE) == ["accelerator"]
    assert {"cache", "storage", "echo"} <= set(named(FETCH))
    assert "cache" not in named(replace(FETCH, cached_fraction=1.0))
    assert "accelerator" not in named(PREP)
    assert named(ALONE)[0] == "workers"


def test_without_storage_nothing_is_said_about_it() -> None:
    assert not {"cache", "storage"} & set(named(REPORTS["unknown"]))


def test_a_gain_is_what_the_model_says() -> None:
    (action,) = actions(COMPUTE)
    job = measured(COMPUTE)
    doubled = predict(type(job)(**{**job.__dict__, "ingestion": 2 * job.ingestion}))
    assert action.gain.value == pytest.approx(doubled.rate / predict(job).rate)


@pytest.mark.parametrize("name", REPORTS)
def test_the_verdict_is_a_sentence_about_what_limits(name: str) -> None:
    report = REPORTS[name]
    text = verdict(replace(report, actions=actions(report)))
    assert text[0].isupper()
    assert "\n" not in text
    if report.as_it_is is None:
        assert "steady state" in text
    elif report.bound == "compute":
        assert "is fed" in text
    else:
        assert "limited by" in text
