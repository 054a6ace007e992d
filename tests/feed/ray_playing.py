"""A Ray cluster of two nodes on this machine whose jobs share a feed: a program for tests.

Prints what each job got, as JSON, and how many feeders prepared at most.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import cluster_utils

HERE = str(Path(__file__).parent)


def job(name: str, epochs: int, step_s: float) -> list[tuple[int, str]]:
    """Take a shared feed; return the epoch and the digest of each output."""
    import served

    import stoker

    train = stoker.feed(f"{served.__file__}:batches", name=name, cluster="ray", timeout_s=5.0)
    found = []
    for _ in range(epochs):
        with iter(train) as batches:
            for batch in batches:
                at = train.state_dict()["loader"][0]
                found.append((at["epoch"] - (not at["number"]), served.digest(batch)))
                time.sleep(step_s)
    return found


def start(node: str, *arguments: Any) -> Any:
    remote: Any = ray.remote(num_cpus=0.1, resources={node: 1}, max_retries=0)(job)
    return remote.remote(*arguments)


def feeders() -> list[psutil.Process]:
    """Return the processes that prepare."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("FeederActor" in part for part in (process.info["cmdline"] or ())[:1])
    ]


def main(name: str) -> None:
    cluster = cluster_utils.Cluster()
    cluster.add_node(num_cpus=2, resources={"first": 9}, include_dashboard=False)
    cluster.add_node(num_cpus=2, resources={"second": 9})
    cluster.wait_for_nodes()
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": path}}
    quiet = {"log_to_driver": False, "logging_level": "error"}
    ray.init(address=cluster.address, runtime_env=environment, **quiet)
    most = 0
    jobs = [start(node, name, 3, 0.05) for node in ("first", "second", "second")]
    while ray.wait(jobs, num_returns=len(jobs), timeout=0.1)[1]:
        most = max(most, len(feeders()))
    print(json.dumps({"jobs": ray.get(jobs), "most": most}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
