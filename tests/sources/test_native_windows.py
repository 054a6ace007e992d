"""stoker-native's reading of windows: NumPy's numbers; where files end, it stops and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

native = pytest.importorskip("stoker_native", reason="stoker-native is not built here")

DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def arrays(windows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((windows, length), -7), np.full((windows, length), -7)


@same_folder
@given(
    dtype=st.sampled_from(DTYPES),
    length=st.integers(1, 40) | st.integers(1_900, 2_100) | st.integers(16_000, 40_000),
    starts=st.lists(st.integers(0, 3_000), max_size=5),
    beyond=st.integers(-50, 50),
    seed=st.integers(0, 1000),
)
def test_windows_are_what_numpy_reads(
    tmp_path: Path, dtype: str, length: int, starts: list[int], beyond: int, seed: int
) -> None:
    # Where ``beyond`` is more than 0, the window that reaches furthest is cut short.
    size = max(0, (max(starts) if starts else 0) + length + 1 - beyond)
    every = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size).astype(dtype)
    every.tofile(tmp_path / "tokens")
    inputs, targets = arrays(len(starts), length)
    bytes_from = np.array(starts, np.int64) * every.itemsize
    with opened(tmp_path / "tokens") as descriptor:
        descriptors = np.full(len(starts), descriptor, np.int32)
        done = native.read_windows(descriptors, bytes_from, every.dtype, inputs, targets)
    whole = [start + length + 1 <= size for start in starts]
    assert done == ([*whole, False].index(False))
    for row, start in enumerate(starts[:done]):
        window = every[start : start + length + 1].astype(np.int64)
        assert np.array_equal(inputs[row], window[:-1])
        assert np.array_equal(targets[row], window[1:])
    assert (inputs[done + 1 :] == -7).all()
    assert (targets[done + 1 :] == -7).all()


def test_errors_stop_it(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "tokens")
    starts, dtype = np.zeros(2, np.int64), np.dtype(np.uint16)
    with opened(tmp_path / "tokens") as file, opened(tmp_path) as folder:
        for bad in (folder, -1):
            descriptors = np.array([file, bad], np.int32)
            assert native.read_windows(descriptors, starts, dtype, *arrays(2, 4)) == 1
        descriptors = np.array([file, file], np.int32)
        assert native.read_windows(descriptors, starts - [0, 2], dtype, *arrays(2, 4)) == 1


def test_wrong_arguments() -> None:
    descriptors, starts, dtype = np.zeros(2, np.int32), np.zeros(2, np.int64), np.dtype("u2")
    inputs, targets = arrays(2, 4)
    swapped = dtype.newbyteorder()
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "native integers", (descriptors, starts, swapped, inputs, targets)),
        (TypeError, "native integers", (descriptors, starts, np.dtype("f4"), inputs, targets)),
        (TypeError, "native integers", (descriptors, starts, np.dtype("u8"), inputs, targets)),
        (TypeError, "int64", (descriptors, starts, dtype, inputs, targets.astype("i4"))),
        (TypeError, "int32", (starts, starts, dtype, inputs, targets)),
        (ValueError, "each row", (descriptors[:1], starts, dtype, inputs, targets)),
        (ValueError, "each row", (descriptors, starts, dtype, inputs, targets[:, :3])),
        (TypeError, "contiguous", (descriptors, starts, dtype, inputs[:, ::2], targets[:, ::2])),
    ]  # fmt: skip
    for kind, says, given_ in wrong:
        with pytest.raises(kind, match=says):
            native.read_windows(*given_)
    targets.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        native.read_windows(descriptors, starts, dtype, inputs, targets)
