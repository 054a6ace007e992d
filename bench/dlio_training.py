"""Does echoing pay in a training whose input is somebody else's? DLIO's reader, loop and clock.

Registered before it is run. DLIO (see ``dlio_peers.py``) reads and decodes the JPEGs of its
workload resnet50 as it makes them (338 x 338, random), two workers, one accelerator, batches of 32.
In place of DLIO's sleep stands a training of the study: Fashion-MNIST, two convolutions, crops and
flips, 6,400 examples, on one core of the two that decode. So neither the input's speed nor the
clock is ours, and neither is constant.

Arms: DLIO's DataLoader; stoker by threads; the same with ``.echo("auto")`` behind DLIO's reader,
crops and flips behind that. Registered after these had run: stoker by processes, without and with
an echo, as threads took the training the interpreter's lock. Each trains for 30 s from the first
request of a batch on; the learning rate follows that clock. Settings: for each arm three peak
rates, a warm-up of a tenth, chosen by the validation loss of two seeds that are used for nothing
else; five seeds are told, in an order of arms that is drawn for each.

The measure: the test loss after 30 s, of pairs by seed. What counts against echoing: its loss is
not lower than DataLoader's, the interval below 0; or it is not lower than without it.

Command (needs the environment of ``dlio_peers.py --install``)::

    python bench/dlio_training.py --data FOLDER

FOLDER has ``fashion-mnist`` with the four ``.gz`` files of its repository.

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18, files in the page cache; Python 3.11.7.

Results::

    [results/dlio_training.json]
    arm               rate  test loss        less DataLoader's  accuracy  steps  training
    -------------------------------------------------------------------------------------
    DataLoader       0.025      0.578                              0.789    206      0.06
    threads          0.025      0.648  +0.077 [+0.035, +0.103]     0.766    128      0.23
    threads, echo     0.05      0.548  -0.031 [-0.043, +0.023]     0.804    306      0.93
    processes        0.025      0.588  +0.008 [-0.012, +0.024]     0.787    233      0.07
    processes, echo   0.05      0.462  -0.109 [-0.125, -0.081]     0.834    846      0.26
    [end]

Missed: an echo by threads is level with DataLoader. DLIO's reader is Python for the most part, so
threads of its process decode less than two processes do (128 steps, 206), and a step of training
waits for the interpreter's lock: 54 ms without an echo and 91 ms with it, 9 ms beside processes.
The plug-in declares the reader safe for threads; that does not make it fast in them. By processes,
which users' code gets at the defaults, the echo's loss is lower in all five.

Caveats: it is DLIO, no result of MLPerf. Training and decoding share two cores, so a loader that
waits leaves the training more of them. The best rate is the smallest that was tried for DataLoader,
threads and processes without an echo, and inside with one: those without are not tuned in full.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from dlio_peers import Task, run_dlio
from harness import Report, parser, report
from peers import environment

from experiments.equal_time import data
from experiments.equal_time.rows import best_setting
from experiments.in_dlio import less

ARMS = {
    "DataLoader": "Loader",
    "threads": "Stoker",
    "threads, echo": "Echoed",
    "processes": "Processes",
    "processes, echo": "EchoedProcesses",
}
DECODE = Task(
    "resnet50_h100",
    32,
    {"framework": "pytorch", "reader.data_loader": "pytorch", "dataset.format": "jpeg"},
    0.0,
)
RATES, WARM_UP, TRAINING_S = (0.025, 0.05, 0.1), 0.1, 30.0
EXAMPLES, SEEDS, TUNING_SEEDS = 6_400, range(5), range(1_000, 1_002)
_EPOCHS = 1_000  # more than there is time for


def trained(folder: Path, arm: str, examples: int, **plan: Any) -> dict[str, Any]:
    """Return what a training in DLIO found."""
    out = folder / "found.json"
    out.unlink(missing_ok=True)
    plan |= {"folder": str(folder), "out": str(out), "examples": examples, "warm_up": WARM_UP}
    os.environ["STOKER_TRAINING"] = json.dumps(plan)
    settings: dict[str, object] = {
        "workflow.generate_data": False,
        "workflow.train": True,
        "train.epochs": _EPOCHS,
        "train.computation_time": DECODE.step_s,
        "reader.data_loader_classname": f"dlio_trained.{ARMS[arm]}",
        "reader.data_loader_sampler": "index",
    }
    run_dlio(DECODE, folder, 1, examples, **settings)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def evaluate(found: Report) -> None:
    """Show each arm's losses, and their differences by seed."""
    told = sorted((r for r in found.rows if r["seed"] in SEEDS), key=lambda row: row["seed"])
    lines = []
    for arm in ARMS:
        rows = [row for row in told if row["arm"] == arm]
        if len(rows) < len(SEEDS):
            return
        middle = {
            name: statistics.median(row[name] for row in rows)
            for name in ("test", "test_accuracy", "steps", "trained_fraction")
        }
        difference, around = less(told, arm, "DataLoader")
        shown = f"{difference:+.3f} [{around.low:+.3f}, {around.high:+.3f}]"
        lines.append(
            (
                arm,
                rows[0]["learning_rate"],
                f"{middle['test']:.3f}",
                shown if arm != "DataLoader" else "",
                f"{middle['test_accuracy']:.3f}",
                f"{middle['steps']:.0f}",
                f"{middle['trained_fraction']:.2f}",
            )
        )
    head = ("arm", "rate", "test loss", "less DataLoader's", "accuracy", "steps", "training")
    found.show(head, lines)
    for kind in ("threads", "processes"):
        for other in ("DataLoader", kind):
            _, around = less(told, f"{kind}, echo", other)
            what = f"{kind}, echo, less {other}: the interval's upper end"
            found.expect(what, around.high, 0.0, at_least=False)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--data", type=Path, help="the folder of fashion-mnist")
    arguments = options.parse_args()
    with report(__file__, arguments) as found:
        if arguments.data is None or not environment.python("dlio").exists():
            if not arguments.quick:
                sys.exit("give --data, and make DLIO's environment (dlio_peers.py --install)")
            return
        examples, training_s = (320, 3.0) if arguments.quick else (EXAMPLES, TRAINING_S)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            for name, array in data.fashion(arguments.data).items():
                np.save(folder / f"fashion-{name}.npy", array)
            generate: dict[str, object] = {"workflow.generate_data": True, "workflow.train": False}
            run_dlio(DECODE, folder, 1, examples, **generate)
            best = {}
            for arm in ARMS:
                rates = RATES[:1] if arguments.quick else RATES
                losses = []
                for seed in TUNING_SEEDS:
                    plans = [
                        {"seed": seed, "learning_rate": rate, "training_s": training_s}
                        for rate in rates
                    ]
                    rows = [plan | trained(folder, arm, examples, **plan) for plan in plans]
                    for row in rows:
                        found.add(arm=arm, **row)
                    losses.append([row["validation"] for row in rows])
                best[arm] = rates[best_setting(losses)]
            for seed in SEEDS:
                arms = list(ARMS)
                random.Random(seed).shuffle(arms)
                for arm in arms:
                    plan = {"seed": seed, "learning_rate": best[arm], "training_s": training_s}
                    found.add(arm=arm, **plan, **trained(folder, arm, examples, **plan))


if __name__ == "__main__":
    main()
