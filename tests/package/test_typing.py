"""What a user's type checker sees: a pipeline says what it yields, as far as types tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import python

SCRIPT = """\
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stoker

x, y = np.zeros((8, 3)), np.arange(8)

reveal_type(stoker.from_arrays(x, y).batch(8))
reveal_type(stoker.from_arrays(x).shuffle().take(4).echo(2).batch(8))
for images, labels in stoker.from_arrays(x, y).shard(rank=0, world_size=1).batch(8):
    reveal_type(images)
reveal_type(stoker.from_folder("train"))
reveal_type(stoker.from_files("*.txt").map(lambda file: len(file.data)))
reveal_type(stoker.from_dataset([1, 2, 3]).filter(bool))
reveal_type(stoker.from_iterable(["a", "b"]).batch(2, collate=lambda texts: ",".join(texts)))
reveal_type(stoker.from_loader([["a"], ["b"]]))
reveal_type(stoker.from_dataset([1, 2, 3]).echo(Fraction(5, 2)))
reveal_type(stoker.echo([["a"], ["b"]], Fraction(5, 2)))


def noisy(row: NDArray[Any], rng: np.random.Generator) -> float:
    return float(row[0] + rng.random())


reveal_type(stoker.from_arrays(x).random_map(noisy))


def train(pipeline: stoker.Pipeline) -> None:
    next(iter(pipeline))
"""
SEEN = [
    "Pipeline[tuple[ndarray[Any, dtype[Any]], ndarray[Any, dtype[Any]]]]",
    "Pipeline[ndarray[Any, dtype[Any]]]",
    "ndarray[Any, dtype[Any]]",
    "Pipeline[tuple[bytes, int, fallback=LabeledImage]]",
    "Pipeline[int]",
    "Pipeline[int]",
    "Pipeline[str]",
    "Pipeline[list[str]]",
    "Pipeline[int]",
    "Pipeline[Any]",
    "Pipeline[float]",
]


@pytest.mark.full
def test_a_strict_script_is_told_what_comes_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = python(
        "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    told = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    for name in (
        "builtins.",
        "numpy.",
        "stoker.pipeline.",
        "stoker.sources.folder.",
        "typing.",
    ):
        told = [line.replace(name, "") for line in told]
    assert [line.replace("tuple[Any, ...]", "Any") for line in told] == SEEN
