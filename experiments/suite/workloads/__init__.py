"""The workloads, by name: a file each."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path

from experiments.suite.workload import Variant, Workload

NAMES = ("fashion", "characters", "spoken", "cifar", "words", "detection")


def class_of(name: str) -> type[Workload]:
    """Return the class of a workload: what its module calls `WORKLOAD`."""
    found: type[Workload] = import_module(f"{__name__}.{name}").WORKLOAD
    return found


@lru_cache(maxsize=1)
def workload(name: str, variant: Variant, folder: Path | None) -> Workload:
    """Return a workload with its data read, once in a process. Raises MissingData."""
    return class_of(name)(variant, folder)
