"""Peers with environments of their own: made on request, then run as processes."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOME = HERE.parent.parent / ".peers"


def known() -> list[str]:
    """Return the names of the peers of ``arrays.py``: a file and a list of requirements each."""
    return sorted(path.stem for path in HERE.glob("*.txt") if path.with_suffix(".py").exists())


def python(name: str) -> Path:
    """Return a peer's interpreter, there or not."""
    return HOME / name / "bin" / "python"


def install(name: str) -> None:
    """Make a peer's environment anew, with pip."""
    venv.create(HOME / name, clear=True, with_pip=True)
    requirements = HERE / f"{name}.txt"
    subprocess.run([python(name), "-m", "pip", "install", "-q", "-r", requirements], check=True)


class Peer:
    """A peer's process, ready to run epochs; to be closed."""

    def __init__(self, name: str, rows: int, batch: int, workers: int) -> None:
        self._process = subprocess.Popen(
            [
                python(name), "-P", HERE / "serve.py", HERE / f"{name}.py",
                str(rows), str(batch), str(workers),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def timed(self, least_s: float) -> dict[str, float]:
        """Run epochs there; see ``serve.timed``."""
        assert self._process.stdin is not None
        print(least_s, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the peer ended with code {self._process.wait()}")
            if line.startswith("{"):  # some print while they are imported
                answer: dict[str, Any] = json.loads(line)
                return answer
