"""The names of ``stoker``: the package imports them from here when the first is used."""

import typing as _typing

from stoker import collate, images, testing, types
from stoker import foreign as _foreign
from stoker.adapters.cached_dataset import cached
from stoker.adapters.monitored import monitor
from stoker.adapters.schedules import lr_schedule
from stoker.adapters.serving import serve
from stoker.basics import plugins as _plugins
from stoker.basics.buffers import reads_only
from stoker.basics.thread_safety import thread_safe
from stoker.combining import concat, mix, zip
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
from stoker.engine.work.step import DROP
from stoker.errors import (
    CacheError,
    CacheWarning,
    ClusterError,
    FeedError,
    FieldError,
    RemoteError,
    StageError,
    StateError,
    StokerError,
    TokenError,
    TooManyErrors,
    UnlikeError,
    WorkerDied,
)
from stoker.pipeline import Pipeline
from stoker.sources.source import Source
from stoker.stages.composite import Stage, WindowStage
from stoker.version import __version__

if _typing.TYPE_CHECKING:
    from stoker.analysis import analyze
    from stoker.feeds.api import feed, from_feed

__all__ = [
    "__version__",
    "analyze",
    "cached",
    "CacheError",
    "CacheWarning",
    "ClusterError",
    "collate",
    "concat",
    "DROP",
    "echo",
    "feed",
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
    "mix",
    "monitor",
    "Pipeline",
    "reads_only",
    "RemoteError",
    "serve",
    "Source",
    "Stage",
    "StageError",
    "StateError",
    "StokerError",
    "testing",
    "thread_safe",
    "TokenError",
    "TooManyErrors",
    "types",
    "UnlikeError",
    "WindowStage",
    "WorkerDied",
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
        else:
            missing += _foreign.hint(name, _foreign.FUNCTIONS, __all__)
        raise AttributeError(missing)
