"""`stoker.cached` under torch's DataLoader: the same batches, read once, by whatever workers."""

from __future__ import annotations

import collections
import contextlib
import json
import pickle
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

import stoker
from patience import wait_until
from scripts import run, script
from strategies import frozen, shortened

# What stoker.cached returns is no Dataset of torch's to a type checker.
DataLoader: Any = torch.utils.data.DataLoader
DistributedSampler: Any = torch.utils.data.DistributedSampler
Subset: Any = torch.utils.data.Subset

LENGTH, BATCH = 48, 5


@pytest.fixture(autouse=True)
def own_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's list of caches alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Numbers(Dataset[Any]):
    """Examples that tell their number; remembers what it was asked for."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.offset = 0
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        if not -self.length <= index < self.length:
            raise IndexError(f"there is no {index}")
        x = torch.full((3, 2), index + self.offset, dtype=torch.float32)
        return {
            "x": x,
            "y": (index, np.arange(index % 2, 4 + index % 2)),
            "name": f"number {index}",
        }

    def doubled_length(self) -> int:
        return 2 * self.length


class ManyNumbers(Numbers):
    """The same, asked for many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_together: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked_together.append(list(indices))
        return [self[index] for index in indices]


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [[frozen(batch) for batch in loader] for _ in range(count)]


def settled(dataset: stoker.types.CachedDataset, items: int) -> None:
    """Wait until so many items are in the store: they are written by the by."""
    wait_until(lambda: dataset.cache_stats().items >= items, dataset.cache_stats)


def written(dataset: stoker.types.CachedDataset) -> int:
    """Wait until all that was offered is written or refused; return how many items there are."""
    wait_until(lambda: dataset.cache_stats().admitted == dataset.cache_stats().items)
    return dataset.cache_stats().items


def failed(loader: Any) -> Exception:
    """Run an epoch that fails; return the error alone, for its traceback keeps the workers."""
    try:
        collections.deque(loader, maxlen=0)
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("it did not fail")


# -- the same batches


def started(method: str, workers: int, **more: Any) -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": method, **more}


LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fork": started("fork", 2),
    "fork, persistent": started("fork", 2, persistent_workers=True),
    "spawn": started("spawn", 1),
    "spawn, persistent": started("spawn", 1, persistent_workers=True),
    "forkserver": started("forkserver", 1),
    "forkserver, persistent": started("forkserver", 2, persistent_workers=True),
}


@pytest.mark.parametrize("kind", shortened(LOADERS, 3))
def test_batches_and_draws_are_those_without_a_cache(kind: str) -> None:
    torch.manual_seed(7)
    how = LOADERS[kind]
    # How the workers are started changes nothing, but that they persist does.
    same = {**how, "multiprocessing_context": "fork"} if how else how
    expected = epochs(DataLoader(Numbers(), batch_size=BATCH, shuffle=True, **same))
    drawn = torch.get_rng_state()

    torch.manual_seed(7)
    dataset = stoker.cached(Numbers(), "2MiB")
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, **how)
    first = epochs(loader, 1)
    settled(dataset, LENGTH)
    second = epochs(loader, 1)
    assert [*first, *second] == expected
    assert torch.equal(torch.get_rng_state(), drawn)
    stats = dataset.cache_stats()
    assert (stats.hits, stats.misses) == (LENGTH, LENGTH)
    assert (stats.admitted, stats.items) == (LENGTH, LENGTH)


def test_what_does_not_fit_is_read_each_time() -> None:
    class Large(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return torch.full((60_000,), index, dtype=torch.uint8)

    dataset = stoker.cached(Large(), "1MiB")
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    stored = 0
    for _ in range(3):
        found = sorted(int(row[0]) for batch in loader for row in batch)
        assert found == list(range(40))
        if not stored:
            stored = written(dataset)
    stats = dataset.cache_stats()
    assert 5 <= stored < 20
    assert stats.items == stored
    assert stats.hits == 2 * stored
    assert stats.misses == 120 - 2 * stored
    assert stats.used_bytes <= stats.limit_bytes


@given(st.lists(st.integers(-LENGTH, LENGTH - 1), max_size=20), st.booleans())
def test_items_are_those_of_the_dataset(indices: list[int], together: bool) -> None:
    dataset, plain = stoker.cached(ManyNumbers(), "1MiB"), Numbers()
    for _ in range(2):
        expected = [frozen(plain[i]) for i in indices]
        if together:
            assert [frozen(value) for value in dataset.__getitems__(indices)] == expected
        else:
            assert [frozen(dataset[i]) for i in indices] == expected
        settled(dataset, len(set(indices)))
    assert dataset.cache_stats().hits >= len(indices)


def test_indices_of_other_types_find_the_same_items() -> None:
    dataset = stoker.cached(Numbers(), "1MiB")
    expected = frozen(dataset[3]["x"])
    settled(dataset, 1)
    for index in (3, np.int64(3), torch.tensor(3)):
        assert frozen(dataset[index]["x"]) == expected
    assert dataset.cache_stats().hits == 3


def test_what_a_caller_does_to_an_item_reaches_nobody() -> None:
    dataset = stoker.cached(Numbers(), "1MiB")
    for _ in range(3):
        item = dataset[5]
        assert (item["x"] == 5).all()
        assert item["y"][1].tolist() == [1, 2, 3, 4]
        item["x"].fill_(-1)
        item["y"][1].fill(-1)
        settled(dataset, 1)


def test_many_are_asked_for_at_once_if_the_dataset_takes_them_and_only_what_is_missing() -> None:
    inner = ManyNumbers()
    dataset = stoker.cached(inner, "1MiB")
    loader = DataLoader(dataset, batch_size=8)
    expected = epochs(DataLoader(Numbers(), batch_size=8), 1)
    assert epochs(loader, 1) == expected
    batches = [asked for asked in inner.asked_together if len(asked) > 1]
    assert batches == [list(range(start, start + 8)) for start in range(0, LENGTH, 8)]
    settled(dataset, LENGTH)
    inner.asked_together.clear()
    assert epochs(loader, 1) == expected
    assert inner.asked_together == []

    some = stoker.cached(inner, "1MiB")
    some.__getitems__([2, 4])
    settled(some, 2)
    inner.asked_together.clear()
    found = some.__getitems__([1, 2, 3, 4, 5])
    assert [item["y"][0] for item in found] == [1, 2, 3, 4, 5]
    assert inner.asked_together == [[1, 3, 5]]


# -- it stands for the dataset


def test_attributes_are_the_dataset_s() -> None:
    inner = Numbers()
    dataset = stoker.cached(inner, "1MiB")
    assert len(dataset) == LENGTH
    assert dataset.length == LENGTH
    assert dataset.doubled_length() == 2 * LENGTH
    dataset.offset = 10
    assert inner.offset == 10
    setattr(inner, "colour", "red")  # noqa: B010 - to a type checker it has none
    assert dataset.colour == "red"
    del dataset.colour
    assert not hasattr(inner, "colour")
    assert not hasattr(dataset, "colour")
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = dataset.nothing_like_it
    assert {"offset", "doubled_length", "cache_stats"} <= set(dir(dataset))
    assert repr(dataset) == f"stoker.cached({inner!r}, {1 << 20})"


def shifted(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.offset = 1000


@pytest.mark.parametrize(
    "kind", shortened(["fork", "fork, persistent", "forkserver, persistent"], 2)
)
def test_what_workers_set_reaches_the_dataset(kind: str) -> None:
    dataset = stoker.cached(Numbers(), "1MiB")
    loader = DataLoader(dataset, batch_size=BATCH, worker_init_fn=shifted, **LOADERS[kind])
    found = [float(x[0, 0]) for batch in loader for x in batch["x"]]
    assert found == [1000.0 + i for i in range(LENGTH)]
    assert dataset.offset == 0  # each worker has a dataset of its own


def test_what_is_asked_for_twice_enters_once() -> None:
    dataset = stoker.cached(Numbers(), "1MiB")
    dataset.__getitems__([3] * 10 + [4])
    settled(dataset, 2)
    assert written(dataset) == 2
    stats = dataset.cache_stats()
    assert (stats.misses, stats.admitted, stats.refused) == (11, 2, 9)


def test_a_pickled_one_has_the_same_store() -> None:
    dataset = stoker.cached(Numbers(), "1MiB")
    expected = frozen(dataset[7])
    settled(dataset, 1)
    twin = pickle.loads(pickle.dumps(dataset))
    assert frozen(twin[7]) == expected
    assert twin.asked == dataset.asked  # as pickled: by now it was not asked again
    assert twin.cache_stats().folder == dataset.cache_stats().folder
    assert dataset.cache_stats().hits == 1  # one account for all copies


def test_subsets_of_it_and_it_over_subsets() -> None:
    part = [1, 3, 5, 40]
    expected = epochs(DataLoader(Subset(Numbers(), part), batch_size=2), 1)
    dataset = stoker.cached(Numbers(), "1MiB")
    over = Subset(dataset, part)
    assert epochs(DataLoader(over, batch_size=2), 1) == expected
    settled(dataset, 4)
    assert epochs(DataLoader(over, batch_size=2), 1) == expected
    assert dataset.cache_stats().hits == 4
    under = stoker.cached(Subset(Numbers(), part), "1MiB")
    assert epochs(DataLoader(under, batch_size=2), 1) == expected
    assert len(under) == 4


class Broken(Exception):
    pass


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 12:
            raise Broken("rotten")
        return super().__getitem__(index)


def test_what_the_dataset_raises_passes_as_it_is() -> None:
    dataset = stoker.cached(Failing(), "1MiB")
    for _ in range(2):
        with pytest.raises(Broken, match=r"^rotten$") as caught:
            _ = dataset[12]
        assert caught.value.__cause__ is None
    with pytest.raises(IndexError, match=r"^there is no 48$"):
        _ = dataset[48]
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=1)
    error = failed(loader)
    assert type(error) is Broken
    assert "rotten" in str(error)
    assert len(list(stoker.cached(Numbers(), "1MiB"))) == LENGTH  # ends by IndexError, as lists do


def test_values_that_cannot_be_cached_say_what_to_do() -> None:
    import PIL.Image as image

    dataset = stoker.cached([(image.new("RGB", (2, 2)), 1)], "1MiB")
    with pytest.raises(TypeError, match=r"cannot store .* PIL\.Image\.Image \(at 0\).*an array"):
        _ = dataset[0]


# -- what cannot help


class Random(Numbers):
    """Examples that are others each time."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return self.draw()


@pytest.mark.parametrize("draw", [lambda: torch.rand(3), lambda: np.random.rand(3), random.random])
def test_a_random_dataset_is_refused(draw: Any) -> None:
    dataset = stoker.cached(Random(draw), "1MiB")
    says = "item 0 of Random is different each time it is read.* Cache the examples before"
    for _ in range(2):  # not only at the first try
        with pytest.raises(ValueError, match=says):
            next(iter(DataLoader(dataset, batch_size=BATCH)))
    assert dataset.cache_stats().items == 0


class Flipped(Numbers):
    """Examples of which every other one is turned around, by chance."""

    def __getitem__(self, index: int) -> Any:
        x = np.arange(4) + index
        return x[::-1].copy() if np.random.rand() < 0.5 else x


@pytest.mark.parametrize("seed", range(4))
def test_what_is_another_one_every_other_time_is_refused(seed: int) -> None:
    np.random.seed(seed)
    with pytest.raises(ValueError, match="is different each time it is read"):
        _ = stoker.cached(Flipped(), "1MiB")[0]


class Rarely(Numbers):
    """Examples that are others once in a while, by chance."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self.library = library

    def __getitem__(self, index: int) -> Any:
        drawn = {
            "random": random.random,
            "numpy.random": np.random.rand,
            "torch": lambda: float(torch.rand(())),
        }[self.library]()
        return -1 if drawn < 1e-9 else super().__getitem__(index)


@pytest.mark.parametrize("library", ["random", "numpy.random", "torch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_rare_randomness_is_told_by_the_generators(library: str, workers: int) -> None:
    dataset = stoker.cached(Rarely(library), "1MiB")
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers)
    error = failed(loader)
    assert type(error) is ValueError
    assert re.search(f"draws random numbers from {library}.*random part", str(error))
    assert dataset.cache_stats().items == 0
    with pytest.raises(ValueError, match=f"draws random numbers from {library}"):
        _ = dataset[0]


def test_rare_randomness_of_a_map_is_told_too() -> None:
    rows = stoker.from_dataset(Rarely("random"), seed=0).cache("1MiB").workers(0)
    with pytest.raises(stoker.StageError, match="draws random numbers from random"):
        list(rows)


class Drawing(Numbers):
    """Draws in every other reading, for nothing: what draws in each is refused."""

    readings = 0

    def __getitem__(self, index: int) -> Any:
        self.readings += 1
        if self.readings % 2 == 0:
            random.random()
            np.random.rand(2)
            torch.rand(2)
        return super().__getitem__(index)


def draws() -> list[Any]:
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def test_the_check_for_it_changes_nobody_s_draws() -> None:
    found = []
    for cache in (False, True):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        inner = Drawing()
        dataset = stoker.cached(inner, "1MiB") if cache else inner
        batches = epochs(DataLoader(dataset, batch_size=BATCH, shuffle=True), 1)
        found.append((batches, draws()))
        assert len(set(inner.asked)) == LENGTH
        assert (len(inner.asked) > LENGTH) is cache  # one was read again
    assert found[0] == found[1]


def test_read_by_another_thread_no_draws_are_set_back() -> None:
    """Training would draw the same again."""
    random.seed(1)
    dataset = stoker.cached(Drawing(), "1MiB")
    reading = threading.Thread(target=lambda: dataset[0])
    reading.start()
    reading.join()
    after = random.random()
    random.seed(1)
    assert after == [random.random() for _ in range(5)][-1]  # nine readings came before


class Interrupted(Numbers):
    """Is interrupted by a signal while the first item is read again."""

    def __getitem__(self, index: int) -> Any:
        if self.asked:
            signal.raise_signal(signal.SIGUSR1)
        return super().__getitem__(index)


def test_what_a_signal_handler_raises_while_an_item_is_read_again_passes() -> None:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("time is over")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        dataset = stoker.cached(Interrupted(), "1MiB")
        with pytest.raises(TimeoutError, match="time is over"):
            _ = dataset[0]
        assert dataset.cache_stats().items == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


class Logged(Numbers):
    """Items of unlike worth, one in four too large; a file has a line for each reading."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return np.full(50_000 if index % 4 == 0 else 100, index)


def test_workers_of_later_epochs_do_not_check_again(tmp_path: Path) -> None:
    """Not even where much is never admitted, so that every worker has something to offer."""
    dataset = stoker.cached(Logged(tmp_path / "log"), "1MiB")
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, collate_fn=len, **forked)
    extra = []
    for _ in range(3):
        collections.deque(loader, maxlen=0)
        read = len((tmp_path / "log").read_text().splitlines())
        extra.append(read - dataset.cache_stats().misses)
    assert extra[0] in (8, 16)  # two workers may begin at the same time
    assert extra == [extra[0]] * 3
    assert dataset.cache_stats().hits < 2 * LENGTH  # and there was something to offer


class Stamped(Numbers):
    """Items say when they were read."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), time.perf_counter_ns()


def test_the_refusal_names_the_ways_around_it() -> None:
    says = r"(?s)random part: .*a time stamp.*leave that field out, round it, or put"
    with pytest.raises(ValueError, match=says):
        _ = stoker.cached(Stamped(), "1MiB")[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class MeasuredStream(Stream):
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("kind", [Stream, MeasuredStream])
def test_streams_are_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)stoker\.cached needs .*A stream is read once"):
        stoker.cached(kind(), "1MiB")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="needs version="):
        stoker.cached(Numbers(), "1MiB", keep=True)
    with pytest.raises(TypeError, match="version= is a text"):
        stoker.cached(Numbers(), "1MiB", version=2)  # type: ignore[arg-type]


def test_several_hosts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(stoker.CacheWarning, match="this job has 2 hosts.*DistributedSampler"):
        stoker.cached(Numbers(), "1MiB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    stoker.cached(Numbers(), "1MiB")


# -- between processes


USER = """
    class Squares:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return np.full(4, index ** 2)

    dataset = stoker.cached(Squares(), "1MiB"{more})
    assert [int(dataset[i][0]) for i in range(10)] == [i ** 2 for i in range(10)]
    while dataset.cache_stats().items < 10:
        time.sleep(0.01)
    stats = dataset.cache_stats()
    say(json.dumps([stats.hits, stats.misses, stats.folder]))
    {end}
"""


@contextlib.contextmanager
def user(folder: Path, more: str) -> Iterator[list[Any]]:
    """A process that has used a dataset, and holds it until it is let go."""
    folder.mkdir()
    with script(folder, USER.format(more=more, end="sys.stdin.close(); time.sleep(100)")) as held:
        yield json.loads(held.line())


@pytest.mark.parametrize(
    ("more", "ranks", "shared"),
    [(', version="a"', 1, True), ("", 1, False), (', version="a"', 2, True), ("", 2, False)],
)
def test_processes_share_with_one_version_alone(
    more: str, ranks: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one launch, too: each may cache another part of the data under one description."""
    if ranks > 1:
        monkeypatch.setenv("WORLD_SIZE", f"{ranks}")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", f"{ranks}")
    with user(tmp_path / "first", more) as first:
        (tmp_path / "second").mkdir()
        (second,) = run(tmp_path / "second", USER.format(more=more, end=""))
    assert first[:2] == [0, 10]
    assert second[:2] == ([10, 0] if shared else [0, 10])
    assert (first[2] == second[2]) is shared


def test_what_is_kept_is_there_in_the_next_process(tmp_path: Path) -> None:
    more = f', path={str(tmp_path / "store")!r}, version="a"'
    found = [run(tmp_path, USER.format(more=more, end=""))[0][:2] for _ in range(2)]
    assert found == [[0, 10], [10, 0]]


def test_two_datasets_of_one_process_are_not_confused() -> None:
    one, other = stoker.cached(Numbers(), "1MiB"), stoker.cached(Numbers(), "1MiB")
    other.offset = 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert float(one[1]["x"][0, 0]) == 1
            assert float(other[1]["x"][0, 0]) == 101
            settled(one, 1)
            settled(other, 1)
    assert one.cache_stats().folder != other.cache_stats().folder
