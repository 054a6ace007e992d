"""Starts the script under analysis, ends it with all its processes, and describes its crash.

The script is in a session of its own. Its first process and its ranks die with their parent
(PR_SET_PDEATHSIG). Processes that its launchers leave behind become the analyzer's children
(PR_SET_CHILD_SUBREAPER), and are recognised by ``STOKER_PROBE`` in their environment.

A crash is known from the first process's exit code, and from the ``.ended`` files of processes
(``probe.loaders``), even if a launcher hides it. Two things are read from torchrun's text: where
its own lines begin, and the root cause.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from stoker.analysis.model.report import Crash
from stoker.analysis.model.trace import RankTrace

# Of prctl(2), which Python does not name.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Of output that is searched for the last traceback.
_KEPT_LINES = 200
# The line of a progress bar never ends, so it is read in parts.
_LINE_BYTES = 4096
# Time for a script to save its state; a user who pressed Ctrl-C waits for it.
_TERM_S = 3.0
# After the script's end: a process that it left may keep the pipe open.
_LAST_WORDS_S = 2.0
# Of output, in a report.
_CRASH_LINES = 20

# torchrun prints this once a rank has failed, after all output of the rank.
_LAUNCHERS = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] ")
_ROOT_CAUSE = re.compile(r"Root Cause .*?rank\s+: (\d+) .*?exitcode\s+: (-?\d+) ", re.DOTALL)

# Packages with modules that start a script: python -m torch.distributed.run train.py.
_LAUNCHING = ("torch", "accelerate", "deepspeed")


def make_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that starts SCRIPT.py ..., -m MODULE ..., or a program such as torchrun.

    Raises ValueError if there is nothing of that name.
    """
    if not arguments:
        raise ValueError("which script? For example: stoker analyze train.py --epochs 1")
    first = arguments[0]
    if first == "-m":
        if len(arguments) < 2:
            raise ValueError("-m needs a module, for example: stoker analyze -m my.train")
        return [sys.executable, *arguments]
    if first.startswith("-"):
        raise ValueError(f"there is no option {first}: --help shows all, and the script comes last")
    if Path(first).is_dir() and not (Path(first) / "__main__.py").is_file():
        raise ValueError(f"{first} is a folder, not a script")
    if Path(first).is_file() and not first.endswith(".py") and os.access(first, os.X_OK):
        return [str(Path(first).absolute()), *arguments[1:]]
    if Path(first).exists():
        return [sys.executable, *arguments]
    beside = Path(sys.executable).parent / first
    launcher = str(beside) if beside.is_file() else shutil.which(first)
    if launcher is None or first.endswith(".py"):
        raise ValueError(f"there is no script and no command {first!r}")
    return [launcher, *arguments[1:]]


def find_script(command: Sequence[str]) -> str:
    """Return the name of a command's script, NAME.py also for a module; empty if it has none."""
    for before, word in zip(("", *command), command, strict=False):
        if before == "-m" and word.partition(".")[0] not in _LAUNCHING:
            return word.rpartition(".")[2] + ".py"
        if word.endswith(".py"):
            return os.path.basename(word)
    return ""


def find_startup(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that has Python load what is in ``analysis/startup``."""
    startup, others = str(Path(__file__).parents[1] / "startup"), environment.get("PYTHONPATH")
    return {"PYTHONPATH": startup + (os.pathsep + others if others else "")}


class ScriptProcess:
    """A running script.

    Attributes:
        pid: of the process that was started first.
    """

    def __init__(self, command: Sequence[str], folder: Path, cwd: Path | None = None) -> None:
        """Start ``command`` in ``cwd``, by default the current folder, with the probe in it.

        Its standard input is ours if that is a file, else empty. Its output is read, and the last
        lines are kept. Raises OSError if it cannot be started.
        """
        libc = ctypes.CDLL(None)
        libc.prctl(
            _PR_SET_CHILD_SUBREAPER, 1
        )  # processes that its launchers leave behind become our children
        environment = os.environ | find_startup(os.environ) | {"STOKER_PROBE": str(folder)}
        with contextlib.ExitStack() as opened:
            given = _open_standard_input()
            if given is not None:
                opened.callback(os.close, given)
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL if given is None else given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self.pid = self._process.pid
        self._folder = str(folder)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._known: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(ValueError, OSError):
            while line := stream.readline(_LINE_BYTES):
                self._lines.append(line.decode(errors="replace").rstrip("\n"))

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def output(self) -> list[str]:
        """Return the last printed lines of the script's processes; after its end, all are read."""
        if self.exit_code is not None:
            self._reader.join(_LAST_WORDS_S)  # a process that it left may hold the pipe open
        return list(self._lines)

    def note_processes(self) -> None:
        """Remember its descendants, as a launcher may end before them."""
        for process in psutil.Process(os.getpid()).children(recursive=True):
            if process.pid not in self._known:
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("STOKER_PROBE") == self._folder:
                        self._known[process.pid] = process

    def stop(self) -> None:
        """End it and all its descendants: by a request first, then by force."""
        self.note_processes()
        if self.exit_code is None:
            self._known.setdefault(self.pid, psutil.Process(self.pid))
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_S
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.02)
        while self._left():
            self.note_processes()
            self._signal(signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()
        self._reader.join(1.0)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        # Another program may follow in this very process (stoker run), which would not expect it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._left():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _left(self) -> list[psutil.Process]:
        left = []
        for pid, process in self._known.items():
            if pid == self.pid:
                is_left = self.exit_code is None
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)  # an orphan that became ours
                is_left = process.is_running() and is_running(pid)
            if is_left:
                left.append(process)
        return left


def is_running(pid: int) -> bool:
    """True if a process has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _open_standard_input() -> int | None:
    """Return our own standard input, from its start, if it is a file that can be read again."""
    try:
        path = os.readlink("/proc/self/fd/0")
        return os.open(path, os.O_RDONLY) if os.path.isfile(path) else None
    except OSError:
        return None


def find_crash(
    code: int | None, lines: Sequence[str], when: str, ends: Sequence[tuple[RankTrace, str]]
) -> Crash | None:
    """Return the script's crash; None if there was none.

    ``code``: the exit code of the first process, None while it runs; ``lines``: the output of all
    processes; ``ends``: the ranks that failed, the first one first, each with its error, which is
    empty if it was killed.
    """
    cause = _ROOT_CAUSE.search("\n".join(lines))
    if cause is not None:
        rank = int(cause[1])
        own = next((text for record, text in ends if record.rank == rank and text), None)
        if own is None:
            first = next((at for at, line in enumerate(lines) if _LAUNCHERS.search(line)), 0)
            own = "\n".join(lines[:first])
        return _make_crash(describe_exit(int(cause[2])), when, rank, own)
    if ends and (code is None or code == 0 or ends[0][0].about["world_size"] > 1):
        record, text = ends[0]
        how = text.splitlines()[-1] if text else "its process was killed, or left behind"
        rank_or_none = record.rank if record.about["world_size"] > 1 else None
        return _make_crash(how, when, rank_or_none, text or "\n".join(lines))
    if code is None or code == 0:
        return None
    return _make_crash(describe_exit(code), when, None, "\n".join(lines))


def _make_crash(how: str, when: str, rank: int | None, output: str) -> Crash:
    return Crash(how, when, rank, "\n".join(output.splitlines()[-_CRASH_LINES:]))


def describe_exit(code: int) -> str:
    """Return the meaning of an exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def summarize_crash(crash: Crash) -> str:
    """Describe a crash in a sentence."""
    who = "the script" if crash.rank is None else f"rank {crash.rank} of the script"
    return f"{who} crashed {crash.when}: {crash.how}"


def describe_crash(crash: Crash) -> str:
    """Describe a crash, with the last lines of output."""
    return f"{summarize_crash(crash)}. Its last lines:\n{crash.output or '(it printed nothing)'}"
