"""Dealing by the map of a real cluster: ranks find at home and at peers what the model says."""

from __future__ import annotations

import contextlib
import json
import signal
from itertools import chain
from pathlib import Path

import pytest
from nodes import KeeperProcess, keepers, write_token

from experiments.scale.simulation import predicted_reads
from stoker.schedule.owners import OwnerSnapshot
from test_ranks import told_by

EXAMPLES, BATCH = 240, 8

TRAINED = """
    hosts, folders = {hosts!r}, {folders!r}
    data = stoker.from_dataset(Slow({examples}), seed=3).shuffle().shard(near={near!r})
    cached = data.cache("8MiB", cluster=hosts, version="near", path=folders[RANK])
    train = cached.batch({batch}).workers(1)
    told = {{"ids": [], "hits": [], "peer_hits": [], "misses": []}}
    for epoch in range(3):
        told["ids"].append([i for batch in train for i in batch["id"].tolist()])
        cache = train.stats().cache
        for name in ("hits", "peer_hits", "misses"):
            told[name].append(getattr(cache, name))
        dist.barrier()
        time.sleep(0.5)  # what was read in the first epoch reaches its owners
    with iter(train) as batches:
        next(batches)
        told["owners"] = train.state_dict().get("owners")
        list(batches)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "near"),
    [(2, "cache"), (2, None), pytest.param(4, "cache", marks=pytest.mark.full)],
)
def test_reads_are_those_that_the_model_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, near: str | None
) -> None:
    monkeypatch.setenv("STOKER_TOKEN_FILE", str(write_token(tmp_path)))
    with keepers(tmp_path, world) as nodes:
        body = TRAINED.format(
            hosts=[keeper.address for keeper in nodes],
            folders=[keeper.folder for keeper in nodes],
            examples=EXAMPLES,
            batch=BATCH,
            near=near,
        )
        told = told_by(tmp_path, world, body)
    for epoch in range(3):
        seen = list(chain(*(rank["ids"][epoch] for rank in told)))
        assert sorted(seen) == list(range(EXAMPLES))
    if near is None:
        assert told[0]["owners"] is None
        return
    (owners,) = {json.dumps(rank["owners"]) for rank in told}
    pinned = OwnerSnapshot.from_json(json.loads(owners), world)
    assert sorted(pinned.ranks) == list(range(world))
    predicted = predicted_reads(pinned, EXAMPLES, seed=3, epoch=2, batch=BATCH, dealt=True)
    assert sum(rank["misses"][2] for rank in told) == 0
    assert [rank["peer_hits"][2] for rank in told] == [away for _, away in predicted]


KILLING = """
    hosts, folders, pids = {hosts!r}, {folders!r}, {pids!r}
    data = stoker.from_dataset(Slow({examples}), seed=3).shuffle().shard(near="cache")
    cached = data.cache("8MiB", cluster=hosts, version="near", path=folders[RANK])
    train = cached.batch({batch}).workers(1)
    told = {{"ids": [], "owners": []}}
    for epoch in range(5):
        seen = []
        with iter(train) as batches:
            for number, batch in enumerate(batches):
                seen += batch["id"].tolist()
                dist.all_reduce(torch.ones(1))
                if (RANK, number) == (0, 5) and epoch in pids:
                    os.kill(pids[epoch], 9)
                if number == 7:
                    told["owners"].append(train.state_dict()["owners"])
        told["ids"].append(seen)
"""


@pytest.mark.full
def test_keepers_are_killed_while_ranks_deal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one that no rank is beside, then that of a rank; each example comes once an epoch."""
    token = write_token(tmp_path)
    monkeypatch.setenv("STOKER_TOKEN_FILE", str(token))
    with contextlib.ExitStack() as ends:
        nodes = [KeeperProcess(tmp_path / f"store-{number}", token) for number in range(3)]
        for node in nodes:
            ends.callback(node.end, signal.SIGKILL)
        body = KILLING.format(
            hosts=[node.address for node in nodes],
            folders=[str(node.folder) for node in nodes],
            pids={1: nodes[2].process.pid, 2: nodes[1].process.pid},
            examples=EXAMPLES,
            batch=BATCH,
        )
        told = told_by(tmp_path, 2, body)
    for epoch in range(5):
        seen = list(chain(*(rank["ids"][epoch] for rank in told)))
        assert sorted(seen) == list(range(EXAMPLES))
    assert told[0]["owners"] == told[1]["owners"], "both deal by one map"
