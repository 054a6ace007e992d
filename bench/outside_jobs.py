"""Jobs that other projects chose to measure loaders by: the same datasets by stoker and torch.

All are retyped. None of their loaders is here, only ``DataLoader``, which they have beside theirs.

- dataloader-rs (``bench/real_world.py`` at 452dfd6), 32 examples a batch, their collate function:
  local files of 128 KB, made floats; images of 256 x 256, cropped, flipped, made floats; a remote
  store of 10 ms an example; pure Python, which makes a list of 256 ids.
- Ofeidis et al. (arXiv 2209.13705, their random dataset): JPEGs of noise, 256 x 256, by Pillow,
  flipped at random, normalized; 64 a batch.
- SPDL (``examples/benchmark_ipc_dataloader.py``): seconds to the first batch, 256 a batch, where
  processes are started by ``spawn`` and the dataset is a list of strings of 64 bytes.

stoker is at its defaults, and by as many threads or processes as DataLoader has workers; all keep
their workers from epoch to epoch, but for the first batches. Cases are run in turns.

Command::

    python bench/outside_jobs.py

Target: no case of stoker's slower than DataLoader's of as many workers, its defaults no slower
than DataLoader at its best: 0.95 or more.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import Ratio, Report, interleaved, parser, report
from PIL import Image
from torch.utils.data import DataLoader

import stoker

GOAL = 0.95
WORDS = ("the quick brown fox jumps over the lazy dog " * 40).split()
IDS = {word: number for number, word in enumerate(sorted(set(WORDS)))}
SPAWNED_MIB = 16, 128


class Job:
    """So many examples; the class says what makes one."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return self.examples


class LocalFiles(Job):
    """Bytes of a file, as floats."""

    def __init__(self, examples: int, folder: str) -> None:
        super().__init__(examples)
        self.paths = [f"{folder}/{number:06d}.bin" for number in range(examples)]
        for path in self.paths:
            Path(path).write_bytes(np.random.default_rng(0).bytes(128 << 10))

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:
            raw = np.frombuffer(file.read(), np.uint8)
        return (raw.astype(np.float32) / 255 - 0.5) / 0.25


class ImageAugment(Job):
    """A crop of an image in memory, flipped or not, normalized."""

    def __init__(self, examples: int) -> None:
        super().__init__(examples)
        self.images = np.random.default_rng(0).integers(0, 256, (64, 3, 256, 256), np.uint8)
        self.mean, self.std = np.random.default_rng(1).random((2, 3, 1, 1), np.float32) + 0.1

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        top, left = rng.integers(0, 33, 2)
        crop = self.images[index % 64][:, top : top + 224, left : left + 224]
        crop = crop[:, :, ::-1] if rng.random() < 0.5 else crop
        return (crop.astype(np.float32) / 255 - self.mean) / self.std


class Remote(Job):
    """A kilobyte, after 10 ms."""

    def __getitem__(self, index: int) -> bytes:
        time.sleep(0.01)
        return index.to_bytes(8, "little") * 128


class PythonCpu(Job):
    """The ids of words, in a list."""

    def __getitem__(self, index: int) -> list[int]:
        for _ in range(3):
            ids = [IDS[word] + index % 7 for word in WORDS]
        return ids[:256]


class NoiseJpegs(Job):
    """A decoded JPEG, flipped or not, normalized, and its label."""

    def __init__(self, examples: int) -> None:
        super().__init__(examples)
        rng = np.random.default_rng(0)
        self.jpegs = [self._jpeg(rng) for _ in range(64)]

    @staticmethod
    def _jpeg(rng: np.random.Generator) -> bytes:
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (256, 256, 3), np.uint8)).save(file, "jpeg")
        return file.getvalue()

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        image = np.asarray(Image.open(io.BytesIO(self.jpegs[index % 64])), np.float32)
        image = image[:, ::-1] if rng.random() < 0.5 else image
        return np.ascontiguousarray((image / 255 - 0.5) / 0.2).transpose(2, 0, 1), index % 20


class Strings(Job):
    """How long a string is, of a list of them."""

    def __init__(self, mib: int) -> None:
        super().__init__((mib << 20) // 64)
        self.strings = [b"/data/train/img_%012d.JPEG".ljust(64) % n for n in range(len(self))]

    def __getitem__(self, index: int) -> int:
        return len(self.strings[index])


def stacked(examples: list[Any]) -> Any:
    """Return arrays as one, other examples in their list."""
    return np.stack(examples) if isinstance(examples[0], np.ndarray) else examples


def images_and_labels(examples: list[Any]) -> Any:
    """Return an array of images, and one of labels."""
    images, labels = zip(*examples, strict=True)
    return np.stack(images), np.array(labels)


def epoch_s(loader: Iterable[Any]) -> float:
    """Return the seconds of an epoch."""
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def loaders(job: Job, batch: int, collate: Callable[..., Any], counts: Iterable[int]) -> Any:
    """Return the cases of a job: names, and what is iterated."""
    batches = stoker.from_dataset(job, seed=0).batch(batch, collate=collate)
    cases: dict[str, Any] = {
        "stoker": batches,
        "torch, 0": DataLoader(job, batch, collate_fn=collate),  # type: ignore[arg-type]
    }
    for count in counts:
        cases[f"torch, {count}"] = DataLoader(
            job,  # type: ignore[arg-type]
            batch,
            collate_fn=collate,
            num_workers=count,
            persistent_workers=True,
            prefetch_factor=8,
        )
        for kind in ("thread", "process"):
            keeps = kind == "process"
            cases[f"stoker, {count} {kind}"] = batches.workers(count, kind=kind, persistent=keeps)
    return cases


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Have processes started by ``spawn``."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def first_batch_s(make: Callable[[], Iterable[Any]]) -> float:
    """Return the seconds to the first batch, with processes that are spawned."""
    with spawning():
        loader = make()
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        found = time.perf_counter() - began
    del batches, loader
    gc.collect()
    return found


def spawned(job: Strings, counts: Iterable[int]) -> dict[str, Callable[[], float]]:
    """Return the cases of a first batch."""
    cases: dict[str, Callable[[], float]] = {}
    for count in counts:
        torch = partial(DataLoader, job, 256, num_workers=count)  # type: ignore[arg-type]
        ours = stoker.from_dataset(job, seed=0).batch(256)
        cases[f"torch, {count}"] = partial(first_batch_s, torch)
        cases[f"stoker, {count} process"] = partial(
            first_batch_s, partial(ours.workers, count, kind="process")
        )
    return cases


def evaluate(found: Report) -> None:
    """Show seconds, and hold stoker against DataLoader."""
    for job in dict.fromkeys(row["job"] for row in found.rows):
        cases = {row["case"]: row["s"] for row in found.rows if row["job"] == job}
        best = min(
            (name for name in cases if name.startswith("torch")), key=lambda n: min(cases[n])
        )
        lines = []
        for name, each in cases.items():
            alike = f"torch, {name.split()[1]}" if name[:8] == "stoker, " else best
            ratio = Ratio.of(cases[alike], each)
            lines.append((f"{job}: {name}", f"{median(each):.3f}", f"{alike} / it", ratio))
            if name.startswith("stoker"):
                found.expect(f"{job}, {name}: of {alike}", ratio.median, GOAL)
        found.show(("seconds", "", "", ""), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    quick = arguments.quick
    rounds, counts = (1, (2,)) if quick else (arguments.rounds, (2, 4))

    def some(examples: int) -> int:
        return 64 if quick else examples

    with report(__file__, arguments) as found, tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, tuple[Job, int, Callable[..., Any]]] = {
            "local files": (LocalFiles(some(512), folder), 32, stacked),
            "image augment": (ImageAugment(some(256)), 32, stacked),
            "remote": (Remote(some(256)), 32, stacked),
            "python": (PythonCpu(some(2048)), 32, stacked),
            "noise JPEGs": (NoiseJpegs(some(2048)), 64, images_and_labels),
        }
        for name, job in jobs.items():
            cases = {n: partial(epoch_s, loader) for n, loader in loaders(*job, counts).items()}
            for case, each in interleaved(cases, rounds).items():
                found.add(job=name, case=case, s=each)
            del cases
            gc.collect()
        for mib in (1,) if quick else SPAWNED_MIB:
            starts = spawned(Strings(mib), (1,) if quick else (1, 2, 8))
            for case, each in interleaved(starts, rounds).items():
                found.add(job=f"first batch of {mib} MiB", case=case, s=each)


if __name__ == "__main__":
    main()
