"""Calls ``stoker`` in the process of the test."""

from __future__ import annotations

import contextlib
import io
import os
from typing import NamedTuple
from unittest.mock import patch

from stoker.cli import main


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
