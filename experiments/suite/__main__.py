"""The command `experiments/run`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import stoker
from experiments.arms import REPEATS
from experiments.suite import evidence, threads
from experiments.suite.data import VARIABLE, MissingData, data_folder
from experiments.suite.experiment import carry_out
from experiments.suite.jobs import Task
from experiments.suite.plan import FACTORS, RATIOS, Plan
from experiments.suite.rows import RESULTS, Rows
from experiments.suite.tables import terminal_tables
from experiments.suite.workload import Variant
from experiments.suite.workloads import NAMES, class_of

_PLAIN_WIDTH = 160
_RATIOS = ",".join(f"{ratio:g}" for ratio in RATIOS)
_FACTORS = ",".join(map(str, FACTORS))
_WITHOUT = {"batchnorm": "batch_norm", "momentum": "momentum", "augmentation": "augmentation"}


def run(
    name: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help='What to run; "list" names the workloads, "evidence" writes tables and figures, '
            '"clock" holds the exact clock against real threads.',
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm, paired by seed.")] = 5,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A few steps on made-up data, to find errors: no figures, nothing is kept.",
        ),
    ] = False,
    arms: Annotated[
        str,
        typer.Option(help="Patterns of arms, e.g. 'before-*,batch-4'. No echo is always there."),
    ] = "*",
    factors: Annotated[str, typer.Option(help="Fixed echoing factors.")] = _FACTORS,
    ratios: Annotated[
        str, typer.Option(help="R, as many times as a batch takes a step to be read.")
    ] = _RATIOS,
    transforms: Annotated[
        str,
        typer.Option(
            help="Of an echoed loader's batches; by default the workload's first. "
            f"'{REPEATS}NAME': of all uses but the first."
        ),
    ] = "",
    without: Annotated[
        str, typer.Option(help=f"What to leave out: {', '.join(_WITHOUT)}, or several.")
    ] = "",
    small: Annotated[
        bool, typer.Option("--small", help="On 1,000 examples, in 16 epochs.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Instead of the workload's own.")
    ] = None,
    pool: Annotated[
        int | None, typer.Option(min=2, help="Batches in the echo's pool, instead of 16.")
    ] = None,
    fresh_batches: Annotated[
        int | None, typer.Option(min=40, help="Length of a training, instead of the workload's.")
    ] = None,
    by_steps: Annotated[
        bool,
        typer.Option(
            "--by-steps", help="Schedule learning rates by steps, as if no batch were repeated."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help=f"Folder of data sets; by default ${VARIABLE} or ../shared/data."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on one core.")] = 2,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat the kept runs of the arms that are named.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of rows, instead of experiments/results.")
    ] = None,
) -> None:
    """Measure what echoing brings to a workload: fresh examples, steps and time to a target.

    Times come from an exact clock; trainings repeat what it decided. Every arm has the learning
    rate that is best for it. Ctrl-C stops at any time: runs that are over are kept, and the same
    command goes on.

    Example: experiments/run fashion --arms 'before-*' --seeds 8
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH, highlight=False)
    try:
        if name == "list":
            for each in NAMES:
                console.print(f"{each:12} {class_of(each).title}", markup=False)
            return
        if name == "evidence":
            for path in evidence.write():
                console.print(f"wrote {path}")
            return
        if name == "clock":
            made = class_of("fashion")(Variant(), data_folder(data))
            console.print(f"wrote {threads.write(made)}")
            return
        if name not in NAMES:
            raise ValueError(f"there is no workload {name}; there are {', '.join(NAMES)}")
        workload = class_of(name)
        variant = _variant(without, small, batch_size, pool, fresh_batches, by_steps)
        if not variant.batch_norm and not workload.has_batch_norm:
            raise ValueError(f"{name} has no BatchNorm to leave out")
        folder = None if quick else data_folder(data)
        if folder is None and not quick:
            raise MissingData(
                f"a full run of {name} needs data: name its folder with --data or ${VARIABLE}, or "
                "try --quick, which makes some up"
            )
        recipe = workload.recipe_of(variant, quick)
        plan = Plan.of(
            workload,
            recipe,
            patterns=arms.split(","),
            factors=[int(factor) for factor in factors.split(",")],
            ratios=[float(ratio) for ratio in ratios.split(",")][-1 if quick else 0 :],
            transforms=transforms.split(",") if transforms else None,
            seeds=min(seeds, 2) if quick else seeds,
            wider=0 if quick else 3,
        )
        task = Task(name, variant, folder)
        with tempfile.TemporaryDirectory(prefix="stoker-quick-") as temporary:
            results = Path(temporary) if quick and out is None else out or RESULTS
            rows = Rows(results / f"{name}.json", name, variant.name, recipe)
            if again:
                asked = {"*", "none"} & set(arms.split(","))
                rows.drop([arm for arm in plan.arms if arm.echoes or asked])
            carry_out(plan, rows, task, jobs, console)
            for table in terminal_tables(plan, rows):
                console.print(table)
            console.print(
                "A quick run: no figures." if quick else f"Rows: {rows.path}.", markup=False
            )
    except KeyboardInterrupt:
        typer.echo("stopped; runs that are over are kept", err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, ValueError, MissingData, stoker.StokerError) as error:
        typer.echo(f"experiments/run: {error}", err=True)
        raise typer.Exit(1) from None


def _variant(
    without: str,
    small: bool,
    batch_size: int | None,
    pool: int | None,
    fresh_batches: int | None,
    by_steps: bool,
) -> Variant:
    left_out = [word for word in without.split(",") if word]
    for word in left_out:
        if word not in _WITHOUT:
            raise ValueError(f"--without takes {', '.join(_WITHOUT)}, not {word}")
    return Variant(
        **{_WITHOUT[word]: False for word in left_out},
        small=small,
        batch_size=batch_size,
        pool_batches=pool,
        fresh_batches=fresh_batches,
        by_steps=by_steps,
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(run)

if __name__ == "__main__":
    app(prog_name="experiments/run")
