"""Hands a few batches over again and again, to measure training that never waits for data.

Its epochs are as long as the loader says. Each ``iter()`` gives an iterator of PyTorch's class that
reads nothing, and counts batches where PyTorch does (``_num_yielded``).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

# Different ones, so that a step's data do not stay in the caches of processor or accelerator.
# Chosen, not measured.
_BATCHES = 8
# Of memory that the script did not plan for.
_BYTES = 256 << 20
# PyTorch's _DatasetKind.Map.
_MAP = 0


class Bank:
    """A few real batches, handed over in turn.

    Containers are made anew each time, as scripts take entries out of them. Tensors are the stored
    ones. Once a script has written into a batch, every use gets a copy.
    """

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._turn = 0
        self._copies = True
        self._lent: list[tuple[Any, int]] = []  # tensors and their versions, as handed over

    def next(self) -> Any:
        if self._copies and self._turn >= len(self._batches) and self._lent:
            self._copies = any(_version(tensor) != version for tensor, version in self._lent)
        batch = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        if not self._copies:
            return _rebuild(batch, _keep)
        handed = _rebuild(batch, _copy)
        if self._turn <= len(self._batches):
            self._lent.extend((tensor, _version(tensor)) for tensor in list_tensors(handed))
        elif self._lent:
            self._lent = []
        return handed


def read_some(read: Callable[[], Any]) -> tuple[list[Any], bool]:
    """Read some batches for a bank; return whether the epoch ended with them, too.

    Raises StopIteration if there is none, and any error of reading the first one.
    """
    batches = [read()]
    size = max(1, sum(t.element_size() * t.nelement() for t in list_tensors(batches[0])))
    while len(batches) < _BATCHES and (len(batches) + 1) * size <= _BYTES:
        try:
            batches.append(read())
        except StopIteration:
            return batches, True
        except Exception:  # the script's own error, which it meets when it reads there itself
            break
    return batches, False


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def list_tensors(value: Any) -> list[Any]:
    """Return the tensors inside of a batch."""
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    _rebuild(value, note)
    return found


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # an inference tensor has none
        return 0


def _keep(tensor: Any) -> Any:
    return tensor


def _copy(tensor: Any) -> Any:
    copied = tensor.clone()
    return copied.pin_memory() if tensor.is_pinned() else copied


def _rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Build containers anew around ``leaf(tensor)``; NumPy arrays are copied."""
    if _is_tensor(value):
        return leaf(value)
    if isinstance(value, tuple):
        new = [_rebuild(part, leaf) for part in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, list):
        parts = copy.copy(value)
        parts[:] = [_rebuild(part, leaf) for part in value]
        return parts
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key in list(value):
            made[key] = _rebuild(value[key], leaf)
        return made
    if type(value).__module__ == "numpy" and hasattr(value, "copy"):
        return value.copy()
    return value


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
