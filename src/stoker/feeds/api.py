"""``feed`` and ``from_feed``: pipelines over batches that one feeder prepares for many jobs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from stoker.basics.validate import is_number, is_whole_number
from stoker.pipeline import Pipeline

# How long to wait for a feeder that may be starting. It listens before it imports the pipeline's
# modules. Chosen, not measured.
_START_S = 5.0
# Feeders that may die at one position. An example that crashes the process would otherwise start
# feeders for ever; kills from outside hardly ever hit one position three times.
_MAX_LOSSES = 3
# Connections to another host that may end at one position: networks fail more often than feeders
# die, and jobs on the feeder's host count its deaths. Chosen, not measured.
_REMOTE_LOSSES = 10


def from_feed(name: str, *, seed: int | None = None, insecure: bool = False) -> Pipeline:
    """Read the outputs of a feed: batches or examples that another process has prepared.

    Every job of a feed gets every output of each epoch exactly once, bit-identical to the outputs
    of the feeder's pipeline in one process. A job joins at the beginning of an epoch. Outputs are
    not copied: arrays are read-only views, and tensors are writable views, of memory that the
    feeder shares. Other jobs do not see a job's writes.

    If the feeder's pipeline ends with ``.batch(n)``, the outputs are batches. Otherwise they are
    examples, which this job can augment and batch.

    Example: ``for batch in stoker.from_feed("imagenet"): ...``

    Args:
        name: the name in ``stoker feed FILE.py:FUNCTION --name NAME``. For a feed on another host,
            ``tcp://host:port/NAME``.
        seed: the seed of echoes and random maps in this job; by default a random one.
        insecure: do not encrypt the traffic with a feed on another host, which must have been
            started with ``insecure=True``, too; for trusted networks only.

    Raises FeedError if there is no such feed (after waiting for one that may be starting: 5 s, or
    10 s for one on another host), TokenError if this host's token cannot be read, ValueError if
    ``name`` is not a valid name, ImportError if a feed on another host needs cryptography
    (``pip install cryptography``).
    """
    from stoker.feeds import remote
    from stoker.feeds.client import open_feed
    from stoker.feeds.connection import FeedAddress
    from stoker.feeds.local_feeds import check_name, connect_within

    if remote.is_url(name):
        _, remote_name = remote.split_url(name)

        def connect() -> socket.socket:
            return remote.connect_within(name, insecure=bool(insecure))

        address = FeedAddress(name, connect, max_losses=_REMOTE_LOSSES, remote_name=remote_name)
        return open_feed(address, seed)
    if insecure:
        raise ValueError("insecure=True is for feeds on other hosts: leave it out")
    check_name(name)
    return open_feed(FeedAddress(name, lambda: connect_within(name, _START_S)), seed)


def feed(
    function: Callable[[], Pipeline] | str,
    *,
    name: str,
    jobs: int = 1,
    staging: int | None = None,
    timeout_s: float = 60.0,
    seed: int | None = None,
    listen: str | None = None,
    cluster: str | None = None,
    insecure: bool = False,
) -> Pipeline:
    """Prepare each epoch once, for all jobs on this host that call ``feed`` with the same name.

    With ``cluster="ray"``, for all jobs of a Ray cluster, on any of its nodes.

    Each job trains on the whole of every epoch (coordinated prep: Mohan et al., VLDB 2021, section
    6.3). The first job starts a feeder: a process of its own, which ends with the last job. If the
    feeder is killed, one of the jobs starts another, which continues at the same position.

    Example: ``train = stoker.feed(make_pipeline, name="imagenet", jobs=4)``

    Args:
        function: returns the pipeline to prepare: a function without arguments at the top of a
            file, or its name, ``"FILE.py:FUNCTION"`` or ``"module:FUNCTION"``. The feeder imports
            that file, so put its training code below ``if __name__ == "__main__":``.
        name: the feed's name, the same in all its jobs.
        jobs: the number of jobs to wait for before the first epoch begins, for at most
            ``timeout_s``. Others join at the beginning of an epoch.
        staging: the number of batches that shared memory may hold; 8 by default. Without
            ``.batch(n)`` it is a number of chunks of up to 64 examples, 64 by default. The job that
            starts the feeder decides it.
        timeout_s: how many seconds jobs wait for a job that does not respond (it may be frozen)
            before they go on without it. That job may come back.
        seed: the seed of echoes and random maps in this job; by default a random one.
        listen: the address, ``host:port``, at which jobs on other hosts reach the feed with
            ``stoker.from_feed("tcp://host:port/NAME")``; by default they cannot. The job that
            starts the feeder decides it.
        cluster: ``"ray"`` for one feeder in the Ray cluster, on the node of the first job. Ray
            starts and restarts it.
        insecure: do not encrypt traffic to other hosts; for trusted networks only. All jobs of the
            feed must agree.

    Raises FeedError if the feeder cannot be started, or if it serves another function under this
    name; ClusterError if this process has joined no Ray cluster; ImportError if Ray is not
    installed; TypeError or ValueError for invalid arguments.
    """
    from stoker.adapters.entrypoint import target_of
    from stoker.feeds.client import open_feed
    from stoker.feeds.connection import FeedAddress
    from stoker.feeds.local_feeds import (
        FeedSettings,
        check_name,
        check_not_in_feeder,
        connect_or_start,
    )
    from stoker.feeds.ray_feeder import connect_in_cluster
    from stoker.transport.link import split_address

    check_name(name)
    _check_settings(jobs, staging, timeout_s)
    if cluster not in (None, "ray"):
        raise ValueError(f'cluster= must be "ray" or None, not {cluster!r}')
    if listen is not None:
        if cluster is not None:
            raise ValueError(
                "give listen= or cluster=, not both: in a cluster, jobs find the address by "
                "themselves"
            )
        split_address(listen)
    if insecure and listen is None and cluster is None:
        raise ValueError(
            "insecure=True is for feeds on other hosts: give listen= or cluster=, or leave it out"
        )
    check_not_in_feeder()
    target = target_of(function)
    settings = FeedSettings(
        name,
        target,
        None if staging is None else int(staging),
        int(jobs),
        float(timeout_s),
        autostarted=True,
        path=tuple(each for each in sys.path if isinstance(each, str)),  # others, Python ignores
        listen=listen or "",
        insecure=bool(insecure),
    )
    connect = connect_or_start if cluster is None else connect_in_cluster
    return open_feed(FeedAddress(name, lambda: connect(settings), target, _MAX_LOSSES), seed)


def _check_settings(jobs: Any, staging: Any, timeout_s: Any) -> None:
    """Check the settings in the job, where the user sees the error, and not in the feeder.

    Raises TypeError or ValueError.
    """
    if not is_whole_number(jobs):
        raise TypeError(f"jobs= must be the number of jobs to wait for, not {jobs!r}")
    if jobs < 1:
        raise ValueError(f"jobs= must be at least 1, not {jobs}")
    if not (staging is None or is_whole_number(staging)):
        raise TypeError(f"staging= must be a number of batches, not {staging!r}")
    if not is_number(timeout_s):
        raise TypeError(f"timeout_s= must be a number of seconds, not {timeout_s!r}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s= must be more than 0, not {timeout_s}")
