"""Every benchmark runs: with --quick they find errors, never figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHARED = ("harness.py", "throttled.py")
TIMEOUT_S = 500  # some ten seconds do where nothing else runs
SCRIPTS = sorted(path for path in BENCH.glob("*.py") if path.name not in SHARED)


def test_the_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 8


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_quick_run_finds_no_errors_and_leaves_no_file(script: Path) -> None:
    results = BENCH / "results" / f"{script.stem}.json"
    before = results.read_bytes() if results.exists() else None

    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--quick"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "no figures" in done.stdout
    after = results.read_bytes() if results.exists() else None
    assert after == before
