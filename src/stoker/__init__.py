"""stoker: data loading that keeps accelerators fed."""

import typing as _typing

from stoker import collate as collate
from stoker import images as images
from stoker import testing as testing
from stoker.adapters.cached_dataset import CachedDataset, cached
from stoker.adapters.monitored import EpochWait, Monitored, monitor
from stoker.adapters.schedules import LrSchedule, lr_schedule
from stoker.adapters.serving import serve
from stoker.basics import plugins as _plugins
from stoker.basics.buffers import reads_only
from stoker.basics.thread_safety import thread_safe
from stoker.chain.iterator import PipelineIterator
from stoker.combining import concat, mix
from stoker.combining import zip as zip
from stoker.constructors import (
    echo,
    from_arrays,
    from_csv,
    from_dataset,
    from_files,
    from_folder,
    from_huggingface,
    from_iterable,
    from_jsonl,
    from_loader,
    from_parquet,
    from_table,
    from_tar,
    from_text,
    from_tokens,
)
from stoker.errors import (
    BudgetSpent,
    CacheError,
    CacheWarning,
    ClusterError,
    FeedError,
    FieldError,
    RemoteError,
    Skip,
    StageError,
    StateError,
    StokerError,
    TokenError,
    UnlikeError,
    WorkerDied,
)
from stoker.pipeline import Pipeline
from stoker.schedule.progress import Progress
from stoker.sources.source import Source
from stoker.stages.composite import Stage
from stoker.stages.scan import DROP
from stoker.stats import (
    CacheStats,
    Counts,
    PartStats,
    PoolStats,
    ProcessTrial,
    StageStats,
    Stats,
    ThreadTrial,
    Totals,
    Uses,
    WorkerTime,
)
from stoker.version import __version__

if _typing.TYPE_CHECKING:
    from stoker.analysis import analyze
    from stoker.feed.api import from_feed, share

__all__ = [
    "__version__",
    "analyze",
    "BudgetSpent",
    "cached",
    "CachedDataset",
    "CacheError",
    "CacheStats",
    "CacheWarning",
    "Counts",
    "ClusterError",
    "collate",
    "concat",
    "DROP",
    "echo",
    "Progress",
    "EpochWait",
    "FeedError",
    "FieldError",
    "from_arrays",
    "from_csv",
    "from_dataset",
    "from_feed",
    "from_files",
    "from_folder",
    "from_huggingface",
    "from_iterable",
    "from_jsonl",
    "from_loader",
    "from_parquet",
    "from_table",
    "from_tar",
    "from_text",
    "from_tokens",
    "images",
    "lr_schedule",
    "LrSchedule",
    "mix",
    "monitor",
    "Monitored",
    "PartStats",
    "Pipeline",
    "PipelineIterator",
    "PoolStats",
    "ProcessTrial",
    "reads_only",
    "RemoteError",
    "serve",
    "share",
    "Skip",
    "Source",
    "Stage",
    "StageError",
    "StageStats",
    "StateError",
    "Stats",
    "StokerError",
    "testing",
    "thread_safe",
    "ThreadTrial",
    "TokenError",
    "Totals",
    "UnlikeError",
    "Uses",
    "WorkerDied",
    "WorkerTime",
    "zip",
]

if not _typing.TYPE_CHECKING:  # else any name would be right for a type checker

    def __getattr__(name):
        """Return what stoker's rooms on top, or other packages, register under a name."""
        if name in _plugins.names(_plugins.NAMES):
            found = globals()[name] = _plugins.load(_plugins.NAMES, name)
            return found
        missing = f"module 'stoker' has no attribute {name!r}"
        if name in __all__:
            missing += ": it comes from the metadata of an installed stoker (pip install)"
        raise AttributeError(missing)

    def __dir__():
        return sorted({*globals(), *__all__})
