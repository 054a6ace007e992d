"""Reads examples by index, through a cache if there is one.

``fetch`` looks examples up and returns the found values; examples that it reads from the source
come as a ``Miss``, which the work takes through the operations before the cache. A source that
reads ahead is told only of examples that the cache does not hold, and these are then taken from it,
even if the cache has them by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree
from stoker.basics.signals import pass_on
from stoker.engine.work.cached import Cached, Miss
from stoker.engine.work.step import Failure
from stoker.engine.work.worker_status import current_worker
from stoker.errors import CacheError, StageError
from stoker.sources.origin import IndexedSource
from stoker.sources.source import Reader

if TYPE_CHECKING:
    from stoker.engine.work.cached import Lookups


@dataclass(eq=False, repr=False)
class Fetcher:
    """Reads the examples of a segment.

    Attributes:
        source: the pipeline's source; None where nothing is read by index.
        cache: the segment's cache.
        at: the segment's place among the layers of the flow.
        stages: how many counters of time come before those of examples; ``cache_counter``: the
            number of the cache's.
        lends: whether examples from the cache may be views of its memory.
        reader: reads ahead, where the source can.
        lookups: asks other nodes for examples that this host's cache lacks.
    """

    _source: IndexedSource | None
    _cache: Cached | None
    _at: int
    _stages: int
    _cache_counter: int
    _lends: bool
    reader: Reader | None = None
    lookups: Lookups | None = None
    _expected: set[int] = field(default_factory=set)

    @property
    def _indexed(self) -> IndexedSource:
        assert self._source is not None
        return self._source

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Announce examples that will be fetched, so that the source may read them ahead."""
        if self._cache is not None:
            self._cache.cache.read_ahead(indices)
        if self.reader is None and self.lookups is None:
            return
        if self._cache is not None:
            held = self._cache.holds(self._indexed, indices.tolist())
            indices = indices[~np.array(held, bool)]
            if self.lookups is not None:
                return self._ask_others(self._cache, self.lookups, indices)
        self._expect(indices)

    def _expect(self, indices: NDArray[np.int64]) -> None:
        if self.reader is None:
            return
        if self._cache is not None:
            self._expected.update(indices.tolist())  # what is read ahead has to be taken
        self.reader.expect(indices)

    def _ask_others(self, cache: Cached, lookups: Lookups, indices: NDArray[np.int64]) -> None:
        """Ask other nodes for examples that this host's cache lacks; read ahead those they lack."""
        keys = cache.keys(self._indexed, indices.tolist())
        places = {key: index for key, index in zip(keys, indices.tolist(), strict=True) if key}

        def read_ahead(missing: list[bytes]) -> None:
            self._expect(np.array([places[key] for key in missing], np.int64))

        lookups.expect(list(places), read_ahead if self.reader is not None else None)

    def fetch(
        self, indices: NDArray[np.int64], ns: list[int], seed: Callable[[int], None] | None = None
    ) -> list[Any]:
        """Return examples by index; failed ones as ``Failure``.

        With a cache, they come as ``apply`` needs them: as they were found, or as a ``Miss``.

        Args:
            indices: the examples.
            ns: the counters that are added to.
            seed: called before one of them is read, with its row among ``indices``. Examples are
                then read one by one.
        """
        if self._cache is None:
            return self._read(indices, ns, seed, range(len(indices)))
        found = self._look_up(indices, ns)
        if Miss not in map(type, found):
            return found
        missing = [at for at, miss in enumerate(found) if type(miss) is Miss]
        values = self._read(indices[missing], ns, seed, missing)
        for at, value in zip(missing, values, strict=True):
            found[at].value = value
            self._expected.discard(int(indices[at]))
            if type(value) is Failure:
                found[at] = value
        return found

    def find_whole(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Return examples that the cache has, if it has all of them; else nothing."""
        cache, at = self._cache, self._cache_counter
        assert cache is not None
        start = time.perf_counter_ns()
        try:
            found = cache.find_whole(self._indexed, indices, lends=self._lends)
        except Exception as error:  # whoever reads them then says what is wrong
            pass_on(error)
            return []
        if found:
            ns[at] += time.perf_counter_ns() - start
            ns[self._stages + at] += len(indices)
        return found

    def _look_up(self, indices: NDArray[np.int64], ns: list[int]) -> list[Any]:
        """Look examples up in the cache."""
        cache = self._cache
        assert cache is not None

        # Examples that other nodes were asked for come from there; only nodes start reading ahead.
        expected: set[int] = self._expected if self.lookups is None else set()

        def find(some: NDArray[np.int64]) -> list[Any]:
            try:
                lends = self._lends
                return cache.find(self._indexed, some, expected, self.lookups, lends=lends)
            except CacheError as error:  # no example's failure: nothing may skip it
                return [Failure(error)] * len(some)

        start, at = time.perf_counter_ns(), self._cache_counter
        found = self._each(find, cache, indices)
        ns[at] += time.perf_counter_ns() - start
        ns[self._stages + at] += len(indices)
        return found

    def _read(
        self,
        indices: NDArray[np.int64],
        ns: list[int],
        seed: Callable[[int], None] | None,
        rows: Sequence[int],
    ) -> list[Any]:
        start, reads = time.perf_counter_ns(), self.reader or self._indexed
        if seed is None:
            values = self._fetch_source(indices, reads)
        else:
            values = []
            for at, row in enumerate(rows):
                seed(row)
                values += self._fetch_source(indices[at : at + 1], reads)
        if current_worker.status is not None:
            current_worker.status.leave()
        ns[0] += time.perf_counter_ns() - start
        ns[self._stages] += len(indices)
        ns[-1] += self._weight(values)
        return values

    def _fetch_source(self, indices: NDArray[np.int64], reads: Reader | IndexedSource) -> list[Any]:
        if current_worker.status is not None:
            current_worker.status.enter(0)
        if not self._indexed.takes_many and hasattr(reads, "read_into"):
            return self._ask(indices, reads)  # else it is a reader of the user's
        return self._each(reads.fetch, self._indexed, indices)

    def _ask(self, indices: NDArray[np.int64], reads: Any) -> list[Any]:
        """Return examples of a user's dataset, which is asked once for each, whatever it raises.

        After an error it may be half changed, and could silently give wrong values.
        """
        values: list[Any] = []
        while len(values) < len(indices):
            rest = indices[len(values) :] if values else indices
            error: Exception | None = reads.read_into(values, rest)
            if error is None:
                break
            pass_on(error)
            index = int(indices[len(values)])
            values.append(Failure(self._error(self._indexed.name, error, index), self._at))
        return values

    def read_again(self, miss: Miss) -> Any:
        """Return the example of a miss as the source has it; raises what reading raises."""
        if self._indexed.path(miss.index) is not None and pytree.is_frozen(miss.value):
            return miss.value  # of a file, and maps cannot have changed it
        (value,) = self._indexed.fetch([miss.index])
        return value

    def _weight(self, values: list[Any]) -> int:
        """Return the bytes of read examples; of a user's dataset, as if all were like the first.

        An example may have many small parts, which take longer to weigh than to read.
        """
        if self._indexed.runs_user_code:
            return pytree.data_bytes(values[0]) * len(values) if values else 0
        return sum(map(pytree.data_bytes, values))

    def _each(
        self,
        get: Callable[[NDArray[np.int64]], list[Any]],
        who: IndexedSource | Cached,
        indices: NDArray[np.int64],
    ) -> list[Any]:
        """Return the results of ``get``; if it fails, call it for one at a time."""
        try:
            found = get(indices)
            if len(found) != len(indices):
                raise ValueError(f"{len(found)} examples came, and {len(indices)} were asked for")
            return found
        except Exception as error:
            pass_on(error)
            if len(indices) == 1:
                return [Failure(self._error(who.name, error, index=int(indices[0])), self._at)]
            return [self._each(get, who, indices[i : i + 1])[0] for i in range(len(indices))]

    def _error(self, stage: str, error: BaseException, index: int) -> StageError:
        return StageError(stage, error, index=index, path=self._indexed.path(index))
