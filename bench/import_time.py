"""How long does ``stoker`` take to import, and what of it is NumPy?

A new interpreter each time, from compiled files in warm memory, as at a program's second start.
Time within the interpreter, whose own start does not count: of ``import numpy``, and of
a name of ``stoker``, whose first use imports all of it and NumPy.

Command::

    python bench/import_time.py

Target: within 150 ms, NumPy included.

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, NumPy 2.4.6; load average 0.5.

Results (31 rounds)::

    [results/import_time.json]
    import                 ms  lowest .. highest
    --------------------------------------------
    numpy                  69           53 .. 96
    stoker                118         101 .. 171
    stoker without numpy   50           24 .. 88
    [end]

Caveats: while anything else runs, it takes up to twice as long, NumPy too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial

from harness import Report, interleaved, parser, report

LIMIT_S = 0.150
TRIES = 15
CASES = {"numpy": "import numpy", "stoker": "from stoker import Pipeline"}
PROGRAM = """
import time
began = time.perf_counter()
{statement}
print(time.perf_counter() - began)
"""


def import_s(statement: str, compiled: str) -> float:
    """Time an import in a new interpreter, which keeps compiled files in a folder."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement=statement)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(found.stdout)


def evaluate(found: Report) -> None:
    """Hold the median against the limit."""
    samples = {row["case"]: row["import_s"] for row in found.rows}
    lines = []
    for case, each in samples.items():
        middle, low, high = (1e3 * s for s in (statistics.median(each), min(each), max(each)))
        lines.append((case, f"{middle:.0f}", f"{low:.0f} .. {high:.0f}"))
    found.show(("import", "ms", "lowest .. highest"), lines)
    middle_s = statistics.median(samples["stoker"])
    found.expect("import stoker, seconds", middle_s, LIMIT_S, at_least=False)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    rounds = 2 if arguments.quick else max(TRIES, arguments.rounds)
    with tempfile.TemporaryDirectory() as compiled, report(__file__, arguments) as found:
        cases = {case: partial(import_s, each, compiled) for case, each in CASES.items()}
        samples = interleaved(cases, rounds)
        samples["stoker without numpy"] = [
            whole - numpy for whole, numpy in zip(samples["stoker"], samples["numpy"], strict=True)
        ]
        for case, each in samples.items():
            found.add(case=case, import_s=each)


if __name__ == "__main__":
    main()
