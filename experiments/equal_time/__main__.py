"""The command `python -m experiments.equal_time`."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.equal_time import data, plan, queue, rows, tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def pack(
    source: Annotated[Path, typer.Argument(help="A folder of data, as `data.pack` has it.")],
    to: Annotated[Path, typer.Argument(help="Where the packed files go, 40 MiB.")],
) -> None:
    """Pack the data into a few small files, to be carried to another machine."""
    data.pack(source, to)


@app.command()
def table(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(tables.TABLES)}.")],
) -> None:
    """Print every comparison of one question, of the stored rows, separated by tabs."""
    head, lines = tables.cells(name)
    for line in [head, *lines]:
        typer.echo("\t".join(line))


@app.command()
def run(
    packed: Annotated[
        Path | None, typer.Option(help="Folder of packed data; none: made up.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The file of rows; cells in it are not repeated.")
    ] = rows.ROWS,
    limit_s: Annotated[float, typer.Option(help="Stop after so many seconds.")] = math.inf,
    processes: Annotated[int, typer.Option(min=1, help="Cells at a time.")] = 4,
    device: Annotated[str, typer.Option(help="As torch names it: cuda, or cpu.")] = "cuda",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps of each kind of cell, to find errors.")
    ] = False,
    only: Annotated[str, typer.Option(help="Tasks, separated by commas; none: all.")] = "",
) -> None:
    """Train all cells, the most telling first; a row is added to the file as each ends."""
    began = time.monotonic()
    deadline = began + limit_s

    def say(text: str) -> None:
        typer.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    known = rows.read_rows(out)
    names = only.split(",") if only else None
    missing = [
        cell
        for cell in plan.cells()
        if (names is None or cell.task in names) and not rows.is_known(cell, known)
    ]
    seeds = plan.seeds_of()
    if quick:
        missing, seeds = plan.shortened(missing), plan.seeds_of(1, 1)
    done = 0

    def keep(row: dict[str, Any]) -> None:
        nonlocal done
        rows.append(out, row)
        done += 1
        say(
            f"{done} of {len(missing)}: {row['task']}, {row['fresh_batches']} fresh batches, "
            f"{row['arm']}: {max(row['steps'])} steps in {row['took_s']:.1f} s"
        )

    with tempfile.TemporaryDirectory(prefix="stoker-equal-time-") as temporary:
        folder = Path(temporary)
        if packed is None:
            packed = folder / "packed"
            data.pack_made_up(packed)
        data.unpack(packed, folder)
        say("data is ready")
        out.parent.mkdir(parents=True, exist_ok=True)
        feature_steps = 20 if quick else queue.FEATURE_STEPS
        queue.carry_out(
            missing, seeds, folder, device, processes, deadline, keep, say, feature_steps
        )
    say(f"{done} of {len(missing)} cells are over")


if __name__ == "__main__":
    app(prog_name="python -m experiments.equal_time")
