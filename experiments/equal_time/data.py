"""The data: packed into a few small files, and unpacked into arrays where trainings run."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PACKED = ("fashion", "cifar", "words", "digits", "friedman")
_SUFFIX = ".npz.xz"
_FASHION_TRAIN = 48_000  # so that all files together are below 40 MiB
_VALIDATION = 2_000
_CIFAR_TEST = 5_000
_DIGITS_TRAIN, _DIGITS_VALIDATION = 1_024, 300
_FRIEDMAN_TRAIN, _FRIEDMAN_TEST = 16_384, 10_000
_DECODED_AT_ONCE = 2_000
_VOCABULARY, _WINDOW = 1_024, 32

Arrays = dict[str, Any]


def pack(folder: Path, packed: Path) -> None:
    """Write the packed files, of a folder with these.

    - `fashion-mnist`: the four `.gz` files of https://github.com/zalandoresearch/fashion-mnist;
    - `cifar10-jpg.tar.xz`: images of https://www.cs.toronto.edu/~kriz/cifar.html as JPEG files,
      `train/CLASS/NUMBER.jpg` and `test/CLASS/NUMBER.jpg`;
    - `wikitext-2`: the texts of https://huggingface.co/datasets/Salesforce/wikitext,
      `train.block-shuffled.txt`, whose articles are in any order, and `test.txt`.
    """
    packed.mkdir(parents=True, exist_ok=True)
    makers = {"fashion": fashion, "cifar": _cifar, "words": words}
    for name in PACKED:
        arrays = makers[name](folder) if name in makers else made_up(name)
        content = io.BytesIO()
        np.savez(content, **arrays)
        (packed / f"{name}{_SUFFIX}").write_bytes(lzma.compress(content.getvalue(), preset=6))


def pack_made_up(packed: Path, count: int = 640) -> None:
    """Write packed files of the same form with little in them, to find errors."""
    packed.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=count)
    grey = rng.integers(0, 90, (count, 1, 28, 28), dtype=np.uint8)
    grey[np.arange(count), 0, 4 + 2 * labels] += 120
    colour = rng.integers(0, 90, (count, 3, 32, 32), dtype=np.uint8)
    colour[np.arange(count), :, 4 + 2 * labels] += 120
    words = np.tile(rng.integers(100, size=128), count // 2).astype(np.int16).reshape(-1, 64)
    found = {
        "fashion": _parts(grey, labels, count - 256, 128),
        "cifar": _parts(colour, labels, count - 256, 128),
        "words": {
            "train-x": words[:-256],
            "validation-x": words[-256:-128],
            "test-x": words[-128:],
        },
    }
    for name in PACKED:
        content = io.BytesIO()
        np.savez(content, **found.get(name) or made_up(name))
        (packed / f"{name}{_SUFFIX}").write_bytes(lzma.compress(content.getvalue(), preset=0))


def unpack(packed: Path, folder: Path) -> None:
    """Write arrays `TASK-PART-NAME.npy`."""
    with ProcessPoolExecutor() as pool:
        for job in [pool.submit(_unpack, packed, folder, name) for name in PACKED]:
            job.result()
        for part in ("train", "validation", "test"):
            _decode(folder, part, pool)


def _unpack(packed: Path, folder: Path, name: str) -> None:
    content = lzma.decompress((packed / f"{name}{_SUFFIX}").read_bytes())
    with np.load(io.BytesIO(content)) as arrays:
        for key in arrays.files:
            np.save(folder / f"{name}-{key}.npy", arrays[key])


def _decode(folder: Path, part: str, pool: ProcessPoolExecutor) -> None:
    """Decode the images of a part, if they are packed as JPEG files."""
    files = folder / f"cifar-{part}-files.npy"
    if not files.exists():
        return
    content, ends = np.load(files), np.load(folder / f"cifar-{part}-ends.npy")
    starts = np.concatenate([[0], ends[:-1]])
    jobs = []
    for first in range(0, len(ends), _DECODED_AT_ONCE):
        last = min(len(ends), first + _DECODED_AT_ONCE)
        some = content[starts[first] : ends[last - 1]].tobytes()
        jobs.append(pool.submit(_decoded, some, (ends[first:last] - starts[first]).tolist()))
    np.save(folder / f"cifar-{part}-x.npy", np.concatenate([job.result() for job in jobs]))
    for name in ("files", "ends"):
        (folder / f"cifar-{part}-{name}.npy").unlink()


def _decoded(content: bytes, ends: list[int]) -> Any:
    """Return images uint8 [n, 3, height, width]."""
    from PIL import Image

    images = [
        np.asarray(Image.open(io.BytesIO(content[start:end])).convert("RGB"))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def _parts(x: Any, y: Any, train: int, validation: int) -> Arrays:
    """Part examples; what is behind the validation part is for tests."""
    at = {
        "train": slice(0, train),
        "validation": slice(train, train + validation),
        "test": slice(train + validation, None),
    }
    return {
        f"{part}-{key}": values[where]
        for part, where in at.items()
        for key, values in (("x", x), ("y", np.asarray(y)))
    }


def fashion(folder: Path) -> Arrays:
    """Return the arrays of Fashion-MNIST, of the folder that `pack` describes."""

    def read(split: str) -> tuple[Any, Any]:
        """Return images uint8 [n, 28, 28] and labels int64 [n]."""
        of = folder / "fashion-mnist" / split
        with gzip.open(f"{of}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(f"{of}-labels-idx1-ubyte.gz") as file:
            return images, np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)

    (train, labels), (test, test_labels) = read("train"), read("t10k")
    x = np.concatenate([train[:_FASHION_TRAIN], test])[:, None]
    y = np.concatenate([labels[:_FASHION_TRAIN], test_labels])
    return _parts(x, y, _FASHION_TRAIN - _VALIDATION, _VALIDATION)


def _cifar(folder: Path) -> Arrays:
    parted: dict[str, list[tuple[bytes, int]]] = {"train": [], "test": []}
    classes: dict[str, int] = {}
    with tarfile.open(folder / "cifar10-jpg.tar.xz") as tar:
        found_files = {
            member.name.removeprefix("./"): file.read()
            for member in tar
            if (file := tar.extractfile(member)) is not None
        }
    for name in sorted(found_files):
        if name.endswith(".jpg"):
            split, kind, _ = name.split("/")
            label = classes.setdefault(kind, len(classes))
            parted[split].append((found_files[name], label))
    train, test = parted["train"], parted["test"]
    order = np.random.default_rng(0).permutation(len(train)).tolist()
    some = np.random.default_rng(1).permutation(len(test))[:_CIFAR_TEST].tolist()
    parts = {
        "train": [train[i] for i in order[_VALIDATION:]],
        "validation": [train[i] for i in order[:_VALIDATION]],
        "test": [test[i] for i in some],
    }
    found: Arrays = {}
    for part, examples in parts.items():
        files, labels = zip(*examples, strict=True)
        found[f"{part}-files"] = np.frombuffer(b"".join(files), np.uint8)
        found[f"{part}-ends"] = np.cumsum([len(file) for file in files])
        found[f"{part}-y"] = np.asarray(labels)
    return found


def words(folder: Path) -> Arrays:
    """Number the most frequent words from 1; all others are 0."""
    split = [
        (folder / "wikitext-2" / name).read_text(encoding="utf-8").replace("\n", " <eos> ").split()
        for name in ("train.block-shuffled.txt", "test.txt")
    ]
    frequent = Counter(split[0]).most_common(_VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    train, test = (
        np.fromiter((numbers.get(word, 0) for word in words), np.int16, len(words))
        for words in split
    )
    length = 2 * _WINDOW

    def pieces(text: Any) -> Any:
        return text[: len(text) // length * length].reshape(-1, length)

    held_out = len(train) // 20
    return {
        "train-x": pieces(train[:-held_out]),
        "validation-x": pieces(train[-held_out:])[:512],
        "test-x": pieces(test)[:2_048],
    }


def made_up(name: str) -> Arrays:
    """Return the parts of a table: digits that scikit-learn has, or Friedman's function."""
    rng = np.random.default_rng(0)
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        order = rng.permutation(len(x))
        x = ((x[order] - 4.88) / 6.02).astype(np.float32)
        return _parts(x, y[order].astype(np.int64), _DIGITS_TRAIN, _DIGITS_VALIDATION)
    count = _FRIEDMAN_TRAIN + _VALIDATION + _FRIEDMAN_TEST
    x = rng.random((count, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=count)
    told = ((y - 14.4) / 5).astype(np.float32)
    inputs = ((x - 0.5) * 12**0.5).astype(np.float32)
    return _parts(inputs, told, _FRIEDMAN_TRAIN, _VALIDATION)
