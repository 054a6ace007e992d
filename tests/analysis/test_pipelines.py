"""`stoker.analyze(pipeline, step)`: in this process, where stages are known."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.analysis.model.model import Change, predict
from stoker.analysis.model.report import read_report, to_measured, write_report


def slow(data: bytes) -> Any:
    time.sleep(0.002)
    return np.frombuffer(data, np.uint8)[:16].astype(np.float32)


def noisy(values: Any, rng: np.random.Generator) -> Any:
    time.sleep(0.001)
    return values + rng.standard_normal(16, dtype=np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for number in range(120):
        (folder / f"{number:03}").write_bytes(bytes([number]) * 3000)
    return sorted(str(path) for path in folder.iterdir())


def step(batch: Any) -> None:
    time.sleep(0.002)


@pytest.mark.full
def test_every_stage_gets_its_own_rate(files: list[str], tmp_path: Path) -> None:
    train = (
        stoker.from_files(files, seed=0)
        .shuffle()
        .map(slow, on="data")
        .random_map(noisy, on="data")
        .batch(8)
        .workers(1)
    )
    train.set_epoch(3)
    report = stoker.analyze(train, step, max_seconds=4)
    assert train.epoch == 3
    assert report.bound == "prep"
    assert report.split.prep_stall > 0.5
    names = list(report.stages)
    assert names[0].startswith("from_files")
    rates = [report.stages[name].value for name in names]
    # A sleep takes no less than it was asked for; how much more, a busy machine decides.
    assert rates[1] < 500
    assert rates[1] < rates[2] < 1000
    assert rates[2] < rates[3]
    assert report.rates.G is not None
    assert report.rates.P is not None
    assert report.rates.P.value < 1000 / 3
    assert 2 * report.rates.P.value < report.rates.G.value
    assert report.rates.G.low < 4000  # the range is wide where the machine is busy
    assert report.rates.S is not None, report.reasons
    assert report.example_bytes == report.file_bytes == 3000
    assert report.examples == 120
    # What is paid for every use is what stands behind the place.
    assert report.echo_after_s is not None
    assert report.echo_after_s > 0.001
    job = to_measured(report)
    echoed = predict(job, Change(echo=3))
    assert predict(job).rate < echoed.rate < 3 * predict(job).rate
    titles = [action.title for action in report.actions]
    assert any("slow" in title for title in titles)
    # What .cache("auto") would choose: all of it behind the slow map, and before the random one.
    assert report.keeping is not None
    assert report.keeping.name.endswith(".map(slow, on='data')")
    assert report.keeping.kept_fraction == 1.0
    assert report.keeping.left_fraction < 0.5
    assert any(action.code.endswith("data').cache()") for action in report.actions)
    assert " ".join(report.verdict.split()) in " ".join(str(report).split())
    write_report(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def windows(folder: Path) -> stoker.Pipeline:
    tokens = folder / "tokens.npy"
    np.save(tokens, np.zeros(3200, np.uint16))
    return stoker.from_tokens(tokens, 8, seed=0)


@pytest.mark.parametrize("what", ["arrays", "windows of one file"])
def test_examples_that_are_no_files(what: str, tmp_path: Path) -> None:
    arrays = stoker.from_arrays(np.zeros((400, 8)), seed=0)
    train = (arrays if what == "arrays" else windows(tmp_path)).batch(8)
    report = stoker.analyze(train, lambda batch: None, max_seconds=0.5)
    assert report.rates.G is not None
    assert report.rates.S is None
    assert "not files" in report.reasons["S"]


def test_what_cannot_be_analyzed_is_refused() -> None:
    train = stoker.from_arrays(np.zeros((40, 8))).batch(8)
    with pytest.raises(ValueError, match=r"leave \.echo out"):
        stoker.analyze(train.echo(2), step)
    with pytest.raises(ValueError, match="inside a loader"):
        stoker.analyze(stoker.from_loader([np.zeros(3)]), step)
    with pytest.raises(ValueError, match="above 0"):
        stoker.analyze(train, step, max_seconds=0)
    none = (
        stoker.from_arrays(np.zeros((40, 8))).filter(stoker.thread_safe(lambda _: False)).batch(8)
    )
    with pytest.raises(ValueError, match="yields no batch"):
        stoker.analyze(none, step, max_seconds=0.5)


def test_an_error_of_the_step_is_the_users(files: list[str]) -> None:
    def broken(batch: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stoker.analyze(stoker.from_files(files).batch(4), broken, max_seconds=1)
