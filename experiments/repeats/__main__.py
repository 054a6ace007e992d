"""The command `python -m experiments.repeats`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

# Before NumPy: results are to be the same whatever else runs.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import typer

from experiments.repeats import language as language_model
from experiments.repeats import linear as linear_model
from experiments.repeats.damage import LANGUAGE, LINEAR
from experiments.result_files import write_whole

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def linear() -> None:
    """Train the linear model in all ways, on one core; the file of its rows is written anew."""
    found = [json.dumps(row) + "\n" for row in linear_model.rows(_clock())]
    write_whole(LINEAR, "".join(found))


@app.command()
def language(
    texts: Annotated[Path, typer.Argument(help="A folder with `wikitext-2`, as `data.pack` has.")],
    out: Annotated[Path, typer.Option(help="The file of trainings, which are kept.")] = LANGUAGE,
) -> None:
    """Train the language model in all ways that are not in the file, on one core."""
    language_model.run(out, texts, _clock())


def _clock() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: typer.echo(f"{time.monotonic() - began:6.1f} s  {text}")


if __name__ == "__main__":
    app(prog_name="python -m experiments.repeats")
