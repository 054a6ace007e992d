"""``stoker gate``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from stoker.cli import Argument, Script, check_outputs, report_errors

_EXITS = {"not worse": 0, "worse": 3, "undecided": 4}


def gate(
    script: Script,
    *,
    fail_if: Annotated[
        list[str],
        Argument(
            metavar="CONDITION",
            help="When the job counts as worse: stall>10%, rate<200, wait_p99>50ms, startup>20s; "
            "with --base also rate<0.95*base, stall>base+5%. May be given several times.",
        ),
    ],
    runs: Annotated[int, Argument(least=5, help="How often each version runs.")] = 5,
    base: Annotated[
        Path | None,
        Argument(
            metavar="FOLDER",
            help="A checkout of the version to compare with. The same command is started there, in "
            "turns with the one here.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        Argument(
            "A run is ended so long after its first batch, if it does not end before.",
            metavar="SECONDS",
            least=0.1,
        ),
    ] = 30.0,
    json: Annotated[Path | None, Argument("Write runs and judgements to this file.")] = None,
) -> None:
    """Fail if a training script waits for its data more than it should, in CI for example.

    Runs the unedited script several times, and judges the runs together: a condition is met, or
    not, or the runs differ too much to say. Metrics: stall is the share of the training loop's time
    spent waiting for batches; wait_p50, wait_p95 and wait_p99 are percentiles of the waits; startup
    is the time to the first batch; rate is examples/s.

    Exit status: 0 not worse, 3 worse, 4 undecided (more --runs decide), 1 if a run crashed or could
    not be measured. If a condition is met, all runs are made once more, and the job is worse if the
    new runs meet it too: so a disturbance is hardly ever taken for a change.

    Put options of the gate before the script.

    Examples:

      stoker gate --fail-if 'stall>10%' -- train.py --epochs 1

      git worktree add ../base origin/main

      stoker gate --base ../base --fail-if 'rate<0.95*base' -- train.py
    """
    from rich.console import Console

    from stoker.analysis.gate.judging import GateRecord, combine, judge, write_record, write_text
    from stoker.analysis.gate.metrics import parse_condition
    from stoker.analysis.gate.runs import run_rounds
    from stoker.analysis.host_load import watch_host
    from stoker.analysis.model.report import HostLoad
    from stoker.analysis.model.trace import AnalysisError
    from stoker.analysis.scripts.script_process import make_command
    from stoker.version import __version__

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    stopped = "stopped; no process of the script is left"
    with report_errors("gate", ValueError, AnalysisError, stopped=stopped):
        conditions = [parse_condition(text) for text in fail_if]
        _check_base(base, script, [c.text for c in conditions if c.needs_base])
        check_outputs(json)
        command = make_command(script)
        if json is not None and json.is_file() and not json.is_symlink():  # such as /dev/stdout
            json.unlink()  # a crash must not leave an earlier outcome
        host: list[HostLoad] = []
        say = partial(errors.print, markup=False)
        with watch_host(host):
            rounds = run_rounds(command, base, runs, seconds, conditions, say)
        judgements = [judge(condition, rounds) for condition in conditions]
        record = GateRecord(
            stoker=__version__,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            command=script,
            runs=[run for found in rounds for run in found.own],
            base=[run for found in rounds for run in found.base],
            judgements=judgements,
            verdict=combine([judgement.verdict for judgement in judgements]),
            host=host[0] if host else None,
        )
        if json is not None:
            write_record(record, json)
        Console(highlight=False, soft_wrap=True).print(write_text(record), markup=False)
    raise SystemExit(_EXITS[record.verdict])


def _check_base(base: Path | None, script: list[str], comparing: list[str]) -> None:
    """Raise ValueError if conditions and arguments do not fit the other version."""
    if base is None:
        if comparing:
            raise ValueError(f"{comparing[0]!r} compares with another version: give --base FOLDER")
        return
    if not base.is_dir():
        raise ValueError(f"--base {base}: there is no such folder")
    if base.resolve() == Path.cwd():
        raise ValueError(f"--base {base} is the current folder: give one with the other version")
    if not comparing:
        raise ValueError(
            "no condition compares with --base: for example --fail-if 'rate<0.95*base'"
        )
    first = Path(script[0])
    if first.is_absolute():
        raise ValueError(
            f"with --base, the script is started in both folders: give {first} relative to them"
        )
    if first.exists() and not (base / first).exists():
        raise ValueError(f"--base {base}: there is no {first} in it")
