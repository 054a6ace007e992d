"""Copies graphs of users' objects, and tells later whether the originals are as they were.

What may be shared is (``shared_state.is_shared``). The rest is copied by what ``pickle`` asks for,
with these exceptions: locks are new, files that are read are opened once more, memory is copied by
address, functions of the user's bring their closures, defaults and the globals that they name.
"""

from __future__ import annotations

import array
import copyreg
import dis
import functools
import gc
import io
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from operator import is_
from typing import Any

import numpy as np

from stoker.replicas.code_facts import facts_of
from stoker.replicas.finalizers import restore, silence
from stoker.replicas.memory_blocks import MemoryBlocks, Reordered
from stoker.replicas.open_readers import FILES, reopened
from stoker.replicas.provenance import (
    is_users_class,
    is_users_function,
    is_users_module,
    once_a_class,
)
from stoker.replicas.shared_state import ATOMS, ONE_FOR_ALL, LruCached, SharedState, is_shared
from stoker.replicas.thread_safety import are_declared, is_declared

_MANY = 64  # elements from which a container is copied level by level instead of one by one
_DEEP = 20  # levels of containers; what refers to itself never ends
_WITHIN = 50  # objects that are copied within each other, in 6 calls each; Python allows 1,000
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_CELLS = ATOMS | {list, tuple, dict, np.ndarray}  # of tables: data, which is shared
_MISSING: Any = object()
_NEWOBJ: Any = getattr(copyreg, "__newobj__")  # noqa: B009
_OBJECT: Any = object
_THROUGH_MEMORY = frozenset(
    {"from_numpy", "as_tensor", "asarray", "from_dlpack", "frombuffer", "ctypes", "data_ptr", "ffi",
     "__array_interface__", "buffer_read_into", "out", "readinto"}
)  # fmt: skip
"""Names of what writes to an array past its flag, or has others do so."""


class Uncopyable(Exception):
    """An object cannot be copied; says why."""


class Unset:
    """What the attributes of the roots' objects held at one time, where that was nothing yet."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._set: dict[int, tuple[Any, dict[str, bool]]] = {}
        todo = list(roots)
        seen: set[int] = set()
        while todo and len(self._set) < 200 and len(seen) < 2_000:
            x = todo.pop()
            if type(x) in ATOMS or isinstance(x, type) or id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, (list, tuple)):
                if len(x) <= _MANY:
                    todo += x
                continue
            if isinstance(x, dict):
                if len(x) <= _MANY:
                    todo += x.values()
                continue
            if isinstance(x, types.FunctionType):
                if not is_users_function(x):
                    continue
                space = x.__globals__
                held = {name: space[name] for name in x.__code__.co_names if name in space}
                todo += [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
                key: Any = x
            elif isinstance(x, functools.partial):
                todo += [x.func, *x.args, *x.keywords.values()]
                continue
            elif isinstance(x, types.MethodType):
                todo.append(x.__self__)
                continue
            else:
                held = _attributes(x)
                key = x
            self._set[id(x)] = (key, {name: value is not None for name, value in held.items()})
            todo += held.values()

    def was_unset(self, x: Any, name: str) -> bool:
        """Return whether an attribute (a function's global) was None or missing then."""
        known = self._set.get(id(x))
        return known is not None and known[0] is x and not known[1].get(name)

    def was_missing(self, x: Any, name: str) -> bool:
        """Return whether there was no such attribute then, of an object that was looked at."""
        return name not in self._set[id(x)][1]


class _Flat:
    """What a list holds whose elements can all be shared; known from one copy to the next."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held
        self._looked: tuple[object, bool] | None = None

    def is_current(self, x: list[Any], generation: object) -> bool:
        """Return whether the list holds this still, by one look for all copies of a generation."""
        if generation is None or self._looked is None or self._looked[0] is not generation:
            self._looked = generation, _same(x, self.held)
        return self._looked[1]


_flat: weakref.WeakValueDictionary[int, _Flat] = weakref.WeakValueDictionary()


class Copier:
    """One copy of several roots.

    Args:
        unset: which attributes held nothing when the epoch began.
        extents: memory that is copied in one piece.
        written: whether large memory is written to in ways that no flag prevents.
    """

    def __init__(
        self,
        unset: Unset | None = None,
        extents: Sequence[tuple[int, int]] = (),
        written: bool = False,
    ) -> None:
        self._unset = unset or Unset(())
        self.memory = MemoryBlocks(extents, written)
        self._state = SharedState()
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._owner: dict[Any, int] = {}
        self._uncopied: dict[int, str] = {}
        self._parents: list[int] = []
        self._failed: list[tuple[int, str]] = []
        self._where: list[str] = []
        self._checks: list[Callable[[], bool]] = []
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._generation: object = None
        self._within = 0
        self._later: list[tuple[Any, Any]] = []
        self._touches_torch = False
        self.declared: list[str] = []

    def root(self, x: Any) -> Any:
        """Copy the next root."""
        self._parents.append(len(self._parents))
        self._where[:] = [_name(x)]
        try:
            y = self.copy(x)
            while self._later:
                self._attributes(*self._later.pop())
            return y
        except RecursionError:
            self._later.clear()
            self._fail("it is nested too deeply")
            return x

    def reasons(self) -> tuple[str | None, ...]:
        """Return for each root why it cannot have a copy; what shares an object has one answer."""
        why = {self._find(root): reason for root, reason in reversed(self._failed)}
        return tuple(why.get(self._find(root)) for root in range(len(self._parents)))

    def writes_past_flags(self) -> bool:
        """Return whether code that was reached may write to an array that says it is read-only."""
        return self._touches_torch or not _THROUGH_MEMORY.isdisjoint(self._state.mentioned)

    def lock(self, root: int, why: str) -> None:
        """Have a root locked in any case, and with it what shares something with it."""
        self._failed.append((root, why))

    def is_current(self, generation: object = None) -> bool:
        """Return whether all originals are as they were when they were copied.

        ``generation`` stands for copies that are asked of together: large lists are looked at once.
        """
        self._generation = generation
        try:
            return (
                all(check() for check in self._checks)
                and self._state.is_current()
                and all(original.is_current() for original in self.memory.originals)
            )
        except Exception:  # whatever the user's own methods raise: then it cannot be told
            return False

    def _find(self, root: int) -> int:
        while self._parents[root] != root:
            root = self._parents[root]
        return root

    def _join(self, key: Any) -> None:
        other = self._owner.get(key)
        if other is not None:
            self._parents[self._find(other)] = self._find(len(self._parents) - 1)

    def _fail(self, why: str) -> None:
        self._failed.append((len(self._parents) - 1, why))

    def _check(self, check: Callable[[], bool]) -> None:
        self._checks.append(check)

    def _has_own_state(self) -> None:
        """Take over what the look at classes and functions has found."""
        for reason in self._state.forget():
            self._fail(reason)
        touched, self._state.touched = self._state.touched, []
        for x in touched:
            self._join(id(x))
            self._owner.setdefault(id(x), len(self._parents) - 1)
            self._alive.append(x)

    def copy(self, x: Any) -> Any:
        """Return an object's copy; itself where it is shared, or cannot be copied."""
        cls = type(x)
        if cls in ATOMS:
            return x
        key = id(x)
        if key in self._memo:
            self._join(key)
            return self._memo[key]
        if key in self._uncopied:
            self._join(key)
            self._fail(self._uncopied[key])
            return x
        if isinstance(x, type):
            if is_users_class(x):
                self._state.look_at_class(x, made=True)
                self._has_own_state()
            return x
        if is_shared(x):
            if is_declared(x):
                self.declared.append(f"{self._where[-1]}, a {_full_name(cls)}")
            return x
        self._join(key)
        self._owner[key] = len(self._parents) - 1
        self._alive.append(x)
        try:
            y = self._made(x, cls)
        except (RecursionError, MemoryError, Reordered):
            raise
        except Exception as error:  # whatever the user's own methods raise
            why = f"{self._where[-1]}, a {_full_name(cls)}, cannot be copied"
            if not str(error).startswith("cannot pickle"):
                why += f" ({error})"
            self._fail(why)
            self._uncopied[key] = why
            self._memo.pop(key, None)
            return x
        self._memo[key] = y
        return y

    def _kept(self, x: Any, owner: Any, name: str) -> tuple[Any, bool]:
        """Copy what a name of an object stands for, and return whether there is a copy.

        Where there is none, and the name stood for nothing when the epoch began: None.
        """
        failed, visited = len(self._failed), len(self._alive)
        y = self.copy(x)
        if len(self._failed) == failed:
            return y, True
        if not self._unset.was_unset(owner, name):
            return y, True
        self._forget(failed, visited)
        return None, False

    def _forget(self, failed: int, visited: int) -> None:
        """Take back that something could not be copied, as it is left out."""
        why = self._failed[failed][1]
        del self._failed[failed:]
        for each in self._alive[visited:]:
            self._memo.pop(id(each), None)
            self._uncopied[id(each)] = why

    def _made(self, x: Any, cls: type) -> Any:
        make = _KINDS.get(cls)
        if make is not None:
            return make(self, x)
        if isinstance(x, np.ndarray) and cls.__module__ != "numpy.ma":
            return self._array(x)
        if isinstance(x, _imported("torch", "Tensor")):
            return self._tensor(x, sys.modules["torch"])
        if isinstance(x, _imported("pandas", "DataFrame", "Series", "Index")):
            return self._frame(x, sys.modules["pandas"])
        if isinstance(x, ONE_FOR_ALL):
            raise Uncopyable("it is one for all")
        if cls is types.BuiltinFunctionType or cls is types.MethodWrapperType:
            return getattr(self.copy(x.__self__), x.__name__)
        if isinstance(x, (*FILES, io.BufferedWriter)):
            return self._file(x)
        if isinstance(
            x, (io.RawIOBase, io.BufferedIOBase, threading.Thread, weakref.ProxyType)
        ) and (not isinstance(x, io.BytesIO) and not is_users_class(cls)):
            raise Uncopyable("no second one can be made")
        if isinstance(x, weakref.ref):
            return self._weak(x)
        if isinstance(x, _imported("h5py", "File", "Group", "Dataset")):
            return self._h5(x, sys.modules["h5py"])
        if cls.__module__ == "itertools" and sys.version_info >= (3, 12):
            raise Uncopyable("it has no copy")
        if cls.__module__.partition(".")[0] in ("torch", "torchvision", "kornia", "monai"):
            self._touches_torch = True
        if any(is_users_class(base) for base in cls.__mro__):
            own = frozenset(getattr(x, "__dict__", ()))
            self._state.look_at_class(cls, own=own)
            self._has_own_state()
        return self._object(x, cls)

    # Containers.

    def _list(self, x: list[Any]) -> list[Any]:
        known = _flat.get(id(x))
        if known is not None and _same(x, known.held):
            self._alive.append(known)
            self._check(lambda: known.is_current(x, self._generation))
            return x.copy()
        out: list[Any] = []
        self._memo[id(x)] = out
        held = x.copy()
        copies = self._several(held)
        if copies is held and len(held) >= _MANY:
            _flat[id(x)] = flat = _Flat(held)
            self._alive.append(flat)
            self._check(lambda: flat.is_current(x, self._generation))
        else:
            self._check(lambda: _same(x, held))
        out.extend(copies)
        return out

    def _tuple(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        held = list(x)
        copies = self._several(held)
        return x if copies is held or _same(copies, held) else tuple(copies)

    def _dict(self, x: dict[Any, Any]) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        self._memo[id(x)] = out
        self._fill(out, x)
        return out

    def _fill(self, out: Any, x: dict[Any, Any]) -> None:
        keys, values = list(x), list(x.values())
        self._check(lambda: _same(x, keys) and _same(x.values(), values))
        new_keys, new_values = self._several(keys), self._several(values)
        if new_keys is keys and new_values is values and type(out) is dict:
            out.update(x)
            return
        for key, value in zip(new_keys, new_values, strict=True):
            out[key] = value

    def _ordered(self, x: OrderedDict[Any, Any]) -> OrderedDict[Any, Any]:
        out: OrderedDict[Any, Any] = OrderedDict()
        self._memo[id(x)] = out
        self._fill(out, x)
        return out

    def _defaulting(self, x: defaultdict[Any, Any]) -> defaultdict[Any, Any]:
        out: defaultdict[Any, Any] = defaultdict()
        self._memo[id(x)] = out
        factory = x.default_factory
        self._check(lambda: x.default_factory is factory)
        out.default_factory = self.copy(factory)
        self._fill(out, x)
        return out

    def _set(self, x: set[Any]) -> set[Any]:
        out: set[Any] = set()
        self._memo[id(x)] = out
        held = list(x)
        seen = {*map(id, held)}
        self._check(lambda: {*map(id, x)} == seen and len(held) == len(x))
        out.update(self._several(held))
        return out

    def _frozenset(self, x: frozenset[Any]) -> frozenset[Any]:
        held = list(x)
        copies = self._several(held)
        return x if copies is held or _same(copies, held) else frozenset(copies)

    def _deque(self, x: deque[Any]) -> deque[Any]:
        out: deque[Any] = deque(maxlen=x.maxlen)
        self._memo[id(x)] = out
        held = list(x)
        self._check(lambda: _same(x, held))
        out.extend(self._several(held))
        return out

    def _several(self, items: list[Any], depth: int = 0) -> list[Any]:
        """Return copies of many objects: the same list where all of them can be shared.

        Large structures are copied a level at a time, all of a kind at once.
        """
        kinds = set(map(type, items))
        if kinds <= ATOMS:
            return items
        if len(items) < _MANY or depth == _DEEP:
            return list(map(self.copy, items))
        if len(kinds) > 1:
            return self._mixed(items, kinds, depth)
        (kind,) = kinds
        if kind is tuple:
            inner = list(chain.from_iterable(items))
            copies = self._several(inner, depth + 1)
            if copies is inner or _same(copies, inner):
                return items
            parts = iter(copies)
            return [tuple(islice(parts, size)) for size in map(len, items)]
        is_bare = _is_bare(kind)
        if kind is not list and kind is not dict and not is_bare:
            return list(map(self.copy, items))
        keys = {*map(id, items)}
        if (
            len(keys) < len(items)
            or (is_bare and are_declared(kind, keys))
            or not self._memo.keys().isdisjoint(keys)
            or not self._owner.keys().isdisjoint(keys)
        ):
            return list(map(self.copy, items))
        root = len(self._parents) - 1
        self._owner.update(dict.fromkeys(keys, root))
        self._alive.append(items)
        out: list[Any]
        if is_bare:
            return self._objects(items, kind, depth)
        sizes = list(map(len, items))
        self._check(lambda: list(map(len, items)) == sizes)
        if kind is list:
            inner = list(chain.from_iterable(items))
            self._check(lambda: _same(chain.from_iterable(items), inner))
            if ATOMS.issuperset(map(type, inner)):
                out = list(map(list, items))
                self._memo.update(zip(map(id, items), out, strict=True))
                return out
            out = [[] for _ in items]
            self._memo.update(zip(map(id, items), out, strict=True))
            parts = iter(self._several(inner, depth + 1))
            for new, size in zip(out, sizes, strict=True):
                new.extend(islice(parts, size))
            return out
        names = list(chain.from_iterable(items))
        inner = list(chain.from_iterable(map(dict.values, items)))
        self._check(
            lambda: (
                _same(chain.from_iterable(items), names)
                and _same(chain.from_iterable(map(dict.values, items)), inner)
            )
        )
        if not ATOMS.issuperset(map(type, names)):
            new_names = self._several(names, depth + 1)
        else:
            new_names = names
            if ATOMS.issuperset(map(type, inner)):
                out = list(map(dict.copy, items))
                self._memo.update(zip(map(id, items), out, strict=True))
                return out
        out = [{} for _ in items]
        self._memo.update(zip(map(id, items), out, strict=True))
        pairs = zip(new_names, self._several(inner, depth + 1), strict=True)
        for new, size in zip(out, sizes, strict=True):
            new.update(islice(pairs, size))
        return out

    def _objects(self, items: list[Any], cls: type, depth: int) -> list[Any]:
        """Return copies of many objects of one class, which have nothing but a table each."""
        tables = list(map(vars, items))
        for names in set(map(tuple, tables)):
            self._state.look_at_class(cls, own=frozenset(names))
        self._has_own_state()
        self._check(lambda: _same(map(vars, items), tables))
        out: list[Any] = list(map(_OBJECT.__new__, repeat(cls, len(items))))
        self._memo.update(zip(map(id, items), out, strict=True))
        self._where.append(cls.__qualname__)
        copies = self._several(tables, depth + 1)
        deque(map(_OBJECT.__setattr__, out, repeat("__dict__"), copies), maxlen=0)
        self._where.pop()
        return out

    def _mixed(self, items: list[Any], kinds: set[type], depth: int) -> list[Any]:
        out = items.copy()
        for kind in kinds - ATOMS:
            places = [at for at, each in enumerate(map(type, items)) if each is kind]
            copies = self._several([items[at] for at in places], depth)
            for at, new in zip(places, copies, strict=True):
                out[at] = new
        return out

    # What a thread needs one of its own of.

    def _lock(self, x: Any) -> Any:
        return threading.Lock()

    def _rlock(self, x: Any) -> Any:
        return threading.RLock()

    def _file(self, x: Any) -> Any:
        if x.closed:
            self._check(lambda: x.closed)
            return x
        if x.writable() and not x.readable():
            return x  # what processes write goes to one file as well
        again = reopened(x)
        if again is not x:
            place = x.tell()
            self._check(lambda: not x.closed and x.tell() == place)
        return again

    def _h5(self, x: Any, h5py: Any) -> Any:
        if not x:  # closed
            return x
        if isinstance(x, h5py.File):
            if x.mode != "r":
                raise Uncopyable(f"it is open in mode {x.mode!r}")
            again = h5py.File(x.filename, "r")
            self._check(lambda: bool(x))
            return again
        if not x.name:
            raise Uncopyable("it has no name")
        return self.copy(x.file)[x.name]

    def _weak(self, x: weakref.ref[Any]) -> Any:
        target = x()
        if target is None:
            return x
        if x.__callback__ is not None or type(x) is not weakref.ref:
            raise Uncopyable("it calls back")
        self._check(lambda: x() is target)
        again = self.copy(target)
        self._alive.append(again)
        return weakref.ref(again)

    def _weak_values(self, x: Any) -> Any:
        out: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        held = dict(x)
        self._check(lambda: _same(x, list(held)) and _same(x.values(), list(held.values())))
        for key, value in held.items():
            again = self.copy(value)
            self._alive.append(again)
            out[self.copy(key)] = again
        return out

    def _proxy(self, x: Any) -> Any:
        (table,) = gc.get_referents(x)
        return types.MappingProxyType(self.copy(table))

    def _weak_keys(self, x: Any) -> Any:
        out: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        held = list(x.items())
        seen = list(chain.from_iterable(held))
        self._check(lambda: _same(chain.from_iterable(x.items()), seen))
        for key, value in held:
            again = self.copy(key)
            self._alive.append(again)
            out[again] = self.copy(value)
        return out

    # Memory.

    def _array(self, x: np.ndarray[Any, Any]) -> Any:
        if x.dtype.hasobject:
            held = list(x.ravel(order="K"))
            self._check(lambda: _same(x.ravel(order="K"), held))
            flat = np.empty(len(held), object)
            flat[:] = self._several(held) if x.dtype == object else held
            if x.dtype != object:
                raise Uncopyable("its records hold objects")
            return flat.reshape(x.T.shape).T if x.flags.fnc else flat.reshape(x.shape)
        owner: Any = x
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        while isinstance(owner, memoryview):
            owner = owner.obj
        if not isinstance(owner, np.ndarray):
            shared = self._foreign(x, owner)
            if shared is not None:
                return shared
        shape, dtype, strides = x.shape, x.dtype, x.strides
        data = x.ctypes.data
        self._check(
            lambda: (
                x.ctypes.data == data
                and x.shape == shape
                and x.strides == strides
                and x.dtype == dtype
            )
        )
        begin, end = np.lib.array_utils.byte_bounds(owner if isinstance(owner, np.ndarray) else x)
        if begin == end:
            return x.copy()
        block, offset = self.memory.copied(begin, end - begin)
        if block is None:
            y = x.view()
            y.flags.writeable = False
            return y
        y = np.ndarray(shape, dtype, block, offset + data - begin, strides)
        if not x.flags.writeable:
            y.flags.writeable = False
        if type(x) not in (np.ndarray, np.memmap):
            y = y.view(type(x))
            vars(y).update(self.copy(dict(vars(x))))
        return y

    def _foreign(self, x: Any, owner: Any) -> Any:
        """Return what stands for an array whose memory is not NumPy's; None for a copy of it."""
        module = type(owner).__module__
        if module in ("mmap", "ctypes", "_ctypes") or module.startswith("multiprocessing"):
            is_private = isinstance(x, np.memmap) and x.mode == "c"
            return None if is_private else x  # workers that are processes share it, too
        if isinstance(owner, bytes) or not x.flags.writeable:
            return x
        if isinstance(owner, (bytearray, array.array)):
            begin = np.frombuffer(owner, np.uint8).ctypes.data
            again = self.copy(owner)
            return np.ndarray(x.shape, x.dtype, again, x.ctypes.data - begin, x.strides)
        if isinstance(owner, _imported("torch", "Tensor")):
            self.copy(owner)  # its whole memory comes first
        return None

    def _tensor(self, x: Any, torch: Any) -> Any:
        if type(x) is torch.nn.Parameter:
            return x  # of the model that is trained, if one is reached: it would be held 8 times
        self._touches_torch = True
        if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized:
            version = x._version
            self._check(lambda: x._version == version)
            return x.detach().clone().requires_grad_(x.requires_grad)
        if x.is_shared():
            return x
        storage = x.untyped_storage()
        start, size, version = storage.data_ptr(), storage.nbytes(), x._version
        shape, strides = x.size(), x.stride()
        self._check(lambda: x.size() == shape and x.stride() == strides)
        if not size:
            y = x.detach().clone()
        else:
            block, offset = self.memory.copied(start, size)
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
            vars(y).update(self.copy(dict(vars(x))))
        return y

    def _frame(self, x: Any, pandas: Any) -> Any:
        """Copy a table or column of pandas, which from 3.0 copies what is written by itself."""
        if isinstance(x, pandas.Index):
            return x
        is_late = int(pandas.__version__.partition(".")[0]) >= 3
        blocks = [block.values for block in x._mgr.blocks]
        for values in blocks:
            if values.dtype == object and not _CELLS.issuperset(map(type, np.ravel(values))):
                raise Uncopyable("it holds objects")
        held = [*blocks, *x._mgr.axes]
        self._check(
            lambda: (
                is_late and _same([*(block.values for block in x._mgr.blocks), *x._mgr.axes], held)
            )
        )
        return x.copy(deep=not is_late)

    def _bytearray(self, x: bytearray) -> bytearray:
        held = bytes(x)
        self._check(lambda: x == held)
        return bytearray(held)

    def _typed(self, x: array.array[Any]) -> array.array[Any]:
        held = x[:]
        self._check(lambda: x == held)
        return x[:]

    def _bytes_file(self, x: io.BytesIO) -> io.BytesIO:
        held, place = x.getvalue(), x.tell()
        self._check(lambda: x.tell() == place and x.getvalue() == held)
        again = io.BytesIO(held)
        again.seek(place)
        vars(again).update(self.copy(dict(vars(x))))
        return again

    def _memory(self, x: memoryview) -> memoryview:
        if x.readonly and isinstance(x.obj, bytes):
            return x
        if not x.contiguous or x.nbytes != memoryview(x.obj).nbytes:
            raise Uncopyable("it shows a part of its object")
        plain: Any = memoryview(self.copy(x.obj)).cast("B")
        again: memoryview = plain.cast(x.format, x.shape)
        return again.toreadonly() if x.readonly else again

    # Functions.

    def _function(self, f: types.FunctionType) -> Any:
        if not is_users_function(f):
            # A decorator's: what it closes over may be the user's.
            if f.__closure__ is None or _is_importable(f):
                return f
        else:
            self._state.look_at_function(f, copied=True)
            self._has_own_state()
        if not self._needs_copy(f, set()):
            self._watch(f)
            return f
        cells = tuple(map(self._cell, f.__closure__ or ()))
        users = is_users_function(f)
        space = self._space(f) if users else f.__globals__
        g = types.FunctionType(f.__code__, space, f.__name__, None, cells or None)
        self._memo[id(f)] = g
        functools.update_wrapper(g, f, functools.WRAPPER_ASSIGNMENTS, ())
        del vars(g)["__wrapped__"]
        g.__defaults__ = self.copy(f.__defaults__)
        g.__kwdefaults__ = self.copy(f.__kwdefaults__)
        vars(g).update(self.copy(dict(vars(f))))
        self._watch(f)
        for mine, theirs in zip(cells, f.__closure__ or (), strict=True):
            if _is_filled(theirs) and not _is_filled(mine):
                mine.cell_contents = self.copy(theirs.cell_contents)
        if users:
            self._where.append(f.__qualname__)
            stored = _stored_globals(f.__globals__)
            for name in sorted(facts_of(f.__code__).names):
                if name in f.__globals__:
                    self._where.append(f"the global {name!r} of {f.__qualname__}")
                    space[name], is_kept = self._kept(f.__globals__[name], f, name)
                    if not is_kept and self._unset.was_missing(f, name):
                        del space[name]
                    self._where.pop()
                if name in stored:
                    self._join((id(f.__globals__), name))
                    self._owner[id(f.__globals__), name] = len(self._parents) - 1
            self._where.pop()
        return g

    def _cell(self, cell: types.CellType) -> types.CellType:
        """Return the variable that the copies of all functions share which close over this one."""
        self._join(id(cell))
        self._owner[id(cell)] = len(self._parents) - 1
        new: types.CellType = self._memo.setdefault(id(cell), types.CellType())
        self._alive.append(cell)
        return new

    def _space(self, f: types.FunctionType) -> dict[str, Any]:
        """Return the globals that the copies of a module's functions have together."""
        known = self._spaces.get(id(f.__globals__))
        if known is None:
            known = self._spaces[id(f.__globals__)] = (dict(f.__globals__), f.__globals__)
        return known[0]

    def _watch(self, f: types.FunctionType) -> None:
        code, defaults, table = f.__code__, f.__defaults__, dict(vars(f))
        held = [(cell, cell.cell_contents) for cell in f.__closure__ or () if _is_filled(cell)]
        names = sorted(facts_of(code).names) if is_users_function(f) else []
        values = [f.__globals__.get(name, _MISSING) for name in names]
        self._check(
            lambda: (
                f.__code__ is code
                and f.__defaults__ is defaults
                and vars(f) == table
                and all(_is_filled(cell) and cell.cell_contents is value for cell, value in held)
                and all(
                    f.__globals__.get(name, _MISSING) is value
                    for name, value in zip(names, values, strict=True)
                )
            )
        )

    def _needs_copy(self, f: types.FunctionType, visited: set[int]) -> bool:
        """Return whether a function, or one that it names, has anything that is copied."""
        if id(f) in visited:
            return False
        visited.add(id(f))
        if any(name != "__wrapped__" for name in vars(f)):
            return True
        facts = facts_of(f.__code__)
        users = is_users_function(f)
        if users and facts.stores:
            return True
        if users and f.__closure__:
            return True  # somebody may set what it closes over
        parts = [cell.cell_contents for cell in f.__closure__ or () if _is_filled(cell)]
        parts += f.__defaults__ or ()
        parts += (f.__kwdefaults__ or {}).values()
        parts += vars(f).values()
        if users:
            stored = _stored_globals(f.__globals__)
            if not stored.isdisjoint(facts.names):
                return True
            parts += [f.__globals__[name] for name in facts.names if name in f.__globals__]
        for part in parts:
            if type(part) in ATOMS or isinstance(part, type) or is_shared(part):
                continue
            if not isinstance(part, types.FunctionType):
                return True
            is_own = is_users_function(part) or (part.__closure__ and not _is_importable(part))
            if is_own and self._needs_copy(part, visited):
                return True
        return False

    def _method(self, x: types.MethodType) -> types.MethodType:
        return types.MethodType(self.copy(x.__func__), self.copy(x.__self__))

    def _lru(self, x: Any) -> Any:
        inner = x.__wrapped__
        if isinstance(inner, types.FunctionType) and not is_users_function(inner):
            return x
        again = functools.lru_cache(**x.cache_parameters())(self.copy(inner))
        functools.update_wrapper(again, x)
        again.__wrapped__ = self.copy(inner)
        return again

    def _partial(self, x: functools.partial[Any]) -> Any:
        func, args, keywords = x.func, x.args, x.keywords
        held = dict(keywords)
        self._check(lambda: x.func is func and x.args is args and dict(x.keywords) == held)
        again = functools.partial(self.copy(func), *map(self.copy, args))
        again.keywords.update({name: self.copy(value) for name, value in held.items()})
        vars(again).update(self.copy(dict(vars(x))))
        return again

    # All others.

    def _object(self, x: Any, cls: type) -> Any:
        if hasattr(cls, "__deepcopy__"):
            again = self._by_its_own(x)
            if again is not x:
                return again
        reduce = copyreg.dispatch_table.get(cls)
        is_plain = reduce is None and _is_plainly_reduced(cls)
        made: Any = x.__reduce_ex__(4) if reduce is None else reduce(x)
        if isinstance(made, str):
            return self._one_for_all(x, cls)
        parts: list[Any] = list(made)
        parts += [None] * (6 - len(parts))
        make, args, state, items, pairs, set_state = parts
        if make is _NEWOBJ and len(args) == 1:
            again = _maker(args[0])(args[0])
        elif make is _NEWOBJ:  # the class comes first
            again = args[0].__new__(args[0], *map(self.copy, args[1:]))
        else:
            again = self.copy(make)(*map(self.copy, args))
        if again is x:
            return self._one_for_all(x, cls)
        self._memo[id(x)] = again
        failed = len(self._failed)
        silence(again)
        if state is not None and state is getattr(x, "__dict__", None):
            is_plain |= set_state is None and not hasattr(type(again), "__setstate__")
        self._where.append(cls.__qualname__)
        if is_plain and self._within < _WITHIN:
            self._within += 1
            try:
                self._attributes(x, again)
            finally:
                self._within -= 1
        elif is_plain:  # a long chain of objects: it waits, so that the stack stays short
            self._later.append((x, again))
        elif state is not None:
            if set_state is not None:
                set_state(again, self.copy(state))
            elif hasattr(type(again), "__setstate__"):
                again.__setstate__(self.copy(state))
            else:
                own, slots = (
                    state if isinstance(state, tuple) and len(state) == 2 else (state, None)
                )
                if own:
                    vars(again).update(self.copy(own))
                for name, value in (slots or {}).items():
                    setattr(again, name, self.copy(value))
        if not is_plain or args[1:] or make is not _NEWOBJ:
            known = (make, args) if is_plain else (make, args, state)
            self._check(lambda: _alike(_reduced(x, reduce)[: len(known)], known))
        if items is not None:
            held = list(items)
            self._check(lambda: _same(list.__iter__(x) if isinstance(x, list) else iter(x), held))
            extend = again.extend if hasattr(again, "extend") else None
            copies = self._several(held)
            if extend is not None:
                extend(copies)
            else:
                for each in copies:
                    again.append(each)
        if pairs is not None:
            table = dict(pairs)
            keys, values = list(table), list(table.values())
            self._check(lambda: _same(dict.__iter__(x), keys) and _same(dict.values(x), values))
            for key, value in table.items():
                again[self.copy(key)] = self.copy(value)
        self._where.pop()
        if not is_plain and len(self._failed) == failed:
            restore(again)  # its class says what a copy is, which has a right to its end
        return again

    def _one_for_all(self, x: Any, cls: type) -> Any:
        """Share an object that is its own copy, unless it is the user's and has a state."""
        if is_users_class(cls) and _attributes(x):
            raise Uncopyable("its copy would be itself")
        return x

    def _attributes(self, x: Any, again: Any) -> None:
        """Copy all attributes; as they were when the epoch began, where one has no copy now."""
        held = _attributes(x)
        names, values = list(held), list(held.values())

        def is_current() -> bool:
            now = _attributes(x)
            return _same(now.values(), values) and list(now) == names

        self._check(is_current)
        new: dict[str, Any] = {}
        is_whole = True
        for name, value in held.items():
            self._where.append(f"{type(x).__qualname__}.{name}")
            new[name], is_kept = self._kept(value, x, name)
            is_whole &= is_kept
            self._where.pop()
        table = getattr(again, "__dict__", None)
        for name, value in new.items():
            if not is_whole and self._unset.was_unset(x, name):
                if self._unset.was_missing(x, name):
                    continue
                value = None
            if table is not None and name in vars(x):
                table[name] = value
            else:
                object.__setattr__(again, name, value)

    def _by_its_own(self, x: Any) -> Any:
        """Copy by ``__deepcopy__``, which finds the copies of the attributes that have one."""
        held = _attributes(x)
        for value in held.values():
            failed, visited = len(self._failed), len(self._alive)
            self.copy(value)
            if len(self._failed) > failed:
                self._forget(failed, visited)
        again = x.__deepcopy__(dict(self._memo))
        if again is x:
            return x
        self._memo[id(x)] = again
        for name, value in _attributes(again).items():
            if value is held.get(name, _MISSING):
                object.__setattr__(again, name, self.copy(value))
        names, values = list(held), list(held.values())
        if held:
            self._check(
                lambda: _same(_attributes(x).values(), values) and list(_attributes(x)) == names
            )
        else:
            self._check(lambda: False)
        return again


def _imported(module: str, *names: str) -> tuple[Any, ...]:
    """Return types of a module; none of it where it, or what they are in, is not imported yet."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def _same(left: Iterable[Any], right: list[Any]) -> bool:
    """Return whether these are the same objects in the same order."""
    held = left if isinstance(left, list) else list(left)
    return len(held) == len(right) and all(map(is_, held, right))


def _attributes(x: Any) -> dict[str, Any]:
    """Return an object's attributes: those in its table, then its slots'."""
    cls: Any = type(x)
    found = dict(getattr(x, "__dict__", ()))
    for name in _slots(cls):
        value = getattr(x, name, _MISSING)
        if value is not _MISSING:
            found[name] = value
    return found


@once_a_class
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and base.__flags__ & 1 << 9
    )


@once_a_class
def _maker(cls: type) -> Callable[[type], Any]:
    """Return what makes a bare instance; the user's ``__new__`` may enter or hand out others."""
    bases: Any = cls.__mro__
    base = next(b for b in bases if "__new__" in vars(b) and not is_users_class(b))
    make: Callable[[type], Any] = base.__new__
    return make


@once_a_class
def _is_plainly_reduced(cls: Any) -> bool:
    """Return whether a class leaves it to Python what its instances are made of."""
    own = getattr(object, "__getstate__", None)
    return (
        cls.__reduce_ex__ is _OBJECT.__reduce_ex__
        and cls.__reduce__ is _OBJECT.__reduce__
        and getattr(cls, "__getstate__", None) is own
        and not hasattr(cls, "__setstate__")
    )


@once_a_class
def _is_bare(cls: Any) -> bool:
    """Return whether instances are the user's, and a table of attributes is all that they are."""
    usual = ("__getattribute__", "__reduce_ex__", "__reduce__", "__dir__")
    unusual = ("__deepcopy__", "__del__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
    return (
        cls is not object
        and all(map(is_users_class, cls.__mro__[:-1]))
        and _is_plainly_reduced(cls)
        and cls not in copyreg.dispatch_table
        and all(getattr(cls, name) is getattr(_OBJECT, name) for name in usual)
        and not any(hasattr(cls, name) for name in unusual)
        and not _slots(cls)
        and cls.__dictoffset__ != 0
        and "__dict__" not in _properties(cls)
        and not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)  # are shared
    )


def _properties(cls: Any) -> set[str]:
    return {
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, property)
    }


def _reduced(x: Any, reduce: Callable[[Any], Any] | None) -> Any:
    made = x.__reduce_ex__(4) if reduce is None else reduce(x)
    return (*made, None)[:3]


def _alike(left: Any, right: Any, depth: int = 0) -> bool:
    """Return whether two reduced states say the same of an object."""
    if left is right:
        return True
    if type(left) is not type(right) or depth > _DEEP:
        return False
    if type(left) in ATOMS:
        return bool(left == right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(
            _alike(a, b, depth + 1) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, dict):
        return _alike(list(left), list(right), depth + 1) and _alike(
            list(left.values()), list(right.values()), depth + 1
        )
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and not left.dtype.hasobject
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, _imported("torch", "Tensor")):
        return bool(sys.modules["torch"].equal(left, right))
    if isinstance(left, (types.FunctionType, types.MethodType)):
        return bool(left == right)
    return _alike(_reduced(left, None), _reduced(right, None), depth + 1)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_importable(f: types.FunctionType) -> bool:
    """Return whether a function is one of a package's own, and not what it made of the user's."""
    if is_users_module(f.__module__):
        return False
    found: Any = sys.modules.get(f.__module__)
    for name in f.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is f


def _stored_globals(space: dict[str, Any]) -> frozenset[str]:
    """Return which globals the functions of a module set."""
    return frozenset(
        name
        for value in list(space.values())
        if isinstance(value, types.FunctionType) and value.__globals__ is space
        for name in _stored_by(value.__code__)
    )


@functools.lru_cache(4096)
def _stored_by(code: types.CodeType) -> frozenset[str]:
    within = (_stored_by(each) for each in code.co_consts if isinstance(each, types.CodeType))
    own = facts_of(code).stores if _STORE_GLOBAL in code.co_code[::2] else frozenset[str]()
    return own.union(*within)


_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def _name(x: Any) -> str:
    return getattr(x, "__qualname__", None) or type(x).__qualname__


def _full_name(cls: type) -> str:
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


_KINDS: dict[type, Callable[[Copier, Any], Any]] = {
    list: Copier._list,
    tuple: Copier._tuple,
    dict: Copier._dict,
    OrderedDict: Copier._ordered,
    defaultdict: Copier._defaulting,
    set: Copier._set,
    frozenset: Copier._frozenset,
    deque: Copier._deque,
    bytearray: Copier._bytearray,
    array.array: Copier._typed,
    io.BytesIO: Copier._bytes_file,
    memoryview: Copier._memory,
    _LOCK: Copier._lock,
    _RLOCK: Copier._rlock,
    types.FunctionType: Copier._function,
    types.MethodType: Copier._method,
    LruCached: Copier._lru,
    functools.partial: Copier._partial,
    weakref.WeakValueDictionary: Copier._weak_values,
    weakref.WeakKeyDictionary: Copier._weak_keys,
    types.MappingProxyType: Copier._proxy,
}
