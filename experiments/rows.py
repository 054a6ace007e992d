"""What a demonstration leaves behind: the raw rows, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stoker
from experiments.calibration import Calibration
from experiments.images import ImageSet
from experiments.report import Summary, measured_ratios
from experiments.result_files import this_machine, write_whole
from experiments.runs import RunRecord
from experiments.scene import Scene
from experiments.settings import Settings


def as_json(
    images: ImageSet,
    settings: Settings,
    storage: str,
    calibrations: Sequence[Calibration],
    budget_fresh: int,
    runs: Sequence[RunRecord],
    found: Sequence[Summary],
    target: float | None,
    scene: Scene | None,
    conclusion: str,
    complete: bool,
) -> dict[str, Any]:
    """Gather everything for `demo.json`. Times end in `_s` or `seconds`; accuracies are shares."""
    return {
        "stoker": stoker.__version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": complete,
        "conclusion": conclusion,
        "target_accuracy": target,
        "images": {
            "name": images.name,
            "classes": list(images.classes),
            "train": len(images.train_paths),
            "test": len(images.test_images),
            "train_bytes": images.train_bytes,
        },
        "settings": asdict(settings),
        "storage": storage,
        "measured_ratios": [
            {"wanted_ratio": slowness, "ratio": ratio}
            for slowness, ratio in measured_ratios(found).items()
        ],
        "calibrations": [asdict(calibration) for calibration in calibrations],
        "budget_fresh": budget_fresh,
        "machine": this_machine(),
        "summaries": [
            {**asdict(s), "arm": s.arm.key, "label": s.arm.label, "speedup": s.speedup}
            for s in found
        ],
        "runs": [
            {
                "arm": run.arm.key,
                **asdict(run.arm),
                "seed": run.seed,
                "evaluations": [asdict(e) for e in run.evaluations],
            }
            for run in runs
        ],
        "scene": scene and {"conclusion": scene.conclusion, **asdict(scene)},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n")
