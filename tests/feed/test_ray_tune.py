"""Trials of Ray Tune on several nodes share one preparation, with no other change."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from test_ray_feeds import check

from ray_nodes import MARKS, ray_cluster

pytestmark = [*MARKS, pytest.mark.full, pytest.mark.alone]
HERE = str(Path(__file__).parent)
EPOCHS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(sys.modules[__name__]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """In place of the check of all processes: a cluster starts and keeps some as it likes."""


def trial(config: dict[str, Any]) -> None:
    """Train on a shared feed, as each trial does, whatever node it is on."""
    sys.path.insert(0, HERE)
    import served
    from ray import tune

    import stoker

    target = f"{served.__file__}:batches"
    train = stoker.feed(target, name=config["feed"], cluster="ray", jobs=config["jobs"])
    found = []
    for _ in range(EPOCHS):
        for batch in train:
            at = train.state_dict()["loader"][0]
            found.append((at["epoch"] - (not at["number"]), served.digest(batch)))
    node = ray.get_runtime_context().get_node_id()
    tune.report({"loss": config["rate"], "found": found, "node": node})


def test_trials_on_two_nodes_share_a_feed(cluster: Any, tmp_path: Path) -> None:
    from ray import tune

    space = {
        "rate": tune.grid_search([1.0, 0.1, 0.01, 0.001]),
        "feed": f"tune-{os.getpid()}",
        "jobs": 4,
    }
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    found = [each.metrics for each in results if each.metrics is not None]
    assert len(found) == 4
    for each in found:
        check(each["found"], EPOCHS)
    assert len({each["node"] for each in found}) == 2
