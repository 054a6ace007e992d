"""Scans: a function with a state, called with one example after another, in order."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from stoker.errors import StateError
from stoker.stages.functions.operation import unfit_signature
from stoker.stages.stage import (
    ChainStage,
    ChainView,
    EnginePlan,
    PoolSize,
    Traits,
    first_with,
    not_known,
)

ScanState = str | bytes
"""A dumped state, which no longer changes: JSON text, or the bytes that ``dump=`` returned."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str})


class Dropped(enum.Enum):
    """The type of ``DROP``: as a member of an enumeration it stays itself under pickle and copy."""

    DROP = "DROP"

    def __repr__(self) -> str:
        return "stoker.DROP"


DROP: Final = Dropped.DROP
"""The function of ``.scan()`` returns this in place of an example to drop it."""


@dataclass(frozen=True)
class Scan(ChainStage):
    """The stage ``.scan(fn, state)``.

    Attributes:
        fn: called as ``fn(state, example)``; returns the next state, and an example or ``DROP``.
        initial: the state in which each epoch begins.
        dump, load: the user's; None if the state itself goes into JSON.
    """

    fn: Callable[[Any, Any], Any]
    initial: ScanState
    dump: Callable[[Any], Any] | None = None
    load: Callable[[Any], Any] | None = None
    traits = Traits(filters=True, scans=True)

    @staticmethod
    def of(fn: Any, state: Any, dump: Any, load: Any) -> Scan:
        """Check the arguments of ``.scan()``.

        Raises TypeError if ``fn`` does not take two arguments, or the state cannot be saved.
        """
        if not callable(fn):
            raise TypeError(f".scan() needs a function, not {type(fn).__name__}")
        if (unfit := unfit_signature(fn, 2)) is not None:
            raise TypeError(
                f".scan() calls fn(state, example), which {unfit} does not take: give it two "
                "parameters"
            )
        if (dump is None) != (load is None):
            raise TypeError(".scan() needs dump= and load= together: one undoes the other")
        for name, each in (("dump", dump), ("load", load)):
            if each is not None and not callable(each):
                raise TypeError(f"{name}= is a function, not {type(each).__name__}")
        scan = Scan(fn, "null", dump, load)
        scan = replace(scan, initial=scan.dump_state(state))
        if load is not None:
            try:
                scan.load_state(scan.initial)
            except Exception as error:
                raise TypeError(
                    f"load= of {scan.name} does not take what dump= returned: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return scan

    @property
    def call(self) -> str:
        return f"scan({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def bind(self, before: ChainView) -> Scan:
        """Check that single examples come here, each once."""
        if before.source.yields_batches:
            raise ValueError(".scan() works on single examples, and a loader yields batches")
        stage = first_with(before.stages, lambda t: t.repeats or t.batches or t.joins)
        if stage is not None:
            raise ValueError(
                f".scan() cannot follow {stage.name}: it is called once with each example. Put it "
                "before .echo(), .pack() and .batch()"
            )
        return self

    def lower(self, to: EnginePlan) -> None:
        to.scan(self)

    def count(self, items: int) -> int:
        """Raise TypeError: only the end tells."""
        raise not_known()

    def signature(self) -> str:
        return "scan"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        return "  one example at a time, in order; may leave some out"

    def dump_state(self, state: Any) -> ScanState:
        """Return a state as it is saved. Raises TypeError if it would not come back the same."""
        try:
            result = state if self.dump is None else self.dump(state)
            if self.dump is not None and type(result) is bytes:
                return result
            _check_exact(result, set())
            return json.dumps(result)
        except Exception as error:
            if self.dump is None:
                what = "it"
                hint = "make it of these, or give dump= and load= (for a set: dump=list, load=set)"
            else:
                what, hint = "what dump= makes of it", "return these, or bytes"
            raise TypeError(
                f"the state of {self.name} cannot be saved, for {what} must be dicts with text as "
                f"keys, lists, text, numbers, booleans and None: {error}; {hint}"
            ) from error

    def load_state(self, saved: ScanState) -> Any:
        """Return a new state from a saved one. Errors of ``load=`` pass."""
        state = saved if isinstance(saved, bytes) else json.loads(saved)
        return state if self.load is None else self.load(state)

    def check(self, saved: ScanState) -> None:
        """Raise StateError unless the scan can go on from this state."""
        try:
            if isinstance(saved, bytes) and self.load is None:
                raise TypeError("it is bytes, and there is no load=")
            self.load_state(saved)
        except Exception as error:
            raise StateError(
                f"the state is damaged: {self.name} cannot go on with what was saved of it: "
                f"{type(error).__name__}: {error}"
            ) from error

    def step(self, state: Any, example: Any) -> tuple[Any, Any]:
        """Return the next state, and an example or ``DROP``.

        Raises TypeError if the function returns something else. Its errors pass.
        """
        result = self.fn(state, example)
        if type(result) is not tuple or len(result) != 2:
            raise TypeError(
                f"the function returned {_describe(result)}: return a pair, (state, example) or "
                "(state, stoker.DROP)"
            )
        if result[1] is None:
            raise TypeError(
                "the function returned None for the example: return the example, or stoker.DROP "
                "to leave it out"
            )
        if self.dump is None and result[1] is not DROP:
            return result[0], _separate(result[1])
        return result


def _check_exact(value: Any, seen: set[int]) -> None:
    """Raise TypeError unless JSON gives back the same types, keys and shared objects.

    JSON itself takes more (tuples, numbers as keys, a ``defaultdict``), but gives back other types:
    a resumed run would then differ from one that never stopped.
    """
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind is not list and kind is not dict:
        raise TypeError(f"there is a {_type_name(kind)} in it")
    if id(value) in seen:
        raise TypeError(f"the same {kind.__name__} is in it twice, and would be two behind a load")
    seen.add(id(value))
    if kind is dict:
        if not _KEYS.issuperset(map(type, value)):
            other = next(key for key in value if type(key) is not str)
            raise TypeError(f"there is a dict with the key {other!r} in it")
        value = value.values()
    if not _SCALARS.issuperset(map(type, value)):  # most containers hold nothing else: fast
        for child in value:
            _check_exact(child, seen)


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _separate(value: Any) -> Any:
    """Return a copy of an example that shares no dict or list with the state.

    The function may write into its state at the next call, and a map into the example, while the
    other one is still in use. A state for JSON can share nothing else with an example.
    """
    kind = type(value)
    if kind is dict:
        return {key: _separate(child) for key, child in value.items()}
    if kind is list:
        return list(value) if _SCALARS.issuperset(map(type, value)) else list(map(_separate, value))
    if isinstance(value, tuple):
        parts = map(_separate, value)
        return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _describe(value: Any) -> str:
    """Show a value in an error, cut where it is long."""
    text = repr(value)
    kind = f"a {_type_name(type(value))}, " if value is not None else ""
    return kind + (text if len(text) <= 80 else f"{text[:77]}...")
