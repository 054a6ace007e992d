"""Locks that Ctrl-C cannot leave held.

Ctrl-C raises KeyboardInterrupt in the main thread between any two steps of Python code. A ``Lock``
or an ``RLock`` is C: ``with`` takes it and has its release registered in one step. A ``Condition``
is entered by a Python function, and behind that function, before the block, the exception leaves
the lock held for ever: the next thread to take it waits for good. So what the main thread may run

- never enters a condition: not with ``with``, ``acquire`` or an exit stack. It enters the ``RLock``
  that the condition was made over, and then calls ``wait`` or ``notify_all``.
- never uses what enters a condition of its own inside: ``threading.Event``, ``Semaphore`` and
  ``Barrier``, ``queue.Queue`` and its like, ``concurrent.futures`` and what gives its futures. What
  is waited for once is an ``OneShot``.

That is held against all modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker

PACKAGE = Path(stoker.__file__).parent

HIDE_A_CONDITION = {
    "threading": {"Barrier", "BoundedSemaphore", "Event", "Semaphore"},
    "queue": {"LifoQueue", "PriorityQueue", "Queue"},
    "asyncio": {"run_coroutine_threadsafe"},
}


def covered() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def violations(source: str) -> list[str]:
    """Return what breaks the rule in a module, as lines ``number: what``."""
    tree = ast.parse(source)
    return [f"{line}: {what}" for line, what in sorted({*_entered(tree), *_hidden(tree)})]


def _name(node: ast.AST) -> str:
    """Return ``lock`` of ``lock`` and of ``self.lock``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _made_by(tree: ast.AST, name: str) -> Iterator[tuple[ast.Call, set[str]]]:
    """Yield every ``threading.NAME(...)``, and what it is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_call(node.value, name):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert isinstance(node.value, ast.Call)
            yield node.value, {_name(target) for target in targets}


def _is_call(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"threading.{name}"


def _entered(tree: ast.AST) -> Iterator[tuple[int, str]]:
    conditions: set[str] = set()
    assigned: set[ast.AST] = set()
    reentrant = set().union(*(names for _, names in _made_by(tree, "RLock")))
    for call, names in _made_by(tree, "Condition"):
        conditions |= names
        assigned.add(call)
        if not (len(call.args) == 1 and _name(call.args[0]) in reentrant):
            yield call.lineno, "a condition over no RLock of its own module cannot be entered"
    for node in ast.walk(tree):
        if _is_call(node, "Condition") and node not in assigned:
            assert isinstance(node, ast.Call)
            yield node.lineno, "a condition without a name"
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if _name(item.context_expr) in conditions:
                    yield item.context_expr.lineno, "with condition"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, receiver = node.func.attr, node.func.value
            if method in ("acquire", "__enter__") and _name(receiver) in conditions:
                yield node.lineno, f"condition.{method}()"
            if method == "enter_context" and any(_name(each) in conditions for each in node.args):
                yield node.lineno, "enter_context(condition)"


def _hidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names = {ast.unparse(node)}
        else:
            continue
        for name in names:
            module, _, thing = name.rpartition(".")
            if name.startswith("concurrent") or thing in HIDE_A_CONDITION.get(module, ()):
                yield node.lineno, name
            if isinstance(node, ast.ImportFrom) and name == "threading.Condition":
                yield node.lineno, "write threading.Condition, which this test looks for"


@pytest.mark.full
def test_the_main_thread_enters_no_condition() -> None:
    found = {_place(path): violations(path.read_text()) for path in covered()}
    assert not {place: each for place, each in found.items() if each}


def test_the_modules_that_wait_are_covered() -> None:
    waiting = [_place(path) for path in covered() if "threading.Condition(" in path.read_text()]
    assert {place.partition("/")[0] for place in waiting} >= {"cache", "engine", "feeds"}


CLASS = """
import threading, asyncio, queue
class Pool:
    def __init__(self):
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
    def wait(self):
        with self.lock:
            self.changed.wait()
"""


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", []),
        ("    def bad(self):\n        with self.changed:\n            pass", ["with condition"]),
        ("def bad(pool):\n    with open('f'), pool.changed:\n        pass", ["with condition"]),
        ("def bad(pool):\n    pool.changed.acquire()", ["condition.acquire()"]),
        (
            "def bad(pool, stack):\n    stack.enter_context(pool.changed)",
            ["enter_context(condition)"],
        ),
        ("alone = threading.Condition()", ["a condition over no RLock of its own module"]),
        (
            "plain = threading.Lock()\nover = threading.Condition(plain)",
            ["a condition over no RLock"],
        ),
        ("pools = [threading.Condition()]", ["a condition without a name"]),
        ("from threading import Condition", ["write threading.Condition"]),
        ("ready = threading.Event()", ["threading.Event"]),
        ("from threading import Semaphore", ["threading.Semaphore"]),
        ("items = queue.Queue()", ["queue.Queue"]),
        ("items = queue.SimpleQueue()", []),
        ("import concurrent.futures", ["concurrent.futures"]),
        ("from concurrent.futures import Future", ["concurrent.futures.Future"]),
        ("asyncio.run_coroutine_threadsafe(work, loop)", ["asyncio.run_coroutine_threadsafe"]),
    ],
)
def test_what_breaks_the_rule_is_found(added: str, expected: list[str]) -> None:
    found = [each.partition(": ")[2] for each in violations(CLASS + added)]
    assert len(found) == len(expected)
    for what, begin in zip(found, expected, strict=True):
        assert what.startswith(begin)
