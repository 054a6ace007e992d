"""What tells cached items apart: the source, what was done to its examples, the file as it was.

A key is a digest of the chain's identity and the example's fingerprint. A chain has an identity if
its source has one and the functions before the cache are stoker's own, or if the user gives a
version. Otherwise the identity is random, is made with the stage, and reaches workers with it
(under torchrun it is made of the launcher and a count). A file's fingerprint is taken before and
after the file is read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint, told
from stoker.cache.layout import KEY_BYTES

_OWN = "stoker."
_ENCODER = msgspec.msgpack.Encoder()
_count = 0


def chain_identity(source: Any, maps: Iterable[Any], version: str | None) -> str | None:
    """Return an identity of a chain's source and functions.

    A ``version`` of the user's stands for what functions call and for data; what they say of
    themselves belongs to it. Without it None where it cannot be
    known: functions that are not stoker's own may change, and a dataset object says nothing about
    its data.
    """
    known = own = source.identity()
    names = []
    for stage in maps:
        module = getattr(stage.fn, "__module__", "") or ""
        name = getattr(stage.fn, "__qualname__", "")
        says = "" if version is None else f" {told(stage.fn)}"
        names.append(f"{stage.name}:{module}.{name}{says}")
        if not module.startswith(_OWN) or not name or "<" in name:
            own = None
    if version is None:
        return None if own is None else "\0".join(["chain", own, *names])
    return "\0".join(
        ["version", version, known or f"{source.name} of {len(source)} {source.contents()}", *names]
    )


def private_identity(what: str) -> str:
    """Return an identity of this job only: of its ranks on a host under torchrun, or a process.

    For ranks it is made of the launcher's identity and a count of their caches so far.
    """
    global _count
    _count += 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        import psutil

        launcher = psutil.Process(os.getppid())
        return "\0".join(["job", str(launcher.pid), str(launcher.create_time()), str(_count), what])
    return "\0".join(["own", secrets.token_hex(16)])


def item_key(chain: bytes, fingerprint: Fingerprint) -> bytes:
    """Return the 16 bytes under which an item is stored; ``chain`` is its identity's digest."""
    name = fingerprint.name
    if isinstance(name, str):
        fingerprint = fingerprint._replace(name=os.fsencode(name))
    return xxhash.xxh3_128_digest(chain + _ENCODER.encode(fingerprint))


def digest(identity: str) -> bytes:
    """Return 16 bytes for an identity."""
    return xxhash.xxh3_128_digest(identity.encode("utf-8", "surrogateescape"))


class NumberedKeys:
    """Keys of examples that are identified by numbers alone; each is made once. Thread-safe."""

    def __init__(self, examples: int) -> None:
        self._made = np.zeros(examples, f"V{KEY_BYTES}"), np.zeros(examples, bool)

    def of(
        self, indices: NDArray[np.int64], make: Callable[[Fingerprint, int], bytes]
    ) -> list[Any]:
        """Return the keys of examples; ``make`` makes one."""
        keys, is_made = self._made
        try:
            made = is_made[indices]  # max() beforehand would cost 2 us a batch
        except IndexError:  # a dataset that has grown
            more = int(indices.max()) + 1 - len(keys) + len(keys) // 2
            is_made = np.concatenate([is_made, np.zeros(more, bool)])
            keys = np.concatenate([keys, np.zeros(more, keys.dtype)])
            self._made = keys, is_made
            made = is_made[indices]
        if not made.all():
            for index in indices[~made].tolist():
                keys[index] = make(Fingerprint(index), index)
                is_made[index] = True  # behind it: other threads look here
        found: list[Any] = keys[indices].tolist()
        return found
