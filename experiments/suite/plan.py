"""Which runs an experiment consists of, phase by phase, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from experiments.arms import REPEATS, Arm
from experiments.suite.rows import Rows, Run
from experiments.suite.workload import Recipe, Workload

TUNING_SEED = 1_000
"""Learning rates are chosen on seeds from here on, results come from seeds from 0 on."""
RATIOS = (2.0, 4.0)
FACTORS = (2, 4)

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
        return cls(workload, recipe, tuple(chosen), tuple(ratios), seeds)

    def timing(self) -> list[Run]:
        """Return what goes by the exact clock."""
        return [
            Run("timing", each, seed)
            for arm in self.arms
            for each in ([arm] if arm.follows else [replace(arm, slowness=r) for r in self.ratios])
            for seed in self._timed_seeds(arm)
        ]

    def tuning(self) -> list[Run]:
        """Return the runs of every arm with every candidate."""
        return [
            Run("tuning", arm, TUNING_SEED + number, rate)
            for arm in self.arms
            for rate in self.recipe.learning_rates
            for number in range(self.recipe.tuning_seeds)
        ]

    def training(self, rates: dict[Arm, float]) -> list[Run]:
        """Return the runs whose results count, with the rates that were chosen."""
        return [
            Run("training", arm, seed, rates[arm])
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


def chosen_rates(plan: Plan, rows: Rows) -> dict[Arm, float]:
    """Return each arm's learning rate: the candidate with the least mean loss when it was tuned.

    Raises LookupError where a run of the tuning is missing.
    """
    losses: dict[tuple[Arm, float], float] = {}
    for run in plan.tuning():
        row = rows.find(run)
        if row is None:
            raise LookupError(f"{run} is not over")
        assert run.learning_rate is not None
        final = sum(point[3] for point in row["points"]) / len(row["points"])
        losses[run.arm, run.learning_rate] = losses.get((run.arm, run.learning_rate), 0.0) + final
    return {
        arm: min(plan.recipe.learning_rates, key=lambda rate: losses[arm, rate])
        for arm in plan.arms
    }
