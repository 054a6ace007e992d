"""Where an epoch is behind its first outputs, found without making them."""

from __future__ import annotations

from stoker.chain import Chain
from stoker.engine.position import Position


def can_jump(chain: Chain) -> bool:
    """Return whether arithmetic alone tells what stands behind the first outputs of an epoch.

    Not over streams and loaders, not where examples may be left out, and not behind a pool.
    """
    return chain.source.is_indexed and not chain.may_leave_out and not chain.echoes


def nearest(chain: Chain, number: int) -> tuple[Position | None, int]:
    """Return a position in an epoch at an output, or as near before it as it can be told.

    Also how many outputs come before it from there: those of which only what came before can tell.
    """
    if not number or not can_jump(chain):
        return None, number
    number = min(number, chain.count_of_pass())
    examples = min(number * chain.batch_size, chain.examples())
    return Position(number, examples, fresh=examples), 0
