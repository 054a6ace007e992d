"""Lightning: its loops, found in the calling frames.

Its fetcher takes a batch ahead of the trainer if there is no ``len()``. It leaves epochs early, and
keeps its progress in its loops, partly in private attributes. Releases without these attributes
load states by themselves; then no batch counts as untrained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.frameworks.framework import SAMPLER, Framework, frames, is_calling

WRITTEN_FOR = "2.6"
"""The release whose private parts are read here; tests/frameworks/test_versions.py."""

_MODULES = ("lightning.pytorch.", "pytorch_lightning.")  # one library, under two names


class TrainingLoop:
    """The loop that iterates over a pipeline: one of Lightning's, or a user's own.

    Args:
        wrapper: the framework that takes one batch more than it trains on if there is no
            ``len()``; None if none does.
        begins_later: whether it asks for an iterator before it loads a state that it will go on at.
        trainer: the trainer of Lightning; None for a user's own loop.
        fit_loop: Lightning's loop over epochs of training; None if another loop is calling.

    Attributes:
        repeats_first_epoch: whether all of its epochs must have the batches of the first.
    """

    def __init__(
        self, *, wrapper: str | None, begins_later: bool, trainer: Any, fit_loop: Any
    ) -> None:
        self.wrapper, self.begins_later = wrapper, begins_later
        self.repeats_first_epoch = bool(getattr(trainer, "overfit_batches", 0))
        self._fit = fit_loop

    def has_ended_epoch(self) -> bool:
        """True if it requests no more batches of its epoch, although there may be some."""
        if self._fit is None or not self._fit.epoch_loop.batch_progress.is_last_batch:
            return False
        return not self.untrained_batches()

    def untrained_batches(self) -> int:
        """Return how many batches it has received and not finished training on."""
        if self._fit is None:
            return 0
        current = self._fit.epoch_loop.batch_progress.current
        fetched = getattr(getattr(self._fit, "_data_fetcher", None), "fetched", 0)
        return int(max(0, min(current.ready, fetched) - current.processed))

    def take_state(self, is_for: Callable[[Any], bool]) -> Any:
        """Return, once, a state that it loaded and did not pass to the loader; else None.

        ``is_for`` returns True for the loader that asks. Lightning passes states on in the middle
        of an epoch, unless its loaders were set up before (for ``estimated_stepping_batches``).
        After a whole epoch it would let loaders begin with their first one again.
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

    def loop(self) -> TrainingLoop:
        """Return the loop that is calling: its own, or a plain one."""
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
        return TrainingLoop(
            wrapper=self.name if reads_ahead else None,
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
