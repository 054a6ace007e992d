"""What the benchmarks share: interleaved rounds, ratios, targets, the machine, result files.

Absolute times do not repeat between runs on shared machines, so every figure that counts is a
ratio of two cases measured in turns within one run: the median of the ratios of each round.

A script measures and adds rows; its ``evaluate`` makes tables and targets of the rows alone. So
``python bench/NAME.py --table`` prints the tables of the rows in ``results/NAME.json``, and::

    python bench/harness.py tables

writes them into the scripts' docstrings, between the lines ``[results/NAME.json]`` and ``[end]``;
``python bench/harness.py check`` names the scripts whose tables are others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path.append(str(HERE.parent))  # for `experiments`
ROUNDS = 5
_QUIET_LOAD = 0.5


def parser(doc: str | None, evaluate: Evaluate) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(evaluate=evaluate)
    made.add_argument(
        "--quick", action="store_true", help="a few seconds, to find errors: no figures, no file"
    )
    made.add_argument(
        "--rounds", type=int, default=ROUNDS, help="rounds of all cases (default %(default)s)"
    )
    made.add_argument(
        "--table",
        action=_ShowTables,
        const=evaluate,
        nargs=0,
        help="print the tables of the stored rows, and measure nothing",
    )
    return made


class _ShowTables(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(stored_tables(Path(sys.argv[0]), self.const))
        parser.exit()


def interleaved(cases: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Run every case once to warm up, then all of them in turns; each round starts elsewhere."""
    for case in cases.values():
        case()
    found: dict[str, list[Result]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(cases[name]())
    return found


@dataclass(frozen=True)
class Ratio:
    """The ratios of two cases, round by round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, these: Sequence[float], those: Sequence[float]) -> Ratio:
        """Divide these by those."""
        each = [a / b for a, b in zip(these, those, strict=True)]
        return cls(statistics.median(each), min(each), max(each))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} .. {self.high:.3g})"


@dataclass(frozen=True)
class Target:
    """What a median must reach."""

    what: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:<6}  {self.what}: {self.value:.3g} {sign} {self.limit:g}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


@contextmanager
def report(script: str, arguments: argparse.Namespace) -> Iterator[Report]:
    """Collect the rows of a run; at the end print tables and targets, and write the file."""
    made = Report(quick=arguments.quick)
    load_before = os.getloadavg()[0]
    if load_before > _QUIET_LOAD and not arguments.quick:
        print(f"load average {load_before:.2f}: something else runs; repeat this later\n")
    yield made
    made.rows = json.loads(json.dumps(made.rows))  # as they will be in the file
    arguments.evaluate(made)
    if made.quick:
        print("a quick run: no figures")
        return
    print(made.text, "\n")
    print(*made.targets, sep="\n")
    name = Path(script).stem
    RESULTS.mkdir(exist_ok=True)
    written = {
        "benchmark": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "load_1min": [load_before, os.getloadavg()[0]],
        "targets": [asdict(t) | {"met": t.met} for t in made.targets],
    }
    rows = ",\n".join(map(json.dumps, made.rows))  # each in a line
    text = f'{json.dumps(written, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
    (RESULTS / f"{name}.json").write_text(text)
    if not all(target.met for target in made.targets):
        sys.exit(1)


class Report:
    """The rows of one run, and what is made of them: tables and targets."""

    def __init__(self, *, quick: bool = False, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.quick = quick
        self.rows = list(rows)
        self.targets: list[Target] = []
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """The tables, one below the other."""
        return "\n\n".join(self._shown)

    def add(self, **row: Any) -> None:
        """Keep a raw row."""
        self.rows.append(row)

    def having(self, *keys: str) -> list[dict[str, Any]]:
        """Return the rows that have these keys."""
        return [row for row in self.rows if row.keys() >= set(keys)]

    def show(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table."""
        self._shown.append(table(head, rows))

    def say(self, sentence: str) -> None:
        """Add a line of text."""
        self._shown.append(sentence)

    def expect(self, what: str, value: float, limit: float, *, at_least: bool = True) -> None:
        """Hold a value against a target."""
        self.targets.append(Target(what, value, limit, at_least))


Evaluate = Callable[[Report], None]
"""Makes tables and targets of a report's rows, and of nothing else."""


def measured_scripts() -> list[Path]:
    """Return the scripts that have stored rows."""
    return sorted(p for p in HERE.glob("*.py") if (RESULTS / f"{p.stem}.json").exists())


def stored_tables(script: Path, evaluate: Evaluate) -> str:
    """Return the tables of a script's stored rows."""
    made = Report(rows=json.loads((RESULTS / f"{script.stem}.json").read_text())["rows"])
    evaluate(made)
    return made.text


def with_tables(script: Path, tables: str) -> str:
    """Return the script's source with these tables in its docstring."""
    begin, end = f"    [results/{script.stem}.json]\n", "    [end]\n"
    block = begin + textwrap.indent(tables, "    ") + "\n" + end
    marked = re.compile(f"^{re.escape(begin)}.*?^{re.escape(end)}", re.DOTALL | re.MULTILINE)
    source, found = marked.subn(lambda _: block, script.read_text(), count=1)
    if not found:
        raise ValueError(f"{script.name}: its docstring has no place for tables")
    return source


def outdated() -> dict[Path, str]:
    """Return the scripts whose tables are not those of their rows, with what they should be."""
    found = {}
    for script in measured_scripts():
        evaluate = importlib.import_module(script.stem).evaluate
        source = with_tables(script, stored_tables(script, evaluate))
        if source != script.read_text():
            found[script] = source
    return found


def machine() -> dict[str, Any]:
    """Describe where this runs: processor, cores, memory, versions."""
    import psutil

    from stoker.basics.resources import usable_cores

    names = {"numpy", "stoker", "torch", "pillow"}
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "python_loop_ns": round(_loop_ns()),
        **versions,
    }


def _loop_ns() -> float:
    """Return how long one round of a plain Python loop takes: what absolute times depend on."""
    tries = []
    for _ in range(20):
        began = time.perf_counter_ns()
        total = 0
        for i in range(10_000):
            total += i & 3
        tries.append((time.perf_counter_ns() - began) / 10_000)
    return min(tries)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def main() -> None:
    """Write the tables into the docstrings, or check them."""
    options = argparse.ArgumentParser(description="The tables in the scripts' docstrings.")
    options.add_argument("what", choices=("tables", "check"))
    what = options.parse_args().what
    wrong = outdated()
    for script, source in wrong.items():
        if what == "tables":
            script.write_text(source)
            print(f"{script.name}: tables written")
        else:
            print(f"{script.name}: the tables are not those of results/{script.stem}.json")
    if what == "check" and wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
