"""The cache in a pipeline: looked up before the source is read, filled behind what it follows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.basics import plugins, resources
from stoker.basics.resources import format_bytes, format_seconds
from stoker.basics.warn import warn
from stoker.engine.checkpoint import PoolSize
from stoker.engine.flow import Flow
from stoker.engine.work.cached import Cached
from stoker.errors import CacheWarning, CombinationError
from stoker.frameworks.rank import hosts_of_job
from stoker.sources.origin import IndexedSource, SourceBase
from stoker.stages.stage import ChainStage, ChainView, Traits, first_with

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache

# Files whose sizes are asked for, to estimate all: enough to tell half of the memory from all of
# it.
_SAMPLED = 64


def caches_over(cluster: object) -> Any:
    """Return what makes caches over a ``cluster``, by its name or by the hosts in a list.

    That is a module like ``cluster/opening.py``, registered in the group ``stoker.caches``: its
    ``of_chain`` and ``of_dataset`` return an ``ExampleCache`` whose ``batch_lookups()`` returns
    ``Lookups``.
    """
    named = isinstance(cluster, str) and cluster in plugins.names(plugins.CACHES)
    return plugins.load(plugins.CACHES, str(cluster) if named else "hosts")


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

    def add_to(self, flow: Flow) -> None:
        flow.within(Cached(self.name, self.cache))

    def signature(self) -> None:
        return None

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say where it is, if not on this host alone, and what is expected of it."""
        nodes = self.cache.is_shared_by_nodes * "over several nodes, each of which keeps a part"
        notes = [each for each in (nodes, str(self.forecast or "")) if each]
        return "  " + ": ".join(notes) if notes else ""

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
    traits, why = stage.traits, "it combines different examples in every epoch"
    if traits.is_random:
        why = "its random numbers would be the same in every epoch"
    elif traits.changes:
        why = "what it is told changes in every epoch"
    elif traits.repeats:
        why = "it hands out each example several times"
    elif traits.scans:
        why = "what it makes of an example depends on those before it, and differs in every epoch"
    raise CombinationError(f".cache() cannot follow {stage.name}: {why}; put .cache() before it")


def _size(path: str | None) -> int:
    try:
        return os.path.getsize(path or "")
    except OSError:  # reading it will raise this again
        return 0
