"""Cache servers and jobs as plain processes on hosts of a network that is cut, or slow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from networks import KINDS, Network, network
from nodes import EXAMPLES, ClientProcess, Nodes

from patience import wait_until

pytestmark = pytest.mark.full
HOSTS = 3


class Cluster:
    """A cache server on each host of a network, and jobs beside them."""

    def __init__(self, nodes: Nodes, on: Network) -> None:
        self.network = on
        self._nodes = nodes
        self._hosts = []
        for host in range(HOSTS):
            server = nodes.keep(on.listens(host), command=on.command(host))
            self._hosts.append(on.reached(host, server.address))

    def job(self, host: int, deadline_s: float) -> ClientProcess:
        command = self.network.command(host)
        return self._nodes.client(host, self._hosts, command=command, deadline_s=deadline_s)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.lower())
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with network(request.param, HOSTS) as on, contextlib.ExitStack() as ends:
        yield Cluster(Nodes(tmp_path, ends), on)


def test_a_host_is_cut_off_and_comes_back(cluster: Cluster) -> None:
    """All go on, each with those that it reaches; what they read is right."""
    jobs = [cluster.job(host, 0.5) for host in range(HOSTS)]
    for job in jobs:
        job.epoch()
    for job in jobs:  # 0.5 s is little on a busy machine: what was lost in the first is there now
        job.epoch()
    cluster.network.cut(2)
    for job in jobs:
        job.begin()
    for job in jobs:
        assert sorted(job.result()["ids"]) == list(range(EXAMPLES))
    cluster.network.mend(2)
    wait_until(lambda: [job.epoch()["alive"] for job in jobs] == [HOSTS] * HOSTS)
    assert min(job.epoch()["misses"] for job in jobs) == 0


def test_a_slow_network_costs_time_alone(cluster: Cluster) -> None:
    bytes_per_s = 400_000
    jobs = [cluster.job(host, 60.0) for host in (0, 1)]
    assert [job.epoch()["misses"] for job in jobs] == [EXAMPLES, 0]
    for host in range(HOSTS):
        cluster.network.limit(host, bytes_per_s)
    began = time.monotonic()
    found = jobs[1].epoch()
    assert found["misses"] == 0
    away = found["peer_hits"] / (HOSTS - 1)  # of the two others, at a time
    assert away > 0
    assert time.monotonic() - began > 0.5 * away * 7_200 / bytes_per_s
