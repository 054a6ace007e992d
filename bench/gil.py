"""Code that holds the GIL, and JPEGs with Pillow: are stoker's workers as fast as DataLoader's?

1. A dataset whose ``__getitem__`` is a millisecond of pure Python: process workers against
   torch's DataLoader, each at its best number of workers (1, 2 or 3).
2. JPEGs in memory, decoded with Pillow, cropped at random and resized to 224, batches of 64:
   the better of thread and process workers against DataLoader at its best.

Command::

    python bench/gil.py --jpegs imagenet-sample.tar        # a folder works too

Target: at least 1.0 of DataLoader, behind the first batch, in both.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results (three rounds; epochs of 200 and of 47 batches)::

    [results/gil.json]
    1 ms of Python       examples/s         it / best torch           whole epochs
    ------------------------------------------------------------------------------
    stoker, 1 processes         581  0.398 (0.369 .. 0.426)  0.402 (0.378 .. 0.43)
    stoker, 2 processes       1,453   0.985 (0.945 .. 1.07)  0.988 (0.963 .. 1.08)
    stoker, 3 processes       1,438   0.927 (0.834 .. 1.27)  0.925 (0.848 .. 1.27)
    torch, 1 workers            629  0.482 (0.393 .. 0.623)  0.49 (0.396 .. 0.629)
    torch, 2 workers          1,259    1.04 (0.727 .. 1.08)   1.05 (0.725 .. 1.09)
    torch, 3 workers          1,461              1 (1 .. 1)             1 (1 .. 1)

    JPEGs                examples/s         it / best torch            whole epochs
    -------------------------------------------------------------------------------
    stoker, 2 threads           388  0.965 (0.947 .. 0.981)       1 (0.982 .. 1.03)
    stoker, 2 processes         341  0.845 (0.673 .. 0.874)  0.868 (0.698 .. 0.911)
    stoker, 3 processes         328  0.816 (0.703 .. 0.863)   0.853 (0.71 .. 0.887)
    torch, 1 workers            198   0.494 (0.49 .. 0.508)  0.519 (0.511 .. 0.525)
    torch, 2 workers            393   0.985 (0.956 .. 1.01)       1 (0.979 .. 1.02)
    torch, 3 workers            402              1 (1 .. 1)              1 (1 .. 1)
    [end]

With one request at a time, a process waited for the thread that feeds it, which comes late where
both cores are busy: that gave 0.83 and 0.90. Now each has two under way. JPEGs are decoded best by
threads: over whole epochs as fast as three of torch's processes, behind the first batch 3.5 % less,
for by then those hold six batches more.

Caveats: what is behind the first batch favours who had more batches under way by then: three torch
workers hold six. The millisecond is a number of iterations, found once,
so that workers that share a core pay for it. DataLoader keeps its processes between epochs; when
these rows were measured, stoker started its own every epoch: ``whole`` has that start. Without
``--jpegs`` the files are made (smooth noise, 500x375), which decode faster than photographs.
"""

from __future__ import annotations

import io
import tarfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from peers.serve import Epochs, steady_rates, timed, whole_rates
from PIL import Image

import stoker

SIDE = 224


def spin(iterations: int) -> int:
    """Keep the GIL busy."""
    total = 0
    for i in range(iterations):
        total += i & 3
    return total


def iterations_for(seconds: float) -> int:
    """Find how many iterations take so long, at the best of many tries."""
    tries = []
    for _ in range(50):
        began = time.perf_counter()
        spin(10_000)
        tries.append(time.perf_counter() - began)
    return round(10_000 * seconds / min(tries))


class Spinning:
    """Examples that cost so many iterations of pure Python each."""

    def __init__(self, examples: int, iterations: int) -> None:
        self._examples, self._iterations = examples, iterations
        self._row = np.zeros((32, 32, 3), np.uint8)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        spin(self._iterations)
        return self._row, index


def crop(data: bytes, rng: np.random.Generator) -> Any:
    """Decode, cut out 8 to 100 % of the area at 3:4 to 4:3, resize, flip half of them."""
    with Image.open(io.BytesIO(data)) as image:
        rgb = image.convert("RGB")
    width, height = rgb.size
    side = np.sqrt(width * height * rng.uniform(0.08, 1.0))
    stretch = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
    w, h = min(width, round(side * stretch)), min(height, round(side / stretch))
    left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
    box = (left, top, left + w, top + h)
    array = np.asarray(rgb.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))
    return array[:, ::-1] if rng.random() < 0.5 else array


class Files:
    """Encoded images, for stoker."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.files[index], index


class Crops(Files):
    """The same, cropped in ``__getitem__``, for DataLoader."""

    _random: np.random.Generator | None = None

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._random is None:  # one a worker
            self._random = np.random.default_rng()
        return crop(self.files[index], self._random).copy(), index


def jpegs(place: str | None, count: int) -> list[bytes]:
    """Read JPEGs from a folder or a tar, or make some."""
    if place is None:
        return list(made_jpegs(count))
    path = Path(place)
    if path.is_dir():
        return [f.read_bytes() for f in sorted(path.rglob("*")) if _is_jpeg(f.name)]
    with tarfile.open(path) as tar:
        opened = (tar.extractfile(member) for member in tar if _is_jpeg(member.name))
        return [file.read() for file in opened if file is not None]


def made_jpegs(count: int, size: tuple[int, int] = (500, 375)) -> Iterator[bytes]:
    """Make smooth noise, ``size`` wide and high."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        small = generator.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(small).resize(size).save(out, "JPEG", quality=90)
        yield out.getvalue()


def _is_jpeg(name: str) -> bool:
    return name.lower().endswith((".jpg", ".jpeg"))


def measure(
    found: Report, what: str, data: Any, pipelines: dict[str, Any], batch: int, rounds: int
) -> None:
    """Run pipelines and DataLoaders in turns."""
    from torch.utils.data import DataLoader  # here, for others take their JPEGs from this file

    epochs: dict[str, Epochs] = {n: partial(iter, p.batch(batch)) for n, p in pipelines.items()}
    for n in (1, 2, 3):
        loader: Any = DataLoader(
            data, batch_size=batch, shuffle=True, num_workers=n, persistent_workers=True
        )
        epochs[f"torch, {n} workers"] = partial(iter, loader)
    samples = interleaved({n: partial(timed, e) for n, e in epochs.items()}, rounds)
    for name, each in samples.items():
        found.add(task=what, case=name, samples=each)


def evaluate(found: Report) -> None:
    """Hold the best pipeline of each task against the best DataLoader."""
    for task in dict.fromkeys(row["task"] for row in found.rows):
        compare(found, task, [row for row in found.rows if row["task"] == task])


def compare(found: Report, task: str, rows: list[dict[str, Any]]) -> None:
    """Show one task."""
    steady = {row["case"]: steady_rates(row["samples"]) for row in rows}
    whole = {row["case"]: whole_rates(row["samples"]) for row in rows}
    middle = {name: median(rates) for name, rates in steady.items()}
    ours = max((n for n in middle if n.startswith("stoker")), key=middle.__getitem__)
    theirs = max((n for n in middle if n.startswith("torch")), key=middle.__getitem__)
    found.show(
        (task, "examples/s", "it / best torch", "whole epochs"),
        [
            (
                name,
                f"{middle[name]:,.0f}",
                Ratio.of(steady[name], steady[theirs]),
                Ratio.of(whole[name], whole[theirs]),
            )
            for name in steady
        ],
    )
    best = Ratio.of(steady[ours], steady[theirs]).median
    found.expect(f"{task}: {ours} of {theirs}", best, 1.0)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs")
    arguments = options.parse_args()
    # Three workers on two cores are tried on purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as found:
        examples, seconds = (128, 1e-4) if arguments.quick else (6_400, 1e-3)
        spinning = Spinning(examples, iterations_for(seconds))
        processes = {
            f"stoker, {n} processes": stoker.from_dataset(spinning)
            .shuffle()
            .workers(n, kind="process")
            for n in (1, 2, 3)
        }
        measure(found, "1 ms of Python", spinning, processes, 32, rounds)
        files = jpegs(arguments.jpegs, 160 if arguments.quick else 500)
        files *= 1 if arguments.quick else -(-3000 // len(files))
        crops = stoker.from_dataset(Files(files)).shuffle().random_map(crop, on=0)
        kinds = {
            "stoker, 2 threads": crops.workers(2),
            "stoker, 2 processes": crops.workers(2, kind="process"),
            "stoker, 3 processes": crops.workers(3, kind="process"),
        }
        measure(found, "JPEGs", Crops(files), kinds, 64, rounds)


if __name__ == "__main__":
    main()
