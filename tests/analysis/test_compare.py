"""`stoker compare`: two reports of analyses or of gates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from analysis.gates import figures
from analysis.reports import PREP, about
from stoker.analysis.gate.comparing import compare_files
from stoker.analysis.gate.record import GateRecord, write_record
from stoker.analysis.model.report import AsItIs, Interval, Report, SplitIntervals, write_report
from stoker.cli import app

INTERVALS = SplitIntervals(Interval(0.4, 0.5), Interval(0.4, 0.5), Interval(0.0, 0.1))


def write_gate(path: Path, rate: float) -> Path:
    runs = [figures(rate=rate + at) for at in range(5)]
    record = GateRecord(
        stoker="1", made="", command=["train.py"], runs=runs, judgements=[], verdict="not worse"
    )
    write_record(record, path)
    return path


def write_analysis(path: Path, rate: float) -> Path:
    report: Report = msgspec.structs.replace(
        PREP, as_it_is=AsItIs(about(rate), 0.4, 1.0), split_intervals=INTERVALS
    )
    write_report(report, path)
    return path


def invoke(*paths: Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, paths)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(("write", "name"), [(write_gate, "rate"), (write_analysis, "speed")])
@pytest.mark.parametrize(
    ("rate", "verdict"),
    [(1000.0, "cannot be told apart"), (500.0, "worse"), (2000.0, "better")],
)
def test_a_change_is_told_if_the_intervals_do_not_meet(
    tmp_path: Path, write: object, name: str, rate: float, verdict: str
) -> None:
    assert callable(write)
    before, after = write(tmp_path / "a.json", 1000.0), write(tmp_path / "b.json", rate)
    found = {each.name: each for each in compare_files(before, after)}
    assert found[name].verdict == verdict
    others = {each.verdict for each in found.values() if each.name != name}
    assert others == {"cannot be told apart"}
    result = invoke(before, after)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith(name))
    assert line.rstrip().endswith(verdict)
    assert "Not of the same command" not in result.output


def test_reports_of_other_commands_are_told(tmp_path: Path) -> None:
    before, after = write_gate(tmp_path / "a.json", 1.0), write_analysis(tmp_path / "b.json", 1.0)
    assert invoke(before, after).exit_code == 1, "nor are they of the same kind"
    after.write_bytes(before.read_bytes().replace(b"train.py", b"other.py"))
    assert "Not of the same command: train.py; other.py" in invoke(before, after).output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ('{"x": ' + "[" * 100_000, "is not a report"),  # 3.14 may have the stack for it
        ("{}", "has the schema ''; this version of stoker compares 'stoker-analysis/1'"),
        ('{"schema": "stoker-gate/2"}', "has the schema 'stoker-gate/2'"),
        ('{"schema": "stoker-gate/1"}', "is not a file of `stoker gate --json`"),
        ('{"schema": "stoker-analysis/1"}', "is not a report of `stoker analyze --json`"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(content)
    result = invoke(path, path)
    assert result.exit_code == 1
    assert result.output.startswith("stoker compare: ")
    assert said in " ".join(result.output.split())


@pytest.mark.full
def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    report = write_gate(tmp_path / "a.json", 1.0)
    command = [sys.executable, "-c", "from stoker.cli import main; main()"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*command, "compare", report, report],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr == "stoker compare: [Errno 28] No space left on device\n"


def test_a_missing_file_and_two_kinds_are_refused(tmp_path: Path) -> None:
    gate, analysis = write_gate(tmp_path / "a.json", 1.0), write_analysis(tmp_path / "b.json", 1.0)
    mixed, missing = invoke(gate, analysis), invoke(gate, tmp_path / "c.json")
    assert mixed.exit_code == missing.exit_code == 1
    assert "compare two reports of the same kind" in mixed.output
    assert "c.json" in missing.output
