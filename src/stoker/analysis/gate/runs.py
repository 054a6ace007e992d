"""Runs a script several times, with the probe of the analysis in it, and nothing changed."""

from __future__ import annotations

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
# Of training without a loader, as in the analysis (scripts/script_job.py).
_LOADERLESS_S = 30.0
# Looking reads the new rows only, but takes a processor from the script.
_LOOK_S = 0.5

Say = Callable[[str], None]


class Runner:
    """Runs a script, and with ``base`` its version in that folder as often.

    Errors: AnalysisError if a run crashes, or has too few batches; OSError, KeyboardInterrupt. No
    process of the script is left.
    """

    def __init__(
        self, command: Sequence[str], base: Path | None, runs: int, seconds: float, say: Say
    ) -> None:
        self._command, self._base, self._runs = command, base, runs
        self._seconds, self._say = seconds, say
        self._started = 0

    def run_rounds(self, conditions: Sequence[Condition]) -> list[RunRound]:
        """Run a round, and a second one if a condition is met.

        Each version runs once before, unmeasured: that run compiles, and reads the data into the
        page cache.
        """
        with make_folder() as folder:
            self._run_pair(folder, 0, "first run, not counted")
            rounds = [self._run_round(folder, "")]
            met = [condition for condition in conditions if looks_worse(condition, rounds[0])]
            if met:
                self._say(f"looks worse: {', '.join(c.text for c in met)}; running it again")
                rounds.append(self._run_round(folder, "again, "))
        return rounds

    def _run_round(self, folder: Path, again: str) -> RunRound:
        pairs = [
            self._run_pair(folder, number, f"{again}run {number + 1} of {self._runs}")
            for number in range(self._runs)
        ]
        return RunRound([own for own, _ in pairs], [base for _, base in pairs if base is not None])

    def _run_pair(
        self, folder: Path, number: int, called: str
    ) -> tuple[RunFigures, RunFigures | None]:
        """Run both versions.

        The second one of a pair is the first of the next, so that a drift of the machine's speed is
        the same for both.
        """
        if self._base is None:
            return self._run(folder, None, called), None
        if number % 2:
            other = self._run(folder, self._base, f"{called}, base")
            return self._run(folder, None, f"{called}, this version"), other
        own = self._run(folder, None, f"{called}, this version")
        return own, self._run(folder, self._base, f"{called}, base")

    def _run(self, folder: Path, cwd: Path | None, called: str) -> RunFigures:
        self._say(f"{called}: starting")
        self._started += 1
        figures = run_once(self._command, folder / str(self._started), self._seconds, cwd)
        self._say(
            f"{called}: stall {figures.stall:.1%}, {figures.rate:,.0f} examples/s, "
            f"99 % of the waits below {show_figure('wait_p99', figures.wait_p99)}"
        )
        return figures


def run_once(
    command: Sequence[str], folder: Path, seconds: float, cwd: Path | None = None
) -> RunFigures:
    """Run a script until it ends, or for so many seconds after its first call of a loader.

    ``folder`` is made for the probe. Raises as ``Runner`` does.
    """
    trace = Trace(list(command))
    deadline = time.monotonic() + _STARTUP_S + seconds
    session = Session(trace, folder, deadline, seconds, {"pipelines": True}, cwd)
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
                "the script trained without iterating a DataLoader of PyTorch, or a pipeline"
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
    if not ranks:
        return session.measure_loaderless_s() >= _LOADERLESS_S
    every = [session.read_rows(rank) for rank in ranks]
    return all(
        rows and (rows[-1].left_ns - rows[0].left_ns) / 1e9 >= seconds for rows in every
    ) and all(rank.about["on_this_host"] <= len(ranks) for rank in ranks)


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
