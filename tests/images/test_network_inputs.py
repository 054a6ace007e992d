"""What a network takes: ``to_chw`` and ``normalize``, one pass where they stand side by side."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from backends import backend  # noqa: F401 - used by every test
from stoker.images import normalize, to_chw

torch = pytest.importorskip("torch")

MEANS, DEVIATIONS = [0.485, 0.456, 0.406, 0.5], [0.229, 0.224, 0.225, 0.25]


def by_hand(images: np.ndarray, axis: int, channels: int) -> np.ndarray:
    """Pixels from 0 to 1, less the mean, over the deviation; each step in float32."""
    shape = [1] * images.ndim
    shape[axis] = channels
    mean, std = (np.array(x[:channels], np.float32) * 255 for x in (MEANS, DEVIATIONS))
    scaled = images.astype(np.float32) * (1 / std).reshape(shape)
    return scaled - (mean / std).reshape(shape)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@given(
    rows=st.integers(0, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 4),
    in_planes=st.booleans(),
    contiguous=st.booleans(),
    is_tensor=st.booleans(),
)
def test_bytes_become_the_same_numbers_everywhere(
    rows: int,
    height: int,
    width: int,
    channels: int,
    in_planes: bool,
    contiguous: bool,
    is_tensor: bool,
) -> None:
    shape = (channels, height, width) if in_planes else (height, width, channels)
    images = pixels(*((rows, *shape) if rows else shape))
    if not contiguous:
        images = np.ascontiguousarray(images.swapaxes(-1, -3)).swapaxes(-1, -3)
    order = [-3, -1] if is_tensor else [-1, -3]
    axis = next(each for each in order if images.shape[each] == channels)
    given = torch.from_numpy(images) if is_tensor else images
    made = normalize(MEANS[:channels], DEVIATIONS[:channels])(given)
    assert type(made) is type(given)
    assert made.shape == images.shape
    assert np.array_equal(np.asarray(made), by_hand(images, axis, channels))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_numbers_are_rounded_once(dtype: str, is_tensor: bool) -> None:
    images = pixels(2, 5, 7, 3)
    fn = normalize(dtype=dtype)
    if dtype == "bfloat16" and not is_tensor:
        with pytest.raises(TypeError, match=r"no bfloat16: put .to_torch\(\)"):
            fn(images)
        return
    expected = torch.from_numpy(normalize()(images)).to(getattr(torch, dtype))
    made = fn(torch.from_numpy(images) if is_tensor else images)
    found = made if is_tensor else torch.from_numpy(made)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    floating = fn(torch.from_numpy(images) / 255)
    assert floating.dtype == expected.dtype


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="float32, float16, bfloat16, not 'float64'"):
        normalize(dtype="float64")


class Row(NamedTuple):
    image: np.ndarray
    number: int


ROWS = [Row(pixels(12, 16, 3, seed=at), at) for at in range(24)]
EXPECTED = np.stack([by_hand(row.image, -1, 3).transpose(2, 0, 1) for row in ROWS])
BOTH: list[list[Any]] = [[to_chw, normalize()], [normalize(), to_chw]]


def mapped(pipeline: stoker.Pipeline, both: list[Any]) -> stoker.Pipeline:
    for each in both:
        pipeline = pipeline.map(each, on="image")
    return pipeline


@pytest.mark.parametrize("both", BOTH)
@pytest.mark.parametrize("where", ["examples", "batches", "echoed", "to", "to, echoed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_makes_them_in_one_pass(both: list[Any], where: str, workers: int) -> None:
    pipeline = stoker.from_dataset(ROWS, seed=0).shuffle().workers(workers)
    if where == "examples":
        pipeline = mapped(pipeline, both).batch(4)
    else:
        pipeline = pipeline.batch(4)
        if "to" in where:
            pipeline = pipeline.to_torch()
        if "echoed" in where:
            pipeline = pipeline.echo(2)
        pipeline = mapped(pipeline, both)
    kept = list(pipeline)  # all of them: what is kept is not written over
    assert len(kept) == 12 if "echoed" in where else 6
    for batch in kept:
        found = np.asarray(batch.image)
        assert found.flags.c_contiguous
        assert np.array_equal(found, EXPECTED[np.asarray(batch.number)])
    if where != "examples" and "to" not in where:
        names = [stage.name for stage in pipeline.stats().stages]
        assert " + ".join(each.__name__ for each in both) in " ".join(names)


def test_maps_of_different_fields_are_two() -> None:
    rows = [{"a": row.image, "b": row.image} for row in ROWS]
    pipeline = stoker.from_dataset(rows, seed=0).batch(4)
    pipeline = pipeline.map(to_chw, on="a").map(normalize(), on="b")
    batch = next(iter(pipeline))
    assert batch["a"].dtype == np.uint8
    assert batch["b"].shape == (4, 12, 16, 3)


def test_a_cache_between_them_keeps_what_comes_to_it() -> None:
    pipeline = stoker.from_dataset(ROWS, seed=0).map(to_chw, on="image")
    cached = pipeline.cache("4MiB").map(normalize(), on="image").batch(4)
    for _ in range(2):
        found = np.concatenate([batch.image for batch in cached])
        assert np.array_equal(found, EXPECTED)


def test_an_error_names_both() -> None:
    rows = [Row(pixels(12, 16, 4), 0)] * 4
    pipeline = mapped(stoker.from_dataset(rows, seed=0).batch(4), BOTH[0])
    with pytest.raises(stoker.StageError, match=r"to_chw \+ normalize.*3 means"):
        next(iter(pipeline))


def test_it_pickles() -> None:
    fn = pickle.loads(pickle.dumps(normalize([0.5], [0.25], dtype="float16")))
    assert fn == normalize([0.5], [0.25], dtype="float16")
    assert fn(pixels(2, 2, 1)).dtype == np.float16


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_one_pass_gives_what_two_give(
    height: int, width: int, channels: int, is_moved_first: bool, is_tensor: bool
) -> None:
    """Also where height or width could be taken for the channels."""
    images: Any = pixels(2, height, width, channels)
    images = torch.from_numpy(images) if is_tensor else images
    scale = normalize(MEANS[:channels], DEVIATIONS[:channels])
    both = [to_chw, scale] if is_moved_first else [scale, to_chw]
    try:
        expected = both[1](both[0](images))
    except ValueError:
        return
    one = stoker.from_dataset([images], seed=0).map(both[0]).map(both[1])
    assert np.array_equal(np.asarray(next(iter(one))), np.asarray(expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_an_accelerator_nothing_waits_for_the_steps_before() -> None:
    images = torch.from_numpy(pixels(4, 9, 9, 3))
    change = normalize(dtype="bfloat16")
    there = images.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = change(to_chw(there))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step = 2**-6  # of bfloat16 between 2 and 4, where the largest numbers lie
    torch.testing.assert_close(made.cpu(), change(to_chw(images)), atol=step, rtol=0)
