"""Peers with environments of their own: made on request, then run as processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
HOME = HERE.parent.parent / ".peers"


def python(name: str) -> Path:
    """Return a peer's interpreter, there or not."""
    return HOME / name / "bin" / "python"


def install(name: str) -> None:
    """Make a peer's environment anew, with pip."""
    venv.create(HOME / name, clear=True, with_pip=True)
    requirements = HERE / f"{name}.txt"
    subprocess.run([python(name), "-m", "pip", "install", "-q", "-r", requirements], check=True)


class Peer:
    """A program that times epochs (``serve.py``), in a process of its own; to be closed.

    Attributes:
        about: its first answer.
    """

    def __init__(self, command: Sequence[object], **variables: str) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def timed(self, least_s: float) -> dict[str, Any]:
        """Run epochs there; see ``serve.timed``.

        Adds ``processor_s``, what the process and all below it took meanwhile, and
        ``memory_bytes``, what they hold at the end.
        """
        assert self._process.stdin is not None
        before_s = self._processor_s()
        print(least_s, file=self._process.stdin, flush=True)
        answer = self._answer() | {"processor_s": self._processor_s() - before_s}
        return answer | {"memory_bytes": self._memory_bytes()}

    def close(self) -> None:
        """End the process."""
        self._process.communicate("end\n")  # workers that are forked here keep its input open

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # some print while they are imported
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"a peer ended with code {self._process.wait()}")

    def _memory_bytes(self) -> int:
        total = 0
        for each in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_full_info().pss
        return total

    def _processor_s(self) -> float:
        total = 0.0
        for each in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(each.cpu_times()[:4])  # with those of children that have ended
        return total

    def _processes(self) -> list[psutil.Process]:
        whole = psutil.Process(self._process.pid)
        return [whole, *whole.children(recursive=True)]
