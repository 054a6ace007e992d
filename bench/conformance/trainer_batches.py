"""A plugin of pytest: the ``Trainer`` of transformers trains on a pipeline over its dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stoker


def train_dataloader(trainer: Any) -> Any:
    """Return what ``get_train_dataloader`` does: examples in random order, collated by theirs."""
    from stoker.transformers import SavePipeline

    arguments = trainer.args
    examples = stoker.from_dataset(trainer.train_dataset, seed=arguments.seed).shuffle()
    batches = examples.batch(
        trainer._train_batch_size,
        drop_last=arguments.dataloader_drop_last,
        collate=trainer.data_collator,
    )
    trainer.remove_callback(SavePipeline)
    trainer.add_callback(SavePipeline())
    return trainer.accelerator.prepare(batches.as_dataloader())


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    import transformers

    trainer: Any = transformers.Trainer
    trainer.get_train_dataloader = train_dataloader
