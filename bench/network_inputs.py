"""What does it cost to turn a batch of bytes into what a network takes?

1. The step alone: ``uint8 [64, 224, 224, 3]`` to normalized ``float32 [64, 3, 224, 224]``, by a
   pipeline over batches that are there: ``to_chw`` and ``normalize`` in either order, before and
   behind ``.to("cpu")``; by torch's operations in as few passes as there can be; and by NumPy into
   memory that is kept, a channel at a time.
2. The whole way: photographs, cropped to 224 at random, batches of 64, without that step and with
   it.

Processor time of all threads, in turns within one process, inline (``.workers(0)``), torch with one
thread.

Command::

    python bench/network_inputs.py --jpegs imagenet-sample.tar

Targets: the step at least twice as fast as NumPy by hand; at most a tenth on top of the whole way
(it was a quarter while NumPy did it in five passes).

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7, NumPy 2.4.6, torch 2.13.0.

Results::

    [results/network_inputs.json]
    the step                        ms a batch              NumPy / it
    ------------------------------------------------------------------
    stoker: to_chw, normalize             2.33     2.61 (2.34 .. 2.73)
    stoker: normalize, to_chw             2.26      2.7 (2.65 .. 2.75)
    stoker: .to, to_chw, normalize        2.54     2.25 (2.03 .. 2.45)
    torch by hand                        24.26  0.251 (0.237 .. 0.256)
    NumPy by hand                         6.13              1 (1 .. 1)

    the whole way           ms a batch      over uint8 batches
    ----------------------------------------------------------
    uint8 batches                 55.1              1 (1 .. 1)
    to_chw, normalize             57.3     1.05 (1.03 .. 1.05)
    .to, to_chw, normalize        52.7  0.961 (0.955 .. 0.965)
    torch by hand                 74.5     1.35 (1.33 .. 1.38)
    [end]

Caveats: a step into new memory instead of recycled costs twice as much, for page faults.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from gil import jpegs
from harness import Ratio, Report, interleaved, parser, report

import stoker
from stoker import images

ROWS = 64
MEAN, STD = (np.array(x, np.float32) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
STEP, BYTES = "stoker: to_chw, normalize", "uint8 batches"


def cpu_s(batches: Iterable[Any], count: int) -> float:
    """Return processor time a batch, after the first two."""
    rest = iter(batches)
    for _ in islice(rest, 2):
        pass
    began, found = time.process_time(), 0
    for _ in islice(rest, count):
        found += 1
    spent = time.process_time() - began
    if found < count:
        raise RuntimeError(f"{found} batches, but {count} are timed")
    return spent / count


def mapped(pipeline: stoker.Pipeline, names: str) -> stoker.Pipeline:
    """Put the stages of these names behind a pipeline."""
    stages: dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]] = {
        "to_chw": lambda p: p.map(images.to_chw, on=0),
        "normalize": lambda p: p.map(images.normalize(), on=0),
        "to": lambda p: p.to("cpu"),
        "torch": lambda p: p.to("cpu").map(by_torch, on=0),
        "numpy": lambda p: p.map(ByNumPy(), on=0),
    }
    for name in names.split():
        pipeline = stages[name](pipeline)
    return pipeline


def by_torch(batch: torch.Tensor) -> torch.Tensor:
    """Convert to floats in the new layout, then work in place."""
    made = torch.empty((len(batch), 3, *batch.shape[1:3]), dtype=torch.float32)
    made.copy_(batch.permute(0, 3, 1, 2))
    scale, shift = (torch.from_numpy(x).view(3, 1, 1) for x in (1 / (255 * STD), MEAN / STD))
    return made.mul_(scale).sub_(shift)


class ByNumPy:
    """Fills the same array for every batch."""

    def __init__(self) -> None:
        self._kept = np.empty((ROWS, 3, 224, 224), np.float32)

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        made = self._kept
        for channel in range(3):
            np.multiply(batch[..., channel], 1 / (255 * STD[channel]), out=made[:, channel])
        made -= (MEAN / STD)[:, None, None]
        return made


STEPS = {
    STEP: "to_chw normalize",
    "stoker: normalize, to_chw": "normalize to_chw",
    "stoker: .to, to_chw, normalize": "to to_chw normalize",
    "torch by hand": "torch",
    "NumPy by hand": "numpy",
    "nothing": "",
}
WAYS = {
    BYTES: "",
    "to_chw, normalize": "to_chw normalize",
    ".to, to_chw, normalize": "to to_chw normalize",
    "torch by hand": "torch",
}


def evaluate(found: Report) -> None:
    """Show milliseconds a batch, and hold the ratios against the targets."""
    steps = {row["step"]: row["cpu_s"] for row in found.having("step")}
    ways = {row["way"]: row["cpu_s"] for row in found.having("way")}
    idle = steps.pop("nothing")
    net = {name: [a - b for a, b in zip(each, idle, strict=True)] for name, each in steps.items()}
    lines = [
        (name, f"{1e3 * np.median(each):.2f}", Ratio.of(net["NumPy by hand"], each))
        for name, each in net.items()
    ]
    found.show(("the step", "ms a batch", "NumPy / it"), lines)
    lines = [
        (name, f"{1e3 * np.median(each):.1f}", Ratio.of(each, ways[BYTES]))
        for name, each in ways.items()
    ]
    found.show(("the whole way", "ms a batch", "over uint8 batches"), lines)
    if not found.quick:
        ratio = Ratio.of(net["NumPy by hand"], net[STEP])
        found.expect("the step, NumPy's time over stoker's", ratio.median, 2)
        whole = Ratio.of(ways["to_chw, normalize"], ways[BYTES])
        found.expect("the whole way, over uint8 batches", whole.median, 1.1, at_least=False)


def measure(found: Report, arguments: argparse.Namespace) -> None:
    """Measure both."""
    count = 2 if arguments.quick else 12
    rows = np.random.default_rng(0).integers(0, 256, (ROWS * 4, 224, 224, 3), np.uint8)
    ready = stoker.from_arrays(rows, np.arange(len(rows)), seed=0).batch(ROWS).workers(0)
    ready = ready.repeat().steps(count + 2)
    cases = {name: partial(cpu_s, mapped(ready, names), count) for name, names in STEPS.items()}
    for step, each in interleaved(cases, arguments.rounds).items():
        found.add(step=step, cpu_s=each)

    files = jpegs(arguments.jpegs, ROWS)
    pairs = [(files[at % len(files)], at) for at in range(ROWS * (count + 2))]
    crop = images.random_resized_crop(224, flip_p=0.5)
    cropped = stoker.from_dataset(pairs, seed=0).random_map(crop, on=0).batch(ROWS).workers(0)
    cases = {name: partial(cpu_s, mapped(cropped, names), count) for name, names in WAYS.items()}
    for way, each in interleaved(cases, arguments.rounds).items():
        found.add(way=way, cpu_s=each)


def main() -> None:
    command = parser(__doc__, evaluate)
    command.add_argument("--jpegs", help="a folder or tar of photographs; else some are made")
    arguments = command.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    torch.set_num_threads(1)
    with report(__file__, arguments) as found:
        measure(found, arguments)


if __name__ == "__main__":
    main()
