"""A source, or any other object with ``__len__`` and ``__getitem__``, as the engine reads it."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import (
    Fingerprint,
    content_digest,
    landmarks_of_dataset,
    landmarks_of_list,
)
from stoker.basics.pytree import is_tensor
from stoker.basics.thread_safety import is_thread_safe
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource, UserObject
from stoker.sources.source import Indices, Reader, Rows, Source

_OF_READER = ("requests", "expect", "fetch", "close")


class DatasetSource(IndexedSource):
    """The examples of a user's dataset or ``Source``: any object with ``__len__``, ``__getitem__``.

    All results of a user's ``Source`` are checked. Without a reader nothing is read ahead: a second
    read of an index may give another value. The object may have another length in the next epoch;
    ``with_current_length`` then returns a new source.
    """

    runs_user_code = True
    may_grow = True

    def __init__(self, data: Any) -> None:
        self.data = data
        self._source: Source[Any] = data if isinstance(data, Source) else _PlainDataset(data)
        self._length = len(data)
        self.prefers_blocks = self._source.prefers_blocks
        self._fetches = self._overrides("fetch")
        self.takes_many = self._fetches or gives_many(data)
        if self._overrides("rows") and not is_thread_safe(data):
            kind = type(data).__name__
            raise TypeError(
                f"several threads gather rows of {kind} at once: declare that this is safe, with "
                f"@stoker.thread_safe above class {kind}"
            )

    def _overrides(self, name: str) -> bool:
        """True if the object is a ``Source`` with this ability."""
        return getattr(type(self._source), name) is not getattr(Source, name)

    @property
    def is_numbered(self) -> bool:
        return not self._overrides("fingerprint")

    def __len__(self) -> int:
        return self._length

    def with_current_length(self) -> DatasetSource:
        if len(self.data) == self._length:
            return self
        twin = copy.copy(self)
        twin._length = len(self.data)
        return twin

    def user_objects(self) -> list[UserObject]:
        return [] if _only_indexes(self.data) else [UserObject(self.name, self.data)]

    def fetch(self, indices: Indices) -> list[Any]:
        """Ask the object: its ``fetch`` with these indices, others with plain integers."""
        if self._fetches:
            fetched: Any = self._source.fetch(indices)
            if not isinstance(fetched, list):
                raise TypeError(f"fetch() returned {_describe(fetched)}: return a list")
            return fetched
        if self.takes_many:
            plain = _plain(indices)
            try:
                found = list(self.data.__getitems__(plain))
            except IndexError as error:
                raise self._told(error) from error
            if len(found) != len(plain):
                raise ValueError(f"__getitems__ gave {len(found)} examples for {len(plain)}")
            return found
        examples: list[Any] = []
        if (failure := self.read_into(examples, indices)) is not None:
            raise failure
        return examples

    def read_into(self, examples: list[Any], indices: Indices) -> Exception | None:
        """Append examples one by one, up to the first error, which is returned.

        So each index is read once: after an error the object may be half changed, and return
        another value for the same index.
        """
        data = self.data
        try:
            for index in _plain(indices):
                examples.append(data[index])
        except Exception as error:
            return self._told(error)
        return None

    def _told(self, error: Exception) -> Exception:
        """Return an error, which says so if the object has become shorter."""
        if not isinstance(error, IndexError) or len(self.data) >= self._length:
            return error
        told = IndexError(
            f"{error}: the dataset had {self._length:,} examples when the epoch began, "
            f"{len(self.data):,} now"
        )
        told.__cause__ = error
        return told

    def identity(self) -> str | None:
        found: Any = self._source.identity()
        if found is not None and not isinstance(found, str):
            raise TypeError(f"{self.name}: identity() returned {_describe(found)}: return a text")
        return found

    def contents(self) -> str:
        """Return a digest of the object's own values."""
        return content_digest(self.data)

    def landmarks(self) -> dict[str, str]:
        data = self.data
        if self._overrides("name_of"):
            return self._names()
        is_plain = type(data) in (list, tuple) or isinstance(data, np.ndarray) or is_tensor(data)
        return landmarks_of_list(data) if is_plain else landmarks_of_dataset(data)

    def fingerprint(self, index: int) -> Fingerprint:
        found: Any = self._source.fingerprint(int(index))
        if type(found) is not Fingerprint:
            raise TypeError(
                f"fingerprint({index}) of {self.name} returned {_describe(found)}: return a "
                "stoker.sources.Fingerprint"
            )
        return found

    def reader(self, selection: Selection | None = None) -> Reader | None:
        reader = self._source.reader(selection)
        lacks = [name for name in _OF_READER if not hasattr(reader, name)]
        if reader is not None and lacks:
            raise TypeError(
                f"reader() of {self.name} returned {_describe(reader)}, which has no "
                f"{' and no '.join(lacks)}: see stoker.sources.Reader"
            )
        return reader

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        ends = self._source.blocks
        if ends is None:
            return None
        found: NDArray[Any] = np.asarray(ends)
        is_fit = found.ndim == 1 and found.dtype.kind in "iu" and (np.diff(found, prepend=0) > 0)
        if not np.all(is_fit) or found[-1:].tolist() != [self._length]:
            raise ValueError(
                f"blocks of {self.name} are no ends of blocks: return for each block the number "
                f"after its last example, ascending, the last one {self._length}"
            )
        return found.astype(np.int64)

    @property
    def rows(self) -> Rows | None:
        rows: Any = self._source.rows
        if rows is not None and not isinstance(rows, Rows):
            raise TypeError(f"rows of {self.name} are {_describe(rows)}, not stoker.sources.Rows")
        return rows

    def signature(self) -> str:
        if self._overrides("signature"):
            return self._source.signature()
        kind = type(self.data if isinstance(self.data, Source) else self).__name__
        return f"{kind} of {len(self)}"

    def extent(self) -> str:
        return self._source.extent() if self._overrides("extent") else super().extent()


def _asked(name: str) -> Callable[[DatasetSource, int], Any]:
    """Return a method that asks the user's ``Source``, with a plain integer."""
    return lambda self, index: getattr(self._source, name)(int(index))


for _name in ("name", "fields", "class_names", "column", "labels"):
    setattr(DatasetSource, _name, property(attrgetter(f"_source.{_name}")))
for _name in ("path", "local_path", "name_of"):
    setattr(DatasetSource, _name, _asked(_name))


class _PlainDataset(Source[Any]):
    """What is known of an object that is no ``Source``: the defaults."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> Any:
        return self._data[index]

    @property
    def name(self) -> str:
        return f"from_dataset({type(self._data).__name__})"


def gives_many(data: Any) -> bool:
    """True if an object's ``__getitems__`` stands for its ``__getitem__``.

    One that a base class has, or that a wrapper forwards, passes over a ``__getitem__`` of the
    class itself. So does a ``Subset`` that asks such an object.
    """
    kinds = type(data).__mro__
    many, one = (
        next((at for at, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("__getitems__", "__getitem__")
    )
    if many > one or getattr(type(data), "__getitems__", None) is None:
        return False
    inner = getattr(data, "dataset", None)
    return getattr(inner, "__getitems__", None) is None or gives_many(inner)


def of_dataset(dataset: Any) -> DatasetSource:
    """Return the source for ``from_dataset``. Raises TypeError if ``dataset`` is none."""
    if isinstance(dataset, Source):
        return DatasetSource(dataset)
    if isinstance(dataset, (str, bytes, os.PathLike)):
        raise TypeError(
            f"from_dataset needs an object with __len__ and __getitem__, not the path "
            f"{dataset!r}: from_folder, from_files, from_text, from_jsonl, from_csv, from_tar and "
            "from_parquet read files"
        )
    if isinstance(dataset, type):
        raise TypeError(
            f"from_dataset needs an object, not its class: from_dataset({dataset.__name__}(...))"
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
    is_table = hasattr(dataset, "__arrow_c_stream__") or hasattr(dataset, "__dataframe__")
    if is_table and not hasattr(dataset, "__getitems__"):
        raise TypeError(
            f"from_dataset asks for items by number, and those of a {type(dataset).__name__} "
            "are columns: use from_table"
        )
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        raise TypeError(
            f"from_dataset asks for items by number, and this {type(dataset).__name__} has the "
            f"keys {', '.join(map(repr, itertools.islice(dataset, 5)))}: give one of its values"
        )
    return DatasetSource(dataset)


def _plain(indices: Indices) -> list[int]:
    return indices.tolist() if isinstance(indices, np.ndarray) else list(indices)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else f'{text[:40]}...'}"


_INDEXED = (list, tuple, range, np.ndarray)


def _only_indexes(data: Any) -> bool:
    """True for lists, arrays, and datasets of torch and Hugging Face without code of the user's.

    Their exact classes: a class derived from one of them may do anything.
    """
    if type(data) in _INDEXED or is_tensor(data):
        return True
    module, name = type(data).__module__, type(data).__name__
    if module == "torch.utils.data.dataset":
        if name == "Subset":
            return _only_indexes(data.indices) and _only_indexes(data.dataset)
        if name == "ConcatDataset":
            return all(map(_only_indexes, data.datasets))
        return name == "TensorDataset"
    if module == "datasets.arrow_dataset" and name == "Dataset":
        return bool(data.format["type"] != "custom")  # what ``set_transform`` sets
    return False
