"""Holds the speed with a change against that without it, by turns in the same run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from stoker.analysis.host_load import HostWatch
from stoker.analysis.model.rates import estimate_interval
from stoker.running.loaders import LoaderChoice

# Pairs of stretches, one with the change and one without. Five give an interval of 2.8 standard
# errors; each costs the user what the change saves meanwhile.
_TURNS = 5
# Of a stretch that is measured, at the speed of the analysis; and its batches, at least and at
# most. Chosen, not measured.
_STRETCH_S, _FEWEST, _MOST = 1.0, 8, 200


class SpeedTurns:
    """Stretches of a run with a change and without it, side by side, and whether the change pays.

    A stretch without the change follows each one with it. If training is slower with the change,
    the loader gets the script's own settings back. Loaders that a script builds anew for each epoch
    share one. Stretches are counted in batches, so that ranks take them together.

    Attributes:
        settings: those of the next epoch.
        begun: the number of epochs that began.
        trains: True once a backward pass was seen in an epoch.
        batches: those of a stretch that are measured.
    """

    def __init__(
        self,
        choice: LoaderChoice,
        say: Callable[[str], None],
        *,
        batches_per_s: float = 0.0,
        predicted: float | None = None,
        report: str = "",
    ) -> None:
        """``batches_per_s``: about, without the change; ``report``: gets the outcome, too."""
        self.settings = choice.new
        self.begun = 0
        self.trains = False
        self._choice, self._say = choice, say
        self._predicted, self._report = predicted, report
        self._period = max(1, choice.own.workers, choice.new.workers)
        wanted = min(_MOST, max(_FEWEST, int(_STRETCH_S * batches_per_s)))
        self.batches = self._in_periods(wanted)
        self._with_s: float | None = None  # of the stretch with the change
        self._gains: list[float] = []
        self._host = HostWatch()

    @property
    def is_over(self) -> bool:
        """True if there are enough turns, or can be none."""
        return len(self._gains) >= _TURNS or not self._choice.is_comparable

    @property
    def waits_for_own(self) -> bool:
        """True behind a stretch with the change."""
        return self._with_s is not None

    def _in_periods(self, batches: int) -> int:
        return -(-batches // self._period) * self._period

    def shorten(self, room: int) -> None:
        """Have stretches fit into an epoch that has room for so many batches, where that is short.

        Both of a pair stay alike.
        """
        if not self.waits_for_own and room < self.batches:
            fewest = self._in_periods(_FEWEST)
            self.batches = max(fewest, room // self._period * self._period)

    def add(self, seconds: float, *, own: bool) -> None:
        """Note a stretch; behind the last one, tell what they show."""
        if not own:
            self._with_s = seconds
        elif self._with_s is not None:
            self._gains.append(seconds / self._with_s)
            self._with_s = None
            if len(self._gains) == _TURNS:
                self._conclude()

    def end(self) -> None:
        """Tell what there is to tell, where the run has ended before the last turn."""
        if 1 < len(self._gains) < _TURNS:
            self._conclude()
        elif self._predicted is not None and len(self._gains) < 2 and self.begun:
            why = "the dataset keeps a file open, which two processes must not share"
            why = "there were too few batches" if self._choice.is_comparable else why
            self._say(f"how much faster it is was not measured: {why}")

    def _conclude(self) -> None:
        found, load = estimate_interval(self._gains), self._host.read()
        text = (
            f"{found.value:.2f} times as fast as with the script's own settings "
            f"({max(0.0, found.low):.2f} to {found.high:.2f}), by "
            f"{len(self._gains)} turns in this run"
        )
        if self._predicted is not None:
            text += f"; predicted {self._predicted:.2f}"
        if load is not None and load.is_busy:
            text += f"; other processes used {load.others_cores:.1f} of {load.cores} cores"
        if found.high < 1.0:
            self.settings = self._choice.own
            text += "; from here on it is loaded as the script says"
        self._say(text)
        if self._report and os.environ.get("RANK", "0") == "0":
            ends = {"achieved": found.value, "low": found.low, "high": found.high}
            self._write(Path(self._report), {"predicted": self._predicted, **ends})

    def _write(self, path: Path, outcome: dict[str, float | None]) -> None:
        """Add the outcome to the report."""
        try:
            report = json.loads(path.read_text())
            path.write_text(json.dumps(report | {"run": outcome}, indent=2) + "\n")
        except (OSError, ValueError) as error:
            self._say(f"{path} was not changed: {error}")
