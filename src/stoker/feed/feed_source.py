"""Feeds as the sources of a job's pipeline."""

from __future__ import annotations

from typing import Any

from stoker.feed.client import FeedClient, Pass
from stoker.pipeline import Pipeline
from stoker.sources.stream import LoaderSource, Resumable
from stoker.sources.unsharded import warn_unsharded_feed


def pipeline_of(job: FeedClient, seed: int | None) -> Pipeline:
    """Return the pipeline of what a job is handed."""
    source: Any = FeedBatches(job) if job.about.batched else FeedExamples(job)
    return Pipeline(source, seed)


class FeedBatches(LoaderSource):
    """The batches of a feed."""

    def __init__(self, job: FeedClient) -> None:
        super().__init__(job)
        self.name = f"from_feed({job.name!r})"

    def warn_unsharded(self) -> None:
        """Warn where several ranks are there: each is handed all batches."""
        warn_unsharded_feed()


class FeedExamples(Resumable):
    """The examples of a feed."""

    def __init__(self, job: FeedClient) -> None:
        super().__init__(job)
        self.name = f"from_feed({job.name!r})"
        self._job = job
        self.open = self._opened

    def __len__(self) -> int:
        return len(self._job)

    def _opened(self) -> Pass:
        self._pass = iter(self._job)
        return self._pass

    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present epoch have been read."""
        return {**self._job.state_dict(), "epoch": self._pass.epoch, "number": number}

    def between(self) -> Any:
        """Return the state between epochs."""
        return self._job.state_dict()

    def load(self, state: Any) -> None:
        """Have the next pass begin in a state."""
        self._job.load_state_dict(state)
