"""Which runs an experiment consists of, phase by phase, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import NamedTuple

from experiments.arms import REPEATS, Arm
from experiments.suite.rows import Rows, Run
from experiments.suite.workload import Recipe, Workload

TUNING_SEED = 1_000
"""Learning rates are chosen on seeds from here on, results come from seeds from 0 on."""
RATIOS = (2.0, 4.0)
FACTORS = (2, 4)

WARM_UPS = (0.05, 0.2)
"""Shares of the budget over which the rate rises: of 300 steps without echoing 15, or 60. As many
steps as an arm with e = 4 has with the first."""


class Settings(NamedTuple):
    """What is chosen for each arm."""

    learning_rate: float
    warm_up: float


BASELINE = Arm("none", slowness=0.0)


@dataclass(frozen=True)
class Plan:
    """The arms of an experiment, at what R, and the seeds."""

    workload: type[Workload]
    recipe: Recipe
    arms: tuple[Arm, ...]
    """One for each training: with an R (`slowness`) if they follow the stall, else with 0."""
    ratios: tuple[float, ...]
    """At which R arms with a fixed factor are timed."""
    seeds: int
    wider: int = 3
    """How often the grid of an arm is widened, at most."""

    @classmethod
    def of(
        cls,
        workload: type[Workload],
        recipe: Recipe,
        *,
        patterns: Sequence[str] = ("*",),
        factors: Sequence[int] = FACTORS,
        ratios: Sequence[float] = RATIOS,
        transforms: Sequence[str] | None = None,
        seeds: int = 5,
        wider: int = 3,
    ) -> Plan:
        """Choose the arms whose names fit a pattern; training without echoing is always there.

        Args:
            patterns, factors, ratios: of the arms' names, their fixed factors, and R.
            transforms: what is done to batches of an echoed loader, with `REPEATS` before it to
                repeats alone; None: the workload's first.

        Raises ValueError for a pattern that fits no arm, or an unknown transform.
        """
        for name in transforms or ():
            if name.removeprefix(REPEATS) not in workload.transforms:
                known = ", ".join(workload.transforms) or "none"
                raise ValueError(f"{workload.name} has no transform {name}; there are {known}")
        every = all_arms(
            factors, ratios, workload.transforms[:1] if transforms is None else transforms
        )
        for pattern in patterns:
            if not any(fnmatch(name_of(arm), pattern) for arm in every):
                known = ", ".join(dict.fromkeys(name_of(arm) for arm in every))
                raise ValueError(f"no arm is named {pattern}; there are {known}")
        chosen = [
            arm
            for arm in every
            if arm == BASELINE or any(fnmatch(name_of(arm), pattern) for pattern in patterns)
        ]
        return cls(workload, recipe, tuple(chosen), tuple(ratios), seeds, wider)

    def timing(self) -> list[Run]:
        """Return what goes by the exact clock."""
        return [
            Run("timing", each, seed)
            for arm in self.arms
            for each in ([arm] if arm.follows else [replace(arm, slowness=r) for r in self.ratios])
            for seed in self._timed_seeds(arm)
        ]

    def tuning(self, candidates: Mapping[Arm, Sequence[Settings]] | None = None) -> list[Run]:
        """Return the runs of every arm with every candidate; by default the first ones."""
        return [
            Run("tuning", arm, TUNING_SEED + number, *settings)
            for arm in self.arms
            for settings in (candidates or {}).get(arm, self.candidates())
            for number in range(self.recipe.tuning_seeds)
        ]

    def candidates(self) -> list[Settings]:
        """Return what every arm is tried with at first."""
        return [
            Settings(rate, warm_up) for rate in self.recipe.learning_rates for warm_up in WARM_UPS
        ]

    def training(self, chosen: dict[Arm, Settings]) -> list[Run]:
        """Return the runs whose results count, with the settings that were chosen."""
        return [
            Run("training", arm, seed, *chosen[arm])
            for seed in range(self.seeds)
            for arm in self.arms
        ]

    def seconds(self, run: Run, step_s: float, test_s: float) -> float:
        """Estimate a run by the time of a training step and of a test."""
        steps = self.recipe.budget_fresh / self.recipe.batch_size
        if run.kind == "timing":
            return 0.0
        uses = min(run.arm.slowness, run.arm.most_uses) if run.arm.follows else run.arm.most_uses
        tests = self.recipe.evaluations if run.kind == "training" else 3
        return steps * uses * step_s + tests * test_s

    def _timed_seeds(self, arm: Arm) -> list[int]:
        # Only what follows the stall needs a record before it can be trained.
        tuned = range(TUNING_SEED, TUNING_SEED + self.recipe.tuning_seeds * arm.follows)
        return [*range(self.seeds), *tuned]


def all_arms(
    factors: Sequence[int], ratios: Sequence[float], transforms: Sequence[str]
) -> list[Arm]:
    """Return every arm that a workload can have; the first is what others are held to."""
    return [
        BASELINE,
        *(
            Arm(place, factor, slowness=0.0)
            for place in ("before", "after", "batch")
            for factor in factors
        ),
        *(
            Arm(place, "auto", slowness=ratio, transform=transform)
            for place, transform in [
                ("before", ""),
                ("loader", ""),
                *(("loader", name) for name in transforms),
            ]
            for ratio in ratios
        ),
    ]


def name_of(arm: Arm) -> str:
    """Return an arm's name on the command line."""
    return replace(arm, slowness=Arm.slowness).key


def timing_of(run: Run, ratio: float) -> Run:
    """Return the timing that says when the steps of a training happen at R = `ratio`."""
    arm = run.arm if run.arm.follows else replace(run.arm, slowness=ratio)
    return Run("timing", arm, run.seed)


def chosen_settings(
    plan: Plan, rows: Rows, candidates: Mapping[Arm, Sequence[Settings]] | None = None
) -> dict[Arm, Settings]:
    """Return each arm's settings: the candidate with the least mean loss when it was tuned.

    Raises LookupError where a run of the tuning is missing.
    """
    losses: dict[Arm, dict[Settings, float]] = {}
    for run in plan.tuning(candidates):
        row = rows.find(run)
        if row is None:
            raise LookupError(f"{run} is not over")
        assert run.learning_rate is not None
        settings = Settings(run.learning_rate, run.warm_up)
        final = sum(point[3] for point in row["points"]) / len(row["points"])
        by_settings = losses.setdefault(run.arm, {})
        by_settings[settings] = by_settings.get(settings, 0.0) + final
    return {arm: min(found, key=lambda each: found[each]) for arm, found in losses.items()}


def widened(candidates: Sequence[Settings], best: Settings) -> list[Settings]:
    """Return the candidates, with one rate more where the best is the least or the greatest.

    The new rate is as far from the edge as the edge is from the next. Alike for all arms: each has
    the best inside in the end.
    """
    rates = sorted({each.learning_rate for each in candidates})
    if len(rates) < 2 or best.learning_rate not in (rates[0], rates[-1]):
        return list(candidates)
    edge, next_to = rates[:2] if best.learning_rate == rates[0] else rates[:-3:-1]
    rate = float(f"{edge * edge / next_to:.3g}")
    return [*candidates, *(Settings(rate, warm_up) for warm_up in WARM_UPS)]
