"""Feeds that the jobs of a Ray cluster share: one feeder, found from every node."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import served
from playing import wait_until

import stoker

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

HERE = str(Path(__file__).parent)
pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine; jobs say by a resource where they run."""
    made = cluster_utils.Cluster()
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        made.add_node(num_cpus=2, resources={"first": 9}, include_dashboard=False)
        made.add_node(num_cpus=2, resources={"second": 9})
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
        ray.shutdown()
        made.shutdown()


def on(node: str) -> Any:
    """Return a job, as a function that runs on a node."""
    return ray.remote(num_cpus=0.1, resources={node: 1}, max_retries=0)(job)


def job(name: str, epochs: int, step_s: float) -> list[tuple[int, str]]:
    """Take a shared feed; return the digests with their epochs."""
    import served

    import stoker

    train = stoker.share(f"{served.__file__}:batches", name=name, cluster="ray", patience_s=5.0)
    found = []
    for _ in range(epochs):
        with iter(train) as batches:
            for batch in batches:
                at = train.state_dict()["loader"]
                ended = not at["number"]
                found.append((at["epoch"] - ended, served.digest(batch)))
                time.sleep(step_s)
    return found


def check(found: list[tuple[int, str]], epochs: int) -> None:
    """Every output of successive epochs, once, in order."""
    seen = list(dict.fromkeys(epoch for epoch, _ in found))
    assert len(seen) == epochs
    for epoch in seen:
        assert [digest for at, digest in found if at == epoch] == served.expected("batches", epoch)


def feeders() -> list[psutil.Process]:
    """Return the processes that prepare, relays apart."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        line = " ".join(process.info["cmdline"] or ())
        is_starter = time.time() - process.info["create_time"] < 1.0  # it forks, and ends
        if "stoker.feed.autostart" in line and "served.py" in line and not is_starter:
            found.append(process)
    return found


def test_jobs_on_two_nodes_share_one_preparation(cluster: Any) -> None:
    name = f"ray-{os.getpid()}-share"
    jobs = [on(node).remote(name, 3, 0.01) for node in ("first", "second", "second")]
    most = 0
    while ray.wait(jobs, num_returns=3, timeout=0.05)[1]:
        most = max(most, len(feeders()))
    for found in ray.get(jobs):
        check(found, 3)
    assert most == 1
    wait_until(lambda: not feeders(), "the feeder ends with its last job")


def test_a_feeder_that_is_killed_begins_again_where_there_are_jobs(cluster: Any) -> None:
    name = f"ray-{os.getpid()}-kill"
    early = on("first").remote(name, 1, 0.0)
    jobs = [on("second").remote(name, 4, 0.05)]
    check(ray.get(early), 1)  # its node has no job any more, but the feeder
    wait_until(feeders, "the feeder serves the other node")
    for feeder in feeders():
        with contextlib.suppress(psutil.NoSuchProcess):
            feeder.send_signal(signal.SIGKILL)
    for found in ray.get(jobs):
        check(found, 4)
    wait_until(lambda: not feeders(), "the feeder ends with its last job")


def test_without_a_cluster_it_says_so() -> None:
    for cluster, error in (("slurm", ValueError), ("ray", stoker.FeedError)):
        with pytest.raises(error, match="cluster="):
            stoker.share("served.py:batches", name="nowhere", cluster=cluster)
