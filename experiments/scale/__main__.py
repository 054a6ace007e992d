"""A cache over many nodes, by simulation: who keeps what, who asks whom, what a loss costs.

    python -m experiments.scale            # minutes; writes the rows, the tables and the figure
    python -m experiments.scale --quick    # seconds; prints tables of small clusters

It uses the package's own map of owners and its own dealing, on integers alone; nothing is read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from experiments.result_files import this_machine, write_whole
from experiments.scale import page
from experiments.scale.simulation import EXAMPLES, ROWS, simulate

_SAYS = "A cache over many nodes, by simulation."


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate; write rows, table and figure, or print the table of the quick one."""
    parser = argparse.ArgumentParser("python -m experiments.scale", description=_SAYS)
    parser.add_argument("--quick", action="store_true", help="small clusters, printed only")
    quick = parser.parse_args(arguments).quick
    traffic, losses = simulate(quick=quick)
    if quick:
        print(page.traffic_table(traffic), page.loss_table(losses), sep="\n\n")
        return
    rows = {
        "machine": this_machine(),
        "examples": EXAMPLES,
        "traffic": [asdict(each) for each in traffic],
        "losses": [asdict(each) for each in losses],
    }
    ROWS.parent.mkdir(exist_ok=True)
    write_whole(ROWS, json.dumps(rows, indent=1) + "\n")
    print(*page.write(), sep="\n")


if __name__ == "__main__":
    main()
