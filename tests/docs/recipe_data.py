"""What the recipes train on in tests: a little of everything, easy to tell apart."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = ("high", "low")


def _bright(label: int, draw: np.random.Generator, *shape: int) -> Any:
    """Return noise whose brightness tells its class."""
    return draw.integers(0, 120, shape, np.uint8) + np.uint8(120 * (1 - label))


def _jpeg(label: int, draw: np.random.Generator) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(_bright(label, draw, 40, 48, 3)).save(file, "jpeg")
    return file.getvalue()


def _class_folders(folder: Path, train: int, valid: int) -> Iterator[tuple[Path, int]]:
    """Make class folders; yield of each file its path, without a suffix, and its class."""
    for part, count in (("train", train), ("valid", valid)):
        for label, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                yield folder / part / name / f"{number:03}", label


def photographs(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for path, label in _class_folders(folder, 24, 6):
        path.with_suffix(".jpg").write_bytes(_jpeg(label, draw))


def tokens(folder: Path) -> None:
    """Write tokens that go round, so that each tells the next."""
    for name in ("train-000", "train-001", "valid"):
        (np.arange(2_000) % 7).astype(np.uint16).tofile(folder / f"{name}.bin")


def huggingface_images(folder: Path) -> None:
    import datasets

    draw = np.random.default_rng(0)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )

    def part(count: int) -> Any:
        labels = [number % 2 for number in range(count)]
        images = [{"bytes": _jpeg(label, draw), "path": None} for label in labels]
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features)

    _save(datasets.DatasetDict(train=part(48), test=part(12)), folder / "pets")


def huggingface_text(folder: Path) -> None:
    import datasets
    import tokenizers

    words = ["good", "fine", "bad", "poor"]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(0)
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(CLASSES))}
    )

    def part(count: int) -> Any:
        labels = [number % 2 for number in range(count)]
        texts = [
            " ".join(draw.choice(words[2 * label : 2 * label + 2], 1 + number % 9))
            for number, label in enumerate(labels)
        ]
        return datasets.Dataset.from_dict({"text": texts, "label": labels}, features)

    _save(datasets.DatasetDict(train=part(96), test=part(16)), folder / "reviews")


def _save(dataset: Any, folder: Path) -> None:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()


def parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    for part, files in (("train", 2), ("valid", 1)):
        (folder / part).mkdir()
        for number in range(files):
            category = draw.integers(0, 4, 120)
            table = pa.table(
                {
                    "features": list(draw.normal(size=(120, 4)).astype(np.float32)),
                    "category": category,
                    "clicked": category > 1,
                    "unread": ["x" * 100] * 120,
                }
            )
            pq.write_table(table, folder / part / f"{number}.parquet", row_group_size=20)


def shards(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for name, count in (("train-000", 24), ("train-001", 24), ("valid", 12)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for number in range(count):
                label = number % 2
                _add(tar, f"{name}-{number:03}.jpg", _jpeg(label, draw))
                _add(tar, f"{name}-{number:03}.cls", b"%d" % label)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def sound(folder: Path) -> None:
    """Write tones: of 2,000 samples a second, shorter and longer than what is heard at once."""
    import soundfile

    draw = np.random.default_rng(0)
    for number, (path, label) in enumerate(_class_folders(folder, 24, 6)):
        times = np.arange(300 + 50 * (number % 8)) / 2_000
        tone = np.sin(2 * np.pi * (600 - 400 * label) * times) + draw.normal(size=len(times)) / 8
        suffix = (".wav", ".flac")[number % 2]
        soundfile.write(path.with_suffix(suffix), (tone / 3).astype(np.float32), 2_000)


def video(folder: Path) -> None:
    """Write films of 5 to 14 frames."""
    import av

    draw = np.random.default_rng(0)
    for number, (path, label) in enumerate(_class_folders(folder, 12, 4)):
        with av.open(str(path.with_suffix(".mp4")), "w") as film:
            stream = film.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for _ in range(5 + number % 10):
                picture = _bright(label, draw, 32, 48, 3)
                film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            film.mux(stream.encode())
