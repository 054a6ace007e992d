"""The command `python -m experiments.repeats`."""

from __future__ import annotations

import json
import os
import time

# Before NumPy: results are to be the same whatever else runs.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import typer

from experiments.repeats import linear as linear_model
from experiments.repeats.damage import LINEAR
from experiments.result_files import write_whole

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def linear() -> None:
    """Train the linear model in all ways, on one core; the file of its rows is written anew."""
    began = time.monotonic()

    def say(text: str) -> None:
        typer.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    found = [json.dumps(row) + "\n" for row in linear_model.rows(say)]
    write_whole(LINEAR, "".join(found))


if __name__ == "__main__":
    app(prog_name="python -m experiments.repeats")
