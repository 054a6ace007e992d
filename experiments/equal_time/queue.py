"""A queue of cells, carried out by processes that share an accelerator."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.equal_time.plan import Cell
from experiments.equal_time.rows import row_of

FEATURE_STEPS = 3_000
_LATE_S = 20.0
"""What a process is given, behind the deadline, to notice it."""


def carry_out(
    cells: Sequence[Cell],
    seeds: list[int],
    folder: Path,
    device: str,
    processes: int,
    deadline: float,
    on_row: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    feature_steps: int = FEATURE_STEPS,
) -> None:
    """Carry out cells in their order until they are over, or the deadline comes.

    Args:
        deadline: by `time.monotonic`.
        on_row: is told of each row; `say`, of each cell that was given up or failed.
        feature_steps: steps in which the frozen features are learned, by the first in need of them.
    """
    context = multiprocessing.get_context("spawn")
    waiting, told, learning = context.Queue(), context.Queue(), context.Lock()
    for cell in cells:
        waiting.put(cell)
    for _ in range(processes):
        waiting.put(None)
    left = deadline - time.monotonic()
    running = [
        context.Process(
            target=_work,
            args=(waiting, told, learning, seeds, folder, device, left, feature_steps),
            daemon=True,
        )
        for _ in range(processes)
    ]
    for process in running:
        process.start()
    working = processes
    try:
        while working:
            late = deadline + _LATE_S - time.monotonic()
            if late < 0:
                say("processes did not end in time")
                break
            try:
                kind, what = told.get(timeout=min(late, 1.0))
            except Exception:  # queue.Empty; a process that was killed tells nothing
                working = sum(process.is_alive() for process in running)
                continue
            if kind == "row":
                on_row(what)
            elif kind == "said":
                say(what)
            else:
                working -= 1
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _work(
    waiting: Any,
    told: Any,
    learning: Any,
    seeds: list[int],
    folder: Path,
    device: str,
    left: float,
    feature_steps: int,
) -> None:
    """Carry out cells until there are none, in a process of its own."""
    # Here, so that the first process needs no torch.
    import torch

    from experiments.equal_time.features import write_features
    from experiments.equal_time.plan import made
    from experiments.equal_time.training import OutOfTimeError, tune_and_train

    deadline = time.monotonic() + left if math.isfinite(left) else math.inf
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    tasks: dict[Any, Any] = {}
    while (cell := waiting.get()) is not None:
        if time.monotonic() > deadline:
            break
        try:
            if cell.task == "features":
                with learning:
                    write_features(folder, device, feature_steps)
            which = (cell.task, cell.examples, cell.augments)
            if which not in tasks:
                tasks.clear()
                tasks[which] = made(cell, folder, device)
            task = tasks[which]
            found = tune_and_train(task, cell, seeds, deadline)
            found["device"] = torch.cuda.get_device_name() if device != "cpu" else "cpu"
            told.put(("row", row_of(cell, seeds, found)))
        except OutOfTimeError as error:
            told.put(("said", f"{cell.key} given up: {error}"))
        except Exception as error:
            told.put(("said", f"{cell.key} failed: {type(error).__name__}: {error}"))
    told.put(("over", None))
