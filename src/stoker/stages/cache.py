"""The cache in a pipeline: looked up before the source is read, filled behind what it follows."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker import machine
from stoker.cache.fingerprint import Fingerprint
from stoker.caution import warn
from stoker.errors import CacheWarning
from stoker.machine import format_bytes
from stoker.sources.source import FolderSource, LocalFiles, Source
from stoker.stages.shard import Shard
from stoker.stages.shuffle import Shuffle
from stoker.stages.skip import Budget

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache

_SAMPLED = 64


class Hit:
    """An example that was found in the cache, until the cache's turn comes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def left_out(self) -> bool:
        """Whether a filter in front of the cache left it out."""
        from stoker.cache.codec import LEFT_OUT

        return self.value is LEFT_OUT


class Miss:
    """An example that was not, on its way to the cache.

    Attributes:
        value: what was read.
        cost_ns: what that took.
    """

    def __init__(self, index: int, fingerprint: Fingerprint | None, key: bytes) -> None:
        self.index = index
        self.fingerprint = fingerprint
        self.key = key
        self.value: Any = None
        self.cost_ns = 0


@dataclass(frozen=True)
class CacheStage:
    """The stage ``.cache(limit)``.

    Attributes:
        cache: the cache.
        keep_pages: whether the page cache keeps the local files of what is in the cache, too.
    """

    cache: ExampleCache
    keep_pages: bool
    budget: Budget | None = None
    account: int = 0

    @property
    def name(self) -> str:
        """Name the stage for people."""
        limit = self.cache.limit
        shown = format_bytes(limit) if isinstance(limit, int) else limit
        return f"cache({shown})"

    @property
    def weighs(self) -> bool:
        """Whether it matters what each example costs."""
        return self.cache.weighs

    def find(self, source: Source, indices: Sequence[int], expected: Container[int]) -> list[Any]:
        """Look examples up: each comes as a ``Hit``, or as a ``Miss`` without a value.

        Those that are ``expected`` from elsewhere are not looked up.
        """
        found: list[Any] = [self._missing(source, index) for index in indices]
        asked = [
            (at, miss.key, miss.fingerprint.size_bytes)
            for at, miss in enumerate(found)
            if miss.fingerprint is not None and miss.index not in expected
        ]
        places, keys, sizes = zip(*asked, strict=True) if asked else ((), (), ())
        for at, value in self.cache.find(keys, sizes):
            found[places[at]] = Hit(value)
        self.cache.count_misses(len(indices) - len(asked))
        return found

    def _missing(self, source: Source, index: int) -> Miss:
        try:
            fingerprint = source.fingerprint(index)
        except OSError:  # the source says what is wrong when it is read
            return Miss(index, None, b"")
        return Miss(index, fingerprint, self.cache.key(fingerprint))

    def holds(self, source: Source, indices: Sequence[int]) -> list[bool]:
        """Tell which examples are there."""
        return self.cache.holds([self._missing(source, index).key for index in indices])

    def offer(
        self,
        source: Source,
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
        if not self.cache.takes:
            return self.cache.refuse()
        if (
            miss.fingerprint is None
            or self._missing(source, miss.index).fingerprint != miss.fingerprint
        ):
            return self.cache.refuse()  # it changed while it was read
        value = _kept(value, left_out)
        what = f"item {miss.index} of {self.cache.describes}"
        self.cache.check_repeats(what, value, lambda: _kept(*again()))
        forgets = isinstance(source, LocalFiles) and source.local and not self.keep_pages
        file = source.path(miss.index) if forgets else None
        return self.cache.offer(miss.key, value, miss.cost_ns, file)


def _kept(value: Any, left_out: bool) -> Any:
    """Return what a cache keeps of an example."""
    if not left_out:
        return value
    from stoker.cache.codec import LEFT_OUT

    return LEFT_OUT


def say_what_cannot_help(source: Any, stages: Sequence[Any], at: int) -> None:
    """Warn where a cache saves nothing, or less than it seems."""
    stage = stages[at]
    before = [s for s in stages[:at] if not isinstance(s, (Shuffle, Shard))]
    if not before and stage.cache.in_memory and isinstance(source, FolderSource):
        step = max(1, len(source) // _SAMPLED)
        sizes = [_size(source.path(i)) for i in range(0, len(source), step)]
        total = int(sum(sizes) / len(sizes) * len(source))
        if total < machine.usable_memory_bytes() // 2:
            warn(
                f"{source.name} has about {format_bytes(total)}, which fits in the page cache as "
                "it is: a cache of its raw bytes saves no reads. (One of decoded examples may: put "
                ".cache() behind .map())",
                CacheWarning,
            )
    shards = [i for i, s in enumerate(stages) if isinstance(s, Shard)]
    shuffles = [i for i, s in enumerate(stages) if isinstance(s, Shuffle)]
    hosts = machine.hosts_of_job()
    if shards and shuffles and shuffles[0] < shards[0] and hosts > 1:
        warn(
            f"{hosts} hosts draw their parts anew every epoch, so that each finds only one in "
            f"{hosts} of what it has cached: put .shard() before .shuffle(), which fixes the parts",
            CacheWarning,
        )


def _size(path: str | None) -> int:
    try:
        return os.path.getsize(path or "")
    except OSError:  # who reads it will learn of it
        return 0
