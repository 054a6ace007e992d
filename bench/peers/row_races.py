"""What the scripts beside peers on rows share: tokens and tables."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness import Ratio, Report, parser, report
from peers import environment, racing
from peers.serve import steady_rates

LEAST_RATIO = 1.0


class Arm(NamedTuple):
    """What does a task: a file in ``rows/``.

    Attributes:
        place: of its environment; "" is this one.
        variant: what the file is told.
    """

    place: str
    peer: str
    variant: str = ""


def run(
    script: str,
    doc: str | None,
    tasks: Mapping[str, Mapping[str, Arm]],
    write: Callable[[Path, bool], None],
) -> None:
    """Race the arms of each task, on data that ``write`` puts into a folder, small ones if told so.

    Each task has a folder of its name in it. The first arm of a task is stoker.
    """
    options = parser(doc, evaluate)
    known = {name: arm for arms in tasks.values() for name, arm in arms.items() if arm.place}
    racing.add_options(options, known)
    options.add_argument("--only", default="", help="tasks whose names have this in them")
    arguments = options.parse_args()
    chosen = racing.chosen(arguments, known)
    rounds, seconds = (1, 0.0) if arguments.quick else (arguments.rounds, 0.7)
    with report(script, arguments) as made, tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.quick)
        for task, arms in tasks.items():
            if arguments.only not in task:
                continue
            here = {name: arm for name, arm in arms.items() if not arm.place or name in chosen}
            commands = {name: command(arm, task, Path(folder)) for name, arm in here.items()}
            for name, (about, samples) in racing.raced(commands, seconds, rounds).items():
                made.add(task=task, arm=name, samples=samples, **about)


def command(arm: Arm, task: str, folder: Path) -> list[object]:
    """Return the words of an arm's command line."""
    python = environment.python(arm.place) if arm.place else sys.executable
    program = environment.HERE / "rows" / "serve_rows.py"
    return [python, "-W", "ignore", program, arm.peer, task, arm.variant, folder / task]


def evaluate(made: Report) -> None:
    """Hold every arm against the first of its task: stoker."""
    for task in dict.fromkeys(row["task"] for row in made.rows):
        rows = [row for row in made.rows if row["task"] == task]
        own_us = racing.processor_us(rows[0]["samples"])
        own_rates = steady_rates(rows[0]["samples"])
        lines = []
        for row in rows:
            samples = row["samples"]
            spent = Ratio.of(racing.processor_us(samples), own_us)
            rates = steady_rates(samples)
            speed = Ratio.of(own_rates, rates)
            first_ms = 1e3 * median(each["first_s"] / each["epochs"] for each in samples)
            lines.append(
                (
                    row["arm"],
                    f"{median(racing.processor_us(samples)):.3g}",
                    spent,
                    f"{median(rates):,.0f}",
                    f"{speed.median:.3g}",
                    f"{first_ms:.3g}",
                    f"{row['first_s']:.2f}",
                )
            )
            if row is not rows[0]:
                made.expect(f"{task}: time of {row['arm']}", spent.median, LEAST_RATIO)
                made.expect(f"{task}: over {row['arm']}", speed.median, LEAST_RATIO)
        head = (task, "cpu us", "it / stoker", "a second", "speed", "epoch ms", "start s")
        made.show(head, lines)
