"""Real ranks under torchrun: killed, others go on; an agent starts all ranks again."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import PATH, TIMEOUT_S
from strategies import shortened

EXAMPLES = 1_013
PROGRAM = """
import json, os, signal, sys, time, warnings
import numpy as np
import stoker
import torch
import torch.distributed as dist


def drawing(x, rng):
    return x, rng.random()


def main(folder, global_batch, echo, keeps, dies):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        # A file for each try: in the agent's store gloo finds addresses of ranks that were killed.
        tried, world = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/ranks-{world}-{tried}",
            rank=int(os.environ["RANK"]), world_size=world,
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    train = stoker.from_arrays(np.arange(1013), seed=3).shuffle().shard()
    if echo > 1:
        train = train.echo(echo, pool=96)
    train = train.random_map(drawing).batch(max(1, global_batch // world))
    saved = os.path.join(folder, "checkpoint.json")
    begun = time.monotonic()
    if os.path.exists(saved):
        with open(saved) as file:
            train.load_state_dict(json.load(file))
    with open(os.path.join(folder, f"{time.monotonic_ns()}-{rank}.jsonl"), "w") as log:
        for ids, draws in train:
            step = train.clock.steps
            killed = os.path.join(folder, "killed")
            if rank == dies[0] and step == dies[1] and not os.path.exists(killed):  # once
                with open(killed, "w") as file:
                    file.write(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            told = {
                "step": step, "world": world, "begun": begun,
                "ids": ids.tolist(), "uses": train.last.number.tolist(), "draws": draws.tolist(),
            }
            log.write(json.dumps(told) + "\\n")
            log.flush()
            dist.all_reduce(torch.ones(1))
            if step % keeps == 0:
                if rank == 0:
                    with open(saved + ".part", "w") as file:
                        json.dump(train.state_dict(), file)
                    os.replace(saved + ".part", saved)
                dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
"""


def launched(folder: Path, ranks: int, *arguments: str, agent: Sequence[str] = ()) -> Any:
    """Start the program under torchrun, in a session of its own."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", *(agent or ["--standalone"]),
            "--nproc-per-node", str(ranks), str(script), str(folder), *arguments,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip


def ended(process: Any) -> tuple[int, str]:
    try:
        _, told = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, told


def trained_on(folder: Path) -> list[dict[str, Any]]:
    """Return the batches that training went on from: those behind a checkpoint came to nothing."""
    batches = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    later = [batch for batch in batches if batch["begun"] > float((folder / "killed").read_text())]
    resumed = min(batch["step"] for batch in later)
    return [batch for batch in batches if batch["step"] < resumed and batch not in later] + later


def check(folder: Path, echo: float) -> None:
    """Check what all ranks were given in the epoch."""
    batches = trained_on(folder)
    last = batches[-1]["world"]
    found = [
        use
        for batch in batches
        for use in zip(batch["ids"], batch["uses"], batch["draws"], strict=True)
    ]
    assert len({(x, use) for x, use, _ in found}) == len(found)
    uses = collections.Counter(x for x, _, _ in found)
    assert max(uses.values()) <= echo
    assert 0 <= EXAMPLES - len(uses) < last
    expected = drawn(echo)
    assert all(expected[x, use] == draw for x, use, draw in found)


def drawn(echo: float) -> dict[tuple[int, int], float]:
    """Return what a single process draws, that nobody stops."""
    import stoker

    def drawing(x: Any, rng: np.random.Generator) -> Any:
        return x, rng.random()

    train = stoker.from_arrays(np.arange(EXAMPLES), seed=3).shuffle()
    if echo > 1:
        train = train.echo(echo, pool=96)
    train, found = train.random_map(drawing).batch(24), dict[tuple[int, int], float]()
    for ids, draws in train:
        uses = zip(ids.tolist(), train.last.number.tolist(), strict=True)
        found.update(zip(uses, draws.tolist(), strict=True))
    return found


@pytest.mark.full
@pytest.mark.parametrize("echo", [1, 2])
@pytest.mark.parametrize("world", shortened([3, 2, 8], 1))
def test_killed_at_four_others_go_on(world: int, echo: int, tmp_path: Path) -> None:
    arguments = "48", str(echo), "4"
    status, _ = ended(launched(tmp_path, 4, *arguments, "[1, 10]"))
    assert status != 0
    state = json.loads((tmp_path / "checkpoint.json").read_text())
    assert state["yielded"] == 8
    status, told = ended(launched(tmp_path, world, *arguments, "[-1, 0]"))
    assert status == 0, told
    assert f"with {world} ranks instead of 4" in told
    check(tmp_path, echo)


@pytest.mark.full
def test_an_agent_starts_all_ranks_again_when_one_is_killed(tmp_path: Path) -> None:
    agent = ["--standalone", "--max-restarts", "2"]
    status, told = ended(launched(tmp_path, 4, "48", "2", "4", "[1, 10]", agent=agent))
    assert status == 0, told
    check(tmp_path, 2)
