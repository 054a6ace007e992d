"""The JSON file: its schema is documented and versioned."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from analysis.reports import REPORTS
from stoker.analysis.model.report import SCHEMA, Report, read_report, write_report

DOCUMENTED = Path(__file__).parents[2] / "docs" / "analysis.schema.json"


def test_the_documented_schema_is_the_one_that_is_written() -> None:
    """To write it anew after a change, with a new version in SCHEMA if a meaning changed:

    python -c 'import json, msgspec; from stoker.analysis.model.report import Report; \\
        print(json.dumps(msgspec.json.schema(Report), indent=1))' > docs/analysis.schema.json
    """
    assert _dedented(json.loads(DOCUMENTED.read_text())) == _dedented(msgspec.json.schema(Report))


def _dedented(schema: Any) -> Any:
    """Return a schema whose descriptions are not indented, as docstrings are not from 3.13 on."""
    if isinstance(schema, dict):
        return {key: _dedented(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_dedented(value) for value in schema]
    return inspect.cleandoc(schema) if isinstance(schema, str) else schema


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(REPORTS[name], path)
    assert read_report(path) == REPORTS[name]
    content = json.loads(path.read_text())
    assert content["schema"] == SCHEMA
    assert set(content["rates"]) == set("GPSCF")
    assert set(content["split"]) == {"compute", "prep_stall", "fetch_stall"}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1, 2]",
        b"\x00\xff\xfe",
        b'{"x": ' + b"[" * 100_000,  # 3.14 may have the stack for it
        b'{"schema": "stoker-analysis/1"}',
    ],
    ids=lambda content: content[:10],
)
def test_what_is_no_report_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a report of `stoker analyze --json`"):
        read_report(path)


def test_another_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(next(iter(REPORTS.values())), path)
    path.write_text(path.read_text().replace(SCHEMA, "stoker-analysis/9"))
    with pytest.raises(ValueError, match=r"'stoker-analysis/9'.*Run the analysis again"):
        read_report(path)
