"""Pickle a value as a header and the buffers of its arrays.

The header is a pickle of protocol 5. The buffers are the memory of arrays and tensors; the receiver
finds them in shared memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics import pytree

# Buffers in shared memory begin at multiples of 64 bytes: a cache line, and the widest vector
# register (AVX-512).
ALIGNMENT = 64


class Flattener:
    """Pickles a value into a header; the bytes of its arrays and tensors become ``buffers``.

    An array that occurs twice in the value is one array in the result. Subclasses of arrays and
    tensors, and tensors that are not dense or not on the CPU, are pickled by their own methods.
    """

    read_only = False
    """True if all arrays are unpickled read-only; otherwise arrays keep their own flag."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def flatten(self, value: Any) -> bytes:
        """Return the header of a value. Raises pickle's errors."""
        header = BytesIO()
        # A subclass of Pickler with the callbacks as methods would refer to itself. Such a cycle
        # lives until it is collected, and Python 3.11 crashes if a memoryview is part of it.
        pickler = _Pickler(header, 5, buffer_callback=self._keep)
        pickler.reducer_override = self.reduce
        pickler.dump(value)
        return header.getvalue()

    def reduce(self, value: Any) -> Any:
        """Return how to pickle an array or tensor; NotImplemented for other values."""
        if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
            if value.flags.c_contiguous and not self.read_only:
                return NotImplemented  # NumPy's own reduction does the same, faster
            return _array, self._parts(value, self.read_only or not value.flags.writeable)
        if type(value) is np.void:  # of what NumPy unpickles, fields can be set, without effect
            return _void, (np.array(value),)
        if pytree.is_tensor(value):
            return self._reduce_tensor(value)
        return NotImplemented

    def is_in_header(self, buffer: memoryview) -> bool:
        """True if a buffer must be pickled in the header, not beside it."""
        return False

    def _keep(self, pickled: pickle.PickleBuffer) -> bool:
        buffer = pickled.raw()
        if self.is_in_header(buffer):
            return True
        self.buffers.append(buffer)
        return False

    def _reduce_tensor(self, tensor: Any) -> Any:
        import torch

        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.device.type != "cpu":
            return NotImplemented
        tensor = tensor.detach().resolve_conj().resolve_neg()
        try:
            return _tensor, (None, *self._parts(tensor.numpy(), read_only=False))
        except TypeError:  # NumPy lacks this dtype: send integers of the same size
            word = (torch.uint8, torch.int16, torch.int32, torch.int64)
            array = tensor.contiguous().view(word[tensor.dtype.itemsize.bit_length() - 1]).numpy()
            dtype = str(tensor.dtype).removeprefix("torch.")
            return _tensor, (dtype, *self._parts(array, read_only=False))

    def _parts(self, array: NDArray[Any], read_only: bool) -> tuple[Any, ...]:
        """Return the arguments of ``_array``. Axes keep their order in memory."""
        dense = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
        if not dense.flags.c_contiguous:  # there are gaps, or it goes backwards
            array = dense = np.ascontiguousarray(array)
        memory = dense.reshape(-1).view(np.uint8)
        if read_only:
            memory.flags.writeable = False
        strides = None if array.flags.c_contiguous else array.strides
        return pickle.PickleBuffer(memory.data), array.dtype, array.shape, strides


class _Pickler(pickle.Pickler):
    reducer_override: Any


def _array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: Any) -> NDArray[Any]:
    return np.ndarray(shape, dtype, buffer, 0, strides)


def _void(array: NDArray[Any]) -> Any:
    return array[()]


def _tensor(name: str | None, *parts: Any) -> Any:
    import torch

    tensor = torch.from_numpy(_array(*parts))
    return tensor if name is None else tensor.view(getattr(torch, name))


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def align(size: int) -> int:
    """Return a size as a whole number of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_offsets(sizes: Sequence[int]) -> list[int]:
    """Return aligned offsets for consecutive buffers of these sizes, and the end of the last."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + align(size))
    return starts
