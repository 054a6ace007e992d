"""Any object with ``__len__`` and ``__getitem__``."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stoker.basics.fingerprint import Fingerprint, told
from stoker.sources.arrow.table import is_table
from stoker.sources.source import IndexedSource, Indices, UserObject


class DatasetSource(IndexedSource):
    """Any object with ``__len__`` and ``__getitem__``; uses ``__getitems__`` if it has that.

    Nothing is read ahead: a second read of an index may give another value. The object may be
    longer or shorter in the next epoch; ``measured`` then returns a new source for it.
    """

    runs_user_code = True
    is_numbered = True
    may_grow = True

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, (str, bytes, os.PathLike)):
            raise TypeError(
                f"from_dataset needs an object with __len__ and __getitem__, not the path "
                f"{dataset!r}: from_folder, from_files, from_tar and from_parquet read files"
            )
        if isinstance(dataset, type):
            raise TypeError(
                "from_dataset needs an object, not its class: "
                f"from_dataset({dataset.__name__}(...))"
            )
        for method in ("__getitem__", "__len__"):
            if not hasattr(dataset, method):
                name = type(dataset).__name__
                way = ""
                if hasattr(dataset, "dataset") and hasattr(dataset, "__iter__"):
                    way = ": from_loader takes it as it is, and its dataset goes in here"
                elif hasattr(dataset, "__iter__"):
                    way = ": a stream goes into from_iterable"
                raise TypeError(
                    "from_dataset needs an object with __len__ and __getitem__; "
                    f"{name} has no {method}{way}"
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

    def measured(self) -> DatasetSource:
        if len(self.dataset) == self._length:
            return self
        twin = copy.copy(self)
        twin._length = len(self.dataset)
        return twin

    def user_objects(self) -> list[UserObject]:
        return [UserObject(self.name, self.dataset)]

    def with_user_objects(self, objects: Sequence[Any]) -> DatasetSource:
        twin = copy.copy(self)
        (twin.dataset,) = objects
        return twin

    def fetch(self, indices: Indices) -> list[Any]:
        """Ask the dataset, with plain integers."""
        if self.takes_many:
            plain = _plain(indices)
            examples: list[Any] = list(self.dataset.__getitems__(plain))
            if len(examples) != len(plain):
                raise ValueError(f"__getitems__ gave {len(examples)} examples for {len(plain)}")
            return examples
        examples = []
        error = self.read_into(examples, indices)
        if error is not None:
            raise error
        return examples

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        """Append examples one by one, up to the first error, which is returned.

        So each index is read once: after an error the dataset may be half changed, and return
        another value for the same index.
        """
        dataset = self.dataset
        try:
            for index in _plain(indices):
                examples.append(dataset[index])
        except Exception as error:
            return error
        return None

    def path(self, index: int) -> str | None:
        """Return None: a dataset has no file names."""
        return None

    def contents(self) -> str:
        return told(self.dataset)

    def fingerprint(self, index: int) -> Fingerprint:
        return Fingerprint(int(index))


def _plain(indices: Indices) -> list[int]:
    return indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
