"""Random changes to batches of images: what they change, what they leave, and on what they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.images import random_erase, random_hflip

Change = Callable[..., Any]
CHANGES: list[Change] = [random_hflip, random_erase]
DTYPES = [np.uint8, np.int16, np.float32, np.float64]
SEEDS = st.integers(0, 2**32)


def images_of(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    values = np.random.default_rng(seed).integers(0, 256, shape)
    return values.astype(dtype)


@st.composite
def batches(draw: st.DrawFn) -> Any:
    n, height, width = draw(st.integers(1, 6)), draw(st.integers(5, 12)), draw(st.integers(5, 12))
    channels = draw(st.sampled_from([None, 1, 3, 4]))
    shape: tuple[int, ...] = (n, height, width)
    if channels is not None:
        shape = (n, channels, height, width) if draw(st.booleans()) else (*shape, channels)
    return images_of(shape, draw(st.sampled_from(DTYPES)), draw(SEEDS))


def rows_last(images: Any) -> Any:
    """Return images with the axes of height and width last."""
    if images.ndim == 3 or images.shape[1] in (1, 3, 4):
        return images
    return np.moveaxis(images, 3, 1)


@pytest.mark.parametrize("change", CHANGES)
@given(images=batches(), seed=SEEDS)
def test_the_same_on_arrays_and_tensors_and_nothing_given_is_changed(
    change: Change, images: Any, seed: int
) -> None:
    labels, before = np.arange(len(images)), images.copy()
    found, same = change((images, labels), np.random.default_rng(seed))
    assert same is labels
    assert found.shape == images.shape
    assert found.dtype == images.dtype
    assert not np.shares_memory(found, images)
    np.testing.assert_array_equal(images, before)

    tensors = {"label": torch.from_numpy(labels), "image": torch.from_numpy(images)}
    other = change(tensors, np.random.default_rng(seed))
    assert other["image"].dtype == tensors["image"].dtype
    np.testing.assert_array_equal(images, before)
    np.testing.assert_allclose(other["image"].numpy(), found, rtol=1e-4)


@given(images=batches(), seed=SEEDS, p=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_flip_mirrors_whole_images_or_leaves_them(images: Any, seed: int, p: float) -> None:
    found = random_hflip(images, np.random.default_rng(seed), p=p)
    for old, new in zip(rows_last(images), rows_last(found), strict=True):
        allowed = ([old] if p < 1 else []) + ([old[..., ::-1]] if p > 0 else [])
        assert any(np.array_equal(new, each) for each in allowed)


def test_half_of_many_images_are_flipped() -> None:
    images = np.arange(4_000 * 2, dtype=np.float32).reshape(4_000, 1, 2, 1)
    found = random_hflip(images, np.random.default_rng(0))
    flipped = (found != images).any((1, 2, 3)).mean()
    assert 0.45 < flipped < 0.55


@given(seed=SEEDS, height=st.integers(10, 24), width=st.integers(10, 24))
def test_what_is_erased_is_a_rectangle_of_the_mean_colour(
    seed: int, height: int, width: int
) -> None:
    images = images_of((3, height, width, 3), np.float64, seed)
    rng = np.random.default_rng(seed)
    found = random_erase(images, rng, p=1.0, area_fraction=(0.1, 0.2))
    for old, new in zip(images, found, strict=True):
        changed = (new != old).any(-1)
        down, across = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        if not len(down):
            continue  # it may hold no pixel's place where images are small
        box = new[down[0] : down[-1] + 1, across[0] : across[-1] + 1]
        np.testing.assert_allclose(box, np.broadcast_to(old.mean((0, 1)), box.shape), rtol=1e-6)
        assert box.shape[0] * box.shape[1] <= 0.2 * height * width + height + width + 1


def test_an_erasing_that_never_comes_changes_nothing() -> None:
    images = images_of((8, 9, 9), np.uint8, 0)
    np.testing.assert_array_equal(random_erase(images, np.random.default_rng(0), p=0.0), images)


@pytest.mark.parametrize("change", CHANGES)
def test_a_torch_generator_decides_what_is_drawn(change: Change) -> None:
    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8)

    def changed(seed: int) -> Any:
        return change((images, labels), torch.Generator().manual_seed(seed))[0]

    assert torch.equal(changed(1), changed(1))
    assert not torch.equal(changed(1), changed(2))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (np.zeros((4, 2)), r"no images in a batch of \[4, 2\]"),
        ("text", "no images in a batch of no arrays"),
        ((np.zeros((4, 8, 8, 3)), np.zeros((4, 8, 8, 1))), "several arrays"),
    ],
)
def test_a_batch_without_images_is_refused(change: Change, batch: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        change(batch, np.random.default_rng(0))


def test_files_are_no_images_yet() -> None:
    with pytest.raises(ValueError, match="decode or crop them first"):
        random_hflip(([b"file"] * 2, np.arange(2)), np.random.default_rng(0))


def batches_of(size: int, examples: int) -> Any:
    numbers: Any = torch.arange(examples)
    return torch.utils.data.DataLoader(numbers, size)


class Pictures(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4, 6), float(index)) + torch.arange(6), index


@pytest.mark.parametrize("on", [None, 0])
def test_each_use_of_an_echoed_batch_is_flipped_anew(on: int | None) -> None:
    loader = torch.utils.data.DataLoader(Pictures(), 8)
    train = stoker.echo(loader, 4, transform=random_hflip, on=on, seed=0)
    flipped: dict[int, set[bool]] = {}
    for images, labels in train:
        for image, label in zip(images, labels.tolist(), strict=True):
            row = image[0, 0] - label
            assert row.tolist() in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0])
            flipped.setdefault(label, set()).add(bool(row[0] == 5))
    assert len(flipped) == 24
    assert any(len(both) == 2 for both in flipped.values())


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_only_repeats_are_changed_if_asked_for(workers: str) -> None:
    made = stoker.from_arrays(np.arange(40), seed=0).shuffle().echo(3)
    made = made.random_map(negative, repeats_only=True).batch(8).workers(2, kind=workers)
    uses = np.concatenate(list(made))
    first: list[int] = [int(x) for x in uses if x >= 0]
    assert sorted(first) == list(range(40))
    assert sorted(-1 - int(x) for x in uses if x < 0) == sorted([*range(40), *range(40)])
    for x in range(40):  # the first of its uses
        assert np.flatnonzero((uses == x) | (uses == -1 - x)).min() == list(uses).index(x)


def negative(x: Any, rng: np.random.Generator) -> Any:
    return -1 - x


def test_only_repeats_of_batches_are_changed_if_asked_for() -> None:
    loader = batches_of(8, 24)
    train = stoker.echo(loader, 4, transform=negative, repeats_only=True, pool=4, seed=0)
    uses = [batch.tolist() for batch in train]
    assert sorted(u for u in uses if u[0] >= 0) == [batch.tolist() for batch in loader]
    assert len(uses) == 12


@pytest.mark.parametrize(
    "build",
    [
        lambda p: p.random_map(negative, repeats_only=True),
        lambda p: p.echo(2).batch(4).random_map(negative, repeats_only=True),
    ],
)
def test_repeats_only_needs_uses_one_by_one(build: Any) -> None:
    with pytest.raises(ValueError, match=r"needs an \.echo"):
        build(stoker.from_arrays(np.arange(8), seed=0))
