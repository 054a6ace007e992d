"""For Keras 3: a pipeline as the ``PyDataset`` that ``fit``, ``evaluate`` and ``predict`` take.

Keras asks a ``PyDataset`` for batches by number, in an order that it shuffles by itself. A pipeline
has its own order, so here the number is ignored: the next batch comes. Before Keras trains a model
that is not built yet, it reads one batch for its shapes, and begins again; that batch is kept, and
is the first training batch.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import FrameType
from typing import Any

import keras

from stoker.chain.iterator import MOVED, PipelineIterator
from stoker.pipeline import Pipeline

_BACKENDS = ("torch", "jax")
_PyDataset: Any = keras.utils.PyDataset
_Callback: Any = keras.callbacks.Callback


class PipelineDataset(_PyDataset):  # type: ignore[misc]
    """A pipeline for Keras: ``model.fit(PipelineDataset(train), epochs=10)``.

    A batch is ``x``, ``(x, y)`` or ``(x, y, sample_weight)``, or a dict of inputs. An epoch of
    Keras is an epoch of the pipeline; after a resume in the middle of one, it is the rest of that
    epoch. With ``steps_per_epoch`` the pipeline's epochs and Keras's differ; prefer ``.steps(n)``.

    Attributes:
        pipeline: the pipeline that its batches come from.

    Raises TypeError for an object that is not a pipeline, or for a pipeline without a length
    (``.steps(n)`` gives it one); ValueError for a pipeline without batches, and with the TensorFlow
    backend, which reads batches ahead and drops them.
    """

    def __init__(self, pipeline: Pipeline[Any]) -> None:
        if not isinstance(pipeline, Pipeline):
            raise TypeError(
                f"PipelineDataset takes a stoker.Pipeline, not {type(pipeline).__name__}: "
                "stoker.echo(loader) makes one of a loader"
            )
        if not pipeline.chain.is_batched:
            raise ValueError("Keras takes batches: put .batch(n) at the end of the pipeline")
        if keras.backend.backend() not in _BACKENDS:
            raise ValueError(
                f"the backend is {keras.backend.backend()}, which looks at batches and forgets "
                'them: set KERAS_BACKEND to "torch" or "jax" before keras is imported'
            )
        try:
            self._length = len(pipeline)
        except TypeError as error:
            raise TypeError(f"Keras counts epochs by batches: {error}") from None
        super().__init__(workers=0)  # read in the thread that trains: the pipeline has its own
        self.pipeline = pipeline
        self._batches: PipelineIterator[Any] | None = None
        self._looked_at: list[Any] = []
        self._is_in_epoch = False
        self._quiet = contextlib.ExitStack()

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch; during an epoch, the number left."""
        if not self._is_in_epoch:
            return self._length
        return len(self._begin()) + len(self._looked_at)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        """Return the next batch, whatever the index."""
        if self._looked_at:
            batch = self._looked_at.pop()
        else:
            try:
                batch = next(self._begin())
            except StopIteration:  # the epoch was shorter than it said
                self._batches = None
                batch = next(self._begin())
        if _is_looking():
            self._looked_at = [batch]
            self._is_in_epoch = False
        return batch

    def on_epoch_begin(self) -> None:
        """Begin an epoch, or continue one; called by Keras."""
        self._is_in_epoch = True
        self._quiet.close()
        if self.num_batches < self._length:  # the rest of one: for Keras, too little data
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)

    def on_epoch_end(self) -> None:
        """End an epoch; called by Keras."""
        self._is_in_epoch = False
        self._quiet.close()
        if self._batches is not None and not self._looked_at and not len(self._batches):
            self._batches.close()
            self._batches = None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a saved state of the pipeline, for example in a callback, and drop the kept
        batch."""
        self._batches, self._looked_at = None, []
        self.pipeline.load_state_dict(saved)

    def _begin(self) -> PipelineIterator[Any]:
        if self._batches is not None and not len(self._batches) and not self._looked_at:
            self._batches.close()
            self._batches = None
        if self._batches is None or self._batches.superseded_by == MOVED:  # by a callback
            self._batches = iter(self.pipeline)
        return self._batches


class AcknowledgeBatches(_Callback):  # type: ignore[misc]
    """Tells a pipeline which batches ``fit`` has finished with; put it first among the callbacks.

    On accelerators Keras reads a batch ahead. With this, ``pipeline.state_dict()`` in any later
    callback is the state after the last trained batch.
    """

    def __init__(self, data: PipelineDataset) -> None:
        super().__init__()
        self._pipeline = data.pipeline
        self._finished = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count; called by Keras."""
        self._finished = 0
        self._pipeline.acknowledge(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Acknowledge the batches trained since the last call; called by Keras."""
        self._pipeline.acknowledge(batch + 1 - self._finished)
        self._finished = batch + 1


def _is_looking() -> bool:
    """True if Keras reads a batch only for its shapes, to build a model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_symbolic_build":
            return True
        if frame.f_code.co_name == "predict" and keras.backend.backend() == "jax":
            return getattr(frame.f_locals.get("self"), "built", True) is False
        frame = frame.f_back
    return False
