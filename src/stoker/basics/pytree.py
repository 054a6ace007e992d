"""Nested examples: tuples, lists, dicts, dataclasses and named tuples, with leaves inside.

A leaf is anything else: an array, a tensor, a number, a string, an image object. Torch is
recognised without being imported.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from stoker.errors import FieldError

_IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)
_COMMON_LEAVES = frozenset({np.ndarray, bytes, str, int, float, bool, type(None)})  # found fast
_TEXTS = frozenset({bytes, str, type(None)})
PLAIN = _COMMON_LEAVES - {np.ndarray}
"""Types of leaves that copies keep as they are. A list of them is looked at as a whole: 256
numbers, as a tokenizer makes them, take 5 us so, and one by one 90."""
_SPARSE_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(
        ("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices", "values")
    ),
    **dict.fromkeys(
        ("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices", "values")
    ),
}


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Return a node's children with their names, in order; None for a leaf."""
    if type(value) in _COMMON_LEAVES:
        return None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None) or range(len(value))
        return [(str(name), child) for name, child in zip(names, value, strict=True)]
    if isinstance(value, list):
        return [(str(i), child) for i, child in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(name), child) for name, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def rebuild(template: Any, parts: Sequence[Any]) -> Any:
    """Return a node like ``template`` with other children, in the same order."""
    if isinstance(template, tuple):
        if hasattr(template, "_fields"):
            return type(template)(*parts)
        return tuple(parts)
    if isinstance(template, list):
        return list(parts)
    if isinstance(template, Mapping):
        return dict(zip(template, parts, strict=True))
    fields = [f.name for f in dataclasses.fields(template)]
    copy_of = copy.copy(template)
    for name, part in zip(fields, parts, strict=True):
        object.__setattr__(copy_of, name, part)  # works for frozen dataclasses, too
    return copy_of


def with_field(value: Any, name: str, field: Any) -> Any:
    """Return an example, or a batch, with one more named field.

    A dict gets the key, a tuple one element more; anything else becomes ``(value, field)``. Raises
    ValueError if the field exists already.
    """
    names = value if isinstance(value, MutableMapping) else getattr(value, "_fields", ())
    if name in names:
        raise ValueError(f"there is a field {name!r} already: give another name")
    if isinstance(value, MutableMapping):
        value = copy.copy(value)
        value[name] = field
        return value
    if not isinstance(value, tuple):
        return (value, field)
    return longer(type(value), name)(*value, field) if names else (*value, field)


# Without a limit, damaged records could fill the memory with classes.
@functools.lru_cache(maxsize=256)
def longer(kind: Any, name: str) -> Any:
    """Return a named tuple class with one more field; it pickles if ``kind`` does.

    It has the name of ``kind``, by which records find it. Raises ValueError for an invalid name.
    """
    make: Any = namedtuple  # no checker can know its fields
    made = make(kind.__name__, (*kind._fields, name), module=kind.__module__)
    made.__qualname__ = kind.__qualname__
    made.__reduce__ = lambda self: (_remade, (kind, name, tuple(self)))
    return made


def _remade(kind: Any, name: str, values: tuple[Any, ...]) -> Any:
    return longer(kind, name)(*values)


def map_leaves(fn: Callable[[Any], Any], value: Any, kept: frozenset[type] = frozenset()) -> Any:
    """Apply ``fn`` to every leaf; return new nodes with the results.

    Lists and tuples of leaves of the ``kept`` types alone are copied whole: ``fn`` returns these.
    """
    kind = type(value)
    if kind in _COMMON_LEAVES:
        return fn(value)
    if kept and (kind is list or kind is tuple) and kept.issuperset(map(type, value)):
        return kind(value)
    if isinstance(value, tuple):
        mapped = [map_leaves(fn, child, kept) for child in value]
        return kind(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    parts = children(value)
    if parts is None:
        return fn(value)
    return rebuild(value, [map_leaves(fn, child, kept) for _, child in parts])


def leaves(value: Any) -> list[Any]:
    parts = children(value)
    if parts is None:
        return [value]
    return [leaf for _, child in parts for leaf in leaves(child)]


def is_tensor(value: Any) -> TypeGuard[Any]:
    """True if a value is a torch tensor. It does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None:  # looked at first: this is asked of every leaf
        return False
    kind = getattr(torch, "Tensor", None)  # None while torch is imported
    return kind is not None and isinstance(value, kind)


def is_sparse(tensor: Any) -> bool:
    return tensor.layout is not sys.modules["torch"].strided


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's numbers; of a sparse tensor, only its indices and values."""
    if not is_sparse(tensor):
        return int(tensor.nbytes)
    parts = [getattr(tensor, name, None) for name in _SPARSE_PARTS.get(str(tensor.layout), ())]
    return sum(int(part().nbytes) for part in parts if part is not None)


def is_jax_array(value: Any) -> TypeGuard[Any]:
    """True if a value is a JAX array. It does not import JAX."""
    jax = sys.modules.get("jax")
    kind = getattr(jax, "Array", None)  # None while JAX is imported
    return kind is not None and isinstance(value, kind)


def device_of(leaf: Any) -> str | None:
    """Return a tensor's device; None for the CPU, and for other values."""
    return str(leaf.device) if is_tensor(leaf) and leaf.device.type != "cpu" else None


def structure(value: Any) -> Any:
    """Return a structure without its leaves, to compare structures."""
    parts = children(value)
    if parts is None:
        return None
    kind = dict if isinstance(value, Mapping) else type(value)
    named = [(name, structure(child)) for name, child in parts]
    return kind, frozenset(named) if kind is dict else tuple(named)


def leaves_like(template: Any, value: Any) -> list[Any]:
    """Return the leaves of ``value`` in ``template``'s order. Raises TypeError if they differ."""
    parts, value_parts = children(template), children(value)
    if parts is None and value_parts is None:
        return [value]
    if parts is not None and value_parts is not None and len(parts) == len(value_parts):
        if isinstance(template, Mapping) and isinstance(value, Mapping):
            if template.keys() == value.keys():
                return [x for k, child in template.items() for x in leaves_like(child, value[k])]
        elif type(template) is type(value):
            pairs = zip(parts, value_parts, strict=True)
            return [x for (_, child), (_, other) in pairs for x in leaves_like(child, other)]
    raise TypeError(f"{describe_node(template)} and {describe_node(value)}")


def leaf_names(value: Any, prefix: str = "") -> list[str]:
    """Return a path for each leaf, such as ``label`` or ``boxes.0``."""
    parts = children(value)
    if parts is None:
        return [prefix]
    return [x for n, child in parts for x in leaf_names(child, f"{prefix}.{n}" if prefix else n)]


def describe_node(value: Any) -> str:
    """Return a text for a structure's outermost node, for messages."""
    parts = children(value)
    if parts is None:
        return type(value).__name__
    return f"{type(value).__name__}({', '.join(name for name, _ in parts)})"


def nbytes(value: Any) -> int:
    """Return the bytes of a structure's leaves (of other objects by ``sys.getsizeof``)."""
    if type(value) is dict:
        return sum(map(nbytes, value.values()))
    if type(value) in (list, tuple):  # a batch may have many texts, or numbers
        return sum(map(sys.getsizeof if PLAIN.issuperset(map(type, value)) else nbytes, value))
    return sum(_leaf_bytes(leaf) for leaf in leaves(value))


def data_bytes(value: Any) -> int:
    """Return the bytes of arrays, tensors, bytes and texts in a structure; other leaves count 0.

    Called for each example that is read; a text counts one byte for each character.
    """
    kind = type(value)
    if kind is bytes or kind is str:
        return len(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return int(value.nbytes)
    if kind in _COMMON_LEAVES:
        return 0
    if isinstance(value, (tuple, list)):
        # Columns of texts are lists, and so are tokens; an example has too few for this to pay.
        if value and type(value[0]) in PLAIN:
            kinds = set(map(type, value))
            if kinds == {bytes} or kinds == {str}:
                return sum(map(len, value))
            if kinds <= _TEXTS:  # with nulls
                return sum(len(text) for text in value if text is not None)
            if kinds <= PLAIN - _TEXTS:
                return 0
        return sum(map(data_bytes, value))
    if kind is dict:
        return sum(map(data_bytes, value.values()))
    parts = children(value)
    if parts is not None:
        return sum(data_bytes(child) for _, child in parts)
    if is_tensor(value):
        return tensor_bytes(value)
    return int(value.nbytes) if isinstance(value, np.ndarray) or is_jax_array(value) else 0


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    if is_tensor(leaf):
        return tensor_bytes(leaf)
    if is_jax_array(leaf):
        return int(leaf.nbytes)
    return sys.getsizeof(leaf)


def is_immutable(leaf: Any) -> bool:
    """True if a leaf can never change, so that it need not be copied."""
    # np.void is a np.generic, but its fields can be assigned.
    return isinstance(leaf, _IMMUTABLE) and not isinstance(leaf, np.void)


def is_frozen(value: Any) -> bool:
    """True if neither a value nor anything in it can ever change."""
    return all(map(is_frozen, value)) if isinstance(value, tuple) else is_immutable(value)


def deep_copy(value: Any) -> Any:
    """Return a deep copy that shares no writable memory with ``value``."""
    return map_leaves(_copy_leaf, value, PLAIN)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy(order="K") if leaf.dtype != object else copy.deepcopy(leaf)
    if is_immutable(leaf):
        return leaf
    if is_tensor(leaf):
        leaf = leaf.detach()
        if leaf.device.type == "cpu" and not is_sparse(leaf) and leaf.is_pinned():
            return leaf.clone().pin_memory()
        return leaf.clone()
    if is_jax_array(leaf):
        # The receiver may donate it, so copy; deepcopy would move it to the default device.
        return leaf.copy()
    return copy.deepcopy(leaf)


def copy_views(value: Any) -> Any:
    """Return ``value`` with copies of arrays that are views of larger memory, which they keep."""
    return map_leaves(_copy_view, value, PLAIN)


def _copy_view(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.base is None else leaf.copy(order="K")
    if is_tensor(leaf) and not is_sparse(leaf) and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone()
    return leaf


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in this machine's byte order, which torch and JAX need."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


class Field:
    """One field of an example: by name, key or position."""

    def __init__(self, on: str | int) -> None:
        self.on = on

    def get(self, example: Any) -> Any:
        on = self.on
        try:
            # Named tuples first: asking whether something is a Mapping takes 0.3 us.
            if isinstance(on, str) and isinstance(example, tuple):
                if on in getattr(example, "_fields", ()):
                    return getattr(example, on)
            elif isinstance(example, Mapping) or (
                isinstance(on, int) and isinstance(example, (tuple, list))
            ):
                return example[on]  # type: ignore[index]
            elif isinstance(on, str) and on in _names(example):
                return getattr(example, on)
        except (KeyError, IndexError):
            pass
        raise FieldError(f"there is no field {on!r}: the example has {describe_fields(example)}")

    def replace(self, example: Any, value: Any) -> Any:
        """Return a copy of the example with another value of the field."""
        on = self.on
        if isinstance(example, tuple):
            if isinstance(on, str):
                at = example._fields.index(on)  # type: ignore[attr-defined]
                # ``_replace`` takes three times as long.
                return example._make((*example[:at], value, *example[at + 1 :]))  # type: ignore[attr-defined]
            parts = list(example)
            parts[on] = value
            return rebuild(example, parts)
        if isinstance(example, Mapping):
            return {**example, on: value}
        if isinstance(example, list):
            copy_of = list(example)
            copy_of[on] = value  # type: ignore[index]
            return copy_of
        names = [f.name for f in dataclasses.fields(example)]
        return rebuild(example, [value if n == on else getattr(example, n) for n in names])


class Together(tuple[Any, ...]):
    """The values of several fields, as a function with ``on=[...]`` gets them: a tuple.

    A type of its own, since image functions know by it that the values are of one example.
    """


class Fields:
    """Several fields of an example, for one function."""

    def __init__(self, on: Sequence[str | int]) -> None:
        self._fields = [Field(each) for each in on]

    def get(self, example: Any) -> Together:
        return Together(field.get(example) for field in self._fields)

    def is_nothing(self, values: Any) -> bool:
        """Return whether a function returned None for one of them."""
        return isinstance(values, (tuple, list)) and any(value is None for value in values)

    def replace(self, example: Any, values: Any) -> Any:
        """Return a copy of the example with other values of the fields."""
        if not isinstance(values, (tuple, list)) or len(values) != len(self._fields):
            many = isinstance(values, (tuple, list))
            made = f"{len(values)} values" if many else f"one {type(values).__name__}"
            raise TypeError(
                f"the function returned {made}: with on= of {len(self._fields)} fields it gets a "
                "tuple of their values, and returns as many"
            )
        for field, value in zip(self._fields, values, strict=True):
            example = field.replace(example, value)
        return example


def fields_of(on: str | int | tuple[str | int, ...]) -> Field | Fields:
    """Return the reader and writer of the fields that ``on=`` names."""
    return Fields(on) if isinstance(on, tuple) else Field(on)


def _names(example: Any) -> Sequence[str]:
    if isinstance(example, tuple):
        return getattr(example, "_fields", ())
    if dataclasses.is_dataclass(example):
        return [f.name for f in dataclasses.fields(example)]
    return ()


def describe_fields(example: Any) -> str:
    """Return a text that names an example's fields, for messages."""
    if isinstance(example, Mapping):
        return "the keys " + ", ".join(repr(k) for k in example)
    names = _names(example)
    if names:
        return "the fields " + ", ".join(repr(n) for n in names)
    if isinstance(example, (tuple, list)):
        return f"the positions 0 to {len(example) - 1}"
    return f"no fields: it is a {type(example).__name__}"


def equal(left: Any, right: Any, *, layout: bool = False) -> bool:
    """True if two structures are equal bit for bit, with the same types and dtypes.

    Objects of other classes are compared by their ``==`` or, without one, by their attributes.
    ``layout``: whether keys must have the same order, and tensors the same strides. Raises
    TypeError for an object whose content cannot be seen.
    """
    if type(left) is not type(right):
        return False
    left_parts, right_parts = children(left), children(right)
    if left_parts is None or right_parts is None:
        return _equal_leaves(left, right, layout)
    if len(left_parts) != len(right_parts):
        return False
    if isinstance(left, Mapping):
        if left.keys() != right.keys() or (layout and list(left) != list(right)):
            return False
        return all(equal(left[key], right[key], layout=layout) for key in left)
    return all(
        name == other and equal(a, b, layout=layout)
        for (name, a), (other, b) in zip(left_parts, right_parts, strict=True)
    )


def _equal_leaves(left: Any, right: Any, layout: bool) -> bool:
    if is_tensor(left):
        return _equal_tensors(left, right, layout)
    if isinstance(left, (np.ndarray, np.generic, float, complex)) or is_jax_array(left):
        left, right = np.asarray(left), np.asarray(right)
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype.hasobject:
            return equal(left.ravel().tolist(), right.ravel().tolist(), layout=layout)
        return bool(left.tobytes() == right.tobytes())
    equality: Any = type(left).__eq__
    if equality is not object.__eq__:
        return bool(left == right)
    if hasattr(left, "__dict__"):
        return left is right or equal(vars(left), vars(right), layout=layout)
    if left is right:
        return True
    raise TypeError(f"{type(left).__name__} cannot be compared")


def _equal_tensors(left: Any, right: Any, layout: bool) -> bool:
    torch = sys.modules["torch"]
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if is_sparse(left):
        parts = _SPARSE_PARTS.get(str(left.layout), ())
        if not parts:
            raise TypeError(f"a tensor of layout {left.layout} cannot be compared")
        return all(equal(getattr(left, part)(), getattr(right, part)()) for part in parts)
    if layout and left.stride() != right.stride():
        return False  # kernels differ by it, and so do their last digits

    def bits(tensor: Any) -> Any:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8)

    return bool(torch.equal(bits(left), bits(right)))


def batch_rows(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first array, or else list."""
    for leaf in leaves(batch):
        is_array = isinstance(leaf, np.ndarray) or is_tensor(leaf)
        if is_array or is_jax_array(leaf):
            return int(leaf.shape[0]) if leaf.ndim else 1
    return _list_rows(batch) or 1


def _list_rows(value: Any) -> int:
    parts = children(value)
    if parts is None:
        return 0
    if isinstance(value, list) and all(children(child) is None for _, child in parts):
        return len(value)
    return next((rows for rows in (_list_rows(child) for _, child in parts) if rows), 0)
