"""What `stoker run` applies: read from a report, and handed to the script's processes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from stoker.analysis.model.changes import predict_kept_gain
from stoker.analysis.model.report import LoaderOptions, Report

VARIABLE = "STOKER_RUN_PLAN"
"""The environment variable with the plan."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a script's loaders, and their predicted gain."""

    run: str = ""
    """A name of the run: its ranks share the examples that they keep."""
    loader: str
    """The loader that was analyzed: file and line."""
    workers: int | None = None
    persistent: bool = False
    gain: float = 1.0
    """Predicted speed over the speed as it is, for the workers."""
    kept_gain: float | None = None
    """The predicted gain of a cache, with the script's own workers; None: unknown."""
    examples_per_s: float | None = None
    """The speed as it is, of one rank."""
    batch_size: float
    """Examples a batch, as the analysis counted them."""
    cores: int
    """The share of one trainer when the job was analyzed."""
    trainers: int
    """Processes that trained on the host then."""
    cache: bool = False
    """True if examples that are the same in every epoch are to be kept."""
    changes: list[str] = []
    """What the script was seen to change of the dataset between epochs, by name."""
    exact: bool = False
    """True if examples that are drawn at random may not be drawn otherwise."""
    report: str = ""
    """The report's file; empty if there is none."""

    def predict(self, *, cached: bool) -> float | None:
        """Return the gain that is predicted for the analyzed loader; None if it is unknown."""
        if cached:
            return self.kept_gain
        return None if self.workers is None else self.gain


def merge_options(report: Report) -> LoaderOptions:
    """Return the options that a report's actions set.

    Raises ValueError for a report of a pipeline, whose code is the user's to edit.
    """
    if report.stages:
        raise ValueError(
            "this is the report of a pipeline; stoker run changes the DataLoaders of a script"
        )
    advised = [action.options for action in report.actions if action.options is not None]
    counts = [options.num_workers for options in advised if options.num_workers]
    return LoaderOptions(
        counts[-1] if counts else None, any(options.persistent_workers for options in advised)
    )


def make_plan(
    report: Report, *, cache: bool = False, exact: bool = False, path: Path | None = None
) -> RunPlan:
    """Return what a report advises, and a cache if one is asked for.

    Raises ValueError as ``merge_options`` does.
    """
    options = merge_options(report)
    gains = [
        action.gain.value
        for action in report.actions
        if action.options is not None and action.options.num_workers
    ]
    seen = report.as_it_is
    return RunPlan(
        run=secrets.token_hex(8),
        loader=report.loader.name,
        workers=options.num_workers,
        persistent=options.persistent_workers,
        gain=max([1.0, *gains]) if options.num_workers else 1.0,
        kept_gain=predict_kept_gain(report),
        examples_per_s=None if seen is None else seen.rate.value,
        batch_size=report.loader.batch_size,
        cores=report.cores,
        trainers=max(1, len(report.ranks)),
        cache=cache,
        changes=report.loader.changes or [],
        exact=exact,
        report="" if path is None else str(path.absolute()),
    )


def read_plan() -> RunPlan:
    """Return the plan that this process was started with. Raises KeyError."""
    return msgspec.json.decode(os.environ[VARIABLE], type=RunPlan)


def write_plan(plan: RunPlan) -> str:
    """Return a plan as the text of the environment variable."""
    return msgspec.json.encode(plan).decode()
