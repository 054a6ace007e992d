"""Nodes that die, freeze, return and join: every example comes once and is right, whatever does.

Real cache servers, real clients. Where reads of storage are counted, clients wait for a cache
server however long it takes: how fast this machine is does not matter then.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import EXAMPLES, ClientProcess, Nodes

from patience import wait_until
from scripts import reserved_port


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with contextlib.ExitStack() as ends:
        yield Nodes(tmp_path, ends)


def until_there(client: ClientProcess, which: str) -> None:
    """Go through epochs until three servers are counted; none before costs a read."""

    def there() -> bool:
        found = client.epoch()
        assert found[which] == 3 or found["misses"] == 0
        return bool(found[which] == 3)

    wait_until(there)


@pytest.mark.full
def test_a_cluster_reads_storage_once_and_a_lost_node_costs_what_it_had(nodes: Nodes) -> None:
    for _ in range(3):
        nodes.keep()
    clients = [nodes.client(home) for home in (0, 1)]
    first = [client.epoch() for client in clients]
    assert [found["misses"] for found in first] == [EXAMPLES, 0]
    assert first[1]["peer_hits"] > 0
    again = [client.epoch() for client in clients]
    assert [found["misses"] for found in again] == [0, 0]
    assert {found["members"] for found in again} == {3}

    nodes.servers[2].lose_all()
    found = clients[0].epoch()
    assert 0 < found["misses"] < EXAMPLES
    assert found["alive"] == 2
    assert clients[1].epoch()["misses"] == 0

    # Back, and empty: the others still have all of it, and bring it what is its own.
    nodes.keep(nodes.servers[2].address)
    until_there(clients[0], "alive")
    assert [client.epoch()["misses"] for client in clients] == [0, 0]


@pytest.mark.full
def test_a_frozen_server_costs_time_alone(nodes: Nodes) -> None:
    for _ in range(2):
        nodes.keep()
    client = nodes.client(0, deadline_s=0.5)
    client.epoch()
    nodes.servers[1].send(signal.SIGSTOP)
    client.epoch()
    client.epoch()
    nodes.servers[1].send(signal.SIGCONT)
    client.epoch()


@pytest.mark.full
def test_a_server_is_killed_in_the_middle_of_an_epoch(nodes: Nodes) -> None:
    for _ in range(3):
        nodes.keep()
    clients = [nodes.client(home, rank=home, world=2) for home in (0, 1)]
    for number in range(3):
        for client in clients:
            client.begin()
        if number == 1:
            nodes.servers[2].end(signal.SIGKILL)
        ids = [each for client in clients for each in client.result()["ids"]]
        assert sorted(ids) == list(range(EXAMPLES))


class Openers:
    """Nodes that open the cache one after another, each with its part of every epoch.

    Each goes through its part of the first epoch before the next node opens.
    """

    def __init__(self, nodes: Nodes, hosts: list[str], **told: Any) -> None:
        self._clients: list[ClientProcess] = []
        self.first_misses = 0
        for home, address in enumerate(hosts):
            nodes.keep(address)
            client = nodes.client(home, hosts, rank=home, world=len(hosts), **told)
            client.begin()
            self.first_misses += client.result()["misses"]
            self._clients.append(client)

    def begin(self) -> None:
        for client in self._clients:
            client.begin()

    def result(self) -> dict[str, int]:
        """Return the sums of the epoch, in which every example came once, and was right."""
        found = [client.result() for client in self._clients]
        assert sorted(each for one in found for each in one["ids"]) == list(range(EXAMPLES))
        return {name: sum(one[name] for one in found) for name in ("misses", "members")}

    def epoch(self) -> dict[str, int]:
        self.begin()
        return self.result()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The addresses of four nodes that are not up yet."""
    with contextlib.ExitStack() as held:
        yield [f"127.0.0.1:{held.enter_context(reserved_port())}" for _ in range(4)]


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_nodes_that_open_one_after_another_read_storage_once(
    nodes: Nodes, hosts: list[str], workers: int
) -> None:
    """Those that are there hear of each that comes, and find what was kept before it came."""
    opened = Openers(nodes, hosts, workers=workers)
    assert opened.first_misses == EXAMPLES
    for _ in range(3):
        assert opened.epoch() == {"misses": 0, "members": len(hosts) ** 2}


@pytest.mark.full
@pytest.mark.parametrize("lost", range(4))
def test_a_node_is_killed_that_others_ask_for_what_it_had_before_they_came(
    nodes: Nodes, hosts: list[str], lost: int
) -> None:
    opened = Openers(nodes, hosts)
    opened.begin()
    nodes.servers[lost].lose_all()
    opened.result()
    # The job on its host keeps what it reads where nobody else finds it, so each example may be
    # read a few times more.
    wait_until(lambda: not opened.epoch()["misses"])


@pytest.mark.full
def test_a_node_freezes_that_others_ask_for_what_it_had_before_they_came(
    nodes: Nodes, hosts: list[str]
) -> None:
    """It costs time alone: its answers would come late, and storage is read instead."""
    opened = Openers(nodes, hosts, deadline_s=0.5)
    nodes.servers[0].send(signal.SIGSTOP)
    opened.epoch()
    nodes.servers[0].send(signal.SIGCONT)
    opened.epoch()


@pytest.mark.full
def test_a_node_joins_that_was_named_from_the_beginning(nodes: Nodes) -> None:
    for _ in range(3):
        nodes.keep()
    late = nodes.servers[2]
    late.lose_all()
    clients = [nodes.client(0), nodes.client(None)]
    assert [client.epoch()["misses"] for client in clients] == [EXAMPLES, 0]
    nodes.keep(late.address)
    until_there(clients[0], "members")
    assert [client.epoch()["misses"] for client in clients] == [0, 0]


@pytest.mark.full
def test_a_server_ends_by_ctrl_c_and_leaves_what_it_kept(nodes: Nodes) -> None:
    server = nodes.keep()
    client = nodes.client(0)
    client.epoch()
    client.end()
    assert server.end(signal.SIGINT) == 130
    nodes.servers.pop()
    nodes.keep(server.address)
    assert nodes.client(0).epoch()["misses"] == 0
