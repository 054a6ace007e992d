"""Workers in actors of Ray, on the nodes of a cluster: the stream is that of this process alone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

import order_chains
import stoker
from descriptors import RAISED
from patience import wait_until
from ray_nodes import MARKS, ray_cluster
from scripts import script
from stoker.cluster.workers import ray_kind
from stoker.errors import StageError, TooManyErrors, WorkerDied
from strategies import shortened

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(sys.modules[__name__], order_chains) as made:
        yield made


def actors() -> list[psutil.Process]:
    """The processes of actors that prepare, on the nodes of this test's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("PreparingActor" in part for part in process.cmdline()[:1]):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the first actor is waited for."""
    monkeypatch.setattr(ray_kind, "_FIRST_S", 200.0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """In place of the check of all processes: a cluster starts and keeps some as it likes."""
    yield
    if request.node.stash.get(RAISED, False):
        return
    gc.collect()
    wait_until(lambda: not actors())
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("stoker")])


class Images:
    """Examples that cost some time, some of which are bad."""

    def __init__(self, examples: int = 96, bad: tuple[int, ...] = ()) -> None:
        self._examples, self._bad = examples, bad

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._bad:
            raise ValueError(f"{index} is a bad one")
        time.sleep(0.002)
        return {"x": np.full((40, 40), index, np.float32), "id": index}


def data(bad: tuple[int, ...] = (), **options: Any) -> Any:
    return stoker.from_dataset(Images(bad=bad), seed=3, **options).shuffle()


def noisy(x: Any, rng: np.random.Generator) -> Any:
    x += rng.random(dtype=np.float32)
    return x


def halved(batch: Any, rng: np.random.Generator) -> Any:
    return {"x": batch["x"] / 2 + rng.random()}


def stacked(examples: list[Any]) -> Any:
    return {"x": np.stack([example["x"] for example in examples]) + len(examples)}


CHAINS: dict[str, Callable[[], Any]] = {
    "echo": lambda: data().echo(2).random_map(noisy, on="x").batch(8),
    "survivors": lambda: (
        data((5, 50), max_errors=9)
        .map(lambda e: e | {"y": [e["x"].sum()]})
        .filter(lambda e: e["id"] % 3 == 0)
        .batch(4)
    ),
    "whole batches": lambda: data().batch(8, collate=stacked).random_map(halved),
    "no batches": lambda: data().random_map(noisy, on="x"),
}


def seen(batches: Any) -> list[Any]:
    """What batches are made of, to be compared."""
    return [{name: np.asarray(value).tolist() for name, value in b.items()} for b in batches]


def fleet(pipeline: Any) -> list[psutil.Process]:
    """The processes of a pipeline's actors, but for those whose end it has not noticed."""
    found = []
    for actor in pipeline._cursor._kept_workers.actors.actors:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(actor.place.pid))
    return found


def all_there(pipeline: Any, count: int) -> None:
    """Iterate until so many actors have come up."""
    wait_until(lambda: len(list(pipeline)) and len(fleet(pipeline)) == count)


def of_actors(chain: Callable[[], Any], count: int = 2, **options: Any) -> Any:
    """A pipeline whose actors have come up, before its first epoch."""
    pipeline = chain().workers(count, kind="ray", **options)
    all_there(pipeline, count)
    pipeline.set_epoch(0)
    return pipeline


def disturbed(pipeline: Any, event: Callable[[], object]) -> list[Any]:
    """What an epoch is made of, in whose midst something happens."""
    found = []
    for number, example in enumerate(pipeline):
        if number == 20:
            event()
        found += seen([example])
    return found


def alone(chain: Callable[[], Any], epochs: int = 1) -> list[Any]:
    """What a chain hands out without actors."""
    pipeline = chain().workers(1)
    return [seen(pipeline) for _ in range(epochs)]


@pytest.mark.full
@pytest.mark.parametrize("name", CHAINS)
def test_the_stream_is_that_of_this_process_and_resumes(cluster: Any, name: str) -> None:
    whole = alone(CHAINS[name], 2)
    pipeline = CHAINS[name]().workers(2, kind="ray")
    with iter(pipeline) as batches:
        begun = seen(next(batches) for _ in range(3))
        state = json.loads(json.dumps(pipeline.state_dict()))
    before = fleet(pipeline)
    rest = seen(pipeline)
    resumed = CHAINS[name]().workers(1, kind="ray")
    resumed.load_state_dict(state)

    assert begun == whole[0][:3]
    assert seen(resumed) == whole[0][3:]
    assert rest == whole[1]
    assert fleet(pipeline)[: len(before)] == before, "they are kept from epoch to epoch"
    assert 1 <= pipeline.stats().workers <= 2


@pytest.mark.parametrize(
    "names", shortened(["order clock keys", "select balance", "split weights tokens"], 0)
)
def test_orders_of_all_kinds_are_the_same_with_actors(cluster: Any, names: str) -> None:
    def chain() -> Any:
        return order_chains.built(*(order_chains.NEW[name] for name in names.split()))

    whole = [order_chains.seen(epoch) for epoch in [chain()] * 2]
    pipeline = chain().workers(2, kind="ray")
    with iter(pipeline) as batches:
        begun = order_chains.seen(next(batches) for _ in range(3))
        state = json.loads(json.dumps(pipeline.state_dict()))
    assert begun == whole[0][:3]
    assert order_chains.seen(pipeline) == whole[1]
    pipeline.load_state_dict(state)
    assert order_chains.seen(pipeline) == whole[0][3:]


@pytest.mark.full
def test_what_lost_actors_had_to_do_is_done_by_others_and_in_the_end_here(cluster: Any) -> None:
    chain = CHAINS["no batches"]
    first, second, third = alone(chain, 3)
    pipeline = of_actors(chain)

    def killing(count: int) -> list[Any]:
        def kill() -> None:
            for process in fleet(pipeline)[:count]:
                process.kill()

        return disturbed(pipeline, kill)

    with pytest.warns(UserWarning, match=r"actor \w+ \(process \d+ on node .* was lost: .*another"):
        assert killing(1) == first
    with pytest.warns(UserWarning, match=r"was lost: .* is done by this process"):
        assert killing(2) == second
    assert seen(pipeline) == third
    assert len(fleet(pipeline)) >= 1, "others were ordered"


@pytest.mark.full
def test_a_frozen_actor_is_done_without(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_kind, "SILENCE_S", 3.0)
    chain = CHAINS["no batches"]
    pipeline = of_actors(chain)
    frozen = fleet(pipeline)[0]
    with pytest.warns(UserWarning, match="was lost: .*has sent nothing for 3 s"):
        assert disturbed(pipeline, frozen.suspend) == alone(chain)[0]
    with contextlib.suppress(psutil.NoSuchProcess):
        frozen.resume()


@pytest.mark.full
def test_an_actor_that_takes_long_is_waited_for(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_kind, "SILENCE_S", 3.0)

    def slow(example: Any) -> Any:
        time.sleep(6)
        return example["id"]

    pipeline = stoker.from_dataset(Images(2), seed=0).map(slow).workers(1, kind="ray")

    assert list(pipeline) == [0, 1]


@pytest.mark.full
def test_actors_end_with_their_node(cluster: Any) -> None:
    chain = CHAINS["no batches"]
    node = cluster.add_node(num_cpus=2, resources={"third": 2}, object_store_memory=80e6)
    pipeline = of_actors(chain, ray_options={"resources": {"third": 1}})
    there = fleet(pipeline)

    def remove() -> None:
        cluster.remove_node(node, allow_graceful=False)

    with pytest.warns(UserWarning, match="was lost"):
        assert disturbed(pipeline, remove) == alone(chain)[0]
    wait_until(lambda: not any(process.is_running() for process in there))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*was lost")
def test_examples_that_kill_actors_are_told(cluster: Any, tmp_path: Path) -> None:
    fatal = tmp_path / "fatal"

    def crash(example: Any) -> Any:
        if example["id"] == 7 and fatal.exists():
            os._exit(1)
        return example["id"]

    pipeline = stoker.from_dataset(Images(30), seed=0).map(crash).workers(4, kind="ray")
    all_there(pipeline, 4)
    fatal.touch()

    with pytest.raises(WorkerDied, match="3 actors in a row were lost over the same examples"):
        list(pipeline)


@pytest.mark.full
def test_random_losses_change_nothing(cluster: Any) -> None:
    chain = CHAINS["echo"]
    expected = alone(chain, 6)
    pipeline = chain().workers(3, kind="ray")
    draw = np.random.default_rng(0)
    for epoch in expected:
        deaths = set(draw.integers(0, len(epoch), 2).tolist())
        found = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was lost")
            for number, batch in enumerate(pipeline):
                if number in deaths and (there := fleet(pipeline)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        draw.choice(np.array(there, object)).kill()
                found += seen([batch])
        assert found == epoch


@pytest.mark.full
def test_what_goes_wrong_is_told_as_by_worker_processes(cluster: Any) -> None:
    def errors(pipeline: Any) -> list[Any]:
        with pytest.raises(StageError) as caught:
            list(pipeline)
        error = caught.value
        cause = error.__cause__
        assert cause is not None
        assert "in __getitem__" in cause.__notes__[0]
        return [str(error), error.stage, error.index, type(cause), str(cause)]

    chain = data((5,)).batch(8)
    assert errors(chain.workers(2, kind="ray")) == errors(chain.workers(2, kind="process"))

    strict = data((5, 50), max_errors=1).workers(1, kind="ray")
    with pytest.raises(TooManyErrors, match="2 examples failed"):
        list(strict)


@pytest.mark.full
def test_what_an_actor_cannot_take_is_told_at_once(cluster: Any) -> None:
    class Loads:
        def __call__(self, example: Any) -> Any:
            return example

        def __setstate__(self, state: Any) -> None:
            raise ValueError("this cannot be here")

        def __getstate__(self) -> Any:
            return {"one": 1}

    pipeline = data().map(Loads()).workers(1, kind="ray")
    with pytest.raises(ValueError, match="this cannot be here"):
        iter(pipeline)


@pytest.mark.full
def test_no_room_at_first_is_no_reason_to_wait(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_kind, "_FIRST_S", 1.0)
    options = {"resources": {"nowhere": 1}}
    pipeline = CHAINS["no batches"]().workers(1, kind="ray", ray_options=options)

    with pytest.warns(UserWarning, match="no Ray actor has started within 1 s"):
        assert seen(pipeline) == alone(CHAINS["no batches"])[0]


@pytest.mark.full
def test_actors_are_placed_where_they_are_asked_for(cluster: Any) -> None:
    pipeline = data().map(lambda e: ray.get_runtime_context().get_node_id())
    nodes = {n["NodeID"]: set(n["Resources"]) & {"left", "right"} for n in ray.nodes()}

    for name in ("left", "right"):
        placed = pipeline.workers(1, kind="ray", ray_options={"resources": {name: 1}})
        assert [nodes[each] for each in set(placed)] == [{name}]


@pytest.mark.full
def test_streams_are_read_here_and_worked_on_there(cluster: Any) -> None:
    def chain() -> Any:
        return stoker.from_iterable(range(200), seed=0).map(lambda x: {"x": x * 2}).batch(7)

    assert seen(chain().workers(2, kind="ray")) == alone(chain)[0]


@pytest.mark.full
def test_what_actors_cache_is_on_their_nodes(cluster: Any, tmp_path: Path) -> None:
    def chain() -> Any:
        return data().cache("4MiB", path=tmp_path, version="1").random_map(noisy, on="x").batch(8)

    expected = alone(chain, 2)
    pipeline = chain().workers(2, kind="ray")

    assert [seen(pipeline) for _ in range(2)] == expected


@pytest.mark.full
def test_two_iterators_and_early_ends_keep_the_actors(cluster: Any) -> None:
    pipeline = data().batch(8).workers(1, kind="ray")
    batches = iter(pipeline)
    next(batches)
    there = fleet(pipeline)
    others = iter(pipeline)
    with pytest.raises(RuntimeError, match="iter"):
        next(batches)
    for _ in others:
        break
    del others
    list(pipeline)

    assert fleet(pipeline) == there


SCRIPT = """
warnings.simplefilter("ignore")  # Ray's own
import ray
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")


def slow(example):
    time.sleep(0.005)
    return example["id"]


def pids():
    return [actor.place.pid for actor in pipeline._cursor._kept_workers.actors.actors]


pipeline = stoker.from_dataset(Examples(2_000), seed=0).map(slow).workers(2, kind="ray")
{rest}
"""


@pytest.mark.full
def test_actors_end_with_a_trainer_that_is_killed(cluster: Any, tmp_path: Path) -> None:
    rest = """
batches = iter(pipeline)
next(batches)
say(json.dumps(pids()))
for _ in batches:
    pass
"""
    with script(tmp_path, SCRIPT.format(address=cluster.address, rest=rest)) as running:
        there = [psutil.Process(pid) for pid in json.loads(running.line())]
        running.process.kill()
    wait_until(lambda: not any(process.is_running() for process in there))


@pytest.mark.full
def test_ctrl_c_ends_the_epoch_alone(cluster: Any, tmp_path: Path) -> None:
    rest = """
batches = iter(pipeline)
next(batches)
try:
    say(json.dumps(pids()))
    for _ in batches:
        pass
except KeyboardInterrupt:
    batches.close()
else:
    raise AssertionError
before = pids()
assert len(list(zip(range(100), pipeline))) == 100
assert pids()[:len(before)] == before
say(json.dumps("went on"))
"""
    with script(tmp_path, SCRIPT.format(address=cluster.address, rest=rest)) as running:
        running.line()
        running.process.send_signal(signal.SIGINT)
        assert running.line() == '"went on"'


@pytest.mark.full
def test_a_forked_child_leaves_the_parents_actors_alone(cluster: Any, tmp_path: Path) -> None:
    rest = """
batches = iter(pipeline)
first = next(batches)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        try:
            next(batches)
        except RuntimeError:
            code = 2
        try:
            iter(pipeline)
        except stoker.ClusterError as error:
            code = 0 if code == 2 and "forked" in str(error) else 3
        del batches, pipeline
        gc.collect()
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
rest = list(batches)
assert len(rest) == 1_999, len(rest)
say(json.dumps(len(pids())))
"""
    with script(tmp_path, SCRIPT.format(address=cluster.address, rest=rest)) as running:
        assert running.line() == "2"


@pytest.mark.full
def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="from 1 on, not 0"):
        data().workers(0, kind="ray")
    with pytest.raises(TypeError, match="whole number"):
        data().workers("many", kind="ray")
    with pytest.raises(ValueError, match="ray_options are for kind='ray'"):
        data().workers(2, ray_options={})
    with pytest.raises(TypeError, match="a dict with names"):
        data().workers(2, kind="ray", ray_options=[("num_cpus", 1)])
    with pytest.raises(ValueError, match="actors end with their pipeline: lifetime"):
        data().workers(2, kind="ray", ray_options={"lifetime": "detached"})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(stoker.ClusterError, match=r'ray.init\(address="auto"\)'):
        iter(data().workers(2, kind="ray"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'ray\[tune\]'"):
        data().workers(2, kind="ray")
