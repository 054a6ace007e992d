"""The command `python -m experiments.converged`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

# Before NumPy: one core, whatever else runs.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import typer

from experiments.converged.trainings import QUICK, ROWS, WHOLE, run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    texts: Annotated[Path, typer.Argument(help="A folder with `wikitext-2`, as `data.pack` has.")],
    out: Annotated[Path, typer.Option(help="The file of trainings, which are kept.")] = ROWS,
    quick: Annotated[bool, typer.Option("--quick", help="Little text, to find errors.")] = False,
) -> None:
    """Train what is missing in the file, on one core; it may be stopped at any time."""
    began = time.monotonic()
    run(
        out,
        texts,
        lambda text: typer.echo(f"{time.monotonic() - began:6.1f} s  {text}"),
        QUICK if quick else WHOLE,
    )


if __name__ == "__main__":
    app(prog_name="python -m experiments.converged")
