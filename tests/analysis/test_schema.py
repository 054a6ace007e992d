"""The JSON file: its schema is documented and versioned."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from analysis.reports import REPORTS
from stoker.analysis.report import SCHEMA, Report, read_report, write_report

DOCUMENTED = Path(__file__).parents[2] / "docs" / "analysis.schema.json"


def test_the_documented_schema_is_the_one_that_is_written() -> None:
    """To write it anew after a change, with a new version in SCHEMA if a meaning changed:

    python -c 'import json, msgspec; from stoker.analysis.report import Report; \\
        print(json.dumps(msgspec.json.schema(Report), indent=1))' > docs/analysis.schema.json
    """
    assert json.loads(DOCUMENTED.read_text()) == msgspec.json.schema(Report)


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
    ("content", "said"),
    [
        ("{", "is not a report"),
        ("[1, 2]", "is not a report"),
        ('{"schema": "stoker-analysis/1"}', "is not a report"),
    ],
)
def test_what_is_no_report_is_said_to_be_none(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_report(path)


def test_another_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(next(iter(REPORTS.values())), path)
    path.write_text(path.read_text().replace(SCHEMA, "stoker-analysis/9"))
    with pytest.raises(ValueError, match="'stoker-analysis/9'"):
        read_report(path)
