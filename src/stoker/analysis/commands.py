"""``stoker analyze`` and ``stoker what-if``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stoker.cli import Argument, Script, check_outputs, report_errors


def analyze(
    script: Script,
    *,
    max_seconds: Annotated[
        float, Argument("The most time that the analysis may take.", metavar="SECONDS", least=5.0)
    ] = 300.0,
    loader: Annotated[
        str | None,
        Argument(
            "The line that builds the loader to analyze, such as train.py:41. Default: the "
            "loader that the script trains on most."
        ),
    ] = None,
    details: Annotated[bool, Argument("Show all rates, actions and notes, too.")] = False,
    json: Annotated[
        Path | None, Argument("Write the report to this file as JSON, for what-if.")
    ] = None,
    html: Annotated[
        Path | None, Argument("Write the report to this file as a page for a browser.")
    ] = None,
) -> None:
    """Find out why the accelerator is idle in a training script, and what would help.

    Runs the unedited script in four phases: as it is; with the same batches again and again (G,
    the speed of training); its loader alone, with the data in memory (P, preparation); its files
    alone, from storage and from the page cache (S and C). The report says what limits the job, what
    to do first and what that gains; --details has the rates, and all actions with their gains.

    Put options of the analysis before the script. It needs no root and no edits. The exit status
    is 1 if the script crashed (the report then has the measurements up to the crash), or if
    nothing could be measured.

    Examples:

      stoker analyze train.py --epochs 90

      stoker analyze --html report.html -m my.train --config base.yaml

      stoker analyze --max-seconds 600 torchrun --nproc-per-node 2 train.py
    """
    from rich.console import Console

    from stoker.analysis.model.report import write_report
    from stoker.analysis.model.trace import AnalysisError
    from stoker.analysis.reports import terminal
    from stoker.analysis.reports.diagnosis import make_report
    from stoker.analysis.reports.page import write_page
    from stoker.analysis.scripts.script_job import trace_script
    from stoker.analysis.scripts.script_process import describe_crash, make_command

    errors = Console(stderr=True, highlight=False)
    stopped = "stopped; no process of the script is left"
    with report_errors("analyze", ValueError, AnalysisError, stopped=stopped):
        check_outputs(json, html)
        command = make_command(script)
        errors.print(terminal.describe_plan(command, max_seconds), markup=False)
        trace = trace_script(command, errors, max_seconds=max_seconds, loader=loader)
        report = make_report(trace)
        if json is not None:
            write_report(report, json)
        if html is not None:
            write_page(report, html)
    terminal.show_report(report, Console(highlight=False), details=details)
    if report.crash is not None:
        errors.print(f"stoker analyze: {describe_crash(report.crash)}", markup=False)
        raise SystemExit(1)


def what_if(
    report: Annotated[
        Path, Argument(metavar="REPORT.json", help="The report of `stoker analyze --json`.")
    ],
    *,
    cores: Annotated[
        int | None, Argument(metavar="N", help="Number of cores, with one worker on each.")
    ] = None,
    cache: Annotated[
        str | None,
        Argument(
            metavar="SIZE",
            help="Size of a cache that never evicts, such as 200GiB: of files, or of the prepared "
            "examples if the report advises that.",
        ),
    ] = None,
    storage_mbps: Annotated[
        float | None, Argument(metavar="MB/s", help="Storage bandwidth.")
    ] = None,
    accelerator: Annotated[
        str | None,
        Argument(metavar="TIMES", help="The accelerator's speed as a multiple: 2x, 0.5x."),
    ] = None,
    echo: Annotated[
        float,
        Argument(
            metavar="E",
            help="Echoing factor: mean uses of a fresh batch, or in a pipeline of an example "
            "before its first random stage.",
        ),
    ] = 1.0,
) -> None:
    """Predict how fast an analyzed job would run with other hardware or settings.

    Shows the speed, its limit and the split of the time, before and after the change; the size of
    the cache and the number of cores that would be enough; and the speed as a curve over each
    option. Several options apply together. Without options it shows the job as measured, and all
    curves.

    Example: stoker what-if report.json --cache 200GiB --cores 16
    """
    from stoker.analysis.model.changes import find_kept_cache
    from stoker.analysis.model.model import Change
    from stoker.analysis.model.report import read_report, to_measured
    from stoker.analysis.model.what_if import answer
    from stoker.analysis.reports import terminal
    from stoker.basics.resources import parse_bytes

    with report_errors("what-if", ValueError):
        found = read_report(report)
        change = Change(
            cores=cores,
            cache_bytes=None if cache is None else parse_bytes(cache),
            storage_mbps=storage_mbps,
            accelerator=1.0 if accelerator is None else _parse_multiple(accelerator),
            echo=echo,
        )
        terminal.show_answer(found, answer(to_measured(found), change, find_kept_cache(found)))


def _parse_multiple(text: str) -> float:
    """Read a multiple such as ``2x`` or ``2``. Raises ValueError."""
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise ValueError(f"accelerator={text}: must be a multiple such as 2x or 0.5x") from None
