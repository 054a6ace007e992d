"""The examples run, as their first lines say."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
def test_what_the_examples_share_can_be_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    task = importlib.import_module("task")
    monkeypatch.delitem(sys.modules, "task")
    monkeypatch.setattr(task, "PICTURES", 64)
    model = task.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    assert 0 < task.train_epoch(model, optimizer, task.make_pipeline().to_torch()) < 2


@pytest.mark.full  # four processes that import torch
def test_learning_rates_share_one_preparation() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "learning_rates.py"), "--jobs", "2"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert [line.split()[2] for line in lines] == ["0.003", "0.01"]
    assert all(float(line.split()[-1]) < 2 for line in lines)
