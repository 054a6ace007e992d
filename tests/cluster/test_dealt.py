"""Dealing by the map of a real cluster: ranks find at home and at peers what the model says."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from nodes import keepers, write_token

from experiments.scale.simulation import predicted_reads
from stoker.cluster.pinned import PinnedOwners
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
    pinned = PinnedOwners.read(json.loads(owners), world)
    assert sorted(pinned.ranks) == list(range(world))
    predicted = predicted_reads(pinned, EXAMPLES, seed=3, epoch=2, batch=BATCH, dealt=True)
    assert sum(rank["misses"][2] for rank in told) == 0
    assert [rank["peer_hits"][2] for rank in told] == [away for _, away in predicted]
