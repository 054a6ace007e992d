"""stoker-native's numbers of pixels: those that NumPy finds in the same table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("stoker_native", reason="stoker-native is not built here")


@given(
    images=st.integers(0, 3),
    height=st.integers(0, 40),
    width=st.integers(0, 40),
    channels=st.integers(1, 5),
    dtype=st.sampled_from(["uint8", "float16", "int16", "float32"]),
    planes=st.sampled_from([(False, False), (False, True), (True, True)]),
)
def test_numbers_are_those_of_the_table(
    images: int, height: int, width: int, channels: int, dtype: str, planes: tuple[bool, bool]
) -> None:
    in_planes, out_planes = planes
    random = np.random.default_rng(0)
    table = random.integers(0, 2**15, (channels, 256)).astype(dtype)
    pixels = random.integers(0, 256, (images, height, width, channels), np.uint8)
    expected = np.stack([table[c][pixels[..., c]] for c in range(channels)], -1)
    if in_planes:
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    if out_planes:
        expected = expected.transpose(0, 3, 1, 2)
    out = np.empty(expected.shape, dtype)
    native.look_up_pixels(pixels, table, out, in_planes=in_planes, out_planes=out_planes)
    assert np.array_equal(out, expected, equal_nan=dtype.startswith("float"))


PIXELS = np.zeros((2, 4, 5, 3), np.uint8)
TABLE = np.zeros((3, 256), np.float32)
OUT = np.zeros((2, 3, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"pixels": PIXELS.astype(np.int8)}, TypeError),
        ({"out": OUT.astype(np.float16)}, TypeError),
        ({"table": TABLE.astype(float), "out": OUT.astype(float)}, TypeError),
        ({"pixels": PIXELS[0]}, ValueError),
        ({"table": TABLE[:2]}, ValueError),
        ({"table": TABLE[:, :255]}, ValueError),
        ({"out": OUT[:1]}, ValueError),
        ({"out": OUT.reshape(PIXELS.shape)}, ValueError),
        ({"out_planes": False}, ValueError),
        ({"in_planes": True}, ValueError),
        ({"pixels": PIXELS[:, ::-1]}, ValueError),
        ({"out": OUT[:, :, ::-1]}, ValueError),
        ({"out": np.broadcast_to(OUT[:1], OUT.shape)}, ValueError),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    arrays = {"pixels": PIXELS, "table": TABLE, "out": OUT}
    how = {"in_planes": False, "out_planes": True}
    for name, value in change.items():
        (arrays if name in arrays else how)[name] = value
    with pytest.raises(error):
        native.look_up_pixels(*arrays.values(), **how)
