"""Sources: folders, datasets, arrays and memory maps. (Loaders: test_loader.py.)"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from strategies import Examples, ManyExamples, few, frozen, spoil, stream


def fill(folder: Path, names: Sequence[str | bytes]) -> None:
    """Make files that hold their own path."""
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(os.fsencode(name))


def found(folder: Path, **how: Any) -> list[tuple[str, int]]:
    return [(os.fsdecode(e.image), e.label) for e in stoker.from_folder(folder, **how)]


# -- folders


def test_a_folder_gives_its_files_in_sorted_order(tmp_path: Path) -> None:
    fill(tmp_path, ["dog/2.png", "dog/10.png", "cat/b.jpg", "cat/a.JPEG", "ant/x.webp"])
    pipeline = stoker.from_folder(str(tmp_path))
    assert pipeline.class_names == ["ant", "cat", "dog"]
    assert len(pipeline) == 5
    assert found(tmp_path) == [
        ("ant/x.webp", 0), ("cat/a.JPEG", 1), ("cat/b.jpg", 1), ("dog/10.png", 2), ("dog/2.png", 2)
    ]  # fmt: skip
    first = next(iter(pipeline))
    assert first._fields == ("image", "label")
    assert isinstance(first.image, bytes)


def test_a_failure_names_an_awkward_file(tmp_path: Path) -> None:
    fill(tmp_path, [b"c/caf\xe9.png"])
    pipeline = stoker.from_folder(tmp_path).map(lambda data: 1 / 0, on="image")
    with pytest.raises(stoker.StageError) as caught:
        list(pipeline)
    assert caught.value.path == os.path.join(tmp_path, os.fsdecode(b"c/caf\xe9.png"))
    str(caught.value).encode("utf-8", "surrogateescape")


def test_hidden_files_other_files_and_files_outside_classes_are_left_out(tmp_path: Path) -> None:
    fill(
        tmp_path,
        [
            *("c/a.png", "c/.hidden.png", "c/notes.txt", "c/png", "stray.png", ".git/x.png"),
            *("c/.png", "c/.ipynb_checkpoints/a.png", "c/sub/.thumbs/b.png"),
        ],
    )
    assert found(tmp_path) == [("c/a.png", 0)]


def test_nested_and_linked_folders_belong_to_their_class(tmp_path: Path) -> None:
    fill(tmp_path / "data", ["c/z.png", "c/deep/er/a.png", "d/x.png"])
    (tmp_path / "data" / "e").symlink_to(tmp_path / "data" / "d")
    # One that leads into itself multiplies nothing.
    (tmp_path / "data" / "c" / "again").symlink_to(tmp_path / "data" / "c")
    assert found(tmp_path / "data") == [
        ("c/deep/er/a.png", 0), ("c/z.png", 0), ("d/x.png", 1), ("d/x.png", 2)
    ]  # fmt: skip


def test_a_folder_without_images_is_no_class_unless_given(tmp_path: Path) -> None:
    fill(tmp_path, ["b/1.png", "__MACOSX/b/._1.png", ".ipynb_checkpoints/1.png", "notes/1.txt"])
    (tmp_path / "a").mkdir()
    with pytest.warns(UserWarning, match=r"'__MACOSX' and 2 more has no images .*give classes="):
        train = stoker.from_folder(tmp_path)
    assert train.class_names == ["b"]
    assert list(train) == [(b"b/1.png", 0)]
    valid = stoker.from_folder(tmp_path, classes=["a", "b"])
    assert valid.class_names == ["a", "b"]
    assert list(valid) == [(b"b/1.png", 1)]


def test_what_is_no_folder_of_classes_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stoker.from_folder(str(tmp_path / "nowhere"))
    fill(tmp_path, ["x.png"])
    with pytest.raises(NotADirectoryError):
        stoker.from_folder(str(tmp_path / "x.png"))
    with pytest.raises(ValueError, match=r"no sub-folders.*train/cat/0001\.jpg") as caught:
        stoker.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    fill(tmp_path, ["a/readme.txt"])
    with pytest.raises(ValueError, match=r"no images.*looked for \.") as caught:
        stoker.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_a_file_that_vanished_is_named(tmp_path: Path, workers: int, kind: str) -> None:
    fill(tmp_path, [f"c/{n}.png" for n in range(8)])
    pipeline = stoker.from_folder(tmp_path).echo(2).batch(4).workers(workers, kind=kind)
    (tmp_path / "c" / "5.png").unlink()
    with pytest.raises(stoker.StageError, match=r"example 5 \(.*5\.png\)") as caught:
        list(pipeline)
    assert (caught.value.index, caught.value.path) == (5, str(tmp_path / "c" / "5.png"))
    assert isinstance(caught.value.__cause__, FileNotFoundError)


# -- datasets


class Recording(ManyExamples):
    """Remembers how it was asked."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(indices)
        return super().__getitems__(indices)


def test_many_are_asked_for_with_plain_integers_each_once() -> None:
    data = Recording(50)
    list(stoker.from_dataset(data, seed=0).shuffle().batch(8).workers(0))
    asked = [i for indices in data.asked for i in indices]
    assert sorted(asked) == list(range(50))
    assert all(type(i) is int for i in asked)
    assert len(data.asked) < 50


def test_single_items_are_asked_for_with_plain_integers() -> None:
    class Strict(Examples):
        def __getitem__(self, index: int) -> Any:
            assert type(index) is int
            return index

    for workers in (0, 2):
        found = list(stoker.from_dataset(Strict(9), seed=0).shuffle().workers(workers))
        assert sorted(found) == list(range(9))


@pytest.mark.parametrize("answers", [0, 2])
def test_getitems_that_gives_too_few_or_too_many_is_refused(answers: int) -> None:
    class Wrong(Examples):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [0] * answers * len(indices)

    with pytest.raises(stoker.StageError, match="__getitems__ gave"):
        list(stoker.from_dataset(Wrong(4)).batch(4))


def test_getitems_that_is_none_is_not_used() -> None:
    class Without(Examples):
        __getitems__ = None

    assert len(stream(stoker.from_dataset(Without(4)))) == 4


class _Doubled(ManyExamples):
    """Overrides what gives one example, and inherits what gives many."""

    def __getitem__(self, index: int) -> Any:
        return 2 * index


class _Wrapper:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return 2 * index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)


@pytest.mark.parametrize("kind", ["inherited", "forwarded", "in a subset", "many of one's own"])
@pytest.mark.parametrize("cached", [False, True])
def test_getitems_that_passes_over_getitem_is_not_used(kind: str, cached: bool) -> None:
    from torch.utils.data import Subset

    of: Any = _Doubled
    data: Any = {
        "inherited": _Doubled,
        "forwarded": lambda length: _Wrapper(ManyExamples(length)),
        "in a subset": lambda length: Subset(of(length), range(length)),
        "many of one's own": lambda length: _DoubledMany(length),
    }[kind](8)
    if cached:
        data = stoker.cached(data, "1MiB")
        assert data.__getitems__([3, 4]) == [data[3], data[4]] == [6, 8]
    else:
        assert list(stoker.from_dataset(data).workers(0)) == [2 * index for index in range(8)]


class _DoubledMany(_Doubled):
    def __getitems__(self, indices: list[int]) -> Any:
        return [2 * index for index in indices]


def test_torch_subsets_and_tensor_datasets_fit() -> None:
    import torch
    from torch.utils.data import Subset, TensorDataset

    data = TensorDataset(torch.arange(10), torch.arange(20.0).reshape(10, 2))
    (batch,) = stoker.from_dataset(Subset(data, [3, 5, 7])).batch(4).workers(0)
    assert type(batch) is tuple
    assert batch[0].tolist() == [3, 5, 7]
    assert batch[1].tolist() == [[6, 7], [10, 11], [14, 15]]


def test_dicts_are_asked_by_number_or_refused_and_streams_are_refused() -> None:
    from torch.utils.data import IterableDataset

    assert list(stoker.from_dataset({0: "a", 1: "b"})) == ["a", "b"]
    with pytest.raises(TypeError, match=r"dict has the keys 'train', 'test': give one of its"):
        stoker.from_dataset({"train": [1, 2], "test": [3]})

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(TypeError, match="__len__"):
        stoker.from_dataset(Stream())


# -- arrays


dtypes = st.sampled_from(["u1", "i4", "f4", "f8", ">i2", "c8", "?", "M8[s]"])


@given(st.lists(dtypes, min_size=1, max_size=3), st.integers(0, 20), st.integers(1, 6), st.data())
def test_batches_are_rows_of_the_arrays(
    kinds: list[str], length: int, size: int, data: st.DataObject
) -> None:
    shapes = [data.draw(st.sampled_from([(), (2,), (0,), (2, 3)])) for _ in kinds]
    arrays = []
    for kind, shape in zip(kinds, shapes, strict=True):
        count = length * int(np.prod(shape, dtype=int))
        arrays.append((np.arange(count) % 100).astype(kind).reshape(length, *shape))
    pipeline = stoker.from_arrays(*arrays, seed=1).shuffle().batch(size).workers(0)
    order = [int(i) for b in stoker.from_arrays(np.arange(length), seed=1).shuffle().batch(9)
             for i in b]  # fmt: skip
    for number, batch in enumerate(pipeline):
        rows = order[number * size : (number + 1) * size]
        parts = batch if len(arrays) > 1 else (batch,)
        assert frozen(tuple(parts)) == frozen(tuple(array[rows] for array in arrays))
    assert pipeline.stats().batches == -(-length // size)


@given(dtypes, st.integers(1, 20), st.integers(1, 6))
def test_rows_that_pass_a_map_are_the_same_batches(kind: str, length: int, size: int) -> None:
    array = (np.arange(length * 2) * 7 % 1000).astype(kind).reshape(length, 2)
    flat = np.ascontiguousarray(array[:, 0])
    gathered = stoker.from_arrays(array, seed=1).shuffle().batch(size).workers(0)
    mapped = stoker.from_arrays(array, seed=1).shuffle().map(lambda x: x).batch(size).workers(0)
    assert stream(mapped) == stream(gathered)
    flat = flat.astype(flat.dtype.newbyteorder("="))  # NumPy scalars know no other order
    gathered = stoker.from_arrays(flat, seed=1).batch(size).workers(0)
    mapped = stoker.from_arrays(flat, seed=1).map(lambda x: x).batch(size).workers(0)
    assert stream(mapped) == stream(gathered)


def test_arrays_of_strings_become_lists_whole_strings_kept() -> None:
    names = np.array(["a", "abc", "", "ab"])
    for pipeline in (
        stoker.from_arrays(names, np.arange(4)),
        stoker.from_arrays(names, np.arange(4)).map(lambda x: x),
        stoker.from_arrays(names, np.arange(4)).echo(2),
    ):
        found = [name for batch in pipeline.batch(3).workers(0) for name in batch[0]]
        assert set(found) == {"a", "abc", "", "ab"}


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memory_map_is_never_written_to(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(60.0).reshape(20, 3))
    before = path.read_bytes()
    rows = np.load(path, mmap_mode=mode)
    for chain in (
        stoker.from_arrays(rows, seed=0),
        stoker.from_arrays(rows, rows[:, 0], seed=0).echo(2),
        stoker.from_arrays(rows, seed=0).map(_spoilt),
        stoker.from_arrays(rows, seed=0).map(_spoilt).echo(2),
        stoker.from_arrays(rows, seed=0).echo(2).map(_spoilt),
        stoker.from_arrays(rows, seed=0)
        .echo(2)
        .random_map(stoker.thread_safe(lambda x, rng: _spoilt(x))),
    ):
        again = chain.batch(1) if chain.chain.echo is not None else chain.batch(1).echo(2)
        for pipeline in (chain.workers(0), chain.batch(4).workers(2), again):
            for batch in pipeline:
                spoil(batch)
    if mode == "r+":
        rows.flush()
    assert path.read_bytes() == before
    assert np.array_equal(rows, np.arange(60.0).reshape(20, 3))


@stoker.thread_safe
def _spoilt(x: Any) -> Any:
    spoil(x)
    return x


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda plain: plain,
    "F": np.asfortranarray,
    "every other": lambda plain: plain[::2],
    "every other column": lambda plain: plain[:, :, ::2],
    "one column": lambda plain: plain[:, 1, 1],
    "backwards": lambda plain: plain[::-1],
    "windows": lambda plain: np.lib.stride_tricks.sliding_window_view(
        np.r_[plain.ravel(), plain[0].ravel()], plain[0].size
    ),
    "the same": lambda plain: np.broadcast_to(plain[0], plain.shape),
    "big-endian": lambda plain: plain.astype(">f4")[::3],
    "no bytes": lambda plain: plain[::2, :0],
    "read-only": lambda plain: np.frombuffer(plain.tobytes(), plain.dtype).reshape(plain.shape),
}


@few(20)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 12),
    st.sampled_from([3, 40]),
    st.sampled_from([0, 2]),
)
def test_any_memory_layout_is_read(layout: str, length: int, width: int, workers: int) -> None:
    count = 2 * length * 2 * width
    array = LAYOUTS[layout](np.arange(count, dtype=np.float32).reshape(2 * length, 2, width))
    pipeline = stoker.from_arrays(array).batch(3).workers(workers)
    for _ in range(2):
        batches = list(pipeline)
        assert np.array_equal(np.concatenate([array[:0], *batches]), array)
        for batch in batches:
            assert batch.dtype == array.dtype
            assert batch.flags.writeable
            assert batch.flags.c_contiguous
            batch.fill(0)
    examples = list(stoker.from_arrays(array))
    assert len(examples) == len(array)
    assert all(np.array_equal(a, b) for a, b in zip(examples, array, strict=True))


# -- folders of other files, and classes that are given


def test_files_of_other_kinds(tmp_path: Path) -> None:
    fill(tmp_path, ["bark/1.WAV", "bark/2.flac", "meow/a.b.wav", "meow/x.png", "meow/wav"])
    sound = stoker.from_folder(tmp_path, extensions=["wav", ".flac"])
    assert [(os.fsdecode(e.data), e.label) for e in sound] == [
        ("bark/1.WAV", 0), ("bark/2.flac", 0), ("meow/a.b.wav", 1)
    ]  # fmt: skip
    assert next(iter(sound))._fields == ("data", "label")
    with pytest.raises(LookupError, match="no field 'image'"):
        sound.map(len, on="image")
    with pytest.raises(ValueError, match=r"no such files in its 2 sub-folders \(looked for .mp3\)"):
        stoker.from_folder(tmp_path, extensions=[".mp3"])


def test_files_of_other_kinds_do_not_meet_images_in_a_cache(tmp_path: Path) -> None:
    fill(tmp_path / "data", ["a/1.png"])
    hows: dict[str, dict[str, Any]] = {"image": {}, "data": {"extensions": ["png"]}}
    for kind, how in hows.items():
        cached = stoker.from_folder(tmp_path / "data", **how).cache("1MiB", path=tmp_path / "c")
        for _ in range(2):
            assert [e._fields[0] for e in cached] == [kind]


def test_a_folder_that_lacks_classes_keeps_the_numbers_it_is_given(tmp_path: Path) -> None:
    fill(tmp_path / "train", ["ant/1.png", "bee/1.png", "cat/1.png"])
    fill(tmp_path / "valid", ["bee/1.png", "cat/2.png"])
    train = stoker.from_folder(tmp_path / "train")
    valid = stoker.from_folder(tmp_path / "valid", classes=train.class_names)
    assert [label for _, label in valid] == [1, 2]
    assert valid.class_names == ["ant", "bee", "cat"]
    turned = stoker.from_folder(tmp_path / "train", classes=["cat", "bee", "ant"])
    assert [label for _, label in turned] == [2, 1, 0]
    fill(tmp_path / "valid", ["dog/1.png", "elk/2.png"])
    says = "valid has a folder 'dog' and 1 more, which is none of the 3 classes"
    with pytest.raises(ValueError, match=says):
        stoker.from_folder(tmp_path / "valid", classes=train.class_names)


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ({"extensions": ".wav"}, TypeError, "extensions must be a list"),
        ({"extensions": [1]}, TypeError, "1 is in it"),
        ({"extensions": []}, ValueError, "extensions must be a list"),
        ({"extensions": ["."]}, ValueError, "one without a letter"),
        ({"classes": "cat"}, TypeError, "classes must be a list"),
        ({"classes": []}, ValueError, "classes must be a list"),
        ({"classes": ["a", "b", "a"]}, ValueError, "'a' twice"),
    ],
)
def test_wrong_extensions_and_classes(
    tmp_path: Path, how: dict[str, Any], kind: type[Exception], says: str
) -> None:
    fill(tmp_path, ["a/1.png"])
    with pytest.raises(kind, match=says):
        stoker.from_folder(tmp_path, **how)
