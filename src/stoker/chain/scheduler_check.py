"""Notices a learning-rate scheduler that echoing carries past its end, and says so.

Nobody tells a pipeline of schedulers. But it knows how many batches it handed out: a scheduler that
has taken as many steps is stepped with each of them. If its length is then a whole number of epochs
*without* echoing, it comes to its end too early. A cosine goes back up from there, without a word.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from stoker.basics.warn import warn
from stoker.chain.chain import Chain

_LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}


def length_of(scheduler: Any) -> int | None:
    """Return the steps after which a scheduler goes wrong; None if there is no such end."""
    length: int | None = getattr(scheduler, _LENGTHS.get(type(scheduler).__name__, ""), None)
    return length


def warn_of_overshooting(chain: Chain, steps: int, epoch_steps: int) -> None:
    """Look for such a scheduler of torch among all objects: tens of milliseconds.

    Args:
        chain: the chain that was iterated over.
        steps: the outputs handed out so far, in whole epochs.
        epoch_steps: the outputs of the last epoch.
    """
    module: Any = sys.modules.get("torch.optim.lr_scheduler")
    if module is None or chain.steps is not None:
        return
    try:
        without_echo = chain.count_without_echo()
    except Exception:  # a foreign loader's len() may raise anything
        return
    if epoch_steps <= without_echo + 1:  # as if stepped for fresh batches
        return
    planned = chain.sure_count(0)  # of a fixed factor: a schedule may well count these
    # Torch keeps no list of schedulers, so this looks through the garbage collector's objects once.
    for found in gc.get_objects():
        if not issubclass(type(found), module.LRScheduler):
            continue
        name = type(found).__name__
        length, taken = length_of(found), found.last_epoch
        if not length or abs(taken - steps) > 1 or (planned and length % planned == 0):
            continue
        epochs = length // without_echo
        if length % without_echo == 0 and epochs > 1:
            warn(
                f"{name} was made for {length:,} steps, {epochs} epochs of {without_echo:,} "
                f"batches, but it is stepped with each of the {epoch_steps:,} of an epoch that "
                f"echoes: it comes to its end after {length / epoch_steps:.1f} epochs. "
                "stoker.lr_schedule(scheduler, train) has it follow fresh data"
            )
            return
