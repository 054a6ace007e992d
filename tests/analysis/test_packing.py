"""What packing would bring: trials on files, what follows from them, and how it is said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

import stoker
from analysis.recordings import EXAMPLES, Parts, recorded
from analysis.reports import FETCH, PACKED, REMOTE, about
from descriptors import open_descriptors
from experiments.server import serving
from stoker.analysis import phases
from stoker.analysis.model.model import NOTHING, Change, predict
from stoker.analysis.model.report import Report, read_report, to_measured, write_report
from stoker.analysis.packing_gain import estimate_packing, estimate_requests
from stoker.analysis.reports.advice import advise
from stoker.analysis.reports.diagnosis import make_report
from stoker.analysis.trials.request_trial import RequestTrial, try_requests
from stoker.analysis.trials.trial_shard import (
    RUN_BYTES,
    PackingTrial,
    TrialShard,
    choose_sample,
    try_packing,
)
from stoker.cli import app

OFFSET, RUNS = Change(records="by offset"), Change(records="in runs")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = []
    for number in range(30):
        paths.append(str(tmp_path / f"{number}"))
        Path(paths[-1]).write_bytes(os.urandom(100_000 * (number % 3)))
    return paths


# -- the trial


def test_a_trial_shard_holds_the_files_and_leaves_nothing(files: list[str], tmp_path: Path) -> None:
    before, there = open_descriptors(), set(os.listdir(tmp_path))
    with TrialShard(files) as shard:
        assert set(os.listdir(tmp_path)) == there  # it has no name
        assert shard.nbytes == sum(nbytes for _, nbytes in shard.extents)
        for path, (_, nbytes) in zip(files, shard.extents, strict=True):
            assert os.path.getsize(path) <= nbytes - 512 < os.path.getsize(path) + 512
        runs = shard.runs()
        assert sum(nbytes for _, nbytes in runs) == shard.nbytes
        assert all(nbytes <= RUN_BYTES for _, nbytes in runs)
        trial = try_packing(files, shard, 2, 60.0)
    assert open_descriptors() <= before
    for reads in (trial.one_by_one, trial.by_offset, trial.in_runs):
        assert sum(count for count, _ in reads) == pytest.approx(len(files))
        assert all(seconds > 0 for _, seconds in reads)
    with pytest.raises(FileNotFoundError):
        TrialShard([*files, str(tmp_path / "gone")])
    assert open_descriptors() <= before


def test_the_sample_is_of_files_from_all_over(tmp_path: Path) -> None:
    paths = []
    for number in range(1000):
        paths.append(str(tmp_path / f"{number:04}"))
        Path(paths[-1]).touch()
    few = choose_sample(paths)
    assert 300 < len(few) <= 400
    assert set(few) <= set(paths)
    assert paths.index(max(few)) > 990
    for path in paths[:200]:
        os.truncate(path, 1 << 20)
    large = choose_sample(paths[:200])
    assert len(large) in range(50, 65)  # 64 MiB


# -- what follows from trials


def trial(one_by_one_s: float, by_offset_s: float, in_runs_s: float) -> PackingTrial:
    """Return the trial of 80 files of 100 kB that take so long each."""

    def reads(each_s: float) -> list[tuple[float, float]]:
        return [(10.0, 10 * each_s * (1 + block % 2 / 50)) for block in range(8)]

    return PackingTrial(80, 8_000_000, reads(one_by_one_s), reads(by_offset_s), reads(in_runs_s))


def test_rates_and_counts_follow_from_the_trials() -> None:
    found = estimate_packing([trial(0.01, 0.005, 0.001)] * 2, 1.0, 1_000_000)
    assert found is not None
    assert found.by_offset is not None
    assert found.by_offset.value == pytest.approx(2 * found.one_by_one.value)
    assert found.in_runs.value == pytest.approx(10 * found.one_by_one.value)
    assert found.one_by_one.low < found.one_by_one.value < found.one_by_one.high
    assert found.epoch_files == 1_000_000
    assert found.epoch_shards == -(-(10**11) // 2**28)
    assert found.epoch_runs == -(-(10**11) // 2**20)
    two = estimate_packing([trial(0.01, 0.005, 0.001)], 0.5, 1_000_000)
    assert two is not None
    assert two.epoch_files == 2_000_000  # two of them an example
    assert two.one_by_one.value == pytest.approx(found.one_by_one.value / 2)
    unknown = estimate_packing([trial(0.01, 0.005, 0.001)], 1.0, None)
    assert unknown is not None
    assert unknown.epoch_runs is None
    assert estimate_packing([], 1.0, 1) is None


@given(
    request_s=st.floats(1e-5, 1e-1),
    transfer_s=st.floats(0.0, 1e-1),
    nbytes=st.integers(1, 10**8),
)
def test_of_what_a_request_takes_a_run_pays_once(
    request_s: float, transfer_s: float, nbytes: int
) -> None:
    whole = [(64.0, 64 * (request_s + transfer_s))] * 4
    found = estimate_requests(
        RequestTrial(256, 256 * nbytes, whole, [(64.0, 64 * request_s)] * 4), 0.5, 10_000
    )
    assert found is not None
    assert found.by_offset is None
    each_s = request_s / max(1.0, RUN_BYTES / nbytes) + transfer_s
    assert found.in_runs.value == pytest.approx(1 / each_s, rel=1e-6)
    assert found.in_runs.low <= found.in_runs.value <= found.in_runs.high
    assert found.in_runs.value >= found.one_by_one.value * (1 - 1e-9)


def test_a_trial_in_a_record_is_in_the_report() -> None:
    parts = Parts(
        rate=90.0,
        wait=0.9,
        G=1_000.0,
        P={1: 500.0, 2: 900.0},
        trained={1: 500.0, 2: 900.0},
        workers=2,
        S=100.0,
        C=5_000.0,
        cached=0.0,
        prep_cpu_s=0.001,
        step_cpu_s=0.0,
    )
    record = recorded(parts)
    record.packing_trials = [trial(0.01, 0.005, 0.001)]
    report = make_report(record)
    assert report.packing is not None
    assert report.packing.epoch_files == EXAMPLES
    job = to_measured(report)
    assert dict(job.packed) == pytest.approx({"by offset": 2.0, "in runs": 10.0})
    assert predict(job, OFFSET).rate == pytest.approx(2 * predict(job).rate)
    record.packing_trials, record.reasons["packing"] = [], "read-only"
    assert make_report(record).reasons["packing"] == "read-only"
    del record.reasons["packing"]
    assert "too little of its files was read" in make_report(record).reasons["packing"]


def test_where_nothing_can_be_written_the_reason_is_told(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(phases, "TrialShard", refuse)
    train = stoker.from_files(files[1:], seed=0).batch(2)
    report = stoker.analyze(train, lambda _: time.sleep(0.001), budget_s=0.5)
    assert report.packing is None
    if report.rates.S is not None:
        assert "Permission denied" in report.reasons["packing"]


# -- the model


def test_what_is_in_memory_gains_nothing() -> None:
    job = to_measured(PACKED)
    assert predict(job, RUNS).rate > predict(job, OFFSET).rate > predict(job).rate
    whole = Change(cache_bytes=10**13)
    assert predict(job, Change(cache_bytes=10**13, records="in runs")) == predict(job, whole)
    assert predict(job, RUNS).fetch == pytest.approx(5 * predict(job).fetch)
    for changed in (OFFSET, RUNS):
        assert predict(job, changed).prep == predict(job).prep


def test_of_preparing_only_the_waiting_for_files_shrinks() -> None:
    job = to_measured(REMOTE)
    assert predict(job, RUNS).prep == pytest.approx(predict(job).prep / (0.2 + 0.8 / 4))


# -- what is said


def packing_action(report: Report) -> Any:
    found = [action for action in advise(report) if "into shards" in action.title]
    return found[0] if found else None


def test_shards_are_advised_in_the_order_that_does_best() -> None:
    action = packing_action(PACKED)
    assert action.code.startswith("write row groups of 8 MiB by pyarrow.parquet; stoker.from_par")
    assert "545 files opened an epoch in place of 1,281,167, and 139,283 seeks" in action.title
    assert "1.50 times as fast by offset, and 5.00 times in runs" in action.why
    job = to_measured(PACKED)
    assert action.gain.value == pytest.approx(predict(job, RUNS).rate / predict(job).rate)
    assert action.gain.low < action.gain.value <= action.gain.high
    assert PACKED.packing is not None
    alike = replace(PACKED, packing=replace(PACKED.packing, by_offset=about(4_450)))
    assert "from_tar('DEST/*.tar').shuffle()" in packing_action(alike).code
    assert "1,281,167 seeks" in packing_action(alike).title
    slower = replace(PACKED.packing, by_offset=about(700), in_runs=about(800))
    assert packing_action(replace(PACKED, packing=slower)) is None
    assert packing_action(replace(PACKED, cached_fraction=1.0)) is None
    assert packing_action(FETCH) is None


def test_behind_urls_there_are_fewer_requests() -> None:
    action = packing_action(REMOTE)
    assert "139,283 requests an epoch in place of 1,281,167" in action.title
    assert "from_tar('URL/*.tar').shuffle()" in action.code
    assert "4.00 times as fast" in action.why


def what_if(report: Report, folder: Path, *words: str) -> tuple[int, str]:
    write_report(report, folder / "report.json")
    result = CliRunner().invoke(app, ["what-if", str(folder / "report.json"), *words])
    return result.exit_code, result.output


def test_what_if_answers_for_both_orders(tmp_path: Path) -> None:
    code, out = what_if(PACKED, tmp_path, "--format", "records", "--json", str(tmp_path / "a"))
    assert code == 0, out
    assert "then: files packed into shards" in out
    assert "packed, read by offset" in out
    assert "packed, read in runs" in out
    line = next(line for line in out.splitlines() if line.startswith("examples/s"))
    job = to_measured(PACKED)
    assert line.split()[1:] == [f"{predict(job, c).rate:,.0f}" for c in (NOTHING, OFFSET, RUNS)]
    assert "shards gave 1.50 times by offset, 5.00 times in runs" in out
    assert '"records": "in runs"' in (tmp_path / "a").read_text()
    code, out = what_if(REMOTE, tmp_path, "--format", "records")
    assert code == 0, out
    assert "by offset" not in out
    code, out = what_if(PACKED, tmp_path, "--format", "records", "--jobs", "2")
    assert "Assumed: shards are read in runs." in out


def test_what_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    for report, words, says in (
        (FETCH, ["--format", "records"], "could not, try packing"),
        (PACKED, ["--format", "tar"], "format=tar: must be records"),
        (PACKED, ["--format", "records", "--storage-mbps", "9"], "leave out storage-mbps"),
    ):
        code, out = what_if(report, tmp_path, *words)
        assert code == 1
        assert says in out


# -- real ones


def test_a_byte_of_files_is_asked_for_whose_sizes_nobody_told(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(bytes(300))
    with serving(str(tmp_path)) as server:
        source: Any = stoker.from_files(f"{server.url}/{{0..3}}.bin").chain.source.data  # type: ignore[attr-defined]
        trial = try_requests(source, source.access, 4, 0.01)
    assert trial.nbytes == 300 * trial.files


def test_files_behind_urls_are_tried_through_their_reader(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    try:
        for number in range(40):
            memory.pipe(f"/tried/{number:03}", bytes([number]) * 2_000)
        train = stoker.from_files("memory://tried/*", seed=0, requests=4).shuffle().batch(8)
        report = stoker.analyze(train, lambda _: time.sleep(0.001), budget_s=1)
    finally:
        memory.rm("/tried", recursive=True)
    found = report.packing
    assert found is not None, report.reasons
    assert found.by_offset is None
    assert found.requests is not None
    assert found.in_runs.value >= found.one_by_one.value
    assert 0.0 < found.prep_share < 1.0
    assert (found.epoch_files, found.epoch_runs, found.epoch_shards) == (40, 1, 1)
    assert found.sample_bytes == 2_000 * found.sample_files
    write_report(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
