"""How many files can be named? Memory, time to the first batch, and to go on in the middle.

A text file has the names of made-up photographs, one a line (no such files exist: an example is its
name; ``.map()`` would open it). ``from_text`` finds lines by their offsets; the other two have the
names in a list: stoker's ``from_dataset``, and DataLoader, which shuffles by ``RandomSampler``.
Each is measured in a process of its own: its memory beyond that of the imports, at most and behind
the first batch; the time from the start of building to the first batch of 256 of a shuffled epoch;
and in another process the same to the batch behind a state saved in the middle of the epoch.
DataLoader has no such state.

Command::

    python bench/names.py

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18; Python 3.11.7, NumPy 2.4.6, PyTorch 2.13.0.

Results::

    [results/names.json]
    names                    loader  most MiB  held MiB  bytes a name  first batch s  resumed s
    -------------------------------------------------------------------------------------------
    1,000,000             from_text        27        27            29           0.23       0.24
    1,000,000    from_dataset(list)       136       118           143           0.39       0.40
    1,000,000      DataLoader(list)       149       104           156           0.20          -
    10,000,000            from_text       182       152            19           0.43       0.44
    10,000,000   from_dataset(list)     1,367     1,007           143           1.98       2.03
    10,000,000     DataLoader(list)     1,458     1,001           153           2.07          -
    100,000,000           from_text     1,740     1,546            18           2.37       2.44
    [end]

Caveats: lists of 10**8 strings were left out; 10**7 show how much they would take. The file was
written right before, so it is read from the page cache: a disk takes longer for the one pass.
Nothing opens the files, which takes its own time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import Report, parser, report
from torch.utils.data import DataLoader

import stoker

BATCH = 256
COUNTS = (10**6, 10**7, 10**8)
LISTS_UP_TO = 10**7
ARMS = ("from_text", "from_dataset(list)", "DataLoader(list)")


def write_names(path: Path, count: int) -> None:
    """Write names such as ImageNet's."""
    with path.open("w") as file:
        for n in range(count):
            file.write(f"train/n{n % 1000:08}/n{n % 1000:08}_{n}.JPEG\n")


def build(arm: str, path: str) -> Any:
    """Return a shuffled pipeline over the names, or a DataLoader."""
    if arm == "from_text":
        return stoker.from_text(path, seed=0).shuffle().batch(BATCH)
    names: Any = Path(path).read_text().splitlines()
    if arm == "DataLoader(list)":
        return DataLoader(names, batch_size=BATCH, shuffle=True)
    return stoker.from_dataset(names, seed=0).shuffle().batch(BATCH)


def save_in_the_middle(arm: str, path: str) -> None:
    """Run half an epoch, and print the state."""
    train = build(arm, path)
    for batch in itertools.islice(train, len(train) // 2):
        assert len(batch) == BATCH
    print(json.dumps(train.state_dict()))


def first_batch(arm: str, path: str, state: dict[str, Any] | None) -> None:
    """Take the first batch, or the one behind a state; print seconds and bytes."""
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    train = build(arm, path)
    if state is not None:
        train.load_state_dict(state)
    batch = next(iter(train))
    took_s = time.perf_counter() - began
    assert len(batch) == BATCH
    held = process.memory_info().rss - before
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({"s": took_s, "held_bytes": held, "most_bytes": most}))


def run(task: str, arm: str, path: Path, given: str = "") -> Any:
    """Run one of the two above in a process of its own; return what it printed."""
    command = [sys.executable, __file__, "--task", task, arm, str(path)]
    done = subprocess.run(command, check=True, input=given, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def evaluate(found: Report) -> None:
    """Show medians of the rounds."""
    lines = []
    for row in found.rows:
        middle = {
            key: statistics.median(each[key] for each in row["first"]) for key in row["first"][0]
        }
        resumed = f"{statistics.median(row['resumed_s']):.2f}" if row["resumed_s"] else "-"
        per_name = middle["most_bytes"] / row["names"]
        sizes = [f"{middle[key] / 2**20:,.0f}" for key in ("most_bytes", "held_bytes")]
        name, arm, took = f"{row['names']:,}", row["arm"], f"{middle['s']:.2f}"
        lines.append((name, arm, *sizes, f"{per_name:.0f}", took, resumed))
        if row["arm"] == "from_text":
            found.expect(f"{row['names']:,}: bytes a name", per_name, 64, at_least=False)
    head = ("names", "loader", "most MiB", "held MiB", "bytes a name", "first batch s", "resumed s")
    found.show(head, lines)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.task:
        task, arm, path = arguments.task
        if task == "save":
            save_in_the_middle(arm, path)
        else:
            given = sys.stdin.read()
            first_batch(arm, path, json.loads(given) if given else None)
        return
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found, tempfile.TemporaryDirectory() as folder:
        for count in (10_000,) if arguments.quick else COUNTS:
            path = Path(folder) / f"{count}.txt"
            write_names(path, count)
            arms = ARMS if count <= LISTS_UP_TO else ARMS[:1]
            states = {arm: json.dumps(run("save", arm, path)) for arm in arms[:2]}
            first: dict[str, list[Any]] = {arm: [] for arm in arms}
            resumed: dict[str, list[float]] = {arm: [] for arm in arms}
            for _ in range(rounds):
                for arm in arms:
                    first[arm].append(run("first", arm, path))
                    if arm in states:
                        resumed[arm].append(run("first", arm, path, states[arm])["s"])
            path.unlink()
            for arm in arms:
                found.add(names=count, arm=arm, first=first[arm], resumed_s=resumed[arm])


if __name__ == "__main__":
    main()
