"""Analyses of real scripts in real processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))


class Files(Dataset):
    def __init__(self, prep_s=0.0, folder="files"):
        self.prep_s = prep_s
        folder = os.path.join(HERE, folder)
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            raw = file.read()
        time.sleep(self.prep_s)
        return torch.tensor(list(raw[:16]), dtype=torch.float32)


class Sleepy(Dataset):
    def __init__(self, prep_s=0.002, length=4000):
        self.prep_s, self.length = prep_s, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.prep_s)
        return torch.full((4,), float(index))


def train(loader, step_s=0.0, epochs=10_000):
    weight = torch.zeros(1, requires_grad=True)
    for _ in range(epochs):
        for batch in loader:
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            (weight * x.sum()).backward()
            time.sleep(step_s)
"""


def write_script(folder: Path, body: str, name: str = "train.py") -> Path:
    """Write a training script; ``main`` is guarded, so that workers may be spawned."""
    path = folder / name
    path.write_text(PRELUDE + "\n\n" + textwrap.dedent(body))
    return path


def write_shell(folder: Path, *commands: str) -> str:
    """Write a shell script that runs the training script, and commands; return how to call it."""
    path = folder / "train.sh"
    path.write_text("\n".join(["#!/bin/sh", f"{sys.executable} train.py", *commands]) + "\n")
    path.chmod(0o755)
    return "./train.sh"


def write_files(folder: Path, count: int, size: int = 3000) -> None:
    """Write the script's data files, clean in the page cache."""
    (folder / "files").mkdir()
    for number in range(count):
        (folder / "files" / f"{number:04}.bin").write_bytes(bytes([number % 256]) * size)
    os.sync()


@dataclass
class Outcome:
    """How an analysis ended."""

    code: int
    out: str
    errors: str
    report: dict[str, Any] | None

    @property
    def told(self) -> dict[str, Any]:
        """The report; there is one."""
        assert self.report is not None, self.errors
        return self.report

    @property
    def rates(self) -> dict[str, Any]:
        found: dict[str, Any] = self.told["rates"]
        return found

    def assert_whole(self) -> None:
        """Fail if the script was harmed, or its main rates are not known."""
        assert self.code == 0, self.errors + self.out
        assert self.told["crash"] is None
        assert self.rates["G"] is not None, self.told["reasons"]
        assert self.rates["P"] is not None, self.told["reasons"]


def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def command_of(*arguments: str | os.PathLike[str]) -> list[str]:
    call = "from stoker.cli import main; main()"
    return [sys.executable, "-c", call, "analyze", *(os.fspath(argument) for argument in arguments)]


def analyze(
    folder: Path,
    *arguments: str | os.PathLike[str],
    seconds: float = 15,
    stdin: Any = None,
    **variables: str,
) -> Outcome:
    """Run ``stoker analyze`` and read its report."""
    target = folder / "report.json"
    done = subprocess.run(
        command_of("--max-seconds", str(seconds), "--json", target, *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
        env=environment() | variables,
        stdin=stdin or subprocess.DEVNULL,
    )
    report = json.loads(target.read_text()) if target.is_file() else None
    return Outcome(done.returncode, done.stdout, done.stderr, report)


def measured(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test of a real measurement, a costly one, fail twice, each time in a folder of its own.

    A machine that runs other tests may stall while a script is measured. A wrong analysis is wrong
    three times in a row.
    """

    @functools.wraps(test)
    def tried(*args: Any, tmp_path: Path, **kwargs: Any) -> None:
        for attempt in range(3):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            try:
                return test(*args, tmp_path=folder, **kwargs)
            except Exception:  # what was not measured is None, or not in a list
                if attempt == 2:
                    raise

    return pytest.mark.full(tried)
