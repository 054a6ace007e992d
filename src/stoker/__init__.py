"""stoker: data loading that keeps accelerators fed."""

from stoker import collate as collate
from stoker import images as images
from stoker import testing as testing
from stoker.adapters.cached_dataset import CachedDataset, cached
from stoker.adapters.copies import CopyValue, Gap, value_of_copies
from stoker.adapters.display import live
from stoker.adapters.exposition import MetricsServer, serve_metrics
from stoker.adapters.monitored import EpochWait, Monitored, monitor
from stoker.adapters.scalars import metrics
from stoker.adapters.schedules import LrSchedule, lr_schedule
from stoker.analysis import analyze
from stoker.basics.buffers import reads_only
from stoker.chain.iterator import PipelineIterator
from stoker.constructors import (
    echo,
    from_arrays,
    from_dataset,
    from_files,
    from_folder,
    from_huggingface,
    from_iterable,
    from_loader,
    from_parquet,
    from_table,
    from_tar,
    from_tokens,
    mix,
)
from stoker.errors import (
    BudgetSpent,
    CacheError,
    CacheWarning,
    ClusterError,
    FeedError,
    RemoteError,
    Skip,
    StageError,
    StateError,
    StokerError,
    TokenError,
    WorkerDied,
)
from stoker.feed.api import from_feed, share
from stoker.pipeline import Pipeline
from stoker.replicas.thread_safety import thread_safe
from stoker.sources.source import Source
from stoker.stages.scan import DROP
from stoker.stats import (
    CacheStats,
    Clock,
    PartStats,
    PoolStats,
    StageStats,
    Stats,
    ThreadTrial,
    Totals,
    Uses,
    WorkerTime,
)
from stoker.version import __version__

__all__ = [
    "__version__",
    "analyze",
    "BudgetSpent",
    "cached",
    "CachedDataset",
    "CacheError",
    "CacheStats",
    "CacheWarning",
    "Clock",
    "ClusterError",
    "collate",
    "CopyValue",
    "DROP",
    "echo",
    "EpochWait",
    "FeedError",
    "from_arrays",
    "from_dataset",
    "from_feed",
    "from_files",
    "from_folder",
    "from_huggingface",
    "from_iterable",
    "from_loader",
    "from_parquet",
    "from_table",
    "from_tar",
    "from_tokens",
    "Gap",
    "images",
    "live",
    "lr_schedule",
    "LrSchedule",
    "metrics",
    "MetricsServer",
    "mix",
    "monitor",
    "Monitored",
    "PartStats",
    "Pipeline",
    "PipelineIterator",
    "PoolStats",
    "reads_only",
    "RemoteError",
    "serve_metrics",
    "share",
    "Skip",
    "Source",
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
    "Uses",
    "value_of_copies",
    "WorkerDied",
    "WorkerTime",
]
