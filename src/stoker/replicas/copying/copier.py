"""The walk over a graph of users' objects: what has its copy, which root owns it, what has failed.

How each kind of object is copied is told by the ``make`` of a copier (``kinds.make_copy``).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

from stoker.replicas.copying.attributes import UnsetAttributes
from stoker.replicas.copying.memory_blocks import LargerBlock, MemoryBlocks
from stoker.replicas.provenance import is_users_class
from stoker.replicas.shared_state import SharedState
from stoker.replicas.thread_safety import ATOMS, is_declared, is_shared

_WRITES_PAST_FLAGS = frozenset(
    {"from_numpy", "as_tensor", "asarray", "from_dlpack", "frombuffer", "ctypes", "data_ptr", "ffi",
     "__array_interface__", "buffer_read_into", "out", "readinto"}
)  # fmt: skip
"""Names of what writes to an array past its flag, or has others do so."""


class Uncopyable(Exception):
    """An object cannot be copied; says why."""


class Copier:
    """One copy of several roots, which are copied one after the other.

    Args:
        make: makes the copy of an object that is not shared, has none yet, and is of this class.
        unset: which attributes held nothing when the epoch began.
        extents: memory that is copied in one piece.

    Attributes:
        memo: by ``id``, the copy of each object that has one.
        alive: objects that must outlive the copier, as their ``id`` is a key here, or as copies
            refer to them only weakly.
        where: the names that lead to the object that is copied now, for reasons. What raises leaves
            its names there: the reason is told by the innermost.
        later: copies that wait until the stack is short.
        nested: how many objects' attributes are being copied within each other.
        generation: stands for all copies that are asked at once whether they are current.
        touches_torch: whether an object of torch, or of what is built on it, was met.
        module_globals: by ``id`` of a module's globals: their copy, and the original.
        declared: what is shared by declaration, and where it was found.
    """

    def __init__(
        self,
        make: Callable[[Copier, Any, type], Any],
        unset: UnsetAttributes | None = None,
        extents: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._make = make
        self.unset = unset or UnsetAttributes(())
        self.memory = MemoryBlocks(extents)
        self.memo: dict[int, Any] = {}
        self.alive: list[Any] = []
        self.where: list[str] = []
        self.later: list[Callable[[], None]] = []
        self.nested = 0
        self.generation: object = None
        self.touches_torch = False
        self.module_globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.declared: list[str] = []
        self._state = SharedState()
        self._checks: list[Callable[[], bool]] = []
        self._uncopied: dict[int, str] = {}
        self._failed: list[tuple[int, str]] = []
        self._owner: dict[Any, int] = {}
        self._parents: list[int] = []  # of roots: those that share an object are one tree

    def root(self, x: Any) -> Any:
        """Copy the next root."""
        self._parents.append(len(self._parents))
        self.where[:] = [getattr(x, "__qualname__", None) or type(x).__qualname__]
        try:
            y = self.copy(x)
            while self.later:
                self.later.pop()()
            return y
        except RecursionError:
            self.later.clear()
            self.fail("it is nested too deeply")
            return x

    def reasons(self) -> tuple[str | None, ...]:
        """Return for each root why it cannot have a copy; what shares an object has one answer."""
        why = {self._find(root): reason for root, reason in reversed(self._failed)}
        return tuple(why.get(self._find(root)) for root in range(len(self._parents)))

    def lock(self, root: int, why: str) -> None:
        """Have a root locked in any case, and with it what shares something with it."""
        self._failed.append((root, why))

    def writes_past_flags(self) -> bool:
        """Return whether code that was reached may write to an array that says it is read-only."""
        return self.touches_torch or not _WRITES_PAST_FLAGS.isdisjoint(self._state.mentioned)

    def is_current(self, generation: object = None) -> bool:
        """Return whether all originals are as they were when they were copied.

        ``generation`` stands for copies that are asked of together: large lists are looked at once.
        """
        self.generation = generation
        try:
            return (
                all(check() for check in self._checks)
                and self._state.found.are_current()
                and all(original.is_current() for original in self.memory.originals)
            )
        except Exception:  # whatever the user's own methods raise: then it cannot be told
            return False

    def copy(self, x: Any) -> Any:
        """Return an object's copy; itself where it is shared, or cannot be copied."""
        cls = type(x)
        if cls in ATOMS:
            return x
        key = id(x)
        if key in self.memo:
            self._join(key)
            return self.memo[key]
        if key in self._uncopied:
            self._join(key)
            self.fail(self._uncopied[key])
            return x
        if isinstance(x, type):
            if is_users_class(x):
                self.look_at_class(x, made=True)
            return x
        if is_shared(x):
            if is_declared(x):
                self.declared.append(f"{self.where[-1]}, a {_full_name(cls)}")
            return x
        self.own(key, x)
        try:
            y = self._make(self, x, cls)
        except (RecursionError, MemoryError, LargerBlock):
            raise
        except Exception as error:  # whatever the user's own methods raise
            why = f"{self.where[-1]}, a {_full_name(cls)}, cannot be copied"
            if not str(error).startswith("cannot pickle"):
                why += f" ({error})"
            self.fail(why)
            self._uncopied[key] = why
            self.memo.pop(key, None)
            return x
        self.memo[key] = y
        return y

    def copy_attribute(self, x: Any, owner: Any, name: str) -> tuple[Any, bool]:
        """Copy what a name of an object stands for, and return whether there is a copy.

        Where there is none, and the name stood for nothing when the epoch began: None.
        """
        failed, visited = len(self._failed), len(self.alive)
        y = self.copy(x)
        if len(self._failed) == failed or not self.unset.was_unset(owner, name):
            return y, True
        self._forget(failed, visited)
        return None, False

    def try_to_copy(self, x: Any) -> None:
        """Copy an object for whatever refers to it; that it has no copy is no failure."""
        failed, visited = len(self._failed), len(self.alive)
        self.copy(x)
        if len(self._failed) > failed:
            self._forget(failed, visited)

    def _forget(self, failed: int, visited: int) -> None:
        """Take back that something could not be copied, as it is left out.

        What it reached is copied anew where something else refers to it: that may be without it.
        """
        del self._failed[failed:]
        for each in self.alive[visited:]:
            self.memo.pop(id(each), None)

    # What the ways to copy a kind of object report.

    def check(self, check: Callable[[], bool]) -> None:
        """Have ``is_current`` ask this, too: whether an original is as it was."""
        self._checks.append(check)

    def fail(self, why: str) -> None:
        """Have the current root locked, for this reason."""
        self._failed.append((len(self._parents) - 1, why))

    @property
    def failures(self) -> int:
        """How many there were so far, in all roots."""
        return len(self._failed)

    def own(self, key: Any, x: Any = None) -> None:
        """Count something as the current root's, along with the roots that have met it before.

        Args:
            key: what is the same wherever it is met: the ``id`` of an object.
            x: the object, which must live as long as its ``id`` is known here.
        """
        self._join(key)
        self._owner[key] = len(self._parents) - 1
        if x is not None:
            self.alive.append(x)

    def own_all(self, keys: set[int], items: list[Any]) -> None:
        """Count many objects as the current root's, by ``id``, of which none was met before."""
        self._owner.update(dict.fromkeys(keys, len(self._parents) - 1))
        self.alive.append(items)

    def has_met_any(self, keys: set[int]) -> bool:
        """Return whether one of the objects with these ``id`` was met before."""
        return not (self.memo.keys().isdisjoint(keys) and self._owner.keys().isdisjoint(keys))

    def look_at_class(
        self, cls: type, made: bool = False, own: frozenset[str] = frozenset()
    ) -> None:
        """Fail where the methods of a user's class keep something that copies would share."""
        self._state.look_at_class(cls, made, own)
        self._take_reasons()

    def look_at_function(self, function: types.FunctionType) -> None:
        """Fail where a user's function keeps something that its copies would share."""
        self._state.look_at_function(function, copied=True)
        self._take_reasons()

    def _take_reasons(self) -> None:
        reasons, touched = self._state.found.take()
        for reason in reasons:
            self.fail(reason)
        for x in touched:
            self.own(id(x), x)

    def _find(self, root: int) -> int:
        while self._parents[root] != root:
            root = self._parents[root]
        return root

    def _join(self, key: Any) -> None:
        other = self._owner.get(key)
        if other is not None:
            self._parents[self._find(other)] = self._find(len(self._parents) - 1)


def imported_types(module: str, *names: str) -> tuple[Any, ...]:
    """Return types of a module; none of it where it, or what they are in, is not imported yet."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def same_objects(left: Iterable[Any], right: list[Any]) -> bool:
    """Return whether these are the same objects in the same order."""
    held = left if isinstance(left, list) else list(left)
    return len(held) == len(right) and all(map(is_, held, right))


def _full_name(cls: type) -> str:
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"
