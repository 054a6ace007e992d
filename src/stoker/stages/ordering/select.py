"""Choosing examples by their numbers in the source, without reading them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.signals import pass_on
from stoker.basics.validate import is_number, is_whole_number
from stoker.errors import CombinationError, StageError
from stoker.schedule import rng
from stoker.schedule.orders.order import permutation
from stoker.schedule.orders.subset import EligibleIndices, Subset
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, SourceBase, check_fields
from stoker.stages.functions.operation import unfit_signature
from stoker.stages.stage import ChainStage, ChainView, Traits, refuse_behind

# Numbers that are handled at once: 8 MB. Chosen, not measured.
_AT_ONCE = 1 << 20
# The sum of fractions that were rounded.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Select(ChainStage):
    """The stage ``.select()``, also of ``.split()``.

    Attributes:
        which: numbers, a mask, or a function of number and name; None once it is ``chosen``.
        chosen: the numbers that it leaves of those before it; None until it is bound.
        length: of the source then.
        digest: the same for the same numbers.
    """

    which: Any = field(default=None, compare=False, repr=False)
    chosen: Subset | None = field(default=None, compare=False, repr=False)
    length: int = 0
    digest: str = ""
    traits = Traits(selects=True, keeps_fields=True)

    @staticmethod
    def of_chosen(chosen: Subset, length: int) -> Select:
        """Return the stage that leaves a set of what comes before it."""
        return Select(None, chosen, length, chosen.digest)

    @property
    def call(self) -> str:
        count = "" if self.chosen is None else f"{len(self.chosen):,} of {self.length:,}"
        return f"select({count})"

    def bind(self, before: ChainView) -> Select:
        """Choose among the numbers that are left, which must not have been ordered yet."""
        source = check_numbers(before, "select(...)")
        if self.chosen is not None:
            return self
        length = len(source)
        chosen = _chosen(self.which, source, before.selection.candidates(length))
        if not len(chosen):
            raise ValueError(f".select() leaves none of {length:,} examples")
        return replace(self.of_chosen(chosen, length), part_of=self.part_of)

    def check_length(self, was: SourceBase, now: SourceBase) -> None:
        raise ValueError(
            f"{was.name} had {self.length:,} examples when some of them were selected, and has "
            f"{now.count():,} now: build the pipeline anew"
        )

    def select(self, selection: Selection) -> Selection:
        assert self.chosen is not None
        return selection.select(self.chosen)

    def signature(self) -> str:
        return f"{self.call[:-1]}, {self.digest})"


def check_numbers(before: ChainView, call: str, of_part: str | None = None) -> IndexedSource:
    """Return the source, if its examples can be chosen by number here; else raise ValueError.

    ``call`` is what asks, and ``of_part`` what a part of a mixture can have in its place, if that
    is something else.
    """
    source = before.source
    if source.has_own_order:
        raise CombinationError(
            f".{call} chooses by a source's numbers, and a mixture has several sources: choose in "
            f"its parts, stoker.mix([a.{of_part or call}, b])"
        )
    if not isinstance(source, IndexedSource):
        what = "a loader yields batches" if source.yields_batches else "a stream has none"
        raise CombinationError(f".{call} chooses examples by their numbers, and {what}")
    refuse_behind(
        call,
        before,
        lambda t: (
            t.shuffles or t.shards or t.filters or t.repeats or t.batches or t.joins or t.scans
        ),
        "put it behind the source",
    )
    return source


def _chosen(which: Any, source: IndexedSource, candidates: EligibleIndices) -> Subset:
    """Return which candidates are meant. Raises TypeError or ValueError for what says none."""
    length = len(source)
    if callable(which):
        if (unfit := unfit_signature(which, 2)) is not None:
            raise TypeError(
                f".select() calls fn(number, name), which {unfit} does not take: give it two "
                "parameters"
            )
        return Subset(_by_function(which, source, candidates), length)
    given: NDArray[Any] = np.asarray(which)
    if given.ndim != 1 or (given.dtype.kind not in "iub" and len(given)):
        raise TypeError(
            ".select() takes numbers of examples, a mask (a boolean for each), or "
            f"fn(number, name), not {type(which).__name__} of shape {given.shape} and {given.dtype}"
        )
    if given.dtype.kind == "b":
        if len(given) != length:
            raise ValueError(
                f".select(): the mask has {len(given):,} entries, and the source has {length:,} "
                "examples: give one for each, by its number in the source"
            )
        return Subset.of_mask(_within(given, candidates))
    numbers = np.sort(given).astype(np.int64, copy=False)
    for number in numbers[[0, -1]].tolist() if len(numbers) else []:
        if not 0 <= number < length:
            raise ValueError(
                f".select(): there is no example {number}; the source has examples 0 to "
                f"{length - 1}"
            )
    twice = np.flatnonzero(np.diff(numbers) == 0)
    if len(twice):
        raise ValueError(
            f".select() takes each example once, and {int(numbers[twice[0]])} is given twice: "
            ".order(fn) repeats examples"
        )
    return Subset(numbers[candidates.has(numbers)], length)


def _within(mask: NDArray[np.bool_], candidates: EligibleIndices) -> NDArray[np.bool_]:
    """Return a mask without what is no candidate."""
    if len(candidates) == len(mask):
        return mask
    mask = mask.copy()
    for start in range(0, len(mask), _AT_ONCE):
        some = mask[start : start + _AT_ONCE]
        some &= candidates.has(np.arange(start, start + len(some)))
    return mask


def _by_function(
    fn: Callable[[int, str], Any], source: IndexedSource, candidates: EligibleIndices
) -> NDArray[np.int64]:
    """Return the candidates for which a function of number and name is true."""
    positions: list[int] = []
    for start in range(0, len(candidates), _AT_ONCE):
        numbers = candidates.at(range(start, min(start + _AT_ONCE, len(candidates))))
        for number in numbers.tolist():
            try:
                is_chosen = fn(number, source.name_of(number))
            except Exception as error:
                pass_on(error)
                path = source.path(number)
                raise StageError("select(fn)", error, index=number, path=path) from error
            if is_chosen:
                positions.append(number)
    return np.array(positions, np.int64)


def parts_of(
    before: ChainView, fractions: Sequence[Any], seed: Any, stratify: Any, groups: Any
) -> list[Select]:
    """Return the stages that split what is left into parts: disjoint, and all of it.

    Args:
        before: the chain.
        fractions: of each part; one alone is that of the first of two.
        seed: keys which examples are in which part.
        stratify: for each example of the source its class, of which each part has its fraction; or
            None.
        groups: for each example of the source its group, which lies in one part; or None.

    Raises TypeError or ValueError for wrong arguments, and for an empty part.
    """
    shares = _fractions(fractions)
    part_of = _parts(before, "split", shares, seed, stratify, groups)
    return [_chosen_by(part_of == part) for part in range(len(shares))]


def folds_of(
    before: ChainView, k: Any, seed: Any, stratify: Any, groups: Any
) -> list[tuple[Select, Select]]:
    """Return for each of ``k`` parts the stages of all other parts together, and of itself.

    The arguments, and what is raised: as for ``parts_of``.
    """
    if not is_whole_number(k) or k < 2:
        raise ValueError(f".folds() takes a number of folds from 2, not {k!r}")
    part_of = _parts(before, "folds", [1 / k] * k, seed, stratify, groups)
    return [
        (_chosen_by((part_of != part) & (part_of < k)), _chosen_by(part_of == part))
        for part in range(k)
    ]


def sample_of(before: ChainView, n: Any, seed: Any) -> Select:
    """Return the stage of ``n`` examples that a seed draws from what is left.

    Raises TypeError or ValueError for wrong arguments.
    """
    source = check_numbers(before, "take(n, seed=...)", "select(...)")
    if not is_whole_number(n) or n < 1:
        raise ValueError(f".take() takes a whole number of examples from 1 on, not {n!r}")
    candidates = before.selection.candidates(len(source))
    mixed = permutation(len(candidates), _key(seed, "take"))
    drawn = candidates.at(mixed.at(range(min(int(n), len(candidates)))))
    return Select.of_chosen(Subset(np.sort(drawn), len(source)), len(source))


def _chosen_by(mask: NDArray[np.bool_]) -> Select:
    return Select.of_chosen(Subset.of_mask(mask), len(mask))


def _key(seed: Any, method: str) -> NDArray[np.uint64]:
    if not is_whole_number(seed) or seed < 0:
        raise ValueError(f".{method}() takes seed= as a whole number from 0, not {seed!r}")
    return rng.key(int(seed), 0, rng.SPLIT)


def _parts(
    before: ChainView, method: str, shares: Sequence[float], seed: Any, stratify: Any, groups: Any
) -> NDArray[Any]:
    """Return the part of each example of the source, ``len(shares)`` for those left out before."""
    source, key = check_numbers(before, f"{method}(...)", "select(...)"), _key(seed, method)
    if stratify is not None and groups is not None:
        raise CombinationError(f".{method}() takes stratify= or groups=: no parts keep to both")
    length = len(source)
    candidates = before.selection.candidates(length)
    count = len(candidates)
    mixed = permutation(count, key)
    if stratify is None and groups is None:
        ends = np.rint(np.cumsum(shares) * count).astype(np.int64)
        parts = np.repeat(np.arange(len(shares)), np.diff(ends, prepend=0))
    else:
        numbers = candidates.at(mixed.at(range(count)))
        if groups is None:
            parts = _stratified(_labels(method, "stratify", stratify, source, numbers), shares)
        else:
            parts = _by_group(_labels(method, "groups", groups, source, numbers), shares)
    part_of = np.full(length, len(shares), np.min_scalar_type(len(shares)))
    for start in range(0, count, _AT_ONCE):
        some = range(start, min(start + _AT_ONCE, count))
        part_of[candidates.at(mixed.at(some))] = parts[some.start : some.stop]
    for part, share in enumerate(shares):
        if not (part_of == part).any():
            raise ValueError(
                f".{method}(): part {part + 1} of {len(shares)}, {share:.3g} of {count:,} "
                "examples, would be empty"
            )
    return part_of


def _fractions(given: Sequence[Any]) -> list[float]:
    """Return the fraction of each part. Raises TypeError or ValueError for what is none."""
    for fraction in given:
        if not is_number(fraction):
            raise TypeError(
                ".split() takes the fraction of each part, such as .split(0.8, 0.2), not "
                f"{fraction!r}"
            )
        if not 0 < fraction < (1 if len(given) == 1 else 1 + _ROUNDING):
            raise ValueError(
                f".split(): a part's fraction lies between 0 and 1, such as .split(0.8, 0.2), not "
                f"{fraction}"
            )
    if len(given) == 1:
        return [float(given[0]), 1 - float(given[0])]
    total = math.fsum(given)
    if abs(total - 1) > _ROUNDING:
        raise ValueError(
            f".split(): the fractions of all parts are 1 together, not {total:.6g}; one alone is "
            "that of the first of two parts"
        )
    return [float(fraction) for fraction in given]


def _labels(
    method: str, argument: str, labels: Any, source: IndexedSource, numbers: NDArray[np.int64]
) -> NDArray[Any]:
    """Return the label of each of these examples. Raises TypeError, ValueError if one has none."""
    length, said = len(source), f".{method}(): {argument}="
    if isinstance(labels, (str, int)):
        check_fields(source, labels)
        labels = source.labels(labels)
    if callable(labels):
        if (unfit := unfit_signature(labels, 2)) is not None:
            raise TypeError(f"{said} is called as fn(number, name), which {unfit} does not take")
        each: list[Any] = [labels(n, source.name_of(n)) for n in numbers.tolist()]
        if tuple in map(type, each):  # NumPy would take them for rows
            known: dict[Any, int] = {}
            each = [one if one is None else known.setdefault(one, len(known)) for one in each]
        found = np.array(each)
        if found.ndim != 1:
            raise ValueError(f"{said} gives {each[0]!r:.60}: return a number, a text, or a tuple")
    else:
        found = np.asarray(labels)
        if found.ndim != 1 or len(found) != length:
            raise ValueError(
                f"{said} has the shape {found.shape}, and the source has {length:,} examples: give "
                "a label for each, by its number in the source, or fn(number, name), or a field"
            )
        found = found[numbers]
    if found.dtype.hasobject and (lacking := numbers[[x is None for x in found]]).size:
        raise ValueError(f"{said} has no label for example {lacking.min()}, but None")
    return found


def _stratified(labels: NDArray[Any], shares: Sequence[float]) -> NDArray[np.int64]:
    """Return the part of each example, so that each part has its share of every label.

    Of each label a part gets its share rounded down or up. What rounding takes from a part with one
    label, it gets with the next ones.
    """
    _, kinds, counts = np.unique(labels, return_inverse=True, return_counts=True)
    debts = np.zeros(len(shares))
    parts = []
    for count in counts.tolist():
        wanted = np.array(shares) * count
        sizes = np.floor(wanted + _ROUNDING).astype(np.int64)
        debts += wanted - sizes
        first = np.argsort(-debts, kind="stable")[: count - int(sizes.sum())]
        sizes[first] += 1
        debts[first] -= 1
        parts.append(np.repeat(np.arange(len(shares)), sizes))
    positions = np.empty(len(labels), np.int64)
    positions[np.argsort(kinds.ravel(), kind="stable")] = np.concatenate([_NONE, *parts])
    return positions


def _by_group(groups: NDArray[Any], shares: Sequence[float]) -> NDArray[np.int64]:
    """Return the part of each example, the same for all of a group.

    The groups, in the order of their first examples here, go to the part that lacks most.
    """
    _, first, kinds, counts = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    lacking = np.array(shares) * len(groups)
    parts = np.empty(len(counts), np.int64)
    for group in np.argsort(first).tolist():
        parts[group] = np.argmax(lacking)
        lacking[parts[group]] -= counts[group]
    return parts[kinds.ravel()]


_NONE = np.empty(0, np.int64)
