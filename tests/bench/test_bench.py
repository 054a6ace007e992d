"""Every benchmark runs: with --quick they find errors, never figures. What is told is of rows."""

from __future__ import annotations

import ast
import importlib
import textwrap
from pathlib import Path
from typing import Any

import pytest

from command_line import python

BENCH = Path(__file__).resolve().parents[2] / "bench"
SHARED = ("harness.py", "inputs.py", "throttled.py")
SCRIPTS = sorted(path for path in BENCH.glob("*.py") if path.name not in SHARED)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_quick_run_finds_no_errors_and_leaves_no_file(script: Path) -> None:
    results = BENCH / "results" / f"{script.stem}.json"
    before = results.read_bytes() if results.exists() else None
    done = python("-W", "error", script.name, "--quick", cwd=BENCH)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "no figures" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before


@pytest.mark.parametrize(
    "words", [("harness.py", "check"), ("conformance/run.py", "--page", "check")], ids=str
)
def test_docstrings_and_the_page_of_what_was_tested_have_the_tables_of_their_rows(
    words: tuple[str, ...],
) -> None:
    done = python(*words, cwd=BENCH)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_script_prints_the_tables_of_its_rows() -> None:
    done = python("import_time.py", "--table", cwd=BENCH)
    assert done.returncode == 0, done.stderr
    docstring = ast.get_docstring(ast.parse((BENCH / "import_time.py").read_text()))
    assert docstring is not None
    assert textwrap.indent(done.stdout, "    ") in docstring


@pytest.mark.full
def test_a_quick_run_of_conformance_finds_no_errors() -> None:
    done = python("conformance/run.py", "--quick", cwd=BENCH)
    assert done.returncode == 0, done.stderr
    assert "no figures" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True, "num_workers": 1},
        {"batch_size": None},
        {"batch_size": 3, "sampler": [5, 2, 2, 7], "collate_fn": list},
        {"batch_sampler": [[1, 2, 3], [0]]},
    ],
    ids=repr,
)
def test_the_loader_that_suites_get_is_as_torch_s(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.syspath_prepend(str(BENCH / "conformance"))
    loader = importlib.import_module("torch_loader").StatefulDataLoader(range(10), **options)
    wanted: Any = list(torch.utils.data.DataLoader(range(10), **options))  # type: ignore[arg-type]
    assert repr(list(loader)) == repr(wanted)
    assert len(loader) == len(wanted)


def test_all_rows_are_told_by_their_script_or_among_what_is_answered() -> None:
    answered = (BENCH / "ANSWERED.md").read_text()
    for rows in (BENCH / "results").glob("*.json"):
        name = rows.stem.removesuffix("_predicted")
        script = BENCH / ("conformance/run.py" if name == "conformance" else f"{name}.py")
        told = script.read_text() if script.exists() else answered
        assert f"results/{name}.json" in told
        assert script.exists() != (f"- **`{name}`**" in answered)
