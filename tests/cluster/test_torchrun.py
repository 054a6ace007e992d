"""``cluster="torchrun"``: a cache server on each host, found by the job's own key-value store."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes import EXAMPLES, Numbered

import stoker
from scripts import PATH, Watch
from stoker.cluster import torchrun
from stoker.cluster.cache_connection import CacheConnection
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.opening import cluster_join
from stoker.transport.link import LinkError

RANK = """
import json, os, sys
import numpy as np
import stoker
from nodes import Numbered
from stoker.cluster import cache_connection
cache_connection.DEADLINE_S = 60.0
rank = int(os.environ["RANK"])
train = stoker.from_dataset(Numbered(), seed=0).shuffle().shard(rank=rank, world_size=4)
train = train.cache("8MiB", cluster="torchrun", version="test").batch(7)
for word in sys.stdin:
    ids = [int(each) for batch in train for each in batch["id"]]
    cache = train.stats().cache
    print(json.dumps({"ids": ids, "misses": cache.misses, "members": cache.members,
                      "folder": cache.folder}), flush=True)
"""


def test_outside_of_a_job_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    train = stoker.from_dataset(Numbered(), seed=0).cache("8MiB", cluster="torchrun", version="1")
    with pytest.raises(stoker.CacheError, match="start the script with torchrun"):
        iter(train)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_network_that_is_trusted(
    insecure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts of the job are told of it."""
    import torch.distributed as torch

    store = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": store.port}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "XDG_STATE_HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    spec = CacheSpec("Numbered", [], "1", 10, "", "")
    found = cluster_join("torchrun", insecure=insecure)(spec, 1 << 21, None)
    assert isinstance(found, torchrun.LaunchedHosts)
    (member,) = found.members().members
    monkeypatch.setattr("stoker.cluster.cache_connection.DEADLINE_S", 60.0)
    assert found.insecure == insecure
    CacheConnection(member.address, found.token, spec, 1, insecure=insecure).close()
    with pytest.raises(LinkError, match="insecure=True here"):
        CacheConnection(member.address, found.token, spec, 1, insecure=not insecure)
    server = torchrun._servers.pop()
    server.communicate()


def start(store_port: int, rank: int, host: int, state: Path) -> subprocess.Popen[str]:
    here = [str(Path(__file__).parents[up]) for up in (0, 1)]
    environment = {
        "RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": host, "GROUP_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store_port, "XDG_STATE_HOME": state,
        "PYTHONPATH": os.pathsep.join([*here, PATH]),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        start_new_session=True,
    )


@pytest.mark.full
def test_two_hosts_of_two_ranks_read_storage_once(tmp_path: Path) -> None:
    import torch.distributed as torch

    store = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(store.port, rank, rank // 2, tmp_path) for rank in range(4)]
    with contextlib.ExitStack() as ends:
        for rank in ranks:
            ends.callback(rank.communicate)
            ends.callback(rank.kill)

        def epoch() -> list[dict[str, Any]]:
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("epoch\n")
                rank.stdin.flush()
            lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
            found: list[dict[str, Any]] = [json.loads(line) for line in lines]
            assert sorted(each for one in found for each in one["ids"]) == list(range(EXAMPLES))
            return found

        # What a rank has brought is there before its epoch ends.
        assert sum(found["misses"] for found in epoch()) == EXAMPLES
        again = epoch()
        assert sum(found["misses"] for found in again) == 0
        assert {found["members"] for found in again} == {2}
        assert len({found["folder"] for found in again}) == 2
        servers = [child.pid for rank in ranks for child in psutil.Process(rank.pid).children()]
        assert len(servers) == 2
        with Watch(servers) as watch:
            for rank in ranks:
                rank.kill()
            assert watch.gone()
