"""``cluster="ray"``: a cache server on each node, found through Ray and kept for the next job."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodes
import psutil
import pytest
import ray
from nodes import EXAMPLES, Numbered

import stoker
from descriptors import RAISED
from patience import wait_until
from ray_nodes import MARKS, ray_cluster
from scripts import script
from stoker.cache import location
from strategies import stream

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setattr("stoker.cluster.cache_connection.DEADLINE_S", 60.0)
        with ray_cluster(sys.modules[__name__], nodes) as made:
            yield made


def servers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("CacheServerActor" in part for part in process.cmdline()[:1]):
                found.append(process)
    return found


def stores(version: str) -> list[str]:
    """The folders of cache servers' stores of a cache, in memory."""
    name = f"server-{spec(version)}-"
    memory = location.memory_folder()
    return [each for each in os.listdir(memory) if each.startswith(name)]


def spec(version: str) -> str:
    cache = plain().cache("8MiB", cluster="ray", version=version).chain.flow.cache.cache
    return cache._spec.digest().hex()  # type: ignore[union-attr, no-any-return]


def swept() -> bool:
    listed = [str(Path(sys.executable).with_name("stoker")), "cache", "list"]
    return subprocess.run(listed, capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """In place of the check of all processes: a cluster starts and keeps some as it likes."""
    yield
    if request.node.stash.get(RAISED, False):
        return
    gc.collect()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("stoker")])


def plain() -> Any:
    # Declared here, too: Ray sends the class to other nodes by value, without what was declared.
    return stoker.from_dataset(stoker.thread_safe(Numbered()), seed=0).shuffle()


def cached(version: str) -> Any:
    return plain().cache("8MiB", cluster="ray", version=version).batch(7)


class Job:
    """A job on one node; with ``part``, of three that share each epoch."""

    def __init__(self, version: str, part: int | None = None) -> None:
        from stoker.cluster import cache_connection

        cache_connection.DEADLINE_S = 60.0
        source = plain() if part is None else plain().shard(rank=part, world_size=3)
        self._train = source.cache("8MiB", cluster="ray", version=version).batch(7)
        self._count = EXAMPLES if part is None else EXAMPLES // 3

    def epoch(self) -> dict[str, Any]:
        """Go through an epoch, in which every example comes once, and is right."""
        ids = []
        for batch in self._train:
            ids += batch["id"].tolist()
            assert (batch["x"] == batch["id"][:, None]).all()
        assert len(set(ids)) == len(ids) == self._count
        cache = self._train.stats().cache
        return {
            "misses": cache.misses,
            "peer_hits": cache.peer_hits,
            "members": cache.members,
            "alive": cache.members_alive,
        }


@contextlib.contextmanager
def jobs(version: str, *places: str) -> Iterator[list[Any]]:
    """Jobs on nodes, each of which knows all of them as members."""
    make: Any = ray.remote(num_cpus=1)(Job)
    made = [make.options(resources={place: 1}).remote(version) for place in places]
    try:
        yield made
    finally:
        for each in made:
            ray.kill(each)


def epoch(job: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(job.epoch.remote(), timeout=200)
    return found


def meet(version: str, *places: str) -> None:
    """Have a cache server on each node, before there is anything to keep."""
    for place in places:
        options = {"num_cpus": 0, "resources": {place: 1}}
        ray.get(
            ray.remote(**options)(
                lambda: bool(cached(version).chain.flow.cache.cache.open())
            ).remote()
        )


@pytest.mark.full
def test_storage_is_read_once_for_all_nodes_and_jobs(cluster: Any) -> None:
    meet("once", "left", "right")
    here = cached("once")
    assert stream(here) == stream(plain().batch(7))
    cache = here.stats().cache
    assert (cache.misses, cache.members) == (EXAMPLES, 3)
    with jobs("once", "left", "right") as others:
        for job in (*others, *others):
            found = epoch(job)
            assert (found["misses"], found["members"]) == (0, 3)
            assert found["peer_hits"] > 0
        again = cached("once")
        stream(again)
        assert again.stats().cache.misses == 0


@pytest.mark.full
def test_nodes_that_open_one_after_another_read_storage_once(cluster: Any) -> None:
    """Each goes through its part of the first epoch before the next node opens."""
    make: Any = ray.remote(num_cpus=1)(Job)
    here = Job("one by one", 0)
    first = here.epoch()["misses"]
    others = []
    for part, place in enumerate(("left", "right"), 1):
        others.append(make.options(resources={place: 1}).remote("one by one", part))
        first += epoch(others[-1])["misses"]
    assert first == EXAMPLES
    for _ in range(3):
        assert [here.epoch()["misses"], *(epoch(each)["misses"] for each in others)] == [0, 0, 0]
    for each in others:
        ray.kill(each)


@pytest.mark.full
def test_processes_and_actors_find_the_stores_of_their_nodes(cluster: Any) -> None:
    meet("workers", "left", "right")
    expected = stream(plain().batch(7))
    for workers in (
        {"kind": "process"},
        {"kind": "ray", "ray_options": {"resources": {"left": 1}}},
    ):
        train = cached("workers").workers(2, **workers)
        assert stream(train) == expected
        stream(train)
        assert train.stats().cache.misses == 0
        del train


@pytest.mark.full
def test_a_killed_server_comes_back_and_costs_reads_alone(cluster: Any) -> None:
    meet("killed", "left", "right")
    train = cached("killed")
    assert stream(train) == stream(plain().batch(7))
    before = servers()
    for process in before:
        process.kill()
    with jobs("killed", "left") as (job,):
        assert epoch(job)["misses"] <= EXAMPLES
        wait_until(lambda: len(servers()) == len(before))
        wait_until(lambda: epoch(job)["alive"] == 3)
        epoch(job)
        assert epoch(job)["misses"] == 0


@pytest.mark.full
def test_a_node_joins_and_is_lost(cluster: Any) -> None:
    train = cached("joins")
    stream(train)
    before = len(servers())
    node = cluster.add_node(num_cpus=2, resources={"third": 2}, object_store_memory=80e6)
    with jobs("joins", "third") as (job,):
        assert epoch(job)["members"] == 2
        assert epoch(job)["misses"] == 0, "what it lacks it asks of the other"
        wait_until(lambda: Job.epoch(held(train))["members"] == 2)
        assert len(stores("joins")) == 2
        cluster.remove_node(node, allow_graceful=False)
        Job.epoch(held(train))
    wait_until(lambda: len(servers()) == before)
    # Ray's own watch of its node may end a cache server at once: then it is swept like any killed
    # one's.
    wait_until(lambda: swept() and len(stores("joins")) == 1)
    wait_until(lambda: Job.epoch(held(train))["members"] == 1)
    assert Job.epoch(held(train))["misses"] == 0


def held(train: Any) -> Job:
    job = Job.__new__(Job)
    job._train, job._count = train, EXAMPLES
    return job


SCRIPT = """
warnings.simplefilter("ignore")  # Ray's own
import ray
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
train = stoker.from_dataset(Examples(40), seed=0).cache("8MiB", cluster="ray", version="killed job")
train = train.batch(8)
list(train)
say(json.dumps(train.stats().cache.misses))
for _ in sys.stdin:
    pass
"""


@pytest.mark.full
def test_what_a_killed_job_has_read_the_next_one_finds(cluster: Any, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with script(tmp_path, SCRIPT.format(address=cluster.address)) as running:
            found.append(running.line())
            running.process.kill()
    assert found == ["40", "0"]


@pytest.mark.full
def test_servers_are_ended_by_a_command(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = cached("ended")
    stream(train)
    assert stores("ended")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    rest = "sys.argv[1:] = ['cache', 'end']\nfrom stoker.cli import main\nmain()"
    with script(tmp_path, "warnings.simplefilter('ignore')\n" + rest) as running:
        assert running.line().startswith("ended ")
    wait_until(lambda: not servers())
    Job.epoch(held(train))
    del train
    gc.collect()
    wait_until(lambda: not stores("ended"))


def test_without_ray_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(stoker.ClusterError, match=r'ray.init\(address="auto"\)'):
        iter(cached("1"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'ray\[tune\]'"):
        cached("1")
