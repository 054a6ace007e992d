"""Runs a script several times, with the probe of the analysis in it, and nothing changed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.analysis.gate.judging import RunRound, looks_worse, show_figure
from stoker.analysis.gate.metrics import Condition, RunFigures, measure_run
from stoker.analysis.model.trace import AnalysisError, RankTrace, Trace
from stoker.analysis.phases import Stopped
from stoker.analysis.scripts.script_process import describe_crash
from stoker.analysis.scripts.script_run import Session, choose_slot, make_folder
from stoker.basics.signals import defer_interrupts

# For imports, models and data to load, until the first batch. Chosen, not measured.
_STARTUP_S = 600.0
# Looking reads the new rows only, but takes a processor from the script.
_LOOK_S = 0.5

Say = Callable[[str], None]


def run_rounds(
    command: Sequence[str],
    base: Path | None,
    runs: int,
    seconds: float,
    conditions: Sequence[Condition],
    say: Say,
) -> list[RunRound]:
    """Run a script so often, and with ``base`` its version in that folder as often.

    If a condition is met, there is a second round. Each version runs once before, unmeasured: that
    run compiles, and reads the data into the page cache.

    Errors: AnalysisError if a run crashes, or has too few batches; OSError, KeyboardInterrupt. No
    process of the script is left.
    """
    started = itertools.count()

    def run(folder: Path, cwd: Path | None, called: str) -> RunFigures:
        say(f"{called}: starting")
        figures = run_once(command, folder / str(next(started)), seconds, cwd)
        say(
            f"{called}: stall {figures.stall:.1%}, {figures.rate:,.0f} examples/s, "
            f"99 % of the waits below {show_figure('wait_p99', figures.wait_p99)}"
        )
        return figures

    def run_pair(folder: Path, number: int, called: str) -> list[RunFigures]:
        # The second one of a pair is the first of the next, so that a drift of the machine's speed
        # is the same for both.
        if base is None:
            return [run(folder, None, called)]
        order = [(None, f"{called}, this version"), (base, f"{called}, base")]
        pair = [run(folder, *each) for each in (order[::-1] if number % 2 else order)]
        return pair[::-1] if number % 2 else pair

    def run_round(folder: Path, again: str) -> RunRound:
        pairs = [
            run_pair(folder, number, f"{again}run {number + 1} of {runs}") for number in range(runs)
        ]
        return RunRound(
            [own for own, *_ in pairs], [other for _, *found in pairs for other in found]
        )

    with make_folder() as folder:
        run_pair(folder, 0, "first run, not counted")
        rounds = [run_round(folder, "")]
        if met := [condition for condition in conditions if looks_worse(condition, rounds[0])]:
            say(f"looks worse: {', '.join(c.text for c in met)}; running it again")
            rounds.append(run_round(folder, "again, "))
    return rounds


def run_once(
    command: Sequence[str], folder: Path, seconds: float, cwd: Path | None = None
) -> RunFigures:
    """Run a script until it ends, or for so many seconds after its first call of a loader.

    ``folder`` is made for the probe. Raises as ``run_rounds`` does.
    """
    trace = Trace(list(command))
    deadline = time.monotonic() + _STARTUP_S + seconds
    session = Session(trace, folder, deadline, seconds, {}, cwd)
    try:
        try:
            session.wait_until(lambda: _has_lasted(session, seconds), "as-it-is", _LOOK_S)
        except Stopped:
            if trace.crash is not None:
                raise AnalysisError(describe_crash(trace.crash)) from None
            if not session.has_ended_by_itself:
                raise AnalysisError(_explain(session, trace)) from None
        ranks = _find_trainers(session)
        if not ranks:
            raise AnalysisError(
                "the script ended without iterating a DataLoader of PyTorch, or a pipeline"
            )
        session.site = ranks[0].loader(ranks[0].slot)["site"]
        session.finish()
    finally:
        with defer_interrupts():
            session.close()
    try:
        return measure_run(ranks)
    except ValueError as error:
        raise AnalysisError(str(error)) from None


def _has_lasted(session: Session, seconds: float) -> bool:
    ranks = session.ranks
    every = [session.read_rows(rank) for rank in ranks]
    return (
        bool(ranks)
        and all(rows and (rows[-1].left_ns - rows[0].left_ns) / 1e9 >= seconds for rows in every)
        and all(rank.about["on_this_host"] <= len(ranks) for rank in ranks)
    )


def _find_trainers(session: Session) -> list[RankTrace]:
    """Return the ranks that train, with their rows so far; all ranks, if none has gradients on."""
    found = []
    for rank in session.ranks:
        rank.rows = list(session.read_rows(rank))
        slot = choose_slot(rank, rank.rows)
        if slot is not None:
            rank.slot = slot
            found.append(rank)
    training = [rank for rank in found if any(row.trains for row in rank.rows)]
    return training or found


def _explain(session: Session, trace: Trace) -> str:
    if trace.out_of_time:
        batches = max((len(session.read_rows(rank)) for rank in session.ranks), default=0)
        if batches:
            return f"the script hangs: no batch came within minutes after {batches:,} of them"
        return f"no batch came within {_STARTUP_S:.0f} s of the start"
    return next(iter(trace.reasons.values()), "the script could not be measured")
