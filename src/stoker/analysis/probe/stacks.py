"""Samples, during one drain, which code the batches are made in.

A timer's signal has Python look at the stack of the main thread, which makes the batches. Native
code keeps the look waiting, with or without the GIL. It comes as soon as the call returns, with the
caller's frame still on top, and stands for all looks that were due in the meantime. So such a call
counts for as long as it lasted, and for its caller.

A thread with ``sys._current_frames`` would do it without signals. But it has to wait for a
processor and for the GIL, and gets both when the main thread waits: on a busy host its shares were
off by up to 0.43, those of the signal by 0.034 (``bench/analyze_stacks``).

A look counts for one piece of work. Its name is the first of these that the stack has:

- PIL's decoding, wherever a lazy image is first used;
- the innermost object with ``__call__`` or ``forward``, such as a transform; a function of the
  user's inside a library's object (a ``Lambda``) is named itself;
- the library's function that the user's innermost function calls;
- that function itself; of a dataset's method the line, as it may do everything.
"""

from __future__ import annotations

import ctypes
import functools
import json
import linecache
import os
import signal
import struct
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

# Between two looks: no round number, as a loop as long would be met at one place only. A look takes
# some 20 us of the worker's time.
_PERIOD_NS = 1_937_000
_HERE = os.path.dirname(os.path.abspath(__file__))
# Methods that are named after their object: a subclass inherits them.
_OBJECTS = "__call__", "forward"
# Objects with a ``__call__`` that only pass on a call.
_DISPATCH = "torch._ops"
# Methods of datasets, which pass on what they are asked for.
_DATASET = "__getitem__", "__getitems__", "__iter__", "__next__"
_FETCHER = "/torch/utils/data/_utils/fetch.py"
_LONGEST_LINE = 60

# Not SIGALRM, which a dataset may have for time-outs of its own.
_SIGNAL = signal.SIGRTMAX - 1
# Of timer_create(2), which Python does not name.
_SIGEV_THREAD_ID = 4

_clock = time.perf_counter_ns


class _Timer:
    """Sends ``_SIGNAL`` to the thread that made it, again and again."""

    def __init__(self) -> None:
        # Until glibc 2.33 it has these functions; since then it leads to them.
        self._libc = ctypes.CDLL("librt.so.1")
        self._timer = ctypes.c_void_p()
        # ``struct sigevent`` and ``struct itimerspec``.
        event = struct.pack("Piii44x", 0, _SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
        times = struct.pack("4l", 0, _PERIOD_NS, 0, _PERIOD_NS)
        self._libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer))
        self._began_ns = _clock()
        self._libc.timer_settime(self._timer, 0, times, None)

    def count(self) -> int:
        """Return how many signals were due so far."""
        return (_clock() - self._began_ns) // _PERIOD_NS

    def delete(self) -> None:
        self._libc.timer_delete(self._timer)


class StackSampler:
    """Looks at the stack of the main thread while it makes batches, for the length of a drain.

    Each batch is a line of JSON: looks by the name of the work. Nothing is sampled where another
    thread makes the batches: Python handles signals in the main one.
    """

    def __init__(self) -> None:
        self._tag = ""
        self._timer: _Timer | None = None
        self._seen = 0  # looks that were due by the last one, or by the begin of the batch
        self._looks: Counter[str] | None = None  # at the batch under way

    def begin(self, tag: str) -> None:
        """Begin a drain; without a tag, nothing is sampled."""
        self._tag = tag

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
            looks: Counter[str] = Counter()
            if self._timer is not None:
                self._seen, self._looks = self._timer.count(), looks
            try:
                return _call(make, index)
            finally:
                self._looks = None
                if self._tag and looks:
                    with open(f"{self._tag}-{os.getpid()}.looks", "a") as file:
                        file.write(json.dumps(looks) + "\n")

        fetcher.fetch = sampled_fetch

    def _start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(_SIGNAL) == signal.SIG_DFL:
            signal.signal(_SIGNAL, self._look)
            signal.siginterrupt(_SIGNAL, False)  # native code is to see nothing of it
            self._timer = _Timer()

    def _look(self, _: int, frame: FrameType | None) -> None:
        if self._timer is None:
            return
        due = self._timer.count()
        if self._looks is not None and (name := name_work(frame)):
            self._looks[name] += due - self._seen
        self._seen = due


def _call(make: Any, index: Any) -> Any:
    """Make a batch; the frames above this one are the loader's, the script's or the worker's."""
    return make(index)


def name_work(frame: FrameType | None) -> str:
    """Name the piece of work that a stack is part of (see above); empty if it makes no batch."""
    if frame is not None and frame.f_lineno == frame.f_code.co_firstlineno:
        frame = frame.f_back  # nothing of it has run yet: the time before was its caller's
    frames = []
    while frame is not None and frame.f_code is not _call.__code__:
        if not frame.f_code.co_filename.startswith(_HERE):
            frames.append(frame)
        frame = frame.f_back
    return _name(frames) if frame is not None and frames else ""


def _name(frames: list[FrameType]) -> str:
    own = library = ""
    for frame in frames:  # the innermost one first
        code = frame.f_code
        package = find_package(code.co_filename)
        if package == "PIL" and code.co_name == "load":
            return "PIL's decode"
        if code.co_name in _OBJECTS and code.co_argcount:
            kind = type(frame.f_locals.get(code.co_varnames[0]))
            if kind.__module__ != _DISPATCH:
                return own if own and package else kind.__name__
        if own:
            continue
        if not package:
            own = library or _name_own(frame)
        elif not _passes_on(frame):
            library = f"{package}'s {code.co_qualname}"
    last = frames[0].f_code
    return own or library or f"{find_package(last.co_filename)}'s {last.co_qualname}"


def _name_own(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_name not in _DATASET:
        return code.co_qualname
    line = linecache.getline(code.co_filename, frame.f_lineno or 0).strip()
    return f"{code.co_qualname}: {line[:_LONGEST_LINE]}"


def _passes_on(frame: FrameType) -> bool:
    """True of a library's dataset, and of PyTorch's fetcher."""
    code = frame.f_code
    of_dataset = "dataset" in (code.co_filename + code.co_qualname).lower()
    return code.co_filename.endswith(_FETCHER) or (code.co_name in _DATASET and of_dataset)


@functools.lru_cache(maxsize=4096)
def find_package(path: str) -> str:
    """Return the installed package, or module of the standard library; empty for users' code."""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in path:
            return _first_part(path.rsplit(mark, 1)[1])
    _, mark, rest = path.rpartition("/lib/python3.")
    if mark:
        return _first_part(rest.split("/", 1)[-1])
    return "python" if path[:1] == "<" or "/<" in path else ""


def _first_part(path: str) -> str:
    return path.split("/", 1)[0].removesuffix(".py")


SAMPLER = StackSampler()
