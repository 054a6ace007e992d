"""Classes of what pipelines and monitors hand out, for annotations; nobody makes them himself."""

from stoker.adapters.cached_dataset import CachedDataset
from stoker.adapters.monitored import EpochWait, Monitored
from stoker.adapters.schedules import LrSchedule
from stoker.chain.iterator import PipelineIterator
from stoker.errors import Skip
from stoker.schedule.progress import Progress
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

__all__ = [
    "CachedDataset",
    "CacheStats",
    "Counts",
    "EpochWait",
    "LrSchedule",
    "Monitored",
    "PartStats",
    "PipelineIterator",
    "PoolStats",
    "ProcessTrial",
    "Progress",
    "Skip",
    "StageStats",
    "Stats",
    "ThreadTrial",
    "Totals",
    "Uses",
    "WorkerTime",
]
