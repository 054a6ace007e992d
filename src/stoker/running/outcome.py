"""Holds the speed with a change against that without it, between epochs and at the end."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from stoker.running.loaders import LoaderChoice
from stoker.running.plan import RunPlan

# Fewer batches do not tell the speed of an epoch. Chosen, not measured.
_FEWEST_BATCHES = 20
# An epoch that is slower is tried against the script's own settings: bench/results/run_pace.json.
_SLOWER = 0.95
# Epochs of such a trial: with the change, without it, and with it again. On a busy machine two of
# them leave a change that brings 1.1 times in 9 to 17 % of the runs, three in 3 % at most.
_TRIAL = 3


class EpochPace:
    """The speed of a loader's epochs, and whether a change pays.

    If an epoch is slower than the job in the analysis, the next one has the script's own settings,
    and the one after that has the change again. If the one without it is faster than both, it is
    left. This is tried once. Loaders that a script builds anew for each epoch share a pace.

    Attributes:
        settings: those of the next epoch.
        epochs: batches, and the seconds from the first to the last, of each epoch that ended.
            Those that were compared are left out.
        begun: the number of epochs that began.
        running: iterators whose epoch has not ended, each with an ``end()`` that notes its speed.
    """

    def __init__(self, choice: LoaderChoice, as_it_is: float, say: Callable[[str], None]) -> None:
        """``as_it_is``: batches/s without a change; 0 if unknown: then the change stays."""
        self.settings = choice.new
        self.epochs: list[tuple[int, float]] = []
        self.begun = 0
        self.running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._own, self._as_it_is, self._say = choice.own, as_it_is, say
        self._changed = choice.new
        self._trial: list[float] = []  # the rates of its epochs

    def end_epoch(self, batches: int, seconds: float, *, counts: bool) -> None:
        """Note an epoch with ``settings``. ``counts``: nothing was compared in it."""
        self.epochs.append((batches, seconds))
        if not counts or batches < _FEWEST_BATCHES or len(self._trial) == _TRIAL:
            return
        rate = batches / seconds
        if not self._trial:
            if self.settings == self._own or rate >= _SLOWER * self._as_it_is:
                return
            self._changed, self.settings = self.settings, self._own
        elif len(self._trial) == 1:
            self.settings = self._changed
        else:
            slow, own = max(self._trial[0], rate), self._trial[1]
            if slow < _SLOWER * own:
                self.settings = self._own
                self._say(
                    f"training is {slow / own:.2f} times as fast with the change; from here on it "
                    "is loaded as the script says"
                )
        self._trial.append(rate)


class RunOutcome:
    """What a process reached with the loader that was analyzed."""

    def __init__(self, plan: RunPlan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._paces: list[EpochPace] = []
        self._epochs: list[list[tuple[int, float]]] = []
        self._sites: list[str] = []
        self._gain = 1.0

    def note(self, site: str) -> None:
        """Note that a loader is iterated, and tell the outcome when this process ends."""
        if not self._sites:
            # Not atexit, which children of multiprocessing leave out.
            util.Finalize(None, self._tell, exitpriority=0)
        self._sites.append(site)

    def watch(self, pace: EpochPace, choice: LoaderChoice, *, is_analyzed: bool) -> None:
        """Count the epochs of a loader, or of all that are built anew in its place."""
        self._paces.append(pace)
        if is_analyzed:
            self._epochs.append(pace.epochs)
            self._gain = _predict(self._plan, choice)

    def _tell(self) -> None:
        # A script may end in the middle of an epoch, or have no other.
        for batches in [batches for pace in self._paces for batches in pace.running]:
            batches.end()
        if self._plan.loader not in self._sites:
            self._say(
                f"the loader of the report, {self._plan.loader}, was not iterated in this process"
            )
        if not self._epochs:
            return
        # A loader with another dataset for each epoch has one epoch each time.
        epochs = [epoch for each in self._epochs for epoch in each]
        # One whose batches were all compared has no speed.
        whole = [number for number, (batches, _) in enumerate(epochs, 1) if batches]
        first = next((number for number in whole if number > 1), 1)
        batches = sum(batches for batches, _ in epochs[first - 1 :])
        seconds = sum(seconds for _, seconds in epochs[first - 1 :])
        as_it_is = self._plan.examples_per_s
        if not seconds or not as_it_is:
            self._say("the loader gave too few batches to tell the speed")
            return
        rate = batches * self._plan.batch_size / seconds
        self._say(
            f"predicted {self._gain:.2f} times, achieved {rate / as_it_is:.2f} "
            f"{'from' if first > 1 else 'in'} epoch {first}"
        )
        if self._plan.report and os.environ.get("RANK", "0") == "0":
            self._write(Path(self._plan.report), rate, first)

    def _write(self, path: Path, rate: float, first: int) -> None:
        """Add the outcome to the report."""
        assert self._plan.examples_per_s is not None
        outcome = {
            "predicted": self._gain,
            "achieved": rate / self._plan.examples_per_s,
            "examples_per_s": rate,
            "from_epoch": first,
        }
        try:
            report = json.loads(path.read_text())
            path.write_text(json.dumps(report | {"run": outcome}, indent=2) + "\n")
        except (OSError, ValueError) as error:
            self._say(f"{path} was not changed: {error}")


def _predict(plan: RunPlan, choice: LoaderChoice) -> float:
    """Return the gain that is predicted for what was applied."""
    if choice.new.cache_bytes and plan.kept_gain is not None:
        return plan.kept_gain
    return plan.gain if choice.new != choice.own else 1.0
