"""A cache over many nodes, simulated: who keeps what, who asks whom, what a loss costs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schedule.dealing import dealt_to
from stoker.schedule.owners import Member, OwnerMap, OwnerSnapshot
from stoker.schedule.selection import Selection, Share

ROWS = Path(__file__).parents[1] / "results" / "scale.json"
EXAMPLES = 4_000_000
_SEED = 19
_ASKED = 200
"""Examples whose second owner is looked at."""


@dataclass(frozen=True)
class Cluster:
    """A cluster to simulate.

    Attributes:
        nodes: how many; `ranks_each`: the ranks on each.
        batch: examples a rank has in a step.
        dealt: whether the global batch is dealt to where the cache is.
        weights: the nodes' memories, repeated over all nodes.
    """

    nodes: int
    dealt: bool
    batch: int = 256
    ranks_each: int = 1
    weights: tuple[int, ...] = (1,)

    def owner_map(self) -> OwnerMap:
        """Return the map of its nodes."""
        weights = (self.weights[i % len(self.weights)] for i in range(self.nodes))
        return OwnerMap.of((Member(f"n{i:04}", "", w << 30) for i, w in enumerate(weights)), 1)

    def pinned(self) -> OwnerSnapshot:
        """Return the map with the ranks on their nodes."""
        ranks = tuple(i // self.ranks_each for i in range(self.nodes * self.ranks_each))
        return OwnerSnapshot.of(self.owner_map(), ranks)


@dataclass(frozen=True)
class Traffic:
    """What a step asks of the cluster, as the mean over steps and ranks.

    Attributes:
        cluster: what was simulated.
        fullest: items of the node with most, over what its memory calls for.
        remote: share of a rank's examples that other nodes own.
        requests: nodes that a rank asks in a step; `items`: examples in each of these requests.
        hottest: what the node that is asked most serves in a step, over what a node consumes.
        order_ms: what a rank takes to tell its examples of a step.
    """

    cluster: Cluster
    fullest: float
    remote: float
    requests: float
    items: float
    hottest: float
    order_ms: float


@dataclass(frozen=True)
class Loss:
    """What the loss of one node costs, in parts of the data.

    Attributes:
        nodes: in the cluster before.
        lost: what the node kept.
        moved: what changed owners though its owner is still there.
        read_again: what has to come from storage: what was lost, and of what moved what is not with
            the second owner, who is asked before storage.
        back: what comes from storage as the node comes back, empty: of its part what is not with
            the second owner.
    """

    nodes: int
    lost: float
    moved: float
    read_again: float
    back: float


def traffic_of(cluster: Cluster, *, steps: int, examples: int = EXAMPLES) -> Traffic:
    """Simulate steps of an epoch over a cluster."""
    pinned = cluster.pinned()
    nodes, world = pinned.nodes, len(pinned.ranks)
    counts = np.bincount(pinned.owners(np.arange(examples)), minlength=cluster.nodes)
    weights = np.array([weight for _, weight in pinned.members])
    fair = weights / weights.sum() * examples
    order = Selection(is_shuffled=True).rank_order(examples, _SEED, 0)
    size = world * cluster.batch
    remote, requests, hottest = [], [], []
    for step in range(min(steps, examples // size)):
        owners = pinned.owners(order.span(step * size, (step + 1) * size))
        ranks = _ranks_of(owners, nodes, dealt=cluster.dealt)
        away = nodes[ranks] != owners
        remote.append(float(away.mean()))
        requests.append(len(np.unique(ranks[away] * cluster.nodes + owners[away])) / world)
        served = np.bincount(owners[away], minlength=cluster.nodes)
        hottest.append(float(served.max()) / (cluster.batch * cluster.ranks_each))
    asked = float(np.mean(requests))
    return Traffic(
        cluster=cluster,
        fullest=float((counts / fair).max()),
        remote=float(np.mean(remote)),
        requests=asked,
        items=float(np.mean(remote)) * cluster.batch / asked if asked else 0.0,
        hottest=float(np.mean(hottest)),
        order_ms=_order_ms(cluster, pinned, steps, examples),
    )


def _ranks_of(
    owners: NDArray[np.int32], nodes: NDArray[np.int64], *, dealt: bool
) -> NDArray[np.int64]:
    """Return which rank gets each place of a global batch."""
    world = len(nodes)
    ranks = np.arange(len(owners)) % world
    if dealt:
        for rank in range(world):
            ranks[dealt_to(rank, nodes, owners)] = rank
    return ranks


def _order_ms(cluster: Cluster, pinned: OwnerSnapshot, steps: int, examples: int) -> float:
    share = Share(0, len(pinned.ranks), uneven=False, anew=True, is_dealt=cluster.dealt)
    order = Selection(True, share).rank_order(examples, _SEED, 0, pinned, cluster.batch)
    times_s = []
    for step in range(min(steps, len(order) // cluster.batch)):
        began = time.perf_counter()
        order.span(step * cluster.batch, (step + 1) * cluster.batch)
        times_s.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times_s))


def loss_of(nodes: int, *, examples: int = EXAMPLES) -> Loss:
    """Take one node out of a cluster of equal nodes, and put it back, empty."""
    before = Cluster(nodes, dealt=False).owner_map()
    gone = nodes // 2
    after = OwnerMap.of((m for i, m in enumerate(before.members) if i != gone), 2)
    numbers = np.array([i for i in range(nodes) if i != gone])
    indices = np.arange(examples)
    first, second = before.owners(indices), numbers[after.owners(indices)]
    lost, moved = first == gone, (first != gone) & (first != second)

    def not_found(which: NDArray[np.bool_], owners: OwnerMap, holds: NDArray[Any]) -> float:
        """Return the share that is neither with its owner nor with the next."""
        found = np.flatnonzero(which)
        if not len(found):
            return 0.0
        asked = np.random.default_rng(0).choice(found, min(_ASKED, len(found)), replace=False)
        names = [owners.members[i].name for i in range(len(owners))]
        at = [before.members[holds[i]].name for i in asked]
        missing = [
            name not in [names[n] for n in owners.ranking(int(i))[:2]]
            for i, name in zip(asked, at, strict=True)
        ]
        return float(which.mean() * np.mean(missing))

    return Loss(
        nodes=nodes,
        lost=float(lost.mean()),
        moved=float(moved.mean()),
        read_again=float(lost.mean()) + not_found(moved, after, first),
        back=not_found(lost, before, second),
    )


def predicted_reads(
    pinned: OwnerSnapshot, examples: int, *, seed: int, epoch: int, batch: int, dealt: bool
) -> list[tuple[int, int]]:
    """Return what each rank of a run finds on its own node and on others, in one epoch.

    Of a run whose data fits and whose nodes all stay, from its second epoch on, these are its hits
    at home and at peers, to the item.
    """
    found = []
    for rank, node in enumerate(pinned.ranks):
        share = Share(rank, len(pinned.ranks), uneven=False, anew=True, is_dealt=dealt)
        order = Selection(True, share).rank_order(examples, seed, epoch, pinned, batch)
        at_home = int((pinned.owners(order.span(0, len(order))) == node).sum())
        found.append((at_home, len(order) - at_home))
    return found


def clusters(*, quick: bool) -> list[Cluster]:
    """Return what is simulated."""
    if quick:
        return [Cluster(nodes, dealt) for nodes in (2, 10, 30) for dealt in (False, True)]
    return [
        *(Cluster(nodes, False) for nodes in (2, 4, 10, 30, 100, 300, 1000)),
        *(Cluster(nodes, True) for nodes in (2, 4, 10, 30, 100, 300, 1000)),
        *(Cluster(10, True, batch) for batch in (16, 32, 64, 128, 512, 1024, 2048)),
        *(Cluster(100, dealt, ranks_each=8) for dealt in (False, True)),
        *(Cluster(4, dealt, weights=(1, 2, 3, 4)) for dealt in (False, True)),
    ]


def simulate(*, quick: bool) -> tuple[list[Traffic], list[Loss]]:
    """Simulate everything."""
    steps, examples = (3, 400_000) if quick else (10, EXAMPLES)
    sizes = (4, 10) if quick else (4, 10, 100, 1000)
    traffic = [traffic_of(each, steps=steps, examples=examples) for each in clusters(quick=quick)]
    return traffic, [loss_of(nodes, examples=examples) for nodes in sizes]


def read_rows(path: Path = ROWS) -> tuple[list[Traffic], list[Loss]]:
    """Read what the command wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    traffic = []
    for row in rows["traffic"]:
        weights = tuple(row["cluster"]["weights"])
        cluster = Cluster(**{**row["cluster"], "weights": weights})
        traffic.append(Traffic(**{**row, "cluster": cluster}))
    return traffic, [Loss(**row) for row in rows["losses"]]
