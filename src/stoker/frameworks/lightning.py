"""Lightning: its loops, found in the calling frames.

Its fetcher takes a batch ahead of the trainer if there is no ``len()``. It leaves epochs early, and
keeps its progress in its loops, partly in private attributes. Releases without these attributes
load states by themselves; then no batch counts as untrained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.frameworks.framework import SAMPLER, Framework, TrainingLoop, frames, is_calling

WRITTEN_FOR = "2.6"
"""The release whose private parts are read here; tests/frameworks/test_versions.py."""

_MODULES = ("lightning.pytorch.", "pytorch_lightning.")  # one library, under two names


class LightningLoop(TrainingLoop):
    """Its loop over epochs of training, where that is calling; else another of its loops."""

    framework = "Lightning"

    def __init__(
        self, *, reads_ahead: bool, begins_later: bool, trainer: Any, fit_loop: Any
    ) -> None:
        self.reads_ahead, self.begins_later = reads_ahead, begins_later
        self.repeats_first_epoch = bool(getattr(trainer, "overfit_batches", 0))
        self._fit = fit_loop

    def has_ended_epoch(self) -> bool:
        if self._fit is None or not self._fit.epoch_loop.batch_progress.is_last_batch:
            return False
        return not self.untrained_batches()

    def untrained_batches(self) -> int:
        if self._fit is None:
            return 0
        current = self._fit.epoch_loop.batch_progress.current
        fetched = getattr(getattr(self._fit, "_data_fetcher", None), "fetched", 0)
        return int(max(0, min(current.ready, fetched) - current.processed))

    def take_state(self, is_for: Callable[[Any], bool]) -> Any:
        """Return the pipeline's state from a checkpoint, if Lightning has not loaded it itself.

        It does so in the middle of an epoch, unless its loaders were set up before (for
        ``estimated_stepping_batches``). After a whole epoch it would let loaders begin with their
        first one again.
        """
        states = getattr(self._fit, "_combined_loader_states_to_load", None)
        if not states:
            return None
        combined = getattr(getattr(self._fit, "_combined_loader", None), "flattened", ())
        loaders = [each for each in combined if hasattr(each, "load_state_dict")]
        for number, loader in enumerate(loaders):
            if is_for(loader) and len(loaders) == len(states):
                saved, states[number] = states[number], None
                return saved
        return None


class Lightning(Framework):
    """A ``Trainer`` of Lightning."""

    name = "Lightning"
    where_ranks_are_known = "in train_dataloader(), where ranks are known"

    def loop(self) -> TrainingLoop | None:
        """Return its loop, if it is calling."""
        reads_ahead, is_running, trainer, fit_loop = False, False, None, None
        for module, frame in frames():
            if not module.startswith(_MODULES) or ".loops." not in module:
                continue
            loop = frame.f_locals.get("self")
            reads_ahead = reads_ahead or module.endswith(".loops.fetchers")
            if trainer is None:
                trainer = getattr(loop, "trainer", None)
            if module.endswith(".loops.fit_loop"):
                fit_loop = fit_loop or loop
                is_running = is_running or frame.f_code.co_name == "run"
        if not reads_ahead and trainer is None and fit_loop is None:
            return None
        return LightningLoop(
            reads_ahead=reads_ahead,
            begins_later=fit_loop is not None and not is_running,
            trainer=trainer,
            fit_loop=fit_loop,
        )

    def shards_data(self) -> bool:
        return is_calling(_MODULES)

    def way_to_shard(self, loader: Any) -> str | None:
        return f"{SAMPLER}, made in train_dataloader(), where the ranks are known"

    def keeps_one_state(self) -> bool:
        return is_calling(_MODULES)
