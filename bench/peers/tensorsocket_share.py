"""TensorSocket: a producer around a torch DataLoader, and consumers. See bench/share.py.

The producer joins loader batches; two of half the size are the fewest that it works with (with one
it fails). The loader's workers stay between epochs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from consuming import consume

PORTS = {"port": 5955, "ack_port": 5956, "heart_ports": (5957, 5958)}


def main() -> None:
    role, folder, *numbers = sys.argv[1:]
    batch, crop, warm, threads = (int(number) for number in numbers)
    torch.set_num_threads(1)
    if role == "consumer":
        from tensorsocket import TensorConsumer

        consumer = TensorConsumer(batch_size=batch, **PORTS)

        def batches() -> Iterator[Any]:
            while True:
                yield from consumer

        consume(batches, warm)
        os._exit(0)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from peers.torch_share import loader
    from tensorsocket import TensorProducer

    producer = TensorProducer(
        loader(folder, batch // 2, crop, threads),
        producer_batch_size=2,
        **PORTS,
    )
    print("ready", flush=True)
    while True:
        for _ in producer:
            pass


if __name__ == "__main__":
    main()
