"""Feeds that the jobs of a Ray cluster share: one feeder, found from every node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import served

import stoker

PROGRAM = Path(__file__).parent / "ray_playing.py"


def played() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PROGRAM, f"ray-{os.getpid()}"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: list[tuple[int, str]], epochs: int) -> None:
    """Every output of successive epochs, once, in order."""
    seen = list(dict.fromkeys(epoch for epoch, _ in found))
    assert seen == list(range(seen[0], seen[0] + epochs))
    for epoch in seen:
        assert [digest for at, digest in found if at == epoch] == served.expected("batches", epoch)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(500)
def test_jobs_on_two_nodes_share_one_preparation() -> None:
    found = played()
    for each in found["jobs"]:
        check(each, 3)
    assert found["most"] == 1


@pytest.mark.parametrize(
    ("cluster", "error"), [("slurm", ValueError), ("ray", stoker.ClusterError)]
)
def test_without_a_cluster_it_says_so(cluster: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="cluster="):
        stoker.feed("served.py:batches", name="nowhere", cluster=cluster)
