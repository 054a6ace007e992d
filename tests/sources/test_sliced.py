"""Arrays that are sliced: HDF5, Zarr, memory maps, and others by protocol."""

from __future__ import annotations

import os
import pickle
import types
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, stream

X = np.arange(240, dtype=np.float32).reshape(40, 2, 3)
Y = np.arange(40)


class Slices:
    """Gives arrays for slices alone, and tells which."""

    def __init__(self, array: Any) -> None:
        self.array, self.asked = array, []  # type: ignore[var-annotated]
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows: Any) -> Any:
        if not isinstance(rows, slice):
            raise TypeError("slices only")
        self.asked.append((rows.start, rows.stop))
        return self.array[rows]


def hdf5(folder: Path) -> Any:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("a/x", data=X, chunks=(7, 2, 3), compression="gzip")
        file.create_dataset("y", data=Y)
    return h5py.File(folder / "x.h5", "r")


def made(kind: str, folder: Path) -> tuple[Any, Any]:
    if kind == "hdf5":
        file = hdf5(folder)
        return file["a/x"], file["y"]
    if kind == "zarr":
        x = zarr.create_array(
            store=str(folder / "x.zarr"), data=X, chunks=(7, 2, 3), overwrite=True
        )
        return x, Y
    if kind == "memmap":
        np.save(folder / "x.npy", X)
        return np.load(folder / "x.npy", mmap_mode="r"), Y
    return Slices(X), Slices(Y)


KINDS = ["hdf5", "zarr", "memmap", "slices"]


@pytest.mark.parametrize("kind", KINDS)
@settings(few(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 50), shuffled=st.booleans(), workers=st.sampled_from([0, 2]))
def test_rows_are_those_of_the_array_in_memory(
    tmp_path: Path, kind: str, batch: int, shuffled: bool, workers: int
) -> None:
    def of(*arrays: Any) -> stoker.Pipeline:
        train = stoker.from_arrays(*arrays, seed=1)
        return (train.shuffle() if shuffled else train).batch(batch).workers(workers)

    x, y = made(kind, tmp_path)
    assert stream(of(x, y)) == stream(of(X, Y))
    assert stream(of(x)) == stream(of(X))
    single = stoker.from_arrays(x, y)
    assert [int(label) for _, label in single] == Y.tolist()
    check_resume(lambda: of(x, y), every=7)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_each_worker_process_opens_them_anew(tmp_path: Path, kind: str) -> None:
    x, y = made(kind, tmp_path)
    train = stoker.from_arrays(x, y, seed=1).shuffle().map(np.sum, on=0).batch(8)
    expected = stream(stoker.from_arrays(X, Y, seed=1).shuffle().map(np.sum, on=0).batch(8))
    assert stream(train.workers(1, kind="process")) == expected
    assert len(pickle.dumps(train.chain.source)) < 4_000  # no rows in it


def test_a_file_that_its_owner_closes_is_read_on_unless_it_has_changed(tmp_path: Path) -> None:
    with hdf5(tmp_path) as file:
        train = stoker.from_arrays(file["a/x"], file["y"]).batch(40)
    ((x, y),) = train
    assert (x == X).all()
    assert (y == Y).all()
    again = pickle.loads(pickle.dumps(train.chain.source))
    os.utime(tmp_path / "x.h5", ns=(1, 1))
    with pytest.raises(ValueError, match=r"x\.h5 has changed since the pipeline was built"):
        again.fetch([0])


def test_what_is_slow_to_seek_is_read_in_ascending_order() -> None:
    x = Slices(X)
    source: Any = stoker.from_arrays(x).chain.source
    x.asked.clear()
    rows = source.fetch([9, 3, 4, 30, 3, 5])
    assert x.asked == [(3, 6), (9, 10), (30, 31)]
    assert all((row == X[at]).all() for row, at in zip(rows, [9, 3, 4, 30, 3, 5], strict=True))


def test_rows_are_copies() -> None:
    source = Slices(X.copy())
    for row in stoker.from_arrays(source):
        row[...] = -1
    for batch in stoker.from_arrays(source).batch(8):
        batch[...] = -1
    assert (source.array == X).all()


def test_parts_of_maps_are_pickled_as_places(tmp_path: Path) -> None:
    whole = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", X.dtype, X.shape)
    whole[:] = X
    whole.flush()
    np.arange(9000, dtype=np.int16).tofile(tmp_path / "raw")
    raw = np.memmap(tmp_path / "raw", np.int16, "r", offset=8194)
    for part in (whole, whole[5:], whole[5:, 1], raw, raw[100:200], np.asarray(raw[3:9])):
        again = pickle.loads(pickle.dumps(stoker.from_arrays(part).chain.source))
        assert (np.stack(again.fetch(range(len(part)))) == part).all()


def test_what_is_refused(tmp_path: Path) -> None:
    import pandas  # type: ignore[import-untyped]

    with hdf5(tmp_path) as file:
        closed = file["y"]
    memory = h5py.File("nowhere", "w", driver="core", backing_store=False)
    writing = h5py.File(tmp_path / "w.h5", "w")
    with h5py.File(tmp_path / "nothing.h5", "w") as file:
        file["x"] = h5py.Empty("f4")
    nothing = h5py.File(tmp_path / "nothing.h5", "r")

    class Odd(Slices):
        def __getitem__(self, rows: Any) -> Any:
            return self.array

    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "HDF5 file of this dataset is closed", closed),
        (ValueError, "is not in a file of its own", memory.create_dataset("y", data=Y)),
        (ValueError, "open for writing", writing.create_dataset("y", data=Y)),
        (TypeError, "not Dataset", nothing["x"]),
        (TypeError, "not list; use np.asarray", [1, 2]),
        (
            TypeError,
            r"masked values of a MaskedArray .*\.filled",
            np.ma.masked_array([1, 2], [False, True]),
        ),
        (
            ValueError,
            r"NumPy has no torch\.bfloat16.*from_dataset.*\.view\(torch\.int16\)",
            torch.zeros(2, dtype=torch.bfloat16),
        ),
        (TypeError, "not Series", pandas.Series([1, 2])),
        (TypeError, "at least one dimension", np.array(3)),
        (TypeError, r"gives \[40, 2, 3\] for \[0:1\]", Odd(X)),
        (ValueError, r"one length, not \[40, 39\]", None),
    ]
    for kind, says, array in wrong:
        with pytest.raises(kind, match=says):
            stoker.from_arrays(*([Slices(X), Y[1:]] if array is None else [array]))
    memory.close()
    writing.close()
    nothing.close()


def test_the_ways_for_bfloat16_that_the_error_names() -> None:
    rows = torch.arange(6).reshape(3, 2).bfloat16()
    as_integers = stoker.from_arrays(rows.view(torch.int16)).batch(3).to_torch()
    for train in (
        stoker.from_dataset(rows).batch(3).to_torch(),
        as_integers.map(lambda batch: batch.view(torch.bfloat16)),
    ):
        (batch,) = train
        assert batch.dtype == torch.bfloat16
        assert torch.equal(batch, rows)


class Chunked:
    """Arrays as TensorStore has them: it tells its chunks by a layout."""

    shape, dtype = X.shape, X.dtype
    chunk_layout = types.SimpleNamespace(read_chunk=types.SimpleNamespace(shape=(5, 2, 3)))

    def __getitem__(self, rows: Any) -> Any:
        return X[rows]


class DaskLike(Slices):
    """Arrays as Dask has them: it tells each of its chunks."""

    chunks = ((5,) * 8, (2,), (3,))


@pytest.mark.parametrize("array", [Chunked(), DaskLike(X)])
def test_chunks_are_blocks_by_whatever_they_are_told(array: Any) -> None:
    blocks = stoker.from_arrays(array).chain.source.blocks  # type: ignore[attr-defined]
    assert blocks is not None
    assert (np.diff(blocks, prepend=0)[:-1] == 5).all()
