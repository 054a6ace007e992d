"""Echoing that follows the stall across ranks: real processes, gloo, unequal latency."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from scripts import REAL_WORLDS, ranks, told_by

TRAINED = """
    data = stoker.from_dataset(Slow(480), seed=3)
    train = data.shuffle().shard().echo().random_map(jitter, on="x").batch(8).workers(2).to_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    told = {"printed": str(train), "steps": [], "seen": []}
    for epoch in range(2):
        steps, seen = 0, []
        for batch in train:
            loss = model(batch["x"]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            steps += 1
            seen += batch["id"].tolist()
        told["steps"].append(steps)
        told["seen"].append(seen)
    told["parameters"] = [p.detach().flatten().tolist() for p in model.parameters()]
    told["record"] = train.record()["echo"]["epochs"]

    # And exactly so again, from the record.
    again = data.shuffle().shard().echo().random_map(jitter, on="x").batch(8).workers(1).to_torch()
    again = again.replay(train.record())
    told["again"] = [i for batch in again for i in batch["id"].tolist()] == told["seen"][0]
"""


@pytest.mark.full
@pytest.mark.parametrize("world", REAL_WORLDS)
def test_ranks_take_equal_steps_by_equal_factors(tmp_path: Path, world: int) -> None:
    told = told_by(tmp_path, world, TRAINED)
    first = told[0]
    assert f"planned: {world} ranks agree every 64 batches" in first["printed"]
    for each in told:
        assert each["steps"] == first["steps"]
        assert each["parameters"] == first["parameters"]  # bit for bit
        assert each["record"] == first["record"]  # the same factors, at the same steps
        assert each["again"]
    for epoch in range(2):
        parts = [set(each["seen"][epoch]) for each in told]
        assert sum(map(len, parts)) == 480  # disjoint, and whole
        assert len(set().union(*parts)) == 480
        for each in told:
            uses = [each["seen"][epoch].count(i) for i in parts[told.index(each)]]
            assert max(uses) <= 8
            seen = each["seen"][epoch]
            batches = [seen[at : at + 8] for at in range(0, len(seen) - 8, 8)]  # without the last
            for number, batch in enumerate(batches):
                distance = 2 + 6 * min(number, 48) // 48
                rested = batches[max(0, number - distance + 1) : number]
                assert not set(batch) & set(itertools.chain(*rested))


DESTROYED = """
    train = stoker.from_dataset(Slow(480), seed=3).shard().echo().batch(8).workers(1)
    batches(train)
    begun = iter(train)
    next(begun)
    dist.barrier()
    dist.destroy_process_group()
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    say(json.dumps([name for name in names if "gloo" in name]))
    for unfinished in (begun, train):
        try:
            list(unfinished)
        except (stoker.StokerError, ValueError) as error:
            say(str(error))
"""


@pytest.mark.full
def test_the_group_ends_when_the_script_destroys_it(tmp_path: Path) -> None:
    # Not as the interpreter ends: torch's threads, still running then, may take it down.
    with ranks(tmp_path, 2, DESTROYED) as running:
        for process in running:
            assert json.loads(process.line()) == []
            assert "the process group is gone" in process.line()
            assert ".shard() after init_process_group" in process.line()
            assert process.finish()[0] == 0


SKIPPED = """
    rotten = range(0, 400, 9) if RANK == 1 else ()
    told = {}
    data = stoker.from_dataset(Slow(400, rotten), seed=3, max_errors=60)
    told["skipped"] = batches(data.shard().echo().batch(8).workers(2))
    told["behind"] = batches(
        data.shard().echo().random_map(lambda x, rng: x, on="x").batch(8).workers(2)
    )
    good = stoker.from_dataset(Slow(400), seed=3)
    told["filtered"] = batches(
        good.shard().filter(lambda i: i % 3 or RANK, on="id").echo().batch(8).steps(12)
    )
    stream = lambda: ({"id": i, "x": np.zeros(3)} for i in range(400))
    told["streamed"] = batches(
        stoker.from_iterable(stream, seed=3).shard().echo().batch(8).steps(12)
    )
    sampler = torch.utils.data.DistributedSampler(Slow(100), seed=1)
    loader = torch.utils.data.DataLoader(Slow(100), batch_size=8, sampler=sampler)
    told["loaded"] = batches(stoker.echo(loader, seed=1))

    told["refused"] = []
    for chain in (
        good.shard().filter(bool).echo().batch(8),
        good.shard(remainder="uneven").echo().batch(8),
        stoker.from_iterable(stream, seed=3).shard().echo().batch(8),
        stoker.from_dataset(Slow(400 + RANK), seed=3).shard(rank=0, world_size=1).echo().batch(8),
    ):
        try:
            next(iter(chain))
        except ValueError as error:
            told["refused"].append(str(error))
"""


@pytest.mark.full
def test_what_is_left_out_leaves_steps_equal(tmp_path: Path) -> None:
    told = told_by(tmp_path, 2, SKIPPED)
    for kind in ("skipped", "behind", "filtered", "streamed", "loaded"):
        assert len({len(each[kind]) for each in told}) == 1, kind
    assert set(told[1]["skipped"][:-1]) == {8}  # what failed is made up for by others
    assert len(told[0]["filtered"]) == len(told[0]["streamed"]) == 12
    for each in told:
        assert len(each["refused"]) == 4, each["refused"]
        assert all("\n" not in text for text in each["refused"])
        assert all(".steps(n)" in text for text in each["refused"])
        assert "between 400 and 401 fresh items" in each["refused"][-1]


LEFT = """
    data = stoker.from_dataset(Slow(100_000), seed=3)
    train = data.shard().echo().batch(8)
    try:
        for step, batch in enumerate(train):
            if RANK == 1 and step == 20:
                say("here")
                time.sleep(60)
    except stoker.StokerError as error:
        say(str(error))
    say(str(left()["threads"]))
    os._exit(0)  # the default group has a rank that is gone
"""


@pytest.mark.full
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, LEFT) as (survivor, victim):
        assert victim.line() == "here"
        os.kill(victim.pid, signal.SIGKILL)
        assert "ranks could not agree on an echoing factor" in survivor.line()
        assert survivor.line() == "[]"
