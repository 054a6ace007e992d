"""Finds state that copies of an object would share: in a class, a module, a global or a closure.

Methods belong to classes, and classes are never copied: ``type(a) is type(b)`` must hold for
instances. So all threads share what a method keeps outside of ``self``. The byte code tells state
from constants (``code_facts``): a table that is only read is a constant.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

from stoker.replicas.code_facts import ELEMENT, Use, facts_of
from stoker.replicas.definitions import (
    defaults_of,
    functions_of,
    is_in_own_table,
    is_python_code,
    methods_of,
    variables_around,
    with_wrapped,
)
from stoker.replicas.elements import elements_of, inner_elements
from stoker.replicas.findings import MISSING, Findings
from stoker.replicas.known_calls import (
    LOOKS,
    PASSED_TO,
    PROCESS_WIDE,
    WRITES_ATTRIBUTES,
    is_harmless,
    is_numpys,
    is_packages_reader,
    is_reading_method,
)
from stoker.replicas.provenance import (
    is_users_class,
    is_users_function,
    is_users_module,
)
from stoker.replicas.thread_safety import (
    ATOMS,
    LruCached,
    is_declared,
    is_shared,
)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONTAINERS = (list, dict, tuple, set, frozenset, deque, defaultdict, OrderedDict, np.ndarray)
_ATOM_NAMES = ("int", "float", "str", "bytes", "bool")
_MODULE_TABLES = (
    "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
"""Attributes of a torch module that its calls read, or change."""


class SharedState:
    """Examines each class and function that the roots reach, once."""

    def __init__(self) -> None:
        self.found = Findings()
        self.mentioned: set[str] = set()
        self._process_wide: dict[int, str] = {}
        self._alive: list[Any] = []
        for module in PROCESS_WIDE.keys() & sys.modules.keys():
            self._add_process_wide(module)

    def _add_process_wide(self, module: str) -> None:
        for name in PROCESS_WIDE[module]:
            value = getattr(sys.modules[module], name, None)
            if value is not None:
                self._process_wide[id(value)] = f"{module}.{name}"

    def look_at_class(
        self, cls: type, made: bool = False, own: frozenset[str] = frozenset()
    ) -> None:
        """Examine the methods of a user's class and of its bases.

        Args:
            cls: the class.
            made: whether worker threads make instances, so that ``__init__`` counts.
            own: the instance's own attributes.
        """
        if not is_declared(cls):
            self.found.once((cls, made, own), lambda: self._look_at_class(cls, made, own))

    def _look_at_class(self, cls: type, made: bool, own: frozenset[str]) -> None:
        if made and is_users_class(type(cls)):
            self._members(type(cls), type(cls), True, frozenset(), is_meta=cls)
        for base in cls.__mro__:
            if is_users_class(base):
                self._members(base, cls, made, own)

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
            self.found.note(vars(base), name, member)
            who = f"{base.__qualname__}.{name}"
            holder = is_meta or cls
            for function, is_class in functions_of(member, name):
                self._function(function, who, holder, is_class or is_meta is not None, own)
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
                if isinstance(member, LruCached):
                    self._judge_cache(member, who)
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
        self.found.once(
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
                reason = f"{who} sets the global {name!r}, which its copies would share"
                value = function.__globals__.get(name, MISSING)
                self.found.add(reason, *([] if value is MISSING else [value]))
        cells = variables_around(function)
        code = function.__code__
        first = code.co_varnames[0] if cls is not None and code.co_argcount else None
        defaults = defaults_of(function)
        for use in facts.uses:
            root, name, steps = use.path
            if root == "global":
                value = function.__globals__.get(name, MISSING)
                self.found.note(function.__globals__, name, value)
                if value is not MISSING:
                    label = f"{who} uses the global {name!r}"
                    self._judge_use(value, use, steps, label, function, copied)
            elif root == "module" and name in sys.modules:
                top = sys.modules[name]
                self._judge_use(top, use, steps, f"{who} uses {name}", function, copied)
            elif root == "cell":
                if use.how == "set" and not steps:
                    if not copied and name in cells:
                        self._state(
                            f"{who} sets {name!r} of the function around it", "", cells[name]
                        )
                elif name in cells and name != "__class__":
                    label = f"{who} uses {name!r} of the function around it"
                    self._judge_use(cells[name], use, steps, label, function, copied)
            elif root == "local" and name in defaults and name != first:
                if not copied:
                    label = f"{who} uses the default of its argument {name!r}"
                    self._judge_use(defaults[name], use, steps, label, function, copied)
            elif cls is not None and name == first and steps:
                self._judge_attribute(
                    cls, use, steps, who, is_class or root == "class", own, function
                )

    def _judge_attribute(
        self,
        cls: type,
        use: Use,
        steps: tuple[str, ...],
        who: str,
        is_class: bool,
        own: frozenset[str],
        function: types.FunctionType,
    ) -> None:
        """Judge a method's use of an attribute of ``self`` or of its class."""
        name = steps[0]
        if is_class and use.how == "set" and len(steps) == 1:
            self._state(f"{who} sets the class attribute {name!r}", "", None)
            return
        if not is_class and name in own:
            return
        metaclass: type = type(cls)
        for base in (*cls.__mro__, *(metaclass.__mro__ if is_class else ())):
            if name in vars(base):
                value = vars(base)[name]
                if is_users_class(base) and not hasattr(type(value), "__get__"):
                    self.found.note(vars(base), name, value)
                    if not (use.how == "set" and len(steps) == 1):
                        label = f"{who} uses the class attribute {name!r}"
                        self._judge_use(value, use, steps[1:], label, function, False)
                return

    def _judge_use(
        self,
        value: Any,
        use: Use,
        steps: tuple[str, ...],
        label: str,
        function: types.FunctionType,
        copied: bool,
    ) -> None:
        """Judge the use of a value that is reached by a name.

        Args:
            value: the value that the steps so far have reached.
            use: the whole path, and how it is used.
            steps: the rest of the path.
            label: how the reason begins, as ``FUNCTION uses NAME``.
            function: the function with this use in its code.
            copied: whether the value is copied along with the function.
        """
        if id(value) in self._process_wide:
            name = self._process_wide[id(value)]
            self.found.add(f"{_user(label)} calls {name}, which sets what all threads use")
            return
        if isinstance(value, types.ModuleType):
            if not steps:
                return
            inner = getattr(value, steps[0], MISSING)
            if value.__name__ in PROCESS_WIDE:
                # Some modules load theirs when they are asked for.
                self._add_process_wide(value.__name__)
            users = is_users_module(value.__name__)
            if use.how == "set" and len(steps) == 1 and users:
                self._state(f"{_user(label)} sets {value.__name__}.{steps[0]}", "", None)
            elif inner is not MISSING:
                self.found.note(vars(value), steps[0], inner)
                if users:
                    label = f"{_user(label)} uses {value.__name__}.{steps[0]}"
                    copied = False
                if users or isinstance(inner, types.ModuleType) or id(inner) in self._process_wide:
                    self._judge_use(inner, use, steps[1:], label, function, copied)
            return
        if isinstance(value, type):
            self._class_use(value, use, steps, label, function)
            return
        if isinstance(value, types.FunctionType):
            if copied:
                return  # the copier comes to it
            if is_users_function(value) and any(key != "__wrapped__" for key in vars(value)):
                self._state(label, "", value)
            for inner in with_wrapped(value):
                self._function(inner, inner.__qualname__, None, False, frozenset())
            return
        if copied:
            return
        if isinstance(value, LruCached):
            self._judge_cache(value, label)
            return
        if self._is_frozen(value):
            return
        if isinstance(value, logging.Handler):
            pass  # the user's, whose loggers call it from any thread
        elif isinstance(value, _CONTAINERS):
            if self._is_read(value, use, steps, label, function):
                return
        elif steps and is_in_own_table(value, steps[0]):
            inner = vars(value)[steps[0]]
            self.found.note(vars(value), steps[0], inner)
            if not (use.how == "set" and len(steps) == 1):
                self._judge_use(inner, use, steps[1:], label, function, copied)
                return
        elif use.how == "read" and not steps:
            return
        is_called = use.how in ("called", "read") and len(steps) <= 1
        if not (is_called and self._never_changes(value, label)):
            self._state(label, "", value)

    def _never_changes(self, value: Any, label: str) -> bool:
        """True if an object's methods do not change it, as in most transforms.

        Reasons found on the way are dropped: the caller states one for the whole object.
        """
        cls = type(value)
        if not is_python_code(cls) or isinstance(value, (*_CONTAINERS, type)):
            return False
        own = vars(value)
        if any(own.get(name) for name in _MODULE_TABLES):
            return False  # a module that is trained, or is watched

        def look() -> None:
            for name, member in methods_of(cls):
                for function, _ in functions_of(member, name):
                    self._method_of(value, function, label)

        self._alive.append(value)
        return not self.found.is_reason(("object", id(value)), look)

    def _method_of(self, value: Any, function: types.FunctionType, label: str) -> None:
        """Examine a method's use of its own object."""
        code, facts = function.__code__, facts_of(function.__code__)
        if not facts.mentioned.isdisjoint(WRITES_ATTRIBUTES):
            self._state(label, "", value)
        self._function(function, function.__qualname__, None, False, frozenset())
        if not code.co_argcount:
            return
        for use in facts.uses:
            root, name, steps = use.path
            if root not in ("local", "class") or name != code.co_varnames[0]:
                continue
            if not steps:
                is_passed = use.how == "handed" and use.to in PASSED_TO
                if use.how not in ("read", "called") and not is_passed:
                    self._state(label, "", value)
            elif use.how == "set" and len(steps) == 1:
                self._state(label, "", value)
            elif steps[0] in getattr(value, "__dict__", ()):
                inner = vars(value)[steps[0]]
                self.found.note(vars(value), steps[0], inner)
                self._judge_use(inner, use, steps[1:], label, function, False)
            else:
                inner = getattr(type(value), steps[0], None)  # a method, which is looked at, too
                inner = vars(value).get("_modules", {}).get(steps[0], inner)
                if not isinstance(inner, types.FunctionType) or len(steps) > 1:
                    self._judge_use(inner, use, steps[1:], label, function, False)

    def _is_read(
        self, value: Any, use: Use, steps: tuple[str, ...], label: str, function: types.FunctionType
    ) -> bool:
        """True if a container is only read, and nothing in it can change."""
        if not steps:
            if use.how == "read":
                return True
            harmless = use.how == "handed" and (
                is_harmless(use.to, function)
                or is_reading_method(use.to, function)
                or (not isinstance(value, np.ndarray) and is_packages_reader(use.to, function))
            )
            return harmless and self._has_frozen(value)
        if steps[0] == ELEMENT:
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                if len(steps) > 1:
                    return self._is_read(value, use, steps[1:], label, function)
                # Code makes an example from a row, but NumPy's own functions may write to it.
                is_given = use.how == "handed" and (
                    use.to is None
                    or is_harmless(use.to, function)
                    or not is_numpys(use.to, function)
                )
                return use.how == "read" or is_given
            if use.how == "changed" and len(steps) == 1 and self._has_atoms(value):
                return True  # an element was read, and what was made of it is stored elsewhere
            elements = elements_of(value)
            if elements is None:
                together = inner_elements(value)
                return together is not None and (
                    (not steps[1:] and use.how == "read")
                    or self._is_read(together, use, steps[1:], label, function)
                )
            for each in elements:
                self._judge_use(each, use, steps[1:], label, function, False)
            return True
        if isinstance(value, np.ndarray) and steps[0] in ("shape", "dtype", "size", "ndim", "T"):
            return steps[0] != "T" or self._is_read(value, use, steps[1:], label, function)
        return steps[0] in LOOKS and len(steps) == 1 and self._has_frozen(value)

    def _class_use(
        self, cls: type, use: Use, steps: tuple[str, ...], label: str, function: types.FunctionType
    ) -> None:
        self.look_at_class(cls, made=True)
        if not steps or not is_users_class(cls):
            return
        if use.how == "set" and len(steps) == 1:
            self._state(f"{_user(label)} sets {cls.__qualname__}.{steps[0]}", "", None)
            return
        for base in cls.__mro__:
            if steps[0] in vars(base):
                value = vars(base)[steps[0]]
                if not hasattr(type(value), "__get__"):
                    self.found.note(vars(base), steps[0], value)
                    label = f"{_user(label)} uses {cls.__qualname__}.{steps[0]}"
                    self._judge_use(value, use, steps[1:], label, function, False)
                return

    def _judge_cache(self, function: Any, label: str) -> None:
        inner = function.__wrapped__
        if is_declared(function) or not isinstance(inner, types.FunctionType):
            return
        if not is_users_function(inner):
            return
        self._function(inner, inner.__qualname__, None, False, frozenset())
        if inner.__annotations__.get("return") not in (*_ATOM_NAMES, int, float, str, bytes, bool):
            self._state(label, ", as it is cached", function)

    def _state(self, label: str, why: str, value: Any) -> None:
        self.found.add(
            f"{label}, which its copies would share{why}", *([] if value is None else [value])
        )

    def _has_atoms(self, value: Any) -> bool:
        elements = elements_of(value)
        return elements is not None and all(type(each) in ATOMS for each in elements)

    def _has_frozen(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return not value.dtype.hasobject
        elements = elements_of(value)
        return elements is not None and all(map(self._is_frozen, elements))

    def _is_frozen(self, value: Any) -> bool:
        """True if an object is shared as it is, or is an unchangeable container of such objects."""
        if isinstance(value, (tuple, frozenset)):
            return all(map(self._is_frozen, value))
        if isinstance(value, types.FunctionType):
            for inner in with_wrapped(value):
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


def _user(label: str) -> str:
    """Return the name of the function at the beginning of a label."""
    return label.partition(" uses ")[0]
