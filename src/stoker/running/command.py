"""``stoker run``: measures a training script, and runs it with what the analysis advises."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stoker.cli import Argument, Script, report_errors

if TYPE_CHECKING:
    from stoker.analysis.model.report import Report

# Of the analysis before the run, in seconds: enough for all phases of a fast script.
_MEASURE_S = 60.0


def run(
    script: Script,
    *,
    apply: Annotated[
        Path | None,
        Argument(
            metavar="REPORT.json",
            help="Apply the report of `stoker analyze --json`, and add the outcome to it. "
            "Default: analyze the script first, for a minute.",
        ),
    ] = None,
    cache: Annotated[
        bool, Argument("Also keep examples in memory that are the same in every epoch.")
    ] = False,
    exact: Annotated[
        bool,
        Argument(
            "Change nothing where examples are drawn at random: other workers draw as another "
            "seed would."
        ),
    ] = False,
    print_diff: Annotated[
        bool,
        Argument(
            "Show what the report of --apply would have you write in the script; run nothing."
        ),
    ] = False,
) -> None:
    """Run an unedited training script with what its analysis advises.

    The script gets another number of workers, and workers that persist, with its own order and
    seeds: the same batches, bit for bit. Only what is drawn at random in them is drawn as with
    another seed; --exact refuses that. A line on stderr says for each loader what was applied, or
    why nothing was, and later how much faster it is. STOKER_RUN=0 in the environment turns all of
    it off. The exit status is the script's own.

    Put options of stoker before the script.

    Examples:

      stoker run train.py --epochs 90

      stoker run --apply report.json -m my.train --config base.yaml

      stoker run torchrun --nproc-per-node 2 train.py
    """
    from stoker.analysis.model.trace import AnalysisError
    from stoker.analysis.scripts.script_process import find_startup, make_command

    stopped = "stopped; no process of the script is left"
    with report_errors("run", ValueError, AnalysisError, stopped=stopped):
        command = make_command(script)
        if print_diff:
            from stoker.running.edits import show_edits

            if apply is None:
                raise ValueError(
                    "--print-diff shows what a report advises: stoker analyze --json report.json "
                    "train.py, then --apply report.json"
                )
            print(show_edits(_read(command, apply)), end="")
            return
        environment = dict(os.environ)
        if environment.get("STOKER_RUN") != "0":
            environment |= _prepare(command, apply, cache=cache, exact=exact)
            environment |= find_startup(environment)
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by who started it
            stream.flush()
        os.execvpe(command[0], command, environment)


def _prepare(command: list[str], path: Path | None, *, cache: bool, exact: bool) -> dict[str, str]:
    """Return the environment variables that have the script's loaders changed.

    None if the analysis has nothing to report on.
    """
    from stoker.analysis.model.trace import AnalysisError
    from stoker.running.plan import VARIABLE, make_plan, write_plan

    try:
        report = _measure(command, exact=exact) if path is None else _read(command, path)
    except AnalysisError as error:
        print(f"stoker run: it runs as it is: {error}", file=sys.stderr)
        return {}
    return {VARIABLE: write_plan(make_plan(report, cache=cache, exact=exact, path=path))}


def _read(command: list[str], path: Path) -> Report:
    """Read the script's report. Raises ValueError, OSError."""
    from stoker.analysis.model.report import read_report
    from stoker.analysis.scripts.script_process import find_script

    report = read_report(path)
    analyzed, asked = find_script(report.command), find_script(command)
    if analyzed and asked and analyzed != asked:
        raise ValueError(
            f"{path} is the report of {analyzed}, not of {asked}: analyze this script (stoker "
            "analyze --json), or leave out --apply"
        )
    return report


def _measure(command: list[str], *, exact: bool) -> Report:
    """Analyze the script, and tell the verdict.

    Raises AnalysisError if there is none, or if nothing could be changed: that is looked at first.
    """
    from rich.console import Console

    from stoker.analysis.reports.diagnosis import make_report
    from stoker.analysis.scripts.script_job import trace_script

    if int(os.environ.get("WORLD_SIZE") or "1") > 1:
        raise ValueError(
            "one rank cannot be measured alone: start the launcher under stoker run (stoker run "
            "torchrun ... train.py), or give --apply REPORT.json"
        )
    errors = Console(stderr=True, highlight=False)
    errors.print(
        "stoker run: measuring first, for about a minute; the script is then ended, "
        "and starts again. stoker analyze --json and --apply leave this out",
        markup=False,
    )
    refuse = partial(_refuse, exact=exact)
    trace = trace_script(command, errors, max_seconds=_MEASURE_S, refuse=refuse)
    report = make_report(trace)
    errors.print(f"stoker run: {report.verdict}", markup=False)
    return report


def _refuse(described: dict[str, Any], *, exact: bool) -> str:
    """Return why nothing of a loader can be changed, by its examples; empty if it can."""
    from stoker.analysis.probe.state import tell_moves

    if described["iterable"]:
        return "a stream: more workers would repeat its examples"
    if moves := described.get("moves"):
        return f"{tell_moves(moves)}, and other workers would change the data"
    if exact and described.get("varies"):
        return "examples are random, and would be drawn otherwise, which --exact refuses"
    return ""
