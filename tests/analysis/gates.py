"""Gates over real scripts in real processes, and runs as they would be measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from analysis.analyses import environment
from stoker.analysis.gate.metrics import RunFigures


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
