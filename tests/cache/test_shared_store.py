"""Several caches in one store: what they hold together never exceeds its limit."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stores import counted

import stoker
from scripts import Watch, run, script
from strategies import few

LEAST = 1 << 20


@stoker.thread_safe
class Sized:
    """Arrays of one size each, whose content tells the dataset and the number."""

    def __init__(self, name: int, sizes: list[int]) -> None:
        self.name, self.sizes = name, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return np.full(self.sizes[index], (self.name * 31 + index) % 251, np.uint8)


def check_sum(each: list[stoker.types.CacheStats]) -> None:
    """Check that caches of one store account for all of it, within its limit and on the disk."""
    (store,) = {stats.folder for stats in each}
    last = each[-1]
    assert sum(stats.own_items for stats in each) == last.items
    assert sum(stats.own_bytes for stats in each) == last.payload_bytes
    assert last.payload_bytes <= last.used_bytes <= last.limit_bytes
    data = os.stat(os.path.join(store, "data.mdb"))
    assert data.st_blocks * 512 <= last.limit_bytes


sizes = st.lists(st.sampled_from([0, 10, 3_000, 70_000, 200_000]), min_size=1, max_size=12)


@few(8)
@given(
    st.lists(sizes, min_size=2, max_size=3),
    st.sampled_from([LEAST, 3 * LEAST // 2, 4 * LEAST]),
    st.sampled_from([0, 3]),
)
def test_the_sum_of_all_caches_stays_within_the_limit(
    datasets: list[list[int]], limit: int, workers: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        pipelines = [
            stoker.from_dataset(Sized(name, each), seed=0)
            .cache(limit, path=f"{parent}/store", keep=False)
            .workers(workers)
            for name, each in enumerate(datasets)
        ]
        for _ in range(2):
            for name, pipeline in enumerate(pipelines):
                got = list(pipeline)
                kept = Sized(name, datasets[name])
                assert all(np.array_equal(a, kept[i]) for i, a in enumerate(got))
        latest = [counted(pipeline) for pipeline in pipelines]
        check_sum(latest)
        if not any(stats.refused for stats in latest):
            assert [stats.hits for stats in latest] == [len(each) for each in datasets]


def test_worker_processes_and_a_wrapped_dataset_share_it(tmp_path: Path) -> None:
    where: dict[str, Any] = {"path": tmp_path / "store", "keep": False}
    first = stoker.from_dataset(Sized(0, [50_000] * 30), seed=0).cache(LEAST, **where)
    first = first.workers(2, kind="process")
    second = stoker.cached(Sized(1, [50_000] * 30), LEAST, **where)
    for _ in range(2):
        assert len(list(first)) == 30
        assert all(np.array_equal(second[i], Sized(1, [50_000] * 30)[i]) for i in range(30))
    check_sum([counted(first), second.cache_stats()])
    assert 0 < counted(first).hits < 30


def test_each_says_what_is_its_own(tmp_path: Path) -> None:
    where: dict[str, Any] = {"path": tmp_path / "store", "keep": False}
    first = stoker.from_dataset(Sized(0, [100] * 5), seed=0).cache("2MiB", **where).workers(0)
    second = stoker.from_dataset(Sized(1, [100] * 4), seed=0).cache("2MiB", **where).workers(0)
    list(first)
    list(second)
    assert counted(first).folder == counted(second).folder
    assert (counted(first).own_items, counted(second).own_items) == (5, 4)
    assert "of these, 4 (" in str(counted(second))
    folder = counted(first).folder
    del first
    assert os.path.isdir(folder)
    del second
    assert not os.path.exists(folder)


FILLS = """
class Sized:
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return np.full(3_000 + index % 7 * 20_000, (self.name * 31 + index) % 251, np.uint8)


pipelines = [
    stoker.from_dataset(Sized(n), seed=0).cache("2MiB", path={path!r}, version=str(n)).workers(2)
    for n in range(2)
]
streams = [iter(pipeline) for pipeline in pipelines]
for number in range({rounds}):
    for stream in streams:
        next(stream)
    if number == 30:
        say("filling")
        time.sleep({pause_s})
for stream in streams:
    stream.close()
stats = [pipeline.stats().cache for pipeline in pipelines]
own_items, own_bytes = [s.own_items for s in stats], [s.own_bytes for s in stats]
whole = stats[-1]
sums = [whole.items, whole.payload_bytes, whole.used_bytes, whole.limit_bytes]
say(json.dumps([own_items, own_bytes, *sums]))
"""


def test_a_kill_leaves_the_accounts_right(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with script(tmp_path, FILLS.format(path=path, rounds=60, pause_s=200)) as running:
        assert running.line() == "filling"
        with Watch([running.pid]) as watch:
            os.killpg(running.pid, signal.SIGKILL)
            assert watch.gone()
    ((own_items, own_bytes, items, payload, used, limit),) = run(
        tmp_path, FILLS.format(path=path, rounds=20, pause_s=0)
    )
    assert sum(own_items) == items > 0
    assert sum(own_bytes) == payload <= used <= limit == 2 << 20
