"""Learning-rate schedules that follow fresh data, however often it is echoed."""

from __future__ import annotations

from typing import Any

from stoker.basics.validate import is_whole_number
from stoker.basics.warn import warn
from stoker.pipeline import Pipeline

# Of a step: shares of an epoch are floating-point numbers, exact to 1e-16 of an epoch.
_ALMOST = 1e-6
# What says after how many steps a scheduler goes wrong; others have no such end.
_LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}


class LrSchedule:
    """A torch scheduler that is stepped as often as without echoing.

    Attributes:
        scheduler: the wrapped scheduler.
        optimizer: its optimizer.
    """

    def __init__(self, scheduler: Any, train: Pipeline[Any], steps_per_epoch: int) -> None:
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self._train = train
        self._steps_per_epoch = steps_per_epoch
        self._start = self._now()
        self._taken = 0
        length = _LENGTHS.get(type(scheduler).__name__, "")
        self._length: int | None = getattr(scheduler, length, None)

    def step(self) -> None:
        """Step the scheduler until it matches the loop's fresh data.

        Call it after each training step. Warns once if the scheduler is stepped past its length.
        """
        due = int(self._now() - self._start + _ALMOST)
        while self._taken < due:
            self._taken += 1
            if self._taken - 1 == self._length:
                name = type(self.scheduler).__name__
                warn(
                    f"{name} was made for {self._length:,} steps, but there is more fresh data: "
                    f"give it {self._steps_per_epoch:,} for each epoch"
                )
            self.scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Return the scheduler's learning rate of each group of parameters."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return its state, which contains the scheduler's; save the pipeline's state with it."""
        return {
            "start": self._start,
            "taken": self._taken,
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state; before or after the pipeline loads its own."""
        self.scheduler.load_state_dict(saved["scheduler"])
        self._start, self._taken = saved["start"], saved["taken"]

    def _now(self) -> float:
        train, each = self._train, self._steps_per_epoch
        share = train.progress
        if share < 1 and train._cursor.is_at_end():
            share = 1.0  # filters left out the rest
        return (train.epoch + share) * each


def lr_schedule(
    scheduler: Any, train: Pipeline[Any], *, steps_per_epoch: int | None = None
) -> LrSchedule:
    """Make a torch scheduler follow fresh data, not the steps that echoing adds.

    Make the scheduler as for training without echoing, wrap it, and call ``step()`` after each
    training step, as before::

        cosine = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
        schedule = stoker.lr_schedule(cosine, train)

    A scheduler that is stepped with every batch of an echoed epoch comes to its end too early; a
    cosine then goes back up.

    Args:
        scheduler: a ``torch.optim.lr_scheduler.LRScheduler`` whose lengths count batches without
            echoing.
        train: the pipeline that the loop iterates over.
        steps_per_epoch: how many batches an epoch would have without echoing, where the pipeline
            cannot tell (filters, ``max_errors=``). Under ``.steps(n)`` that is ``n``.

    Raises:
        TypeError: ``scheduler`` is not a scheduler, or follows a metric (``ReduceLROnPlateau``);
        ``train`` is not a pipeline; the pipeline's length is unknown.
    """
    if not isinstance(train, Pipeline):
        raise TypeError(f"lr_schedule() takes a stoker.Pipeline, not {type(train).__name__}")
    if not all(hasattr(scheduler, name) for name in ("step", "optimizer", "get_last_lr")):
        raise TypeError(
            "lr_schedule() takes a scheduler that was made, such as CosineAnnealingLR(optimizer, "
            f"T_max=epochs * len(loader)), not {scheduler!r}"
        )
    if hasattr(scheduler, "patience"):
        raise TypeError(
            f"{type(scheduler).__name__} follows a metric, not steps: call its step(metric) as you "
            "would without echoing"
        )
    if steps_per_epoch is None:
        try:
            steps_per_epoch = train.chain.count_without_echo()
        except TypeError as error:
            raise TypeError(
                f"{error}; steps_per_epoch= says how many batches an epoch has without echoing"
            ) from None
    elif not is_whole_number(steps_per_epoch) or steps_per_epoch < 1:
        raise TypeError(f"steps_per_epoch= takes a whole number from 1, not {steps_per_epoch!r}")
    return LrSchedule(scheduler, train, steps_per_epoch)
