"""The report as a page: one HTML file that loads nothing and predicts by itself.

The template and its parts stand beside this file: ``page.html``, ``page.css`` and the scripts. The
model comes from Python: its functions are translated.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec

from stoker.analysis import formulas, model
from stoker.analysis.javascript import translate
from stoker.analysis.report import Report, to_measured

_SCRIPTS = (
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
    path.write_text(_fill_template(report), encoding="utf-8")


def _fill_template(report: Report) -> str:
    folder = resources.files("stoker.analysis")
    parts = {
        "css": (folder / "page.css").read_text("utf-8"),
        "data": _encode_data(report),
        "scripts": "\n".join(
            [_translate_model(), *((folder / name).read_text("utf-8") for name in _SCRIPTS)]
        ),
    }
    template = (folder / "page.html").read_text("utf-8")
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _encode_data(report: Report) -> str:
    """Return the report and what the model needs of it, as JSON that cannot end its element."""
    content: dict[str, object] = {"report": report, "measured": None}
    try:
        content["measured"] = to_measured(report)
    except ValueError as error:
        content["refused"] = str(error)
    return msgspec.json.encode(content).decode().replace("<", "\\u003c")


def _translate_model() -> str:
    return translate(
        [
            formulas.inverse,
            formulas.interpolate,
            formulas.fetch_rate,
            formulas.loader_rate,
            formulas.smallest_cache,
            formulas.page_cache_misses,
            formulas.prep_rate,
            model.cached_fraction,
            model.storage_rate,
            model.cache_rate,
            model.miss_seconds,
            model.prep_cpu_seconds,
            model.worker_seconds_behind,
            model.predict,
            model.predict_with_page_cache,
            model.dataset_bytes,
            model.find_cache_needed,
            model.find_cores_needed,
        ],
        {
            "INFINITE": formulas.INFINITE,
            "FED": model.FED,
            "MOST_CORES": model.MOST_CORES,
            "NOTHING": model.NOTHING,
        },
    )
