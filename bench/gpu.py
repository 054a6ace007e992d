"""Does stoker keep a GPU busy? ResNets that train on photographs, with several loaders.

JPEGs are read from a warm page cache, random boxes of 8 to 100 % of their area are resized to
224 x 224, half of them flipped, and 256 of them are normalized on the GPU, where a ResNet takes a
step in bf16 (autocast, channels last, SGD with momentum, no ``torch.compile``). A ``DataLoader``
has as many workers as the setting has cores, stoker as many threads as it chooses:

- bound: one batch, kept on the GPU, again and again; the loader costs nothing;
- torch, Pillow: ``DataLoader`` with torchvision's transforms (v2) of Pillow's images;
- torch, decode_jpeg: the same of tensors by ``torchvision.io.decode_jpeg``; both with
  ``persistent_workers`` and ``pin_memory``, and ``uint8`` up to the GPU;
- torch, 7 in 8: the latter with 14 workers for 16 cores, as many as stoker's threads;
- stoker: the pipeline of docs/images.md, as it is, in threads;
- stoker, processes: with ``.workers(n, kind="process")``, as many;
- echo, decoded: ``.map(decode).echo()`` in front of the crops, which stay on the host;
- echo, on the GPU: crops of 256 x 256 are copied to the GPU, then ``.echo()``, and each use is
  cropped to 224 x 224 at a random place, and flipped, there.

An arm is started, trains until it has used twice as many batches as a ``DataLoader`` has ready,
and then for five windows in a row. Workers of a ``DataLoader`` end their batches at about the same
time, every few seconds: so the rate is that of all windows together, and the range that of the
windows. Steps are timed by CUDA events: *idle* is the time on the GPU's clock from the end of a
step to the start of the next one: waiting for data, for its copy, and normalizing. *Factor* is
uses over fresh examples; *fresh* the rate of the latter. *Cores* is the processor time of all
processes over the time that passed.

Command::

    python bench/gpu.py --jpegs imagenet-sample.tar

Targets: stoker at least as fast as the better ``DataLoader``; an echo at least 0.95 of the bound.

Machine: one NVIDIA H100, 16 cores of an Intel Xeon and 126 GiB in a virtual machine, otherwise
idle (the load at the start is that of writing the files); Python 3.12.3, NumPy 2.5.2, torch 2.11.0,
torchvision 0.26. One turn.

Results::

    [results/gpu.json]
    resnet18, 16 cores  examples/s            of the bound   idle  factor  fresh/s  cores   first
    ---------------------------------------------------------------------------------------------
    bound                   12,025              1 (1 .. 1)   0.0%    1.00   12,025    1.0  0.01 s
    torch, Pillow            2,983  0.248 (0.177 .. 0.352)  74.0%    1.00    2,983   15.6  1.77 s
    torch, decode_jpeg       4,334    0.36 (0.322 .. 0.46)  61.4%    1.00    4,334   15.8  1.22 s
    torch, 7 in 8            4,044  0.336 (0.293 .. 0.367)  66.3%    1.00    4,044   13.8  1.29 s
    stoker                   6,931  0.576 (0.536 .. 0.603)  26.4%    1.00    6,931   14.0  0.26 s
    stoker, processes        6,729   0.56 (0.532 .. 0.623)  33.7%    1.00    6,729   14.8  0.54 s

    resnet50, 4 cores   examples/s            of the bound   idle  factor  fresh/s  cores   first
    ---------------------------------------------------------------------------------------------
    bound                    3,988              1 (1 .. 1)   0.0%    1.00    3,988    1.0  0.03 s
    torch, decode_jpeg       1,357   0.34 (0.282 .. 0.479)  66.0%    1.00    1,357    4.0  1.12 s
    stoker                   2,315  0.581 (0.523 .. 0.639)  40.6%    1.00    2,315    4.0  0.37 s
    echo, decoded            2,888  0.724 (0.691 .. 0.801)   1.4%    2.92      988    3.7  0.49 s
    echo, on the GPU         3,926  0.984 (0.984 .. 0.985)   1.7%    1.93    2,040    4.0  0.44 s
    [end]

Missed, and why: an echo of decoded images makes each use's crop on the host, which four cores
cannot for ResNet-50; crops on the GPU are what to use there.

*Idle* does not see pauses within a step, while the training loop waits for the GIL, or for a core,
to launch its kernels. They are what lies between 1 - idle and the share of the bound: steps take
1.28 times as long beside 14 threads, 1.18 beside processes, 1.07 beside a ``DataLoader``.

What brought many threads here: a chunk of files is read, cropped and copied in one call each, so
that an example releases the GIL 0.7 times and not 4 (counted on two cores); batches are made in
pinned memory, where they were copied before, by as many OpenMP threads of torch as cores. Then
three turns of four settings, ResNet-18, one after the other (examples/s, medians): 16 threads with
chunks of 8 photographs 4,126, 14 threads 4,266; with a chunk of 50 ms or a thread's share of a
batch, here 16 to 18 photographs, 16 threads 5,033, 14 threads 5,946, which is what stoker does now.
Chunks of twice as many (5,784), and threads of a lower priority (5,720), brought nothing more. With
15, 13, 12 and 8 threads and chunks of 8 it was no faster than with 14 (one turn).

Caveats: photographs are repeated, each under a thousand names, so that no epoch ends while an arm
is measured. A batch of the bound is hot in no cache that matters: it is larger than the GPU's. The
copy of a ``DataLoader``'s batch waits for the step before it, as in most training loops; stoker's
is on a stream of its own. Waiting on a CUDA event may spin, and then counts as a core. Without a
GPU only ``--quick`` runs, and without torchvision only stoker's arms.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

import numpy as np
import psutil
import torch
from harness import Ratio, Report, parser, report
from inputs import jpegs
from PIL import Image
from torch.nn.functional import cross_entropy

import stoker
from stoker import images
from stoker.basics.resources import default_threads

SIDE = 224
LARGE_SIDE = 256  # of crops that the GPU crops again
WINDOWS = 5
NAMES = 80_000  # of photographs: no epoch ends within 5 s of 14,000/s, and each visit begins one
LOADERS = ("torch, Pillow", "torch, decode_jpeg", "torch, 7 in 8")
ECHOES = ("echo, decoded", "echo, on the GPU")
ALL = ("bound", *LOADERS, "stoker", "stoker, processes", *ECHOES)


@dataclass(frozen=True)
class Setting:
    """A network that trains, and what loads its data.

    Attributes:
        network: its name in torchvision; ``small`` is one for quick runs.
        cores: that the process and its workers may use.
        turns: how often each arm is started.
        warm_s, echo_warm_s: how long an arm trains at least before its windows; an echo until its
            pool is full, and its copies are as far apart as they will be: 48 steps.
        warm_steps: how many steps it takes at least before.
        measured_s: how long its windows are together.
    """

    network: str
    cores: int
    arms: tuple[str, ...] = ALL
    turns: int = 1
    batch: int = 256
    warm_s: float = 2.0
    echo_warm_s: float = 2.0
    warm_steps: int = 0
    measured_s: float = 5.0

    @property
    def name(self) -> str:
        return f"{self.network}, {self.cores} cores"

    def warm_up_s(self, arm: str) -> float:
        if arm == "bound":
            return self.warm_s / 4
        return self.echo_warm_s if arm in ECHOES else self.warm_s


def settings(cores: int) -> list[Setting]:
    """Return what is measured, the most telling first."""
    few = max(1, cores // 4)
    starved = ("bound", "torch, decode_jpeg", "stoker", *ECHOES)
    many = ("bound", *LOADERS, "stoker", "stoker, processes")
    return [
        Setting("resnet18", cores, many, warm_steps=4 * cores),
        Setting("resnet50", few, starved, echo_warm_s=5.5, warm_steps=4 * few),
    ]


QUICK = Setting("small", 2, ("bound", *LOADERS, "stoker", *ECHOES), 1, 8, 0.0, 0.0, 0, 0.2)


class Marks:
    """Moments on the clock of a device: events of CUDA, or the host's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, then: Any) -> float:
        """Return the time between two moments, after waiting for the second."""
        if not self._is_cuda:
            return float(then - first)
        then.synchronize()
        return float(first.elapsed_time(then)) / 1e3


class Step:
    """A network that learns."""

    def __init__(self, network: str, device: torch.device) -> None:
        self._device = device
        model: Any = built(network)  # torch's types do not know memory_format here
        self._model = model.to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)

    def __call__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = cross_entropy(self._model(pixels), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def built(network: str) -> torch.nn.Module:
    """Return a network of 1,000 classes."""
    if network != "small":
        from torchvision.models import get_model

        model: torch.nn.Module = get_model(network, weights=None)
        return model
    nn = torch.nn
    pooled = nn.Sequential(nn.Conv2d(3, 8, 7, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    return nn.Sequential(pooled, nn.Flatten(), nn.Linear(128, 1000))


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Arm:
    """A loader at work: its batches, ``bfloat16`` on the device, and how to end it."""

    batches: Batches
    close: Callable[[], None] = lambda: None
    pipeline: Any = None

    def used(self) -> tuple[int, int]:
        """Return the uses and the fresh examples so far."""
        if self.pipeline is None:
            return 0, 0
        stats = self.pipeline.stats()
        return stats.uses, stats.fresh_examples


def opened(name: str, folder: str, setting: Setting, device: torch.device) -> Arm:
    """Start a loader."""
    if name == "bound":
        labels = torch.randint(1000, (setting.batch,), device=device)
        pixels = torch.randint(
            256, (setting.batch, 3, SIDE, SIDE), dtype=torch.uint8, device=device
        )
        batch = normalized(pixels, device), labels
        return Arm(iter(lambda: batch, None))
    if name in LOADERS:
        loader = iter(data_loader(name, folder, setting, device))
        return Arm(moved(loader, device), getattr(loader, "_shutdown_workers", lambda: None))
    pipeline = piped(name, folder, setting, device)
    entered = iter(pipeline)
    batches = ((batch.image, batch.label) for batch in entered)
    return Arm(batches, entered.close, pipeline)


def piped(name: str, folder: str, setting: Setting, device: torch.device) -> Any:
    """Return one of stoker's pipelines."""
    crop = images.random_resized_crop(SIDE, flip_p=0.5)
    train: Any = stoker.from_folder(folder, seed=0).shuffle()
    if name == "echo, decoded":
        train = train.map(images.decode, on="image").echo(max_factor=4)
    if name == "echo, on the GPU":
        crop = images.random_resized_crop(LARGE_SIDE)
    train = train.random_map(crop, on="image").batch(setting.batch, drop_last=True)
    if name == "stoker, processes":
        train = train.workers(default_threads(), kind="process")
    train = train.to_torch(str(device))
    if name == "echo, on the GPU":
        train = train.echo().random_map(cropped_there, on="image")
    return train.map(images.to_chw, on="image").map(images.normalize(dtype="bfloat16"), on="image")


@stoker.reads_only
def cropped_there(pixels: torch.Tensor, rng: Any) -> torch.Tensor:
    """Cut 224 x 224 at a random place out of each image of a batch, and flip half of them."""
    count, height, width = pixels.shape[:3]
    if isinstance(rng, torch.Generator):
        draws = torch.rand((3, count, 1), generator=rng, device=pixels.device)
    else:
        draws = torch.from_numpy(rng.random((3, count, 1)))
    ahead = torch.arange(SIDE, device=pixels.device)
    rows = (draws[0] * (height - SIDE + 1)).long() + ahead
    columns = (draws[1] * (width - SIDE + 1)).long() + torch.where(
        draws[2] < 0.5, ahead, SIDE - 1 - ahead
    )
    number = torch.arange(count, device=pixels.device)[:, None, None]
    return pixels[number, rows[:, :, None], columns[:, None, :]]


class Photographs(torch.utils.data.Dataset[Any]):
    """Files of a folder, by a function of a file's path."""

    def __init__(self, folder: str, load: Callable[[str], Any]) -> None:
        classes = sorted(entry.path for entry in os.scandir(folder))
        self._files = [
            (entry.path, label) for label, at in enumerate(classes) for entry in os.scandir(at)
        ]
        self._load = load

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        path, label = self._files[index]
        return self._load(path), label


def data_loader(name: str, folder: str, setting: Setting, device: torch.device) -> Any:
    """Return a ``DataLoader`` of ``uint8 [batch, 3, 224, 224]`` and labels."""
    from torchvision import io as torchvision_io
    from torchvision.transforms import v2

    changed = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])

    def by_pillow(path: str) -> Any:
        with Image.open(path) as image:
            return v2.functional.pil_to_tensor(changed(image.convert("RGB")))

    def by_decode_jpeg(path: str) -> Any:
        data = torchvision_io.read_file(path)
        return changed(torchvision_io.decode_jpeg(data, torchvision_io.ImageReadMode.RGB))

    return torch.utils.data.DataLoader(
        Photographs(folder, by_pillow if name == "torch, Pillow" else by_decode_jpeg),
        setting.batch,
        shuffle=True,
        drop_last=True,
        num_workers=default_threads() if name == "torch, 7 in 8" else setting.cores,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def moved(loader: Iterator[Any], device: torch.device) -> Batches:
    """Copy batches to a device, and normalize them there."""
    for pixels, labels in loader:
        yield (
            normalized(pixels.to(device, non_blocking=True), device),
            labels.to(device, non_blocking=True),
        )


def normalized(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    mean, std = statistics_on(device)
    return pixels.float().sub_(mean).div_(std).bfloat16()


def statistics_on(device: torch.device, kept: dict[Any, Any] = {}) -> Any:  # noqa: B006
    """Return ImageNet's mean and deviation on a device, copied once."""
    if device not in kept:
        means = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]) * 255
        kept[device] = means.view(2, 1, 3, 1, 1).to(device)
    return kept[device]


def visit(
    name: str, folder: str, setting: Setting, step: Step, device: torch.device
) -> dict[str, Any]:
    """Start an arm, train on it, and end it."""
    began = time.perf_counter()
    arm = opened(name, folder, setting, device)
    marks = Marks(device)
    try:
        step(*next(arm.batches))
        first_s = time.perf_counter() - began
        warm_until = time.perf_counter() + setting.warm_up_s(name)
        warm = 1
        while time.perf_counter() < warm_until or warm < setting.warm_steps:
            step(*next(arm.batches))
            warm += 1
        spent_s, used = processor_s(), arm.used()
        last = marks.now()
        measured_from = time.perf_counter()
        steps: list[tuple[Any, Any, Any]] = []  # the end of the one before, start, end
        while time.perf_counter() < measured_from + setting.measured_s or len(steps) < WINDOWS:
            batch = next(arm.batches)
            start = marks.now()
            step(*batch)
            steps.append((last, start, last := marks.now()))
        passed_s = time.perf_counter() - measured_from
        cores = (processor_s() - spent_s) / passed_s
        uses, fresh = (then - before for before, then in zip(used, arm.used(), strict=True))
        marks.seconds(last, last)
    finally:
        arm.close()
    windows = [[*each] for each in np.array_split(np.arange(len(steps)), WINDOWS)]
    rates, idle = [], []
    for window in windows:
        of = [steps[i] for i in window]
        whole_s = marks.seconds(of[0][0], of[-1][2])
        rates.append(len(of) * setting.batch / whole_s)
        idle.append(sum(marks.seconds(before, start) for before, start, _ in of) / whole_s)
    return {
        "arm": name,
        "first_s": first_s,
        "steps": len(steps),
        "rates": rates,
        "idle": idle,
        "cores": cores,
        "factor": uses / fresh if fresh else 1.0,
    }


def processor_s() -> float:
    """Return the processor time of this process and its children so far."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = process.cpu_times()
            total += spent.user + spent.system
    return total


def measured(setting: Setting, folder: str) -> None:
    """Let the arms of a setting take turns, in this process; print a row for each visit."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[: setting.cores])
    warnings.filterwarnings("ignore", message=".*use of fork")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # a quick run on the CPU meets busy cores
    if device.type == "cuda":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.backends.cudnn.benchmark = True
    step = Step(setting.network, device)
    visit("bound", folder, setting, step, device)  # finds cuDNN's algorithms
    failed = False
    for turn in range(setting.turns):
        for name in setting.arms[:: -1 if turn % 2 else 1]:
            if name in LOADERS and not has_torchvision():
                continue
            row = {"setting": setting.name, "turn": turn, "device": name_of(device)}
            try:
                row |= visit(name, folder, setting, step, device)
            except Exception:  # the others are measured all the same
                traceback.print_exc()
                failed = True
            else:
                print(json.dumps(row), flush=True)
    if failed:
        sys.exit(1)


def has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return False
    return True


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def written(files: list[bytes], folder: Path, names: int) -> Path:
    """Write files as folders of classes, under so many names in all."""
    (folder / "0000").mkdir(parents=True)
    for number, data in enumerate(files):
        (folder / "0000" / f"{number}.jpg").write_bytes(data)
    for label in range(1, names // len(files)):
        (folder / f"{label:04}").mkdir()
        for number in range(len(files)):
            os.link(folder / "0000" / f"{number}.jpg", folder / f"{label:04}" / f"{number}.jpg")
    return folder


def coloured(files: list[bytes]) -> list[bytes]:
    """Leave out what is not RGB, such as CMYK, which is decoded otherwise by each library."""
    return [data for data in files if Image.open(io.BytesIO(data)).mode == "RGB"]


def idle_fraction(rows: list[dict[str, Any]]) -> float:
    """Return the share of the time of all windows in which the GPU waits."""
    windows = [each for row in rows for each in zip(row["rates"], row["idle"], strict=True)]
    return sum(idle / rate for rate, idle in windows) / sum(1 / rate for rate, _ in windows)


def evaluate(made: Report) -> None:
    """Hold the arms against the bound, and stoker against the better ``DataLoader``."""
    for setting in dict.fromkeys(row["setting"] for row in made.rows):
        rows = [row for row in made.rows if row["setting"] == setting]
        bound = {row["turn"]: median(row["rates"]) for row in rows if row["arm"] == "bound"}
        if len(bound) <= max(row["turn"] for row in rows):
            made.say(f"{setting}: the bound is missing")
            continue
        lines, of_bound = [], {}
        for arm in dict.fromkeys(row["arm"] for row in rows):
            found = [row for row in rows if row["arm"] == arm]
            factor = median(row["factor"] for row in found)
            # Windows have as many steps each: so this is the rate of all together.
            rate = median(harmonic_mean(row["rates"]) for row in found)
            windows = [each / bound[row["turn"]] for row in found for each in row["rates"]]
            of_bound[arm] = Ratio(rate / median(bound.values()), min(windows), max(windows))
            lines.append(
                (
                    arm,
                    f"{rate:,.0f}",
                    of_bound[arm],
                    f"{idle_fraction(found):.1%}",
                    f"{factor:.2f}",
                    f"{rate / factor:,.0f}",
                    f"{median(row['cores'] for row in found):.1f}",
                    f"{median(row['first_s'] for row in found):.2f} s",
                )
            )
        head = ("examples/s", "of the bound", "idle", "factor", "fresh/s", "cores", "first")
        made.show((setting, *head), lines)
        theirs = [of_bound[arm].median for arm in LOADERS if arm in of_bound]
        if theirs and "stoker" in of_bound:
            of_theirs = of_bound["stoker"].median / max(theirs)
            made.expect(f"{setting}: stoker of the better DataLoader", of_theirs, 1.0)
        for arm in ECHOES:
            if arm in of_bound:
                made.expect(f"{setting}: {arm}, of the bound", of_bound[arm].median, 0.95)


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs")
    options.add_argument("--one", nargs=2, metavar=("SETTING", "FOLDER"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    several = [QUICK] if arguments.quick else settings(len(os.sched_getaffinity(0)))
    if arguments.one:
        name, folder = arguments.one
        measured(next(each for each in several if each.name == name), folder)
        return
    if not arguments.quick and not torch.cuda.is_available():
        print("cannot be measured here: there is no GPU\na quick run: no figures")
        return
    files = coloured(jpegs(arguments.jpegs, 32))
    failed = []
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as place:
        names = 640 if arguments.quick else NAMES
        folder = written(files, Path(place, "photographs"), names)
        run = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
        for setting in several:
            command = [sys.executable, "-W", "ignore", __file__, "--one", setting.name, str(folder)]
            with run([*command, *(["--quick"] if arguments.quick else [])]) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    made.add(**json.loads(line))
                    if not arguments.quick:
                        print(line, end="", file=sys.stderr, flush=True)
            if process.returncode:
                failed.append(setting.name)
    if failed:
        sys.exit(f"arms are missing in {'; '.join(failed)}")


if __name__ == "__main__":
    main()
