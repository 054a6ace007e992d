"""The cache in a pipeline: looked up before the source is read, filled behind what it follows."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.basics import plugins, resources
from stoker.basics.fingerprint import Fingerprint
from stoker.basics.resources import format_bytes, format_seconds
from stoker.basics.warn import warn
from stoker.errors import CacheWarning, CombinationError
from stoker.frameworks.rank import hosts_of_job
from stoker.sources.origin import IndexedSource, SourceBase
from stoker.stages.stage import ChainStage, ChainView, EnginePlan, PoolSize, Traits, first_with

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache

# Files whose sizes are asked for, to estimate all: enough to tell half of the memory from all of
# it.
_SAMPLED = 64


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


def caches_over(cluster: object) -> Any:
    """Return what makes caches over a ``cluster``, by its name or by the hosts in a list.

    That is a module like ``cluster/opening.py``, registered in the group ``stoker.caches``: its
    ``of_chain`` and ``of_dataset`` return an ``ExampleCache`` whose ``batch_lookups()`` returns
    ``Lookups``.
    """
    named = isinstance(cluster, str) and cluster in plugins.names(plugins.CACHES)
    return plugins.load(plugins.CACHES, str(cluster) if named else "hosts")


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


class Forecast(NamedTuple):
    """What ``.cache("auto")`` promises of an epoch, once the store is full."""

    name: str
    """The source and the stages that make what is kept."""
    kept: float
    """The fraction of the examples that is kept."""
    work_s: float
    """Seconds of work up to the cache, without it."""
    left_s: float
    """Seconds of that work that are left."""

    def __str__(self) -> str:
        left, work = map(format_seconds, (self.left_s, self.work_s))
        return (
            f"{self.kept:.0%} as {self.name}; an epoch takes {left} of work up to here, not {work}"
        )


@dataclass(frozen=True)
class CacheStage(ChainStage):
    """The stage ``.cache(limit)``.

    Attributes:
        cache: the cache.
        forecast: what is expected of it, where ``.cache("auto")`` chose its place.
    """

    cache: ExampleCache
    forecast: Forecast | None = None
    traits = Traits(keeps_fields=True, caches=True)

    @staticmethod
    def of(
        before: ChainView,
        limit: Any,
        version: Any = None,
        cluster: Any = None,
        insecure: Any = False,
        **settings: Any,
    ) -> CacheStage:
        """Check the arguments of ``.cache()``, and make a cache for what comes out of ``before``.

        Args:
            before: the chain that it is to stand behind.
            limit, version, cluster, insecure: as in ``.cache()``.
            settings: ``path`` and ``keep``, also as there.
        """
        from stoker.cache.example_cache import ExampleCache
        from stoker.cache.identity import chain_identity

        _check_cacheable(before)
        if isinstance(limit, os.PathLike) or (isinstance(limit, str) and os.sep in limit):
            raise ValueError(
                f".cache() takes the limit first: for a folder, write .cache(path={limit!r})"
            )
        if version is not None and (not isinstance(version, str) or not version):
            raise TypeError(f"version= is a text, not {version!r}")
        source, operations = before.source, before.operations
        assert isinstance(source, IndexedSource)
        describes = ".".join([source.name, *(operation.name for operation in operations)])
        if insecure and cluster is None:
            raise CombinationError("insecure=True is for a cache over several nodes (cluster=)")
        if cluster is not None:
            over_nodes = caches_over(cluster).of_chain(
                limit,
                cluster=cluster,
                insecure=bool(insecure),
                source=source,
                operations=operations,
                version=version,
                describes=describes,
                **settings,
            )
            return CacheStage(over_nodes)
        cache = ExampleCache(
            limit,
            identity=chain_identity(source, operations, version),
            describes=describes,
            examples=len(source),
            **settings,
        )
        return CacheStage(cache)

    @property
    def call(self) -> str:
        limit = self.cache.limit
        return f"cache({format_bytes(limit) if isinstance(limit, int) else limit})"

    def bind(self, before: ChainView) -> CacheStage:
        """Check that there is something to keep: examples that are the same in every epoch."""
        _check_cacheable(before)
        return self

    def begin(self, chain: ChainView) -> None:
        """Open the store; warn, the first time, where it saves nothing, or less than it seems."""
        if self.cache.open():
            self._warn_of_what_cannot_help(chain)

    def check_length(self, was: SourceBase, now: SourceBase) -> None:
        """Let a source grow, whose examples keep their numbers: these are what it knows them by."""
        if not self.cache.is_shared_by_nodes and now.count() > was.count():
            return
        raise ValueError(
            f"{was.name} had {was.count():,} examples, and has {now.count():,} now: "
            + (
                "a cache over several nodes needs a fixed number of examples"
                if self.cache.is_shared_by_nodes
                else ".cache() knows examples by number, and a number may now mean another one"
            )
            + ". Build a new pipeline, with another version= if it has one"
        )

    def lower(self, to: EnginePlan) -> None:
        to.cache(self)

    def count(self, items: int) -> int:
        return items

    def signature(self) -> None:
        return None

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say where it is, if not on this host alone, and what is expected of it."""
        nodes = self.cache.is_shared_by_nodes * "over several nodes, each of which keeps a part"
        notes = [each for each in (nodes, str(self.forecast or "")) if each]
        return "  " + ": ".join(notes) if notes else ""

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
        from stoker.transport.codec.record import LEFT_OUT, LeftOut

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
        if not self.cache.takes or not self._is_unchanged(source, miss):
            return self.cache.count(refused=1)
        value = _kept(value, left_out)
        what = f"item {miss.index} of {self.cache.describes}"
        self.cache.check_repeats(what, value, lambda: _kept(*again()))
        self.cache.offer(miss.key, value)

    def _is_unchanged(self, source: IndexedSource, miss: Miss) -> bool:
        """Tell whether an example is the one that was looked up; it may change while it is read."""
        known = miss.fingerprint
        return known is not None and self._known(source, miss.index)[0] == known

    def _warn_of_what_cannot_help(self, chain: ChainView) -> None:
        source = chain.source
        assert isinstance(source, IndexedSource)
        if self.cache.is_shared_by_nodes:
            return
        before = chain.stages[: chain.stages.index(self)]
        is_raw = first_with(before, lambda t: not t.selects) is None
        step = max(1, len(source) // _SAMPLED)
        paths = [source.local_path(index) for index in range(0, len(source), step)]
        if is_raw and self.cache.in_memory and paths and None not in paths:
            sizes = [_size(path) for path in paths]
            total = int(sum(sizes) / len(sizes) * len(source))
            if total < resources.usable_memory_bytes() // 2:
                warn(
                    f"{source.name} has about {format_bytes(total)}, which fits in the page cache "
                    "already: caching its raw bytes saves no reads. (Caching decoded examples may "
                    "help: put .cache() after .map())",
                    CacheWarning,
                )
        share, hosts = chain.selection.share, hosts_of_job()
        if share is not None and share.anew and hosts > 1:
            warn(
                f"{hosts} hosts draw new parts every epoch, so each finds only one in {hosts} of "
                "its cached examples: put .shard() before .shuffle(), which fixes the parts",
                CacheWarning,
            )


def ends_caching(t: Traits) -> bool:
    """True for a stage that no cache can follow: what comes out differs in every epoch."""
    return t.is_random or t.changes or t.repeats or t.batches or t.joins or t.scans


def _check_cacheable(before: ChainView) -> None:
    """Raise ValueError where there is nothing to keep."""
    if before.source.yields_batches:
        raise CombinationError(
            "a loader's batches differ in every epoch: cache its dataset instead, "
            "DataLoader(stoker.cached(dataset, limit), ...)"
        )
    if not before.source.is_indexed:
        raise CombinationError(
            "a stream is read once, and its examples have no index to find them by: a cache "
            "cannot help. (To use them more than once: .echo())"
        )
    if first_with(before.stages, lambda t: t.caches) is not None:
        raise CombinationError("a pipeline has one cache: choose a place for it")
    stage = first_with(before.stages, ends_caching)
    if stage is None:
        return
    if stage.traits.is_random:
        raise CombinationError(
            f".cache() cannot follow {stage.name}: its random numbers would be the same in "
            "every epoch. Put .cache() before it"
        )
    if stage.traits.changes:
        raise CombinationError(
            f".cache() cannot follow {stage.name}: what it is told changes in every epoch. Put "
            ".cache() before it"
        )
    if stage.traits.repeats:
        raise CombinationError(
            f".cache() cannot follow {stage.name}, which hands out each example several "
            "times: put .cache() before it"
        )
    if stage.traits.scans:
        raise CombinationError(
            f".cache() cannot follow {stage.name}: what it makes of an example depends on those "
            "before it, and differs in every epoch. Put .cache() before it"
        )
    raise CombinationError(
        f".cache() cannot follow {stage.name}, which combines different examples in every epoch: "
        "put .cache() before it"
    )


def _kept(value: Any, left_out: bool) -> Any:
    """Return what a cache keeps of an example."""
    if not left_out:
        return value
    from stoker.transport.codec.record import LEFT_OUT

    return LEFT_OUT


def _size(path: str | None) -> int:
    try:
        return os.path.getsize(path or "")
    except OSError:  # reading it will raise this again
        return 0
