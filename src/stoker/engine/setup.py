"""The settings of an epoch, and what a stream of its own may know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.engine.checkpoint import PoolSize, Position
from stoker.engine.flow import Flow, Own
from stoker.engine.items import EpochCounters, Item, Planning
from stoker.engine.survivors import SkipLog
from stoker.engine.work.step import WorkAddress
from stoker.engine.workers.make import KeptWorkers, Workers
from stoker.engine.workers.threads import WorkerPool
from stoker.engine.workers.tuning import Autotuner
from stoker.errors import StageError
from stoker.schedule.echo_record import RunRecord
from stoker.schedule.epoch_rest import EpochRest
from stoker.schedule.sharding import PaddedSharding


@dataclass(frozen=True)
class EpochSetup:
    """The settings of an epoch.

    Attributes:
        flow: what the chain does to its examples.
        seed, epoch: they decide the order and every random draw.
        autotuner: the measured speeds of the pipeline.
        workers: the number and kind of workers.
        pool_size: the size of the echo's pool; filled in when it becomes known.
        position: where to begin.
        steps: the most outputs, or None.
        ranks: the ``Ranks`` that an echo agrees with (``echoing/rank_sync.py``), or None.
        recycler: the owner of the batches' memory.
        length: the number of outputs in the epoch, or None if unknown.
        carried: the items of the epoch before that its pool hands on, by their numbers.
        kept_workers: the workers that the pipeline keeps from epoch to epoch.
        record: the decisions of an earlier run that are repeated, or None.
    """

    flow: Flow
    seed: int
    epoch: int
    autotuner: Autotuner
    workers: Workers
    pool_size: PoolSize
    position: Position
    steps: int | None = None
    ranks: Any = None
    recycler: Recycler = field(default_factory=Recycler)
    length: int | None = None
    carried: dict[int, Item] = field(default_factory=dict)
    kept_workers: KeptWorkers = field(default_factory=KeptWorkers)
    record: RunRecord | None = None


class PaddingMask:
    """Adds a mask to batches, under a name: which of their rows are examples.

    It does so to what the consumer, or the way to a device, takes: behind all maps and workers, so
    that none of them sees it, and no cache keeps it.

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


@dataclass(frozen=True)
class StreamContext:
    """What a stream may know of the epoch that it is made for.

    Attributes:
        layer: the layer of its stage in the flow.
        setup: the settings of the epoch.
        tally: counts time; ``skip_log``: records skips.
        worker_pool: the pool of the segments before it; ``planning``: the lock of who plans them.
        mask: marks padding in outputs, or None. A stream to a device marks its own.
    """

    layer: Own
    setup: EpochSetup
    tally: EpochCounters
    skip_log: SkipLog
    worker_pool: WorkerPool
    planning: Planning
    mask: PaddingMask | None

    @property
    def address(self) -> WorkAddress:
        """The stage's own address, with the epoch, the rank and the number of ranks."""
        setup = self.setup
        return setup.flow.address(self.layer.at, setup.seed, setup.epoch)

    @property
    def leg(self) -> EpochRest | None:
        """The leg of the epoch, if other ranks took it over; else None."""
        return self.setup.flow.orders.selection.leg
