"""Examples that `stoker run` keeps: those of the script, bit for bit, and of no other dataset."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import one_in

torch = pytest.importorskip("torch")
from torch.utils.data import Dataset, Subset, dataloader  # noqa: E402

from running.test_changed_loader import choice_of, play  # noqa: E402
from stoker.running.batches import ChangedLoader  # noqa: E402
from stoker.running.examples.kept_examples import KeptExamples, identify_examples  # noqa: E402
from stoker.running.loaders import LoaderChoice, LoaderSettings  # noqa: E402

DataLoader: Any = torch.utils.data.DataLoader
SCALE = 1


class Options:
    def __init__(self, size: int) -> None:
        self.size = size


class Slow(Dataset[Any]):
    """Rows that take longer to make than to find."""

    def __init__(self, length: int = 22) -> None:
        self.length, self.size = length, Options(3)
        self.table = torch.zeros(4)
        self.root = ""
        self.add: Callable[[int], int] = lambda index: index + 1
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.length = epoch

    def __getitem__(self, index: int) -> Any:
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
        return {"x": torch.full((self.size.size,), float(self.add(index) * SCALE)), "y": index}


class Augmented(Slow):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)["x"] + random.random(), "y": index}


def stack(examples: list[Any]) -> Any:
    return torch.stack([torch.cat([each["x"], torch.tensor([each["y"]])]) for each in examples])


def noisy(examples: list[Any]) -> Any:
    return stack(examples) + torch.rand(1)


@pytest.mark.parametrize(
    ("own", "new"),
    [
        (0, 0),
        (0, 2),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(2, 3, marks=pytest.mark.full),
    ],
)
def test_batches_from_the_cache_are_the_scripts_own(own: int, new: int) -> None:
    def make() -> Any:
        return DataLoader(Slow(), 4, shuffle=True, num_workers=own, collate_fn=stack)

    breaks, said = (99, 5, 99), list[str]()
    expected = play(make(), None, breaks, False)
    loader = make()
    before = LoaderSettings(own, loader.prefetch_factor, False)
    after = LoaderSettings(new, 2 if new else None, new > 0, cache_bytes=4 << 20)
    choice = LoaderChoice(before, after, identity=identify_examples(loader.dataset))
    changed = ChangedLoader(dataloader, torch, choice, said.append, compares=True)
    assert play(loader, changed, breaks, False) == expected
    assert len(said) == 2, said
    assert all("compared with the script's own, bit for bit: the same" in text for text in said)
    assert changed._examples is not None
    stats = changed._examples.cache_stats()
    assert stats.items == 22
    assert stats.hits > 22


def test_a_dataset_that_changes_between_epochs_is_read_again() -> None:
    loader, said = DataLoader(Slow(8), 4, collate_fn=stack), list[str]()
    settings = LoaderSettings(0, None, False, cache_bytes=4 << 20)
    choice = LoaderChoice(LoaderSettings(0, None, False), settings, identity="one that changes")
    changed = ChangedLoader(dataloader, torch, choice, said.append)
    first = list(changed.iterate(loader))
    loader.dataset.add = lambda index: 0
    second = list(changed.iterate(loader))
    assert first[0][1, 0] == 2
    assert second[0][1, 0] == 0
    assert said == ["its dataset has changed: its examples are read in each epoch from here on"]


@pytest.mark.parametrize("persistent", one_in(2, [False, True]))
def test_a_random_collation_in_workers_keeps_their_seeds(persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}

    def make() -> Any:
        return DataLoader(Slow(), 4, shuffle=True, collate_fn=noisy, **options)

    breaks = (99, 5, 99)
    expected = play(make(), None, breaks, False)
    loader = make()
    found = choice_of(loader, cache=True)
    assert found.new.cache_bytes
    assert (found.new.workers, found.same, found.twice) == (2, True, False)
    changed = ChangedLoader(dataloader, torch, found, pytest.fail, compares=True)
    assert play(loader, changed, breaks, False) == expected


class Counted(Slow):
    def __getitem__(self, index: int) -> Any:
        self.add(index)
        return {"x": self.table[:3] + index, "y": index}


def test_loaders_that_are_built_anew_find_the_examples_again_and_those_of_no_other_data() -> None:
    reads, stores = list[int](), dict[str, KeptExamples]()
    settings = LoaderSettings(0, None, False, cache_bytes=32 << 20)
    choice = LoaderChoice(LoaderSettings(0, None, False), settings, identity="built anew")

    def play_epoch(fill: float) -> float:
        dataset = Counted()
        dataset.add = reads.append  # type: ignore[assignment]
        dataset.table = torch.full((1 << 19,), fill)
        loader = DataLoader(dataset, 4, shuffle=True, collate_fn=stack)
        changed = ChangedLoader(dataloader, torch, choice, pytest.fail, stores=stores)
        for batches in changed.iterate(loader):
            value = float(batches[0, 0] - batches[0, 3])
        for examples in stores.values():
            examples._cache.flush()
        return value

    assert [play_epoch(0.0) for _ in range(3)] == [0.0] * 3
    assert sorted(reads) == [*range(22)]
    # Of the same class, and as large, but other numbers.
    assert [play_epoch(float(number)) for number in range(1, 9)] == [*range(1, 9)]
    assert sorted(reads) == sorted([*range(22)] * 9)
    assert len(stores) < 8, "stores of data that has changed do not add up"


def test_training_and_validation_are_looked_at_apart() -> None:
    train = choice_of(DataLoader(Augmented(), 4, collate_fn=stack), cache=True, exact=True)
    assert not train.is_changed
    assert "not cached: its examples are random" in train.why
    alone: dict[str, Any] = {"cache": True, "workers": None}
    refused = choice_of(DataLoader(Augmented(), 4, collate_fn=stack), **alone)
    assert refused.why == "not cached: its examples are random", "no workers were asked for"
    validation = choice_of(DataLoader(Slow(), 4, collate_fn=stack), cache=True)
    assert validation.new.cache_bytes >= 1 << 20
    assert validation.new.workers == 0, "kept examples need no more workers"
    # What is random in the collation stays so, in the script's own process.
    mixed = choice_of(DataLoader(Slow(), 4, collate_fn=noisy), cache=True, exact=True)
    assert mixed.new == LoaderSettings(0, None, False, mixed.new.cache_bytes)
    assert mixed.new.cache_bytes
    assert not mixed.twice
    assert not choice_of(DataLoader(Slow(), 4, collate_fn=stack)).new.cache_bytes


def test_examples_are_not_kept_where_that_brings_nothing() -> None:
    plan: dict[str, Any] = {"cache": True, "workers": None}
    loader = DataLoader(Slow(), 4, collate_fn=stack)
    left = choice_of(loader, kept_gain=1.004, **plan)
    assert not left.is_changed
    assert left.why == "not cached: 1.00 times as fast with a cache, by the report"
    assert choice_of(loader, kept_gain=1.1, **plan).new.cache_bytes
    assert choice_of(loader, kept_gain=1.004, **{**plan, "loader": "train.py:1"}).new.cache_bytes


def test_what_is_not_kept_and_why() -> None:
    plain = choice_of(DataLoader([torch.zeros(3)] * 8, 4), cache=True)
    assert "not cached: its examples are read as fast as" in plain.why
    odd = choice_of(DataLoader([object()] * 8, 4, collate_fn=len), cache=True)
    assert "not cached: its examples (object) cannot be kept" in odd.why


def test_a_script_that_spawns_gets_a_cache_and_no_workers() -> None:
    loader = DataLoader(Slow(8), 4)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        found = choice_of(loader, cache=True)
        assert (found.new.workers, found.new.cache_bytes > 0) == (0, True)
        changed = ChangedLoader(dataloader, torch, found, print, compares=True)
        expected = [batch["x"].tolist() for batch in loader]
        for _ in range(2):
            assert [batch["x"].tolist() for batch in changed.iterate(loader)] == expected
        assert not choice_of(loader).is_changed
    finally:
        multiprocessing.set_start_method(before, force=True)


class Turned(Slow):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return torch.arange(6.0).reshape(2, 3).T + index


@pytest.mark.parametrize("batch_size", [4, None])
def test_strides_that_batches_do_not_show(batch_size: int | None) -> None:
    found = choice_of(DataLoader(Turned(), batch_size), cache=True)
    assert bool(found.new.cache_bytes) == (batch_size is not None), found.why
    assert ("strides" in found.why) == (batch_size is None)


def test_what_is_kept_answers_as_the_dataset_does() -> None:
    own = Slow()
    kept: Any = KeptExamples(own, 4 << 20, identify_examples(own))
    assert isinstance(kept, Slow)
    assert len(kept) == 22
    assert kept.size is own.size
    kept.reads = 5
    assert own.reads == 5
    indices: list[Any] = [3, np.int64(3), torch.tensor(3)]
    for index in indices:
        assert kept[index]["y"] == 3
    part: Any = Subset(kept, [7])
    assert part[0]["y"] == 7
    own.add = abs  # a function without a name cannot be pickled
    other = pickle.loads(pickle.dumps(kept))
    assert isinstance(other, Slow)
    assert other[4]["y"] == 4
    other.set_epoch(9)
    assert len(other) == 9
    assert own.length == 22


# Identities


def test_the_same_data_has_one_identity() -> None:
    assert identify_examples(Slow()) == identify_examples(Slow())
    halves = torch.utils.data.random_split(Slow(), [11, 11])
    assert identify_examples(halves[0]) == identify_examples(copy.copy(halves[0]))
    assert identify_examples(halves[0]) != identify_examples(halves[1])


def _closing(value: int) -> Any:
    return lambda index: index + value


CHANGES: dict[str, Callable[[Any], None]] = {
    "length": lambda data: data.set_epoch(9),
    "one value of a tensor": lambda data: data.table.__setitem__(2, 1.0),
    "an object's state": lambda data: setattr(data.size, "size", 4),
    "a function's code": lambda data: setattr(data, "add", lambda index: index + 2),
    "a closure": lambda data: setattr(data, "add", _closing(1)),
    "another closure": lambda data: setattr(data, "add", _closing(2)),
    "an array's layout": lambda data: setattr(data, "table", np.zeros(4)),
}


def test_what_makes_other_examples_makes_another_identity() -> None:
    found = [identify_examples(Slow())]
    for change in CHANGES.values():
        data = Slow()
        change(data)
        found.append(identify_examples(data))
    assert len({*found}) == len(found)
    assert not any(name.startswith("own") for name in found)


def test_what_cannot_be_known_is_this_processs_own() -> None:
    data: Any = Slow()
    data.root = sys.stdout
    assert identify_examples(data).startswith("own ")
    assert identify_examples(data) != identify_examples(data)


SHARED = """
import sys
import torch
from stoker.running.examples.kept_examples import KeptExamples, identify_examples

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3,), float(index))

data = Rows()
kept = KeptExamples(data, 4 << 20, identify_examples(data))
for index in range(40):
    kept[index]
kept._cache.flush()
print(kept.cache_stats().misses, kept._cache.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_the_processes_of_a_run_read_each_example_once(tmp_path: Path) -> None:
    script = tmp_path / "rows.py"
    script.write_text(SHARED)
    processes, found = [], []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        processes.append(process)
        found.append(process.stdout.readline().split())
    folder = found[0][1]
    assert os.path.isdir(folder)
    for process in processes:
        process.communicate(timeout=60)
    assert [int(misses) for misses, _ in found] == [40, 0]
    assert folder == found[1][1]
    assert not os.path.exists(folder)
