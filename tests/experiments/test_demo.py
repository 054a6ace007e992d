"""The demonstration and the trainings for equal time, shrunken: for errors, not for figures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from experiments.arms import Arm, full_arms
from experiments.demo import plan_of, run_settings
from experiments.digits import DigitSpec
from experiments.equal_time.__main__ import app as equal_time
from experiments.images import composed_digits
from experiments.runs import run_arm
from experiments.screen import Screen
from experiments.settings import Settings
from experiments.storage import Source, in_memory, storage_of
from experiments.workloads import one_thread

TINY = Settings(
    digits=DigitSpec(train=400, test=40),
    seeds=1,
    learning_rate=0.003,
    batch_size=8,
    widths=(4, 4, 8),
    pool_batches=4,
    largest_pool_fraction=0.2,
    readers=4,
    remote_latency_s=0.001,
    remote_requests=8,
    target_accuracy=0.05,
    budget_fresh=160,
    longest_s=3.0,
    grid=((1 << 40, 40),),
    scene=((1.0, 0.2), (3.4, 0.3), (1.0, 0.2)),
    scene_window_batches=4,
    scene_step_samples=6,
    image_px=16,
    step_samples=9,
    drain_batches=6,
)
DEFAULT = [Arm("none"), Arm("before", "auto"), Arm("memory")]


def demo(folder: Path, arms: list[Arm], terminal: bool = False, **options: Any) -> dict[str, Any]:
    """Run the demo, and return its rows, which fit together."""
    text = io.StringIO()
    screen = Screen(Console(file=text, force_terminal=terminal, width=130))
    run_settings(TINY, folder / "out", full=True, arms=arms, screen=screen, **options)
    found: dict[str, Any] = json.loads((folder / "out" / "demo.json").read_text())
    assert found["complete"]
    assert [s["arm"] for s in found["summaries"]] == [arm.key for arm in arms]
    assert len(found["runs"]) == len(plan_of(arms, TINY))
    for row in found["runs"]:
        for e in row["evaluations"]:
            assert 0 <= e["accuracy"] <= 1
            assert e["waited_s"] <= e["seconds"]
            assert e["uses"] == e["steps"] * TINY.batch_size
    Image.open(folder / "out" / "demo.png").verify()
    output = text.getvalue()
    assert output.index("measured") < output.index("Scene") < output.rindex("speed-up")
    return found


def emulated(folder: Path) -> None:
    demo(folder, full_arms(), data=None)


def on_a_terminal(folder: Path) -> None:
    demo(folder, DEFAULT, terminal=True, data=None)


def from_a_server(folder: Path) -> None:
    found = demo(folder, DEFAULT, data=None, remote=True)
    assert found["storage"] == "a local HTTP server"


def of_a_users_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for label in range(2):
        (folder / "data" / f"class{label}").mkdir(parents=True)
        for number in range(90):
            pixels = rng.integers(0, 120, (20, 24, 3), dtype=np.uint8) + 100 * label
            Image.fromarray(pixels).save(folder / "data" / f"class{label}" / f"{number}.jpg")
    found = demo(folder, DEFAULT, data=folder / "data")
    assert found["images"]["classes"] == ["class0", "class1"]


def for_equal_time(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    words = ["run", "--quick", "--device", "cpu", "--processes", "1", "--out", str(rows)]
    result = CliRunner().invoke(equal_time, [*words, "--only", "digits"])
    assert result.exit_code == 0, result.output
    assert "failed" not in result.output
    assert len(rows.read_text().splitlines()) > 3


@pytest.mark.full
@pytest.mark.parametrize(
    "quick",
    [emulated, on_a_terminal, from_a_server, of_a_users_images, for_equal_time],
    ids=lambda quick: quick.__name__,
)
def test_a_quick_run_finds_no_errors(tmp_path: Path, quick: Callable[[Path], None]) -> None:
    quick(tmp_path)


@pytest.mark.full
def test_runs_of_one_seed_see_the_same_data_in_the_same_order(tmp_path: Path) -> None:
    """Without echoing, emulated storage, a server and memory train alike, step by step."""
    images = composed_digits(TINY.digits, tmp_path, lambda done, total: None)
    accuracies = []

    def train(place: str, source: Source) -> None:
        record = run_arm(Arm(place), 0, images, source, TINY, lambda e: e.fresh >= 320)
        accuracies.append({e.grid: e.accuracy for e in record.evaluations})

    with one_thread():
        train("memory", in_memory(images, TINY))
        for remote in (False, True):
            with (
                storage_of(images, TINY, remote=remote) as storage,
                storage.opened(storage.limits(0.01)) as source,
            ):
                train("none", source)
    assert len(accuracies[0]) == 8
    assert accuracies[1] == accuracies[0]
    assert accuracies[2] == accuracies[0]
