"""Sources that read from a feed: batches or examples."""

from __future__ import annotations

from typing import Any

from stoker.chain.chain import Chain
from stoker.distributed.unsharded import warn_unsharded_feed
from stoker.feed.client import FeedClient, FeedEpoch
from stoker.feed.connection import FeedAddress
from stoker.pipeline import Pipeline
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource
from stoker.sources.origin import Origin


def open_feed(address: FeedAddress, seed: int | None) -> Pipeline[Any]:
    client = FeedClient(address)
    source: Origin = FeedBatches(client) if client.about.batched else FeedExamples(client)
    return Pipeline(Chain.begin(source, seed))


class FeedBatches(LoaderSource):
    """The batches of a feed, whose client is the loader."""

    @property
    def name(self) -> str:
        return f"from_feed({self.loader.name!r})"

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if there are several ranks: the feed gives each rank all batches."""
        warn_unsharded_feed()

    def lag_outputs(self) -> int:
        lag: int = self.loader.lag_outputs
        return lag

    def state_between(self, *, left: bool) -> Any:
        return _between(self.loader, left)


class FeedExamples(IterableSource):
    """The examples of a feed: a stream that can begin in the middle of a pass."""

    takes_state = True

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self._client = client

    @property
    def name(self) -> str:
        return f"from_feed({self._client.name!r})"

    def count(self) -> int:
        return len(self._client)

    def open(self, epoch: int, saved: Any = None, number: int = 0) -> FeedEpoch:
        if saved is not None:
            self._client.load_state_dict(saved)
        self._epoch = iter(self._client)
        return self._epoch

    def lag_outputs(self) -> int:
        return self._client.lag_outputs

    def state(self, number: int) -> Any:
        return {**self._client.state_dict(), "epoch": self._epoch.epoch, "number": number}

    def state_between(self, *, left: bool) -> Any:
        return _between(self._client, left)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the feed decides the epoch."""


def _between(client: FeedClient, left: bool) -> dict[str, Any]:
    """Return a job's state between epochs; after an epoch that was left early, the next one's."""
    saved: dict[str, Any] = client.state_dict()
    if saved["number"] and (left or client.about.length is None):  # only the end tells
        return {**saved, "epoch": saved["epoch"] + 1, "number": 0}
    return saved
