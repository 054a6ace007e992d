"""What a demonstration leaves behind: the raw rows, as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stoker
from experiments.calibration import Calibration
from experiments.images import ImageSet
from experiments.report import Summary, measured_ratios
from experiments.runs import RunRecord
from experiments.scene import Scene
from experiments.settings import Settings
from stoker.machine import usable_cores

_PACKAGES = ("numpy", "torch", "pillow", "scikit-learn", "matplotlib")


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
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "architecture": platform.machine(),
            "usable_cores": usable_cores(),
            "versions": {name: _version(name) for name in _PACKAGES},
        },
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
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
