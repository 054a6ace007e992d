"""For Lightning: a pipeline's statistics in the trainer's logger."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from stoker.pipeline import Pipeline

_NAMES = ("lightning.pytorch", "pytorch_lightning")  # one library, under two names


def _import_lightning() -> Any:
    loaded = next((name for name in _NAMES if name in sys.modules), None)
    if loaded is not None:
        return sys.modules[loaded]
    if importlib.util.find_spec("lightning") is not None:
        return importlib.import_module("lightning.pytorch")
    return importlib.import_module("pytorch_lightning")


_pl: Any = _import_lightning()


class StallMonitor(_pl.Callback):  # type: ignore[misc]
    """Logs how the training pipelines feed the trainer, as often as the trainer logs.

    - ``stoker/stall_fraction``: the share of the time, since the pass over the data began, that
      training waited for a batch;
    - ``stoker/fresh_examples``: handed out in all epochs so far, and
    - ``stoker/factor``: uses for each of them, since the last time this was logged;
    - ``stoker/copy_distance``: mean steps between two uses of an item.

    With several pipelines, a number follows each name: ``stoker/factor/1``. Raises TypeError when
    training begins without one.
    """

    def __init__(self) -> None:
        self._count = 0  # of pipelines

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look for pipelines among the training loaders."""
        found = list(_pipelines(trainer.train_dataloader))
        if not found:
            raise TypeError("StallMonitor() found no stoker.Pipeline among the training loaders")
        self._count = len(found)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log at the trainer's logging steps."""
        if trainer.global_step % trainer.log_every_n_steps:
            return
        for number, pipeline in enumerate(_pipelines(trainer.train_dataloader)):
            stats, clock = pipeline.stats(), pipeline.clock
            behind = f"/{number}" if self._count > 1 else ""
            figures = {
                "stall_fraction": stats.wait_fraction,
                "fresh_examples": clock.fresh_examples,
                "copy_distance": stats.copy_distance,
                "factor": stats.realised_factor,
            }
            named = {f"stoker/{name}{behind}": float(each) for name, each in figures.items()}
            pl_module.log_dict(named, batch_size=1)


def _pipelines(loaders: Any) -> Iterator[Pipeline[Any]]:
    """Yield the pipelines in a trainer's training loader or collection of loaders."""
    if isinstance(loaders, Pipeline):
        yield loaders
    elif isinstance(getattr(loaders, "pipeline", None), Pipeline):  # as_dataloader()
        yield loaders.pipeline
    elif isinstance(loaders, dict):
        for each in loaders.values():
            yield from _pipelines(each)
    elif isinstance(loaders, (list, tuple)):
        for each in loaders:
            yield from _pipelines(each)
