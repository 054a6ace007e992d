"""The demo's picture, of rows made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.arms import Arm
from experiments.pictures import write_picture
from experiments.runs import Evaluation, RunRecord


def run(arm: Arm, seed: int, evaluations: int) -> RunRecord:
    return RunRecord(
        arm,
        seed,
        [Evaluation(100 * n, 100 * n, 100 * n, 10 * n, float(n), 0.5 * n, 0.2 * n)
         for n in range(1, evaluations + 1)],
    )  # fmt: skip


@pytest.mark.parametrize("evaluations", [(1, 1), (1, 4), (4, 4)])
def test_runs_of_any_length_are_drawn(tmp_path: Path, evaluations: tuple[int, int]) -> None:
    # On a machine that is busy a run of the demo may come to one evaluation.
    runs = [
        run(arm, seed, count)
        for arm, count in zip((Arm("none"), Arm("before", 4)), evaluations, strict=True)
        for seed in range(2)
    ]
    path = tmp_path / "demo.png"
    write_picture(path, runs, 0.7, None, "a title")
    with Image.open(path) as picture:
        drawn = np.asarray(picture.convert("L"))
    assert drawn.min() < 100
    assert drawn.max() == 255
