"""Holds the speed with a change against that without it, between epochs and at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

from stoker.running.loaders import LoaderChoice, LoaderSettings
from stoker.running.plan import RunPlan

# Fewer batches do not tell the speed of an epoch, and epochs differ by some percent anyhow. Chosen,
# not measured.
_FEWEST_BATCHES, _SLOWER = 20, 0.95


class EpochPace:
    """The speed of a loader's epochs, and whether a change pays.

    If an epoch is slower than the job in the analysis, the next one has the script's own settings.
    If that is faster, they stay. This is tried once.

    Attributes:
        epochs: batches, and the seconds from the first to the last, of each epoch that ended.
            Those that were compared are left out.
    """

    def __init__(self, own: LoaderSettings, as_it_is: float, say: Callable[[str], None]) -> None:
        """``as_it_is``: batches/s without a change; 0 if unknown: then the change stays."""
        self.epochs: list[tuple[int, float]] = []
        self._own, self._as_it_is, self._say = own, as_it_is, say
        self._slow: tuple[LoaderSettings, float] | None = None
        self._is_tried = False

    def end_epoch(
        self, settings: LoaderSettings, batches: int, seconds: float, *, counts: bool
    ) -> LoaderSettings:
        """Return the settings of the next epoch. ``counts``: nothing was compared in this one."""
        self.epochs.append((batches, seconds))
        if not counts or batches < _FEWEST_BATCHES:
            return settings
        rate = batches / seconds
        if self._slow is not None:
            (changed, slow), self._slow = self._slow, None
            if slow >= _SLOWER * rate:
                return changed
            self._say(
                f"training is {slow / rate:.2f} times as fast with the change; from here on it is "
                "loaded as the script says"
            )
        elif not self._is_tried and settings != self._own and rate < _SLOWER * self._as_it_is:
            self._slow, self._is_tried = (settings, rate), True
            return self._own
        return settings


class RunOutcome:
    """What a process reached with the loader that was analyzed."""

    def __init__(self, plan: RunPlan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._epochs: list[list[tuple[int, float]]] = []
        self._sites: list[str] = []
        self._gain = 1.0

    def note(self, site: str) -> None:
        """Note that a loader is iterated, and tell the outcome when this process ends."""
        if not self._sites:
            # Not atexit, which children of multiprocessing leave out.
            util.Finalize(None, self._tell, exitpriority=0)
        self._sites.append(site)

    def watch(self, pace: EpochPace, choice: LoaderChoice) -> None:
        """Count a loader's epochs."""
        self._epochs.append(pace.epochs)
        self._gain = _predict(self._plan, choice)

    def _tell(self) -> None:
        if self._plan.loader not in self._sites:
            self._say(f"the loader of the report, {self._plan.loader}, was not iterated")
        if not self._epochs:
            return
        # A loader that was built anew for each epoch has one epoch each time.
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
    if choice.new.cache_bytes:
        return plan.kept_gain
    return plan.gain if choice.new != choice.own else 1.0
