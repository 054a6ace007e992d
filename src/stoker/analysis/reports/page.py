"""The report as a page: one HTML file that loads nothing and predicts by itself.

The template and its parts stand beside this file: ``page.html``, ``page.css`` and the scripts. The
model comes from Python: its functions are translated.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec

from stoker.analysis.model.model import (
    find_cache_needed,
    find_cores_needed,
    predict_with_page_cache,
)
from stoker.analysis.model.report import Report, to_measured
from stoker.analysis.reports.javascript import translate

# These and all functions that they use.
_MODEL = (predict_with_page_cache, find_cache_needed, find_cores_needed)
_SCRIPTS = (
    "page_words.js",
    "page_elements.js",
    "page_plot.js",
    "page_charts.js",
    "page_flame.js",
    "page_quantities.js",
    "page_what_if.js",
    "page.js",
)


def write_page(report: Report, path: Path) -> None:
    """Write a report as a page for browsers, phones and paper; it works offline.

    It has some 100 kB more than the report. A report without G or P is shown without predictions.
    Raises OSError.
    """
    path.write_text(_fill_template(report), encoding="utf-8")


def _fill_template(report: Report) -> str:
    folder = resources.files("stoker.analysis.reports")

    def read(name: str) -> str:
        return (folder / name).read_text("utf-8")

    parts = {
        "css": read("page.css"),
        "data": _encode_data(report),
        "scripts": "\n".join([translate(*_MODEL), *map(read, _SCRIPTS)]),
    }
    template = read("page.html")
    # In one pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _encode_data(report: Report) -> str:
    """Return the report and the model's input, as JSON that cannot close its HTML element."""
    content: dict[str, object] = {"report": report, "measured": None}
    try:
        content["measured"] = to_measured(report)
    except ValueError as error:
        content["refused"] = str(error)
    return msgspec.json.encode(content).decode().replace("<", "\\u003c")
