"""Walks a graph of users' objects: keeps each object's copy, its root, and failures.

A copier's ``make`` copies each kind of object (``kinds.make_copy``).
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
"""Names of functions that write to an array despite its read-only flag, or let others do so."""


class Uncopyable(Exception):
    """An object cannot be copied; says why."""


class Copier:
    """One copy of several roots, which are copied one after the other.

    Args:
        make: copies an object of the given class that is not shared and has no copy yet.
        unset: the attributes that held nothing when the epoch began.
        extents: memory that is copied in one piece.

    Attributes:
        memo: by ``id``, the copy of each object that has one.
        alive: objects that must outlive the copier: their ``id`` is a key here, or copies refer to
            them only weakly.
        where: the names that lead to the object being copied, for reasons. After an error they
            stay, so that a reason names the innermost.
        later: copies that wait until the stack is short.
        nested: how many objects' attributes are being copied within each other.
        generation: the same object for all copies that are checked together.
        touches_torch: whether an object of torch, or of a package built on it, was met.
        module_globals: by ``id`` of a module's globals: their copy, and the original.
        declared: objects shared by declaration, and where they were found.
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
        """Return for each root why it has no copy, or None; roots that share objects agree."""
        why = {self._find(root): reason for root, reason in reversed(self._failed)}
        return tuple(why.get(self._find(root)) for root in range(len(self._parents)))

    def lock(self, root: int, why: str) -> None:
        """Have a root locked, along with the roots that share objects with it."""
        self._failed.append((root, why))

    def writes_past_flags(self) -> bool:
        """True if code that was reached may write to an array despite its read-only flag."""
        return self.touches_torch or not _WRITES_PAST_FLAGS.isdisjoint(self._state.mentioned)

    def is_current(self, generation: object = None) -> bool:
        """True if all originals are as they were when they were copied.

        Copies that are checked together pass the same ``generation``: each large list is then
        compared once for all of them.
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
        """Return an object's copy; the object itself if it is shared, or cannot be copied."""
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
        self.claim(key, x)
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
        """Return the copy of an attribute's value, and whether it could be copied.

        The copy is None if it failed and the attribute held nothing when the epoch began.
        """
        failed, visited = len(self._failed), len(self.alive)
        y = self.copy(x)
        if len(self._failed) == failed or not self.unset.was_unset(owner, name):
            return y, True
        self._forget(failed, visited)
        return None, False

    def try_to_copy(self, x: Any) -> None:
        """Copy an object ahead of its users. It is no failure if it has no copy."""
        failed, visited = len(self._failed), len(self.alive)
        self.copy(x)
        if len(self._failed) > failed:
            self._forget(failed, visited)

    def _forget(self, failed: int, visited: int) -> None:
        """Take back a failure, because the object is left out.

        Objects that it reached are copied anew if something else refers to them.
        """
        del self._failed[failed:]
        for each in self.alive[visited:]:
            self.memo.pop(id(each), None)

    # Called by the functions that copy one kind of object.

    def check(self, check: Callable[[], bool]) -> None:
        """Add a check to ``is_current``: it returns whether an original is unchanged."""
        self._checks.append(check)

    def fail(self, why: str) -> None:
        """Have the current root locked, for this reason."""
        self._failed.append((len(self._parents) - 1, why))

    @property
    def failures(self) -> int:
        """How many there were so far, in all roots."""
        return len(self._failed)

    def claim(self, key: Any, x: Any = None) -> None:
        """Count an object as the current root's, along with the roots that met it before.

        Args:
            key: the object's ``id``, or that of the memory that it uses.
            x: the object; it is kept alive, so that its ``id`` stays its own.
        """
        self._join(key)
        self._owner[key] = len(self._parents) - 1
        if x is not None:
            self.alive.append(x)

    def claim_all(self, keys: set[int], items: list[Any]) -> None:
        """Count many objects as the current root's, by ``id``. None of them was met before."""
        self._owner.update(dict.fromkeys(keys, len(self._parents) - 1))
        self.alive.append(items)

    def has_met_any(self, keys: set[int]) -> bool:
        """True if one of the objects with these ``id`` was met before."""
        return not (self.memo.keys().isdisjoint(keys) and self._owner.keys().isdisjoint(keys))

    def look_at_class(
        self, cls: type, made: bool = False, own: frozenset[str] = frozenset()
    ) -> None:
        """Lock the root if the methods of a user's class keep state that copies would share."""
        self._state.look_at_class(cls, made, own)
        self._take_reasons()

    def look_at_function(self, function: types.FunctionType) -> None:
        """Lock the root if a user's function keeps state that its copies would share."""
        self._state.look_at_function(function, copied=True)
        self._take_reasons()

    def _take_reasons(self) -> None:
        reasons, touched = self._state.found.take()
        for reason in reasons:
            self.fail(reason)
        for x in touched:
            self.claim(id(x), x)

    def _find(self, root: int) -> int:
        while self._parents[root] != root:
            root = self._parents[root]
        return root

    def _join(self, key: Any) -> None:
        other = self._owner.get(key)
        if other is not None:
            self._parents[self._find(other)] = self._find(len(self._parents) - 1)


def imported_types(module: str, *names: str) -> tuple[Any, ...]:
    """Return types of a module; an empty tuple if it is not imported yet."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def same_objects(left: Iterable[Any], right: list[Any]) -> bool:
    """True if these are the same objects in the same order."""
    held = left if isinstance(left, list) else list(left)
    return len(held) == len(right) and all(map(is_, held, right))


def _full_name(cls: type) -> str:
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"
