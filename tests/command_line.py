"""Calls ``stoker`` in the process of the test, and Python programs in others."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from stoker.cli import main

LIMIT_S = 900
"""After which a program hangs, however busy the machine is."""


class Called(NamedTuple):
    """How a command ended, and what it wrote."""

    code: object
    stdout: str
    stderr: str


def call(*words: str | os.PathLike[str], columns: int = 80) -> Called:
    """Call a command on a terminal of so many columns."""
    code: object = 0
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        patch.dict(os.environ, COLUMNS=str(columns)),
    ):
        try:
            main([os.fspath(word) for word in words])
        except SystemExit as end:
            code = end.code
    return Called(code, out.getvalue(), errors.getvalue())


def python(
    *words: str | os.PathLike[str], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, with variables in its environment."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
        env=os.environ | variables,
    )
