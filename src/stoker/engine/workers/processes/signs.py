"""Signs of a worker process, for the watch in its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
import traceback
from typing import Any

from stoker.engine.work.worker_status import CELLS, WorkerStatus, current_worker

# A signal that no program is likely to use.
_STACK_SIGNAL = signal.SIGRTMAX - 2
# As long as a warning may wait for the stack of a process that the system lets not run.
_STACK_S = 1.0


class Signs:
    """Signs of a worker process: its position, and on a signal its stack."""

    def __init__(self, context: Any) -> None:
        self._cells = context.RawArray("q", CELLS)
        self.status = WorkerStatus(self._cells)
        self._file = os.memfd_create("stoker-stack", os.MFD_CLOEXEC)
        self._handle = f"/proc/{os.getpid()}/fd/{self._file}"

    def __getstate__(self) -> dict[str, Any]:
        return {"_cells": self._cells, "_handle": self._handle}

    def open(self) -> None:
        """Begin to show this process; it calls this itself."""
        current_worker.status = WorkerStatus(self._cells)
        file = os.open(self._handle, os.O_RDWR | os.O_CLOEXEC | os.O_APPEND)
        # In the thread that takes the signal: the main thread, where all requests are done.
        faulthandler.register(_STACK_SIGNAL, file, all_threads=False)

    def stack(self, pid: int) -> list[traceback.FrameSummary]:
        """Return the stack of the process' main thread; none if it cannot be read."""
        os.ftruncate(self._file, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _STACK_SIGNAL)
        size, deadline = 0, time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            before, size = size, os.fstat(self._file).st_size
            if size and size == before:
                break
            time.sleep(_STACK_S / 50)
        return _read_dump(os.pread(self._file, size, 0).decode(errors="replace"))

    def close(self) -> None:
        """Close the file of stacks."""
        os.close(self._file)


_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')


def _read_dump(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of a stack that ``faulthandler`` wrote, the innermost last."""
    frames = [
        traceback.FrameSummary(
            each["file"],
            int(each["line"]),
            each["name"],
            line=linecache.getline(each["file"], int(each["line"])).strip(),
        )
        for each in _FRAME.finditer(text)
    ]
    return frames[::-1]
