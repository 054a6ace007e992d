"""Compares two reports of the same kind: of `stoker analyze --json`, or of `stoker gate --json`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.analysis.gate.conditions import FALLS, METRICS
from stoker.analysis.gate.intervals import estimate_interval
from stoker.analysis.gate.record import GATE_SCHEMA, read_record
from stoker.analysis.gate.summaries import show_figure
from stoker.analysis.model.report import SCHEMA, Rate, read_json, read_report
from stoker.basics.resources import format_rounded

_SHARES = "compute", "prep_stall", "fetch_stall"
_FALLS = FALLS | {"compute", "speed", "G", "P", "S", "C"}


class _Head(msgspec.Struct):
    """The fields that all reports have."""

    schema: str = ""
    command: list[str] = []


@dataclass(frozen=True)
class Compared:
    """One figure of two reports, each with its 95 % interval."""

    name: str
    before: Rate
    after: Rate
    show: Callable[[float], str]

    @property
    def verdict(self) -> str:
        """The direction of the change, if the two intervals do not meet."""
        if self.before.low <= self.after.high and self.after.low <= self.before.high:
            return "cannot be told apart"
        more = self.after.value > self.before.value
        return "better" if more == (self.name in _FALLS) else "worse"


def compare_files(before: Path, after: Path) -> list[Compared]:
    """Return the figures that both reports have.

    Raises OSError, or ValueError if one is no report, or they are of different kinds.
    """
    schemas = [_read_schema(path) for path in (before, after)]
    if schemas[0] != schemas[1]:
        raise ValueError(
            f"{before} has the schema {schemas[0]!r} and {after} {schemas[1]!r}: compare two "
            "reports of the same kind"
        )
    read = _read_gate if schemas[0] == GATE_SCHEMA else _read_analysis
    old, new = read(before), read(after)
    return [
        Compared(name, figure, new[name][0], show)
        for name, (figure, show) in old.items()
        if name in new
    ]


def describe_commands(before: Path, after: Path) -> str | None:
    """Return a remark if two reports are of different commands."""
    old, new = (shlex.join(read_json(each, _Head, "a report").command) for each in (before, after))
    return None if old == new else f"Not of the same command: {old}; {new}"


def _read_schema(path: Path) -> str:
    schema = read_json(path, _Head, "a report").schema
    if schema not in (SCHEMA, GATE_SCHEMA):
        raise ValueError(
            f"{path} has the schema {schema!r}; this version of stoker compares {SCHEMA!r} "
            f"(stoker analyze --json) and {GATE_SCHEMA!r} (stoker gate --json)"
        )
    return schema


_Figures = dict[str, tuple[Rate, Callable[[float], str]]]


def _read_gate(path: Path) -> _Figures:
    runs = read_record(path).runs
    if len(runs) < 2:
        raise ValueError(f"{path} has fewer than two runs")

    def shower(metric: str) -> Callable[[float], str]:
        return lambda value: show_figure(metric, value)

    return {
        metric: (estimate_interval([getattr(run, metric) for run in runs]), shower(metric))
        for metric in METRICS
    }


def _read_analysis(path: Path) -> _Figures:
    report = read_report(path)
    found: _Figures = {}
    if report.as_it_is is not None:
        found["speed"] = report.as_it_is.rate, _show_speed
    for name in _SHARES:
        if report.split_intervals is not None:
            share: float = getattr(report.split, name)
            ends = getattr(report.split_intervals, name)
            found[name] = Rate(share, ends.low, ends.high), _show_share
    for name in "GPSC":
        rate = getattr(report.rates, name)
        if rate is not None:
            found[name] = rate, _show_speed
    return found


def _show_speed(value: float) -> str:
    return f"{format_rounded(value, 4)}/s"


def _show_share(value: float) -> str:
    return f"{value:.1%}"
