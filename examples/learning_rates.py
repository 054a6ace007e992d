"""Eight learning rates, eight processes, one preparation: with nothing but ``subprocess``.

    python examples/learning_rates.py

The first job to come starts the feeder, the last one ends it. Each job trains on every batch of
every epoch; the pictures are read and prepared once, not eight times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from task import make_pipeline, network, train_epoch

import stoker

RATES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0)
EPOCHS = 3


def train(rate: float, jobs: int) -> None:
    """Train with one learning rate."""
    torch.set_num_threads(1)
    batches = stoker.feed(make_pipeline, name="learning-rates", jobs=jobs).to_torch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(EPOCHS):
        loss = train_epoch(model, optimizer, batches)
    print(f"learning rate {rate:<6g} loss {loss:.3f}\n", end="", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rate", type=float, help="train with this one alone")
    options.add_argument("--jobs", type=int, default=len(RATES), help="how many of them")
    arguments = options.parse_args()
    if arguments.rate is not None:
        train(arguments.rate, arguments.jobs)
        return
    call = [sys.executable, __file__, "--jobs", str(arguments.jobs)]
    running = [subprocess.Popen([*call, "--rate", str(rate)]) for rate in RATES[: arguments.jobs]]
    sys.exit(max(job.wait() for job in running))


if __name__ == "__main__":
    main()
