"""Classes of what pipelines and monitors hand out, for annotations; nobody makes them himself."""

from stoker.adapters.cached_dataset import CachedDataset as CachedDataset
from stoker.adapters.monitored import EpochWait as EpochWait
from stoker.adapters.monitored import Monitored as Monitored
from stoker.adapters.schedules import LrSchedule as LrSchedule
from stoker.chain.iterator import PipelineIterator as PipelineIterator
from stoker.errors import Skip as Skip
from stoker.schedule.epoch_time import EpochTime as EpochTime
from stoker.stats import CacheStats as CacheStats
from stoker.stats import Clock as Clock
from stoker.stats import PartStats as PartStats
from stoker.stats import PoolStats as PoolStats
from stoker.stats import ProcessTrial as ProcessTrial
from stoker.stats import StageStats as StageStats
from stoker.stats import Stats as Stats
from stoker.stats import ThreadTrial as ThreadTrial
from stoker.stats import Totals as Totals
from stoker.stats import Uses as Uses
from stoker.stats import WorkerTime as WorkerTime
