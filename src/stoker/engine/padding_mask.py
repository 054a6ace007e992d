"""The mask of padding as a field of batches: which of their rows are examples.

It is added to what the consumer, or the way to a device, takes: behind all maps and workers, so
that none of them sees it, and no cache keeps it.
"""

from __future__ import annotations

from typing import Any

from stoker.basics import pytree
from stoker.errors import StageError
from stoker.schedule.sharding import PaddedSharding


class PaddingMask:
    """Adds a mask to batches, under a name.

    Args:
        name: of the field.
        deal: says what is padding.
    """

    def __init__(self, name: str, deal: PaddedSharding) -> None:
        self._name = name
        self._deal = deal

    def added(self, batch: Any, number: int, start: int, stop: int) -> Any:
        """Return a batch with the mask, ``bool [n]``: a tensor where it has tensors.

        Args:
            batch: the batch; ``number``: its own in the epoch.
            start, stop: which of the rank's rows are in it.

        Raises StageError where they have such a field.
        """
        valid: Any = self._deal.valid(start, stop)
        if any(map(pytree.is_tensor, pytree.leaves(batch))):
            import torch

            valid = torch.from_numpy(valid)
        try:
            return pytree.with_field(batch, self._name, valid)
        except ValueError as error:
            raise StageError(f"shard(mask={self._name!r})", error, batch=number) from error
