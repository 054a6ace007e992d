"""Identities of cached items: of the source, of the stages before the cache, and of the file.

A key is a digest of the chain's identity and the example's fingerprint. A chain has an identity if
its source has one and all functions before the cache are stoker's own, or if the user gives a
version. Otherwise the identity is random, made with the stage and pickled with it (under torchrun
it is made of the launcher's process and a count). A file's fingerprint is taken before and after
the file is read.
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

from stoker.basics.fingerprint import Fingerprint, content_digest
from stoker.cache.layout import KEY_BYTES

_OWN = "stoker."
_ENCODER = msgspec.msgpack.Encoder()
_count = 0


def chain_identity(source: Any, maps: Iterable[Any], version: str | None) -> str | None:
    """Return an identity of a chain's source and functions; None if stoker cannot know it.

    Without a ``version`` it is known only if the source has an identity and all functions are
    stoker's own: other functions may change, and a dataset object says nothing about its data. A
    ``version`` of the user's vouches for the data and for code that the functions call; digests of
    the functions themselves are part of the identity.
    """
    source_identity = identity = source.identity()
    names = []
    for stage in maps:
        module = getattr(stage.fn, "__module__", "") or ""
        name = getattr(stage.fn, "__qualname__", "")
        digest_part = "" if version is None else f" {content_digest(stage.fn)}"
        names.append(f"{stage.name}:{module}.{name}{digest_part}")
        if not module.startswith(_OWN) or not name or "<" in name:
            identity = None
    if version is None:
        return None if identity is None else "\0".join(["chain", identity, *names])
    return "\0".join(
        [
            "version",
            version,
            source_identity or f"{source.name} of {len(source)} {source.contents()}",
            *names,
        ]
    )


def private_identity(what: str) -> str:
    """Return an identity that is valid in this job only.

    Under torchrun the ranks of a host share it: it is made of the launcher's process and a count of
    the caches so far. Elsewhere it is random.
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
    """Return the 16 bytes of an item's key; ``chain`` is the digest of the chain's identity."""
    name = fingerprint.name
    if isinstance(name, str):
        fingerprint = fingerprint._replace(name=os.fsencode(name))
    return xxhash.xxh3_128_digest(chain + _ENCODER.encode(fingerprint))


def digest(identity: str) -> bytes:
    """Return the 16-byte digest of an identity."""
    return xxhash.xxh3_128_digest(identity.encode("utf-8", "surrogateescape"))


class NumberedKeys:
    """The keys of examples that only their numbers identify; each is made once. Thread-safe."""

    def __init__(self, examples: int) -> None:
        self._keys_and_flags = np.zeros(examples, f"V{KEY_BYTES}"), np.zeros(examples, bool)

    def of(
        self, indices: NDArray[np.int64], make: Callable[[Fingerprint, int], bytes]
    ) -> list[Any]:
        """Return the keys of examples; ``make(fingerprint, index)`` makes a missing one."""
        keys, known = self._keys_and_flags
        try:
            is_known = known[indices]  # checking with max() first would cost 2 us a batch
        except IndexError:  # the dataset has grown
            extra = int(indices.max()) + 1 - len(keys) + len(keys) // 2
            known = np.concatenate([known, np.zeros(extra, bool)])
            keys = np.concatenate([keys, np.zeros(extra, keys.dtype)])
            self._keys_and_flags = keys, known
            is_known = known[indices]
        if not is_known.all():
            for index in indices[~is_known].tolist():
                keys[index] = make(Fingerprint(index), index)
                known[index] = True  # after the key: other threads read the flag first
        found: list[Any] = keys[indices].tolist()
        return found
