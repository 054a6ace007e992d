"""A cache over nodes, together with everything else: it changes nothing of what comes out."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import EXAMPLES, NO_STORE, TOKEN, Numbered, counted, epoch_of, over, servers

import stoker
from patience import wait_until
from scripts import reserved_port
from stoker.cache.counters import ITEMS
from stoker.cluster.cache_connection import CacheConnection
from stoker.cluster.cache_server import CacheServer
from strategies import FULL, frozen, one_in, stream

pytestmark = pytest.mark.filterwarnings(f"ignore:{NO_STORE}:stoker.CacheWarning")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[CacheServer]]:
    with servers(tmp_path) as made:
        yield made


def shuffled() -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Numbered(), seed=3).shuffle()


def halved(x: Any) -> Any:
    return x / 2


def jittered(x: Any, rng: np.random.Generator) -> Any:
    return x + rng.random()


def not_eleven(x: Any) -> Any:
    if x[0] == 11:
        raise ValueError("eleven")
    return x


CHAINS: dict[str, Callable[[stoker.Pipeline[Any]], stoker.Pipeline[Any]]] = {
    "inline": lambda p: p.batch(7).workers(0),
    "threads": lambda p: p.batch(7).workers(3, kind="thread"),
    "processes": lambda p: p.map(halved, on="x").batch(7).workers(2, kind="process"),
    "echo": lambda p: p.echo(2).random_map(jittered, on="x").batch(6).workers(2, kind="thread"),
    "examples": lambda p: p.random_map(jittered, on="x").workers(0),
}


@pytest.mark.parametrize("chain", one_in(3, CHAINS))
def test_the_stream_is_the_same_with_and_without(three: list[CacheServer], chain: str) -> None:
    made = CHAINS[chain](over(shuffled(), three))
    plain = CHAINS[chain](shuffled())
    for epoch in range(2):
        assert stream(made) == stream(plain)
        if epoch:
            assert counted(made).misses == 0
            assert 0 < counted(made).peer_hits < counted(made).hits
    assert "over several nodes" in str(made)


@pytest.mark.full
def test_skipped_examples_are_skipped_everywhere(three: list[CacheServer]) -> None:
    def chain(cached: bool) -> stoker.Pipeline[Any]:
        source = stoker.from_dataset(Numbered(), seed=0, max_errors=5).shuffle()
        source = source.map(not_eleven, on="x")
        return (over(source, three) if cached else source).batch(7)

    made, plain = chain(True), chain(False)
    for _ in range(2):
        assert stream(made) == stream(plain)
        assert made.stats().skipped_examples == 1


def test_a_run_is_resumed_in_mid_epoch(three: list[CacheServer]) -> None:
    def make() -> stoker.Pipeline[Any]:
        return over(shuffled(), three).echo(2).batch(6)

    stoker.testing.check_resume(make)


def test_a_copy_from_before_the_first_epoch_joins_by_itself(three: list[CacheServer]) -> None:
    made = over(shuffled(), three).batch(7)
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert stream(copied) == stream(shuffled().batch(7))
        assert counted(copied).misses + counted(copied).hits == EXAMPLES


def test_the_store_of_a_server_is_kept_or_not_by_its_server(three: list[CacheServer]) -> None:
    """Whatever a job's path= says, which chooses the server."""
    about = Path(three[0].folder) / "about.json"
    before = about.read_bytes()
    assert stream(over(shuffled(), three, keep=True).batch(7))
    assert about.read_bytes() == before


def test_a_wrapped_dataset_in_worker_processes(three: list[CacheServer]) -> None:
    import torch

    hosts = [server.address for server in three]
    path = three[1].folder
    dataset: Any = stoker.cached(Numbered(), "8MiB", cluster=hosts, version="1", path=path)
    for epoch in range(2):
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=7, num_workers=2 * epoch)
        ids = [int(each) for batch in loader for each in batch["id"]]
        assert ids == list(range(EXAMPLES))
        dataset._cache.flush()
    cache = dataset.cache_stats()
    assert (cache.misses, cache.hits) == (EXAMPLES, EXAMPLES)
    assert "nodes answer" in str(cache)


def test_on_another_host_the_store_of_the_first_is_one_of_the_others(
    three: list[CacheServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [server.address for server in three]
    dataset = stoker.cached(Numbered(), "8MiB", cluster=hosts, version="1", path=three[0].folder)
    for index in range(EXAMPLES):
        dataset[index]
    assert dataset._cache.flush()
    sent = pickle.dumps(dataset)
    monkeypatch.setattr("stoker.cluster.membership.boot_id", lambda: "another host's")
    elsewhere = pickle.loads(sent)
    assert [elsewhere[index]["id"] for index in range(EXAMPLES)] == list(range(EXAMPLES))
    cache = elsewhere.cache_stats()
    assert cache.peer_hits == EXAMPLES
    assert cache.folder not in [server.folder for server in three]


def test_a_server_that_comes_after_the_job_on_its_host_is_brought_its_part(tmp_path: Path) -> None:
    with servers(tmp_path, 1) as (first,), reserved_port() as port:
        late = f"127.0.0.1:{port}"
        folder = str(tmp_path / "late")
        hosts = [first.address, late]
        dataset = stoker.cached(Numbered(), "8MiB", cluster=hosts, version="1", path=folder)
        with contextlib.closing(CacheServer(late, TOKEN, limit=8 << 20, folder=folder)) as added:
            wait_until(lambda: dataset.cache_stats().members == 2)
            for _ in range(2):
                for index in range(EXAMPLES):
                    dataset[index]
                assert dataset._cache.flush()
            assert 0 < added._store.counters.head[ITEMS] < EXAMPLES
            assert dataset.cache_stats().misses == EXAMPLES


def test_a_child_that_is_forked_while_a_thread_reaches_the_others_is_not_held_up(
    three: list[CacheServer],
) -> None:
    train = over(shuffled(), three).batch(7)
    expected = stream(train)
    cache = next(iter(s.cache for s in train.chain.stages if hasattr(s, "cache")))
    with cache._client_lock:  # as in a thread that connects just now
        child = os.fork()
        if not child:
            signal.alarm(150)
            os._exit(0 if len(stream(train)) == len(expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_when_not_all_fits_the_rest_is_read_and_nothing_is_brought_in_vain(tmp_path: Path) -> None:
    with servers(tmp_path, 2, size="1MiB") as two:
        source = stoker.from_dataset(Numbered(floats=8_000), seed=0).shuffle()
        train = over(source, two).batch(5)
        *_, before, last = (epoch_of(train) for _ in range(4))
        assert before.hits == last.hits
        assert last.admitted == 0
        assert last.misses == EXAMPLES - last.hits
        assert last.hits >= 2 * (1 << 20) * 0.75 / 64_000


def test_a_host_without_a_server_keeps_nothing(three: list[CacheServer]) -> None:
    train = over(shuffled(), three, None).batch(7)
    epoch_of(train)
    cache = epoch_of(train)
    assert (cache.peer_hits, cache.items, cache.misses) == (EXAMPLES, 0, 0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("toggle"), st.integers(0, 3)),
        st.tuples(st.just("epoch"), st.integers(0, 2)),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=200 if FULL else 6)
@given(steps=STEPS)
def test_any_order_of_joins_and_losses(
    steps: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cluster")
    made: dict[int, CacheServer] = {}
    addresses: list[str] = []
    try:
        for number in range(4):
            made[number] = CacheServer(
                "127.0.0.1:0", TOKEN, limit=8 << 20, folder=f"{folder}/{number}"
            )
            addresses.append(made[number].address)
        homes = [f"{folder}/0", f"{folder}/1", "/nowhere"]
        trains = [
            shuffled().cache("8MiB", cluster=addresses, version="1", path=home).batch(7)
            for home in homes
        ]
        plain = shuffled().batch(7)
        epochs: list[Any] = []
        for kind, number in [*steps, ("epoch", 0), ("epoch", 2)]:
            if kind == "epoch":
                train = trains[number]
                while len(epochs) <= train.epoch:
                    epochs.append(frozen(stream(plain)))
                expected = epochs[train.epoch]
                if made or train.epoch:
                    assert frozen(stream(train)) == expected
                else:
                    with pytest.raises(stoker.CacheError, match="no cache server answers"):
                        iter(train)
            elif number in made:
                made.pop(number).close()
                if number > 1:  # the others are also used by the jobs beside them
                    shutil.rmtree(f"{folder}/{number}")
            else:
                made[number] = CacheServer(
                    addresses[number], TOKEN, limit=8 << 20, folder=f"{folder}/{number}"
                )
    finally:
        for server in made.values():
            server.close()


def test_what_comes_too_late_is_read_from_storage_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers(tmp_path, 2) as made:
        train = over(shuffled(), made, None).batch(7)
        expected = stream(train)
        monkeypatch.setattr("stoker.cluster.remote_node.PATIENCE_S", 0.01)
        is_read = threading.Event()

        def get(_: CacheConnection, keys: list[bytes]) -> list[None]:
            is_read.wait(60)
            return [None] * len(keys)

        monkeypatch.setattr(CacheConnection, "get", get)
        late = over(shuffled(), made, None).batch(7)
        assert stream(late) == expected
        is_read.set()
        cache = counted(late)
        assert (cache.hits, cache.misses, cache.peer_timeouts) == (0, EXAMPLES, EXAMPLES)
        assert "60 timed out after 5 s" in str(cache)
