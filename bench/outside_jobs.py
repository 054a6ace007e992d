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

Machine: two cores of an AMD EPYC, 24 GiB, Linux 6.18; Python 3.11.7, PyTorch 2.13.0. It takes 13
minutes.

Results::

    [results/outside_jobs.json]
    seconds
    ----------------------------------------------------------------------------
    local files: stoker             0.276  torch, 0 / it  0.374 (0.226 .. 0.435)
    local files: torch, 0           0.104  torch, 0 / it              1 (1 .. 1)
    local files: torch, 2           0.660  torch, 0 / it   0.15 (0.134 .. 0.165)
    local files: stoker, 2 thread   0.104  torch, 2 / it      6.36 (5.82 .. 6.4)
    local files: stoker, 2 process  0.135  torch, 2 / it     4.66 (4.22 .. 5.48)
    local files: torch, 4           0.598  torch, 0 / it    0.166 (0.144 .. 0.2)
    local files: stoker, 4 thread   0.120  torch, 4 / it      4.9 (3.47 .. 5.43)
    local files: stoker, 4 process  0.136  torch, 4 / it     4.24 (4.12 .. 4.69)

    seconds
    ------------------------------------------------------------------------------
    image augment: stoker             0.252  torch, 0 / it  0.301 (0.235 .. 0.349)
    image augment: torch, 0           0.081  torch, 0 / it              1 (1 .. 1)
    image augment: torch, 2           0.347  torch, 0 / it    0.234 (0.2 .. 0.254)
    image augment: stoker, 2 thread   0.086  torch, 2 / it     4.07 (2.27 .. 4.78)
    image augment: stoker, 2 process  0.103  torch, 2 / it      3.39 (2.02 .. 4.1)
    image augment: torch, 4           0.377  torch, 0 / it  0.191 (0.172 .. 0.269)
    image augment: stoker, 4 thread   0.097  torch, 4 / it     3.83 (3.78 .. 4.29)
    image augment: stoker, 4 process  0.104  torch, 4 / it     3.91 (3.43 .. 4.29)

    seconds
    -----------------------------------------------------------------------
    remote: stoker             0.783  torch, 4 / it  0.833 (0.799 .. 0.974)
    remote: torch, 0           2.606  torch, 4 / it  0.251 (0.249 .. 0.253)
    remote: torch, 2           1.306  torch, 4 / it  0.502 (0.498 .. 0.506)
    remote: stoker, 2 thread   1.331  torch, 2 / it  0.984 (0.972 .. 0.986)
    remote: stoker, 2 process  1.337  torch, 2 / it   0.977 (0.976 .. 0.98)
    remote: torch, 4           0.656  torch, 4 / it              1 (1 .. 1)
    remote: stoker, 4 thread   0.668  torch, 4 / it  0.981 (0.968 .. 0.988)
    remote: stoker, 4 process  0.672  torch, 4 / it  0.975 (0.968 .. 0.983)

    seconds
    -----------------------------------------------------------------------
    python: stoker             0.185  torch, 2 / it  0.511 (0.436 .. 0.649)
    python: torch, 0           0.098  torch, 2 / it   0.853 (0.694 .. 1.31)
    python: torch, 2           0.107  torch, 2 / it              1 (1 .. 1)
    python: stoker, 2 thread   0.140  torch, 2 / it  0.694 (0.512 .. 0.935)
    python: stoker, 2 process  0.143  torch, 2 / it  0.721 (0.536 .. 0.843)
    python: torch, 4           0.097  torch, 2 / it   0.988 (0.869 .. 1.24)
    python: stoker, 4 thread   0.148  torch, 4 / it  0.656 (0.523 .. 0.828)
    python: stoker, 4 process  0.141  torch, 4 / it    0.7 (0.577 .. 0.766)

    seconds
    ----------------------------------------------------------------------------
    noise JPEGs: stoker             2.105  torch, 0 / it     1.39 (1.29 .. 1.55)
    noise JPEGs: torch, 0           2.905  torch, 0 / it              1 (1 .. 1)
    noise JPEGs: torch, 2           5.138  torch, 0 / it  0.561 (0.519 .. 0.634)
    noise JPEGs: stoker, 2 thread   1.323  torch, 2 / it     3.88 (3.78 .. 4.19)
    noise JPEGs: stoker, 2 process  1.669  torch, 2 / it     3.02 (2.86 .. 3.33)
    noise JPEGs: torch, 4           5.768  torch, 0 / it  0.508 (0.499 .. 0.603)
    noise JPEGs: stoker, 4 thread   1.392  torch, 4 / it      4.13 (3.8 .. 4.38)
    noise JPEGs: stoker, 4 process  1.842  torch, 4 / it      3.03 (2.55 .. 3.2)

    seconds
    ---------------------------------------------------------------------------------------
    first batch of 16 MiB: torch, 1            1.176  torch, 1 / it              1 (1 .. 1)
    first batch of 16 MiB: stoker, 1 process   1.454  torch, 1 / it  0.809 (0.632 .. 0.859)
    first batch of 16 MiB: torch, 2            2.392  torch, 1 / it   0.49 (0.482 .. 0.517)
    first batch of 16 MiB: stoker, 2 process   2.866  torch, 2 / it  0.831 (0.809 .. 0.897)
    first batch of 16 MiB: torch, 8            9.753  torch, 1 / it  0.123 (0.114 .. 0.131)
    first batch of 16 MiB: stoker, 8 process  11.224  torch, 8 / it   0.881 (0.85 .. 0.957)

    seconds
    ----------------------------------------------------------------------------------------
    first batch of 128 MiB: torch, 1            2.188  torch, 1 / it              1 (1 .. 1)
    first batch of 128 MiB: stoker, 1 process   2.373  torch, 1 / it  0.904 (0.855 .. 0.989)
    first batch of 128 MiB: torch, 2            4.296  torch, 1 / it     0.5 (0.47 .. 0.564)
    first batch of 128 MiB: stoker, 2 process   4.741  torch, 2 / it   0.906 (0.805 .. 1.03)
    first batch of 128 MiB: torch, 8           17.015  torch, 1 / it   0.129 (0.12 .. 0.142)
    first batch of 128 MiB: stoker, 8 process  18.288  torch, 8 / it  0.945 (0.896 .. 0.974)
    [end]

Missed:

- Pure Python, .51 to .72: an example is a list of 256 numbers, made in 50 us. Of the 20 us that two
  processes take longer for one, the seeds before each call of the user's code are 11.5 (of a
  process), a copy of the list 5, the rest messages: the loop's process computes for 41 ms an epoch,
  beside DataLoader for 14. Without the copy .62 became .66. Two threads pass the GIL around.
- The defaults on epochs of a tenth of a second: local files .37 and images .30 of no workers, where
  two kept processes or threads take half as long as the defaults. Processes are forked for each
  epoch, unless they are kept (``persistent=True``).
- Waiting code at the defaults .83 of four kept workers: sixteen are forked for each epoch,
  as in ``users_code.py``.
- First batches by ``spawn``, .81 to .95: .2 to .5 s longer with one or two processes, 1.3 to 1.5 s
  with eight, on two cores. Each imports stoker's 82 modules beside torch: .27 s of processor
  time, under load.

Caveat: all epochs are short, a tenth of a second to five.
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
