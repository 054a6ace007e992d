"""Where stoker stands: the newest rows of every path, and the targets that benchmarks missed.

Measures nothing: no figures of its own. ``python bench/paths.py`` makes the rows of the paths, each
script those of its targets.

Command::

    python bench/scoreboard.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import RESULTS, measured_scripts, stored_tables, table
from paths import __file__ as paths_script
from paths import evaluate


def missed() -> list[tuple[str, str, str]]:
    """Return the targets that the newest run of each benchmark missed."""
    found = []
    for script in measured_scripts():
        stored = json.loads((RESULTS / f"{script.stem}.json").read_text(encoding="utf-8"))
        for target in stored["targets"]:
            if not target["met"]:
                sign = ">=" if target["at_least"] else "<="
                found.append(
                    (
                        f"{script.stem}: {target['what']}",
                        f"{target['value']:.3g}",
                        f"{sign} {target['limit']:g}",
                    )
                )
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="the same: nothing is measured")
    if options.parse_args().quick:
        print("no figures: those of earlier runs, which --quick does not change\n")
    if (RESULTS / "paths.json").exists():
        print(stored_tables(Path(paths_script), evaluate), "\n")
    print(table(("missed", "value", "target"), missed()))


if __name__ == "__main__":
    main()
