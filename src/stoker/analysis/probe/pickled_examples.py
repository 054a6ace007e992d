"""Examples of the script's dataset in memory, to measure training on a cache of them.

They stand for those of ``stoker.cached``: bytes, from which an example is made anew each time.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
from typing import Any


class PickledExamples:
    """A dataset whose examples are in memory; in all else it answers as the script's own."""

    def __init__(self, dataset: Any, records: dict[Any, bytes]) -> None:
        """``records``: what ``write_example`` gave, by ``name_index``."""
        self._dataset, self._records = dataset, records

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return pickle.loads(self._records[name_index(index)])

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # PyTorch would ask the dataset for many examples; so does pickle
            raise AttributeError(name)
        return getattr(self._dataset, name)


def name_index(index: Any) -> Any:
    """Return a key for an index, which may be of any type."""
    return operator.index(index) if hasattr(index, "__index__") else repr(index)


def write_example(example: Any) -> bytes:
    """Return an example as bytes; tensors as NumPy's arrays, which are made anew much faster."""
    file = io.BytesIO()
    _ExamplePickler(file, protocol=5).dump(example)
    return file.getvalue()


class _ExamplePickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not sys.modules["torch"].Tensor:
            return NotImplemented
        try:
            return _make_tensor, (value.detach().numpy(),)
        except (TypeError, RuntimeError):  # NumPy has no such dtype, or it is sparse
            return NotImplemented


def _make_tensor(array: Any) -> Any:
    return sys.modules["torch"].from_numpy(array)
