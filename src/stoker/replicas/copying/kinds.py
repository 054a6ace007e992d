"""Finds the function that copies an object: by its class, or by more than its class.

All other objects are copied by the state that ``pickle`` asks for.
"""

from __future__ import annotations

import array
import functools
import io
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from stoker.replicas.copying.arrays import (
    copy_array,
    copy_bytearray,
    copy_memoryview,
    copy_pandas,
    copy_tensor,
    copy_typed_array,
)
from stoker.replicas.copying.containers import (
    copy_defaultdict,
    copy_deque,
    copy_dict,
    copy_frozenset,
    copy_list,
    copy_mapping_proxy,
    copy_ordered_dict,
    copy_set,
    copy_tuple,
    copy_weak_keys,
    copy_weak_values,
)
from stoker.replicas.copying.copier import Copier, Uncopyable, imported_types
from stoker.replicas.copying.functions import (
    copy_function,
    copy_lru_cached,
    copy_method,
    copy_partial,
)
from stoker.replicas.copying.handles import (
    copy_bytes_file,
    copy_file,
    copy_weakref,
    new_lock,
    new_rlock,
    reopen_hdf5,
)
from stoker.replicas.copying.objects import copy_object
from stoker.replicas.files import FILES
from stoker.replicas.provenance import is_users_class
from stoker.replicas.thread_safety import ONE_FOR_ALL, LruCached


def make_copy(copier: Copier, x: Any, cls: type) -> Any:
    """Return a copy of an object of this class, or the object itself if threads may share it.

    Raises:
        Uncopyable: it cannot be copied. The user's own methods may raise anything else.
    """
    make = _KINDS.get(cls)
    if make is not None:
        return make(copier, x)
    if isinstance(x, np.ndarray) and cls.__module__ != "numpy.ma":
        return copy_array(copier, x)
    if isinstance(x, imported_types("torch", "Tensor")):
        return copy_tensor(copier, x, sys.modules["torch"])
    if isinstance(x, imported_types("pandas", "DataFrame", "Series", "Index")):
        return copy_pandas(copier, x, sys.modules["pandas"])
    if isinstance(x, ONE_FOR_ALL):
        raise Uncopyable("it is one for all")
    if cls is types.BuiltinFunctionType or cls is types.MethodWrapperType:
        return getattr(copier.copy(x.__self__), x.__name__)
    if isinstance(x, (*FILES, io.BufferedWriter)):
        return copy_file(copier, x)
    if isinstance(x, (io.RawIOBase, io.BufferedIOBase, threading.Thread, weakref.ProxyType)) and (
        not isinstance(x, io.BytesIO) and not is_users_class(cls)
    ):
        raise Uncopyable("no second one can be made")
    if isinstance(x, weakref.ref):
        return copy_weakref(copier, x)
    if isinstance(x, imported_types("h5py", "File", "Group", "Dataset")):
        return reopen_hdf5(copier, x, sys.modules["h5py"])
    if cls.__module__ == "itertools" and sys.version_info >= (3, 12):
        raise Uncopyable("it has no copy")
    if cls.__module__.partition(".")[0] in ("torch", "torchvision", "kornia", "monai"):
        copier.touches_torch = True
    if any(is_users_class(base) for base in cls.__mro__):
        own = frozenset(getattr(x, "__dict__", ()))
        copier.look_at_class(cls, own=own)
    return copy_object(copier, x, cls)


_KINDS: dict[type, Callable[[Copier, Any], Any]] = {
    list: copy_list,
    tuple: copy_tuple,
    dict: copy_dict,
    OrderedDict: copy_ordered_dict,
    defaultdict: copy_defaultdict,
    set: copy_set,
    frozenset: copy_frozenset,
    deque: copy_deque,
    bytearray: copy_bytearray,
    array.array: copy_typed_array,
    io.BytesIO: copy_bytes_file,
    memoryview: copy_memoryview,
    type(threading.Lock()): new_lock,
    type(threading.RLock()): new_rlock,
    types.FunctionType: copy_function,
    types.MethodType: copy_method,
    LruCached: copy_lru_cached,
    functools.partial: copy_partial,
    weakref.WeakValueDictionary: copy_weak_values,
    weakref.WeakKeyDictionary: copy_weak_keys,
    types.MappingProxyType: copy_mapping_proxy,
}
