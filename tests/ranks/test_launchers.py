"""Ranks that Ray Train or JAX tell of: found by ``.shard()``, and missed where it is left out."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from command_line import python
from stoker.distributed import unsharded

ROOT = Path(__file__).parents[2]


class RayTrain(types.ModuleType):
    """``ray.train`` in a worker, or where no training function runs."""

    def __init__(self, rank: int | None, world: int = 3) -> None:
        super().__init__("ray.train")
        self.rank, self.world = rank, world

    def get_context(self) -> Any:
        if self.rank is None:
            raise RuntimeError("`get_context` cannot be used outside of a training function")
        return types.SimpleNamespace(
            get_world_rank=lambda: self.rank, get_world_size=lambda: self.world
        )


def jax_of(rank: int | None, world: int = 3) -> Any:
    made: Any = types.ModuleType("jax")
    made.distributed = types.SimpleNamespace(is_initialized=lambda: rank is not None)
    made.process_index = lambda: rank
    made.process_count = lambda: world
    made.Array = made.Device = type("Device", (), {})
    made.sharding = types.SimpleNamespace(Sharding=type("Sharding", (), {}))
    return made


def numbers() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(30), seed=0).shuffle()


def drawn(pipeline: stoker.Pipeline) -> list[int]:
    return [int(number) for batch in pipeline.batch(4) for number in batch]


@pytest.mark.parametrize("framework", ["ray.train", "jax"])
def test_shard_finds_the_rank(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = RayTrain if framework == "ray.train" else jax_of
    parts = []
    for rank in range(3):
        monkeypatch.setitem(sys.modules, framework, make(rank))
        pipeline = numbers().shard()
        assert f"rank={rank}, world_size=3" in str(pipeline)
        assert drawn(pipeline) == drawn(numbers().shard(rank=rank, world_size=3))
        parts += drawn(pipeline)
    assert sorted(parts) == list(range(30))
    monkeypatch.setitem(sys.modules, framework, make(None))
    assert "world_size=1" in str(numbers().shard())


def test_who_iterates_unsharded_in_ray_train_is_told_what_to_add(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", RayTrain(1))
    with pytest.raises(ValueError, match=r"under Ray Train each of 3 ranks iterates.*\.shard\("):
        drawn(numbers())
    assert len(drawn(numbers().shard(rank=0, world_size=1))) == 30

    class Loader:
        sampler = None

        def __iter__(self) -> Any:
            return iter([np.arange(2)])

    with pytest.raises(ValueError, match=r"echo\(ray\.train\.torch\.prepare_data_loader"):
        list(stoker.echo(Loader(), 2))
    # A part of Ray Data's has no sampler, and may well be divided: that cannot be seen.
    monkeypatch.setattr(unsharded, "_warned", set())
    with pytest.warns(UserWarning, match="each of 3 ranks iterates over all batches"):
        assert len(list(stoker.echo([np.arange(2)] * 4, 2))) == 8


def test_keras_s_own_processes_are_told_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", jax_of(1))
    there: dict[str, Any] = {"__name__": "keras.src.trainers.data_adapters.py_dataset_adapter"}
    exec("def iterate(train): return list(train)", there)
    with pytest.raises(ValueError, match=r"under Keras each of 3 ranks.*\.shard\("):
        there["iterate"](numbers().batch(4))


def test_auto_echo_says_that_it_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", RayTrain(1))
    with pytest.raises(ValueError, match="process group"):
        iter(numbers().shard().echo("auto").batch(4))


RAY_DATA = """
import ray

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
import stoker

data = ray.data.range(48)
for train in (
    stoker.from_iterable(data.iter_rows, seed=0).shuffle(buffer=16).batch(8),
    stoker.echo(lambda: data.iter_batches(batch_size=8), 1),
    stoker.echo(data.iterator().iter_batches(batch_size=8), 1),
):
    for epoch in range(2):
        seen = [int(number) for batch in train for number in batch["id"]]
        assert sorted(seen) == list(range(48)), seen
ray.shutdown()
"""


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_dataset_of_ray_is_a_source(tmp_path: Path) -> None:
    in_ray(RAY_DATA, tmp_path)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(1000)
def test_ray_train_goes_on_where_it_was_when_a_worker_is_lost(tmp_path: Path) -> None:
    in_ray(
        f"""
import sys

sys.path.insert(0, {str(ROOT / "examples")!r})
import ray

ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80_000_000)
import ray_train

ray.cloudpickle.register_pickle_by_value(ray_train)
ray_train.main({str(tmp_path)!r})
ray.shutdown()
""",
        tmp_path,
    )
    assert (tmp_path / "lost").exists()
    per_epoch = 512 // 2 // 16
    trained: dict[int, list[int]] = {}
    for rank in range(2):
        last: dict[int, list[int]] = {}
        steps = []
        for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines():
            step, examples = json.loads(line)
            # What was trained on behind the last checkpoint is trained on again: the same.
            assert last.setdefault(step, examples) == examples
            steps.append(step)
        assert sorted(last) == list(range(1, 3 * per_epoch + 1))
        (again,) = [at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]]
        assert (steps[again] - 1) % 4 == 0  # right behind a checkpoint
        for step, examples in last.items():
            trained.setdefault((step - 1) // per_epoch, []).extend(examples)
    for examples in trained.values():
        assert sorted(examples) == list(range(512))


def in_ray(code: str, tmp_path: Path) -> None:
    """Run a program that starts a cluster of its own, and leaves no process behind."""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    done = python(script, cwd=tmp_path, **environment, RAY_worker_niceness="0")
    assert done.returncode == 0, done.stdout + done.stderr
