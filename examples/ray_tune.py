"""A Ray Tune run on one machine whose trials share one preparation.

pip install 'stoker[ray,torch]'
python examples/ray_tune.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ray import tune

HERE = str(Path(__file__).resolve().parent)
RATES = (0.01, 0.03, 0.1, 0.3)
EPOCHS = 3


def train(settings: dict[str, Any]) -> None:
    """Train with one learning rate: a trial, in a process that Ray starts."""
    sys.path.insert(0, HERE)
    import torch
    from task import make_pipeline, network, train_epoch

    import stoker

    torch.set_num_threads(1)
    batches = stoker.feed(make_pipeline, name="ray-tune").to_torch()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"])
    for _ in range(EPOCHS):
        tune.report({"loss": train_epoch(model, optimizer, batches)})


def main() -> None:
    tuner = tune.Tuner(train, param_space={"rate": tune.grid_search(list(RATES))})
    best = tuner.fit().get_best_result("loss", "min")
    print(f"best: {best.config}, loss {best.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
