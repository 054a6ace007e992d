"""Keras: ``fit`` on a pipeline, with the backends of torch and JAX, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import python

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SETUP = """
import keras
import numpy as np

import stoker
from stoker.keras import AcknowledgeBatches, PipelineDataset

N, SIZE = 44, 8
inputs = np.arange(N, dtype=np.float32)[:, None] / N


def pipeline():
    return stoker.from_arrays(inputs, inputs * 2, seed=0).shuffle().batch(SIZE)


def model():
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=False)
    return made


def ids(batch):
    return np.rint(np.asarray(batch[0])[:, 0] * N).astype(int).tolist()


class Seen(PipelineDataset):
    '''Notes what Keras is given, once for each batch.'''

    def __init__(self, pipeline):
        super().__init__(pipeline)
        self.given = []

    def __getitem__(self, index):
        looked_at = bool(self._looked_at)
        batch = super().__getitem__(index)
        if not looked_at:
            self.given.append(ids(batch))
        return batch


def expected(epochs):
    plain = pipeline()
    return [[ids(batch) for batch in plain] for _ in range(epochs)]


def flat(lists):
    return [item for each in lists for item in each]
"""


EPOCHS_VALIDATION_AND_CALLBACKS = """
data, val = Seen(pipeline()), Seen(pipeline())
steps = []
note = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: steps.append((data.pipeline.epoch, batch)),
)
made = model()
history = made.fit(
    data, epochs=3, validation_data=val, verbose=0, callbacks=[note]
).history
assert len(history["val_loss"]) == 3
assert data.given == flat(expected(3))
assert val.given == flat(expected(3))
assert steps == [(epoch, batch) for epoch in range(3) for batch in range(6)]
assert data.pipeline.epoch == 3
assert data.pipeline.counts.uses == 3 * N

ordered = stoker.from_arrays(inputs, seed=0).batch(SIZE)
predicted = made.predict(PipelineDataset(ordered), verbose=0)
assert np.allclose(predicted, made.predict(inputs, verbose=0), atol=1e-5)
alone = keras.Sequential([keras.layers.Dense(1)])  # built by the first batch that it sees
predicted = alone.predict(PipelineDataset(ordered), verbose=0)
assert np.allclose(predicted, alone.predict(inputs, verbose=0), atol=1e-5)
losses = [made.evaluate(PipelineDataset(pipeline()), verbose=0) for _ in range(2)]
assert losses[0] == losses[1]

# Echoing, one batch an epoch, steps_per_epoch, several steps in a call.
echoed = Seen(pipeline().echo(2).steps(5))
made.fit(echoed, epochs=2, verbose=0)
assert len(echoed.given) == 10 and echoed.pipeline.epoch == 2
one = Seen(stoker.from_arrays(inputs, inputs, seed=0).shuffle().batch(N))
model().fit(one, epochs=3, verbose=0)
assert len(one.given) == 3 and one.given[0] != one.given[1]
some = Seen(pipeline())
made.fit(some, epochs=3, steps_per_epoch=2, verbose=0)
assert some.given == expected(1)[0]
"""

RESUMED_EXACTLY = """
for STOP in (6, 9):  # between epochs, and within one
    class Stop(keras.callbacks.Callback):
        '''Saves what was trained on after some steps, and stops there.'''

        done = 0

        def __init__(self, train):
            super().__init__()
            self.train = train

        def on_train_batch_end(self, batch, logs=None):
            self.done += 1
            if self.done == STOP:
                self.model.save("model.keras")
                self.state = self.train.state_dict()
                raise KeyboardInterrupt

    whole = model()
    whole.fit(PipelineDataset(pipeline()), epochs=4, verbose=0)

    data = Seen(pipeline())
    stop = Stop(data.pipeline)
    try:
        model().fit(data, epochs=4, verbose=0, callbacks=[AcknowledgeBatches(data), stop])
    except KeyboardInterrupt:
        pass
    assert data.given[:STOP] == flat(expected(2))[:STOP]

    resumed = Seen(pipeline())
    resumed.pipeline.load_state_dict(stop.state)
    again = keras.models.load_model("model.keras")
    ends = []
    epoch_ends = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(len(resumed.given))
    )
    again.fit(
        resumed,
        initial_epoch=resumed.pipeline.epoch,
        epochs=4,
        verbose=0,
        callbacks=[AcknowledgeBatches(resumed), epoch_ends],
    )
    assert resumed.given == flat(expected(4))[STOP:]
    assert ends == [24 - STOP - 6 * left for left in reversed(range(len(ends)))]
    for mine, theirs in zip(again.get_weights(), whole.get_weights(), strict=True):
        assert np.allclose(mine, theirs, atol=1e-6), (mine, theirs)
"""

# A callback may move the pipeline, and not iterate over it.
MOVED = """
class Back(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and not train.epoch:
            train.set_epoch(1)

train = pipeline()
data = Seen(train)
model().fit(data, epochs=1, callbacks=[Back()], verbose=0)
first, second = expected(2)
assert data.given == first[:3] + second[:3], data.given

class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        list(train)

try:
    model().fit(PipelineDataset(train), epochs=1, callbacks=[Looks()], verbose=0)
except RuntimeError as error:
    assert "a second iterator over its pipeline has begun" in str(error), error
else:
    raise AssertionError("nothing was said")
"""

REFUSED = """
import warnings

def refused(kind, what, make):
    try:
        PipelineDataset(make())
    except kind as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)

refused(TypeError, "stoker.echo(loader)", lambda: [1, 2])
refused(ValueError, ".batch(n)", lambda: stoker.from_arrays(inputs, seed=0))
refused(TypeError, ".steps(n)", lambda: pipeline().echo("auto"))
assert len(PipelineDataset(pipeline().echo("auto").steps(7))) == 7
keras.backend.backend = lambda: "tensorflow"
refused(ValueError, "KERAS_BACKEND", pipeline)
"""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_fit_trains_resumes_and_refuses(backend: str, tmp_path: Path) -> None:
    """In one process, as Keras takes long to import."""
    script = tmp_path / "script.py"
    script.write_text(SETUP + EPOCHS_VALIDATION_AND_CALLBACKS + RESUMED_EXACTLY + MOVED + REFUSED)
    done = python(
        "-W",
        "error",
        "-W",
        "ignore:__array__:DeprecationWarning",
        script,
        cwd=tmp_path,
        KERAS_BACKEND=backend,
        JAX_PLATFORMS="cpu",
        KERAS_HOME=".",
    )
    assert done.returncode == 0, done.stderr
