"""Epochs of batches that the probe hands over: as long as the loader says.

Each ``iter()`` gives an iterator of PyTorch's class that reads nothing, and counts batches where
PyTorch does (``_num_yielded``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

# PyTorch's _DatasetKind.Map.
_MAP = 0


def take_parts(loader: Any) -> SimpleNamespace:
    """Return the parts of a loader that replay and drains need. The iterator keeps them alive.

    The loader itself is not among them: a loop may hold the last reference to it, and with
    persistent workers loader and iterator would keep each other alive.
    """
    names = (
        "dataset", "collate_fn", "pin_memory", "batch_size", "drop_last", "prefetch_factor",
        "multiprocessing_context", "timeout", "worker_init_fn", "sampler", "_dataset_kind",
        "_auto_collation", "_index_sampler", "num_workers", "persistent_workers",
    )  # fmt: skip
    return SimpleNamespace(**{name: getattr(loader, name) for name in names})


def is_over(iterator: Any, seen_length: int | None) -> bool:
    """True if an iterator has handed out a whole epoch.

    ``seen_length`` is the length of an epoch that ended by itself. It is used only for streams,
    whose length is often unknown or wrong.
    """
    parts = iterator.__dict__["_stoker_loader"]
    if "length" not in vars(parts):
        parts.length = _find_length(parts)
        if parts._dataset_kind != _MAP and seen_length is not None:
            parts.length = min(seen_length, parts.length or seen_length)
    return parts.length is not None and iterator._num_yielded >= parts.length


def _find_length(parts: SimpleNamespace) -> int | None:
    """Return the value of ``len(loader)``; None if it has none.

    The loader is not asked: over a stream it would record the call, and warn later on.
    """
    try:
        if parts._dataset_kind == _MAP:
            return len(parts._index_sampler)
        examples: int = len(parts.dataset)
        if parts.batch_size is None:
            return examples
        size: int = parts.batch_size
        return examples // size if parts.drop_last else -(-examples // size)
    except Exception:  # a user's __len__ may raise anything
        return None


def begin_epoch(loader: Any, kind: type) -> Any:
    """Return the iterator of a loader while the probe hands batches over: it reads nothing.

    It is new, as PyTorch would make it; with persistent workers it is the existing one.
    """
    kept = getattr(loader, "_iterator", None)
    if kept is not None and loader.persistent_workers and loader.num_workers > 0:
        kept._num_yielded = 0
        return kept
    # Without ``__init__``, which would start workers, or read from the sampler.
    iterator: Any = object.__new__(kind)
    iterator._num_yielded = 0
    iterator._index_sampler = loader._index_sampler  # len() of it
    iterator._shutdown = True  # there are no workers to stop
    return iterator
