"""May the losses of copies say how often to echo, and which examples?

Two ideas, tried on tasks of ``experiments/suite``, with an echo before augmentation and storage
four times slower than training:

- measured: the cap on uses, 4 at first, is lowered by 1 whenever copies have a loss that is lower
  than that of first uses by more than a threshold (a share of it), and raised again when it is less
  than half of that. Looked at every 25 steps; at a cap of 1, one time of eight has copies again.
- EL2N (Paul et al., arXiv 2107.07075): what is repeated is drawn in proportion to the norm of the
  error of its probabilities, as it was at its last use, and weighted by the inverse, so that the
  expected gradient is that of any copy.

Time is counted, not measured: a step takes 1, a fresh batch comes every 4, a step waits for what
the pool lacks. Pools, distances, learning rates (two seeds of their own, judged by a validation
part), schedule by fresh examples, and targets are those of the suite.

Command (each task takes a quarter of an hour; rows of tasks that are not named are kept)::

    python bench/copy_value.py --tasks "small, not augmented"
    python bench/copy_value.py --tasks fashion

Machine: two cores of an Intel Xeon, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0. Nothing
depends on its speed.

Results (five seeds; medians and ranges of ratios and differences by seed; speed-up 0: the target
was missed)::

    [results/copy_value.json]
                          factor   loss         over that of cap 4              speed-up
    ------------------------------------------------------------------------------------
    fashion
      no echo               1.00  0.516  +0.103 (+0.098 .. +0.123)
      cap of 4              3.95  0.400                              2.11 (1.69 .. 2.38)
      measured 0.1          1.80  0.459  +0.051 (+0.037 .. +0.092)   1.44 (1.22 .. 1.65)
      measured 0.3          3.92  0.398  +0.000 (-0.002 .. +0.010)   2.11 (1.65 .. 2.38)
      EL2N                  3.95  0.663  +0.263 (+0.233 .. +0.281)            0 (0 .. 0)
    small, not augmented
      no echo               1.00  0.623  -0.110 (-0.135 .. -0.104)
      cap of 4              3.98  0.730                                       0 (0 .. 0)
      measured 0.1          1.09  0.644  -0.107 (-0.118 .. -0.086)  1.04 (0.813 .. 1.72)
      measured 0.3          1.14  0.643  -0.097 (-0.116 .. -0.087)     0.957 (0 .. 1.14)
      EL2N                  3.98  0.850  +0.100 (+0.023 .. +0.142)            0 (0 .. 0)
    [end]

Nothing of this is in stoker. The cap by measured losses undoes the harm that copies do where they
are memorised (small data without augmentation: level with training without echoing), and does not
beat training without echoing there. With the lower threshold it takes away half of the gain on
Fashion-MNIST; the higher one leaves it. Two tasks are too few to choose a threshold by. EL2N did
harm on both tasks: hard examples are repeated, those of wrong or unclear labels with them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, Ratio, Report, parser, report

import stoker
from experiments.arms import epoch_after_epoch
from experiments.method import crossing, smoothed, value_at
from experiments.suite.data import data_folder
from experiments.suite.training import schedule
from experiments.suite.workload import Variant
from experiments.suite.workloads import class_of
from stoker.schedule.pools.adaptive import RAMP_STEPS

RATIO = 4.0
CAP = 4
WINDOW = 25
PROBE_EVERY = 8
THRESHOLDS = (0.1, 0.3)
POOL_BATCHES, POOL_SHARE, DISTANCE = 16, 0.1, 8
TUNED_ON, TUNING_SEEDS = 1_000, 2
TARGET_SHARE = 0.6
TASKS = {
    "fashion": ("fashion", Variant()),
    "small": ("fashion", Variant(small=True)),
    "small, not augmented": ("fashion", Variant(small=True, augmentation=False)),
    "spoken": ("spoken", Variant()),
}


@dataclass
class Item:
    """An example in the pool."""

    example: Any
    uses: int = 0
    used_at: int = 0
    score: float = 1.0


@dataclass
class Cap:
    """How often an item may be used, by what copies and first uses lost."""

    threshold: float | None
    """None: it stays what it is."""
    value: int = CAP
    windows: int = 0
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    seen: list[int] = field(default_factory=list)

    def observe(self, losses: np.ndarray, is_copy: np.ndarray) -> None:
        self.seen.append(self.value)
        if self.threshold is None:
            return
        for copies, found in enumerate(self.losses):
            found += losses[is_copy == bool(copies)].tolist()
        if len(self.seen) % WINDOW:
            return
        self.windows += 1
        first, copied = self.losses
        self.losses = ([], [])
        if copied and first:
            gap = 1 - statistics.fmean(copied) / max(1e-9, statistics.fmean(first))
            if gap > self.threshold:
                self.value = max(1, self.value - 1)
            elif gap < self.threshold / 2:
                self.value = min(CAP, self.value + 1)
        elif self.value == 1 and self.windows % PROBE_EVERY == 0:
            self.value = 2


def pool_of(task: Any) -> tuple[int, int]:
    """Return the items that the pool holds, and the steps between uses."""
    size = task.recipe.batch_size
    batches = max(CAP, min(POOL_BATCHES, int(len(task.train) // size * POOL_SHARE)))
    return batches * size, min(DISTANCE, batches)


def trained(task: Any, arm: str, seed: int, rate: float, part: str) -> dict[str, Any]:
    """Train through the budget; return time, fresh examples and loss at each test."""
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, 1])
    network = task.network()
    optimizer = task.optimizer(network, rate)
    recipe, size = task.recipe, task.recipe.batch_size
    room, distance = pool_of(task)
    threshold = float(arm.split()[1]) if arm.startswith("measured") else None
    cap = Cap(threshold, value=1 if arm == "no echo" else CAP)
    pool: list[Item] = []
    fresh_of = iter(
        epoch_after_epoch(stoker.from_dataset(task.train, seed=seed).shuffle().map(task.prepare))
    )
    now, taken, step = 0.0, 0, 0
    points: list[tuple[float, int, float]] = []
    next_test = recipe.spacing_fresh
    while taken < recipe.budget_fresh:
        apart = 2 + (distance - 2) * min(step, RAMP_STEPS) // RAMP_STEPS
        ready = [i for i in pool if i.uses < cap.value and step - i.used_at >= apart]
        left = sum(max(0, cap.value - i.uses) for i in pool)
        few = 2 * left <= (apart * (cap.value - 1) + 2) * size
        lacking = max(0, size - len(ready), few * size // cap.value)  # as AdaptivePool.even_share
        now = max(now, (taken + lacking) * RATIO / size)
        come = min(size, int(now / RATIO * size) - taken)
        entering = [Item(next(fresh_of)) for _ in range(come)]
        repeated, weights = chosen(ready, size - come, arm, rng)
        batch = entering + repeated
        weight = torch.tensor([1.0] * come + weights)
        examples = [task.augment(item.example, rng) for item in batch]
        arrays = np.stack([e[0] for e in examples])
        labels = torch.as_tensor(np.asarray([e[1] for e in examples]))
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(min(1.0, taken / recipe.budget_fresh))
        optimizer.zero_grad(set_to_none=True)
        logits = network(task.input_of(arrays))
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        (losses * weight).mean().backward()
        optimizer.step()
        with torch.no_grad():
            errors = logits.softmax(1)
            errors[torch.arange(len(labels)), labels] -= 1
            scores = errors.norm(dim=1).numpy()
        cap.observe(losses.detach().numpy(), np.arange(len(batch)) >= come)
        now, taken, step = now + 1, taken + come, step + 1
        for item, score in zip(batch, scores, strict=True):
            item.uses, item.used_at, item.score = item.uses + 1, step, float(score)
        pool = [i for i in pool + entering if i.uses < CAP]
        if len(pool) > room:
            pool.sort(key=lambda i: (-i.uses, i.used_at))
            pool = pool[len(pool) - room :]
        if taken >= next_test:
            next_test += recipe.spacing_fresh
            network.eval()
            with torch.inference_mode():
                points.append((now, taken, float(task.score(network, part).loss)))
            network.train()
    return {"points": points, "factor": step * size / taken, "cap": statistics.fmean(cap.seen)}


def chosen(
    ready: list[Item], count: int, arm: str, rng: np.random.Generator
) -> tuple[list[Item], list[float]]:
    """Return what is repeated, and how much each counts."""
    if arm != "EL2N" or not count:
        ready.sort(key=lambda item: (item.used_at, item.uses))
        return ready[:count], [1.0] * count
    scores = np.array([item.score for item in ready]) + 1e-3
    shares = scores / scores.sum()
    drawn = rng.choice(len(ready), count, replace=False, p=shares)
    weights = 1 / (len(ready) * shares[drawn])
    return [ready[n] for n in drawn], np.minimum(weights, 10).tolist()


def arms() -> list[str]:
    return ["no echo", "cap of 4", *(f"measured {t:g}" for t in THRESHOLDS), "EL2N"]


def rows_of(task: Any, seeds: int) -> Iterator[dict[str, Any]]:
    """Tune every arm, then train it."""
    for arm in arms():
        found = {
            rate: statistics.fmean(
                trained(task, arm, TUNED_ON + n, rate, "validation")["points"][-1][2]
                for n in range(TUNING_SEEDS)
            )
            for rate in task.recipe.learning_rates
        }
        rate = min(found, key=lambda r: found[r])
        for seed in range(seeds):
            yield {"arm": arm, "seed": seed, "rate": rate, **trained(task, arm, seed, rate, "test")}


def evaluate(made: Report) -> None:
    """Hold each arm to training without echoing and to a cap of 4, seed by seed."""
    table: list[tuple[object, ...]] = []
    for task in dict.fromkeys(row["task"] for row in made.rows):
        runs = {
            arm: sorted(
                (r for r in made.rows if (r["task"], r["arm"]) == (task, arm)),
                key=lambda r: r["seed"],
            )
            for arm in arms()
        }
        curves = {arm: [curve(r) for r in found] for arm, found in runs.items()}
        target = statistics.median(
            value_at(TARGET_SHARE * at[-1], at, losses) for at, _, losses in curves["no echo"]
        )
        hits = {
            arm: [crossing(times, losses, target) or float("inf") for _, times, losses in found]
            for arm, found in curves.items()
        }
        ends = {arm: [losses[-1] for _, _, losses in found] for arm, found in curves.items()}
        table.append((task, "", "", "", ""))
        for arm in arms():
            less = [a - b for a, b in zip(ends[arm], ends["cap of 4"], strict=True)]
            table.append(
                (
                    f"  {arm}",
                    f"{statistics.fmean(r['factor'] for r in runs[arm]):.2f}",
                    f"{statistics.median(ends[arm]):.3f}",
                    ""
                    if arm == "cap of 4"
                    else f"{statistics.median(less):+.3f} ({min(less):+.3f} .. {max(less):+.3f})",
                    "" if arm == "no echo" else Ratio.of(hits["no echo"], hits[arm]),
                )
            )
    made.show(("", "factor", "loss", "over that of cap 4", "speed-up"), table)


def curve(row: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Return fresh examples, times and smoothed losses."""
    times, fresh, losses = zip(*row["points"], strict=True)
    return list(fresh), list(times), smoothed(losses)


def kept_rows(tasks: list[str]) -> list[dict[str, Any]]:
    """Return the stored rows of other tasks."""
    path = RESULTS / f"{Path(__file__).stem}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["task"] not in tasks]


def main() -> None:
    made_by = parser(__doc__, evaluate)
    made_by.add_argument("--data", type=Path, help="folder of data sets")
    made_by.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    arguments = made_by.parse_args()
    torch.set_num_threads(1)
    with report(__file__, arguments) as made:
        for row in kept_rows(arguments.tasks) if not arguments.quick else ():
            made.add(**row)
        for name in arguments.tasks[: 1 if arguments.quick else None]:
            workload, variant = TASKS[name]
            task = class_of(workload)(
                variant, None if arguments.quick else data_folder(arguments.data)
            )
            for row in rows_of(task, 1 if arguments.quick else arguments.rounds):
                made.add(task=name, **row)
                print(
                    f"{name}: {row['arm']}, seed {row['seed']}, rate {row['rate']}: "
                    f"{row['points'][-1][2]:.3f}, mean cap {row['cap']:.1f}"
                )


if __name__ == "__main__":
    main()
