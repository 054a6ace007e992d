"""The report as a page: one HTML file that loads nothing and predicts by itself.

The template and its parts stand beside this file: ``page.html``, ``page.css`` and the scripts, of
which ``page_model.js`` has the formulas of ``model.py``.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec

from stoker.analysis.report import Report, measured

_SCRIPTS = (
    "page_model.js",
    "page_words.js",
    "page_elements.js",
    "page_plot.js",
    "page_charts.js",
    "page_quantities.js",
    "page_what_if.js",
    "page.js",
)


def write_page(report: Report, path: Path) -> None:
    """Write a report as a page for browsers, phones and paper; it works offline.

    Some 100 kB, and what the report holds. A report without G or P is shown without predictions.
    Raises OSError.
    """
    path.write_text(_page(report), encoding="utf-8")


def _page(report: Report) -> str:
    folder = resources.files("stoker.analysis")
    parts = {
        "css": (folder / "page.css").read_text("utf-8"),
        "data": _data(report),
        "scripts": "\n".join((folder / name).read_text("utf-8") for name in _SCRIPTS),
    }
    template = (folder / "page.html").read_text("utf-8")
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _data(report: Report) -> str:
    """Return the report and what the model needs of it, as JSON that cannot end its element."""
    content: dict[str, object] = {"report": report, "measured": None}
    try:
        content["measured"] = measured(report)
    except ValueError as error:
        content["refused"] = str(error)
    return msgspec.json.encode(content).decode().replace("<", "\\u003c")
