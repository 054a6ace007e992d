"""stoker: data loading that keeps accelerators fed."""

from stoker import images as images
from stoker.errors import StageError, StateError, StokerError, WorkerDied
from stoker.pipeline import (
    Pipeline,
    PipelineIterator,
    echo,
    from_arrays,
    from_dataset,
    from_folder,
    from_loader,
)
from stoker.stats import PoolStats, StageStats, Stats

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "echo",
    "from_arrays",
    "from_dataset",
    "from_folder",
    "from_loader",
    "images",
    "Pipeline",
    "PipelineIterator",
    "PoolStats",
    "StageError",
    "StageStats",
    "StateError",
    "Stats",
    "StokerError",
    "WorkerDied",
]
