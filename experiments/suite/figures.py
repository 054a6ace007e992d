"""The comparison as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.arms import Arm
from experiments.method import Interval, Ratios
from experiments.pictures import COLOURS
from experiments.suite.summary import ArmSummary, Comparison

_WIDTH: dict[int | str, float] = {1: 2.2, 2: 1.2}


def write_figure(path: Path, found: Comparison, title: str) -> None:
    """Draw test loss over fresh examples, rho, and the speed-up at each R. The same rows give the
    same file."""
    figure = Figure(figsize=(11.5, 0.6 + 0.33 * max(9, len(found.arms))), layout="constrained")
    curves, *dots = figure.subplots(
        1, 2 + len(found.ratios), width_ratios=[4, *[2] * (1 + len(found.ratios))]
    )
    _draw_curves(curves, found)
    _draw_ratios(dots[0], found, [each.fresh_ratios for each in found.arms], "rho", named=True)
    for panel, ratio in zip(dots[1:], found.ratios, strict=True):
        values = [
            None
            if ratio in each.speedups and found.is_void(each, ratio)
            else each.speedups.get(ratio)
            for each in found.arms
        ]
        _draw_ratios(panel, found, values, f"speed-up, R = {ratio:g}", named=False)
    for panel in (curves, *dots):
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stoker"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _draw_curves(panel: Any, found: Comparison) -> None:
    for each in found.arms:
        fresh, losses = each.curve
        panel.plot(
            fresh,
            losses,
            color=_colour(each.arm),
            linewidth=_WIDTH.get(each.arm.factor, 1.8),
            linestyle="-" if each.arm.factor != 2 else "-.",
        )
    panel.axhline(found.target, color="#b2182b", linewidth=0.9, linestyle=(0, (1, 2)))
    lowest = min(min(each.curve[1]) for each in found.arms)
    panel.set_ylim(
        lowest - 0.1 * (found.target - lowest), found.target + 2 * (found.target - lowest)
    )
    panel.set_xlabel("fresh examples")
    panel.set_ylabel("test loss")


def _draw_ratios(
    panel: Any, found: Comparison, values: list[Ratios | None], title: str, *, named: bool
) -> None:
    places = range(len(found.arms), 0, -1)
    for place, each, ratios in zip(places, found.arms, values, strict=True):
        if ratios is None or not ratios.values:
            continue
        around = Interval.of(ratios.values)
        colour = _colour(each.arm)
        panel.plot([around.low, around.high], [place, place], color=colour, linewidth=2)
        panel.plot([ratios.median or 0.0], [place], "o", color=colour, markersize=4.5)
    panel.axvline(1.0, color="#888888", linewidth=0.9)
    panel.set_yticks(
        list(places), [_name(each) if named else "" for each in found.arms], fontsize=8
    )
    panel.set_ylim(0.3, len(found.arms) + 0.7)
    panel.set_xlim(left=0)
    panel.set_title(title, fontsize=10)


def _name(each: ArmSummary) -> str:
    if not each.arm.follows:
        return each.arm.label
    return f"{each.arm.label}, R = {each.arm.slowness:g}"


def _colour(arm: Arm) -> str:
    if arm.transform:
        return COLOURS["transform"]
    return COLOURS["auto" if arm.follows and arm.place == "before" else arm.place]
