"""Hugging Face's data sets: rows by number, and streams with their own state."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import stoker
from stoker.testing import check_resume
from strategies import frozen, one_in, stream, through_json


@pytest.fixture(autouse=True)
def no_bars() -> None:
    datasets.disable_progress_bars()


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), shade, np.uint8)).save(file, "png")
    return file.getvalue()


def photographs(folder: Path, count: int = 40) -> Any:
    """Return a data set that is mapped from files."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
            "pixels": datasets.Array2D((2, 3), "float32"),
        }
    )
    rows = {
        "image": [{"bytes": png(n), "path": None} for n in range(count)],
        "label": [n % 2 for n in range(count)],
        "text": [f"text {n}" for n in range(count)],
        "pixels": [np.full((2, 3), n, np.float32) for n in range(count)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    datasets.disable_progress_bars()
    return photographs(tmp_path_factory.mktemp("mapped") / "d")


def identity(pipeline: Any) -> Any:
    return pipeline.chain.source.identity()


def test_rows_are_examples_and_images_the_bytes_that_are_stored(mapped: Any) -> None:
    train = stoker.from_huggingface(mapped)
    examples = list(train)
    assert [example["image"] for example in examples] == [png(n) for n in range(40)]
    assert [int(example["label"]) for example in examples] == [n % 2 for n in range(40)]
    assert [example["text"] for example in examples] == [f"text {n}" for n in range(40)]
    assert (examples[3]["pixels"] == np.full((2, 3), 3, np.float32)).all()
    assert train.class_names == ["cat", "dog"]
    with pytest.raises(AttributeError, match=r"has 0 of the kind ClassLabel"):
        _ = stoker.from_huggingface(mapped, ["image"]).class_names
    batch = next(iter(train.map(stoker.images.decode, on="image").batch(8)))
    assert batch["image"].shape == (8, 4, 6, 3)
    assert batch["label"].dtype == np.int64
    assert batch["pixels"].shape == (8, 2, 3)


@pytest.mark.parametrize("size", one_in(3, [1, 7, 300]))
def test_rows_that_were_selected_are_gathered(tmp_path: Path, size: int) -> None:
    """From the tables in files, whose chunks are small."""
    rows: dict[str, list[Any]] = {
        "n": list(range(500)),
        "text": [None if n % 5 == 0 else f"text {n}" for n in range(500)],
        "ids": [[n, n + 1] for n in range(500)],
        "words": [[{"w": f"{n}"}] * (n % 3) for n in range(500)],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"), num_shards=3)
    whole = datasets.load_from_disk(str(tmp_path / "d"))
    chosen = whole.shuffle(seed=1).filter(lambda row: row["n"] % 3 > 0, writer_batch_size=16)
    for data in (whole, chosen, chosen.select(range(9, 200)), whole.select([3, 3, 499])):
        for columns in (["n", "text", "ids"], ["n", "words"]):
            train = stoker.from_huggingface(data, columns, seed=0).shuffle()
            found: Any = {}
            for batch in train.batch(size, collate=list):
                found |= {int(row["n"]): row for row in batch}
            assert sorted(found) == sorted(set(data["n"]))
            for n, row in found.items():
                for name in columns[1:]:
                    value = row[name].tolist() if name == "ids" else row[name]
                    assert value == rows[name][n]
        stacked = stoker.from_huggingface(data, ["n", "text", "ids"], seed=0).shuffle()
        for batch in stacked.batch(size):
            assert batch["text"] == [rows["text"][n] for n in batch["n"]]
            assert (batch["ids"] == batch["n"][:, None] + [0, 1]).all()


def test_json_is_its_value(tmp_path: Path) -> None:
    if not hasattr(datasets, "Json"):
        pytest.skip("datasets before 5 has no Json")
    calls = [{"name": "f", "given": [1, None, 2.5]}, None, "text", [True]]
    turns = [[{"role": "tool", "call": call}] for call in calls]
    kinds: Any = {"json": datasets.Json(), "n": datasets.Value("int32")}
    kinds["turns"] = datasets.List({"role": datasets.Value("string"), "call": datasets.Json()})
    rows = {"json": calls, "n": [*range(4)], "turns": turns}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "d"), num_shards=2)
    for source in (
        stoker.from_huggingface(data),
        stoker.from_huggingface(datasets.load_from_disk(str(tmp_path / "d"))),
        stoker.from_table(data.data.table),
        stoker.from_parquet(tmp_path / "a.parquet"),
    ):
        found = list(source)
        assert [row["json"] for row in found] == calls
        assert [row["turns"] for row in found] == turns


def test_what_was_done_to_a_data_set_holds(mapped: Any) -> None:
    chosen = mapped.shuffle(seed=3).filter(lambda row: row["label"] == 1).select(range(10))
    texts = [row["text"] for row in chosen.remove_columns("image")]
    assert [example["text"] for example in stoker.from_huggingface(chosen)] == texts
    formatted = mapped.with_format("numpy", columns=["label"])
    assert set(next(iter(stoker.from_huggingface(formatted)))) == {"label"}
    only = stoker.from_huggingface(mapped, ["text"])
    assert next(iter(only)) == {"text": "text 0"}
    with pytest.raises(LookupError, match="no field 'image'"):
        only.map(len, on="image")


def test_files_that_a_data_set_only_names(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    rows = [str(tmp_path / "a.png"), None, str(tmp_path / "gone.png"), "zip://a.png::b.zip"]
    named = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image())
    train = stoker.from_huggingface(named, max_errors=2)
    assert [example["image"] for example in train] == [png(1), None]
    assert train.stats().skipped_examples == 2
    with pytest.raises(stoker.StageError, match=r"b\.zip is in an archive.*from_dataset"):
        list(stoker.from_huggingface(named.select([3])))


def test_sound_is_the_bytes_that_are_stored() -> None:
    rows = [{"bytes": b"RIFF%d" % n, "path": None} for n in range(3)]
    clips: list[list[int]] = [[1], [], [2, 3]]
    stored = datasets.Dataset.from_dict({"audio": rows, "clips": clips})
    sound = stored.cast_column("audio", datasets.Audio())
    examples = list(stoker.from_huggingface(sound))
    assert [example["audio"] for example in examples] == [b"RIFF0", b"RIFF1", b"RIFF2"]
    assert [example["clips"].tolist() for example in examples] == clips


def test_resumes_anywhere_and_is_the_same_for_any_workers(mapped: Any) -> None:
    def build(workers: int = 0, kind: str = "thread") -> stoker.Pipeline:
        train = stoker.from_huggingface(mapped, ["label", "image"], seed=3).shuffle().batch(7)
        return train.workers(workers, kind=kind)

    check_resume(build)
    assert stream(build()) == stream(build(3)) == stream(build(1, "process"))


def test_identity_tells_data_sets_apart(mapped: Any) -> None:
    def told(dataset: Any) -> Any:
        return identity(stoker.from_huggingface(dataset))

    assert told(mapped) == told(mapped)
    assert len({told(mapped), told(mapped.select(range(9))), told(mapped.shuffle(1))}) == 3


def test_what_is_refused(mapped: Any) -> None:
    splits = datasets.DatasetDict({"train": mapped, "test": mapped})
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "several: 'train', 'test'", splits),
        (TypeError, "is a stream: use from_iterable", mapped.to_iterable_dataset()),
        (TypeError, "takes a datasets.Dataset; a list has no column_names", [1]),
        (ValueError, r"with_transform.*\.map\(\)", mapped.with_transform(lambda rows: rows)),
        (ValueError, "has no rows", mapped.select([])),
    ]
    for kind, says, dataset in wrong:
        with pytest.raises(kind, match=says):
            stoker.from_huggingface(dataset)
    with pytest.raises(ValueError, match="no column 'img', but image, label"):
        stoker.from_huggingface(mapped, ["img"])
    with pytest.raises(TypeError, match="list of names"):
        stoker.from_huggingface(mapped, "image")


# -- streams


def numbers(shards: int, each: int) -> Any:
    rows = {"n": list(range(shards * each))}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards)


def double(row: dict[str, int]) -> dict[str, int]:
    return {"n": 2 * row["n"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_state_resumes_before_any_batch(workers: int) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(numbers(3, 25).map(double), seed=0).batch(6).workers(workers)

    check_resume(build, every=3)
    assert "a stream with a state of its own" in str(build())


def test_a_resumed_stream_goes_on_with_whole_epochs_and_back() -> None:
    def build() -> stoker.Pipeline:
        shuffled = numbers(4, 10).shuffle(seed=1, buffer_size=1)  # the order of its shards alone
        return stoker.from_iterable(shuffled, seed=0).batch(4)

    train = build()
    epochs = [stream(train) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) > 1  # it is told the epoch
    train = build()
    list(train)
    batches = iter(train)
    head = [next(batches) for _ in range(3)]
    state = through_json(train.state_dict())
    batches.close()
    resumed = build()
    resumed.load_state_dict(state)
    assert list(map(frozen, head)) + stream(resumed) == epochs[1]
    assert stream(resumed) == epochs[2]
    resumed.set_epoch(1)
    assert stream(resumed) == epochs[1]
    resumed.load_state_dict(state)
    assert list(map(frozen, head)) + stream(resumed) == epochs[1]
