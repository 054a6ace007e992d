"""``Stage``, ``WindowStage``: steps of a user's own; see docs/extending.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from stoker.stages.stage import ChainView
from stoker.stages.window import Windows


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


class WindowStage(Stage):
    """A step that makes each output of some of its inputs, which numbers alone tell.

    So ``len()`` is known, and nothing is kept for a resume: the examples are read again. Decisions
    by values are a ``scan``. Outputs are numbered from 0 in each epoch, inputs too: the examples
    that come here on this rank, in their order.

    Example, sliding windows of five examples::

        class Windows(stoker.WindowStage):
            def inputs(self, output):
                return range(output, output + 5)

            def make(self, examples):
                return np.stack(examples)

        pipeline.apply(Windows())
    """

    @abstractmethod
    def inputs(self, output: int) -> range:
        """Return the numbers of the inputs that an output is made of: one at least.

        Each output begins, and ends, behind the one before it. The first output that lacks an input
        ends the epoch.
        """

    @abstractmethod
    def make(self, examples: list[Any]) -> Any:
        """Return an output, made of its inputs.

        They are its own, so it may write into them. It is called as the function of a ``map``.
        """

    def lower(self, pipeline: Any) -> Any:
        """Return the pipeline with its windows."""
        return pipeline._then(Windows(self)).map(self.make)
