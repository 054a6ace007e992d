"""Compares the speed that was achieved with the predicted one, at the end of a process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

import msgspec

from stoker.running.batches import ChangedLoader
from stoker.running.loaders import LoaderChoice
from stoker.running.plan import RunPlan


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

    def watch(self, changed: ChangedLoader) -> None:
        """Count a loader's epochs."""
        self._epochs.append(changed.epochs)
        self._gain = _predict(self._plan, changed.choice)

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
    without = msgspec.structs.replace(choice.new, cache_bytes=0)
    workers = plan.gain if without != choice.own else 1.0
    return max(workers, plan.cache_gain if choice.new.cache_bytes else 1.0)
