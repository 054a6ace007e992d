"""Copies of users' objects: each worker thread calls its own.

Users' code is written for ``DataLoader``, where each worker process has a copy of the dataset. So
each thread has one here: the roots (datasets, functions, ``collate``) are copied together, so that
what two of them share stays shared within the copy. What cannot be copied is used as it is, by one
thread at a time, under ``USER_LOCK``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.replicas.copying.attributes import UnsetAttributes
from stoker.replicas.copying.copier import Copier
from stoker.replicas.copying.kinds import make_copy
from stoker.replicas.copying.memory_blocks import LargerBlock

USER_LOCK = threading.RLock()
"""Held for each call of an original while worker threads run."""


@dataclass(frozen=True)
class Replica:
    """One thread's copy of all roots.

    Attributes:
        values: for each root its copy; the root itself where it is shared or locked.
        locked: for each root why it must be called by one thread at a time, None if it need not.
    """

    values: tuple[Any, ...]
    locked: tuple[str | None, ...]
    _copier: Copier

    def is_current(self, generation: object = None) -> bool:
        """Return whether the originals' state is what was copied; False where it cannot be told.

        A large array that is shared is current whatever was written into it since.

        Args:
            generation: what is the same object for all replicas that are asked of together. Large
                lists that they share are then looked at once for all of them. None: looked at anew.
        """
        return self._copier.is_current(generation)

    @property
    def declared(self) -> tuple[str, ...]:
        """What is shared by declaration, and where it was found: for people."""
        return tuple(self._copier.declared)

    def make_private(self) -> bool:
        """Have the next replicas write to what this one could only read. False if there is nothing.

        For a call that raised in a copy, and not in the original: a large array that copies share
        cannot be written to. In replicas that are made from now on it can, and each keeps what it
        writes: the kernel copies the pages that are written, from one more copy of the array.
        """
        return self._copier.memory.make_private()


def replicate(
    roots: Sequence[Any],
    unset: UnsetAttributes | None = None,
    unfit: Mapping[int, str] | None = None,
) -> Replica:
    """Copy all roots together, for one thread. Never raises for what a root is made of.

    The caller sees to it that no original is called meanwhile. A forked worker process needs no
    replica, it has a copy of everything: there, ``files.reopen`` does the rest.

    Args:
        roots: datasets, functions, and what else of the user's is called.
        unset: what ``unset_attributes`` saw when the epoch began: handles that were opened since,
            and cannot be copied, are as they were then.
        unfit: the numbers of roots whose copies are of no use, with the reasons: they are locked.
    """
    extents: list[tuple[int, int]] = []
    made_private = False
    while True:
        copier = Copier(make_copy, unset, extents)
        collects = gc.isenabled()
        gc.disable()  # it would look through all that is made, again and again
        try:
            values = [copier.root(root) for root in roots]
        except LargerBlock as larger:
            extents.append(larger.args)
            continue
        finally:
            if collects:
                gc.enable()
        if made_private or not copier.writes_past_flags():
            break
        made_private = copier.memory.make_private()
        if not made_private:
            break
    for number, reason in (unfit or {}).items():
        copier.lock(number, reason)
    locked = copier.reasons()
    return Replica(
        tuple(
            value if reason is None else root
            for root, value, reason in zip(roots, values, locked, strict=True)
        ),
        locked,
        copier,
    )


def unset_attributes(roots: Sequence[Any]) -> UnsetAttributes:
    """Note which attributes of the roots' objects hold nothing yet. Takes microseconds.

    An epoch begins in the consumer's thread, which may open handles that cannot be copied later.
    """
    return UnsetAttributes(roots)
