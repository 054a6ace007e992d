"""Builds a cache over several nodes: its specification, and the way to find its members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import xxhash

from stoker.cache.identity import chain_identity
from stoker.cache.location import Limit
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.membership import Membership, NamedHosts, check_hosts
from stoker.cluster.partitioned import Join, PartitionedCache
from stoker.sources.origin import IndexedSource
from stoker.transport.secret import read_token, token_path

# Files whose sizes are part of the specification. Other data differ in some of 256 files, and
# reading all sizes would delay the start. Chosen, not measured.
_MAX_COMPARED_SIZES = 256


def of_chain(
    limit: Limit,
    *,
    cluster: object,
    insecure: bool,
    source: IndexedSource,
    operations: Sequence[Any],
    version: str | None,
    **settings: Any,
) -> PartitionedCache:
    """Return a cache over several nodes for a source and its operations.

    Raises TypeError or ValueError for an invalid ``cluster``, and ValueError if the cache needs a
    version.
    """
    join = cluster_join(cluster, insecure=insecure)
    spec = spec_of(source, operations, version)
    return PartitionedCache(limit, join=join, spec=spec, **settings)


def of_dataset(
    limit: Limit,
    *,
    cluster: object,
    insecure: bool,
    kind: str,
    examples: int,
    version: str,
    selects: str,
    **settings: Any,
) -> PartitionedCache:
    """Return a cache over several nodes for a dataset object. Raises as ``of_chain`` does."""
    join = cluster_join(cluster, insecure=insecure)
    spec = CacheSpec(kind, [], version, examples, selects, "")
    return PartitionedCache(limit, join=join, spec=spec, **settings)


def cluster_join(cluster: object, *, insecure: bool = False) -> Join:
    """Return a function that joins the cluster named by the user's ``cluster=``.

    Raises TypeError or ValueError for an invalid name, ImportError for "ray" if Ray is missing.
    """
    if cluster == "torchrun":
        from stoker.cluster.torchrun import join

        return partial(join, insecure=insecure)
    if cluster == "ray":
        from stoker.cluster import ray_members

        ray_members.check()
        return partial(ray_members.join, insecure=insecure)
    return partial(_join_hosts, check_hosts(cluster), insecure=insecure)


def _join_hosts(
    hosts: tuple[str, ...], spec: CacheSpec, limit: Limit, path: str | None, *, insecure: bool
) -> Membership:
    return NamedHosts(hosts, read_token(token_path()), spec, path, insecure=insecure)


def spec_of(source: IndexedSource, operations: Iterable[Any], version: str | None) -> CacheSpec:
    """Return the specification of a source and its operations.

    Raises ValueError if they cannot be identified on other nodes without a version.
    """
    operations = list(operations)
    if chain_identity(source, operations, version) is None:
        raise ValueError(
            "a cache over several nodes needs version= here: stoker cannot check that the other "
            "nodes have the same data and functions. Give version=, and change it whenever data "
            "or functions change"
        )
    count = len(source)
    names = xxhash.xxh3_128()
    for index in range(count):
        names.update(source.name_of(index).encode("utf-8", "surrogateescape") + b"\0")
    step = max(1, count // _MAX_COMPARED_SIZES)
    sizes = [_size(source, index) for index in range(0, count, step)]
    return CacheSpec(
        kind=source.signature().partition(" ")[0],
        operations=[_operation_name(operation) for operation in operations],
        version=version or "",
        examples=count,
        names=names.hexdigest(),
        sizes=xxhash.xxh3_128_hexdigest(repr(sizes).encode()),
    )


def _operation_name(operation: Any) -> str:
    module = getattr(operation.fn, "__module__", "") or ""
    if module == "__main__":  # the script has another module name in processes that import it
        module = ""
    return f"{operation.name}:{module}.{getattr(operation.fn, '__qualname__', '')}"


def _size(source: IndexedSource, index: int) -> int:
    try:
        return source.fingerprint(index).size_bytes
    except OSError:  # the error is raised when the file is read
        return -1
