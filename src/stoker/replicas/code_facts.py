"""Reads from a function's byte code how it uses names that outlive its calls.

It runs over the instructions with a stack of symbols, and follows each load of a global, of an
enclosing function's variable, or of an attribute to its use. A value that it cannot follow counts
as handed on, to code that may change it.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

ELEMENT = "[]"
"""In a path: an element of the value before it."""

_OUTER = {"cell": "local", "cell's class": "class"}
"""Roots of a cell's paths in the enclosing function, if the variable is its argument."""


class Path(NamedTuple):
    """A value that is reached by a name, then by attributes and elements.

    ``root`` is ``global``, ``cell`` (an enclosing function's variable), ``local`` (an argument),
    ``class`` or ``cell's class`` (the class of a local or cell), or ``module`` (imported within the
    function). A callee may also be ``unknown``, for instance the result of a call: then only the
    steps are known.
    """

    root: str
    name: str
    steps: tuple[str, ...] = ()

    def then(self, step: str) -> Path:
        return Path(self.root, self.name, (*self.steps, step))


_UNKNOWN = Path("unknown", "")


class Use(NamedTuple):
    """How a path is used: ``read``, ``called``, ``changed``, ``set`` or ``handed`` on."""

    path: Path
    how: str
    to: Path | None = None  # the function that it is handed to, if known


@dataclass(frozen=True)
class CodeFacts:
    """The effects of a code object, and of the code objects within it.

    Attributes:
        uses: uses of its arguments, and of values that outlive a call.
        names: the globals that it names.
        stores: the globals that it sets.
        mentioned: all names of attributes and of keyword arguments in it.
    """

    uses: frozenset[Use]
    names: frozenset[str]
    stores: frozenset[str]
    mentioned: frozenset[str]


@functools.lru_cache(4096)
def facts_of(code: types.CodeType) -> CodeFacts:
    found = _CodeRun(code)
    uses, names, stores = set(found.uses), set(found.names), set(found.stores)
    mentioned = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = facts_of(constant)
            free = set(code.co_freevars)
            own = set(code.co_cellvars) & found.arguments
            for use in inner.uses:
                root, name, steps = use.path
                if root in ("global", "module") or (root in _OUTER and name in free):
                    uses.add(use)
                elif root in _OUTER and name in own:
                    uses.add(use._replace(path=Path(_OUTER[root], name, steps)))
            names |= inner.names
            stores |= inner.stores
            mentioned |= inner.mentioned
        elif isinstance(constant, tuple) and all(isinstance(each, str) for each in constant):
            mentioned |= set(constant)  # keyword arguments, among others
    return CodeFacts(frozenset(uses), frozenset(names), frozenset(stores), frozenset(mentioned))


_SILENT = {
    "RESUME", "NOP", "CACHE", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS",
    "SETUP_ANNOTATIONS", "DELETE_FAST", "NOT_TAKEN",
}  # fmt: skip
_READS = {  # instructions that only read their operands and push one result: operands of each
    "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2, "UNARY_NOT": 1, "UNARY_NEGATIVE": 1,
    "UNARY_INVERT": 1, "UNARY_POSITIVE": 1, "FORMAT_SIMPLE": 1, "TO_BOOL": 1,
}  # fmt: skip
_CONSTANTS = {
    "LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL", "LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR",
    "PUSH_EXC_INFO", "LOAD_CLOSURE", "LOAD_LOCALS", "LOAD_COMMON_CONSTANT",
}  # fmt: skip
_TAKEN = {"RETURN_VALUE": 1, "LIST_APPEND": 1, "SET_ADD": 1, "MAP_ADD": 2, "STORE_NAME": 1}
_BUILT: dict[str, Callable[[int], int]] = {  # operands of each, by the instruction's argument
    "BUILD_LIST": int,
    "BUILD_TUPLE": int,
    "BUILD_SET": int,
    "BUILD_STRING": int,
    "BUILD_MAP": lambda pairs: 2 * pairs,
    "BUILD_CONST_KEY_MAP": lambda values: values + 1,
    "SET_FUNCTION_ATTRIBUTE": lambda _: 2,
    "MAKE_FUNCTION": lambda flags: 1 if sys.version_info >= (3, 13) else 1 + flags.bit_count(),
}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_ENDS = _JUMPS | {"RETURN_VALUE", "RAISE_VARARGS", "RERAISE"}


class _CodeRun:
    def __init__(self, code: types.CodeType) -> None:
        self.uses: set[Use] = set()
        self.names: set[str] = set()
        self.stores: set[str] = set()
        self._stack: list[Path | None] = []
        self._aliases: dict[str, Path] = {}
        self._loose: set[Path] = set()
        instructions = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
        arguments = code.co_argcount + code.co_kwonlyargcount
        self.arguments = set(code.co_varnames[:arguments])
        stored = [str(each.argval) for each in instructions if each.opname == "STORE_FAST"]
        self._once = {name for name in stored if stored.count(name) == 1} - self.arguments
        saved: dict[int, list[Path | None]] = {}
        ended = False
        for each in instructions:
            if each.is_jump_target and (
                ended or len(saved.get(each.offset, [])) > len(self._stack)
            ):
                self._stack = saved.pop(each.offset, [])
            self._step(each)
            ended = each.opname in _ENDS
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                jumped = list(self._stack)
                if each.opname == "FOR_ITER":
                    jumped = jumped[:-2]
                saved.setdefault(each.argval, jumped)
                for path in jumped:
                    self._loose.add(path) if path is not None else None
        for path in (*self._stack, *self._loose):
            if path is not None and not any(use.path[:2] == path[:2] for use in self.uses):
                self._use(path, "handed")

    def _use(self, path: Path | None, how: str, to: Path | None = None) -> None:
        if path is not None and path.root != "unknown":
            self.uses.add(Use(path, how, to))

    def _pop(self) -> Path | None:
        return self._stack.pop() if self._stack else None

    def _take(self, count: int) -> list[Path | None]:
        taken = [self._pop() for _ in range(count)]
        return taken[::-1]

    def _push(self, path: Path | None) -> None:
        self._stack.append(path)

    def _step(self, each: dis.Instruction) -> None:
        name, arg = each.opname, each.arg or 0
        if name in _CONSTANTS:
            self._push(None)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.names.add(each.argval)
            if name == "LOAD_GLOBAL" and arg & 1:
                self._push(None)
            self._push(Path("global", each.argval))
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            self._push(Path("local" if each.argval in self.arguments else "cell", each.argval))
        elif name.startswith("LOAD_FAST"):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            for local in names:
                self._push(
                    Path("local", local) if local in self.arguments else self._aliases.get(local)
                )
        elif name.startswith("STORE_FAST") and isinstance(each.argval, str):
            self._store(each.argval)
        elif name == "STORE_DEREF":
            self._use(Path("cell", each.argval), "set")
            self._use(self._pop(), "handed")
        elif name == "STORE_GLOBAL":
            self.stores.add(each.argval)
            self._use(self._pop(), "handed")
        elif name == "DELETE_GLOBAL":
            self.stores.add(each.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            path = self._pop()
            self._push(_attribute(path or _UNKNOWN, each.argval))
            if name == "LOAD_METHOD" or (arg & 1 and each.argrepr.startswith("NULL|self")):
                self._push(None)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            path = self._pop()
            self._use(None if path is None else _attribute(path, each.argval), "set")
            if name == "STORE_ATTR":
                self._use(self._pop(), "handed")
        elif name == "STORE_SUBSCR":
            self._use(self._pop(), "read")
            self._use(self._pop(), "changed")
            self._use(self._pop(), "handed")
        elif name == "DELETE_SUBSCR":
            self._use(self._pop(), "read")
            self._use(self._pop(), "changed")
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]"):
            self._use(self._pop(), "read")
            self._element()
        elif name == "BINARY_OP":
            right, left = self._pop(), self._pop()
            self._use(right, "read")
            self._use(left, "changed" if each.argrepr.endswith("=") else "read")
            self._push(None)
        elif name == "FORMAT_VALUE":
            for path in self._take(2 if arg & 4 else 1):
                self._use(path, "read")
            self._push(None)
        elif name in _READS:
            for path in self._take(_READS[name]):
                self._use(path, "read")
            self._push(None)
        elif name in _JUMPS:
            pass
        elif name == "GET_LEN":
            self._use(self._stack[-1] if self._stack else None, "read")
            self._push(None)
        elif name == "GET_ITER":
            self._element()
        elif name == "FOR_ITER":
            self._push(self._stack[-1] if self._stack else None)
        elif name == "UNPACK_SEQUENCE":
            path = self._pop()
            for _ in range(arg):
                self._push(None if path is None else path.then(ELEMENT))
        elif name == "POP_TOP" or name.startswith(("POP_JUMP", "JUMP_IF")):
            if name.startswith("JUMP_IF"):  # it stays on the stack if the jump is taken
                self._use(self._stack[-1] if self._stack else None, "handed")
            self._use(self._pop(), "read")
        elif name == "BUILD_SLICE":
            for path in self._take(arg):
                self._use(path, "read")
            self._push(None)
        elif name in ("CALL", "CALL_KW"):
            self._call(arg + (name == "CALL_KW"))
        elif name == "IMPORT_NAME":
            self._take(2)
            self._push(Path("module", each.argval))
        elif name == "IMPORT_FROM":
            path = self._stack[-1] if self._stack else None
            self._push(None if path is None else path.then(each.argval))
        elif name in _TAKEN:
            self._hand_on(_TAKEN[name])
        elif name in _BUILT:
            self._hand_on(_BUILT[name](arg))
            self._push(None)
        elif name == "CALL_FUNCTION_EX":
            self._call(1 + (arg & 1))
        elif name == "BEFORE_WITH":
            self._use(self._pop(), "called")
            self._stack += [None, None]
        elif name in ("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"):
            path = self._pop()
            self._use(None if path is None else path.then(ELEMENT), "handed")
        elif name == "COPY":
            path = self._stack[-arg] if len(self._stack) >= arg else None
            self._push(path)
        elif name == "SWAP":
            if len(self._stack) >= arg:
                last = self._stack[-1]
                self._stack[-1], self._stack[-arg] = self._stack[-arg], last
        else:
            self._unknown(each)

    def _hand_on(self, count: int) -> None:
        for path in self._take(count):
            self._use(path, "handed")

    def _store(self, name: str) -> None:
        path = self._pop()
        if path is not None:
            if name in self._once:
                self._aliases[name] = path
            else:
                self._use(path, "handed")

    def _element(self) -> None:
        path = self._pop()
        self._push(None if path is None else path.then(ELEMENT))

    def _call(self, count: int) -> None:
        arguments = self._take(count)
        first, second = self._pop(), self._pop()
        callee = second or first
        if callee is not None and first is not None and second is not None:
            arguments.insert(0, first)
        made = None
        if callee == Path("global", "type") and len(arguments) == 1:
            (path,) = arguments
            if path is not None and path.root in ("local", "cell") and not path.steps:
                made = _class_of(path)
        elif callee is not None:
            self._use(callee, "called")
        if made is None:
            for path in arguments:
                self._use(path, "handed", callee)
        self._push(made)

    def _unknown(self, each: dis.Instruction) -> None:
        """Count all operands of an unknown instruction as handed on."""
        arg = each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        try:
            effect = dis.stack_effect(each.opcode, arg, jump=False)
        except ValueError:
            effect = 0
        # Only the net effect on the stack is known. If it pushes, it may have read the whole stack.
        taken = (
            len(self._stack) if effect >= 0 else min(len(self._stack), max(-effect + 1, arg or 0))
        )
        for path in self._stack[len(self._stack) - taken :]:
            self._use(path, "handed")
        if effect < 0:
            del self._stack[effect:]
        if self._stack and effect < 1:
            self._stack[-1] = None
        self._stack += [None] * max(0, effect)


def _attribute(path: Path, name: str) -> Path:
    if path.root in ("local", "cell") and not path.steps and name == "__class__":
        return _class_of(path)
    return path.then(name)


def _class_of(path: Path) -> Path:
    return Path("class" if path.root == "local" else "cell's class", path.name)
