"""A feed that the jobs of a Ray cluster share: one feeder, found from every node, and replaced."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import served

import stoker
from patience import WITHIN_S, wait_until
from ray_nodes import MARKS, ray_cluster

pytestmark = [*MARKS, pytest.mark.full, pytest.mark.alone]

HERE = str(Path(__file__).parent)


def check(found: list[tuple[int, str]], epochs: int) -> None:
    """Every output of successive epochs, once, in order."""
    seen = list(dict.fromkeys(epoch for epoch, _ in found))
    assert seen == list(range(seen[0], seen[0] + epochs))
    for epoch in seen:
        assert [digest for at, digest in found if at == epoch] == served.expected("batches", epoch)


def job(name: str, epochs: int, log: str) -> list[tuple[int, str]]:
    """Take a shared feed; return the epoch and the digest of each output, and log each."""
    gc.disable()  # Ray's process lives on, and nothing need collect in it: the feed is left anyway
    sys.path.insert(0, HERE)
    import served

    import stoker

    target = f"{served.__file__}:batches"
    train = stoker.feed(target, name=name, cluster="ray", timeout_s=5.0)
    found = []
    try:
        for _ in range(epochs):
            for batch in train:
                at = train.state_dict()["loader"][0]
                found.append((at["epoch"] - (not at["number"]), served.digest(batch)))
                with open(log, "a") as out:
                    out.write(f"{at}\n")
                time.sleep(0.05)
    except stoker.StokerError as error:
        Path(f"{log}-ended").write_text(str(error))
        raise
    return found


def refused(name: str) -> str:
    """Take a feed that cannot be served; return why."""
    sys.path.insert(0, HERE)
    import served

    import stoker

    try:
        stoker.feed(f"{served.__file__}:clocked", name=name, cluster="ray")
    except stoker.FeedError as error:
        return str(error)
    return ""


class Jobs:
    """Jobs of one feed."""

    def __init__(self, folder: Path) -> None:
        self.name = f"kills-{os.getpid()}-{folder.name}"
        self._folder = folder
        self._logs: list[Path] = []

    def start(self, node: str, epochs: int = 3) -> Any:
        self._logs.append(self._folder / f"log-{len(self._logs)}")
        make: Any = ray.remote(num_cpus=0.1, resources={node: 1}, max_retries=0)(job)
        return make.remote(self.name, epochs, str(self._logs[-1]))

    def outputs(self) -> int:
        """Return how many the job has had that had fewest."""
        return min(seen(log) for log in self._logs)

    def wait_for(self, outputs: int) -> None:
        """Wait until each job has had so many."""
        wait_until(lambda: self.outputs() >= outputs)

    def feeders(self) -> list[psutil.Process]:
        """Return the processes that prepare, on the nodes of this test's cluster."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("FeederActor" in part for part in process.cmdline()[:1]):
                    found.append(process)
        return found

    def kill_feeders(self) -> None:
        for process in self.feeders():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def seen(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(sys.modules[__name__]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """In place of the check of all processes: a cluster starts and keeps some as it likes."""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    wait_until(lambda: not made.feeders(), lambda: psutil.Process().children(recursive=True))


def test_jobs_on_two_nodes_share_one_preparation(cluster: Any, jobs: Jobs) -> None:
    made = [jobs.start(node) for node in ("left", "right", "right")]
    most = 0
    while ray.wait(made, num_returns=len(made), timeout=0.1)[1]:
        most = max(most, len(jobs.feeders()))
    for found in ray.get(made):
        check(found, 3)
    assert most == 1


def trial(config: dict[str, Any]) -> None:
    """Train on a shared feed, as each trial does, whatever node it is on."""
    sys.path.insert(0, HERE)
    import served
    from ray import tune

    import stoker

    target = f"{served.__file__}:batches"
    train = stoker.feed(target, name=config["feed"], cluster="ray", jobs=config["jobs"])
    found = []
    for _ in range(2):
        for batch in train:
            at = train.state_dict()["loader"][0]
            found.append((at["epoch"] - (not at["number"]), served.digest(batch)))
    node = ray.get_runtime_context().get_node_id()
    tune.report({"loss": config["rate"], "found": found, "node": node})


def test_trials_on_two_nodes_share_a_feed(cluster: Any, tmp_path: Path) -> None:
    from ray import tune

    space = {
        "rate": tune.grid_search([1.0, 0.1, 0.01, 0.001]),
        "feed": f"tune-{os.getpid()}",
        "jobs": 4,
    }
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    found = [each.metrics for each in results if each.metrics is not None]
    assert len(found) == 4
    for each in found:
        check(each["found"], 2)
    assert len({each["node"] for each in found}) == 2


def test_a_feeder_that_cannot_start_says_why(cluster: Any, jobs: Jobs) -> None:
    for node in ("left", "right"):
        ask: Any = ray.remote(num_cpus=0.1, resources={node: 1})(refused)
        assert "echo" in ray.get(ask.remote(jobs.name), timeout=WITHIN_S)


def test_a_killed_feeder_is_started_again_beside_its_jobs(cluster: Any, jobs: Jobs) -> None:
    made = [jobs.start(node) for node in ("left", "left", "right")]
    for outputs in (3, 9):
        jobs.wait_for(outputs)
        jobs.kill_feeders()
    for found in ray.get(made, timeout=WITHIN_S):
        check(found, 3)


def test_a_feeder_without_jobs_beside_it_is_started_elsewhere(cluster: Any, jobs: Jobs) -> None:
    first = jobs.start("left", epochs=1)
    other = jobs.start("right", epochs=5)
    check(ray.get(first, timeout=WITHIN_S), 1)
    jobs.wait_for(3)
    jobs.kill_feeders()
    check(ray.get(other, timeout=WITHIN_S), 5)


class Unreachable:
    """In a feeder's place: silent, or its address is that of a feeder which is gone."""

    def __init__(self, is_silent: bool) -> None:
        self.asked, self._is_silent = 0, is_silent

    def place(self) -> tuple[str, str, bytes]:
        self.asked += 1
        if self._is_silent:
            time.sleep(WITHIN_S)
        return "gone", "127.0.0.1:1", bytes(32)

    def times_asked(self) -> int:
        return self.asked


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_feeder_that_was_hard_to_reach_ends_with_its_job(
    is_silent: bool, cluster: Any, jobs: Jobs
) -> None:
    """An error on the way keeps nothing of the feed: its feeder would wait for the job."""
    make: Any = ray.remote(num_cpus=0, max_concurrency=2)(Unreachable)
    former = make.options(name=jobs.name, namespace="stoker-feeds").remote(is_silent)
    made = jobs.start("left", epochs=1)
    wait_until(lambda: ray.get(former.times_asked.remote()) > (0 if is_silent else 1))
    ray.kill(former)  # so that who asks the silent one is told that it is lost
    check(ray.get(made, timeout=WITHIN_S), 1)


def test_the_node_of_the_feeder_is_lost(cluster: Any, jobs: Jobs) -> None:
    node = cluster.add_node(num_cpus=2, resources={"third": 9}, object_store_memory=80e6)
    lost = jobs.start("third", epochs=100)
    wait_until(lambda: jobs.feeders())
    made = [jobs.start(place, 4) for place in ("right", "left", "left")]
    jobs.wait_for(3)
    cluster.remove_node(node, allow_graceful=False)
    jobs.kill_feeders()  # which is on the same machine here
    for found in ray.get(made, timeout=WITHIN_S):
        check(found, 4)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(lost, timeout=WITHIN_S)


def test_a_feed_that_is_lost_is_an_error_while_the_head_does_not_answer(
    cluster: Any, jobs: Jobs, tmp_path: Path
) -> None:
    """What is there goes on; what would have to be found is not waited for without end."""
    lost = jobs.start("left", epochs=100)
    jobs.wait_for(3)
    ended = tmp_path / "log-0-ended"
    # Frozen: Ray ends all processes a minute after its head was killed, this one, too.
    head = cluster.head_node.all_processes["gcs_server"][0].process
    os.kill(head.pid, signal.SIGSTOP)
    try:
        jobs.wait_for(jobs.outputs() + 5)
        jobs.kill_feeders()
        wait_until(ended.exists)
    finally:
        os.kill(head.pid, signal.SIGCONT)
    assert "the head of the Ray cluster does not answer" in ended.read_text()
    with pytest.raises(stoker.ClusterError):
        ray.get(lost, timeout=WITHIN_S)
