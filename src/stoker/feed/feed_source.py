"""Feeds as the sources of a job's pipeline."""

from __future__ import annotations

from typing import Any

from stoker.feed.client import FeedClient, FeedEpoch
from stoker.feed.connection import FeedAddress
from stoker.pipeline import Pipeline
from stoker.sources.stream import LoaderSource, Resumable
from stoker.sources.unsharded import warn_unsharded_feed


def open_feed(address: FeedAddress, seed: int | None) -> Pipeline:
    """Return the pipeline of what a job is handed."""
    client = FeedClient(address)
    source: Any = FeedBatches(client) if client.about.batched else FeedExamples(client)
    return Pipeline(source, seed)


class FeedBatches(LoaderSource):
    """The batches of a feed."""

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self.name = f"from_feed({client.name!r})"

    def warn_unsharded(self) -> None:
        """Warn where several ranks are there: each is handed all batches."""
        warn_unsharded_feed()


class FeedExamples(Resumable):
    """The examples of a feed."""

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self.name = f"from_feed({client.name!r})"
        self._client = client
        self.open = self._opened

    def __len__(self) -> int:
        return len(self._client)

    def _opened(self) -> FeedEpoch:
        self._epoch = iter(self._client)
        return self._epoch

    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present epoch have been read."""
        return {**self._client.state_dict(), "epoch": self._epoch.epoch, "number": number}

    def between(self) -> Any:
        """Return the state between epochs."""
        return self._client.state_dict()

    def load(self, state: Any) -> None:
        """Have the next pass begin in a state."""
        self._client.load_state_dict(state)
