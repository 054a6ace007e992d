"""The probe's drains, in this process: loaders of every shape are read, and read again."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import data

from stoker.analysis.probe import drain_session, replay
from stoker.analysis.probe.example import PickledExamples, write_example
from strategies import one_in

LENGTH, BATCH = 64, 8
READS = torch.zeros((), dtype=torch.int64).share_memory_()  # of all examples, by workers too


class Numbers(data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        READS.add_(1)
        return torch.full((4,), float(index))


class Stream(data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return (torch.full((4,), float(number)) for number in range(LENGTH))


class InWorkers(Numbers):
    """Can be read in a worker alone, as a handle that forks share may be."""

    def __getitem__(self, index: int) -> Any:
        assert data.get_worker_info() is not None
        return torch.ones(4)


class SlowToStart(Numbers):
    """Takes longer to its first example than a drain may take."""

    started = False

    def __getitem__(self, index: int) -> Any:
        if not self.started:
            self.started = True
            time.sleep(0.3)
        return torch.ones(4)


def stateful(**options: Any) -> Any:
    import torchdata.stateful_dataloader as module

    return module.StatefulDataLoader(Numbers(), BATCH, **options)


SHAPES = {
    "map": lambda **options: data.DataLoader(Numbers(), BATCH, shuffle=True, **options),
    "iterable": lambda **options: data.DataLoader(Stream(), BATCH, **options),
    "no automatic batches": lambda **options: data.DataLoader(
        Numbers(), batch_size=None, **options
    ),
    "batch sampler": lambda **options: data.DataLoader(
        Numbers(),
        batch_sampler=data.BatchSampler(data.SequentialSampler(Numbers()), BATCH, True),
        **options,
    ),
    "stateful": stateful,
}


def drains_of(loader: Any, rest: Any = None) -> drain_session.LoaderDrains:
    process = SimpleNamespace(torch=torch, pid=7)
    return drain_session.LoaderDrains(replay.take_parts(loader), process, rest)


def drain(drains: drain_session.LoaderDrains, tag: Path, **said: Any) -> int:
    """Drain; return how many batches came, one behind the other."""
    answer = drains.drain({"tag": str(tag), "once": False, "kept": False, **said})
    assert answer["error"] is None
    assert sorted(answer["arrivals_ns"]) == answer["arrivals_ns"]
    return len(answer["arrivals_ns"])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize("workers", one_in(2, [0, 1]))
@pytest.mark.parametrize("shape", one_in(2, SHAPES))
def test_what_the_first_drain_read_is_read_again(shape: str, workers: int, tmp_path: Path) -> None:
    drains = drains_of(SHAPES[shape](num_workers=workers))
    described = drains.describe(None)
    assert described["iterable"] == (shape == "iterable")
    assert described["automatic"] == (shape != "no automatic batches")

    usual = {"workers": workers, "seconds": 0.0, "longest": 60.0, "skip": 0}
    again = {**usual, "fresh": False, "least": 12, "samples": True}
    first = {**usual, "fresh": True, "least": 5, "samples": False}
    assert drain(drains, tmp_path / "first", **first) == 5
    # Round and round; a stream is read as far as before.
    least = 5 if shape == "iterable" else 12
    assert drain(drains, tmp_path / "again", **again) >= least
    assert drain(drains, tmp_path / "once", **again, once=True) == 5
    batches = drains.iterate(workers)
    seen = [next(batches) for _ in range(12)]
    drain_session._stop(batches)
    size = 1 if shape == "no automatic batches" else BATCH
    assert all(batch.numel() == 4 * size for batch in seen)
    if shape == "iterable":  # whose worker goes on to its end
        return
    for one, other in zip(seen[:5], seen[5:10], strict=True):
        assert torch.equal(one, other)

    drains.look_at_example()
    assert drains.keep_examples({"batches": 3, "seconds": 60.0}) == {"batches": 3}
    reads = int(READS)
    shares = [["kept", count, 4] for count in (workers, 1 - workers)]
    batches = drains.alternate(None, {"shares": shares, "again": False})
    for at in (0, 1, 2, 0, 0, 1, 2, 0, 1, 2, 0, 1, 1, 2, 0, 1):  # two turns of both
        assert torch.equal(next(batches), seen[at])
    assert int(READS) == reads  # none was read again


def test_an_example_in_memory_is_made_anew_each_time() -> None:
    example: dict[str, Any] = {
        "x": torch.ones(3),
        "y": torch.ones(2, dtype=torch.bfloat16),
        "name": "a",
        "n": 7,
    }
    dataset = PickledExamples(SimpleNamespace(epoch=3), {7: write_example(example)})
    again = pickle.loads(pickle.dumps(dataset))
    for read in (dataset, again):
        one, other = read[torch.tensor(7)], read[7]
        one["x"] += 1
        assert torch.equal(other["x"], example["x"])
        assert torch.equal(other["y"], example["y"])
        assert (other["name"], other["n"]) == ("a", 7)
        assert read.epoch == 3
    assert not hasattr(dataset, "__getitems__")


@pytest.mark.parametrize("again", [True, False])
def test_own_batches_and_prepared_ones_come_by_turns(again: bool) -> None:
    """Own batches go on where the script stands; they end with its epoch, or begin a new one."""
    loader = data.DataLoader(Numbers(), BATCH)
    rest = iter(data.BatchSampler(data.SequentialSampler(Numbers()), BATCH, False))
    next(rest)
    drains = drains_of(loader, rest)
    bank = replay.Bank([torch.full((BATCH, 4), -1.0)])
    command = {"shares": [["own", 0, 3], ["replayed", 0, 2]], "again": again}
    batches = drains.alternate(bank, command)
    seen = [float(batch[0, 0]) for _, batch in zip(range(14), batches, strict=False)]
    first = [8.0, 16.0, 24.0, -1.0, -1.0, 32.0, 40.0, 48.0, -1.0, -1.0, 56.0]
    assert seen == first + [0.0, 8.0, -1.0] * again
    with pytest.raises(LookupError, match="no batches were prepared"):
        next(drains.alternate(None, command))


def test_an_example_is_looked_at_where_the_script_reads_it() -> None:
    assert drains_of(data.DataLoader(InWorkers(), 4)).look_at_example() == {}
    inside = drains_of(data.DataLoader(InWorkers(), 4, num_workers=1)).look_at_example()
    assert inside["example_bytes"] == 16


def test_a_slow_start_takes_nothing_from_a_drain(tmp_path: Path) -> None:
    drains = drains_of(data.DataLoader(SlowToStart(), 4))
    drains._indices = [[0], [1]]
    said = {"workers": 0, "seconds": 0.1, "longest": 0.2, "least": 12, "samples": False}
    assert drain(drains, tmp_path / "drain", fresh=False, **said) >= 2
