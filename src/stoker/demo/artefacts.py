"""What a demonstration leaves behind: the raw rows as JSON, and a picture."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stoker
from stoker.demo.arms import Arm
from stoker.demo.calibrate import Calibration
from stoker.demo.experiment import Budget, RunRecord
from stoker.demo.images import ImageSet
from stoker.demo.needs import needed
from stoker.demo.report import Summary, to_target
from stoker.demo.settings import Settings
from stoker.machine import usable_cores

_PACKAGES = ("numpy", "torch", "pillow", "scikit-learn", "matplotlib")
_COLOURS = {
    "none": "#222222",
    "batch": "#d95f02",
    "after": "#1b9e77",
    "before": "#2166ac",
    "memory": "#999999",
}
_WIDTH = {1: 1.8, 2: 1.3, 4: 2.2, 8: 3.0}


def as_json(
    images: ImageSet,
    settings: Settings,
    storage: str,
    calibrations: Sequence[Calibration],
    budgets: dict[float, Budget],
    runs: Sequence[RunRecord],
    found: Sequence[Summary],
    target: float | None,
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
        "calibrations": [asdict(calibration) for calibration in calibrations],
        "budgets": [{"slowness": r, **asdict(budget)} for r, budget in budgets.items()],
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


def write_picture(
    path: Path,
    runs: Sequence[RunRecord],
    target: float,
    budgets: dict[float, Budget],
    title: str,
) -> None:
    """Draw accuracy against seconds: the median of each arm, and its range over the seeds."""
    figure_of = needed("matplotlib.figure").Figure
    slownesses = list(dict.fromkeys(run.arm.slowness for run in runs))
    figure = figure_of(figsize=(8.5 if len(slownesses) == 1 else 14, 5.2), layout="constrained")
    panels = figure.subplots(1, len(slownesses), squeeze=False)[0]
    for panel, slowness in zip(panels, slownesses, strict=True):
        chosen = [run for run in runs if run.arm.slowness == slowness]
        _draw(panel, chosen, target, budgets[slowness])
        if len(slownesses) > 1:
            panel.set_title(f"R = {slowness:g}", fontsize=11)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


def _draw(panel: Any, runs: Sequence[RunRecord], target: float, budget: Budget) -> None:
    np = needed("numpy")
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm and len(run.evaluations) > 1]
        if not of_arm:
            continue
        end_s = min(min(run.evaluations[-1].seconds for run in of_arm), budget.seconds)
        start_s = max(run.evaluations[0].seconds for run in of_arm)
        seconds = np.linspace(start_s, max(end_s, start_s), 200)
        curves = np.stack(
            [
                np.interp(
                    seconds,
                    [e.seconds for e in run.evaluations],
                    [100 * e.accuracy for e in run.evaluations],
                )
                for run in of_arm
            ]
        )
        colour = _COLOURS[arm.place]
        panel.plot(
            seconds,
            np.median(curves, axis=0),
            color=colour,
            linewidth=_WIDTH.get(arm.factor, 1.8),
            linestyle=_style(arm),
            label=_legend(arm, of_arm, target),
            zorder=3,
        )
        panel.fill_between(
            seconds, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.10, linewidth=0
        )
    panel.axhline(100 * target, color="#b2182b", linewidth=0.9, linestyle=(0, (1, 2)), zorder=2)
    panel.annotate(
        f"target {target:.1%}",
        (0.0, 100 * target),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=8,
        color="#b2182b",
    )
    panel.set_xlim(0, budget.seconds)
    panel.set_ylim(0, 101)
    panel.set_xlabel("seconds of training")
    panel.set_ylabel("test accuracy, %")
    panel.grid(color="#e6e6e6", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.legend(
        loc="lower right",
        fontsize=8.5,
        frameon=False,
        title="median time to the target",
        title_fontsize=8.5,
        alignment="left",
    )


def _style(arm: Arm) -> str:
    if arm.place == "memory":
        return "--"
    return "-." if arm.factor == 2 else "-"


def _legend(arm: Arm, runs: Sequence[RunRecord], target: float) -> str:
    hits = [to_target(run, target) for run in runs]
    reached = [hit.seconds for hit in hits if hit]
    if len(reached) * 2 <= len(hits):
        return f"{arm.label}: target missed"
    return f"{arm.label}: {statistics.median(reached):.1f} s"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
