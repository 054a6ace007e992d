"""Scans: a function with a state makes items from inputs, one after another, in order.

A scan is called by the thread that plans, with the planning lock held. So it runs ahead of the
consumer, and a position needs an earlier state. States are therefore dumped now and then. A resume
begins with the newest dump before all items that it needs (``replayed``).
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import json
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stoker.basics.signals import pass_on
from stoker.engine.checkpoint import Bounds, PoolSize
from stoker.engine.items import Item
from stoker.engine.segments.stream import SegmentStream
from stoker.engine.setup import StreamContext
from stoker.engine.work.step import DROP, Failure
from stoker.errors import StateError
from stoker.stages.functions.operation import unfit_signature
from stoker.stages.replayed import ReplayedStream, StreamStart, check_in_order
from stoker.stages.stage import ChainView, StreamStage, Traits, not_known

ScanState = str | bytes
"""A dumped state, which no longer changes: JSON text, or the bytes that ``dump=`` returned."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str})


@dataclass(frozen=True)
class Scan(StreamStage):
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
    kind = "scan"

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
        check_in_order("scan()", before)
        return self

    def stream(self, upstream: SegmentStream, context: StreamContext) -> ScannedStream:
        return ScannedStream(self, upstream, context)

    def read_node(self, saved: Any, bounds: Bounds) -> ScanStart:
        start = msgspec.convert(saved, ScanStart)
        start.check(bounds.most)
        self.check(start.state)
        bounds.exact = None
        return start

    def check_leg(self, chain: ChainView) -> None:
        raise StateError(f"what .{self.name} is at the middle of is the rank's own")

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
    """Return a copy of an example that shares no dict, list or dataclass with the state.

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
    if dataclasses.is_dataclass(kind):
        made = copy.copy(value)
        for field in dataclasses.fields(kind):
            if hasattr(made, field.name):
                object.__setattr__(made, field.name, _separate(getattr(made, field.name)))
        return made
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        made.update({key: _separate(child) for key, child in value.items()})
        return made
    return value


def _describe(value: Any) -> str:
    """Show a value in an error, cut where it is long."""
    text = repr(value)
    kind = f"a {_type_name(type(value))}, " if value is not None else ""
    return kind + (text if len(text) <= 80 else f"{text[:77]}...")


_DUMP_EACH = 30
"""The time between two dumps, as a multiple of a dump's: dumps cost at most 3 % of planning."""
_KEPT_DUMPS = 16
"""The most dumps that are kept. Their memory is bounded, and of the inputs between the oldest
needed item and a position, a resume scans about an eighth in vain."""


class ScanStart(StreamStart, tag=Scan.kind, omit_defaults=True):
    """A point from which a scan may go on.

    Attributes:
        text, data: the scan's state, as the one or the other; the other is None. As text, not as
            JSON in JSON: sorting the keys of the whole must not sort those in here.
    """

    text: str | None = msgspec.field(default=None, name="json")
    data: bytes | None = msgspec.field(default=None, name="bytes")

    @classmethod
    def of(cls, number: int, output: int, state: ScanState) -> ScanStart:
        """Return the start with a dumped state."""
        if isinstance(state, str):
            return cls(number, output, text=state)
        return cls(number, output, data=state)

    @property
    def state(self) -> ScanState:
        """The dumped state. Raises LookupError if there is none."""
        state = self.data if self.text is None else self.text
        if state is None:
            raise LookupError("the state of a scan is missing in it")
        return state


class ScannedStream(ReplayedStream[ScanStart]):
    """The stream of a scan's outputs.

    Args:
        scan: the stage.
        upstream: the stream of its inputs.
        context: the epoch; its tally counts the time in the scan.
    """

    def __init__(self, scan: Scan, upstream: SegmentStream, context: StreamContext) -> None:
        self._scan, self._part, self._tally = scan, context.layer.at, context.tally
        self._tally.open(self._part, [scan.name])
        super().__init__(scan.name, upstream, ScanStart.of(0, 0, scan.initial))

    @property
    def dropped(self) -> int:
        """The number of inputs that the scan has dropped."""
        return self._inputs - self._outputs

    def forget_before(self, output: int) -> int:
        del self._starts[: self._before(output)]
        return super().forget_before(output)

    def _start_for(self, output: int) -> ScanStart:
        return self._starts[self._before(output)]

    def _before(self, output: int) -> int:
        return bisect.bisect_right(self._starts, output, key=lambda start: start.output) - 1

    def _begin(self, start: ScanStart) -> None:
        super()._begin(start)
        self._state = self._scan.load_state(start.state)
        self._starts = [start]
        self._dumped_at_ns = self._dump_ns = 0

    def _take(self, item: Item, value: Any) -> None:
        if type(value) is Failure:
            self._inputs += 1
            self._keep(item, value)
            return
        began_ns = time.perf_counter_ns()
        self._state, result = self._scan.step(self._state, value)
        now_ns = time.perf_counter_ns()
        self._tally.add(self._part, [now_ns - began_ns, 1, 0, 0, 0, 0, 0])
        self._inputs += 1
        if result is not DROP:
            self._keep(item, result)
        if now_ns - self._dumped_at_ns >= _DUMP_EACH * self._dump_ns:
            self._dump(now_ns)

    def _dump(self, now_ns: int) -> None:
        """Dump the state, so that a resume may begin here."""
        try:
            state = self._scan.dump_state(self._state)
        except TypeError as error:
            pass_on(error)
            self._fail(error)
            return
        self._starts.append(ScanStart.of(self._inputs, self._outputs, state))
        if len(self._starts) > _KEPT_DUMPS:
            del self._starts[1:-1:2]
        self._dumped_at_ns = time.perf_counter_ns()
        self._dump_ns = self._dumped_at_ns - now_ns
