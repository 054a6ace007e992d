"""State that copies of an object would share: it is in a class, a module, a global or a closure.

Methods belong to classes, and classes are never copied (``type(a) is type(b)`` must hold for what
they make). So what a method keeps outside of ``self`` is one for all threads. Constants are told
from state by what the code does with them (``code_facts``): a table that is only read is none.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from stoker.replicas.code_facts import ELEMENT, Path, Use, facts_of
from stoker.replicas.provenance import (
    is_users_class,
    is_users_function,
    is_users_module,
    once_a_class,
)
from stoker.replicas.thread_safety import (
    ATOMS,
    LruCached,
    is_declared,
    is_global_generator,
    is_shared,
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))

_PROCESS_WIDE = {
    "random": ("seed", "setstate"),
    "numpy.random": ("seed", "set_state"),
    "torch": ("manual_seed", "seed", "set_rng_state", "set_default_dtype"),
    "torch.random": ("manual_seed", "seed", "set_rng_state", "fork_rng"),
    "os": ("chdir", "fchdir", "umask"),
    "contextlib": ("chdir", "redirect_stdout", "redirect_stderr"),
    "locale": ("setlocale",),
    "lightning.pytorch": ("seed_everything",),
    "lightning.fabric.utilities.seed": ("seed_everything",),
    "pytorch_lightning": ("seed_everything",),
    "transformers": ("set_seed", "enable_full_determinism"),
    "transformers.trainer_utils": ("set_seed", "enable_full_determinism"),
    "accelerate.utils": ("set_seed",),
}
"""Functions that set what all threads of a process use."""

_CONTAINERS = (list, dict, tuple, set, frozenset, deque, defaultdict, OrderedDict, np.ndarray)
_LOOKS = frozenset(
    {
        "get", "keys", "values", "items", "copy", "index", "count", "union", "intersection",
        "difference", "issubset", "issuperset", "isdisjoint", "astype", "tolist", "item", "min",
        "max", "sum", "mean", "std", "any", "all", "argmax", "argmin", "dot",
    }
)  # fmt: skip
"""Methods of containers that change nothing."""
_HARMLESS: frozenset[Any] = frozenset(
    {
        len, sum, min, max, sorted, enumerate, zip, range, list, tuple, dict, set, frozenset, any,
        all, isinstance, str, repr, print, type, id, map, filter, reversed, iter, np.array,
        np.asarray, np.stack, np.mean, np.sum, np.searchsorted, bytes,
    }
)  # fmt: skip
"""Functions that change nothing of what they are given."""
_READERS = frozenset(
    {
        "choice", "choices", "sample", "permutation", "join", "extend", "update", "union",
        "intersection", "difference", "isdisjoint", "issubset", "issuperset", "writelines",
    }
)  # fmt: skip
"""Methods, of whatever object, that change nothing of the containers that they are given."""
_WRITERS = frozenset(
    {
        "shuffle", "heapify", "heappush", "heappop", "heappushpop", "heapreplace", "insort",
        "insort_left", "insort_right", "setattr", "getattr", "setitem", "delitem", "cast", "copyto",
        "put", "place", "exec", "eval", "next",
    }
)  # fmt: skip
"""Functions of packages and of Python that change what they are given, or hand it on."""
_FEW = 10_000  # elements of a global that are looked at one by one, in 30 ms; else it is state
_NESTED = 8  # levels of tuples that are looked through at once; what is nested deeper is state


class SharedState:
    """Looks at classes and functions that the roots reach, once each."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.touched: list[Any] = []
        self.seen: list[tuple[Mapping[str, Any], str, Any]] = []
        self.mentioned: set[str] = set()
        self._found: dict[Any, tuple[list[str], list[Any]]] = {}
        self._process_wide: dict[int, str] = {}
        self._alive: list[Any] = []
        for module in _PROCESS_WIDE.keys() & sys.modules.keys():
            self._know(module)

    def _know(self, module: str) -> None:
        for name in _PROCESS_WIDE[module]:
            value = getattr(sys.modules[module], name, None)
            if value is not None:
                self._process_wide[id(value)] = f"{module}.{name}"

    def is_current(self) -> bool:
        """Return whether the names that were followed still mean the same objects."""
        return all(space.get(name, _MISSING) is value for space, name, value in self.seen)

    def forget(self) -> list[str]:
        """Return the reasons since the last call."""
        found, self.reasons = self.reasons, []
        return found

    def look_at_class(
        self, cls: type, made: bool = False, own: frozenset[str] = frozenset()
    ) -> None:
        """Look at the methods of a class that the user wrote, and of those that it derives from.

        Args:
            cls: the class.
            made: whether instances are made by what is called, so that ``__init__`` counts.
            own: attributes that the instance has itself.
        """
        if not is_declared(cls):
            self._once((cls, made, own), lambda: self._look_at_class(cls, made, own))

    def _look_at_class(self, cls: type, made: bool, own: frozenset[str]) -> None:
        if made and is_users_class(type(cls)):
            self._members(type(cls), type(cls), True, frozenset(), is_meta=cls)
        for base in cls.__mro__:
            if is_users_class(base):
                self._members(base, cls, made, own)

    def _once(self, key: Any, look: Callable[[], None]) -> None:
        """Look at something once, and take what was found for whatever else comes to it as well."""
        found = self._found.get(key)
        if found is None:
            before = self.reasons, self.touched
            self.reasons, self.touched = found = self._found[key] = [], []
            look()
            self.reasons, self.touched = before
        self.reasons += [each for each in found[0] if each not in self.reasons]
        known = {*map(id, self.touched)}
        self.touched += [each for each in found[1] if id(each) not in known]

    def _members(
        self, base: type, cls: type, made: bool, own: frozenset[str], is_meta: type | None = None
    ) -> None:
        for name, member in list(vars(base).items()):
            if name in ("__init__", "__new__", "__post_init__", "__setstate__") and not made:
                continue
            if name in (
                "__getstate__",
                "__reduce__",
                "__deepcopy__",
                "__init_subclass__",
                "__del__",
            ):
                continue
            self._note(vars(base), name, member)
            who = f"{base.__qualname__}.{name}"
            holder = is_meta or cls
            for function, is_class in _functions(member, name):
                self._function(function, who, holder, is_class or is_meta is not None, own)
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
                if isinstance(member, LruCached):
                    self._cached(member, who)
            elif hasattr(type(member), "__get__") and is_users_class(type(member)):
                self.look_at_class(type(member))
                if not self._is_frozen(member):
                    self._state(f"{who} is a descriptor", "", member)

    def look_at_function(self, function: types.FunctionType, copied: bool) -> None:
        """Look at a function.

        Args:
            function: the user's.
            copied: whether each thread has its own globals and closure of it.
        """
        self._function(function, function.__qualname__, None, False, frozenset(), copied)

    def _function(
        self,
        function: types.FunctionType,
        who: str,
        cls: type | None,
        is_class: bool,
        own: frozenset[str],
        copied: bool = False,
    ) -> None:
        if is_declared(function) or not is_users_function(function):
            return
        self._once(
            (function, cls, own, copied),
            lambda: self._look_at_function(function, who, cls, is_class, own, copied),
        )

    def _look_at_function(
        self,
        function: types.FunctionType,
        who: str,
        cls: type | None,
        is_class: bool,
        own: frozenset[str],
        copied: bool,
    ) -> None:
        facts = facts_of(function.__code__)
        self.mentioned |= facts.mentioned
        if not copied:
            for name in sorted(facts.stores):
                self.reasons.append(f"{who} sets the global {name!r}, which its copies would share")
                if name in function.__globals__:
                    self.touched.append(function.__globals__[name])
        cells = _cells(function)
        code = function.__code__
        first = code.co_varnames[0] if cls is not None and code.co_argcount else None
        defaults = _defaults(function)
        for use in facts.uses:
            root, name, steps = use.path
            if root == "global":
                value = function.__globals__.get(name, _MISSING)
                self._note(function.__globals__, name, value)
                if value is not _MISSING:
                    label = f"{who} uses the global {name!r}"
                    self._use(value, use, steps, label, function, copied)
            elif root == "module" and name in sys.modules:
                top = sys.modules[name]
                self._use(top, use, steps, f"{who} uses {name}", function, copied)
            elif root == "cell":
                if use.how == "set" and not steps:
                    if not copied and name in cells:
                        self._state(
                            f"{who} sets {name!r} of the function around it", "", cells[name]
                        )
                elif name in cells and name != "__class__":
                    label = f"{who} uses {name!r} of the function around it"
                    self._use(cells[name], use, steps, label, function, copied)
            elif root == "local" and name in defaults and name != first:
                if not copied:
                    label = f"{who} uses the default of its argument {name!r}"
                    self._use(defaults[name], use, steps, label, function, copied)
            elif cls is not None and name == first and steps:
                self._own(cls, use, steps, who, is_class or root == "class", own, function)
            elif cls is not None and root == "class" and name == first and use.how == "set":
                pass

    def _own(
        self,
        cls: type,
        use: Use,
        steps: tuple[str, ...],
        who: str,
        is_class: bool,
        own: frozenset[str],
        function: types.FunctionType,
    ) -> None:
        """Judge what a method does with an attribute of ``self`` or of its class."""
        name = steps[0]
        if is_class and use.how == "set" and len(steps) == 1:
            self._state(f"{who} sets the class attribute {name!r}", "", None)
            return
        if not is_class and name in own:
            return
        for base in (*cls.__mro__, *(_bases(type(cls)) if is_class else ())):
            if name in vars(base):
                value = vars(base)[name]
                if is_users_class(base) and not hasattr(type(value), "__get__"):
                    self._note(vars(base), name, value)
                    if not (use.how == "set" and len(steps) == 1):
                        label = f"{who} uses the class attribute {name!r}"
                        self._use(value, use, steps[1:], label, function, False)
                return

    def _use(
        self,
        value: Any,
        use: Use,
        steps: tuple[str, ...],
        label: str,
        function: types.FunctionType,
        copied: bool,
    ) -> None:
        """Judge what is done with a value that is reached by a name.

        Args:
            value: what the steps so far have reached.
            use: the whole path, and what is done at its end.
            steps: what is left of the path.
            label: how the reason begins.
            function: whose code it is.
            copied: whether the value is copied along with the function.
        """
        if id(value) in self._process_wide:
            name = self._process_wide[id(value)]
            self.reasons.append(
                f"{label.split(' uses ')[0]} calls {name}, which sets what all threads use"
            )
            return
        if isinstance(value, types.ModuleType):
            if not steps:
                return
            inner = getattr(value, steps[0], _MISSING)
            if value.__name__ in _PROCESS_WIDE:
                self._know(value.__name__)  # some modules load theirs when they are asked
            users = is_users_module(value.__name__)
            if use.how == "set" and len(steps) == 1 and users:
                self._state(
                    f"{label.split(' uses ')[0]} sets {value.__name__}.{steps[0]}", "", None
                )
            elif inner is not _MISSING:
                self._note(vars(value), steps[0], inner)
                if users:
                    label = f"{label.split(' uses ')[0]} uses {value.__name__}.{steps[0]}"
                    copied = False
                if users or isinstance(inner, types.ModuleType) or id(inner) in self._process_wide:
                    self._use(inner, use, steps[1:], label, function, copied)
            return
        if isinstance(value, type):
            self._class_use(value, use, steps, label, function)
            return
        if isinstance(value, types.FunctionType):
            if copied:
                return  # the copier comes to it
            if is_users_function(value) and any(key != "__wrapped__" for key in vars(value)):
                self._state(label, "", value)
            for inner in _wrapped(value):
                self._function(inner, inner.__qualname__, None, False, frozenset())
            return
        if copied:
            return
        if isinstance(value, LruCached):
            self._cached(value, label)
            return
        if self._is_frozen(value):
            return
        if isinstance(value, logging.Handler):
            pass  # the user's, whose loggers call it from any thread
        elif isinstance(value, _CONTAINERS):
            if self._is_read(value, use, steps, label, function):
                return
        elif steps and _is_plain(value, steps[0]):
            inner = vars(value)[steps[0]]
            self._note(vars(value), steps[0], inner)
            if not (use.how == "set" and len(steps) == 1):
                self._use(inner, use, steps[1:], label, function, copied)
                return
        elif use.how == "read" and not steps:
            return
        is_called = use.how in ("called", "read") and len(steps) <= 1
        if not (is_called and self._never_changes(value, label)):
            self._state(label, "", value)

    def _never_changes(self, value: Any, label: str) -> bool:
        """Return whether an object's methods only look at it: transforms are such objects.

        Reasons that are found meanwhile are the caller's to state, for the whole object.
        """
        cls = type(value)
        if not _is_pythons(cls) or isinstance(value, (*_CONTAINERS, type)):
            return False
        own = vars(value)
        if any(own.get(name) for name in _OF_MODULES):
            return False  # a module that is trained, or is watched

        def look() -> None:
            for name, member in _members_of(cls):
                for function, _ in _functions(member, name):
                    self._method_of(value, function, label)

        self._alive.append(value)
        reasons, self.reasons = self.reasons, []
        self._once(("object", id(value)), look)
        changes, self.reasons = bool(self.reasons), reasons
        return not changes

    def _method_of(self, value: Any, function: types.FunctionType, label: str) -> None:
        """Look at what a method does with the object that it belongs to."""
        code, facts = function.__code__, facts_of(function.__code__)
        if not facts.mentioned.isdisjoint(_WRITES_ATTRIBUTES):
            self._state(label, "", value)
        self._function(function, function.__qualname__, None, False, frozenset())
        if not code.co_argcount:
            return
        for use in facts.uses:
            root, name, steps = use.path
            if root not in ("local", "class") or name != code.co_varnames[0]:
                continue
            if not steps:
                is_passed = use.how == "handed" and use.to in _PASSED_TO
                if use.how not in ("read", "called") and not is_passed:
                    self._state(label, "", value)
            elif use.how == "set" and len(steps) == 1:
                self._state(label, "", value)
            elif steps[0] in getattr(value, "__dict__", ()):
                inner = vars(value)[steps[0]]
                self._note(vars(value), steps[0], inner)
                self._use(inner, use, steps[1:], label, function, False)
            else:
                inner = getattr(type(value), steps[0], None)  # a method, which is looked at, too
                inner = vars(value).get("_modules", {}).get(steps[0], inner)
                if not isinstance(inner, types.FunctionType) or len(steps) > 1:
                    self._use(inner, use, steps[1:], label, function, False)

    def _is_read(
        self, value: Any, use: Use, steps: tuple[str, ...], label: str, function: types.FunctionType
    ) -> bool:
        """Return whether a container is only looked at, and nothing in it can change."""
        if not steps:
            if use.how == "read":
                return True
            harmless = use.how == "handed" and (
                self._is_harmless(use.to, function)
                or _is_reader(use.to, function)
                or (not isinstance(value, np.ndarray) and self._is_installed(use.to, function))
            )
            return harmless and self._has_frozen(value)
        if steps[0] == ELEMENT:
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                if len(steps) > 1:
                    return self._is_read(value, use, steps[1:], label, function)
                # A row of data goes on to who makes an example of it; NumPy's own may write to it.
                is_given = use.how == "handed" and (
                    use.to is None
                    or self._is_harmless(use.to, function)
                    or not self._is_numpys(use.to, function)
                )
                return use.how == "read" or is_given
            if use.how == "changed" and len(steps) == 1 and self._has_atoms(value):
                return True  # an element was read, and what was made of it is stored elsewhere
            elements = _elements(value)
            if elements is None:
                together = _together(value)
                return together is not None and (
                    (not steps[1:] and use.how == "read")
                    or self._is_read(together, use, steps[1:], label, function)
                )
            for each in elements:
                self._use(each, use, steps[1:], label, function, False)
            return True
        if isinstance(value, np.ndarray) and steps[0] in ("shape", "dtype", "size", "ndim", "T"):
            return steps[0] != "T" or self._is_read(value, use, steps[1:], label, function)
        return steps[0] in _LOOKS and len(steps) == 1 and self._has_frozen(value)

    def _is_numpys(self, path: Path, function: types.FunctionType) -> bool:
        value = function.__globals__.get(path.name) if path.root == "global" else None
        module = value.__name__ if isinstance(value, types.ModuleType) else None
        return (module or getattr(value, "__module__", None) or "").startswith("numpy")

    def _named(self, path: Path | None, function: types.FunctionType) -> Any:
        """Return what a path of globals, builtins and modules leads to."""
        if path is None or path.root != "global":
            return _MISSING
        value = function.__globals__.get(path.name, _MISSING)
        if value is _MISSING:
            builtins = function.__globals__.get("__builtins__", {})
            table = vars(builtins) if isinstance(builtins, types.ModuleType) else builtins
            value = table.get(path.name, _MISSING)
        for step in path.steps:
            value = (
                getattr(value, step, _MISSING) if isinstance(value, types.ModuleType) else _MISSING
            )
        return value

    def _is_harmless(self, path: Path | None, function: types.FunctionType) -> bool:
        value = self._named(path, function)
        try:
            return value in _HARMLESS
        except TypeError:
            return False

    def _is_installed(self, path: Path | None, function: types.FunctionType) -> bool:
        """Return whether it is a function of a package or of Python that only reads what it takes.

        Nearly all of them do.
        """
        value = self._named(path, function)
        if isinstance(value, types.MethodType) and is_global_generator(value.__self__):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            reads = not is_users_function(value)
        else:
            reads = isinstance(value, types.BuiltinFunctionType)
        return reads and value.__name__ not in _WRITERS

    def _class_use(
        self, cls: type, use: Use, steps: tuple[str, ...], label: str, function: types.FunctionType
    ) -> None:
        self.look_at_class(cls, made=True)
        if not steps or not is_users_class(cls):
            return
        if use.how == "set" and len(steps) == 1:
            self._state(f"{label.split(' uses ')[0]} sets {cls.__qualname__}.{steps[0]}", "", None)
            return
        for base in cls.__mro__:
            if steps[0] in vars(base):
                value = vars(base)[steps[0]]
                if not hasattr(type(value), "__get__"):
                    self._note(vars(base), steps[0], value)
                    label = f"{label.split(' uses ')[0]} uses {cls.__qualname__}.{steps[0]}"
                    self._use(value, use, steps[1:], label, function, False)
                return

    def _cached(self, function: Any, label: str) -> None:
        inner = function.__wrapped__
        if is_declared(function) or not isinstance(inner, types.FunctionType):
            return
        if not is_users_function(inner):
            return
        self._function(inner, inner.__qualname__, None, False, frozenset())
        if inner.__annotations__.get("return") not in (*_ATOM_NAMES, int, float, str, bytes, bool):
            self._state(label, ", as it is cached", function)

    def _state(self, label: str, why: str, value: Any) -> None:
        self.reasons.append(f"{label}, which its copies would share{why}")
        if value is not None:
            self.touched.append(value)

    def _note(self, space: Mapping[str, Any], name: str, value: Any) -> None:
        self.seen.append((space, name, value))

    def _has_atoms(self, value: Any) -> bool:
        elements = _elements(value)
        return elements is not None and all(type(each) in ATOMS for each in elements)

    def _has_frozen(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return not value.dtype.hasobject
        elements = _elements(value)
        return elements is not None and all(map(self._is_frozen, elements))

    def _is_frozen(self, value: Any) -> bool:
        """Return whether an object is shared as it is, or made of such objects and unchangeable."""
        if isinstance(value, (tuple, frozenset)):
            return all(map(self._is_frozen, value))
        if isinstance(value, types.FunctionType):
            for inner in _wrapped(value):
                self._function(inner, inner.__qualname__, None, False, frozenset())
            return True
        if isinstance(value, type):
            self.look_at_class(value, made=True)
            return True
        if isinstance(value, (operator.itemgetter, operator.attrgetter, *_LOCKS)):
            return True
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, tuple(value.keywords.values()))
            return all(map(self._is_frozen, parts))
        if isinstance(value, np.ndarray):
            return not value.flags.writeable and value.base is None
        return is_shared(value)


_MISSING: Any = object()
_ATOM_NAMES = ("int", "float", "str", "bytes", "bool")


def _functions(member: Any, name: str) -> Iterable[tuple[types.FunctionType, bool]]:
    """Yield the functions of a class's member, and whether each is given the class."""
    if isinstance(member, staticmethod):
        yield from ((f, name == "__new__") for f, _ in _functions(member.__func__, ""))
    elif isinstance(member, classmethod):
        yield from ((f, True) for f, _ in _functions(member.__func__, ""))
    elif isinstance(member, types.FunctionType):
        for inner in _wrapped(member):
            yield inner, name in ("__new__", "__class_getitem__")
    elif isinstance(member, property):
        for each in (member.fget, member.fset, member.fdel):
            if isinstance(each, types.FunctionType):
                yield each, False
    elif isinstance(member, (functools.cached_property, functools.partialmethod)):
        if isinstance(member.func, types.FunctionType):
            yield member.func, False
    elif isinstance(member, LruCached) and isinstance(member.__wrapped__, types.FunctionType):
        yield member.__wrapped__, False


_WRITES_ATTRIBUTES = frozenset(
    {"__setattr__", "__delattr__", "setattr", "delattr", "__dict__", "vars", "exec", "eval"}
)
"""Names in the code of a method that may set attributes in ways that are not followed."""
_OF_MODULES = (
    "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
"""What a module of torch has that its calls read, or change."""
_PASSED_TO = frozenset(
    Path("global", name) for name in ("super", "isinstance", "type", "len", "repr", "str", "id")
)
"""What a method hands its object to, and which changes nothing of it."""


@once_a_class
def _is_pythons(cls: Any) -> bool:
    """Return whether all that a class does is Python code, which can be looked at."""
    if type(cls).__call__ is not type.__call__ or cls.__getattribute__ is not _USUALLY_FOUND:
        return False
    return all(
        base.__flags__ & 1 << 9
        and "__getattr__" not in vars(base)
        and all(map(_is_pythons_member, vars(base).values()))
        for base in _looked_at(cls)
    )


def _is_pythons_member(member: Any) -> bool:
    if isinstance(member, (types.FunctionType, property, staticmethod, classmethod)):
        return True
    is_usual = isinstance(member, types.GetSetDescriptorType)  # `__dict__`, `__weakref__`
    return is_usual or not hasattr(type(member), "__get__")


def _looked_at(cls: Any) -> list[Any]:
    """Return the classes whose methods may change an object: torch's own base changes none."""
    torchs = "torch.nn.modules.module"
    return [base for base in cls.__mro__[:-1] if base.__module__ not in ("abc", torchs)]


@once_a_class
def _members_of(cls: Any) -> list[tuple[str, Any]]:
    """Return the methods of an object that is there: those that make, copy and end it left out."""
    unused = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__del__"}
    unused |= {"__setstate__", "__getstate__", "__reduce__", "__deepcopy__", "__copy__"}
    return [
        (name, member)
        for base in _looked_at(cls)
        for name, member in vars(base).items()
        if name not in unused
    ]


def _is_reader(path: Path | None, function: types.FunctionType) -> bool:
    """Return whether a path leads to a method that only reads, by its name (``rng.choice``).

    Methods of what the function itself belongs to are the user's, and may do what they want.
    """
    if path is None or not path.steps or path.root not in ("unknown", "local", "cell"):
        return False
    is_own = len(path.steps) == 1 and path.name in function.__code__.co_varnames[:1]
    return path.steps[-1] in _READERS and not is_own


def _wrapped(function: types.FunctionType) -> list[types.FunctionType]:
    """Return a function, and those that it closes over: what decorators have wrapped."""
    found = [function]
    for outer in found:
        for value in _cells(outer).values():
            if isinstance(value, dict) and not is_users_function(outer):
                inside: Iterable[Any] = list(value.values())  # as `singledispatch` has them
            else:
                inside = (value,)
            found += [
                each
                for each in inside
                if isinstance(each, types.FunctionType) and each not in found
            ]
    return found


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def _bases(cls: type) -> tuple[type, ...]:
    return cls.__mro__


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    values = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(values) :], values, strict=True))
    return {**found, **(function.__kwdefaults__ or {})}


def _elements(value: Any) -> list[Any] | None:
    """Return the elements of a container; None where there are too many, or it has others."""
    if len(value) > _FEW and not isinstance(value, np.ndarray):
        many = _plain_elements(value)
        return [] if many is not None and _are_fixed(many) else None
    if isinstance(value, defaultdict):
        return None  # reading it writes
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, np.ndarray):
        return list(value.ravel()) if value.dtype.hasobject and value.size <= _FEW else None
    return list(value)


def _plain_elements(value: Any) -> Collection[Any] | None:
    if type(value) in (list, tuple, set, frozenset, deque):
        elements: Collection[Any] = value
        return elements
    return value.values() if type(value) is dict else None


def _are_fixed(items: Iterable[Any]) -> bool:
    """Return whether all are atoms, or tuples of such: a look of 10 to 40 ns at each."""
    for _ in range(_NESTED):
        held = items if isinstance(items, Collection) else list(items)
        kinds = set(map(type, held)) - ATOMS
        if not kinds:
            return True
        if not kinds <= {tuple, frozenset}:
            return False
        items = chain.from_iterable(each for each in held if type(each) in kinds)
    return False


def _together(value: Any) -> list[Any] | None:
    """Return the elements of all elements of a large container of containers, as if of one."""
    many = _plain_elements(value)
    kinds = None if many is None else set(map(type, many))
    if many is None or kinds is None or not kinds <= {list, tuple, set, frozenset, dict}:
        return None
    if kinds == {dict}:
        return list(chain.from_iterable(each.values() for each in many))
    return None if dict in kinds else list(chain.from_iterable(many))


_USUALLY_FOUND: Any = object.__getattribute__


def _is_plain(value: Any, name: str) -> bool:
    """Return whether an attribute is found in the instance's own table, by the usual way."""
    cls = type(value)
    return (
        type.__getattribute__(cls, "__getattribute__") is _USUALLY_FOUND
        and name in getattr(value, "__dict__", {})
        and not any(
            hasattr(type(vars(base)[name]), "__set__") for base in cls.__mro__ if name in vars(base)
        )
    )
