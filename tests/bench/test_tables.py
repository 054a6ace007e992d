"""The tables in the benchmarks' docstrings come from their stored rows."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=200, cwd=BENCH
    )


@pytest.mark.full
def test_every_docstring_has_the_tables_of_its_rows() -> None:
    done = python("harness.py", "check")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_script_prints_the_tables_of_its_rows() -> None:
    done = python("paths.py", "--table")
    assert done.returncode == 0, done.stderr
    docstring = ast.get_docstring(ast.parse((BENCH / "paths.py").read_text()))
    assert docstring is not None
    assert textwrap.indent(done.stdout, "    ") in docstring


def test_every_script_with_rows_is_checked() -> None:
    for rows in (BENCH / "results").glob("*.json"):
        script = BENCH / f"{rows.stem.removesuffix('_predicted')}.py"
        assert f"[results/{script.stem}.json]" in script.read_text()
