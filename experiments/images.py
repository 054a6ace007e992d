"""The images of an experiment: the composed digits, or a user's own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import stoker
from experiments.digits import CLASSES, DigitSpec, write_digits
from experiments.settings import Settings

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

_TEST_SHARE = 0.2
_FEWEST_A_CLASS = 5
_FEWEST_TRAIN_BATCHES = 16
_REPORT_EVERY = 64

Progress = Callable[[int, int], None]
"""Called as `progress(images done, images in all)`."""


@dataclass(frozen=True)
class ImageSet:
    """Training and test images of one experiment, disjoint; each in order of class."""

    name: str
    """What they are, for people."""
    classes: tuple[str, ...]
    train_paths: Sequence[str]
    train_labels: Sequence[int]
    train_images: NDArray[np.uint8]
    """The same images decoded, [images, height, width, 3]: the in-memory copy."""
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    decode: Callable[[bytes], NDArray[np.uint8]]
    """From a training file's bytes to its row of `train_images`."""

    @property
    def train_bytes(self) -> int:
        """Bytes of the training files."""
        return sum(os.path.getsize(path) for path in self.train_paths)


def composed_digits(spec: DigitSpec, root: Path, progress: Progress) -> ImageSet:
    """Write the digits under `root`, unless an earlier run did, and return them."""
    folder = write_digits(spec, root, progress)
    found: dict[str, tuple[list[str], list[int]]] = {}
    pixels = {}
    for split in ("train", "test"):
        ordered = [
            (label, entry)
            for label, name in enumerate(CLASSES)
            for entry in sorted(os.scandir(folder / split / name), key=lambda entry: entry.name)
        ]
        found[split] = ([entry.path for _, entry in ordered], [label for label, _ in ordered])
        numbers = [int(Path(entry.name).stem) for _, entry in ordered]
        pixels[split] = np.repeat(np.load(folder / f"{split}.npy")[numbers, ..., None], 3, axis=3)
    return ImageSet(
        name="handwritten digits composed on cluttered canvases",
        classes=CLASSES,
        train_paths=found["train"][0],
        train_labels=found["train"][1],
        train_images=pixels["train"],
        test_images=pixels["test"],
        test_labels=np.asarray(found["test"][1], np.int64),
        decode=stoker.images.decode,
    )


def user_images(folder: Path, settings: Settings, progress: Progress) -> ImageSet:
    """Read a folder of class sub-folders, part it for training and testing, decode it once.

    A fifth of every class, drawn from a fixed seed, is for testing. Raises FileNotFoundError
    or ValueError that say what is wrong and what to do.
    """
    paths = _by_class(folder)
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    rng = np.random.default_rng(0)
    for label, files in enumerate(paths.values()):
        order = rng.permutation(len(files))
        held_out = max(1, round(len(files) * _TEST_SHARE))
        test += [(files[i], label) for i in order[:held_out]]
        train += [(files[i], label) for i in order[held_out:]]
    train = _some(train, settings.most_train_images, rng)
    test = _some(test, settings.most_test_images, rng)
    fewest = _FEWEST_TRAIN_BATCHES * settings.batch_size
    if len(train) < fewest:
        raise ValueError(
            f"{folder} leaves {len(train)} images for training (a fifth is kept for testing); "
            f"the demo needs {fewest}. Give it more images, or leave --data out to see it on "
            "digits"
        )
    decode = _Resized(settings.image_px)
    side = settings.image_px
    decoded = np.empty((len(train) + len(test), side, side, 3), np.uint8)
    for i, (path, _) in enumerate([*train, *test]):
        try:
            decoded[i] = decode(Path(path).read_bytes())
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an image ({type(error).__name__}: {error}). Repair or "
                "remove it, then run again"
            ) from error
        if (i + 1) % _REPORT_EVERY == 0 or i + 1 == len(decoded):
            progress(i + 1, len(decoded))
    return ImageSet(
        name=f"the images of {folder.name}, {side} x {side} pixels",
        classes=tuple(paths),
        train_paths=[path for path, _ in train],
        train_labels=[label for _, label in train],
        train_images=decoded[: len(train)],
        test_images=decoded[len(train) :],
        test_labels=np.asarray([label for _, label in test], np.int64),
        decode=decode,
    )


class _Resized:
    """Decodes an image and resizes it to a square of `side_px`."""

    def __init__(self, side_px: int) -> None:
        self._side_px = side_px

    def __call__(self, data: bytes) -> NDArray[np.uint8]:
        image = Image.fromarray(stoker.images.decode(data))
        side = (self._side_px, self._side_px)
        return np.array(image.resize(side, Image.Resampling.BILINEAR))


def _by_class(folder: Path) -> dict[str, list[str]]:
    """Return the image files of every class folder, in order of name."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder. --data takes a folder with one sub-folder of images a class"
        )
    found: dict[str, list[str]] = {}
    for child in sorted(folder.iterdir()):
        if not child.is_dir() or child.name.startswith("."):
            continue
        files = sorted(
            str(path)
            for path in child.rglob("*")
            if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        if files:
            found[child.name] = files
    if len(found) < 2:
        have = f"only one ({next(iter(found))})" if found else "none"
        raise ValueError(
            f"{folder} needs at least two sub-folders with images, one a class; there is {have}. "
            f"Images are files named {', '.join(sorted(SUFFIXES))}"
        )
    for name, files in found.items():
        if len(files) < _FEWEST_A_CLASS:
            raise ValueError(
                f"class {name} of {folder} has {len(files)} images; each needs at least "
                f"{_FEWEST_A_CLASS}. Add images, or move the class out of the folder"
            )
    return found


def _some(
    pairs: list[tuple[str, int]], most: int, rng: np.random.Generator
) -> list[tuple[str, int]]:
    """Return at most `most` pairs, drawn without replacement, in their order."""
    if len(pairs) <= most:
        return pairs
    return [pairs[i] for i in sorted(rng.choice(len(pairs), most, replace=False))]
