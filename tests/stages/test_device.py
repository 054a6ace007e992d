"""Batches on a device: tensors on the CPU here, and on an accelerator where one is at hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import stoker
from stoker.stages.to import To
from stoker.testing import equal


def _pipeline(device: str, *, echo: float = 1) -> stoker.Pipeline:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (200, 8, 8, 3), np.uint8)
    pipeline = (
        stoker.from_arrays(images, np.arange(200), seed=1).shuffle().batch(16).to_torch(device)
    )
    return pipeline.echo(echo) if echo != 1 else pipeline


def _noise(batch: tuple[torch.Tensor, torch.Tensor], rng: object) -> tuple[object, torch.Tensor]:
    images, labels = batch
    if isinstance(rng, torch.Generator):
        return images + torch.rand(images.shape, generator=rng, device=images.device), labels
    assert isinstance(rng, np.random.Generator)
    return images + torch.from_numpy(rng.random(images.shape, np.float32)), labels


def test_memory_that_cannot_be_pinned_is_usual_memory() -> None:
    memory = To("cuda:0").allocate(1000)  # where there is a GPU, it is pinned
    memory[:] = bytes(range(250)) * 4
    assert bytes(memory) == bytes(range(250)) * 4


@pytest.mark.parametrize("swapped", [">i4", "<i4", ">u2", ">f8"])
def test_arrays_of_any_byte_order_become_tensors(swapped: str) -> None:
    given = np.arange(5).astype(swapped)
    (tensor,) = stoker.from_arrays(given, seed=0).batch(5).to_torch()
    assert tensor.tolist() == given.tolist()
    assert str(tensor.dtype) == f"torch.{given.dtype.newbyteorder('=')}"


@pytest.mark.parametrize("echo", [1, 2])
def test_clocks_count_what_was_handed_out_also_with_maps_behind(echo: float) -> None:
    def clocks(tail: bool) -> list[tuple[float, stoker.types.Counts]]:
        train = stoker.from_dataset(range(48), seed=0).shuffle().echo(echo).batch(8)
        train = train.to_torch().workers(2)
        if tail:
            train = train.map(lambda x: x + 1).map(lambda x: x - 1)
        return [(train.progress, train.counts) for _ in train]

    assert clocks(tail=True) == clocks(tail=False)


def test_clocks_do_not_depend_on_how_work_is_cut() -> None:
    """Items between a pool and a filter share tasks, of as many as their cost suggests."""

    def clocks(taking_s: float) -> list[tuple[float, stoker.types.Counts]]:
        @stoker.thread_safe
        def shifted(x: int, rng: np.random.Generator) -> int:
            time.sleep(taking_s)
            return x + int(rng.integers(2))

        train = stoker.from_dataset(range(60), seed=0, max_errors=2).shuffle().echo(2, pool=16)
        train = train.random_map(shifted).batch(8).workers(2)
        return [(train.progress, train.counts) for _ in train]

    assert clocks(0.0) == clocks(0.00005) == clocks(0.0001) == clocks(0.0002)


def test_unknown_devices_are_refused_where_they_are_named() -> None:
    with pytest.raises(RuntimeError, match="device"):
        _pipeline("warp-drive")


def _buffers(device: str = "cpu", rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.zeros((rows, 8, 8, 3), dtype=torch.uint8, device=device)
    return images, torch.zeros(rows, dtype=torch.int64, device=device)


def _whole(device: str = "cpu", **given: object) -> stoker.Pipeline:
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), np.uint8)
    pairs = stoker.from_arrays(images, np.arange(200), seed=1).shuffle().echo(2)
    return pairs.batch(16, drop_last=True).to_torch(device, **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_written_into_the_users_tensors_one_after_the_other(workers: int) -> None:
    out = _buffers()
    plain = _whole().workers(workers)
    train = _whole(out=out).workers(workers)
    for _ in range(2):
        for expected, batch in zip(plain, train, strict=True):
            assert batch is out
            assert equal(expected, batch)
            batch[0].zero_()  # the consumer may write
    state = None
    for number, _ in enumerate(train):
        if number == 3:
            state = train.state_dict()
            break
    resumed = _whole(out=out)
    assert state is not None
    resumed.load_state_dict(state)
    rest = [tuple(leaf.clone() for leaf in batch) for batch in resumed]
    plain.set_epoch(2)
    assert equal(rest, list(plain)[4:])


def test_what_does_not_fit_the_users_tensors_is_refused() -> None:
    with pytest.raises(stoker.StageError, match=r"\(8, 8, 8, 3\) of torch.uint8.*drop_last"):
        list(stoker.from_arrays(*_examples(40)).batch(16).to_torch(out=_buffers()))
    with pytest.raises(stoker.StageError, match="float32"):
        list(stoker.from_arrays(*_examples(16)).batch(16).to_torch(out=_floats()))
    with pytest.raises(stoker.StageError, match="to_torch"):
        list(stoker.from_arrays(*_examples(16)).batch(16).to_torch(out=_buffers()[0]))
    with pytest.raises(TypeError, match="tensors"):
        _whole(out=(np.zeros(3), np.zeros(3)))
    with pytest.raises(ValueError, match="meta"):
        _whole(out=_buffers("meta"))
    with pytest.raises(ValueError, match="put it last"):
        _whole(out=_buffers()).random_map(_noise)
    with pytest.raises(ValueError, match="put it last"):
        stoker.from_arrays(*_examples(16)).batch(16).to_torch(out=_buffers()).echo(2)


def _examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((count, 8, 8, 3), np.uint8), np.arange(count)


def _floats() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = _buffers()
    return images.float(), labels


@pytest.mark.gpu
def test_a_graph_reads_each_batch_from_the_tensors_that_it_was_captured_with() -> None:
    images, labels = _buffers("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = images.sum(dtype=torch.int64) + labels.sum()
    sums = []
    for _ in _whole("cuda", out=(images, labels)):
        graph.replay()
        sums.append(found.clone())
    expected = [int(a.sum(dtype=torch.int64) + b.sum()) for a, b in _whole()]
    assert [int(each) for each in sums] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("echo", [1, 3])
def test_what_reaches_the_accelerator_is_what_the_host_had(echo: float) -> None:
    for host, device in zip(_pipeline("cpu", echo=echo), _pipeline("cuda", echo=echo), strict=True):
        assert device[0].is_cuda
        assert equal(host, tuple(leaf.cpu() for leaf in device))


@pytest.mark.gpu
def test_augmenting_on_the_accelerator_is_reproducible_and_differs_by_use() -> None:
    def build() -> stoker.Pipeline:
        return _pipeline("cuda", echo=2).random_map(_noise)

    first, second = list(build()), list(build())
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    sums = {float(images.double().sum()) for images, _ in first}
    assert len(sums) == len(first)


@pytest.mark.gpu
def test_batches_on_an_accelerator_stay_while_their_memory_on_the_host_is_used_again() -> None:
    images = np.random.default_rng(0).integers(0, 256, (256, 96, 96, 3), np.uint8)
    train = stoker.from_arrays(images, np.arange(256), seed=1).shuffle().batch(16).workers(4)
    train = train.to_torch("cuda")
    kept = []
    for epoch in range(6):
        for number, batch in enumerate(train, 1):
            kept.append(batch)
            if epoch % 2 and number == 7:
                break  # while a batch is on its way
    assert len(kept) > 60
    for pixels, labels in kept:
        assert np.array_equal(pixels.cpu().numpy(), images[labels.cpu().numpy()])
