"""Caches at several places of one pipeline: each example is kept at one, where it saves most."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import Watch, run, script
from stoker.cache.places.choice import PlaceChoice, Room
from stoker.cache.places.model import NOWHERE, plan, plan_at
from strategies import one_in, stream


@pytest.fixture(autouse=True)
def own_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's list of caches alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@stoker.thread_safe
class Encoded:
    """Small examples that are read slowly and become large: those of even numbers slowly."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return {"id": index, "x": np.full(2_000, index % 251, np.uint8)}


@stoker.thread_safe
def decoded(row: Any) -> Any:
    if row["id"] % 2 == 0:
        time.sleep(0.005)
    return {"id": row["id"], "x": np.repeat(row["x"], 10)}


def doubled(row: Any) -> Any:
    return np.concatenate([row, row])


def size(file: Any) -> int:
    return len(file.data)


def plus_one(row: Any) -> Any:
    row["x"] += 1
    return row


def counted(pipeline: stoker.Pipeline[Any]) -> stoker.CacheStats:
    found = pipeline.stats().cache
    assert found is not None
    return found


def two_places(length: int, limit: Any, **options: Any) -> stoker.Pipeline[Any]:
    memory = limit if isinstance(limit, stoker.CacheBudget) else stoker.budget(limit)
    pipeline = stoker.from_dataset(Encoded(length), seed=0).shuffle().cache(memory, **options)
    return pipeline.map(decoded).cache(memory, **options).map(plus_one)


def check(rows: list[Any], length: int) -> None:
    assert sorted(row["id"] for row in rows) == list(range(length))
    assert all((row["x"] == (row["id"] % 251 + 1) % 256).all() for row in rows)
    assert all(len(row["x"]) == 20_000 for row in rows)


@pytest.mark.parametrize(
    ("workers", "kind"), one_in(3, [(0, "thread"), (2, "thread"), (2, "process")])
)
def test_each_example_is_kept_at_one_place(workers: int, kind: str) -> None:
    pipeline = two_places(100, "1MiB").workers(workers, kind=kind)
    for _ in range(4):
        check(list(pipeline), 100)
    stats = counted(pipeline)
    files, arrays = stats.places
    assert files.name == "from_dataset(Encoded)"
    assert arrays.name == "from_dataset(Encoded).map(decoded)"
    assert files.items + arrays.items == stats.items == stats.own_items <= 100
    assert files.items > 0
    assert arrays.items > 0
    assert stats.hits + stats.misses == 100
    assert stats.used_bytes <= stats.limit_bytes
    assert f"kept as {files.name}: {files.items} (" in str(stats)
    assert "wherever each example saves most for its bytes" in str(pipeline)


def test_with_room_for_all_everything_is_kept_behind_the_last_map() -> None:
    pipeline = two_places(60, "16MiB").workers(0)
    for _ in range(3):
        check(list(pipeline), 60)
    assert [place.items for place in counted(pipeline).places][1] >= 52
    assert counted(pipeline).hits == 60


def test_files_are_known_by_what_they_are(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number]) * 3_000)
    memory = stoker.budget("1MiB")
    files = stoker.from_files(str(tmp_path / "*.bin"), seed=0).shuffle().cache(memory)
    pipeline = files.map(size).cache(memory).workers(0)
    for _ in range(3):
        assert list(pipeline) == [3_000] * 20
    assert counted(pipeline).hits == 20
    (tmp_path / "07.bin").write_bytes(b"x")
    assert sorted(pipeline)[0] == 1
    assert counted(pipeline).hits == 19


def test_states_are_those_without_caches() -> None:
    plain = stoker.from_dataset(Encoded(30), seed=0).shuffle().map(decoded).map(plus_one)
    placed = two_places(30, "1MiB")
    states, tails = [], []
    for pipeline in (plain.batch(4).workers(0), placed.batch(4).workers(2)):
        list(pipeline)
        with iter(pipeline) as batches:
            for _ in range(3):
                next(batches)
            states.append(pipeline.state_dict())
            tails.append([batch["id"].tolist() for batch in batches])
    assert states[0] == states[1]
    assert tails[0] == tails[1]
    again = two_places(30, "1MiB").batch(4).workers(0)
    again.load_state_dict(states[0])
    assert [batch["id"].tolist() for batch in again] == tails[0]


def test_each_rank_keeps_its_part_and_an_echo_may_follow() -> None:
    memory = stoker.budget("4MiB")
    for rank in range(2):
        pipeline = stoker.from_dataset(Encoded(40), seed=0).shard(rank=rank, world=2).shuffle()
        pipeline = pipeline.cache(memory).map(decoded).cache(memory).echo(2).batch(4).workers(2)
        for _ in range(2):
            assert sum(len(batch["id"]) for batch in pipeline) == 40
        assert counted(pipeline).hits + counted(pipeline).misses == 20


@pytest.mark.parametrize(
    ("workers", "kind"), one_in(3, [(0, "thread"), (2, "thread"), (2, "process")])
)
def test_what_memory_has_no_room_for_is_kept_on_the_disk(
    tmp_path: Path, workers: int, kind: str
) -> None:
    memory = stoker.budget(
        "1MiB", behind=stoker.budget("8MiB", path=tmp_path / "store", keep=False)
    )
    pipeline = stoker.from_arrays(np.zeros((100, 20_000), np.uint8), seed=0).shuffle()
    pipeline = pipeline.cache(memory).map(doubled).cache(memory).workers(workers, kind=kind)
    for _ in range(4):
        assert [row.shape for row in pipeline] == [(40_000,)] * 100
    stats = counted(pipeline)
    on_disk = sum(place.items for place in stats.places if not place.in_memory)
    in_memory = sum(place.items for place in stats.places if place.in_memory)
    assert on_disk > 0
    assert in_memory > 0
    assert on_disk + in_memory == stats.items == stats.hits == 100
    assert stats.used_bytes <= stats.limit_bytes == 9 << 20
    assert "kept on disk as from_arrays" in str(stats)
    assert "in memory or on the disk behind it" in str(pipeline)
    del pipeline
    assert not (tmp_path / "store").exists()


def test_one_place_may_have_a_disk_behind_it(tmp_path: Path) -> None:
    body = f"""
        class Arrays:
            def __len__(self):
                return 60

            def __getitem__(self, index):
                return np.full(30_000, index, np.uint8)


        memory = stoker.budget("1MiB", behind=stoker.budget("2MiB", path={str(tmp_path / "d")!r}))
        pipeline = stoker.from_dataset(Arrays(), seed=0).shuffle().cache(memory, version="1")
        pipeline = pipeline.batch(4).workers(2)
        for epoch in range(3):
            for batch in pipeline:
                assert (batch == batch[:, :1]).all()
        slow, fast = pipeline.stats().cache.places
        say(json.dumps([slow.in_memory, fast.in_memory, slow.items + fast.items, slow.items > 0]))
        with iter(pipeline) as batches:
            next(batches)
        say(json.dumps(pipeline.stats().cache.hits >= 4))
    """
    for _ in range(2):  # the second time, those on the disk are there from the beginning
        assert run(tmp_path, body) == [[False, True, 60, True], True]


# -- the choice


@pytest.mark.parametrize("measured", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(8))
def test_a_filled_store_saves_nearly_what_the_plan_promises(seed: int, measured: float) -> None:
    """Examples of some kinds come in any order, and enter a store of their own choosing.

    Those of one kind are equal, or as good as equal.
    """
    rng = np.random.default_rng(seed)
    each = rng.choice(rng.integers(1, (50, 200, 20, 60), (seed % 4 + 1, 4)), 600)
    saved = np.cumsum(each[:, :2], axis=1) * rng.uniform(1 - measured, 1 + measured, (600, 1))
    sizes = np.cumsum(each[:, 2:], axis=1).astype(float)
    room = float(rng.uniform(0.1, 3) * sizes[:, 0].sum())
    used = total = 0.0
    held: set[int] = set()
    missed = 0
    choice = PlaceChoice()
    for _ in range(2):  # what did not enter comes again
        for number in rng.permutation(600).tolist():
            if number in held:
                continue
            missed += 1
            times, rooms = saved[number].tolist(), sizes[number].tolist()
            now = Room.of(room - used, 600 - len(held), len(held), missed)
            at = choice.choose(number, times, rooms, functools.partial(Room, *now))
            if at != NOWHERE and used + rooms[at] <= room:
                held.add(number)
                used += rooms[at]
                total += times[at]
        if seed % 2:
            choice = PlaceChoice()  # another process
    best = plan(saved, sizes, room)
    assert used <= room
    assert total >= 0.95 * best.saved_ns
    alone = max(plan_at(place, saved, sizes, room).saved_ns for place in range(2))
    assert best.saved_ns >= alone - 1e-6


# -- kept, killed, shared

SCRIPT = """
class Encoded:
    def __len__(self):
        return 5_000

    def __getitem__(self, index):
        return np.full(2_000, index % 251, np.uint8)


def decoded(x):
    return np.repeat(x, 10)


memory = stoker.budget("4MiB", path={path!r})
pipeline = stoker.from_dataset(Encoded(), seed=0).shuffle().cache(memory, version="1")
pipeline = pipeline.map(decoded).cache(memory, version="1").workers(2, kind={kind!r}).batch(10)
with iter(pipeline) as batches:
    for number, batch in enumerate(batches):
        assert (batch == batch[:, :1]).all()
        if number == 20:
            say("filling")
            time.sleep({pause_s})
        if number == 300:
            break
stats = pipeline.stats().cache
say(json.dumps([stats.own_items, stats.items, stats.payload_bytes, stats.limit_bytes, stats.hits]))
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_after_a_kill_the_next_run_finds_what_both_places_keep(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "store")
    with script(tmp_path, SCRIPT.format(path=path, kind=kind, pause_s=200)) as running:
        assert running.line() == "filling"
        with Watch([running.pid]) as watch:
            os.killpg(running.pid, signal.SIGKILL)
            assert watch.gone()
    body = SCRIPT.format(path=path, kind=kind, pause_s=0).replace('say("filling")', "pass")
    for hits_at_least in (0, 1):
        ((own, items, payload, limit, hits),) = run(tmp_path, body)
        assert own == items
        assert 0 < payload <= limit == 4 << 20
        assert hits >= hits_at_least


def test_a_feed_may_have_several_places(tmp_path: Path) -> None:
    (tmp_path / "prep.py").write_text(
        "import numpy as np, stoker\n"
        "def twice(x): return np.repeat(x, 2)\n"
        "def make():\n"
        "    memory = stoker.budget('2MiB')\n"
        "    made = stoker.from_arrays(np.arange(40)[:, None], seed=0).cache(memory)\n"
        "    return made.map(twice).cache(memory).batch(4)\n"
    )
    target, name = f"{tmp_path}/prep.py:make", f"places-{os.getpid()}"
    body = f"""
        pipeline = stoker.share({target!r}, name={name!r})
        for _ in range(2):
            say(json.dumps(sum(len(batch) for batch in pipeline)))
    """
    assert run(tmp_path, body) == [40, 40]


# -- what is refused


def rows() -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Encoded(4))


def other_budgets() -> Any:
    first, second = stoker.budget("1MiB"), stoker.budget("1MiB")
    return rows().cache(first).map(decoded).cache(second)


def with_a_limit_behind() -> Any:
    return rows().cache(stoker.budget("1MiB")).map(decoded).cache("1MiB")


def one_after_another() -> Any:
    memory = stoker.budget("1MiB")
    return rows().cache(memory).shuffle().cache(memory)


def on_two_disks() -> Any:
    return stoker.budget("1MiB", path="/tmp/a", behind=stoker.budget("1MiB", path="/tmp/b"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two disks": (on_two_disks, "one budget on a disk behind one in memory"),
    "memory behind": (
        lambda: stoker.budget("1MiB", behind=stoker.budget("1MiB")),
        "one budget on a disk behind one in memory",
    ),
    "a dataset": (
        lambda: stoker.cached(
            [1], stoker.budget("1MiB", behind=stoker.budget("1MiB", path="/tmp/b"))
        ),
        "is for pipelines",
    ),
    "other budgets": (other_budgets, "a pipeline has one cache.*the same budget"),
    "no budget": (with_a_limit_behind, "a pipeline has one cache.*the same budget"),
    "nothing between": (one_after_another, "would keep the same"),
    "random": (
        lambda: two_places(4, "1MiB").random_map(lambda x, rng: x).cache(stoker.budget("1MiB")),
        "cannot follow random_map",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_places_that_cannot_share_are_refused(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        make()


def test_an_example_that_differs_each_time_is_refused() -> None:
    def stamped(row: Any) -> Any:
        return {"id": row["id"], "at": time.perf_counter_ns()}

    memory = stoker.budget("1MiB")
    pipeline = rows().cache(memory).map(stamped).cache(memory).workers(0)
    with pytest.raises(stoker.StageError, match="different each time"):
        stream(pipeline)
