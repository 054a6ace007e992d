"""What a demonstration leaves behind: a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.arms import Arm
from experiments.report import measured_ratios, summaries, to_target
from experiments.runs import RunRecord
from experiments.scene import Scene

COLOURS = {
    "none": "#222222",
    "batch": "#d95f02",
    "after": "#1b9e77",
    "before": "#2166ac",
    "auto": "#762a83",
    "loader": "#e6ab02",
    "transform": "#a6761d",
    "memory": "#999999",
}
_WIDTH: dict[int | str, float] = {1: 1.8, 2: 1.3, 4: 2.2, 8: 3.0, "auto": 2.2}


def write_picture(
    path: Path,
    runs: Sequence[RunRecord],
    target: float,
    scene: Scene | None,
    title: str,
) -> None:
    """Draw accuracy against seconds: the median of each arm, and its range over the seeds.

    An arm ends at the median of where its runs did; a run that ended before stays what it was.

    Beside it the scene, if there was one: the factor against seconds.
    """
    ratios = measured_ratios(summaries(runs, target))
    slownesses = list(dict.fromkeys(run.arm.slowness for run in runs))
    widths_in = [8.5 if len(slownesses) == 1 else 7.0] * len(slownesses) + [5.5] * bool(scene)
    figure = Figure(figsize=(sum(widths_in), 5.2), layout="constrained")
    panels = figure.subplots(1, len(widths_in), squeeze=False, width_ratios=widths_in)[0]
    for panel, slowness in zip(panels, slownesses, strict=False):
        chosen = [run for run in runs if run.arm.slowness == slowness]
        _draw_runs(panel, chosen, target)
        more = f", R = {ratios[slowness]:.1f}" if slowness in ratios else ""
        panel.set_title(f"accuracy over time{more}", fontsize=11)
    if scene is not None:
        _draw_scene(panels[-1], scene)
        panels[-1].set_title("the storage slows down and recovers", fontsize=11)
    for panel in panels:
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


def _draw_scene(panel: Any, scene: Scene) -> None:
    seconds = [row.seconds for row in scene.rows]
    panel.plot(
        seconds,
        [row.factor for row in scene.rows],
        color=COLOURS["auto"],
        linewidth=2.2,
        label=f'factor of echo("auto"), over {scene.window_batches} batches',
    )
    panel.step(
        *_ratios_over_time(scene),
        where="post",
        color="#222222",
        linewidth=1.2,
        linestyle="--",
        label="R that was set",
    )
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("seconds of training")
    panel.set_ylabel("uses of each fresh example")
    panel.legend(loc="lower center", fontsize=8.5, frameon=False)


def _ratios_over_time(scene: Scene) -> tuple[list[float], list[float]]:
    """Return when R was set, in seconds, and what it was from there on; the end once more."""
    starts_s = list(accumulate((s.seconds for s in scene.stretches), initial=0.0))
    ratios = [s.calibration.ratio for s in scene.stretches]
    return starts_s, [*ratios, *ratios[-1:]]


def _draw_runs(panel: Any, runs: Sequence[RunRecord], target: float) -> None:
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        end_s = statistics.median(run.evaluations[-1].seconds for run in of_arm)
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
        colour = COLOURS["auto" if arm.follows else arm.place]
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
    panel.set_xlim(left=0)
    panel.set_ylim(0, 101)
    panel.set_xlabel("seconds of training")
    panel.set_ylabel("test accuracy, %")
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
