"""What the documentation says of the rows: sentences that are written from them.

They stand between `<!-- said: NAME -->` and `<!-- end -->` in the pages of `PAGES`.
`experiments/run evidence` writes them, and a test compares them. So no sentence outlives its table.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.arms import Arm
from experiments.equal_time import sentences as equal_time
from experiments.equal_time.rows import read_rows
from experiments.method import Interval, Ratios
from experiments.suite.plan import BASELINE
from experiments.suite.rows import RESULTS, Rows
from experiments.suite.summary import ArmSummary, Comparison, compared
from experiments.suite.tables import ratio_text
from experiments.suite.workload import Variant
from experiments.suite.workloads import NAMES, class_of

_ROOT = RESULTS.parents[1]
PAGES = tuple(
    _ROOT / name
    for name in (
        "README.md",
        "docs/evidence.md",
        "docs/echoing.md",
        "docs/schedules.md",
        "docs/loaders.md",
    )
)

_BLOCK = re.compile(r"(<!-- said: (?P<name>[^\n]*?) -->\n).*?( *<!-- end -->)", re.DOTALL)
_WIDTH = 117
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
_TITLES = {
    "fashion": "Fashion-MNIST",
    "characters": "characters",
    "spoken": "spoken digits",
    "cifar": "CIFAR-10",
    "words": "words",
    "detection": "detection",
}
BEFORE = Arm("before", "auto")
LOADER = Arm("loader", "auto")


def with_sentences(text: str, results: Path = RESULTS) -> str:
    """Return a page with its sentences. Raises LookupError for an unknown one."""
    return _BLOCK.sub(lambda m: m[1] + _SAID[m["name"]](results) + "\n" + m[3], text)


class Told(NamedTuple):
    """The tasks where an arm's speed-up is clear, where it is not, and where it is void."""

    clear: dict[str, float]
    unclear: dict[str, float]
    void: dict[str, float]
    """With the most that is possible."""


@cache
def found_of(name: str, results: Path = RESULTS, variant: Variant | None = None) -> Comparison:
    """Compare the rows of a workload. Raises LookupError where there are none."""
    variant = variant or Variant()
    recipe = class_of(name).recipe_of(variant, quick=False)
    found = compared(Rows(results / f"{name}.json", name, variant.name, recipe))
    if found is None:
        raise LookupError(f"there are no rows of {name}, {variant.name}")
    return found


def arm_in(found: Comparison, arm: Arm) -> ArmSummary:
    """Return one arm. Raises LookupError if it was not run."""
    for each in found.arms:
        if each.arm == arm:
            return each
    raise LookupError(f"{arm} was not run")


def is_clear(ratios: Ratios) -> bool:
    """Whether all of the interval is above 1."""
    return Interval.of(ratios.values).low > 1


def told(arm: Arm, ratio: float, results: Path = RESULTS) -> Told:
    """Sort the tasks by what an arm brought there."""
    sorted_in = Told({}, {}, {})
    for name in NAMES:
        found = found_of(name, results)
        each = arm_in(found, arm)
        ratios = each.speedups[ratio]
        if found.is_void(each, ratio):
            sorted_in.void[name] = found.bound(each, ratio)
        elif is_clear(ratios):
            sorted_in.clear[name] = ratios.median or 0.0
        else:
            sorted_in.unclear[name] = ratios.median or 0.0
    return sorted_in


def _span(values: Iterable[float]) -> str:
    low, high = (f"{edge(values):.1f}" for edge in (min, max))
    return low if low == high else f"{low} to {high}"


def _names(names: Iterable[str]) -> str:
    titles = [_TITLES[name] for name in names]
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _number(items: Sequence[object] | dict[str, float]) -> str:
    return _NUMBERS[len(items)]


def _gain(found: Told, of: str = "") -> str:
    """Tell a range, and the tasks that are not in it."""
    on = f"{_number(found.clear)}{of}"
    if of and len(found.clear) == len(NAMES):
        on = "all six tasks"
    text = f"{_span(found.clear.values())} times faster on {on}"
    if found.unclear:
        text += f", without a clear difference on {_names(found.unclear)}"
    return text


def _void(found: Told) -> str:
    if not found.void:
        return ""
    return (
        f" On {_names(found.void)} the speed-up is above R, which says that training without "
        "echoing was not at its best there; it is left out."
    )


def _tuned(results: Path) -> str:
    """Say on how many tasks the baseline is not tuned in full."""
    bases = [arm_in(found_of(name, results), BASELINE) for name in NAMES]
    older = [base for base in bases if base.warm_up is None]
    if not older:
        return ""
    return (
        f" On {_number(older)} of the six, training without echoing was tuned by its rate alone, "
        "not by its warm-up: expect less there."
    )


def _fill(text: str, first: str = "", others: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _bullets(texts: Iterable[str]) -> str:
    return "\n".join(_fill(text, "- ", "  ") for text in texts)


def _readme(results: Path) -> str:
    before, loader = told(BEFORE, 4.0, results), told(LOADER, 4.0, results)
    without = f" on {_names(before.void)} it is not known" if before.void else ""
    return _bullets(
        [
            "**Where storage was four times slower than a step**, training with an echo before "
            f"augmentation reached its target {_gain(before, ' of six tasks')}"
            f"{without and ',' + without}; with an echo around a loader, {_gain(loader)}."
            f"{_tuned(results)} ([Evidence](docs/evidence.md).)",
            equal_time.readme(read_rows()),
        ]
    )


def _loader(results: Path) -> str:
    loader = told(LOADER, 4.0, results)
    return _fill(
        "Without `transform=`, a repeated batch is the same batch again, with the same "
        "augmentation. The value of such copies depends on the task: on storage four times slower "
        f"than training, training reached the target {_gain(loader, ' of six tasks')} "
        "([evidence](evidence.md))."
    )


def _in_short(results: Path) -> str:
    tasks = {name: found_of(name, results) for name in NAMES}
    fashion = tasks["fashion"]
    before, loader = told(BEFORE, 4.0, results), told(LOADER, 4.0, results)
    at_2 = told(Arm("before", "auto", 2.0), 2.0, results)
    rhos = [arm_in(found, BEFORE).fresh_ratios.median or 0.0 for found in tasks.values()]
    level = [
        name
        for name in before.clear | before.unclear
        if _overlap(
            arm_in(tasks[name], BEFORE).speedups[4.0],
            arm_in(tasks[name], Arm("before", 4, 0.0)).speedups[4.0],
        )
    ]
    place = {
        p: [arm_in(found, Arm(p, 4, 0.0)).speedups[4.0].median or 0.0 for found in tasks.values()]
        for p in ("before", "after", "batch")
    }
    slower = [
        name
        for name, found in tasks.items()
        if (arm_in(found, Arm("before", 4, 0.0)).speedups[2.0].median or 0.0)
        < (arm_in(found, Arm("before", 2, 0.0)).speedups[2.0].median or 0.0)
    ]
    wide = found_of("fashion", results, Variant(batch_size=128))
    small = found_of("fashion", results, Variant(small=True))
    bare = found_of("fashion", results, Variant(small=True, augmentation=False))
    return _bullets(
        [
            "**`.echo()` before augmentation reached the target "
            f"{_gain(before, ' of six tasks')}**.{_void(before)}{_tuned(results)} "
            f"In fresh examples it needed {_span(rhos)} times fewer, on all six. "
            f"Its factor follows the stall; on {_number(level)} of the "
            f"{_number(before.clear | before.unclear)} tasks its interval and that of e = 4 "
            "overlap.",
            "**The place of the echo matters.** With e = 4, copies before augmentation brought "
            f"{_span(place['before'])}, after augmentation {_span(place['after'])}, of whole "
            f"batches {_span(place['batch'])}.",
            f"**Around a loader it depends on the task**: {_gain(loader)}. {_transforms(tasks)} So "
            "try both on a validation set.",
            f"**Whole batches repeated eight times did harm** with batches of 32 "
            f"({_rho(fashion, Arm('batch', 8, 0.0))} of the fresh examples' worth), and not with "
            f"batches of 128 ({_rho(wide, Arm('batch', 8, 0.0))}). Copies before augmentation were "
            f"worth {_rho(fashion, Arm('before', 16, 0.0))} at 16 uses.",
            _losses(tasks),
            "**With little data** (1,000 examples, 16 epochs) copies before augmentation brought "
            f"{_rho(small, Arm('before', 4, 0.0))}, whole batches "
            f"{_rho(small, Arm('batch', 4, 0.0))}; without augmentation {_missed(bare)} of "
            f"{_number(bare.arms[1:])} arms missed the target: compare before you echo there.",
            f"**With R at 2** an echo before augmentation was {_gain(at_2)}.{_void(at_2)} A fixed "
            f"factor of 4 was slower there than one of 2 on {_number(slower)} of six tasks: "
            "training repeats data although fresh data is ready.",
        ]
    )


def _overlap(a: Ratios, b: Ratios) -> bool:
    one, other = Interval.of(a.values), Interval.of(b.values)
    return one.low <= other.high and other.low <= one.high


def _rho(found: Comparison, arm: Arm) -> str:
    return f"{arm_in(found, arm).fresh_ratios.median or 0.0:.2g}"


def _with_interval(found: Comparison, arm: Arm) -> str:
    return ratio_text(arm_in(found, arm).fresh_ratios)


def _raised(found: Comparison) -> str:
    raised = [each for each in found.arms[1:] if each.losses.interval.low > 0]
    others = len(found.arms) - 1
    return "every echo" if len(raised) == others else f"{_number(raised)} of {others} echoes"


def _missed(found: Comparison) -> str:
    return _NUMBERS[sum(2 * each.misses > each.seeds for each in found.arms)]


def _transforms(tasks: dict[str, Comparison]) -> str:
    """Say where a transform for each use helped an echoed loader."""
    kinds: dict[str, list[str]] = {"helped": [], "made no clear difference": [], "did harm": []}
    for name, found in tasks.items():
        for transform in class_of(name).transforms[:1]:
            plain = arm_in(found, LOADER).speedups[4.0]
            more = arm_in(found, Arm("loader", "auto", 4.0, transform)).speedups[4.0]
            if _overlap(plain, more):
                kind = "made no clear difference"
            else:
                kind = "helped" if (more.median or 0) > (plain.median or 0) else "did harm"
            kinds[kind].append(name)
    parts = [f"{kind} on {_names(names)}" for kind, names in kinds.items() if names]
    return f"A transform for each use {'; it '.join(parts)}."


def _compare(results: Path) -> str:
    tasks = {name: found_of(name, results) for name in NAMES}
    return _bullets(
        [
            f"Compare with and without. {_transforms(tasks)} (A flip of images, masks of "
            "spectrograms: [evidence](evidence.md).)"
        ]
    )


def _losses(tasks: dict[str, Comparison]) -> str:
    """Say which arms did not have a lower loss after equally many fresh examples."""
    level, worse, total = [], [], 0
    for name, found in tasks.items():
        for each in found.arms[1:]:
            total += 1
            label = f"{each.arm.label} on {_TITLES[name]}"
            if each.arm.follows:
                label = label.replace(" on ", f", R = {each.arm.slowness:g}, on ", 1)
            if each.losses.interval.low > 0:
                worse.append(label)
            elif each.losses.interval.high >= 0:
                level.append(label)
    return (
        "**After equally many fresh examples the loss was lower** in "
        f"{total - len(level + worse)} of {total} arms. Level: {'; '.join(level) or 'none'}. "
        f"Higher: {'; '.join(worse) or 'none'}."
    )


def _paper(results: Path) -> str:
    tasks = {name: found_of(name, results) for name in NAMES}
    fashion, wide = tasks["fashion"], found_of("fashion", results, Variant(batch_size=128))
    near = found_of("fashion", results, Variant(pool_batches=4))
    far = found_of("fashion", results, Variant(pool_batches=64))
    two = [
        arm_in(found, Arm(place, 2, 0.0)).fresh_ratios
        for found in tasks.values()
        for place in ("before", "after", "batch")
    ]
    ahead = [
        name
        for name, found in tasks.items()
        if max(_median(found, Arm(place, 4, 0.0)) for place in ("after", "batch"))
        < _median(found, Arm("before", 4, 0.0))
    ]
    before, batch = Arm("before", 4, 0.0), Arm("batch", 4, 0.0)
    sooner = [arm_in(tasks[name], before).speedups[6.0] for name in ("fashion", "characters")]
    eight, sixteen = Arm("batch", 8, 0.0), Arm("before", 16, 0.0)
    at_4 = [arm_in(fashion, Arm("before", e, 0.0)).speedups[4.0].median or 0.0 for e in (4, 16)]
    lines = [
        (
            "with e = 2, all but one of their cases need fewer fresh examples",
            f"{sum(map(is_clear, two))} of {len(two)} clearly do, in three places on six tasks",
        ),
        (
            "earlier places need fewer",
            f"with e = 4, before augmentation is ahead on {_number(ahead)} of six tasks",
        ),
        (
            "the exception: batch echoing with ResNet-50 on ImageNet needs about as many",
            f"in kind: batches with e = 4 on Fashion-MNIST ({_rho(fashion, batch)}) and CIFAR-10 "
            f"({_rho(tasks['cifar'], batch)})",
        ),
        (
            "ResNet-50 from remote storage is 3.25 times as fast with e = 5, before augmentation, "
            "R about 6",
            f"with e = 4 and R = 6, {sooner[0].median:.1f} times on Fashion-MNIST and "
            f"{sooner[1].median:.1f} on characters",
        ),
        (
            "factors beyond some point need more fresh examples again; larger batches allow larger "
            "factors",
            f"batches with e = 8 have a rho of {_rho(fashion, eight)} with B = 32 and "
            f"{_rho(wide, eight)} with B = 128. Before augmentation e = 16 has "
            f"{_rho(fashion, sixteen)}; at R = 4 it brings {at_4[1]:.1f} in seconds, e = 4 "
            f"{at_4[0]:.1f}",
        ),
        (
            "the gain of batch echoing stays or grows with the batch size",
            f"e = 4 has {_rho(fashion, batch)} with B = 32 and {_rho(wide, batch)} with B = 128",
        ),
        (
            "more shuffling after the echo needs fewer fresh examples",
            f"pools of 4, 16 and 64 batches have {_rho(near, before)}, {_rho(fashion, before)} and "
            f"{_rho(far, before)} before augmentation; the largest takes long to fill",
        ),
        (
            "at an equal budget of fresh examples every variant is at least as good",
            "see above, and except for little data",
        ),
    ]
    return "\n".join(
        ["| theirs | here |", "|---|---|", *(f"| {theirs} | {here} |" for theirs, here in lines)]
    )


def _median(found: Comparison, arm: Arm) -> float:
    return arm_in(found, arm).fresh_ratios.median or 0.0


def _rates(results: Path) -> str:
    above: list[str] = []
    same: list[str] = []
    below: list[str] = []
    for name in NAMES:
        found = found_of(name, results)
        base = arm_in(found, BASELINE).learning_rate
        rate = arm_in(found, Arm("before", 4, 0.0)).learning_rate
        (above if rate > base else below if rate < base else same).append(name)
    return _bullets(
        [
            "**Example echoing, default pool** (copies are well mixed): tune the rate again, one "
            "step above yours and one below. With e = 4 before augmentation the best of the "
            f"candidates was higher than without echoing on {_number(above)} of six tasks, the "
            f"same on {_number(same)}, lower on {_number(below)} ([evidence.md](evidence.md))."
        ]
    )


def _momentum(results: Path) -> str:
    plain = found_of("fashion", results)
    without = found_of("fashion", results, Variant(momentum=False))
    arm = Arm("batch", 4, 0.0)
    return _fill(
        "Measured once, on Fashion-MNIST with whole batches used 4 times: `rho` was "
        f"{_with_interval(plain, arm)} with momentum 0.9 and "
        f"{_with_interval(without, arm)} without "
        "([evidence.md](evidence.md)).",
        "  ",
        "  ",
    )


def _batch_norm(results: Path) -> str:
    plain = found_of("fashion", results)
    without = found_of("fashion", results, Variant(batch_norm=False))
    arm = Arm("batch", 4, 0.0)
    return _fill(
        "Measured once, on Fashion-MNIST with whole batches used 4 times: `rho` was "
        f"{_with_interval(plain, arm)} with BatchNorm and "
        f"{_with_interval(without, arm)} with GroupNorm "
        "([evidence.md](evidence.md)).",
        "  ",
        "  ",
    )


def _small(results: Path) -> str:
    small = found_of("fashion", results, Variant(small=True))
    bare = found_of("fashion", results, Variant(small=True, augmentation=False))
    harm = statistics.median(each.losses.median for each in bare.arms[1:])
    return _bullets(
        [
            "**Small data, many epochs, no augmentation behind the echo.** With 1,000 images and "
            f"16 epochs {_raised(bare)} raised the test loss (by {harm:.2f} in the median of the "
            "arms). With crops and flips behind the echo, e = 4 still brought "
            f"{_rho(small, Arm('before', 4, 0.0))}. {equal_time.small(read_rows())} "
            "([evidence.md](evidence.md#does-it-last))."
        ]
    )


_SAID: dict[str, Callable[[Path], str]] = {
    "readme": _readme,
    "in short": _in_short,
    "loader": _loader,
    "paper": _paper,
    "transforms": _compare,
    "rates": _rates,
    "momentum": _momentum,
    "batch norm": _batch_norm,
    "small data": _small,
    "lasting": lambda _: _bullets(equal_time.lasting(read_rows())),
    "max factor": lambda _: _fill(equal_time.max_factor(read_rows()), "  ", "  "),
    "caps": lambda _: _bullets(equal_time.caps(read_rows())),
    "passes": lambda _: _bullets(equal_time.passes(read_rows())),
    "shapes": lambda _: _bullets(equal_time.shapes(read_rows())),
    "copies": lambda _: _bullets(equal_time.copies(read_rows())),
    "missing": lambda _: _bullets([equal_time.missing(read_rows())]),
}
