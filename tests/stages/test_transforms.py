"""Transforms of other libraries: the same stream for any workers, and no global generator moved."""

from __future__ import annotations

import functools
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.stages.functions.torch_draws import KeyedDraws
from strategies import one_in

Example = namedtuple("Example", "image label")


class Noise(torch.nn.Module):
    """Follows torchvision's protocol (v2): any number of inputs, draws from torch's generator."""

    def forward(self, *inputs: Any) -> Any:
        (image,) = inputs
        where = int(torch.randint(0, 5, ()))
        self.kept = torch.rand(image.shape)  # as Kornia keeps its parameters
        order = torch.randperm(image.shape[0])
        out = (image * (torch.rand(1) < 0.5) + self.kept)[order] + where
        out += torch.empty_like(out).normal_() + torch.randn_like(out) + torch.bernoulli(self.kept)
        return out + torch.multinomial(torch.ones(9), 3).sum()


class Jitter:
    """Follows Albumentations' protocol: a seed that is set, and arguments by name."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.py_rng = random.Random()

    def set_random_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.py_rng = random.Random(seed)

    def __call__(self, *args: Any, **data: Any) -> dict[str, Any]:
        if args:
            raise KeyError("You have to pass data to augmentations as named arguments")
        return {**data, "image": data["image"] + self.rng.random() + self.py_rng.random()}


class Fixed(Jitter):
    """The same without a draw."""

    def __call__(self, *args: Any, **data: Any) -> dict[str, Any]:
        return {**data, "image": data["image"] * 2}


class ByName(Jitter):
    """Takes its arguments by name alone, as its signature says."""

    def __call__(self, *, image: np.ndarray) -> dict[str, Any]:
        return {"image": image + self.rng.random()}


def rows(kind: str) -> Any:
    values: list[Any] = [np.full((3, 4), float(i), np.float32) for i in range(24)]
    if kind == "module":
        values = [torch.from_numpy(value) for value in values]
    return stoker.from_dataset(values, seed=4).shuffle().echo(2, pool=16)


def transform(kind: str) -> Any:
    return Noise() if kind == "module" else Jitter()


def stream(p: Any, epochs: int = 2) -> np.ndarray:
    return np.concatenate([np.asarray(batch) for _ in range(epochs) for batch in p])


@pytest.mark.parametrize("kind", one_in(2, ["module", "seeded"]))
def test_the_same_stream_for_any_workers(kind: str) -> None:
    p = rows(kind).random_map(transform(kind)).batch(4)
    torch.manual_seed(1)
    found = stream(p.workers(0))
    assert len({row.tobytes() for row in found}) == len(found)  # each use has draws of its own
    torch.manual_seed(2)
    again = rows(kind).random_map(transform(kind)).batch(4).workers(2, kind="process")
    np.testing.assert_array_equal(stream(again), found)


def test_what_takes_names_alone_is_called_with_names() -> None:
    for chain in (rows("seeded").map(ByName()), rows("seeded").random_map(ByName())):
        assert stream(chain.batch(4), epochs=1).shape == (48, 3, 4)
    with pytest.raises(TypeError, match="does not take"):
        rows("seeded").filter(ByName())


def test_no_global_generator_moves() -> None:
    before = torch.default_generator.get_state()
    stream(rows("module").random_map(transform("module")).batch(4).workers(0))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_module_on_batches_of_a_device() -> None:
    def made() -> np.ndarray:
        return stream(rows("seeded").batch(4).to_torch().random_map(Noise()).workers(2))

    np.testing.assert_array_equal(made(), made())


@given(seed=st.integers(0, 2**63))
def test_whatever_a_module_draws_is_keyed(seed: int) -> None:
    def made() -> Any:
        with KeyedDraws(np.random.default_rng(seed)):
            return [
                *(torch.rand(3), torch.randn(2, 2), torch.randint(9, (4,)), torch.randperm(5)),
                *(torch.rand_like(torch.ones(2)), torch.normal(torch.zeros(2), torch.ones(2))),
                torch.distributions.Beta(torch.tensor(0.5), torch.tensor(0.5)).sample((2,)),
                torch.distributions.Uniform(0.0, 1.0).sample((3,)),
                torch.empty(3).uniform_().exponential_().log_normal_(),
                torch.nn.functional.dropout(torch.ones(9), 0.5),
                torch.poisson(torch.full((3,), 4.0)),
                torch.rand(2, generator=torch.Generator().manual_seed(0)),  # its own stays
            ]

    for mine, again in zip(made(), made(), strict=True):
        assert torch.equal(mine, again)


def test_an_example_by_the_names_of_its_fields() -> None:
    image, label = np.zeros(2), 7
    for example in ({"image": image, "label": label}, Example(image, label)):
        p: Any = stoker.from_dataset([example], seed=0).random_map(Jitter())
        found = next(iter(p))
        assert type(found) is type(example)
        values = found if isinstance(found, dict) else found._asdict()
        assert values["label"] == 7
        assert values["image"][0] > 0
    fixed: Any = stoker.from_dataset([{"image": image + 1}], seed=0).map(Fixed(), on="image")
    assert next(iter(fixed))["image"].tolist() == [2.0, 2.0]
    with pytest.raises(stoker.StageError, match="Jitter takes an array"):
        next(iter(stoker.from_dataset([(image, label)], seed=0).random_map(Jitter())))
    p = stoker.from_arrays(np.zeros((4, 2)), seed=0).batch(2).to_torch().random_map(Jitter())
    with pytest.raises(stoker.StageError, match=r"before \.to_torch\(\)"):
        next(iter(p))


class WithRng(torch.nn.Module):
    """A module that takes the generator, as any function of ``.random_map`` does."""

    def forward(self, x: Any, rng: Any) -> Any:
        return x + rng.random()


def test_a_module_that_takes_rng_is_given_it() -> None:
    p: Any = stoker.from_arrays(np.zeros((4, 2)), seed=0)
    expected = stream(p.random_map(lambda x, rng: x + rng.random()).batch(2))
    np.testing.assert_array_equal(stream(p.random_map(WithRng()).batch(2)), expected)


class Elsewhere(torch.nn.Module):
    """Draws from NumPy's global generator."""

    def forward(self, x: Any) -> Any:
        return x + float(np.random.rand())


def test_what_a_module_draws_elsewhere_is_seeded_too() -> None:
    def made() -> np.ndarray:
        p = stoker.from_dataset([torch.ones(8) for _ in range(16)], seed=0)
        return stream(p.random_map(Elsewhere()).batch(4).workers(0), epochs=1)

    found = made()
    assert len(np.unique(found)) == 16
    np.testing.assert_array_equal(made(), found)


@functools.cache
def kornia() -> Any:
    from kornia import augmentation

    return augmentation


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [
        lambda: kornia().RandomResizedCrop((8, 8)),
        lambda: kornia().ColorJitter(0.4, 0.4, 0.4, 0.1),
        lambda: kornia().RandomErasing(p=0.7),
        lambda: kornia().AugmentationSequential(
            kornia().RandomHorizontalFlip(), kornia().RandomAffine(20.0), data_keys=["input"]
        ),
    ],
    ids=["crop", "colours", "erase", "several"],
)
def test_kornia(make: Any) -> None:
    def made(workers: int) -> np.ndarray:
        images = torch.rand(12, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        p: Any = stoker.from_dataset(list(images), seed=1).shuffle().echo(2, pool=8)
        return stream(p.random_map(make()).batch(4).workers(workers))

    found = made(0)
    assert len({row.tobytes() for row in found}) > len(found) // 2
    np.testing.assert_array_equal(made(3), found)
