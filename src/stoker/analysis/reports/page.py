"""The report as a page: one HTML file with what the terminal shows, and with what-ifs.

It has no script and loads nothing, so it reads the same on a phone, on paper and offline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.table import Table
from rich.text import Text

from stoker.analysis.model.model import NOTHING
from stoker.analysis.model.report import Report, to_measured
from stoker.analysis.model.what_if import answer
from stoker.analysis.reports import terminal

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: clamp(17px, 4.4vw, 30px); line-height: 1.25; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; }
pre, .cyan { font-family: ui-monospace, monospace; font-size: clamp(11px, 2.9vw, 14px); }
pre, td, .caption { white-space: pre-wrap; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.95rem; }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #8884; }
th, td { text-align: left; vertical-align: top; }
th, .right { overflow-wrap: normal; }
.right { text-align: right; font-variant-numeric: tabular-nums; }
td.right { white-space: pre; }
.bar { font-size: clamp(4px, 1vw, 10px); vertical-align: middle; }
.bold { font-weight: 650; }
.dim { opacity: 0.75; }
.green { color: #2f9e80; }
.yellow { color: #c08420; }
.red { color: #d05a46; }
@media (max-width: 30rem) { th, td { padding-right: 0.4rem; } }
@media print { tr, pre { break-inside: avoid; } h2 { break-after: avoid; } }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>stoker: where training waits</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_page(report: Report, path: Path) -> None:
    """Write a report as a page for browsers, phones and paper; it works offline. Raises OSError.

    A report without G or P is shown without what-ifs.
    """
    path.write_text(_PAGE.format(style=_STYLE, body="\n".join(_list_parts(report))), "utf-8")


def _list_parts(report: Report) -> Iterator[str]:
    headline, *rest = report.verdict.split(". ", 1)
    yield f'<p class="dim">stoker analyze {escape(report.script)}</p>'
    yield f"<h1>{escape(headline)}</h1>"
    yield from (f"<p>{escape(sentences)}</p>" for sentences in rest)
    for line in report.what_to_do:
        kind = "pre" if line.startswith(" ") else "p"
        yield f"<{kind}>{escape(line.strip())}</{kind}>"
    if report.doubts:
        yield f'<p class="dim">Uncertain: {escape("; ".join(report.doubts))}.</p>'
    yield from map(_write_part, terminal.list_parts(report))
    yield "<h2>What if</h2>"
    try:
        answered = answer(to_measured(report), NOTHING)
    except ValueError as error:
        yield f"<p>{escape(str(error))}</p>"
    else:
        yield from map(_write_part, terminal.list_answer_parts(report, answered))
    yield f"<p>{escape(f'Made by stoker {report.stoker}, {report.made}')}</p>"


def _write_part(part: Text | Table) -> str:
    return _write_table(part) if isinstance(part, Table) else f"<pre>{_write_text(part)}</pre>"


def _write_text(text: object) -> str:
    """Return a text as HTML; a style of the terminal is a class."""
    if not isinstance(text, Text):
        return re.sub("[█━]+", r'<span class="bar">\g<0></span>', escape(str(text)))
    html, at = "", 0
    for start, end, style in text.spans:
        html += escape(text.plain[at:start])
        html += f'<span class="{style}">{escape(text.plain[start:end])}</span>'
        at = end
    return f'<span class="{text.style}">{html}{escape(text.plain[at:])}</span>'


def _write_table(table: Table) -> str:
    def write_row(kind: str, cells: tuple[object, ...], style: object = "") -> str:
        written = (
            f'<{kind} class="{column.justify}" style="min-width: {column.min_width or 0}ch">'
            f"{_write_text(cell)}</{kind}>"
            for column, cell in zip(table.columns, cells, strict=True)
        )
        return f'<tr class="{style or ""}">{"".join(written)}</tr>'

    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [write_row("td", cells, row.style) for row, cells in zip(table.rows, rows, strict=True)]
    if table.show_header:
        lines.insert(0, write_row("th", tuple(column.header for column in table.columns)))
    title = f"<h2>{_write_text(table.title)}</h2>" if table.title else ""
    caption = f'<p class="dim caption">{_write_text(table.caption)}</p>' if table.caption else ""
    return f'{title}<div class="table"><table>{"".join(lines)}</table></div>{caption}'
