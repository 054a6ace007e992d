"""The examples run, as their first lines say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strategies import shortened

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("pictures", shortened([128, 1024], 1))
def test_learning_rates_share_one_preparation(pictures: int, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "learning_rates.py", tmp_path)
    task = (EXAMPLES / "task.py").read_text()
    assert "PICTURES = 1_024" in task
    (tmp_path / "task.py").write_text(task.replace("PICTURES = 1_024", f"PICTURES = {pictures}"))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "learning_rates.py"), "--jobs", "2"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert [line.split()[2] for line in lines] == ["0.003", "0.01"]
    assert all(float(line.split()[-1]) < 2 for line in lines)
