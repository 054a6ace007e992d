"""Records of the decisions of adaptive echoes, so that a run can be repeated exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from stoker.basics import compact_integers
from stoker.basics.compact_integers import check_integer
from stoker.errors import StateError
from stoker.schedule.pools.adaptive import AdaptiveSnapshot, unpack

# Raised whenever the meaning of a record changes.
FORMAT = 2
# In an epoch of unknown length: a byte each, so a crafted record unpacks to no more than 16 MB.
_MOST_STEPS = 1 << 24


@dataclass(frozen=True)
class Decisions:
    """The decisions of one echo in one epoch.

    Attributes:
        epoch: the epoch.
        first: the first step on record: 0, or where a run was resumed.
        codes: a byte a step.
        carried: the pool that the epoch began with, packed; None if that was empty.
    """

    epoch: int
    first: int
    codes: bytes
    carried: Mapping[str, Any] | None = None

    def code(self, step: int) -> int | None:
        """Return the code of a step; None after the last. Raises StateError before the first."""
        if step < self.first:
            raise StateError(
                f"the record of epoch {self.epoch} begins at batch {self.first}: load the state "
                "that the recorded run went on from"
            )
        at = step - self.first
        return self.codes[at] if at < len(self.codes) else None

    def raise_ended(self, step: int) -> None:
        """Raise StateError: the record has ended, though the epoch goes on."""
        raise StateError(
            f"the record of epoch {self.epoch} ends at batch {step}, where the recorded run was "
            "left: without .replay(record) the epoch goes on from there"
        )

    def raise_damaged(self, step: int) -> None:
        """Raise StateError: no run could decide so."""
        raise StateError(f"the record of epoch {self.epoch} is damaged at batch {step}")

    def after(self, earlier: Decisions | None) -> Decisions:
        """Return these decisions, with earlier ones before them."""
        if earlier is None or earlier.first > self.first:
            return self
        kept = earlier.codes[: self.first - earlier.first]
        if len(kept) < self.first - earlier.first:
            return self
        carried = earlier.carried if self.first else self.carried
        return Decisions(self.epoch, earlier.first, kept + self.codes, carried)


@dataclass(frozen=True)
class EchoRecord:
    """The decisions of one echo in a run, and what they depend on that no signature says.

    Attributes:
        size: items in a full pool.
        epochs: its decisions by epoch.
    """

    size: int
    epochs: Mapping[int, Decisions]


class DecidedLate(Protocol):
    """What batches of an epoch left behind."""

    def after(self, earlier: Any) -> DecidedLate:
        """Return this with what an earlier part of the epoch left behind before it."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        ...


@dataclass(frozen=True)
class RunRecord:
    """A decoded result of ``pipeline.record()``.

    Attributes:
        seed: the run's.
        pipeline: the signature that a pipeline must have for the record to fit, as in states.
        echo: the decisions of an adaptive echo; None without one.
        late: what batches left behind, by epoch, as it was encoded.
    """

    seed: int
    pipeline: list[str]
    echo: EchoRecord | None
    late: Mapping[int, Any] = field(default_factory=dict)

    def check_fits(self, seed: int, pipeline: list[str]) -> None:
        """Raise StateError for a pipeline with another seed, or another signature."""
        if self.seed != seed:
            raise StateError(
                f"the record is of another run: its seed is {self.seed}, this pipeline's is {seed}"
            )
        if self.pipeline != pipeline:
            raise StateError(
                f"the record belongs to another pipeline: {difference_of(self.pipeline, pipeline)}"
            )

    def late_of(self, epoch: int) -> Any:
        """Return what the batches of an epoch left behind, as it was encoded.

        Raises StateError if it is not on record.
        """
        return _of_epoch(self.late, epoch)

    def of(self, epoch: int) -> Decisions:
        """Return the decisions of the echo in an epoch. Raises StateError when there are none."""
        found: Decisions = _of_epoch({} if self.echo is None else self.echo.epochs, epoch)
        return found

    def carried_pool(
        self, epoch: int, items: int, max_factor: int, group: int
    ) -> AdaptiveSnapshot | None:
        """Return the echo's pool at the beginning of an epoch; None if it was empty.

        Args:
            epoch: which epoch.
            items: how many fresh items every epoch has.
            max_factor: how often an item is used at most.
            group: the items in a step.

        Raises StateError when it is not on record, or damaged.
        """
        found = self.of(epoch)
        if found.carried is None or self.echo is None:
            return None
        fits = {"max_factor": max_factor, "size": self.echo.size, "group": group}
        try:
            return unpack(found.carried, **fits, items=items, earlier=epoch * items)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"the record is damaged: {type(error).__name__}: {error}") from error


def _of_epoch(found: Mapping[int, Any], epoch: int) -> Any:
    if epoch in found:
        return found[epoch]
    some = sorted(found)[:10]  # they fit into a line of an error
    known = ", ".join([*map(str, some), *["..."] * (len(found) > 10)]) or "none"
    raise StateError(f"the record has no epoch {epoch}; it has {known}")


def difference_of(theirs: list[str], ours: list[str]) -> str:
    """Say where two signatures differ."""
    pairs = zip_longest(theirs, ours, fillvalue="no further stage")
    a, b = next((pair for pair in pairs if pair[0] != pair[1]), (theirs, ours))
    there = a if type(a) is str and len(a) < 200 else compact_integers.short_repr(a)
    return f"it has {there} where this one has {b}"


def encode(
    seed: int,
    pipeline: list[str],
    echo: EchoRecord | None,
    late: Mapping[int, DecidedLate],
) -> dict[str, Any]:
    """Return a record, ready for JSON. It takes little more than 1.25 bytes a step, at most."""
    record: dict[str, Any] = {"format": FORMAT, "seed": seed, "pipeline": pipeline, "echo": None}
    if echo is not None:
        epochs = {
            str(epoch): {
                "first": each.first,
                "codes": compact_integers.encode_bytes(np.frombuffer(each.codes, np.uint8)),
                **({"carried": dict(each.carried)} if each.carried else {}),
            }
            for epoch, each in echo.epochs.items()
        }
        record["echo"] = {"pool": echo.size, "epochs": epochs}
    if late:
        record["late"] = {str(epoch): each.to_json() for epoch, each in late.items()}
    return record


def decode(record: Any, uses: int | None) -> RunRecord:
    """Read the result of ``encode``.

    Args:
        uses: the most uses of an epoch's fresh items; None if it is unknown.

    Raises StateError if it is something else, or damaged.
    """
    if not isinstance(record, Mapping) or "echo" not in record:
        raise StateError("this is no record of a stoker run (pipeline.record() makes one)")
    if record.get("format") != FORMAT:
        raise StateError(
            f"the record has format {record.get('format')}; this version reads {FORMAT}"
        )
    try:
        return RunRecord(
            check_integer(record["seed"], 0, None),
            _texts(record["pipeline"]),
            None if record["echo"] is None else _echo(record["echo"], uses),
            {check_integer(int(at)): each for at, each in record.get("late", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the record is damaged: {type(error).__name__}: {error}") from error


def _echo(echo: Mapping[str, Any], uses: int | None) -> EchoRecord:
    # A step has one use at least, and a pool hands on no more than the epoch before had.
    steps = _MOST_STEPS if uses is None else 2 * uses + 1
    epochs = {
        int(epoch): Decisions(
            int(epoch),
            check_integer(each["first"]),
            compact_integers.decode_bytes(each["codes"], steps).tobytes(),
            each.get("carried"),
        )
        for epoch, each in echo["epochs"].items()
    }
    return EchoRecord(check_integer(echo["pool"], 1), epochs)


def _texts(lines: Any) -> list[str]:
    if type(lines) is not list or not all(type(line) is str for line in lines):
        raise TypeError("the signature is no list of texts")
    return list(lines)
