"""Feeds as the sources of a job's pipeline."""

from __future__ import annotations

from typing import Any

from stoker.chain import Chain
from stoker.errors import StateError
from stoker.feed.client import FeedClient, FeedEpoch
from stoker.feed.connection import FeedAddress
from stoker.pipeline import Pipeline
from stoker.sources.iterable import IterableSource
from stoker.sources.loader import LoaderSource
from stoker.sources.source import Source
from stoker.sources.unsharded import warn_unsharded_feed
from stoker.stages.skip import RAISE


def open_feed(address: FeedAddress, seed: int | None) -> Pipeline[Any]:
    """Return the pipeline of what a job is handed."""
    client = FeedClient(address)
    source: Source = FeedBatches(client) if client.about.batched else FeedExamples(client)
    return Pipeline(Chain.begin(source, seed, RAISE))


class FeedBatches(LoaderSource):
    """The batches of a feed."""

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self._name = f"from_feed({client.name!r})"

    @property
    def name(self) -> str:
        """Name the source for people."""
        return self._name

    def warn_unsharded(self, *, is_sharded: bool) -> None:
        """Warn where several ranks are there: each is handed all batches."""
        warn_unsharded_feed()


class FeedExamples(IterableSource):
    """The examples of a feed: a stream that can begin in the middle of a pass."""

    takes_state = True

    def __init__(self, client: FeedClient) -> None:
        super().__init__(client)
        self._client = client

    @property
    def name(self) -> str:
        """Name the source for people."""
        return f"from_feed({self._client.name!r})"

    def count(self) -> int:
        """Return the examples of an epoch; TypeError where the feed does not know."""
        return len(self._client)

    def open(self) -> FeedEpoch:
        """Begin a pass."""
        self._epoch = iter(self._client)
        return self._epoch

    def state(self, number: int) -> Any:
        """Return the state in which ``number`` examples of the present epoch have been read."""
        return {**self._client.state_dict(), "epoch": self._epoch.epoch, "number": number}

    def state_between(self) -> Any:
        """Return the state between epochs."""
        return self._client.state_dict()

    def check_state(self, chain: Chain) -> None:
        """Refuse a state in the middle of an epoch that tells too little of what was left."""
        kept = chain.selection.is_kept_by_streams
        if chain.has_fixed_echo or chain.may_leave_out or not kept:
            raise StateError(
                "in the middle of an epoch of a feed's examples a shuffle buffer, filters, skip "
                "budgets, ranks, and the pool of a fixed factor cannot be made again: save between "
                'epochs, have the feed do these, or take .echo("auto"), whose pool may begin empty'
            )

    def load(self, state: Any) -> None:
        """Have the next pass begin in a state."""
        self._client.load_state_dict(state)
