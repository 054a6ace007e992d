"""Samples, during one drain, which code the batches are made in.

A timer's signal has Python look at the stack of the main thread, which makes the batches. Native
code keeps the look waiting, with or without the GIL. It comes as soon as the call returns, with the
caller's frame still on top, and stands for all looks that were due in the meantime. So such a call
counts for as long as it lasted, and for its caller.

A thread with ``sys._current_frames`` would do it without signals. But it has to wait for a
processor and for the GIL, and gets both when the main thread waits: on a busy host its shares were
off by up to 0.48, those of the signal by 0.022 (``bench/results/analyze_stacks.json``).
"""

from __future__ import annotations

import ctypes
import dis
import functools
import json
import os
import random
import signal
import threading
import time
from types import CodeType, FrameType
from typing import Any

# Between two looks, on average. A look takes some 20 us of the worker's time.
_PERIOD_S = 0.002
_HERE = os.path.dirname(os.path.abspath(__file__))
# Methods that are named after their object: a subclass inherits them.
_OBJECTS = "__call__", "forward"
# What native code may be called by. PRECALL is of Python 3.11.
_NATIVE = (
    "PRECALL",
    "CALL",
    "CALL_KW",
    "CALL_FUNCTION_EX",
    "BINARY_OP",
    "BINARY_SUBSCR",
    "STORE_SUBSCR",
)

# Not SIGALRM, which a dataset may have for time-outs of its own.
_SIGNAL = signal.SIGRTMAX - 1
# Of timer_create(2), which Python does not name.
_SIGEV_THREAD_ID = 4

_clock = time.perf_counter
Stack = tuple[tuple[CodeType, str], ...]


class _Event(ctypes.Structure):
    """``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("unused", ctypes.c_char * 44),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class _Timer:
    """Sends ``_SIGNAL`` to the thread that made it."""

    def __init__(self) -> None:
        """Make it. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        # Until glibc 2.33, in a library of its own.
        self._libc = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")
        self._timer = ctypes.c_void_p()
        event = _Event(None, _SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
        made = self._libc.timer_create(
            time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )
        if made:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, seconds: float) -> None:
        """Send the signal once, so much later."""
        times = _Times(0, 0, *divmod(max(1, int(seconds * 1e9)), 1_000_000_000))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def delete(self) -> None:
        self._libc.timer_delete(self._timer)


class StackSampler:
    """Looks at the stack of the main thread while it makes batches, for the length of a drain.

    Each batch is a line of JSON: ``[[stack, looks], ...]``. Before the first line with a stack
    comes one that describes it, from the fetcher inwards (``_describe``). Nothing is sampled where
    another thread makes the batches: Python handles signals in the main one.
    """

    def __init__(self) -> None:
        self._tag = ""
        self._timer: _Timer | None = None
        # A generator of its own: the usual ones are the script's.
        self._draw = random.Random(0).uniform
        self._due = 0.0  # the next look
        # The batch under way: since when, and (stack, looks) as they come.
        self._began = 0.0
        self._looks: list[tuple[int, int]] | None = None
        self._numbers: dict[tuple[Stack, int], int] = {}
        self._described: list[str] = []
        self._written = 0  # of these

    def begin(self, tag: str) -> None:
        """Begin a drain; without a tag, nothing is sampled."""
        self._tag = tag
        self._numbers, self._described, self._written = {}, [], 0

    def end(self) -> None:
        """End the drain, in a process that goes on."""
        self._tag = ""
        if self._timer is not None:
            self._timer.delete()
            self._timer = None
            signal.signal(_SIGNAL, signal.SIG_DFL)  # which first handles a signal on its way

    def watch(self, fetcher: Any) -> None:
        """Sample each batch of a fetcher. Only this instance is changed, not its class."""
        if not self._tag:
            return
        make = fetcher.fetch

        def sampled_fetch(index: Any) -> Any:
            if self._tag and self._timer is None:
                self._start()
            looks: list[tuple[int, int]] = []
            self._began = _clock()
            self._looks = looks
            try:
                return _call(make, index)
            finally:
                self._looks = None
                self._write(looks)

        fetcher.fetch = sampled_fetch

    def _start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            signal.signal(_SIGNAL, self._look)
            signal.siginterrupt(_SIGNAL, False)  # native code is to see nothing of it
            self._timer = _Timer()
            self._due = _clock()
            self._timer.set(0.0)

    def _write(self, looks: list[tuple[int, int]]) -> None:
        if self._tag and looks:
            new = self._described[self._written :]
            self._written += len(new)
            with open(f"{self._tag}-{os.getpid()}.stacks", "a") as file:
                file.write("\n".join([*new, json.dumps(looks)]) + "\n")

    def _look(self, _: int, frame: FrameType | None) -> None:
        if self._timer is None:
            return
        now, count = _clock(), 0
        while self._due <= now:
            count += self._due >= self._began
            # At random distances: a loop as long as the period would be met at one place only.
            self._due += self._draw(0.5, 1.5) * _PERIOD_S
        if self._looks is not None and frame is not None and count:
            number = self._find_number(frame)
            if number is not None:
                self._looks.append((number, count))
        self._timer.set(self._due - _clock())

    def _find_number(self, frame: FrameType) -> int | None:
        """Return the number of a stack; None if it is not inside of a batch."""
        at = frame.f_lasti
        if _name_operation(frame.f_code, at) == "RESUME" and frame.f_back is not None:
            # Nothing of this function has run yet: the time before was its caller's.
            frame, at = frame.f_back, -1
        stack = []
        inner: FrameType | None = frame
        while inner is not None and inner.f_code is not _call.__code__:
            code = inner.f_code
            if os.path.dirname(code.co_filename) != _HERE:
                stack.append((code, _name_class(inner)))
            inner = inner.f_back
        if inner is None or not stack:
            return None
        if stack[0][0] is not frame.f_code or _name_operation(frame.f_code, at) not in _NATIVE:
            at = -1
        key = (tuple(stack), at)
        if key not in self._numbers:
            self._described.append(json.dumps(_describe(*key)))
            self._numbers[key] = len(self._numbers)
        return self._numbers[key]


def _call(make: Any, index: Any) -> Any:
    """Make a batch; the frames above this one are the loader's, the script's or the worker's."""
    return make(index)


@functools.lru_cache(maxsize=4096)
def _name_operation(code: CodeType, at: int) -> str:
    return dis.opname[code.co_code[at]] if at >= 0 else ""


def _name_class(frame: FrameType) -> str:
    """Return the class of the object whose ``__call__`` or ``forward`` this is."""
    code = frame.f_code
    if code.co_name not in _OBJECTS or not code.co_argcount:
        return ""
    kind = type(frame.f_locals.get(code.co_varnames[0]))
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe(stack: Stack, at: int) -> dict[str, Any]:
    """Describe a stack: its frames as (class, function, file, line), outermost first.

    ``native`` has the place of the native call in the innermost one: line, last line, and columns
    in bytes.
    """
    frames = [
        (kind, code.co_qualname, os.path.abspath(code.co_filename), code.co_firstlineno)
        for code, kind in reversed(stack)
    ]
    native = None
    if at >= 0:
        native = next(
            (place for n, place in enumerate(stack[0][0].co_positions()) if n == at // 2), None
        )
    return {"frames": frames, "native": native}


SAMPLER = StackSampler()
