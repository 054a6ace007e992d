"""``Stage``: a step of a user's own, which is made of stoker's; see docs/extending.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from stoker.stages.stage import ChainView


class StagePlan(Protocol):
    """The parts of a stage: methods of ``stoker.Pipeline``, with the same arguments.

    Each returns a new plan with one step more. What else a pipeline sets (its workers, the end of
    its epochs) is not a stage's to say.
    """

    def map(self, fn: Callable[[Any], Any], *, on: Any = None, on_error: Any = None) -> StagePlan:
        """Apply a function to every example, or to every batch behind ``batch``."""
        ...

    def random_map(
        self, fn: Callable[[Any, Any], Any], *, on: Any = None, on_error: Any = None
    ) -> StagePlan:
        """Apply a function that draws random numbers: ``fn(x, rng)``."""
        ...

    def filter(
        self, fn: Callable[[Any], Any], *, on: Any = None, on_error: Any = None
    ) -> StagePlan:
        """Keep the examples for which a function is true."""
        ...

    def scan(
        self,
        fn: Callable[[Any, Any], tuple[Any, Any]],
        state: Any,
        *,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> StagePlan:
        """Call a function with a state on one example after another, in order."""
        ...

    def take(self, n: int) -> StagePlan:
        """Keep the first ``n`` examples."""
        ...

    def skip(self, n: int) -> StagePlan:
        """Leave out the first ``n`` examples."""
        ...

    def shuffle(self, buffer: int | None = None, *, block: int | bool | None = None) -> StagePlan:
        """Draw a new order every epoch."""
        ...

    def pack(self, length: int) -> StagePlan:
        """Join token sequences into full ones."""
        ...

    def batch(
        self, n: int, *, drop_last: bool = False, collate: Callable[[list[Any]], Any] | None = None
    ) -> StagePlan:
        """Stack examples into batches."""
        ...

    def echo(self, factor: Any = "auto", *, pool: int | str | None = None) -> StagePlan:
        """Use items more than once."""
        ...

    def to(self, device: Any) -> StagePlan:
        """Move batches to a device."""
        ...

    def apply(self, stage: Stage) -> StagePlan:
        """Add a stage."""
        ...


class Stage(ABC):
    """A step that ``pipeline.apply(stage)`` adds: it says which of stoker's own it is made of.

    So it runs, resumes and is checked as these are. One stage may be applied to many pipelines, so
    it must not change; what changes belongs into the state of a ``scan``.
    """

    @abstractmethod
    def lower(self, plan: StagePlan) -> StagePlan:
        """Return ``plan`` with the steps that make it: ``return plan.map(fn).filter(other)``."""

    def check(self, before: ChainView) -> None:  # noqa: B027 (its steps have checks of their own)
        """Raise ValueError, TypeError or LookupError where it cannot stand behind ``before``.

        The checks of its steps follow.
        """

    def count(self, items: int) -> int | None:
        """Return how many items come out when ``items`` go in; None: only the end tells.

        For ``len()``, and asked only where its steps leave it open: filters, and scans.
        """
        return None

    def describe(self) -> str:
        """Return its name for ``print(pipeline)`` and errors, by default that of its class."""
        return type(self).__name__
