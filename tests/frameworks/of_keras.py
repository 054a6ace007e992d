"""The cells of Keras 3, with the backend of JAX; see cells.py. (That of PyTorch: test_keras.py.)"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "KERAS_HOME": "."}

import jax
import keras
import pytest
from cells import (
    EPOCHS,
    EXAMPLES,
    RANK,
    WORLD,
    Seen,
    check_epochs,
    check_ranks,
    make,
    times,
    undivided,
)
from of_jax import of_jax_ranks, own_part

import stoker
from stoker.keras import AcknowledgeBatches, PipelineDataset


class Net(keras.Model):
    """Remembers what it was trained on."""

    def __init__(self, rate: Any = 0.1) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.seen: Seen = []
        self.validated: list[int] = []
        self.at = 0
        self.compile(keras.optimizers.SGD(rate), run_eagerly=True)

    def call(self, x: Any) -> Any:
        return self.layer(keras.ops.cast(x["ids"], "float32")[:, None])

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **given: Any) -> Any:
        return keras.ops.mean(y_pred) * 0

    def train_step(self, state: Any, data: Any) -> Any:
        self.seen.append((self.at, numbers(data["ids"])))
        return super().train_step(state, data)

    def test_step(self, state: Any, data: Any) -> Any:
        self.validated += numbers(data["ids"])
        return super().test_step(state, data)


def numbers(ids: Any) -> list[int]:
    return own_part(ids) if isinstance(ids, jax.Array) else ids.tolist()


class Epochs(keras.callbacks.Callback):
    """Tells the model which epoch it is."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.at = epoch


def data(kind: str, use: str) -> PipelineDataset:
    made = make(kind, "Keras 3", use)
    return PipelineDataset(made if isinstance(made, stoker.Pipeline) else stoker.from_loader(made))


def trained(train: Any, *callbacks: Any, rate: Any = 0.1) -> Net:
    net = Net(rate)
    net.fit(train, epochs=EPOCHS, verbose=0, callbacks=[Epochs(), *callbacks])
    return net


def fit(kind: str) -> None:
    check_epochs(trained(data(kind, "fit")).seen, times(kind))


def validate(kind: str) -> None:
    net = Net()
    net.evaluate(data(kind, "validate"), verbose=0)
    assert sorted(net.validated) == sorted(list(range(EXAMPLES)) * times(kind))


class Stopped(Exception):
    """Training ends here, with a checkpoint."""


class Stop(keras.callbacks.Callback):
    def __init__(self, train: Any) -> None:
        super().__init__()
        self.train = train

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.model.seen) == 4:
            raise Stopped(self.train.state_dict(), self.model.seen)


def resume(kind: str) -> None:
    first = data(kind, "resume")
    try:
        trained(first, AcknowledgeBatches(first), Stop(first.pipeline))
    except Stopped as stopped:
        saved, seen = stopped.args
    rest = data(kind, "resume")
    rest.load_state_dict(saved)
    check_epochs(seen + trained(rest).seen, times(kind))


def two_processes(kind: str) -> None:
    distributed()
    check_ranks(trained(data(kind, "2 processes")).seen, times(kind), of_jax_ranks)


@functools.cache
def distributed() -> None:
    """Have Keras share its work between the processes, once."""
    keras.distribution.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, RANK)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


def schedule(kind: str) -> None:
    train = data(kind, "schedule")
    total = len(train) * EPOCHS
    net = trained(train, rate=keras.optimizers.schedules.CosineDecay(0.1, total))
    assert total == EPOCHS * (6 if kind == "cached" else 10)
    assert int(net.optimizer.iterations) == total
    assert float(net.optimizer.learning_rate) == pytest.approx(0)


# -- what is not in the matrix


def unsharded(kind: str) -> None:
    distributed()
    trained(PipelineDataset(undivided(kind)))
