"""A set of images: real handwritten digits, composed on cluttered canvases.

scikit-learn ships 1,797 handwritten digits of 8 x 8 pixels, far too few to keep a
loader busy. Each image here shows one of them at a random size, place and contrast,
among fragments of other digits, so that thousands of different images come of them.

Guarantees: the same specification gives the same bytes; no handwritten digit serves
both the training and the test images, not even as a fragment; the folder appears
under its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = tuple(str(digit) for digit in range(10))

_DIGIT_SIZES_PX = (20, 22, 24, 26)
_FRAGMENT_SIZES_PX = (6, 7, 8, 9, 10)
_TEST_SHARE = 0.2
_BLOCK = 1024
_REPORT_EVERY = 256
_STAMP = "complete.json"


@dataclass(frozen=True)
class DigitSpec:
    """What is composed. Any change of a field gives another folder."""

    train: int = 20_480
    """Training images."""
    test: int = 1_000
    """Test images."""
    canvas_px: int = 32
    """Side of the square canvas in pixels."""
    fragments: int = 3
    """Fragments of other digits on each canvas."""
    seed: int = 0
    version: int = 1
    """Raised whenever the code below would compose other pixels."""

    @property
    def folder_name(self) -> str:
        """A name that stands for exactly this specification."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"digits-{digest[:12]}"


def split_digits(
    labels: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Part the handwritten digits: indices for training images, indices for test images."""
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    held_out = round(len(labels) * _TEST_SHARE)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def compose(spec: DigitSpec, split: str) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield the images of `split` ("train" or "test") in order.

    Each is a uint8 array [canvas_px, canvas_px] with the label of its whole digit.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    from sklearn.datasets import load_digits  # takes seconds, and only composing needs it

    digits, labels = load_digits(return_X_y=True)
    train, test = split_digits(labels, spec.seed)
    chosen = train if split == "train" else test
    whole = _resized((digits[chosen].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8))
    labels = labels[chosen]

    count = spec.train if split == "train" else spec.test
    for start in range(0, count, _BLOCK):
        # A block at a time: drawing and laying image by image would take ten times as long.
        n = min(_BLOCK, count - start)
        rng = np.random.default_rng([spec.seed, 2, int(split == "test"), start])
        canvas = np.zeros((n, spec.canvas_px, spec.canvas_px), np.float32)
        for _ in range(spec.fragments):
            _lay(
                canvas, whole, _FRAGMENT_SIZES_PX, rng, rng.integers(len(chosen), size=n), 0.2, 0.4
            )
        which = rng.integers(len(chosen), size=n)
        _lay(canvas, whole, _DIGIT_SIZES_PX, rng, which, 0.6, 1.0)
        ground = rng.uniform(0.0, 60.0, (n, 1, 1)).astype(np.float32)
        canvas *= (255 - ground) / 255
        canvas += ground
        yield from zip(
            canvas.astype(np.uint8), (int(label) for label in labels[which]), strict=True
        )


def write_digits(
    spec: DigitSpec, root: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """Write the images once, as `root/NAME/{train,test}/CLASS/NUMBER.png`; return that folder.

    `train.npy` and `test.npy` beside them hold the same pixels by number, uint8
    [images, canvas_px, canvas_px], for the arm that trains from memory. A folder completed
    by an earlier run is used again. `progress(done, total)` counts images; it is not called
    when nothing is written. Interrupted, it leaves nothing.
    """
    folder = root / spec.folder_name
    if (folder / _STAMP).is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{spec.folder_name}-", dir=root))
    try:
        done, total = 0, spec.train + spec.test
        for split in ("train", "test"):
            for name in CLASSES:
                (unfinished / split / name).mkdir(parents=True)
            copy = []
            for number, (pixels, label) in enumerate(compose(spec, split)):
                path = unfinished / split / CLASSES[label] / f"{number:05d}.png"
                Image.fromarray(pixels).save(path, compress_level=1)
                copy.append(pixels)
                done += 1
                if done % _REPORT_EVERY == 0 or done == total:
                    progress(done, total)
            np.save(unfinished / f"{split}.npy", np.stack(copy))
        (unfinished / _STAMP).write_text(json.dumps(asdict(spec), sort_keys=True) + "\n")
        unfinished.chmod(0o755)
        if folder.exists():  # left without a stamp: not ours to trust
            shutil.rmtree(folder)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / _STAMP).is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _resized(digits: NDArray[np.uint8]) -> dict[int, NDArray[np.float32]]:
    """Every digit at every size: size -> float32 [digits, size, size]."""
    return {
        size: np.stack(
            [
                np.asarray(Image.fromarray(digit).resize((size, size), Image.Resampling.BICUBIC))
                for digit in digits
            ]
        ).astype(np.float32)
        for size in _DIGIT_SIZES_PX
    }


def _lay(
    canvas: NDArray[np.float32],
    whole: dict[int, NDArray[np.float32]],
    sizes_px: tuple[int, ...],
    rng: np.random.Generator,
    which: NDArray[np.int64],
    faintest: float,
    boldest: float,
) -> None:
    """Lay on every canvas, in place, its digit of `whole`, or a fragment of it.

    A size of `sizes_px` that `whole` does not hold means a square of that side cut from
    the largest digit. Ink covers what is fainter than itself.
    """
    n = len(canvas)
    size = rng.integers(len(sizes_px), size=n)
    place = rng.random((2, n))
    cut = rng.random((2, n))
    ink = rng.uniform(faintest, boldest, n).astype(np.float32)
    for code, side in enumerate(sizes_px):
        (rows,) = np.nonzero(size == code)
        source = whole.get(side)
        if source is None:
            source = whole[max(whole)]
        piece = source[(which[rows][:, None, None], *_square(cut[:, rows], source.shape[1], side))]
        spot = (rows[:, None, None], *_square(place[:, rows], canvas.shape[1], side))
        canvas[spot] = np.maximum(canvas[spot], piece * ink[rows][:, None, None])


def _square(place: NDArray[np.float64], room_px: int, side_px: int) -> tuple[Any, Any]:
    """Return the indices of squares at relative places [2, n] within `room_px` x `room_px`."""
    corner = (place * (room_px - side_px + 1)).astype(np.int64)
    within = np.arange(side_px)
    return corner[0][:, None, None] + within[:, None], corner[1][:, None, None] + within
