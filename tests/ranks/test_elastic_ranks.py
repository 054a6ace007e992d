"""Real ranks under torchrun: killed, others go on; an agent starts all ranks again."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import checkpoint_program
import elastic_program
import pytest
from elastic_program import EXAMPLES, KINDS, LENGTH, PACK_STEPS, document, source

from scripts import PATH, TIMEOUT_S


def launched(
    folder: Path,
    ranks: int,
    *arguments: str,
    agent: Sequence[str] = (),
    program: Any = elastic_program,
) -> Any:
    """Start the program under torchrun, in a session of its own."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", *(agent or ["--standalone"]),
            "--nproc-per-node", str(ranks), program.__file__, str(folder), *arguments,
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


def check(folder: Path, kind: str) -> None:
    """Check what all ranks were given in the epoch."""
    batches = trained_on(folder)
    last = batches[-1]["world"]
    found = [
        use
        for batch in batches
        if kind != "pack" or batch["step"] < PACK_STEPS
        for use in zip(batch["ids"], batch["uses"], batch["draws"], strict=True)
    ]
    assert len({(x, use) for x, use, _ in found}) == len(found)
    uses = collections.Counter(x for x, _, _ in found)
    assert max(uses.values()) <= (2 if kind == "echo" else 1)
    if kind == "pack":
        check_packed(folder, uses.keys(), [draw for _, _, draw in found])
        return
    assert 0 <= EXAMPLES - len(uses) < last
    expected = drawn(kind)
    assert all(expected[x, use] == draw for x, use, draw in found)


def check_packed(folder: Path, tokens: Set[int], draws: list[float]) -> None:
    """Check that no token of the documents that ranks have read is left out, and draws differ."""
    assert len({*draws}) * LENGTH == len(draws)
    every = {token for x in source().random_map(document) for token in x.tolist()}
    assert tokens <= every
    alone = source().shard(rank=0, world_size=1)
    train = KINDS["pack"](alone, 1)  # what is left, as a single rank has it
    train.load_state_dict(json.loads((folder / "checkpoint.json").read_text()))
    rest = [token for batch, _ in train for token in batch.ravel().tolist()]
    assert not tokens & {*rest}
    assert len(every) - len(tokens) - len(rest) < LENGTH


def drawn(kind: str) -> dict[tuple[int, int], float]:
    """Return what a single process draws, that nobody stops."""
    train, found = KINDS[kind](source(), 24), dict[tuple[int, int], float]()
    for ids, draws in train:
        uses = zip(ids.tolist(), train.last.number.tolist(), strict=True)
        found.update(zip(uses, draws.tolist(), strict=True))
    return found


@pytest.mark.full  # test_elastic.py has every kind, from any number of ranks to any other
@pytest.mark.parametrize(("kind", "old", "new"), [("echo", 4, 2), ("pack", 2, 1)])
def test_killed_others_go_on(kind: str, old: int, new: int, tmp_path: Path) -> None:
    """With an echo from one state for all; what packs sequences needs the states of all."""
    others_go_on(tmp_path, kind, old, new)


def others_go_on(folder: Path, kind: str, old: int, new: int) -> None:
    """Kill a rank of the old ones behind a checkpoint, and check what the new ones are given."""
    status, _ = ended(launched(folder, old, kind, "4", "[1, 10]"))
    assert status != 0
    state = json.loads((folder / "checkpoint.json").read_text())
    assert all(each["step"] == 8 for each in (state if isinstance(state, list) else [state]))
    status, told = ended(launched(folder, new, kind, "4", "[-1, 0]"))
    assert status == 0, told
    assert f"with {new} rank{'s' * (new > 1)} instead of {old}" in told
    check(folder, kind)


@pytest.mark.full
def test_an_agent_starts_all_ranks_again_when_one_is_killed(tmp_path: Path) -> None:
    agent = ["--standalone", "--max-restarts", "2"]
    status, told = ended(launched(tmp_path, 4, "echo", "4", "[1, 10]", agent=agent))
    assert status == 0, told
    check(tmp_path, "echo")


@pytest.mark.full
def test_a_checkpoint_of_torch_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    uses = collections.defaultdict[str, list[tuple[int, int]]](list)
    for ranks, loads, saves in ((4, "", "of 4"), (2, "of 4", "of 2"), (3, "of 2", "")):
        process = launched(tmp_path, ranks, loads, saves, program=checkpoint_program)
        status, told = ended(process)
        assert status == 0, told
        for rank in range(ranks):
            for kind, found in json.loads((tmp_path / f"{loads}-{rank}.json").read_text()).items():
                uses[kind] += map(tuple, found)
    assert all(len({*found}) == len(found) for found in uses.values())
    every = checkpoint_program.EXAMPLES
    for kind in ("plain", "dict"):
        assert every - 3 < len(uses[kind]) <= every
    assert 2 * every - 16 < len(uses["echo"]) <= 2 * every
    assert all(x % 5 for x, _ in uses["filter"])
    assert len(uses["filter"]) == (
        checkpoint_program.FILTERED_STEPS * checkpoint_program.GLOBAL_BATCH
    )
