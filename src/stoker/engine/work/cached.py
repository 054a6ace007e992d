"""A cache in the work on examples: looked up before the source is read, and filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import Fingerprint
from stoker.sources.origin import IndexedSource

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache


class Lookups(Protocol):
    """The requests of a run to other nodes, ahead of their use; any thread may call it."""

    def expect(
        self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None] | None = None
    ) -> None:
        """Begin to ask for items that are not here; ``on_missing`` is told what nobody has."""
        ...

    def find(self, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[Any]:
        """Return items as ``ExampleCache.find`` does; waits for those that were expected."""
        ...

    def close(self) -> None:
        """Let go of everything that was asked for and not taken."""
        ...


class LeftOutBefore:
    """Stands for an example that a filter in front of the cache left out."""


class Miss:
    """An example that was not, on its way to the cache.

    Attributes:
        value: what was read.
    """

    def __init__(self, index: int, fingerprint: Fingerprint | None, key: bytes) -> None:
        self.index = index
        self.fingerprint = fingerprint
        self.key = key
        self.value: Any = None


@dataclass(frozen=True)
class Cached:
    """A cache among the work on single examples.

    Attributes:
        name: of its stage, for people.
        cache: the cache.
    """

    name: str
    cache: ExampleCache

    def find(
        self,
        source: IndexedSource,
        indices: NDArray[np.int64],
        expected: Collection[int],
        lookups: Lookups | None,
        *,
        lends: bool,
    ) -> list[Any]:
        """Look examples up: each comes as it was found, or as a ``Miss`` without a value.

        Those that are ``expected`` from elsewhere are not looked up. What other nodes were asked
        for is with ``lookups``. With ``lends``, arrays may be read-only views of the store.
        """
        from stoker.cache.store import MISSING, Missing
        from stoker.transport.codec import LEFT_OUT, LeftOut

        known: list[tuple[Fingerprint | None, bytes]] | None = None
        if source.is_numbered and lookups is None and not expected:
            found = self.cache.find_numbered(indices, lends=lends)
        else:
            numbers = indices.tolist()
            if source.is_numbered:
                keys = self.cache.keys_of(indices)
            else:
                known = [self._known(source, each) for each in numbers]
                keys = [key for _, key in known]
            if expected or not all(keys):
                asked = [at for at, key in enumerate(keys) if key and numbers[at] not in expected]
            else:
                asked = list(range(len(keys)))
            sizes = None
            if known is not None:
                sizes = [known[at][0].size_bytes for at in asked]  # type: ignore[union-attr]
            some = [keys[at] for at in asked]
            if lookups is not None:
                values = lookups.find(some, sizes)
            else:
                values = self.cache.find(some, sizes, lends=lends)
            if len(asked) < len(keys):
                self.cache.count(misses=len(keys) - len(asked))
            found = [MISSING] * len(keys)
            for at, value in zip(asked, values, strict=True):
                found[at] = value
        if {Missing, LeftOut}.isdisjoint(map(type, found)):
            return found
        for at, value in enumerate(found):
            if value is MISSING:
                index = int(indices[at])
                found[at] = Miss(index, *(known[at] if known else self._known(source, index)))
            elif value is LEFT_OUT:
                found[at] = LeftOutBefore()
        return found

    def find_whole(
        self, source: IndexedSource, indices: NDArray[np.int64], *, lends: bool
    ) -> list[Any]:
        """Return examples as ``find`` does if all are there, else nothing."""
        if source.is_numbered:
            return self.cache.find_numbered(indices, lends=lends, whole=True)
        known = [self._known(source, index) for index in indices.tolist()]
        if not all(key for _, key in known):
            return []
        sizes = [fingerprint.size_bytes for fingerprint, _ in known if fingerprint is not None]
        return self.cache.find_whole([key for _, key in known], sizes, lends=lends)

    def _known(self, source: IndexedSource, index: int) -> tuple[Fingerprint | None, bytes]:
        """Return an example's fingerprint and key; none, and b"", where its file is not found."""
        try:
            fingerprint = source.fingerprint(index)
        except OSError:  # the source says what is wrong when it is read
            return None, b""
        return fingerprint, self.cache.key(fingerprint, index)

    def keys(self, source: IndexedSource, indices: Sequence[int]) -> list[bytes]:
        """Return the keys of examples; b"" where their files cannot be found."""
        if source.is_numbered:
            return self.cache.keys_of(np.array(indices, np.int64))
        return [self._known(source, index)[1] for index in indices]

    def holds(self, source: IndexedSource, indices: Sequence[int]) -> list[bool]:
        """Tell which examples are there."""
        return self.cache.holds(self.keys(source, indices))

    def offer(
        self,
        source: IndexedSource,
        miss: Miss,
        value: Any,
        *,
        left_out: bool,
        again: Callable[[], tuple[Any, bool]],
    ) -> None:
        """Let an example in, if its file is still the one that was looked up.

        Args:
            source: where it is from.
            miss: what was looked up.
            value: what it has become in front of the cache.
            left_out: whether a filter has left it out there.
            again: makes it again, and returns these two.

        Raises ValueError where it is another one each time, TypeError for what cannot be stored.
        """
        known = miss.fingerprint  # the file may have changed while it was read
        is_same = known is not None and self._known(source, miss.index)[0] == known
        if not self.cache.takes or not is_same:
            return self.cache.count(refused=1)
        value = _kept(value, left_out)
        what = f"item {miss.index} of {self.cache.describes}"
        self.cache.check_repeats(what, value, lambda: _kept(*again()))
        self.cache.offer(miss.key, value)


def _kept(value: Any, left_out: bool) -> Any:
    """Return what a cache keeps of an example."""
    if not left_out:
        return value
    from stoker.transport.codec import LEFT_OUT

    return LEFT_OUT
