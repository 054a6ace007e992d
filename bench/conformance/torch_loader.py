"""torchdata's ``StatefulDataLoader`` by stoker: what each argument of a ``DataLoader`` is here.

``run.py`` has suites import it in torchdata's place. torch's own class checks the arguments and
makes samplers; examples, order, batches, workers and states are a pipeline's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch.utils.data import IterableDataset, SequentialSampler, default_collate

import stoker

_data: Any = torch.utils.data
T = TypeVar("T")
LATE = 8
"""By how many batches an example may come later where ``in_order=False``."""


@runtime_checkable
class Stateful(Protocol):
    """As in torchdata."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Keyed:
    """What a sampler's keys of an epoch get from a dataset: of lists of keys, batches."""

    def __init__(self, sampler: Any, fetch: Any) -> None:
        self._sampler, self._fetch = sampler, fetch

    def draw(self) -> None:
        """Draw the keys of the next epoch."""
        self._keys = list(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, number: int) -> Any:
        return self._fetch(self._keys[number])


class StatefulDataLoader(_data.DataLoader[T]):  # type: ignore[misc]
    """A ``DataLoader`` with a state: a pipeline of stoker, in torch's words."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *args: Any,
        snapshot_every_n_steps: int = 1,  # it may be asked for at every step
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size, shuffle, *args, **options)
        self._shuffles = bool(shuffle)
        seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # as torch does
        self._seed = int(seed)
        self._made: Any = None
        self._keyed: _Keyed | None = None

    @property
    def pipeline(self) -> Any:
        if self._made is None:
            self._made = self._build(self._seed)
        return self._made

    def _build(self, seed: int | None) -> Any:
        return self._examples(seed).workers(
            self.num_workers,
            kind="process" if self.num_workers else None,
            persistent=self.persistent_workers,
            timeout_s=self.timeout or None,
        )

    def _examples(self, seed: int | None) -> Any:
        sampler: Any = self.sampler
        if isinstance(self.dataset, IterableDataset):
            return self._batched(stoker.from_iterable(self.dataset, seed=seed))
        whole = stoker.from_dataset(self.dataset, seed=seed)
        if self._shuffles:
            return self._batched(whole.shuffle())
        if type(sampler) is SequentialSampler and (self.batch_size or not self.batch_sampler):
            return self._batched(whole)
        if self.batch_size:
            order = whole.order(lambda epoch, rng: list(sampler), len(sampler))
            return self._batched(order)
        self._keyed = _Keyed(self.batch_sampler or sampler, self._fetch)
        return stoker.from_dataset(self._keyed, seed=seed)

    def _batched(self, examples: Any) -> Any:
        if self.batch_size is None:
            return examples.map(self.collate_fn)
        if not self.in_order:
            examples = examples.late(LATE)
        size, drop_last = self.batch_size, self.drop_last
        if self.collate_fn is default_collate:
            return examples.batch(size, drop_last=drop_last).to_torch()
        return examples.batch(size, drop_last=drop_last, collate=self.collate_fn)

    def _fetch(self, key: Any) -> Any:
        if self.batch_sampler is None:
            return self.collate_fn(self.dataset[key])
        return self.collate_fn([self.dataset[each] for each in key])

    def __iter__(self) -> Iterator[Any]:
        pipeline = self.pipeline
        if self._keyed is not None:
            self._keyed.draw()
        batches: Iterator[Any] = iter(pipeline)
        return batches

    def __len__(self) -> int:
        return len(self.pipeline)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.pipeline.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._made = self._build(None)  # the state has the seed
        self._made.load_state_dict(state_dict)


_theirs = inspect.signature(_data.DataLoader.__init__)
_steps = inspect.signature(StatefulDataLoader.__init__).parameters["snapshot_every_n_steps"]
StatefulDataLoader.__init__.__signature__ = _theirs.replace(  # type: ignore[attr-defined]
    parameters=[*_theirs.parameters.values(), _steps]
)
"""torchtitan looks there for the names of arguments."""
