"""`stoker gate`: real scripts, run several times, with the exit status that CI sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from analysis.analyses import environment, write_script
from command_line import call
from scripts import TIMEOUT_S
from stoker.analysis.gate.runs import run_once
from stoker.analysis.scripts.script_run import make_folder


def gate_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stoker", "gate", *map(str, arguments)]


def gate(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        gate_command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )


ENDLESS = """
if __name__ == "__main__":
    train(DataLoader(Sleepy(0.0, 96), 4), epochs=10**9)
"""
# Pipelines, as scripts that import torch take seconds to start.
WITHOUT_TORCH = """
import time

import stoker

def slow(prep_s):
    for number in range(48):
        time.sleep(prep_s)
        yield number

def train(prep_s, step_s=0.0):
    for _ in stoker.from_iterable(lambda: slow(prep_s), seed=0).batch(2).workers(0):
        time.sleep(step_s)
"""
PIPELINE = """
import stoker
loader = stoker.from_iterable(range(48)).batch(2)
"""
OVER_A_LOADER = """
import stoker, torch
loader = stoker.from_loader(torch.utils.data.DataLoader(range(48), 4)).echo(2)
"""
# A run keeps up, the next one waits for data: nobody can say more.
BY_TURNS = (
    WITHOUT_TORCH
    + """
with open("runs", "a+") as file:
    file.write(".")
    waits = file.tell() % 2
train(0.02 * waits, 0.02 * (1 - waits))
"""
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail-if", "stall>1%", "gone.py"], "there is no script and no command 'gone.py'"),
        (["--fail-if", "stall>1%", "--base", "gone", "t.py"], "--base gone: there is no such"),
        (["--fail-if", "stall>1%", "--base", ".", "t.py"], "is the current folder"),
        (["--fail-if", "stall>1%", "--base", "b", "t.py"], "no condition compares with --base"),
        (["--fail-if", "rate<base", "--base", "b", "t.py"], "--base b: there is no t.py in it"),
        (["--fail-if", "rate<base", "--base", "b", "/t.py"], "give /t.py relative to them"),
        (["--fail-if", "stall>1%", "--json", "no/x.json", "t.py"], "cannot write no/x.json"),
        (["--fail-if", "stall>1%", "--json", "b", "t.py"], "cannot write b: it is a folder"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("raise SystemExit(9)")
    (tmp_path / "b").mkdir()
    code, out, errors = call("gate", *arguments)
    assert (code, out) == (1, "")
    assert errors.startswith("stoker gate: ")
    assert said in errors
    assert "starting" not in errors


@pytest.mark.full
def test_a_job_that_waits_is_worse_and_the_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_TORCH + "train(0.005)")
    conditions = ["--fail-if", "stall>2%", "--fail-if", "rate<0.001"]
    found = gate(tmp_path, *conditions, "--json", "g.json", "--", "train.py")
    assert found.returncode == 3, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith("worse: stall>2%: stall ")
    assert lines[1].startswith("not worse: rate<0.001: rate ")
    record = json.loads((tmp_path / "g.json").read_text())
    assert (record["schema"], record["verdict"]) == ("stoker-gate/1", "worse")
    assert len(record["runs"]) == 10
    assert {run["batches"] for run in record["runs"]} == {23}
    assert all(run["wait_p50"] <= run["wait_p99"] for run in record["runs"])
    assert "again, run 5 of 5: stall " in found.stderr


@pytest.mark.full
def test_versions_run_by_turns_and_the_slower_one_is_worse(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "train.py").write_text(WITHOUT_TORCH + "train(0.001)")
    (tmp_path / "train.py").write_text(WITHOUT_TORCH + "train(0.02)")
    found = gate(tmp_path, "--base", "base", "--fail-if", "rate<0.8*base", "--", "train.py")
    assert found.returncode == 3, found.stderr
    started = [line.split(":")[0] for line in found.stderr.splitlines() if "starting" in line]
    assert len(started) == 22
    assert started[2:6] == [
        "run 1 of 5, this version",
        "run 1 of 5, base",
        "run 2 of 5, base",
        "run 2 of 5, this version",
    ]
    assert started[-1] == "again, run 5 of 5, base"


@pytest.mark.full
def test_runs_that_differ_too_much_are_undecided(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_TURNS)
    found = gate(tmp_path, "--fail-if", "stall>50%", "--", "train.py")
    assert found.returncode == 4, found.stderr
    assert found.stdout.startswith("undecided: stall>50%: ")


@pytest.mark.full
def test_a_long_script_is_ended_after_its_seconds(tmp_path: Path) -> None:
    write_script(tmp_path, ENDLESS)
    found = gate(tmp_path, "--seconds", "0.5", "--fail-if", "rate<0.001", "--", "train.py")
    assert found.returncode == 0, found.stderr


def write_loop(folder: Path, loader: str, epochs: int) -> None:
    loop = f"for _ in range({epochs}):\n    list(loader)\n"
    (folder / "train.py").write_text(loader + loop)


@pytest.mark.full
@pytest.mark.parametrize("epochs", [2, 10**9])
@pytest.mark.parametrize("loader", [PIPELINE, OVER_A_LOADER], ids=["alone", "over a loader"])
def test_a_pipeline_is_measured(tmp_path: Path, loader: str, epochs: int) -> None:
    write_loop(tmp_path, loader, epochs)
    with make_folder() as folder:
        script = str(tmp_path / "train.py")
        found = run_once([sys.executable, script], folder / "run", 0.5)
    # The first of each epoch is left out; those of the loader inside would be half as many.
    assert found.batches == 46 if epochs == 2 else found.batches > 46


@pytest.mark.full
def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    write_loop(tmp_path, PIPELINE, 2)
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            gate_command("--fail-if", "rate<0.001", "--", "train.py"), cwd=tmp_path,
            env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr.endswith("\nstoker gate: [Errno 28] No space left on device\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("train(DataLoader(Sleepy(0.0, 40), 4), epochs=1)\nsys.exit(5)", "exit code 5"),
        ("train(DataLoader(Sleepy(0.0, 8), 4), epochs=1)", "at least 10 are needed"),
        ("print('no loader')", "without iterating a DataLoader"),
    ],
)
def test_a_script_that_cannot_be_measured_is_an_error(tmp_path: Path, body: str, said: str) -> None:
    write_script(tmp_path, body)
    (tmp_path / "g.json").write_text("of an earlier gate")
    found = gate(tmp_path, "--json", "g.json", "--fail-if", "stall>1%", "--", "train.py")
    assert found.returncode == 1
    assert said in found.stderr
    assert not (tmp_path / "g.json").exists(), "CI would show it"
    assert "Traceback" not in found.stderr.split("Its last lines")[0]
    assert "starting" in found.stderr
    assert "run 1 of 5" not in found.stderr


@pytest.mark.full
def test_ctrl_c_ends_the_script_and_the_gate(tmp_path: Path) -> None:
    body = "print(os.getpid(), file=open('pid', 'w'), flush=True)\nopen('ready', 'w')\n"
    write_script(tmp_path, body + ENDLESS)
    process = subprocess.Popen(
        gate_command("--fail-if", "stall>1%", "--", "train.py"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith("stopped; no process of the script is left\n")
    assert "Traceback" not in errors
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
