"""Padding arrays of different lengths."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.collate import pad


class Ragged:
    """A dataset of dicts with arrays of different lengths."""

    def __init__(self, lengths: list[int], dtype: str = "int32") -> None:
        self.lengths = lengths
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        boxes = np.full((self.lengths[index], 4), index, np.float32)
        tokens = np.arange(self.lengths[index], dtype=self.dtype) + 1
        return {"tokens": tokens, "boxes": boxes, "image": np.zeros((2, 3)), "id": index}


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    value=st.integers(-3, 3),
    batch=st.integers(1, 4),
    workers=st.sampled_from([0, 2]),
)
def test_arrays_are_filled_up_and_lengths_tell(
    lengths: list[int], value: int, batch: int, workers: int
) -> None:
    train = stoker.from_dataset(Ragged(lengths)).batch(batch, collate=pad(value)).workers(workers)
    seen: list[int] = []
    for found in train:
        for name in ("tokens", "boxes"):
            padded = found[name]
            assert padded.lengths.dtype == np.int64
            assert padded.values.shape[1] == padded.lengths.max()
            for row, length, index in zip(padded.values, padded.lengths, found["id"], strict=True):
                assert length == lengths[index]
                assert (row[:length] == Ragged(lengths)[int(index)][name]).all()
                assert (row[length:] == value).all()
        assert found["tokens"].values.dtype == np.int32
        assert found["image"].values.shape[1:] == (2, 3)
        seen += found["id"].tolist()
    assert seen == list(range(len(lengths)))


def test_one_field_alone() -> None:
    train = stoker.from_dataset(Ragged([3, 1])).map(
        lambda example: (example["tokens"], example["image"], example["id"])
    )
    ((tokens, images, ids),) = train.batch(2, collate=pad(9, on=0))
    assert tokens.values.tolist() == [[1, 2, 3], [1, 9, 9]]
    assert tokens.lengths.tolist() == [3, 1]
    assert images.shape == (2, 2, 3)
    assert ids.tolist() == [0, 1]


class Sound(NamedTuple):
    samples: Any
    label: str


def test_named_tuples_tensors_and_bare_arrays() -> None:
    import torch

    sounds = [Sound(torch.ones(n), f"{n}") for n in (2, 4)]
    (batch,) = stoker.from_dataset(sounds).batch(2, collate=pad()).to_torch()
    assert isinstance(batch, Sound)
    assert batch.label == ["2", "4"]
    assert batch.samples.values.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.samples.lengths.tolist() == [2, 4]
    (bare,) = stoker.from_dataset([np.arange(2), np.arange(3)]).batch(2, collate=pad(-1))
    assert bare.values.tolist() == [[0, 1, -1], [0, 1, 2]]


def test_tensors_of_any_kind_and_what_stands_beside_them() -> None:
    """A batch's arrays are all tensors, if one is."""
    import torch

    kinds: list[Callable[[int], Any]] = [
        lambda n: torch.ones(n, dtype=torch.bfloat16),
        lambda n: torch.ones(n, requires_grad=True),
        lambda n: torch.ones(n, 2, dtype=torch.int64),
    ]
    for kind, collate in itertools.product(kinds, [pad(7), pad(7, on="t")]):
        batch = collate([{"t": kind(n), "y": n, "name": "a"} for n in (1, 3)])
        assert batch["t"].values.dtype == kind(1).dtype
        assert not batch["t"].values.requires_grad
        assert batch["t"].values.reshape(6, -1)[:, 0].tolist() == [1, 7, 7, 1, 1, 1]
        assert (batch["t"].lengths.tolist(), batch["y"].tolist()) == ([1, 3], [1, 3])
        assert all(torch.is_tensor(each) for each in (batch["t"].lengths, batch["y"]))
        assert batch["name"] == ["a", "a"]
    with pytest.raises(ValueError, match=r"pad\(0\.5\) fits no array of int64"):
        pad(0.5)([torch.ones(1, dtype=torch.int64)])


def test_a_masked_array_is_refused_wherever_it_stands_in_a_batch() -> None:
    rows = [np.arange(3.0), np.ma.masked_array(np.arange(3.0), [True, False, False])]
    for examples in (rows, rows[::-1]):
        with pytest.raises(stoker.StageError, match="MaskedArray"):
            list(stoker.from_dataset(examples).batch(2))


def test_it_pickles() -> None:
    padded = pickle.loads(pickle.dumps(pad(7, on="x")))([{"x": np.arange(2)}, {"x": np.arange(1)}])
    assert padded["x"].values.tolist() == [[0, 1], [0, 7]]


def test_what_cannot_be_padded() -> None:
    def first(*examples: Any, on: Any = None, value: Any = 0) -> Any:
        return next(iter(stoker.from_dataset(examples).batch(9, collate=pad(value, on=on))))

    with pytest.raises(stoker.StageError, match=r"first dimension alone.*int64 \[2, 3\]"):
        first(np.zeros((2, 3), int), np.zeros((2, 4), int))
    with pytest.raises(stoker.StageError, match=r"float64.*int64"):
        first(np.zeros(2), np.zeros(2, int))
    with pytest.raises(stoker.StageError, match="takes arrays of at least one dimension, not int"):
        first({"x": 1}, {"x": 2}, on="x")
    with pytest.raises(stoker.StageError, match="no field 'y'"):
        first({"x": 1}, on="y")
    with pytest.raises(stoker.StageError, match=r"pad\(-1\) fits no array of uint8"):
        first(np.zeros(2, np.uint8), value=-1)
