"""Opening a cache over several nodes: its specification, and its members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import xxhash

from stoker.basics.fingerprint import Fingerprint
from stoker.cache.identity import chain_identity
from stoker.cache.location import Limit
from stoker.cluster.cache_spec import CacheSpec
from stoker.cluster.members.membership import Membership, NamedHosts, check_hosts
from stoker.cluster.partitioned import Join, PartitionedCache
from stoker.transport.token import read_token, token_path

# Files whose sizes are compared: other data differ in some of them, and opening a cache does not
# wait for all.
_SIZES = 256


class Indexed(Protocol):
    """A source's part of a specification."""

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    def outline(self) -> str: ...
    def identity(self) -> str | None: ...
    def name_of(self, index: int) -> str: ...
    def fingerprint(self, index: int) -> Fingerprint: ...


def of_chain(
    limit: Limit,
    *,
    cluster: object,
    insecure: bool,
    source: Indexed,
    operations: Sequence[Any],
    version: str | None,
    **settings: Any,
) -> PartitionedCache:
    """Make a cache over several nodes for a source and its operations.

    Raises TypeError or ValueError for an invalid ``cluster``, and ValueError where only a version
    could identify the cache's contents on other nodes.
    """
    join = joining(cluster, insecure=insecure)
    definition = definition_of(source, operations, version)
    return PartitionedCache(limit, join=join, definition=definition, **settings)


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
    """Make a cache over several nodes of a dataset object. Raises as ``of_chain`` does."""
    join = joining(cluster, insecure=insecure)
    definition = CacheSpec(kind, [], version, examples, selects, "")
    return PartitionedCache(limit, join=join, definition=definition, **settings)


def joining(cluster: object, *, insecure: bool = False) -> Join:
    """Return a function that joins the cluster that ``cluster=`` names.

    Raises TypeError or ValueError for an invalid name, ImportError for Ray's without Ray.
    """
    if cluster == "torchrun":
        from stoker.cluster.members.torchrun import join

        return partial(join, insecure=insecure)
    if cluster == "ray":
        from stoker.cluster.members import ray_hosts

        ray_hosts.check()
        return partial(ray_hosts.join, insecure=insecure)
    if insecure:
        raise ValueError(
            "insecure=True is said to the keepers: stoker cache serve --insecure on each host"
        )
    return partial(_join_hosts, check_hosts(cluster))


def _join_hosts(
    hosts: tuple[str, ...], definition: CacheSpec, limit: Limit, path: str | None
) -> Membership:
    return NamedHosts(hosts, read_token(token_path()), definition, path)


def definition_of(source: Indexed, operations: Iterable[Any], version: str | None) -> CacheSpec:
    """Return the specification of a source and its operations.

    Raises ValueError where only a version could identify that on other nodes.
    """
    operations = list(operations)
    if chain_identity(source, operations, version) is None:
        raise ValueError(
            "a cache over several nodes has to know its items on all of them, but nothing tells "
            "whether another node has the same data and functions: give version= (and change it "
            "whenever data or functions change)"
        )
    count = len(source)
    names = xxhash.xxh3_128()
    for index in range(count):
        names.update(source.name_of(index).encode("utf-8", "surrogateescape") + b"\0")
    step = max(1, count // _SIZES)
    sizes = [_size(source, index) for index in range(0, count, step)]
    return CacheSpec(
        kind=source.outline().partition(" ")[0],
        operations=[_named(operation) for operation in operations],
        version=version or "",
        examples=count,
        names=names.hexdigest(),
        sizes=xxhash.xxh3_128_hexdigest(repr(sizes).encode()),
    )


def _named(operation: Any) -> str:
    module = getattr(operation.fn, "__module__", "") or ""
    if module == "__main__":  # a script has another name where it is imported
        module = ""
    return f"{operation.name}:{module}.{getattr(operation.fn, '__qualname__', '')}"


def _size(source: Indexed, index: int) -> int:
    try:
        return source.fingerprint(index).size_bytes
    except OSError:  # the source says what is wrong when it is read
        return -1
