"""Nested examples: tuples, lists, dicts, dataclasses and named tuples, with leaves inside.

A leaf is anything else: an array, a tensor, a number, a string, an image object. Torch is
recognised without being imported.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

_IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)
_USUAL_LEAVES = frozenset({np.ndarray, bytes, str, int, float, bool, type(None)})  # found fast
_TEXTS = frozenset({bytes, str, type(None)})
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
    """Return the named children of a node in order, or None for a leaf."""
    if type(value) in _USUAL_LEAVES:
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
    """Build a node like ``template`` with other children, in the same order."""
    if isinstance(template, tuple):
        if hasattr(template, "_fields"):
            return type(template)(*parts)
        return tuple(parts)
    if isinstance(template, list):
        return list(parts)
    if isinstance(template, Mapping):
        return dict(zip(template, parts, strict=True))
    fields = [f.name for f in dataclasses.fields(template)]
    twin = copy.copy(template)
    for name, part in zip(fields, parts, strict=True):
        object.__setattr__(twin, name, part)  # frozen dataclasses included
    return twin


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``fn`` to every leaf; nodes are built anew."""
    kind = type(value)
    if kind in _USUAL_LEAVES:
        return fn(value)
    if isinstance(value, tuple):
        made = [map_leaves(fn, child) for child in value]
        return kind(*made) if hasattr(value, "_fields") else tuple(made)
    parts = children(value)
    if parts is None:
        return fn(value)
    return rebuild(value, [map_leaves(fn, child) for _, child in parts])


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure in order."""
    parts = children(value)
    if parts is None:
        return [value]
    return [leaf for _, child in parts for leaf in leaves(child)]


def is_tensor(value: Any) -> TypeGuard[Any]:
    """Tell whether a value is a torch tensor, without importing torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # None while it is being imported
    return kind is not None and isinstance(value, kind)


def is_sparse(tensor: Any) -> bool:
    """Tell whether a tensor is in one of torch's layouts that are not dense."""
    return tensor.layout is not sys.modules["torch"].strided


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes that a tensor's numbers hold: of a sparse one, those that it has."""
    if not is_sparse(tensor):
        return int(tensor.nbytes)
    parts = [getattr(tensor, name, None) for name in _SPARSE_PARTS.get(str(tensor.layout), ())]
    return sum(int(part().nbytes) for part in parts if part is not None)


def is_jax_array(value: Any) -> TypeGuard[Any]:
    """Tell whether a value is an array of JAX, without importing it."""
    jax = sys.modules.get("jax")
    kind = getattr(jax, "Array", None)  # None while it is being imported
    return kind is not None and isinstance(value, kind)


def device_of(leaf: Any) -> str | None:
    """Return the device that a tensor is on, None for the CPU and for what is no tensor."""
    return str(leaf.device) if is_tensor(leaf) and leaf.device.type != "cpu" else None


def signature(value: Any) -> Any:
    """Return what two structures have in common if they differ in their leaves alone."""
    parts = children(value)
    if parts is None:
        return None
    kind = dict if isinstance(value, Mapping) else type(value)
    outline = [(name, signature(child)) for name, child in parts]
    return kind, frozenset(outline) if kind is dict else tuple(outline)


def leaves_like(template: Any, value: Any) -> list[Any]:
    """Return the leaves of ``value`` in the order that ``template`` has them.

    Raises TypeError when the two differ in more than their leaves.
    """
    parts, own = children(template), children(value)
    if parts is None and own is None:
        return [value]
    if parts is not None and own is not None and len(parts) == len(own):
        if isinstance(template, Mapping) and isinstance(value, Mapping):
            if template.keys() == value.keys():
                return [x for k, child in template.items() for x in leaves_like(child, value[k])]
        elif type(template) is type(value):
            pairs = zip(parts, own, strict=True)
            return [x for (_, mine), (_, theirs) in pairs for x in leaves_like(mine, theirs)]
    raise TypeError(f"{outline(template)} and {outline(value)}")


def leaf_names(value: Any, prefix: str = "") -> list[str]:
    """Return a path for each leaf, such as ``label`` or ``boxes.0``."""
    parts = children(value)
    if parts is None:
        return [prefix]
    return [x for n, child in parts for x in leaf_names(child, f"{prefix}.{n}" if prefix else n)]


def outline(value: Any) -> str:
    """Describe a structure's outermost node, for error messages."""
    parts = children(value)
    if parts is None:
        return type(value).__name__
    return f"{type(value).__name__}({', '.join(name for name, _ in parts)})"


def nbytes(value: Any) -> int:
    """Return the bytes that a structure's leaves hold (other objects by ``sys.getsizeof``)."""
    return sum(_leaf_bytes(leaf) for leaf in leaves(value))


def data_bytes(value: Any) -> int:
    """Return the bytes of arrays, tensors, bytes and (ASCII) text in a structure; 0 for the rest.

    Cheaper than ``nbytes``, for it is asked for each example that is read.
    """
    kind = type(value)
    if kind is bytes or kind is str:
        return len(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return int(value.nbytes)
    if kind in _USUAL_LEAVES:
        return 0
    if isinstance(value, (tuple, list)):
        kinds = set(map(type, value))
        if kinds == {bytes} or kinds == {str}:
            return sum(map(len, value))
        if kinds <= _TEXTS:  # with nulls
            return sum(len(text) for text in value if text is not None)
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
    if type(leaf) in _TEXTS:  # of which a batch may have many
        return sys.getsizeof(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    if is_tensor(leaf):
        return tensor_bytes(leaf)
    if is_jax_array(leaf):
        return int(leaf.nbytes)
    return sys.getsizeof(leaf)


def is_immutable(leaf: Any) -> bool:
    """Tell whether a leaf can never change, so that it need not be copied."""
    return isinstance(leaf, _IMMUTABLE) and not isinstance(leaf, np.void)  # fields are written to


def is_frozen(value: Any) -> bool:
    """Tell whether neither a value nor what is in it can ever change."""
    return all(map(is_frozen, value)) if isinstance(value, tuple) else is_immutable(value)


def copied(value: Any) -> Any:
    """Return a deep copy that shares no writable memory with ``value``."""
    return map_leaves(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy() if leaf.dtype != object else copy.deepcopy(leaf)
    if is_immutable(leaf):
        return leaf
    if is_tensor(leaf):
        leaf = leaf.detach()
        if leaf.device.type == "cpu" and not is_sparse(leaf) and leaf.is_pinned():
            return leaf.clone().pin_memory()
        return leaf.clone()
    if is_jax_array(leaf):
        return leaf.copy()  # who is given it may donate it; a deep copy would leave its devices
    return copy.deepcopy(leaf)


def owned(value: Any) -> Any:
    """Return ``value`` with arrays that are views of larger memory copied out of it.

    What is kept in a pool must not hold more memory alive than it shows.
    """
    return map_leaves(_owned_leaf, value)


def _owned_leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.base is not None:
        return leaf.copy()
    if is_tensor(leaf) and not is_sparse(leaf) and leaf.untyped_storage().nbytes() > leaf.nbytes:
        return leaf.clone()
    return leaf


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the byte order of this machine, as torch and JAX want it."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


class FieldError(LookupError):
    """``on=`` names a field that the example does not have."""


class Field:
    """One field of an example: by name, key or position."""

    def __init__(self, on: str | int) -> None:
        self.on = on

    def get(self, example: Any) -> Any:
        on = self.on
        try:
            if isinstance(example, Mapping) or (
                isinstance(on, int) and isinstance(example, (tuple, list))
            ):
                return example[on]  # type: ignore[index]
            if isinstance(on, str) and on in _names(example):
                return getattr(example, on)
        except (KeyError, IndexError):
            pass
        raise FieldError(f"no field {on!r}; the example has {describe_fields(example)}")

    def replace(self, example: Any, value: Any) -> Any:
        """Return the example with the field replaced; the example itself is not changed."""
        on = self.on
        if isinstance(example, Mapping):
            return {**example, on: value}
        if isinstance(example, tuple):
            if isinstance(on, str):
                return example._replace(**{on: value})  # type: ignore[attr-defined]
            parts = list(example)
            parts[on] = value
            return rebuild(example, parts)
        if isinstance(example, list):
            twin = list(example)
            twin[on] = value  # type: ignore[index]
            return twin
        names = [f.name for f in dataclasses.fields(example)]
        return rebuild(example, [value if n == on else getattr(example, n) for n in names])


def _names(example: Any) -> Sequence[str]:
    if isinstance(example, tuple):
        return getattr(example, "_fields", ())
    if dataclasses.is_dataclass(example):
        return [f.name for f in dataclasses.fields(example)]
    return ()


def describe_fields(example: Any) -> str:
    """Say which fields an example has, for error messages."""
    if isinstance(example, Mapping):
        return "the keys " + ", ".join(repr(k) for k in example)
    names = _names(example)
    if names:
        return "the fields " + ", ".join(repr(n) for n in names)
    if isinstance(example, (tuple, list)):
        return f"the positions 0 to {len(example) - 1}"
    return f"no fields: it is one {type(example).__name__}"


def same(left: Any, right: Any) -> bool:
    """Tell whether two structures are equal bit for bit, types and dtypes included."""
    mine, yours = children(left), children(right)
    if mine is None or yours is None:
        return mine is yours and _same_leaf(left, right)
    if isinstance(left, Mapping):
        mine, yours = sorted(mine, key=itemgetter(0)), sorted(yours, key=itemgetter(0))
    return (
        type(left) is type(right)
        and [name for name, _ in mine] == [name for name, _ in yours]
        and all(same(a, b) for (_, a), (_, b) in zip(mine, yours, strict=True))
    )


def _same_leaf(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if is_tensor(left):
        left, right = left.detach().cpu(), right.detach().cpu()
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if is_jax_array(left):
        left, right = np.asarray(left), np.asarray(right)
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype.hasobject:
            return all(same(a, b) for a, b in zip(left.ravel(), right.ravel(), strict=True))
        return bool(left.tobytes() == right.tobytes())
    return bool(left == right) or bool(left != left and right != right)
