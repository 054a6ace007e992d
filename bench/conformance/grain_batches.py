"""A plugin of pytest: torchtitan's loader takes its batches from a pipeline.

Grain still reads and packs. Only its last stage, a thread that makes batches ahead, is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import stoker


class Pass(Iterator[Any]):
    """One pass over a Grain dataset, with a state in torch's words."""

    def __init__(self, dataset: Any) -> None:
        self._batches = iter(dataset)

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> Any:
        return self._batches.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._batches.set_state(state)


class Batches(Iterator[Any]):
    """The batches of a pipeline, with a state in Grain's words."""

    def __init__(self, dataset: Any) -> None:
        self._pipeline = stoker.from_iterable(lambda: Pass(dataset), seed=0).workers(1)
        self._batches: Any = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._pipeline)
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return self._pipeline.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._pipeline.load_state_dict(state)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class Prefetched:
    """What ``ThreadPrefetchIterDataset`` is there."""

    def __init__(self, dataset: Any, prefetch_buffer_size: int) -> None:
        self._dataset = dataset

    def __iter__(self) -> Batches:
        return Batches(self._dataset)


def pytest_collection_modifyitems(items: Sequence[Any]) -> None:
    from torchtitan.components.data import loader  # type: ignore[import-not-found]

    loader.grain_experimental = SimpleNamespace(ThreadPrefetchIterDataset=Prefetched)
