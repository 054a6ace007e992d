"""Any object with ``__len__`` and ``__getitem__``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.cache.fingerprint import Fingerprint
from stoker.sources.arrow_rows import is_table
from stoker.sources.source import IndexedSource, Indices


class DatasetSource(IndexedSource):
    """Any object with ``__len__`` and ``__getitem__``; ``__getitems__`` is used when there.

    Nothing is read ahead: it may not give the same when it is asked twice.
    """

    runs_user_code = True
    is_numbered = True

    def __init__(self, dataset: Any) -> None:
        for method in ("__getitem__", "__len__"):
            if not hasattr(dataset, method):
                raise TypeError(
                    f"from_dataset needs an object with __len__ and __getitem__; "
                    f"{type(dataset).__name__} has no {method}"
                )
        if is_table(dataset) and not hasattr(dataset, "__getitems__"):
            raise TypeError(
                f"from_dataset asks for items by number, and those of a {type(dataset).__name__} "
                "are columns: use from_table"
            )
        if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
            raise TypeError(
                f"from_dataset asks for items by number, and this {type(dataset).__name__} has the "
                f"keys {', '.join(map(repr, itertools.islice(dataset, 5)))}: give one of its values"
            )
        self.dataset = dataset
        self._length = len(dataset)
        self.takes_many = getattr(dataset, "__getitems__", None) is not None

    @property
    def name(self) -> str:
        return f"from_dataset({type(self.dataset).__name__})"

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Indices) -> list[Any]:
        """Ask the dataset, with plain integers."""
        plain = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
        if self.takes_many:
            examples = list(self.dataset.__getitems__(plain))
            if len(examples) != len(plain):
                raise ValueError(f"__getitems__ gave {len(examples)} examples for {len(plain)}")
            return examples
        return [self.dataset[index] for index in plain]

    def path(self, index: int) -> str | None:
        """Return None: a dataset does not tell."""
        return None

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))
