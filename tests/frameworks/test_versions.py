"""The releases of frameworks whose private parts are read, and that these parts are there."""

from __future__ import annotations

from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

from stoker.frameworks import accelerate, lightning


@pytest.mark.parametrize(
    ("package", "adapter"), [("pytorch-lightning", lightning), ("accelerate", accelerate)]
)
def test_the_release_is_the_one_that_it_was_written_for(package: str, adapter: ModuleType) -> None:
    assert version(package).startswith(f"{adapter.WRITTEN_FOR}."), (
        f"{package} {version(package)} is new: compare what {adapter.__name__} reads with its "
        f"source, run tests/frameworks with --full, and set WRITTEN_FOR"
    )


@pytest.mark.full  # Lightning takes six seconds to import
def test_lightning_has_the_parts_that_are_read() -> None:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loops import fetchers, fit_loop

    assert fetchers.__name__.endswith(".loops.fetchers")
    assert fit_loop.__name__.endswith(".loops.fit_loop")
    trainer: Any = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    loop = trainer.fit_loop
    assert loop.trainer is trainer
    assert loop.trainer.overfit_batches == 0.0
    assert loop.restarting is False
    assert loop._combined_loader_states_to_load == []
    assert loop._combined_loader is None
    assert loop._data_fetcher is None
    assert fetchers._PrefetchDataFetcher().fetched == 0
    progress = loop.epoch_loop.batch_progress
    assert progress.is_last_batch is False
    assert (progress.current.ready, progress.current.processed) == (0, 0)


def test_accelerate_has_the_parts_that_are_read() -> None:
    from accelerate import checkpointing, state

    assert checkpointing.__name__ == "accelerate.checkpointing"
    assert isinstance(state.AcceleratorState._shared_state, dict)
    assert isinstance(state.GradientState._shared_state, dict)
    assert callable(state.GradientState._add_dataloader)
    assert callable(state.GradientState._remove_dataloader)
