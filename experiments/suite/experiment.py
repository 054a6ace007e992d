"""An experiment from start to end: estimate, then phase by phase what is not over yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.suite.jobs import Jobs, Task, jobs
from experiments.suite.plan import Plan, chosen_settings, name_of, timing_of, widened
from experiments.suite.rows import Rows, Run, arm_of

_SAYS = {
    "timing": "timing, by the exact clock",
    "tuning": "choosing learning rates",
    "training": "training",
}


def carry_out(plan: Plan, rows: Rows, task: Task, processes: int, console: Console) -> None:
    """Carry out what is missing of a plan; every run that ends is kept at once.

    Raises MissingData; KeyboardInterrupt leaves nothing running.
    """
    with jobs(processes, task) as running:
        _estimate(plan, rows, running.probe(), processes, console)
        _phase(plan.timing(), rows, running, console, {})
        candidates = dict.fromkeys(plan.arms, plan.candidates())
        for wider in range(plan.wider + 1):
            runs = plan.tuning(candidates)
            _phase(runs, rows, running, console, _on_record(plan, runs))
            chosen = chosen_settings(plan, rows, candidates)
            if wider < plan.wider:
                candidates = {arm: widened(candidates[arm], chosen[arm]) for arm in plan.arms}
        runs = plan.training(chosen)
        _phase(runs, rows, running, console, _on_record(plan, runs))


def _on_record(plan: Plan, runs: Iterable[Run]) -> dict[Run, Run]:
    return {run: timing_of(run, plan.ratios[0]) for run in runs}


def _phase(
    runs: Iterable[Run], rows: Rows, running: Jobs, console: Console, rests_on: dict[Run, Run]
) -> None:
    missing = [run for run in runs if rows.find(run) is None]
    if not missing:
        return
    known = [(run, rows.find(rests_on[run]) if run in rests_on else None) for run in missing]
    says = _SAYS[missing[0].kind]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(says, total=len(missing))
        done = 0

        def keep(run: Run, found: dict[str, Any]) -> None:
            nonlocal done
            rows.add(run, found)
            done += 1
            progress.advance(bar)
            if not console.is_terminal:
                console.print(f"{says}: {done} of {len(missing)}, {described(run, found)}")

        running.carry_out(known, keep)


def described(run: Run, found: dict[str, Any]) -> str:
    """Tell people of a run that is over."""
    arm = name_of(run.arm) + (f" at R = {run.arm.slowness:g}" if run.arm.slowness else "")
    if run.kind == "timing":
        steps, fresh, uses, seconds = found["points"][-1]
        return (
            f"{arm}, seed {run.seed}: {steps} steps in {seconds:.1f} s, factor {uses / fresh:.2f}, "
            f"waited {found['waited_fraction']:.0%}"
        )
    loss, metric = found["points"][-1][3:]
    settings = f"rate {run.learning_rate:g}, warm-up {run.warm_up:g}"
    return f"{arm}, seed {run.seed}, {settings}: loss {loss:.3f}, metric {metric:.3f}"


def _estimate(
    plan: Plan, rows: Rows, probe: dict[str, float], processes: int, console: Console
) -> None:
    """Say what is to be done and how long it takes."""
    # Any candidate will do: how many runs there are does not depend on it.
    chosen = dict.fromkeys(plan.arms, plan.candidates()[0])
    trained = {(arm_of(row), row["seed"]) for row in rows.of_kind("training")}
    seconds, missing, total = 0.0, 0, 0
    for run in [*plan.timing(), *plan.tuning(), *plan.training(chosen)]:
        total += 1
        is_trained = run.kind == "training" and (run.arm, run.seed) in trained
        if is_trained or rows.find(run) is not None:
            continue
        missing += 1
        seconds += plan.seconds(run, **probe)
    console.print(
        f"{plan.workload.title}. {len(plan.arms)} arms, {plan.seeds} seeds: {missing} of {total} "
        f"runs to be carried out, {processes} at a time, in about {seconds / processes / 60:.1f} "
        f"minutes. A training step takes {probe['step_s'] * 1e3:.1f} ms here, a test "
        f"{probe['test_s'] * 1e3:.0f} ms. Ctrl-C stops; runs that are over are kept."
    )
