"""Sources that read a feed: batches or examples."""

from __future__ import annotations

from typing import Any

from stoker.chain.chain import Chain
from stoker.distributed.unsharded import warn_unsharded_feed
from stoker.feeds.client import FeedClient, FeedEpoch
from stoker.feeds.connection import FeedAddress
from stoker.pipeline import Pipeline
from stoker.sources.origin import SourceBase
from stoker.stages.iterable import IterableSource
from stoker.stages.loader import LoaderSource


def open_feed(address: FeedAddress, seed: int | None) -> Pipeline[Any]:
    client = FeedClient(address)
    source: SourceBase = FeedBatches(client) if client.welcome.batched else FeedExamples(client)
    return Pipeline(Chain.begin(source, seed))


class FeedBatches(LoaderSource):
    """The batches of a feed; the feed's client takes the place of a loader."""

    @property
    def name(self) -> str:
        return f"from_feed({self.loader.name!r})"

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn if there are several ranks: each rank gets all batches of the feed."""
        warn_unsharded_feed()

    def lag_outputs(self) -> int:
        lag: int = self.loader.lag_outputs
        return lag

    def state_between(self, *, left: bool) -> Any:
        return _between(self.loader, left)


class FeedExamples(IterableSource):
    """The examples of a feed: a stream that can begin in the middle of an epoch."""

    is_counted = takes_state = True

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
        """Do nothing: the feed chooses the epoch."""


def _between(client: FeedClient, left: bool) -> dict[str, Any]:
    """Return a job's state between epochs: the beginning of the next one."""
    saved: dict[str, Any] = client.state_dict()
    if saved["number"] and (left or client.welcome.length is None):
        # Of unknown length, a position may be the end of its epoch.
        return {**saved, "epoch": saved["epoch"] + 1, "number": 0}
    return saved
