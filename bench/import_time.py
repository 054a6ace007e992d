"""How long does ``import stoker`` take, and what of it is NumPy?

A new interpreter each time, from compiled files in warm memory, as at a program's second start.
Time within the interpreter, whose own start does not count: of ``import numpy``, and of
``import stoker``, which imports NumPy. Processor time is what is left of it where something else
runs on the machine, too.

Command::

    python bench/import_time.py

Target: ``import stoker`` within 150 ms, NumPy included.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial

from harness import interleaved, parser, report

LIMIT_S = 0.150
TRIES = 15
CASES = ("numpy", "stoker")
PROGRAM = """
import time
wall, processor = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - wall, time.process_time() - processor)
"""


def import_s(module: str, compiled: str) -> tuple[float, float]:
    """Time the import of a module in a new interpreter: by the clock, and of the processor.

    Args:
        module: what is imported.
        compiled: the folder for compiled files.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    wall_s, processor_s = map(float, found.stdout.split())
    return wall_s, processor_s


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rounds = 2 if arguments.quick else max(TRIES, arguments.rounds)
    with tempfile.TemporaryDirectory() as compiled, report(__file__, arguments) as found:
        cases = {module: partial(import_s, module, compiled) for module in CASES}
        samples = interleaved(cases, rounds)
        samples["stoker without numpy"] = [
            (whole[0] - part[0], whole[1] - part[1])
            for whole, part in zip(samples["stoker"], samples["numpy"], strict=True)
        ]
        lines = []
        for case, each in samples.items():
            wall_s, processor_s = (list(times) for times in zip(*each, strict=True))
            found.add(case=case, import_s=wall_s, processor_s=processor_s)
            lines.append((case, _ms(wall_s), _ms(processor_s)))
            if case == "stoker":
                middle_s = statistics.median(wall_s)
                found.expect("import stoker, seconds", middle_s, LIMIT_S, at_least=False)
        found.show(("import", "ms", "ms of the processor"), lines)


def _ms(each: list[float]) -> str:
    """Show a median, and what it lies between."""
    middle, low, high = (1e3 * s for s in (statistics.median(each), min(each), max(each)))
    return f"{middle:.0f} ({low:.0f} .. {high:.0f})"


if __name__ == "__main__":
    main()
