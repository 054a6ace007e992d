"""Copies of users' objects: each worker thread calls its own.

Users' code is written for ``DataLoader``, where each worker process has a copy of the dataset. So
each thread has one here. The roots (datasets, functions, ``collate``) are copied together: objects
that two roots share stay shared within the copy. A root that cannot be copied is called as it is,
by one thread at a time, under the lock of ``user_lock``.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.replicas.copying.attributes import UnsetAttributes
from stoker.replicas.copying.copier import Copier
from stoker.replicas.copying.kinds import make_copy
from stoker.replicas.copying.memory_blocks import LargerBlock


@dataclass(frozen=True)
class Replica:
    """One thread's copy of all roots.

    Attributes:
        values: for each root its copy; the root itself where it is shared or locked.
        locked: for each root the reason to call it from one thread at a time; None: it has a copy.
    """

    values: tuple[Any, ...]
    locked: tuple[str | None, ...]
    _copier: Copier

    def is_current(self, generation: object = None) -> bool:
        """True if the originals have not changed since the copy; False if that is unknown.

        Writing into a large shared array does not count as a change.

        Args:
            generation: the same object for all replicas that are checked together. Each large list
                that they share is then compared once. None: all are compared anew.
        """
        return self._copier.is_current(generation)

    @property
    def declared(self) -> tuple[str, ...]:
        """The objects shared by declaration, and where they were found; for messages."""
        return tuple(self._copier.declared)

    def make_private(self) -> bool:
        """Let later replicas write to arrays that this one only reads. False if there are none.

        For a call that raised in a copy but not in the original, because copies share a large array
        read-only. In later replicas it is writable, and each keeps its own changes: the kernel
        copies pages on a write, from one more copy of the array.
        """
        return self._copier.memory.make_private()


def replicate(
    roots: Sequence[Any],
    unset: UnsetAttributes | None = None,
    unfit: Mapping[int, str] | None = None,
) -> Replica:
    """Copy all roots together, for one thread. No object in a root makes it raise.

    No original may be called meanwhile. A forked worker process needs no replica: it has a copy of
    everything, and ``files.reopen_descriptors`` gives it read positions of its own.

    Args:
        roots: datasets, functions, and other callables of the user's.
        unset: the result of ``unset_attributes`` when the epoch began. Handles that were opened
            since and cannot be copied are as they were then.
        unfit: roots to lock although they have copies: their numbers, with reasons.
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
    """Note the attributes of the roots' objects that hold nothing yet. It takes microseconds.

    The consumer's thread begins an epoch, and may open handles that cannot be copied later.
    """
    return UnsetAttributes(roots)
