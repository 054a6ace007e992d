"""For the ``Trainer`` of Hugging Face's transformers: the state of its data in its checkpoints."""

from __future__ import annotations

from typing import Any

import transformers

from stoker.pipeline import Pipeline

_trainer: Any = transformers.trainer_callback


class SavePipeline(_trainer.ExportableState, _trainer.TrainerCallback):  # type: ignore[misc]
    """Keeps the state of the training pipeline in each checkpoint, and resumes from it.

    The pipeline is the one whose ``as_dataloader()`` the trainer's ``get_train_dataloader``
    returns. Its state after the last trained batch is saved in ``trainer_state.json``. Without this
    callback a resumed trainer counts batches: that is exact for pipelines with fixed factors whose
    epochs have a length.

    Raises ValueError when training begins if the trainer has no such pipeline, if epochs have no
    length (``.steps(n)`` gives one), and if ranks have their own states (filters, ``max_errors=``).
    """

    def __init__(self) -> None:
        self._train: Pipeline[Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoint."""
        saved = {} if self._train is None else {"saved": self._train.state_dict()}
        return {"args": {}, "attributes": saved}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Find the pipeline, and load the state in the resumed checkpoint."""
        train = getattr(train_dataloader, "pipeline", None)
        if not isinstance(train, Pipeline):
            raise ValueError(
                "SavePipeline() found no pipeline: have get_train_dataloader() return "
                "self.accelerator.prepare(pipeline.as_dataloader())"
            )
        try:
            len(train)
        except TypeError as error:
            raise ValueError(f"the Trainer counts epochs by batches: {error}") from None
        if train.chain.ranks_differ:
            raise ValueError(
                "filters, max_errors= and remainder='uneven' leave each rank with a state of its "
                "own, and the Trainer keeps that of one: leave examples out before sharding"
            )
        self._train = train
        told = state.stateful_callbacks.get(type(self).__name__, {})
        saved = told.get("attributes", {}).get("saved")
        if state.global_step and saved is not None:
            train.load_state_dict(saved)
