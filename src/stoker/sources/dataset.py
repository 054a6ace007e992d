"""A source, or any other object with ``__len__`` and ``__getitem__``, as the engine reads it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.fingerprint import (
    Fingerprint,
    content_digest,
    landmark,
    landmarks_of_dataset,
    landmarks_of_list,
    rows_digest,
    spread,
)
from stoker.basics.pytree import is_tensor
from stoker.basics.thread_safety import is_thread_safe
from stoker.schedule.selection import Selection
from stoker.sources.arrow.table import is_table
from stoker.sources.origin import IndexedSource, UserObject
from stoker.sources.source import (
    Described,
    FetchesMany,
    Fingerprinted,
    GathersRows,
    HasSignature,
    Identified,
    Indices,
    Labeled,
    OwnSource,
    Reader,
    ReadsAhead,
    ReadsBlocks,
    ReadsColumns,
    ReadsFiles,
    Rows,
    Source,
)

_OF_READER = ("requests", "expect", "fetch", "close")


class DatasetSource(IndexedSource):
    """The examples of an object with ``__len__`` and ``__getitem__``: any dataset, any ``Source``.

    Its base classes say what else it can do (``sources.source``). ``__getitems__`` is used if it
    gives what ``__getitem__`` does. All results of a user's class are checked.

    Without a reader nothing is read ahead: a second read of an index may give another value. The
    object may be longer or shorter in the next epoch; ``with_current_length`` then returns a new
    source.

    Attributes:
        data: the object.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._length = len(data)
        self.runs_user_code = self.may_grow = not isinstance(data, OwnSource)
        self.is_numbered = not isinstance(data, Fingerprinted)
        self.prefers_blocks = isinstance(data, ReadsBlocks) and data.prefers_blocks
        self._lists = not isinstance(data, FetchesMany)
        self.takes_many = not self._lists or gives_many(data)
        if isinstance(data, GathersRows) and self.runs_user_code and not is_thread_safe(data):
            kind = type(data).__name__
            raise TypeError(
                f"several threads gather rows of {kind} at once, because it is a "
                "stoker.sources.GathersRows: declare that this is safe, with @stoker.thread_safe "
                f"above class {kind}"
            )

    @property
    def name(self) -> str:
        data = self.data
        return data.name if isinstance(data, Described) else f"from_dataset({type(data).__name__})"

    @property
    def kind(self) -> str:
        return type(self.data if isinstance(self.data, Source) else self).__name__

    @property
    def fields(self) -> Sequence[str | int] | None:
        return self.data.fields if isinstance(self.data, Described) else None

    def __len__(self) -> int:
        return self._length

    def with_current_length(self) -> DatasetSource:
        if len(self.data) == self._length:
            return self
        twin = copy.copy(self)
        twin._length = len(self.data)
        return twin

    def user_objects(self) -> list[UserObject]:
        is_users = self.runs_user_code and not _only_indexes(self.data)
        return [UserObject(self.name, self.data)] if is_users else []

    def fetch(self, indices: Indices) -> list[Any]:
        """Ask the object: a ``FetchesMany`` with these indices, others with plain integers."""
        if not self._lists:
            fetched: Any = self.data.fetch(indices)
            if not isinstance(fetched, list):
                raise TypeError(f"fetch() returned {_describe(fetched)}: return a list")
            return fetched
        if self.takes_many:
            plain = _plain(indices)
            found = list(self.data.__getitems__(plain))
            if len(found) != len(plain):
                raise ValueError(f"__getitems__ gave {len(found)} examples for {len(plain)}")
            return found
        examples: list[Any] = []
        error = self.read_into(examples, indices)
        if error is not None:
            raise error
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
            return error
        return None

    def path(self, index: int) -> str | None:
        return self.data.path(int(index)) if isinstance(self.data, Described) else None

    def local_path(self, index: int) -> str | None:
        return self.data.local_path(int(index)) if isinstance(self.data, ReadsFiles) else None

    def name_of(self, index: int) -> str:
        data = self.data
        return data.name_of(int(index)) if isinstance(data, Described) else str(index)

    def identity(self) -> str | None:
        if not isinstance(self.data, Identified):
            return None
        found: Any = self.data.identity()
        if found is not None and not isinstance(found, str):
            raise TypeError(f"{self.name}: identity() returned {_describe(found)}: return a text")
        return found

    def contents(self) -> str:
        """Return a digest of a user's object's own values, or of some rows of a stoker source."""
        if self.runs_user_code:
            return content_digest(self.data)
        return rows_digest(self.fetch, len(self)) if self.is_numbered else ""

    def landmarks(self) -> dict[str, str]:
        data = self.data
        if isinstance(data, Described) and type(data).name_of is not Described.name_of:
            return self._names()
        if isinstance(data, OwnSource):
            if self.blocks is not None:  # of an array in chunks, each example would read a chunk
                return {}
            at = spread(len(self), 3)
            return {f"example {n}": landmark(x) for n, x in zip(at, self.fetch(at), strict=True)}
        is_plain = type(data) in (list, tuple) or isinstance(data, np.ndarray) or is_tensor(data)
        return landmarks_of_list(data) if is_plain else landmarks_of_dataset(data)

    def _names(self) -> dict[str, str]:
        """Return the names of some examples, and the sizes of three."""
        at = spread(len(self))
        names, paths = [self.name_of(n) for n in at], [self.path(n) or "" for n in at]
        if len(set(paths)) > len(set(map(os.path.basename, paths))):  # equal names in folders
            above = os.path.commonpath(paths)
            names = [os.path.relpath(path, above) for path in paths]
        # The query of a URL may be a signature, which each rank has made by itself.
        found = {f"example {n}": name.partition("?")[0] for n, name in zip(at, names, strict=True)}
        for n in [] if self.is_numbered else spread(len(self), 3):
            with contextlib.suppress(OSError):  # a file is gone: the epoch says so, or skips it
                found[f"the size of example {n}"] = str(self.fingerprint(n).size_bytes)
        return found

    def fingerprint(self, index: int) -> Fingerprint:
        if self.is_numbered:
            return Fingerprint(int(index))
        found: Any = self.data.fingerprint(int(index))
        if type(found) is not Fingerprint:
            raise TypeError(
                f"fingerprint({index}) of {self.name} returned {_describe(found)}: return a "
                "stoker.sources.Fingerprint"
            )
        return found

    def reader(self, selection: Selection | None = None) -> Reader | None:
        if not isinstance(self.data, ReadsAhead):
            return None
        reader = self.data.reader(selection)
        lacks = [name for name in _OF_READER if not hasattr(reader, name)]
        if reader is not None and lacks:
            raise TypeError(
                f"reader() of {self.name} returned {_describe(reader)}, which has no "
                f"{' and no '.join(lacks)}: see stoker.sources.Reader"
            )
        return reader

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        if not isinstance(self.data, ReadsBlocks):
            return None
        ends = self.data.blocks
        if ends is None or not self.runs_user_code:
            return ends
        found: NDArray[Any] = np.asarray(ends)
        is_fit = found.ndim == 1 and found.dtype.kind in "iu" and (np.diff(found, prepend=0) > 0)
        if not np.all(is_fit) or found[-1:].tolist() != [self._length]:
            raise ValueError(
                f"blocks of {self.name} are no ends of blocks: return for each block the number "
                f"after its last example, ascending, the last one {self._length}"
            )
        return found.astype(np.int64)

    def column(self, field: str | int) -> NDArray[Any]:
        if isinstance(self.data, ReadsColumns):
            return self.data.column(field)
        return super().column(field)

    @property
    def rows(self) -> Rows | None:
        if not isinstance(self.data, GathersRows):
            return None
        rows: Any = self.data.rows
        if rows is not None and not isinstance(rows, Rows):
            raise TypeError(f"rows of {self.name} are {_describe(rows)}, not stoker.sources.Rows")
        return rows

    def signature(self) -> str:
        return self.data.signature() if isinstance(self.data, HasSignature) else super().signature()

    def extent(self, *, is_followed: bool) -> str:
        if isinstance(self.data, Described):
            return self.data.extent()
        return super().extent(is_followed=is_followed)

    def attribute(self, name: str) -> Any:
        if name == "class_names" and isinstance(self.data, Labeled):
            return self.data.class_names
        return super().attribute(name)


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
