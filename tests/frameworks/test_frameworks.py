"""Training frameworks, each in processes of its own, and the matrix of docs/tested.md.

The cells are in cells.py. What the page says of them is what came of them: where it does not, the
failure shows the rows that the page should have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import PATH, ROOT, TIMEOUT_S, reserved_port

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "tested.md"
FRAMEWORKS = [
    *("Lightning", "Accelerate", "Hugging Face Trainer"),
    *("PyTorch", "Ray Train", "JAX", "Keras 3"),
]
KINDS = ["pipeline", "echo(loader)", "cached", "share"]
USES = ["fit", "validate", "resume", "2 processes", "schedule"]
MORE = {
    "Lightning": [
        *("limits", "overfit", "val_check_interval", "combined", "checkpoints"),
        *("estimated", "any checkpoint", "acknowledged", "fresh clock"),
    ],
    "Accelerate": ["accumulate", "lookahead", "skips"],
    "Hugging Face Trainer": [
        *("at epoch ends", "auto", "while training", "resume with evaluation", "refused"),
    ],
    "PyTorch": ["compiled", "other world"],
}
MORE_OF_RANKS = {
    "Lightning": ["resumed ranks", "padded ranks"],
    "Accelerate": ["resumed ranks", "padded ranks", "uneven ranks"],
    "Hugging Face Trainer": ["resumed ranks"],
    "PyTorch": ["resumed ranks", "other world", "sharded model"],
}
GIVES_PARTS = {
    "Lightning": "DistributedSampler",
    "Accelerate": "prepare(loader)",
    "Hugging Face Trainer": "prepare(loader)",
    "Ray Train": "prepare_data_loader(loader)",
    "Keras 3": "DistributedSampler",
}
"""The line to add where each of the ranks iterates over all."""
OWN_WORKERS = "Ray Train"
"""It starts its processes itself, and a cluster, which takes its time."""
LIMIT_S = 2 * TIMEOUT_S
RAY = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


each_framework = pytest.mark.parametrize(
    "framework",
    # A cluster starts and ends of itself where too much else runs.
    [pytest.param(name, marks=[pytest.mark.alone] * (name == OWN_WORKERS)) for name in FRAMEWORKS],
)


@contextlib.contextmanager
def started(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program; whatever is left of its session is killed at the end."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH, **RAY, **variables},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def outcomes(
    folder: Path, framework: str, cells: list[tuple[str, str]], ranks: int = 1
) -> dict[tuple[str, str], str]:
    """Run cells in one process, or in each of several ranks, which must agree."""
    run, told, found = uuid.uuid4().hex[:8], [], []
    with contextlib.ExitStack() as running:
        port = running.enter_context(reserved_port())
        processes = []
        for rank in range(ranks):
            at = folder / f"{run}-{rank}"
            at.mkdir()
            variables: dict[str, Any] = {"CELLS": run, "CELLS_SHARED": folder}
            if ranks > 1:  # as torchrun sets them
                variables |= {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "GROUP_RANK": 0,
                    "WORLD_SIZE": ranks,
                    "LOCAL_WORLD_SIZE": ranks,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": run,
                }
            command = [sys.executable, str(HERE / "cells.py"), str(at), framework]
            command += [word for cell in cells for word in cell]
            texts = {name: str(value) for name, value in variables.items()}
            processes.append(running.enter_context(started(command, **texts)))

        def end() -> None:
            for process in processes:
                process.kill()

        late = threading.Timer(LIMIT_S, end)
        running.callback(late.join)
        running.callback(late.cancel)
        late.start()
        for process in processes:
            assert process.stdout is not None
            told.append(process.stdout.read())
        for process in processes:  # none ends before all have told
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait()
    said = "\n".join(
        f"-- rank {rank}: code {process.returncode}\n{(folder / f'{run}-{rank}/said').read_text()}"
        for rank, process in enumerate(processes)
    )
    for process, out in zip(processes, told, strict=True):
        assert process.returncode == 0, said
        lines = map(json.loads, out.splitlines())
        found.append({(kind, use): outcome for kind, use, outcome in lines})
    assert all(set(each) == set(cells) for each in found), f"{found}\n{said}"
    assert all(each == found[0] for each in found), f"{found}\n{said}"
    return found[0]


def rows(found: dict[tuple[str, str], str]) -> list[str]:
    """Return the lines of the page's matrix: what works, or the error's first clause."""
    lines = []
    for kind in KINDS:
        cells = [found[kind, use].split(",")[0].split(":", 1)[-1].strip() for use in USES]
        lines.append(f"| {' | '.join([kind, *cells])} |")
    return lines


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
@each_framework
def test_each_cell_works_or_is_refused_as_the_page_says(framework: str, tmp_path: Path) -> None:
    matrix = [(kind, use) for kind in KINDS for use in USES]
    undivided = [(kind, "unsharded") for kind in ("pipeline", "echo(loader)")]
    undivided *= framework in GIVES_PARTS
    alone = [cell for cell in matrix if cell[1] != "2 processes"]
    alone += [("any", use) for use in MORE.get(framework, [])]
    of_ranks = [cell for cell in matrix if cell not in alone] + undivided
    of_ranks += [("any", use) for use in MORE_OF_RANKS.get(framework, [])]
    if framework == OWN_WORKERS:
        found = outcomes(tmp_path, framework, alone + of_ranks)
    else:
        found = outcomes(tmp_path, framework, alone)
        found |= outcomes(tmp_path, framework, of_ranks, ranks=2)
    for kind, use in undivided:
        text = found.pop((kind, use))
        assert text.startswith("ValueError: under ")
        assert "each of 2 ranks iterates over all" in text
        assert (".shard()" if kind == "pipeline" else GIVES_PARTS[framework]) in text
    refused = {cell: text for cell, text in found.items() if text != "works"}
    assert {text.split(":")[0] for text in refused.values()} <= {"StateError"}, refused
    assert all(kind != "any" for kind, _ in refused), refused
    beginnings = tuple(f"| {kind} |" for kind in KINDS)  # the same for each framework
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith(beginnings)]
    assert shown == rows(found)
