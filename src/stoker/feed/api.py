"""``share`` and ``from_feed``: pipelines whose batches one feeder prepares for many jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from stoker.basics.validate import is_number, is_whole_number
from stoker.pipeline import Pipeline

# How long a feeder may take until it listens: it imports the pipeline's modules first.
_STARTING_S = 5.0


def from_feed(name: str, *, seed: int | None = None) -> Pipeline:
    """Read the outputs of a feeder's pipeline: each output once an epoch.

    Every job of a feed gets every output of each of its epochs exactly once, bit-identical to what
    the feeder's pipeline yields in one process. A job joins where an epoch begins. Arrays are
    read-only views, tensors are views that may be written to, of memory that the feeder shares:
    nothing is copied, and no other job sees what a job writes there.

    Where the feeder's pipeline ends with ``.batch(n)`` these are batches; else examples, which may
    be augmented and batched here.

    Args:
        name: as in ``stoker feed FILE.py:FUNCTION --name NAME``. For a feed on another host,
            ``tcp://host:port/NAME``: the first job here starts a relay, which fetches the feed once
            and serves all jobs of this host.
        seed: of echoing and random maps in this job; drawn if there is none.

    Raises FeedError when there is no such feed (after waiting 5 s for one that may be starting),
    TokenError where this host's token cannot be read, ValueError where ``name`` is not a valid
    name.
    """
    from stoker.feed.connection import FeedAddress
    from stoker.feed.feed_source import open_feed
    from stoker.feed.local_socket import check_name, connect_within
    from stoker.feed.lookup.relay import relayed
    from stoker.feed.relay.url import FeedUrl, is_url

    if is_url(name):
        return open_feed(relayed(FeedUrl.of(name)), seed)
    check_name(name)
    return open_feed(FeedAddress(name, lambda: connect_within(name, _STARTING_S)), seed)


def share(
    function: Callable[[], Pipeline] | str,
    *,
    name: str,
    jobs: int = 1,
    staging: int | str | None = None,
    patience_s: float = 60.0,
    seed: int | None = None,
    listen: str | None = None,
    cluster: str | None = None,
    insecure: bool = False,
) -> Pipeline:
    """Share one preparation with all jobs on this host that call this with the same name.

    With ``cluster="ray"``: with all jobs of a Ray cluster, on any of its nodes.

    Coordinated prep (Mohan et al., VLDB 2021, section 6.3): each epoch is fetched and prepared
    once, and each job trains on all of it. The first job starts a feeder, a separate process that
    ends with the last job. If the feeder is killed, one of the jobs starts another, which continues
    at the same position.

    Args:
        function: makes the pipeline that is prepared once: a function without arguments at the top
            of a file, or its name, ``"FILE.py:FUNCTION"`` or ``"module:FUNCTION"``. The feeder
            imports that file: put the training code below ``if __name__ == "__main__":`` there.
        name: the feed's name, the same in all its jobs.
        jobs: how many jobs to wait for (``patience_s`` at most) before the first epoch begins;
            others join where an epoch begins.
        staging: how many batches shared memory may hold, or how many bytes (``"2GiB"``); by default
            8 batches. Without ``.batch(n)`` it holds examples in chunks of up to 64, and the
            default is 64 chunks. Only the job that starts the feeder decides this.
        patience_s: how many seconds the other jobs wait for a job that does not respond (it may be
            frozen) before they go on without it. It may come back.
        seed: of echoing and random maps in this job; drawn if there is none.
        listen: the address, ``host:port``, at which jobs on other hosts reach the feed by
            ``stoker.from_feed("tcp://host:port/NAME")``; by default only this host can. Only the
            job that starts the feeder decides this.
        cluster: ``"ray"`` for one feeder in the cluster, on the node of the first job; relays
            serve the others' nodes, as with ``from_feed("tcp://...")``. Addresses and a token
            travel through Ray.
        insecure: do not encrypt the traffic to other hosts; for trusted networks only. Only the job
            that starts the feeder decides this.

    Raises FeedError when the feeder cannot be started, or serves another function under this name;
    ClusterError where this process has joined no Ray cluster; ImportError without Ray; TypeError or
    ValueError for wrong arguments.
    """
    from stoker.adapters.entrypoint import target_of
    from stoker.feed.autostart import check_not_in_feeder, connect_or_start
    from stoker.feed.connection import FeedAddress
    from stoker.feed.feed_source import open_feed
    from stoker.feed.local_socket import check_name
    from stoker.feed.lookup.ray_cluster import shared_in_cluster
    from stoker.feed.settings import FeedSettings
    from stoker.transport.link import split_address

    check_name(name)
    _check_settings(jobs, staging, patience_s)
    if cluster not in (None, "ray"):
        raise ValueError(f'cluster= is "ray" or None, not {cluster!r}')
    if listen is not None:
        if cluster is not None:
            raise ValueError("listen= or cluster=: in a cluster the address is found")
        split_address(listen)
    if insecure and listen is None and cluster is None:
        raise ValueError("insecure=True is for feeds on other hosts (listen= or cluster=)")
    check_not_in_feeder()
    target = target_of(function)
    if is_whole_number(staging):
        staging = int(staging)
    path = tuple(sys.path)
    where = listen or "", bool(insecure)
    settings = FeedSettings(name, target, staging, int(jobs), float(patience_s), True, path, *where)
    if cluster is not None:
        return open_feed(shared_in_cluster(settings), seed)
    address = FeedAddress(name, lambda: connect_or_start(settings), target, is_restarted=True)
    return open_feed(address, seed)


def _check_settings(jobs: Any, staging: Any, patience_s: Any) -> None:
    """Refuse wrong settings here rather than later in the feeder. Raises TypeError, ValueError."""
    if not is_whole_number(jobs):
        raise TypeError(f"jobs= is a number of jobs to wait for, not {jobs!r}")
    if jobs < 1:
        raise ValueError(f"jobs= is at least 1, not {jobs}")
    if not (staging is None or isinstance(staging, str) or is_whole_number(staging)):
        raise TypeError(
            f"staging= is a number of batches or a size such as '2GiB', not {staging!r}"
        )
    if not is_number(patience_s):
        raise TypeError(f"patience_s= is a number of seconds, not {patience_s!r}")
    if not patience_s > 0:
        raise ValueError(f"patience_s= is more than 0, not {patience_s}")
