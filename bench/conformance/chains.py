"""Checks of states that others' libraries ship, on pipelines: ``python chains.py nodes|grain|dcp``.

Prints a JSON row for each check: ``{"test", "outcome", "error"}``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import stoker

ROOT = Path(__file__).resolve().parents[2]
N = 20


def noise(value: Any, rng: np.random.Generator) -> Any:
    return value + rng.integers(100)


def odd(value: Any) -> bool:
    return bool(value % 2)


def numbers() -> stoker.Pipeline[Any]:
    return stoker.from_arrays(np.arange(N), seed=0).shuffle()


CHAINS: dict[str, Callable[[], stoker.Pipeline[Any]]] = {
    "plain": lambda: numbers().batch(3),
    "drop_last": lambda: numbers().batch(3, drop_last=True),
    "random_map": lambda: numbers().random_map(noise).batch(3),
    "filter": lambda: numbers().filter(odd).batch(3),
    "echo": lambda: numbers().echo(2).random_map(noise).batch(3),
    "processes": lambda: numbers().random_map(noise).batch(3).workers(2, kind="process"),
}


def tell(test: str, check: Callable[..., object], *given: Any) -> None:
    """Run a check, and print its row."""
    error = ""
    try:
        check(*given)
    except BaseException as failed:  # the checkpoint's own is no Exception
        last = str(failed).strip().splitlines() or [""]
        error = f"{type(failed).__name__}: {last[-1]}"[:160]
    print(json.dumps({"test": test, "outcome": "failed" if error else "passed", "error": error}))


def nodes() -> None:
    """torchdata's ``run_test_save_load_state``: each of its seven comparisons is a check."""
    from nodes.utils import run_test_save_load_state  # type: ignore[import-not-found]
    from torchdata.nodes import BaseNode

    class Node(BaseNode):  # type: ignore[misc]
        def __init__(self, pipeline: stoker.Pipeline[Any]) -> None:
            super().__init__()
            self._pipeline = pipeline

        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            super().reset(initial_state)
            if initial_state is not None:
                self._pipeline.load_state_dict(initial_state)
            is_end = initial_state is not None and initial_state["finished"]
            self._batches = iter(()) if is_end else iter(self._pipeline)

        def next(self) -> Any:
            return next(self._batches).tolist()

        def get_state(self) -> dict[str, Any]:
            return self._pipeline.state_dict()

    checks = (
        *("the middle of an epoch", "the epoch after it", "the middle of the second epoch"),
        *("the beginning", "the second epoch after it", "the end, as a rest", "the end, restarted"),
    )

    class Compared:
        def __init__(self, chain: str) -> None:
            self._names = (f"{chain}: {check}" for check in checks)

        def assertEqual(self, found: Any, wanted: Any) -> None:
            def check() -> None:
                assert found == wanted, f"{len(found)} batches, not {len(wanted)}"

            tell(next(self._names), check)

    for name, build in CHAINS.items():
        run_test_save_load_state(Compared(name), Node(build()), 3)


def grain() -> None:
    """Grain's ``assert_equal_output_after_checkpoint``, of every chain that has states."""
    import torch
    from grain.experimental import assert_equal_output_after_checkpoint
    from torch.utils._pytree import tree_map_only

    sys.path[:0] = [str(ROOT / "tests" / "corpus"), str(ROOT / "tests")]
    from corpus_builder import STREAMS, build

    class Batches(Iterator[Any]):
        def __init__(self, pipeline: stoker.Pipeline[Any]) -> None:
            self._pipeline = pipeline
            self._batches: Iterator[Any] | None = None

        def __next__(self) -> Any:
            if self._batches is None:
                self._batches = iter(self._pipeline)
            return tree_map_only(torch.Tensor, torch.Tensor.numpy, next(self._batches))

        def get_state(self) -> dict[str, Any]:
            return self._pipeline.state_dict()

        def set_state(self, state: dict[str, Any]) -> None:
            self._pipeline.load_state_dict(state)
            self._batches = None

    class Dataset:
        def __init__(self, make: Callable[[], stoker.Pipeline[Any]]) -> None:
            self._make = make

        def __iter__(self) -> Batches:
            return Batches(self._make().workers(0))

    corpus = ROOT / "tests" / "corpus" / "corpus.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(corpus.read_text().splitlines()):
            row = json.loads(line)
            case, found = row["case"], row["found"]
            has_states = case["source"][0] not in STREAMS and "no_state" not in found
            if "error" in found or not has_states or not found["epochs"][0][0]:
                continue  # epochs without batches are errors to Grain
            dataset = Dataset(partial(build, case, Path(folder)))
            tell(str(number), assert_equal_output_after_checkpoint, dataset)


def dcp() -> None:
    """``torch.distributed.checkpoint`` of plain states: at each step, into a fresh pipeline."""
    import torch.distributed.checkpoint as torch_dcp

    def back_and_forth(build: Callable[[], stoker.Pipeline[Any]], steps: int) -> None:
        saved, loaded = build(), build()
        with iter(saved) as batches:
            for _ in range(steps):
                next(batches)
            with tempfile.TemporaryDirectory() as folder:
                torch_dcp.save({"loader": saved.state_dict()}, checkpoint_id=folder)
                state = {"loader": loaded.state_dict()}
                torch_dcp.load(state, checkpoint_id=folder)
            loaded.load_state_dict(state["loader"])
            rest = [batch.tolist() for batch in batches]
        assert [batch.tolist() for batch in loaded] == rest

    for name, build in CHAINS.items():
        for steps in (0, 1, 3):
            tell(f"{name}, step {steps}", back_and_forth, build, steps)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"nodes": nodes, "grain": grain, "dcp": dcp}[sys.argv[1]]()
