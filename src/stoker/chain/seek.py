"""Where an epoch is behind its first outputs, found without making them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stoker.chain.chain import Chain
from stoker.engine.checkpoint import Position
from stoker.engine.echo.pool_inputs import PoolStart
from stoker.schedule import rng
from stoker.schedule.fixed import Pool
from stoker.schedule.sizing.cuts import EvenCuts
from stoker.stages.stage import PoolSize
from stoker.stats import Clock


def can_jump(chain: Chain) -> bool:
    """Return whether arithmetic alone tells what stands behind the first outputs of an epoch.

    Not over streams and loaders, not where examples may be left out, and not behind a pool.
    """
    return chain.source.is_indexed and not chain.may_leave_out and not chain.echoes


def nearest(chain: Chain, epoch: int, number: int) -> tuple[Position | None, int]:
    """Return a position in an epoch at an output, or as near before it as it can be told.

    Also how many outputs come before it from there: those of which only what came before can tell.
    """
    if not number or not can_jump(chain):
        return None, number
    number = min(number, chain.count_of_data_epoch(epoch))
    cuts = chain.cuts(epoch) or EvenCuts(chain.batch_size)
    examples = min(cuts.start(number), chain.examples(epoch))
    return Position(number, examples, examples), 0


def passed(chain: Chain, epoch: int, outputs: int) -> tuple[int, int, Clock]:
    """Return how many whole epochs so many outputs from an epoch's beginning are, what is left of
    them, and what was handed out in these epochs; of what can be jumped over."""
    epochs, before = 0, Clock()
    while outputs >= (count := chain.count_of_data_epoch(epoch + epochs)):
        whole, _ = nearest(chain, epoch + epochs, count)
        assert whole is not None
        # Epochs whose batches are not planned are all alike.
        alike = 1 if chain.plans_batches else outputs // count
        before += Clock(alike * whole.fresh, alike * whole.uses, alike * whole.yielded)
        epochs, outputs = epochs + alike, outputs - alike * count
    return epochs, outputs, before


def behind_pool(
    chain: Chain, epoch: int, number: int, sizes: Mapping[int, PoolSize]
) -> Position | None:
    """Return the position at an output behind one pool of a fixed factor, its draws repeated.

    None where there is another pool, where it is not the pool alone that decides, and where its
    size is not known yet.
    """
    if not chain.source.is_indexed or chain.may_leave_out or len(chain.echoes) != 1:
        return None
    if chain.plans_batches:
        return None
    (point,) = chain.plan.echoes
    echo = point.echo
    known = sizes.get(echo.position)
    if known is None and echo.pool is not None and not point.on_device:
        known = PoolSize(echo.pool)
    if echo.counts is None or known is None:
        return None
    items = chain.examples()
    for stage in chain.stages[: chain.stages.index(echo)]:
        items = items if stage.traits.selects else stage.count(items)
    each = chain.batch_size if point.holds_batches else 1
    lacking = max(0, items * each - chain.examples())  # in the last item
    key = rng.key(chain.seed, epoch, rng.ECHO + echo.position)
    pool = Pool(echo.counts, known.size, point.group, key, items)
    number, uses = min(number, chain.count_of_data_epoch(epoch)), 0
    for _ in range(number):
        ordinals = pool.advance().ordinals
        uses += each * len(ordinals) - lacking * int(np.count_nonzero(ordinals == items - 1))
        pool.forget_before(pool.step)
    return Position(
        number,
        uses,
        min(each * pool.seen, chain.examples()),
        [PoolStart(pool.snapshot(pool.step), pool.admitted if pool.ended else None)],
    )
