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
from typing import Any, NamedTuple

from .state import (
    find_changes,
    list_generators,
    read_generator,
    read_state,
    restore_generator,
)

# Items whose first reading may draw from the usual generators: some may be left as they are.
_ITEMS = 16
# The script stands still meanwhile: slow examples are read fewer times.
_LONGEST_S = 0.5
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)


def describe_example(dataset: Any) -> dict[str, Any]:
    """Return the mean bytes of an example's arrays, whether examples are random, and what moves.

    The bytes are None if a cache could not hold the examples. The result is empty if the dataset
    does not give them. This mirrors ``stoker/transport/codec``, because the probe must not import
    stoker.
    """
    sizes: list[int | None] = []

    def read(index: int) -> list[Any]:
        leaves = [*_list_leaves(dataset[index])]
        held = all(map(_is_held, leaves))
        sizes.append(sum(getattr(leaf, "nbytes", 0) for leaf in leaves) if held else None)
        return [leaf for leaf in leaves if _is_held(leaf)]

    try:
        count = len(dataset)
        indices = list(dict.fromkeys(item * count // _ITEMS for item in range(_ITEMS)))
        found = look_at_draws(
            read, indices, lambda: read_state(dataset), [dataset], _is_same_example, _LONGEST_S
        )
        known = [size for size in sizes[: len(found.first)] if size is not None]
        size = round(sum(known) / len(known)) if len(known) == len(found.first) else None
    except Exception:
        return {}
    return {"example_bytes": size, "varies": found.random, "moves": found.moves}


class Draws(NamedTuple):
    """What reading some examples several times showed."""

    random: bool
    """True if reading draws from a generator, shared or held, or gives other values each time."""
    moves: list[str]
    """What reading changes by more than its draws, by name: a counter, say."""
    first: list[tuple[Any, Any]]
    """Each key with what was read first."""


def look_at_draws(
    read: Callable[[Any], Any],
    keys: Iterable[Any],
    read_held: Callable[[], dict[str, str]],
    holders: Sequence[Any],
    is_same: Callable[[Any, Any], bool],
    enough_s: float,
) -> Draws:
    """Read some examples three times, the last two times with all generators set back.

    What reading changes for good at the first time, such as an open file or a remembered example,
    is there by then. What differs between the second time and the third is no random draw.

    Args:
        read: reads the example, or the batch, of a key.
        keys: fewer are read if that takes longer than ``enough_s`` seconds.
        read_held: returns digests of the state behind the examples, by name.
        holders: the objects with that state.
        is_same: whether two results are the same.
        enough_s: seconds of the first reading.
    """
    began = time.monotonic()
    shared, draws, first = read_generators(), False, list[tuple[Any, Any]]()
    for key in keys:
        first.append((key, read(key)))
        draws = draws or read_generators() != shared
        if time.monotonic() - began > enough_s:
            break
    own = [(each, read_generator(each)) for each in list_generators(holders)]
    states = []
    # The last one alone, too: what is switched to and fro is as before after an even number.
    for again in (first, first, first[-1:], first[-1:]):
        seed_generators(1)
        for generator, state in own:
            restore_generator(generator, state)
        for key, value in again:
            draws = not is_same(value, read(key)) or draws
        states.append(read_held())
        draws = draws or any(repr(read_generator(each)) != repr(state) for each, state in own)
    moves = {*find_changes(*states[:2]), *find_changes(*states[2:])}
    return Draws(draws, sorted(moves), first)


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


def _list_leaves(value: Any) -> Iterator[Any]:
    """Yield the arrays and plain values inside, and objects of other types."""
    parts = _list_parts(value)
    if parts is None:
        yield value
    else:
        for part in parts:
            yield from _list_leaves(part)


def _is_held(value: Any) -> bool:
    """True for what a cache holds."""
    return type(value) in _PLAIN or _is_array(value) or _is_tensor(value)


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
