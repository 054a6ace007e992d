"""What a feed needs of a pipeline: its chain, and any of its outputs by number."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.chain import Chain
from stoker.cursor import Cursor
from stoker.engine.position import Position
from stoker.errors import FeedError


def check_servable(chain: Chain, seed: int | None) -> Chain:
    """Return what a feed serves of a chain: with the seed of the feed that it goes on for.

    Raises FeedError when its outputs cannot be handed to other processes, cannot be made again by
    number though they should be, or when it has another seed.
    """
    if chain.follows_clock:
        raise FeedError(
            "an adaptive echo decides by what is ready, and a feed must be able to make its "
            'batches again: put .echo("auto") behind stoker.from_feed(), in each job, or take a '
            "fixed factor"
        )
    if chain.is_on_device:
        raise FeedError(
            "a feed hands out batches in the host's memory: put .to(device) behind "
            "stoker.from_feed(), in each job"
        )
    if seed is None:
        return chain
    if not chain.is_seed_drawn and chain.seed != seed:
        raise FeedError(f"the pipeline has seed {chain.seed} now, and had seed {seed}")
    return chain.seeded(seed)


@dataclass(frozen=True)
class Served:
    """What jobs are told of a chain that they are served from: as in ``messages.Welcome``."""

    batched: bool
    length: int | None
    again: bool
    outline: list[str]

    @classmethod
    def of(cls, chain: Chain) -> Served:
        try:
            length: int | None = chain.count()
        except TypeError:
            length = None
        return cls(chain.is_batched, length, chain.source.is_indexed, chain.outline())


def go_near(cursor: Cursor, epoch: int, number: int) -> int:
    """Have the next ``begin()`` start at an output of an epoch, or as near before it as it can.

    Returns how many outputs come before it: those of which only what came before can tell.
    """
    position, missed, chain = None, number, cursor.chain
    if number and chain.source.is_indexed and not chain.may_leave_out and not chain.echoes:
        examples = min(number * chain.batch_size, chain.examples())
        position, missed = Position(number, examples, fresh=examples), 0
    cursor.go_to(epoch, position)
    return missed
