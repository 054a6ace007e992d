"""Windows over files of tokens."""

from __future__ import annotations

import gzip
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from backends import backend  # noqa: F401 - for every test here
from descriptors import open_descriptors
from stoker.images import native
from stoker.sources.patterns import expand_braces
from stoker.testing import check_resume
from strategies import few, stream


def write(folder: Path, *files: Any, dtype: str = "uint16") -> list[str]:
    """Make raw files of tokens."""
    paths = [folder / f"{number}.bin" for number in range(len(files))]
    for path, tokens in zip(paths, files, strict=True):
        np.asarray(tokens, dtype).tofile(path)
    return list(map(str, paths))


def windows(tokens: list[int], length: int, stride: int) -> list[list[int]]:
    """Cut windows of ``length + 1`` tokens, the slow way."""
    starts = range(0, len(tokens), stride)
    return [tokens[s : s + length + 1] for s in starts if s + length + 1 <= len(tokens)]


same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", ">u2", ">i4", ">i8"]


@same_folder
@given(
    files=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), min_size=1, max_size=4),
    length=st.integers(1, 12),
    stride=st.none() | st.integers(1, 15),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4) | st.sampled_from(DTYPES),
    batch=st.integers(1, 12),
)
def test_windows_are_those_of_each_file(
    tmp_path: Path,
    files: list[list[int]],
    length: int,
    stride: int | None,
    dtypes: list[str] | str,
    batch: int,
) -> None:
    each = [dtypes] * len(files) if isinstance(dtypes, str) else dtypes
    held = [np.array(f, np.int64).astype(dtype) for f, dtype in zip(files, each, strict=False)]
    paths = [str(tmp_path / f"{number}.npy") for number in range(len(held))]
    kind = None
    if isinstance(dtypes, str):
        kind, paths = dtypes, write(tmp_path, *held, dtype=dtypes)
    else:
        for path, tokens in zip(paths, held, strict=True):
            np.save(path, tokens)
    expected = [w for tokens in held for w in windows(tokens.tolist(), length, stride or length)]
    if not expected:
        with pytest.raises(ValueError, match="longest"):
            stoker.from_tokens(paths, length, stride, kind)
        return
    train = stoker.from_tokens(paths, length, stride, kind)
    assert len(train) == len(expected)
    found = list(train)
    assert [[*w.inputs.tolist(), int(w.targets[-1])] for w in found] == expected
    assert all((w.inputs[1:] == w.targets[:-1]).all() for w in found)
    assert {array.dtype for w in found for array in w} == {np.dtype(np.int64)}
    batches = list(train.batch(batch))
    assert np.concatenate([b.inputs for b in batches]).tolist() == [w[:-1] for w in expected]
    assert np.concatenate([b.targets for b in batches]).tolist() == [w[1:] for w in expected]


@same_folder
@given(tokens=st.lists(st.integers(0, 3), min_size=8, max_size=60), batch=st.integers(1, 5))
def test_documents_are_numbered_and_no_target_crosses_their_borders(
    tmp_path: Path, tokens: list[int], batch: int
) -> None:
    (path,) = write(tmp_path, tokens)
    plain = stoker.from_tokens(path, 5, dtype="uint16")
    marked = stoker.from_tokens(path, 5, dtype="uint16", separator=0)
    for expected, found in zip(plain.batch(batch), marked.batch(batch), strict=True):
        assert (found.inputs == expected.inputs).all()
        ends = found.inputs == 0
        assert (found.targets == np.where(ends, -100, expected.targets)).all()
        for row, documents in zip(found.inputs.tolist(), found.documents.tolist(), strict=True):
            assert documents == [row[:at].count(0) for at in range(len(row))]


@settings(few(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(30, 200), batch=st.integers(1, 9), separator=st.none() | st.just(3))
def test_resumes_anywhere_and_is_the_same_for_any_workers(
    tmp_path: Path, count: int, batch: int, separator: Any
) -> None:
    paths = write(tmp_path, np.arange(count) % 7, np.arange(count // 2))

    def build(workers: int = 0) -> stoker.Pipeline:
        source = stoker.from_tokens(paths, 4, 3, "uint16", separator=separator, seed=1)
        return source.shuffle().batch(batch).workers(workers)

    check_resume(build, every=3)
    assert stream(build(0)) == stream(build(3))


@pytest.mark.full
@settings(few(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtypes=st.lists(st.sampled_from(["uint16", "int32"]), min_size=3, max_size=3),
    strides=st.lists(st.sampled_from([3, 4]), min_size=3, max_size=3),
    separator=st.none() | st.just(3),
    workers=st.sampled_from([0, 2]),
)
def test_a_mixture_of_files_gives_the_windows_of_each(
    tmp_path: Path, dtypes: list[str], strides: list[int], separator: Any, workers: int
) -> None:
    """Read together, where they are of one form, or each by itself."""
    held = [np.arange(200 * n, 200 * n + 150) % 601 for n in range(3)]
    parts = []
    for number, (tokens, dtype, stride) in enumerate(zip(held, dtypes, strides, strict=True)):
        path = tmp_path / f"part-{number}.bin"
        tokens.astype(dtype).tofile(path)
        parts.append(
            stoker.from_tokens(path, 4, stride, dtype, separator=separator, seed=number).shuffle()
        )
    mixed = stoker.mix(parts, weights=(1, 2, 3), seed=5)
    batches = mixed.batch(7).workers(workers)
    by_windows = mixed.map(type(next(iter(mixed)))._make).batch(7)
    assert stream(batches) == stream(by_windows)
    assert {len(batch.inputs) for batch in itertools.islice(batches, 3)} == {7}


def test_process_workers_open_the_files_themselves(tmp_path: Path) -> None:
    paths = write(tmp_path, np.arange(100), np.arange(100, 200))

    def build() -> stoker.Pipeline:
        source = stoker.from_tokens(paths, 5, dtype="uint16", seed=0).shuffle()
        return source.map(np.negative, on="inputs").batch(4)

    assert stream(build().workers(1, kind="process")) == stream(build().workers(0))


def test_a_cache_knows_windows_again(tmp_path: Path) -> None:
    paths = write(tmp_path, np.arange(64))
    train = stoker.from_tokens(paths, 8, dtype="uint16", seed=0).cache("2MiB").batch(2)
    first, second = stream(train), stream(train)
    assert first == second
    cache = train.stats().cache
    assert cache is not None
    assert cache.hits == len(train) * 2 - 1


def test_many_files_take_few_descriptors(tmp_path: Path) -> None:
    paths = write(tmp_path, *itertools.repeat(np.arange(5), 400))
    before = open_descriptors()
    train = stoker.from_tokens(paths, 4, dtype="uint16", seed=0).shuffle().workers(2)
    for _ in train:
        assert len(open_descriptors() - before) < 300
    del train, _
    assert open_descriptors() <= before


def test_a_state_of_other_windows_is_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, np.arange(100))
    state = stoker.from_tokens(path, 9, 10, "uint16", seed=0).batch(2).state_dict()
    other = stoker.from_tokens(path, 10, 10, "uint16", seed=0).batch(2)
    with pytest.raises(stoker.StateError, match="windows of 9 tokens"):
        other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batched", [True, False])
def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path, workers: int, batched: bool) -> None:
    (path,) = write(tmp_path, np.arange(5_000))
    train = stoker.from_tokens(path, 4, dtype="uint16").workers(workers)
    train = train.batch(4) if batched else train
    with iter(train) as batches:
        next(batches)
        os.truncate(path, 16)
        with pytest.raises((ValueError, stoker.StageError), match=r"0\.bin.* has changed"):
            list(batches)


def test_where_the_library_stops_numpy_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path, np.arange(50), np.arange(50, 100))

    class Reads:
        """The library, where the second half of the windows cannot be read."""

        @staticmethod
        def read_windows(files: Any, starts: Any, dtype: Any, inputs: Any, targets: Any) -> int:
            inputs[:], targets[:] = -1, -1
            for row in range(len(starts) // 2):
                window = np.frombuffer(os.pread(files[row], 5 * dtype.itemsize, starts[row]), dtype)
                inputs[row], targets[row] = window[:-1], window[1:]
            return len(starts) // 2

    train = stoker.from_tokens(paths, 4, dtype="uint16")
    expected = stream(train)
    monkeypatch.setattr(native, "library", lambda: Reads)
    assert stream(stoker.from_tokens(paths, 4, dtype="uint16")) == expected
    (path, _) = paths
    batches = iter(stoker.from_tokens(path, 4, dtype="uint16").batch(4).workers(0))
    next(batches)
    Path(path).write_bytes(b"")
    with pytest.raises(stoker.StageError, match=r"0\.bin.* has changed"):
        list(batches)


def test_wrong_arguments(tmp_path: Path) -> None:
    (path,) = write(tmp_path, np.arange(10))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int64))
    np.save(tmp_path / "floats.npy", np.zeros(9))
    (tmp_path / "broken.npy").write_bytes(b"")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "dtype='uint16'", (path, 2)),
        (TypeError, "whole number of tokens", (path, 2.5, 1, "u2")),
        (ValueError, "at least 1", (path, 0, None, "u2")),
        (ValueError, "at least 1", (path, 2, 0, "u2")),
        (ValueError, r"length \+ 1.*has 10", (path, 10, None, "u2")),
        (ValueError, r"odd\.bin is truncated, or", (tmp_path / "odd.bin", 1, None, "u2")),
        (ValueError, r"shape is \[2, 2\]", (tmp_path / "square.npy", 1)),
        (ValueError, "leave dtype out", (tmp_path / "row.npy", 1, None, "u2")),
        (TypeError, "float64", (tmp_path / "floats.npy", 1)),
        (TypeError, "float32", (path, 1, None, "f4")),
        (ValueError, "is not an array of tokens", (tmp_path / "broken.npy", 1)),
        (FileNotFoundError, "nowhere", (tmp_path / "nowhere*.bin", 1, None, "u2")),
        (ValueError, "at least one file", ([], 1, None, "u2")),
        (TypeError, "takes paths", ([3], 1, None, "u2")),
    ]  # fmt: skip
    np.save(tmp_path / "row.npy", np.zeros(9, np.int64))
    for kind, says, given_ in wrong:
        with pytest.raises(kind, match=says):
            stoker.from_tokens(*given_)
    with pytest.raises(TypeError, match="separator"):
        stoker.from_tokens(path, 2, dtype="u2", separator="x")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a{1..3}.bin", ["a1.bin", "a2.bin", "a3.bin"]),
        ("a{09..10}.bin", ["a09.bin", "a10.bin"]),
        ("{b,a}{2..1}.bin", ["b2.bin", "b1.bin", "a2.bin", "a1.bin"]),
        ("{b,a1}.bin", ["b.bin", "a1.bin"]),
        ("{a,b}{1..2}.bin", ["a1.bin", "a2.bin", "b1.bin", "b2.bin"]),
        ("b*.bin", ["b.bin", "b1.bin", "b2.bin"]),
    ],
)  # fmt: skip
def test_braces_and_globs(tmp_path: Path, pattern: str, names: list[str]) -> None:
    every = ["a09", "a1", "a10", "a2", "a3", "b", "b1", "b2"]
    for number, name in enumerate(every):
        np.full(2, number, np.uint16).tofile(tmp_path / f"{name}.bin")
    found = stoker.from_tokens(tmp_path / pattern, 1, dtype="uint16")
    assert [every[int(w.inputs[0])] + ".bin" for w in found] == names


def test_braces_expand_as_in_a_shell() -> None:
    """One number with zeros in front sets the width of all."""
    for inside in ("{0..11}", "{00..11}", "{9..011}", "{11..0}", "{0..0}"):
        shell = subprocess.run(["bash", "-c", f"echo x{inside}"], capture_output=True, check=True)
        assert [*expand_braces(f"x{inside}")] == shell.stdout.decode().split()


def test_nothing_behind_an_array_is_tokens(tmp_path: Path) -> None:
    with open(tmp_path / "two.npy", "wb") as file:
        for start in (0, 100):
            np.save(file, np.arange(start, start + 20))
    windows = list(stoker.from_tokens(tmp_path / "two.npy", 9))
    assert [[*map(int, each.inputs)] for each in windows] == [[*range(9)], [*range(9, 18)]]


def test_a_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    named = tmp_path / "tokens.npy"
    np.save(named, np.arange(50, dtype=np.uint16))
    file = named.rename(tmp_path / "tokens.bin")
    for dtype in (None, "uint16"):
        first = next(iter(stoker.from_tokens(file, 8, dtype=dtype)))
        assert first.inputs.tolist() == [*range(8)]
    with pytest.raises(ValueError, match="holds uint16, not int32: leave dtype out"):
        stoker.from_tokens(file, 8, dtype="int32")
    np.savez(tmp_path / "zip", tokens=np.arange(50))
    (tmp_path / "packed.bin").write_bytes(gzip.compress(bytes(range(100))))
    for name, says in (("zip.npz", "is a zip archive"), ("packed.bin", "is compressed .gzip")):
        with pytest.raises(ValueError, match=says):
            stoker.from_tokens(tmp_path / name, 8, dtype="uint8")
