"""Describes the examples of the script's dataset, tells whether they are random, and keeps some."""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .state import find_changes, read_state

# Items whose first reading may draw from the usual generators: some may be left as they are.
_ITEMS = 16
# The script stands still meanwhile: slow examples are read fewer times.
_LONGEST_S = 1.0
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)


def describe_example(dataset: Any) -> dict[str, Any]:
    """Return the mean bytes of an example's arrays, whether examples are random, and what moves.

    They are random if reading one moves a random generator of Python, NumPy or torch, or gives
    other values than before. If they are not, what reading changes of the dataset is named. The
    result is empty if the dataset does not give them, or a cache could not hold one. This mirrors
    ``stoker/transport/codec``, because the probe must not import stoker.
    """
    sizes: list[int] = []

    def read(index: int) -> list[Any]:
        leaves = _list_leaves(dataset[index])
        sizes.append(sum(getattr(leaf, "nbytes", 0) for leaf in leaves))
        return leaves

    varies, moves = False, list[str]()
    try:
        count = len(dataset)
        indices = dict.fromkeys(item * count // _ITEMS for item in range(_ITEMS))
        first = [*read_first(read, indices, _LONGEST_S / 2)]
        read_again(read, first, _is_same_example, _LONGEST_S / 2)
        # It has been read before: what the first time leaves is there.
        state = read_state(dataset, draws=False)
        dataset[0]
        moves = find_changes(state, read_state(dataset, draws=False))
    except RandomExamples:
        varies = True
    except Exception:
        return {}
    size = round(sum(sizes) / len(sizes))
    return {"example_bytes": size, "varies": varies, "moves": moves}


class RandomExamples(Exception):
    """Reading an example moves a shared generator, or gives another value each time."""


def read_first(
    read: Callable[[Any], Any], keys: Iterable[Any], enough_s: float
) -> Iterator[tuple[Any, Any]]:
    """Yield each key with what is read, until it took long enough. Raises RandomExamples."""
    began = time.monotonic()
    for key in keys:
        before = read_generators()
        value = read(key)
        if read_generators() != before:
            raise RandomExamples
        yield key, value
        if time.monotonic() - began > enough_s:
            return


def read_again(
    read: Callable[[Any], Any],
    first: Sequence[tuple[Any, Any]],
    is_same: Callable[[Any, Any], bool],
    enough_s: float,
) -> None:
    """Read once more what ``read_first`` gave. Raises RandomExamples.

    In another order and after other seeds: a generator or a counter of its own shows, too.
    """
    seed_generators(1)
    began = time.monotonic()
    for key, value in reversed(first):
        if not is_same(value, read(key)):
            raise RandomExamples
        if time.monotonic() - began > enough_s:
            return


def read_generators() -> list[Any]:
    """Return the states of the generators that Python, NumPy and torch share."""
    states: list[Any] = [random.getstate()]
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if numpy is not None:
        _, words, place, *rest = numpy.random.get_state()
        states += [words.tobytes(), place, rest]
    if torch is not None:
        states.append(torch.get_rng_state().numpy().tobytes())
    return states


def seed_generators(seed: int) -> None:
    """Seed the generators that Python, NumPy and torch share."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None:
        torch.manual_seed(seed)


def _list_leaves(value: Any) -> list[Any]:
    """Return the arrays and plain values inside. Raises TypeError for a type no cache holds."""
    parts = _list_parts(value)
    if parts is not None:
        return [leaf for part in parts for leaf in _list_leaves(part)]
    if type(value) not in _PLAIN and not _is_array(value) and not _is_tensor(value):
        raise TypeError(type(value).__name__)
    return [value]


def _list_parts(value: Any) -> list[Any] | None:
    kind = type(value)
    if kind is tuple or kind is list:
        return list(value)
    if kind is dict:
        return [*value, *value.values()]
    if isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
    else:
        names = getattr(kind, "__dataclass_fields__", None)
        names = None if names is None else [field.name for field in dataclasses.fields(value)]
    if names is None or getattr(value, "__dict__", {}).keys() - set(names):
        return None
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return [getattr(value, name) for name in names] if found is kind else None


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or (type(value) is not numpy.ndarray and not isinstance(value, numpy.generic)):
        return False
    return not value.dtype.hasobject


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    strided = value.layout == torch.strided and not value.is_quantized
    return bool(strided and value.device.type == "cpu")


def _is_same_example(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_same_leaf, one, other))


def _is_same_leaf(a: Any, b: Any) -> bool:
    """True if two leaves are equal; NaN equals NaN."""
    if type(a) is not type(b) or any(
        getattr(a, name, None) != getattr(b, name, None) for name in ("shape", "dtype")
    ):
        return False
    same = (a == b) | ((a != a) & (b != b))
    return bool(same.all() if hasattr(same, "all") else same)


class PickledExamples:
    """A dataset whose examples are in memory; in all else it answers as the script's own.

    They stand for those of ``stoker.cached``: bytes, from which an example is made anew each time.
    """

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
