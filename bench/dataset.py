"""A plain dataset: what does stoker add to ``__getitem__``, example by example?

50,000 images uint8 32x32x3 with labels behind a ``__getitem__`` that returns one row of each;
shuffled, batches of 256. Against torch's DataLoader with 0 and with 2 workers (kept between
epochs).

Command::

    python bench/dataset.py

Target: whole epochs at least 1.5 of the better of the two DataLoaders.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, no GPU; Python 3.11.7 (a plain loop
iteration takes 290 ns there, so that Python's own share weighs several times more than
usual), NumPy 2.4.6, torch 2.13.0.

Results::

    [results/dataset.json]
    case                examples/s             stoker / it
    ------------------------------------------------------
    stoker                 142,706              1 (1 .. 1)
    stoker, workers(2)     144,420  0.984 (0.934 .. 0.999)
    torch, 0 workers        74,088     1.93 (1.84 .. 1.97)
    torch, 2 workers        60,639     2.32 (2.26 .. 2.39)
    [end]

Caveats: the dataset does next to nothing, so this is the cost of the loader alone.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from harness import Ratio, Report, interleaved, parser, report
from peers.serve import Epochs, arrays, check, timed, whole_rates
from torch.utils.data import DataLoader

import stoker

BATCH = 256


class Rows:
    """The arrays, one example a call."""

    def __init__(self, images: Any, labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._images[index], self._labels[index]


def evaluate(found: Report) -> None:
    """Compare stoker with each case."""
    rates = {row["case"]: whole_rates(row["samples"]) for row in found.rows}
    lines = []
    for name, each in rates.items():
        ratio = Ratio.of(rates["stoker"], each)
        lines.append((name, f"{median(each):,.0f}", ratio))
        if name.startswith("torch"):
            found.expect(f"whole epochs of {name}", ratio.median, 1.5)
    found.show(("case", "examples/s", "stoker / it"), lines)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    rows, least_s, rounds = (2_000, 0.0, 1) if arguments.quick else (50_000, 0.5, arguments.rounds)
    data: Any = Rows(*arrays(rows))
    pipeline = stoker.from_dataset(data).shuffle().batch(BATCH)
    two = pipeline.workers(2)
    loader = partial(DataLoader, data, batch_size=BATCH, shuffle=True)
    plain, workers = loader(), loader(num_workers=2, persistent_workers=True)
    epochs: dict[str, Epochs] = {
        "stoker": lambda: pipeline,
        "stoker, workers(2)": lambda: two,
        "torch, 0 workers": lambda: plain,
        "torch, 2 workers": lambda: workers,
    }
    with report(__file__, arguments) as found:
        for epoch in epochs.values():
            check(epoch, rows)
        samples = interleaved({n: partial(timed, e, least_s) for n, e in epochs.items()}, rounds)
        for name, each in samples.items():
            found.add(case=name, samples=each)


if __name__ == "__main__":
    main()
