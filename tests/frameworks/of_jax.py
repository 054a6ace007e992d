"""The cells of JAX, in a loop with Flax and Optax; see cells.py."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import BATCH, EPOCHS, EXAMPLES, RANK, WORLD, Seen, check_epochs, check_ranks, make, times
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stoker


class Net(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros(()))

    def __call__(self, ids: Any) -> Any:
        return (self.weight * ids).mean()


@nnx.jit
def train_step(net: Net, optimizer: nnx.Optimizer, ids: Any) -> Any:
    loss, slopes = nnx.value_and_grad(lambda net: net(ids))(net)
    optimizer.update(net, slopes)
    return loss


def of_jax_ranks(seen: Seen) -> list[Seen]:
    """Return what each process has seen; all have taken equally many steps of equal batches."""
    gathered = multihost_utils.process_allgather(np.array([[at, *ids] for at, ids in seen]))
    return [[(row[0], row[1:]) for row in each.tolist()] for each in gathered]


class Loop:
    """A training loop; several processes share one model."""

    def __init__(self, kind: str, use: str) -> None:
        if use == "2 processes" and not jax.distributed.is_initialized():
            at = f"127.0.0.1:{os.environ['MASTER_PORT']}"
            jax.distributed.initialize(at, WORLD, RANK)
        self.over_all = NamedSharding(
            Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")
        )
        self.train = make(kind, "JAX", use)
        if isinstance(self.train, stoker.Pipeline):
            self.train = self.train.to_jax(self.over_all)
        self.net = Net()
        self.seen: Seen = []
        self.steps = len(self.train) * EPOCHS
        rate = optax.cosine_onecycle_schedule(self.steps, 0.1)
        self.optimizer = nnx.Optimizer(self.net, optax.sgd(rate), wrt=nnx.Param)

    def batches(self) -> Any:
        for batch in self.train:
            ids = batch["ids"]
            if isinstance(ids, jax.Array):
                yield ids
            else:  # of a loader
                yield jax.make_array_from_process_local_data(self.over_all, ids.numpy())

    def run(self, epoch: int, stop: int | None = None) -> None:
        for number, ids in enumerate(self.batches(), 1):
            self.seen.append((epoch, own_part(ids)))
            train_step(self.net, self.optimizer, ids)
            if number == stop:
                break


def own_part(ids: Any) -> list[int]:
    """Return what this process has of a global array."""
    return [int(i) for shard in ids.addressable_shards for i in np.asarray(shard.data)]


def fit(kind: str) -> None:
    loop = Loop(kind, "fit")
    for epoch in range(EPOCHS):
        loop.run(epoch)
    check_epochs(loop.seen, times(kind))


def validate(kind: str) -> None:
    loop = Loop(kind, "validate")
    score = nnx.jit(lambda net, ids: net(ids))
    found = []
    for ids in loop.batches():
        score(loop.net, ids)
        found += own_part(ids)
    assert sorted(found) == sorted(list(range(EXAMPLES)) * times(kind))


def resume(kind: str) -> None:
    first = Loop(kind, "resume")
    first.run(0, stop=4)
    saved = {
        "loader": first.train.state_dict(),
        "net": jax.tree.map(np.asarray, nnx.state(first.net)),
    }
    Path("checkpoint").write_bytes(pickle.dumps(saved))
    rest = Loop(kind, "resume")
    saved = pickle.loads(Path("checkpoint").read_bytes())
    nnx.update(rest.net, saved["net"])
    rest.train.load_state_dict(saved["loader"])
    rest.run(0)
    rest.run(1)
    check_epochs(first.seen + rest.seen, times(kind))


def two_processes(kind: str) -> None:
    loop = Loop(kind, "2 processes")
    for epoch in range(EPOCHS):
        loop.run(epoch)
    assert all(len(ids) == BATCH for _, ids in loop.seen)
    check_ranks(loop.seen, times(kind), of_jax_ranks)


def schedule(kind: str) -> None:
    loop = Loop(kind, "schedule")
    for epoch in range(EPOCHS):
        loop.run(epoch)
    assert loop.steps == EPOCHS * (6 if kind == "cached" else 10)
    assert int(loop.optimizer.step[...]) == loop.steps
