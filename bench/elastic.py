"""From the kill of a rank to the next batch on other ranks.

Four ranks train under torchrun, and save a state every fourth step. One is killed, so torchrun ends
all of them; then as many ranks as a row says are started, load the state, and go on. The time ends
with the first batch that any of them has. "Load" is what ``load_state_dict()`` and a rank's first
batch take, of the slowest; nearly all the rest is Python, torch and the process group that start.

Command::

    python bench/elastic.py --rounds 1

Machine: two cores, 24 GiB, Linux; Python 3.11.7; other programs ran meanwhile (load average 35).

Results::

    [results/elastic.json]
    ranks that go on  kill to batch, s  others end, s  load, s
    ----------------------------------------------------------
    2                             22.2            4.2     0.16
    3                             18.5            2.6     0.19
    8                             25.9            4.4     0.35
    [end]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, parser, report

WORLDS = (2, 3, 8)
QUICK_WORLDS = (2,)
GLOBAL_BATCH = 48
LIMIT_S = 240
MOST_LOAD_S = 5.0

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import torch.distributed as dist
import stoker

folder, batch, dies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
train = stoker.from_arrays(np.arange(100_000), seed=3).shuffle().shard()
train = train.echo(2, pool=256).batch(batch // world)
saved = os.path.join(folder, "state.json")
began = time.monotonic()
if os.path.exists(saved):
    with open(saved) as file:
        train.load_state_dict(json.load(file))
for step, ids in enumerate(train, 1):
    if dies < 0:
        with open(os.path.join(folder, f"began-{rank}"), "w") as file:
            json.dump([began, time.monotonic()], file)
        break
    if step % 4 == 0:
        if rank == 0:
            with open(saved, "w") as file:
                json.dump(train.state_dict(), file)
        dist.barrier()
    if (rank, step) == (dies, 10):
        with open(os.path.join(folder, "killed"), "w") as file:
            json.dump(time.monotonic(), file)
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def launch(folder: Path, world: int, dies: int) -> None:
    """Run ranks to their end, good or bad."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(world), str(script), str(folder), str(GLOBAL_BATCH), str(dies),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def went_on(world: int) -> dict[str, float]:
    """Kill one of four ranks, and go on with others."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        launch(folder, 4, 1)
        killed = json.loads((folder / "killed").read_text())
        ended = time.monotonic()
        launch(folder, world, -1)
        each = [json.loads(file.read_text()) for file in folder.glob("began-*")]
        if len(each) != world:
            raise RuntimeError(f"{len(each)} of {world} ranks went on")
        first = min(batch for _, batch in each)
        return {
            "whole_s": first - killed,
            "ending_s": ended - killed,
            "load_s": max(batch - began for began, batch in each),
        }


def evaluate(found: Report) -> None:
    """Show the medians of rounds."""
    rows = []
    for row in found.having("world"):
        whole_s, ending_s, load_s = (
            float(np.median([each[key] for each in row["rounds"]]))
            for key in ("whole_s", "ending_s", "load_s")
        )
        rows.append((row["world"], f"{whole_s:.1f}", f"{ending_s:.1f}", f"{load_s:.2f}"))
        found.expect(f"load with {row['world']} ranks, s", load_s, MOST_LOAD_S, at_least=False)
    found.show(("ranks that go on", "kill to batch, s", "others end, s", "load, s"), rows)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found:
        for world in QUICK_WORLDS if arguments.quick else WORLDS:
            found.add(world=world, rounds=[went_on(world) for _ in range(rounds)])


if __name__ == "__main__":
    main()
