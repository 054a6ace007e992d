"""What ``advise`` measures, what it concludes from that, and what it cannot answer."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from encoded_images import encoded, photograph
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import images
from stoker.images import CropAdvice, advising

FILES = [encoded(photograph(90 + i, 120), "JPEG", quality=90) for i in range(3)]
CROP = images.random_resized_crop(32)
ms = st.floats(0.01, 100)


def files() -> Any:
    return stoker.from_dataset([{"image": data, "n": 1} for data in FILES], seed=0).shuffle()


@given(decode=ms, pixels=ms, file=ms)
def test_the_factor_is_where_both_cost_the_same(decode: float, pixels: float, file: float) -> None:
    found = CropAdvice(1, decode, pixels, file)
    least = found.least_factor
    for factor in (1.0, 1.5, 2.0, 4.0, 64.0):
        if abs(factor - least) > 1e-6 * factor:
            assert (decode / factor + pixels < file) == (factor > least)
    assert math.isclose(found.keeps_up_to * file, decode + pixels)
    assert "images, ms" in str(found)


@pytest.mark.parametrize(
    "train",
    [
        files().map(images.decode, on="image").echo(2).random_map(CROP, on="image").batch(2),
        files().echo(2).random_map(CROP, on="image"),
        files().map(images.resized_center_crop(32, 40), on="image").batch(2),
        files()
        .shard(rank=1, world=2)
        .filter(len, on="image")
        .map(functools.partial(images.decode, orient=True), on="image")
        .cache("8MB", version="1")
        .map(images.center_crop(32), on="image"),
    ],
    ids=["decoded", "files", "evaluation", "more stages"],
)
def test_costs_of_a_pipelines_own_images(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = train.state_dict()
    found = images.advise(train)
    assert found.images == 3
    assert min(found.decode_ms, found.crop_of_pixels_ms, found.crop_of_file_ms) > 0
    assert capsys.readouterr().out == f"{found}\n"
    assert train.state_dict() == before


def test_all_files_that_can_be_cropped_are_tried() -> None:
    in_arrays = [np.frombuffer(data, np.uint8) for data in FILES]
    assert images.advise(stoker.from_dataset(in_arrays, seed=0).random_map(CROP)).images == 3
    damaged = stoker.from_dataset([FILES[0], b"no image", FILES[1]], seed=0, on_error=1)
    assert images.advise(damaged.map(images.decode).random_map(CROP)).images == 2
    with pytest.raises(OSError, match="cannot identify"):
        images.advise(stoker.from_dataset([b"no image"], seed=0).random_map(CROP))


def test_steps_are_of_batches_and_end_no_trial() -> None:
    train = files().map(images.decode, on="image").random_map(CROP, on="image").batch(1)
    assert images.advise(train.steps(1)).images == 3
    assert images.advise(train.steps(100)).images == 3  # and nothing is warned of
    assert images.advise(train.repeat().steps(2)).images == 3


def test_each_part_of_a_mixture_may_decode() -> None:
    one, two = (files().map(images.decode, on="image") for _ in range(2))
    found = images.advise(stoker.mix({one: 1, two: 1}, seed=0).random_map(CROP, on="image"))
    assert found.images == 6


def test_what_cannot_be_answered() -> None:
    with pytest.raises(TypeError, match="a pipeline, not a list"):
        images.advise([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no crop"):
        images.advise(files().map(images.decode, on="image"))
    whole = files().map(images.decode, on="image")
    with pytest.raises(ValueError, match=r"map\(flip, on='image'\) needs whole images"):
        images.advise(whole.map(images.flip, on="image").random_map(CROP, on="image"))
    with pytest.raises(ValueError, match="work on different fields"):
        images.advise(files().map(images.decode, on="image").random_map(CROP, on="n"))
    with pytest.raises(TypeError, match="of type ndarray, not encoded"):
        images.advise(stoker.from_arrays(np.stack([photograph(60, 60)]), seed=0).random_map(CROP))
    with pytest.raises(ValueError, match="no examples"):
        images.advise(stoker.from_dataset([], seed=0).random_map(CROP))


def test_a_pipeline_that_decodes_in_full_says_so() -> None:
    whole = files().map(images.decode, on="image")
    assert "advise(pipeline)" in str(whole.echo(2).random_map(CROP, on="image"))
    assert "advise" not in str(whole)
    assert "advise" not in str(files().random_map(CROP, on="image"))
    assert "advise" not in str(whole.map(images.flip, on="image").random_map(CROP, on="image"))


@pytest.mark.parametrize(
    ("costs", "whole", "crop"),
    [
        (
            (1.5, 0.5, 1.25),
            "measured: cropping files is cheaper up to a factor of 2.0",
            "from a factor of 2.0 on",
        ),
        ((1.5, 0.5, 0.5), "measured: cropping files is cheaper at any factor", ""),
        ((1.0, 0.5, 2.0), "measured: cheaper than cropping files", "from a factor of 1.0 on"),
    ],
)
def test_what_was_measured_is_said_by_both_orders(
    costs: tuple[float, float, float], whole: str, crop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        advising, "_measure_costs_s", lambda files, *fns: [tuple(c / 1000 for c in costs)]
    )
    source, view = files(), images.random_resized_crop(32)
    decoded = source.map(images.decode, on="image").echo(2).random_map(view, on="image")
    cropped = source.echo(2).random_map(view, on="image")
    images.advise(decoded)
    assert whole in str(decoded.batch(2).workers(3))
    assert whole in str(source.map(images.decode, on="image").random_map(view, on="image"))
    assert (crop in str(cropped)) if crop else ("measured" not in str(cropped))
    assert "measured" not in str(source.random_map(view, on="image"))  # there is no echo
    other = files().map(images.decode, on="image").echo(2).random_map(view, on="image")
    assert "measured" not in str(other)  # images of another source
    assert "advise(pipeline)" in str(other)
