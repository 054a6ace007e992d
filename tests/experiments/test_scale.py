"""The simulation of clusters: what it must add up to, its page, and a run held against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import stoker
from experiments.scale.__main__ import main
from experiments.scale.page import PAGE, with_tables
from experiments.scale.simulation import Cluster, loss_of, predicted_reads, traffic_of
from stoker.schedule.owners import Member, OwnerMap, OwnerSnapshot
from stoker.stages.cache import CacheStage


def test_what_is_simulated_adds_up() -> None:
    dealt, undealt = (
        traffic_of(Cluster(8, d, 64), steps=4, examples=20_000) for d in (True, False)
    )
    assert undealt.remote == pytest.approx(7 / 8, abs=0.02)
    assert dealt.remote < 0.1
    assert undealt.requests == pytest.approx(7, abs=0.1)
    assert dealt.requests < 3
    assert undealt.items * undealt.requests == pytest.approx(64 * undealt.remote)
    assert dealt.hottest < undealt.hottest


def test_a_loss_costs_a_node_s_part() -> None:
    loss = loss_of(8, examples=20_000)
    assert 1 / 8 - 0.02 < loss.lost <= loss.read_again < 1 / 8 + 0.03
    assert loss.back < 0.02


def test_the_page_has_the_tables_of_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text


def test_the_quick_one_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    said = capsys.readouterr().out
    assert "| 30 | 1 | 256 | yes |" in said
    assert "read again" in said


class Stores:
    """The parts of two nodes, read by a rank on one of them, which counts where it finds what."""

    def __init__(self, owners: OwnerMap, examples: int) -> None:
        kept = owners.owners(np.arange(examples))
        self.parts = [set(np.flatnonzero(kept == node).tolist()) for node in range(len(owners))]
        self.reads = [0] * len(owners)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> int:
        (node,) = [at for at, part in enumerate(self.parts) if index in part]
        self.reads[node] += 1
        return index


class Nodes:
    """Two nodes of unequal memory; this rank is on the second."""

    node = "b"

    def owner_map(self) -> OwnerMap:
        return OwnerMap.of([Member("a", "", 2), Member("b", "", 3)], 1)


def test_a_run_reads_where_it_is_said_to() -> None:
    stores = Stores(Nodes().owner_map(), 300)
    built = stoker.from_dataset(stores, seed=4).shuffle().shard(rank=0, world=1, near="cache")
    chain = built.cache("1MiB").batch(8).workers(0).chain
    stages = [replace(s, cluster=Nodes()) if isinstance(s, CacheStage) else s for s in chain.stages]
    pinned = OwnerSnapshot.of(Nodes().owner_map(), (1,))
    (predicted,) = predicted_reads(pinned, 300, seed=4, epoch=0, batch=8, dealt=True)
    assert [len(batch) for batch in stoker.Pipeline(replace(chain, stages=tuple(stages)))]
    again = 8  # the first example is made so often again, to see whether it is random
    home, away = stores.reads[1], stores.reads[0]
    assert home + away - again == sum(predicted)
    assert (home, away) in {
        (predicted[0] + again, predicted[1]),
        (predicted[0], predicted[1] + again),
    }
