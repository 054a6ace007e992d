"""Arrays, tensors and tables: their memory is copied by address, so views stay views."""

from __future__ import annotations

import array
from typing import Any

import numpy as np

from stoker.replicas.copying.containers import copy_several
from stoker.replicas.copying.copier import Copier, Uncopyable, imported_types, same_objects
from stoker.replicas.thread_safety import ATOMS

_CELLS = ATOMS | {list, tuple, dict, np.ndarray}  # of tables: data, which is shared


def copy_array(copier: Copier, x: np.ndarray[Any, Any]) -> Any:
    if x.dtype.hasobject:
        held = list(x.ravel(order="K"))
        copier.check(lambda: same_objects(x.ravel(order="K"), held))
        flat = np.empty(len(held), object)
        flat[:] = copy_several(copier, held) if x.dtype == object else held
        if x.dtype != object:
            raise Uncopyable("its records hold objects")
        return flat.reshape(x.T.shape).T if x.flags.fnc else flat.reshape(x.shape)
    owner: Any = x
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    while isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, np.ndarray):
        shared = _copy_borrowed(copier, x, owner)
        if shared is not None:
            return shared
    shape, dtype, strides = x.shape, x.dtype, x.strides
    data = x.ctypes.data
    copier.check(
        lambda: (
            x.ctypes.data == data and x.shape == shape and x.strides == strides and x.dtype == dtype
        )
    )
    begin, end = np.lib.array_utils.byte_bounds(owner if isinstance(owner, np.ndarray) else x)
    if begin == end:
        return x.copy()
    block, offset = copier.memory.block_for(begin, end - begin)
    if block is None:
        y = x.view()
        y.flags.writeable = False
        return y
    y = np.ndarray(shape, dtype, block, offset + data - begin, strides)
    if not x.flags.writeable:
        y.flags.writeable = False
    if type(x) not in (np.ndarray, np.memmap):
        y = y.view(type(x))
        vars(y).update(copier.copy(dict(vars(x))))
    return y


def _copy_borrowed(copier: Copier, x: Any, owner: Any) -> Any:
    """Return a stand-in for an array whose memory is not NumPy's; None: copy the memory."""
    module = type(owner).__module__
    if module in ("mmap", "ctypes", "_ctypes") or module.startswith("multiprocessing"):
        is_private = isinstance(x, np.memmap) and x.mode == "c"
        return None if is_private else x  # workers that are processes share it, too
    if isinstance(owner, bytes) or not x.flags.writeable:
        return x
    if isinstance(owner, (bytearray, array.array)):
        begin = np.frombuffer(owner, np.uint8).ctypes.data
        again = copier.copy(owner)
        return np.ndarray(x.shape, x.dtype, again, x.ctypes.data - begin, x.strides)
    if isinstance(owner, imported_types("torch", "Tensor")):
        copier.copy(owner)  # its whole memory comes first
    return None


def copy_tensor(copier: Copier, x: Any, torch: Any) -> Any:
    if type(x) is torch.nn.Parameter:
        return x  # of the model that is trained, if one is reached: it would be held 8 times
    copier.touches_torch = True
    if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized:
        version = x._version
        copier.check(lambda: x._version == version)
        return x.detach().clone().requires_grad_(x.requires_grad)
    if x.is_shared():
        return x
    storage = x.untyped_storage()
    start, size, version = storage.data_ptr(), storage.nbytes(), x._version
    shape, strides = x.size(), x.stride()

    def is_where_it_was() -> bool:  # asked first: memory that is gone cannot be compared
        storage = x.untyped_storage()
        is_same = (storage.data_ptr(), storage.nbytes()) == (start, size)
        return is_same and x.size() == shape and x.stride() == strides

    copier.check(is_where_it_was)
    if not size:
        y = x.detach().clone()
    else:
        block, offset = copier.memory.block_for(start, size)
        if block is None:
            y = x.detach()
        else:
            memory = torch.frombuffer(block, dtype=torch.uint8, offset=offset, count=size)
            y = torch.empty(0, dtype=x.dtype).set_(
                memory.untyped_storage(),
                memory.storage_offset() // x.element_size() + x.storage_offset(),
                shape,
                strides,
            )
    y.requires_grad_(x.requires_grad)
    if type(x) is not torch.Tensor:
        y = y.as_subclass(type(x))
    if vars(x):
        vars(y).update(copier.copy(dict(vars(x))))
    return y


def copy_pandas(copier: Copier, x: Any, pandas: Any) -> Any:
    """Copy a table or column of pandas, which itself copies on write from 3.0 on."""
    if isinstance(x, pandas.Index):
        return x
    is_late = int(pandas.__version__.partition(".")[0]) >= 3
    blocks = [block.values for block in x._mgr.blocks]
    for values in blocks:
        if values.dtype == object and not _CELLS.issuperset(map(type, np.ravel(values))):
            raise Uncopyable("it holds objects")
    held = [*blocks, *x._mgr.axes]
    copier.check(
        lambda: (
            is_late
            and same_objects([*(block.values for block in x._mgr.blocks), *x._mgr.axes], held)
        )
    )
    return x.copy(deep=not is_late)


def copy_bytearray(copier: Copier, x: bytearray) -> bytearray:
    held = bytes(x)
    copier.check(lambda: x == held)
    return bytearray(held)


def copy_typed_array(copier: Copier, x: array.array[Any]) -> array.array[Any]:
    held = x[:]
    copier.check(lambda: x == held)
    return x[:]


def copy_memoryview(copier: Copier, x: memoryview) -> memoryview:
    if x.readonly and isinstance(x.obj, bytes):
        return x
    if not x.contiguous or x.nbytes != memoryview(x.obj).nbytes:
        raise Uncopyable("it shows a part of its object")
    plain: Any = memoryview(copier.copy(x.obj)).cast("B")
    again: memoryview = plain.cast(x.format, x.shape)
    return again.toreadonly() if x.readonly else again
