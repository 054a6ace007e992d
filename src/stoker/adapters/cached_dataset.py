"""``stoker.cached(dataset, limit)``: a map-style dataset, behind a cache, for any loader."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.basics.fingerprint import Fingerprint, content_digest, selection_digest
from stoker.basics.warn import warn
from stoker.errors import CacheWarning
from stoker.frameworks.rank import hosts_of_job
from stoker.pipeline import Pipeline
from stoker.sources.dataset import gives_many
from stoker.stages.cache import caches_over
from stoker.stats import CacheStats

if TYPE_CHECKING:
    from stoker.cache.example_cache import ExampleCache

_OWN = ("_dataset", "_cache")
_STREAM = "A stream is read once, and has no index to find its examples by: a cache cannot help."


def cached(
    dataset: Any,
    limit: int | str = "auto",
    *,
    path: str | os.PathLike[str] | None = None,
    keep: bool | None = None,
    version: str | None = None,
    cluster: str | Sequence[str] | None = None,
    insecure: bool = False,
) -> CachedDataset:
    """Put a never-evicting cache in front of a map-style dataset, for example for a DataLoader.

    The cache keeps the values of ``dataset[i]``, for all workers and epochs, until the limit is
    reached; each must be the same every time (put random augmentation after it: in ``collate_fn``,
    or a pipeline). Attributes are read from, and set on, the dataset itself.

    Args:
        dataset: any object with ``__getitem__`` and ``__len__``; ``__getitems__`` is used where
            it stands for that. Items are nested arrays, tensors, bytes, strings and numbers.
        limit: bytes (``"64GiB"``), a share of usable memory (``"50%"``; with ``path`` of the free
            disk), or ``"auto"``: half (four fifths).
        path, keep, cluster, insecure: as in ``Pipeline.cache``.
        version: names the data: with it, jobs share the store, and with ``keep`` the next run finds
            it, if the dataset is alike: its class and length, the texts, numbers and paths that it
            holds, its selection, and the same of a wrapped dataset. Without it the store belongs to
            this job only; a ``cluster`` needs it.

    Raises TypeError for an object that is not such a dataset, ValueError or TypeError for wrong
    arguments; and, when the first item is read, ValueError for a dataset whose items differ each
    time.
    """
    from stoker.cache.example_cache import ExampleCache

    settings: dict[str, Any] = {"path": path, "keep": keep}
    what = type(dataset).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        raise TypeError(f"stoker.cached needs an index, and {what} has none. {_STREAM}")
    if isinstance(dataset, Pipeline):
        raise TypeError("stoker.cached takes a dataset, and a pipeline has .cache()")
    for method in ("__getitem__", "__len__"):
        if not hasattr(dataset, method):
            raise TypeError(
                f"stoker.cached needs an object with __getitem__ and __len__; {what} has no "
                f"{method}." + (f" {_STREAM}" if hasattr(dataset, "__iter__") else "")
            )
    if version is not None and (not isinstance(version, str) or not version):
        raise TypeError(f"version= is a text, not {version!r}")
    name = f"{type(dataset).__name__} of {len(dataset)}"
    if insecure and cluster is None:
        raise ValueError("insecure=True is for a cache over several nodes (cluster=)")
    if cluster is not None:
        settings |= {"cluster": cluster, "insecure": bool(insecure)}
        return CachedDataset(dataset, _over_nodes(dataset, limit, version, name, **settings))
    hosts = hosts_of_job()
    if hosts > 1:
        warn(
            f"this job has {hosts} hosts: if a sampler draws their parts anew every epoch "
            "(DistributedSampler does, with shuffle=True), each host finds only one in "
            f"{hosts} of what it has cached; parts that stay the same find all of it",
            CacheWarning,
        )
    cache = ExampleCache(
        limit,
        identity=None if version is None else f"dataset {name} {version} {content_digest(dataset)}",
        describes=name,
        examples=len(dataset),
        **settings,
    )
    cache.open()
    return CachedDataset(dataset, cache)


def _over_nodes(
    dataset: Any, limit: Any, version: str | None, name: str, **settings: Any
) -> ExampleCache:
    """Join a cluster, and return a dataset's cache there."""
    if version is None:
        raise ValueError(
            "a cache over several nodes needs version= here: stoker cannot check that the other "
            "nodes have the same dataset"
        )
    cache: ExampleCache = caches_over(settings["cluster"]).of_dataset(
        limit,
        kind=type(dataset).__name__,
        examples=len(dataset),
        version=version,
        selects=selection_digest(dataset),
        describes=name,
        **settings,
    )
    cache.open()
    return cache


class CachedDataset:
    """A dataset with a cache; made by ``stoker.cached``. Picklable; workers share its store."""

    _dataset: Any
    _cache: ExampleCache

    def __init__(self, dataset: Any, cache: ExampleCache) -> None:
        vars(self).update(_dataset=dataset, _cache=cache)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return an item, owned by the caller; the dataset's errors pass unchanged."""
        if type(index) is int:
            found = self._cache.find_one(index)
            if found is not None:
                return found
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        from stoker.cache.store import MISSING

        cache = self._cache
        names = [_plain(index) for index in indices]
        found = self._find(names)
        missing = [at for at, value in enumerate(found) if value is MISSING]
        values = self._read([indices[at] for at in missing]) if missing else []
        for at, value in zip(missing, values, strict=True):
            found[at] = value
            if not cache.takes:
                cache.count(refused=1)
                continue
            what = f"item {indices[at]!r} of {type(self._dataset).__name__}"
            cache.check_repeats(what, value, functools.partial(self._read_one, indices[at]))
            name = names[at]
            cache.offer(cache.key(Fingerprint(name), name), value)
        return found

    def _find(self, names: list[Any]) -> list[Any]:
        """Look examples up; numbers within the length have places that are remembered."""
        cache, length = self._cache, len(self._dataset)
        if {*map(type, names)} == {int} and min(names) >= 0 and max(names) < length:
            return cache.find_numbered(np.array(names, np.int64))
        return cache.find([cache.key(Fingerprint(name), name) for name in names])

    def cache_stats(self) -> CacheStats:
        """Return the cache's counts for this dataset, over all workers, and the store's
        contents."""
        return self._cache.stats()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # it has no attributes yet while it is being unpickled
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            vars(self)[name] = value
        else:
            setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._dataset)})

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_cache": self._cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"stoker.cached({self._dataset!r}, {self._cache.limit!r})"

    def _read(self, indices: list[Any]) -> list[Any]:
        dataset = self._dataset
        if not gives_many(dataset):
            return [dataset[index] for index in indices]
        values = list(dataset.__getitems__(indices))
        if len(values) != len(indices):
            raise ValueError(f"__getitems__ gave {len(values)} items for {len(indices)}")
        return values

    def _read_one(self, index: Any) -> Any:
        return self._read([index])[0]


def _plain(index: Any) -> Any:
    """Return an index in the store's form."""
    if isinstance(index, (int, str)):
        return index
    if hasattr(index, "__index__"):
        return index.__index__()
    return repr(index)
