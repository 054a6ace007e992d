"""Compares examples and batches bit for bit, whatever they are made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_ATOMS = (str, bytes, bytearray, int, bool, type(None), type)


class Incomparable(TypeError):
    """A value of a type whose content cannot be seen."""


def is_same(a: Any, b: Any, *, layout: bool = True) -> bool:
    """True if two values have the same types and bits, with ``layout`` also tensors' strides.

    Raises Incomparable for unknown types.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, _ATOMS):
        return bool(a == b)
    if isinstance(a, (float, complex, np.generic)):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, np.ndarray):
        return _is_same_array(a, b)
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        return _is_same_tensor(torch, a, b, layout)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(is_same(a[key], b[key], layout=layout) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(
            is_same(x, y, layout=layout) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    if hasattr(a, "__dict__"):
        return is_same(vars(a), vars(b), layout=layout)
    if hasattr(a, "tobytes"):  # an image of PIL has no __dict__ in some versions
        return bool(a.tobytes() == b.tobytes())
    raise Incomparable(f"{type(a).__name__} cannot be compared")


def count_bytes(value: Any) -> int:
    """Return the bytes of the arrays, tensors and texts in a value."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(count_bytes, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(count_bytes, value))
    return 8


def _is_same_array(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return all(map(is_same, a.ravel().tolist(), b.ravel().tolist()))
    return bool(np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes())


def _is_same_tensor(torch: Any, a: Any, b: Any, layout: bool) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout or a.device != b.device:
        return False
    if layout and a.layout == torch.strided and a.stride() != b.stride():
        return False  # kernels differ by it, and so do their last digits
    if a.layout != torch.strided or a.is_quantized:
        raise Incomparable(f"a tensor of layout {a.layout} cannot be compared")

    def bits(tensor: Any) -> Any:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8)

    return bool(torch.equal(bits(a), bits(b)))
