"""Ranks over a real cluster find at home and at peers what the map of owners says."""

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from nodes import Nodes, servers

from scripts import told_by
from stoker.cluster.owners import Member, OwnerMap

EXAMPLES, BATCH = 240, 8

TRAINED = """
    hosts, folders = {hosts!r}, {folders!r}
    data = stoker.from_dataset(Slow({examples}), seed=3).shuffle().shard()
    cached = data.cache("8MiB", cluster=hosts, version="ranks", path=folders[RANK])
    train = cached.batch({batch}).workers(1)
    told = {{"ids": [], "hits": [], "peer_hits": [], "misses": []}}
    for epoch in range(3):
        told["ids"].append([i for batch in train for i in batch["id"].tolist()])
        cache = train.stats().cache
        for name in ("hits", "peer_hits", "misses"):
            told[name].append(getattr(cache, name))
        dist.barrier()
        time.sleep(0.5)  # what was read in the first epoch reaches its owners
"""


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_reads_are_those_that_the_map_predicts(tmp_path: Path, world: int) -> None:
    with servers(tmp_path, world) as nodes:
        hosts = [server.address for server in nodes]
        body = TRAINED.format(
            hosts=hosts,
            folders=[server.folder for server in nodes],
            examples=EXAMPLES,
            batch=BATCH,
        )
        told = told_by(tmp_path, world, body)
    owners = OwnerMap.of([Member(host, host, 8 << 20) for host in hosts], version=1)
    for epoch in range(3):
        seen = list(chain(*(rank["ids"][epoch] for rank in told)))
        assert sorted(seen) == list(range(EXAMPLES))
    assert sum(rank["misses"][2] for rank in told) == 0
    for host, rank in zip(hosts, told, strict=True):
        kept = [owners.members[number].name for number in owners.owners(np.array(rank["ids"][2]))]
        assert rank["peer_hits"][2] == sum(name != host for name in kept)


KILLING = """
    hosts, folders, pids = {hosts!r}, {folders!r}, {pids!r}
    data = stoker.from_dataset(Slow({examples}), seed=3).shuffle().shard()
    cached = data.cache("8MiB", cluster=hosts, version="ranks", path=folders[RANK])
    train = cached.batch({batch}).workers(1)
    told = {{"ids": []}}
    for epoch in range(5):
        seen = []
        with iter(train) as batches:
            for number, batch in enumerate(batches):
                seen += batch["id"].tolist()
                dist.all_reduce(torch.ones(1))
                if (RANK, number) == (0, 5) and epoch in pids:
                    os.kill(pids[epoch], 9)
        told["ids"].append(seen)
"""


@pytest.mark.full
def test_servers_are_killed_while_ranks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one that no rank is beside, then that of a rank; each example comes once an epoch."""
    with contextlib.ExitStack() as ends:
        made = Nodes(tmp_path, ends)
        monkeypatch.setenv("STOKER_TOKEN_FILE", str(made.token))
        nodes = [made.keep() for _ in range(3)]
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
