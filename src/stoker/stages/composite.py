"""``Stage``: a step of a user's own, which is made of stoker's; see docs/extending.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from stoker.stages.stage import ChainView


class Stage(ABC):
    """A step that ``pipeline.apply(stage)`` adds: it says which of stoker's own it is made of.

    So it runs, resumes and is checked as these are. One stage may be applied to many pipelines, so
    it must not change; what changes belongs into the state of a ``scan``.
    """

    @abstractmethod
    def lower(self, pipeline: Any) -> Any:
        """Return a ``Pipeline`` with the steps that make it: ``pipeline.map(fn).filter(other)``.

        What else a pipeline sets (its workers, the end of its epochs) is not a stage's to say.
        """

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
