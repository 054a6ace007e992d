"""A pipeline as a ``DataLoader`` of torch, and its epoch as a dataset with a sampler.

Frameworks take the dataset and the sampler of a loader, and make a loader of their own. Here the
dataset is the next epoch, an index is a place in it, and the sampler counts. So a loader made of
them, which skips the first batches or wraps the rest, hands out the pipeline's batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.utils.data

from stoker.errors import StokerError

_data: Any = torch.utils.data


class EpochPass:
    """One pass over an epoch. Its outputs are requested by number, in order."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def output(self, number: int) -> Any:
        """Return an output by number. The first number is the count of skipped outputs.

        Raises StopIteration at the end, StokerError if a number is left out.
        """
        if self._iterator is None:
            if number:
                self._pipeline.resume_at(number)
            self._iterator, self._next = iter(self._pipeline), number
        if number != self._next:
            raise StokerError(
                f"batch {number} of an epoch was requested after batch {self._next - 1}: shard a "
                "pipeline by .shard(), not by leaving out batches"
            )
        self._next += 1
        return next(self._iterator)


class Place(NamedTuple):
    """An index of an epoch: the number of an output, and its pass."""

    of: EpochPass
    number: int


class EpochDataset:
    """The next epoch of a pipeline, for a ``DataLoader`` without workers."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __len__(self) -> int:
        """Return the examples of an epoch, of all ranks together; TypeError if not known."""
        source = self.pipeline.chain.source
        if not source.yields_batches:
            count: int = source.examples(self.pipeline.chain.selection.of_all_ranks())
            return count
        try:
            return len(source.attribute("dataset"))
        except AttributeError:
            raise TypeError("how many examples the loader has is not known") from None

    def __getitem__(self, place: Place) -> Any:
        if not isinstance(place, Place):
            raise TypeError("a pipeline's epoch has no indices; its source has")
        return place.of.output(place.number)


class EpochSampler(_data.SequentialSampler):  # type: ignore[misc]
    """Counts the outputs of an epoch, until it ends."""

    def __init__(self, data_source: EpochDataset) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[Place]:
        of, number = EpochPass(self.data_source.pipeline), 0
        while True:  # EpochPass ends it
            yield Place(of, number)
            number += 1

    def __len__(self) -> int:
        return len(self.data_source.pipeline)


class EpochBatchSampler(_data.BatchSampler):  # type: ignore[misc]
    """``EpochSampler`` for loaders with a batch sampler, as each output is a batch already."""

    sampler: EpochSampler

    def __init__(self, sampler: EpochSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[Place]]:
        return ([place] for place in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.data_source.pipeline.set_epoch(epoch)


def only_batch(batches: list[Any]) -> Any:
    """Collate a list with one finished batch: return that batch."""
    (batch,) = batches
    return batch


class PipelineLoader(_data.DataLoader):  # type: ignore[misc]
    """A pipeline in the form of a ``DataLoader``. Made by ``Pipeline.as_dataloader``.

    Iterating it iterates the pipeline. Accelerate leaves it as it is, and saves its state.

    Attributes:
        pipeline: the pipeline.
    """

    use_stateful_dataloader = True
    _is_accelerate_prepared = True

    def __init__(self, pipeline: Any, **_given: Any) -> None:
        """Ignore the arguments with which frameworks make it anew (a sampler, above all)."""
        # Of planned batches there is no one size, as with any batch sampler.
        size = None if pipeline.chain.plans_batches else pipeline.chain.batch_size
        drop_last = pipeline.chain.drops_last
        sampler = EpochSampler(EpochDataset(pipeline))
        batches = EpochBatchSampler(sampler, size or 1, drop_last)
        super().__init__(sampler.data_source, batch_sampler=batches, collate_fn=only_batch)
        # Behind DataLoader's guard: with a batch sampler it says None, False and another sampler.
        self.__dict__.update(
            sampler=sampler, batch_size=size, drop_last=drop_last, pipeline=pipeline
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def __len__(self) -> int:
        return len(self.pipeline)

    def set_epoch(self, epoch: int) -> None:
        self.pipeline.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.pipeline.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.pipeline.load_state_dict(saved)
