"""Loaders that people keep: torch's, with all they can be told; functions; what starts over."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stoker
from strategies import one_in, shortened

LENGTH, BATCH = 48, 4


class Numbers(Dataset[Any]):
    """Examples that are their own numbers."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return torch.full((3,), index, dtype=torch.int64), index


class Stream(IterableDataset[Any]):
    """The same, in order, a part for each worker."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, LENGTH, step):
            yield torch.full((3,), index, dtype=torch.int64), index


def listed(examples: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([x for x, _ in examples]), "y": [y for _, y in examples]}


def seen(pipeline: stoker.Pipeline) -> list[int]:
    """Run an epoch; return the examples of its batches."""
    found: list[int] = []
    for batch in pipeline:
        numbers = batch["y"] if isinstance(batch, dict) else batch[1]
        found += [int(n) for n in numbers]
        time.sleep(0.002)
    return found


LOADERS: dict[str, Callable[[], Any]] = {
    "no workers": lambda: DataLoader(Numbers(), batch_size=BATCH, shuffle=True),
    "forked": lambda: DataLoader(Numbers(), batch_size=BATCH, num_workers=2),
    "persistent": lambda: DataLoader(
        Numbers(), batch_size=BATCH, num_workers=2, persistent_workers=True, shuffle=True
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2),
    "collated": lambda: DataLoader(Numbers(), batch_size=BATCH, collate_fn=listed),
    "spawned": lambda: DataLoader(
        Numbers(), batch_size=BATCH, num_workers=1, multiprocessing_context="spawn"
    ),
    "by a server": lambda: DataLoader(
        Numbers(), batch_size=BATCH, num_workers=1, multiprocessing_context="forkserver"
    ),
}


@pytest.mark.parametrize("kind", shortened(LOADERS, 5))
def test_every_batch_of_a_dataloader_is_used_each_epoch(kind: str) -> None:
    pipeline = stoker.echo(LOADERS[kind](), seed=0)
    for _ in range(2):
        found = seen(pipeline)
        assert set(found) == set(range(LENGTH))
        assert max(map(found.count, set(found))) <= 4
    assert pipeline.epoch == 2
    assert pipeline.counts.fresh_examples == 2 * LENGTH


def test_the_loader_s_own_draws_stay_as_they_were() -> None:
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=1)
    torch.manual_seed(5)
    alone = [int(n) for _, y in loader for n in y]
    torch.manual_seed(5)
    echoed = seen(stoker.echo(loader, seed=0))
    assert list(dict.fromkeys(echoed)) == alone


class Told:
    """A loader that is told its epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([np.full(2, self.epoch)])


def test_a_loader_is_told_its_epoch() -> None:
    loader = Told()
    pipeline = stoker.echo(loader)
    pipeline.set_epoch(7)
    assert [int(batch[0]) for batch in pipeline] == [7]


def test_a_transform_is_applied_anew_to_every_use() -> None:
    def marked(batch: Any, rng: np.random.Generator) -> Any:
        batch[0][:] = -1  # in place: reaches no other use
        return int(batch[1][0]), float(rng.random())

    loader = DataLoader(Numbers(), batch_size=BATCH)
    found = list(stoker.echo(loader, 3, transform=marked, seed=0))
    assert len(found) == 3 * LENGTH // BATCH
    assert len({draw for _, draw in found}) == len(found)
    assert sorted({first for first, _ in found}) == list(range(0, LENGTH, BATCH))


def test_on_a_device_a_transform_has_the_device_s_generator() -> None:
    def drawn(batch: Any, rng: Any) -> Any:
        assert isinstance(rng, torch.Generator)
        assert rng.device == batch[0].device
        return batch[0] + torch.rand(batch[0].shape, generator=rng)

    loader = DataLoader(Numbers(), batch_size=BATCH)
    pipeline = stoker.echo(loader, "auto", transform=drawn, device="cpu", seed=0)
    assert "batch echoing on the device" in str(pipeline)
    assert sum(len(batch) for batch in pipeline) >= LENGTH


def test_a_pool_on_a_device_says_how_much_it_may_hold(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = stoker.echo(DataLoader(Numbers(), batch_size=BATCH), device="meta", pool=5)
    with caplog.at_level(logging.WARNING, logger="stoker"), iter(pipeline) as batches:
        next(batches)
        next(batches)
    assert caplog.messages == [
        "echo(auto, max_factor=4): the pool may hold 5 batches, 640 B of the memory of meta "
        "(pool= sets it)"
    ]


@pytest.mark.gpu
def test_batches_kept_on_an_accelerator_are_augmented_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def drawn(batch: Any, rng: Any) -> Any:
        assert batch[0].is_cuda
        return batch[0] + torch.rand(batch[0].shape, generator=rng, device=rng.device), batch[1]

    pipeline = stoker.echo(
        DataLoader(Numbers(), batch_size=BATCH), "auto", transform=drawn, device="cuda", seed=0
    )
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert set(seen(pipeline)) == set(range(LENGTH))
    assert "of the memory of cuda" in caplog.text


def test_batches_in_shared_memory_are_copied_before_they_are_kept() -> None:
    loader = DataLoader(Numbers(), batch_size=BATCH, num_workers=1)
    shared = [batch[0].is_shared() for batch in loader]
    kept = [batch[0].is_shared() for batch in stoker.echo(loader, seed=0)]
    assert all(shared)
    assert not any(kept)


class Refilling:
    """Yields one array again and again, refilled, as FFCV's loader and DALI's do; starts over."""

    def __init__(self, resets: str = "no") -> None:
        self._auto_reset = resets
        self.memory, self.next = np.zeros(2, np.int64), 0
        self.resets = 0

    def __iter__(self) -> Refilling:
        return self

    def __next__(self) -> Any:
        if self.next == 6:
            if self._auto_reset == "yes":
                self.next = 0
            raise StopIteration
        self.memory[:] = self.next
        self.next += 1
        return self.memory

    def reset(self) -> None:
        self.resets += 1
        self.next = 0


@pytest.mark.parametrize("resets", ["no", "yes"])
@pytest.mark.parametrize("factor", [2, "auto"])
def test_an_iterator_that_starts_over_is_taken(resets: str, factor: Any) -> None:
    loader = Refilling(resets)
    pipeline = stoker.echo(loader, factor, seed=0)
    for _ in range(3):
        found = [batch.tolist() for batch in pipeline]
        assert all(a == b for a, b in found)  # none of them refilled meanwhile
        assert {a for a, _ in found} == set(range(6))
    assert loader.resets == (3 if resets == "no" else 0)


def test_a_function_makes_a_new_iterator_every_epoch() -> None:
    def batches() -> Iterator[Any]:
        yield from (np.full(2, i) for i in range(5))

    pipeline = stoker.echo(batches, seed=0)
    for _ in range(2):
        assert {int(batch[0]) for batch in pipeline} == set(range(5))
    once = batches()
    again = stoker.echo(lambda: once)
    list(again)
    with pytest.raises(TypeError, match="the same generator again"):
        list(again)


def stateful(examples: Any = None, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what torchdata calls
        from torchdata.stateful_dataloader import StatefulDataLoader

        if examples is None:
            examples, arguments = Numbers(), {"shuffle": True, **arguments}
        return StatefulDataLoader(examples, batch_size=BATCH, **arguments)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", one_in(3, [0, 1, 9]))
def test_the_state_of_a_stateful_loader_is_nested(workers: int, taken: int) -> None:
    torch.manual_seed(1)
    make = functools.partial(stateful, num_workers=workers)
    pipeline = stoker.echo(make(), seed=0)
    first: list[int] = []
    with iter(pipeline) as batches:
        for _, batch in zip(range(taken), batches, strict=False):
            first += batch[1].tolist()
        state, clock = pipeline.state_dict(), pipeline.counts
    restored = stoker.echo(make(), seed=0)
    restored.load_state_dict(state)
    assert restored.counts == clock
    rest = seen(restored)
    assert set(first) | set(rest) == set(range(LENGTH))
    assert not set(first) & set(rest)  # each is fresh once, the pool begins empty
    assert restored.counts.fresh_examples == LENGTH
    assert set(seen(restored)) == set(range(LENGTH))


def test_an_epoch_that_ends_within_a_pass_leaves_its_rest_after_a_resume_too() -> None:
    def make() -> stoker.Pipeline[Any]:
        return stoker.from_loader(stateful(), seed=0).steps(3)

    pipeline = make()
    seen(pipeline)
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert len(seen(restored)) == len(set(seen(restored))) == 3 * BATCH
    whole = stoker.from_loader(stateful(), seed=0)
    seen(whole)
    state = whole.state_dict()
    again = stoker.from_loader(stateful(), seed=0)
    again.load_state_dict(state)
    assert str(again.state_dict()) == str(state)  # not that of a loader that has not begun


@pytest.mark.parametrize("steps", [3, LENGTH // BATCH])
def test_no_epoch_over_a_stream_is_empty_after_a_resume(steps: int) -> None:
    def make() -> stoker.Pipeline[Any]:
        return stoker.from_loader(stateful(Stream()), seed=0).steps(steps)

    pipeline = make()
    epoch = seen(pipeline)
    restored = make()
    restored.load_state_dict(pipeline.state_dict())
    assert seen(restored) == seen(pipeline) == epoch


def test_states_that_a_loader_cannot_go_on_from_are_refused() -> None:
    for pipeline, says in (
        (stoker.echo(DataLoader(Numbers(), batch_size=BATCH)), "StatefulDataLoader"),
        (stoker.echo(stateful(), 2), "auto"),
    ):
        with iter(pipeline) as batches:
            next(batches)
            with pytest.raises(stoker.StateError, match=says):
                pipeline.state_dict()


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise OSError("rotten")
        return torch.zeros(1), index


def test_what_a_loader_raises_comes_as_it_is() -> None:
    pipeline = stoker.echo(DataLoader(Failing(), batch_size=BATCH), seed=0)
    found: set[int] = set()

    def run() -> None:
        for _, y in pipeline:
            found.update(y.tolist())

    with pytest.raises(OSError, match="rotten"):
        run()
    assert found == set(range(20))
