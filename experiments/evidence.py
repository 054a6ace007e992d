"""The pages that tell of the rows: tables, sentences and figures are made of these.

`python -m experiments.evidence` writes them. Up to `<!-- end -->` stands, behind
`<!-- table: NAME -->`, a table; behind `<!-- said: NAME -->`, what the rows say in sentences. So no
sentence outlives its table.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from experiments import in_dlio
from experiments.converged import sentences as converged
from experiments.converged.trainings import read as read_converged
from experiments.equal_time import sentences, tables
from experiments.equal_time.rows import read_rows
from experiments.repeats import damage

_ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    _ROOT / name
    for name in ("README.md", "docs/evidence.md", "docs/evidence-method.md", "docs/echoing.md")
]
_FIGURES = _ROOT / "docs" / "evidence"

_BLOCK = re.compile(
    r"(<!-- (?P<kind>table|said): (?P<name>[^\n]*?) -->\n).*?( *<!-- end -->)", re.DOTALL
)
_WIDTH = 117


def told(text: str) -> str:
    """Return a page with its tables and sentences. Raises LookupError for an unknown one."""
    return _BLOCK.sub(lambda m: m[1] + _MADE[m["kind"]](m["name"]) + "\n" + m[4], text)


def write() -> None:
    """Write tables, sentences and figures."""
    # Here, so that tests of pages need no matplotlib.
    from experiments.equal_time import figure as lasting
    from experiments.repeats import figure as repeats

    for page in PAGES:
        page.write_text(told(page.read_text(encoding="utf-8")), encoding="utf-8")
    lasting.write(_FIGURES / "lasting.svg", read_rows())
    repeats.write(_FIGURES / "repeats.svg", damage.costs(damage.read_rows()))


def table(name: str) -> str:
    """Return a table in Markdown. Raises LookupError if there is none."""
    if name == "repeats":
        head, rows = damage.cells()
    elif name == "converged":
        head, rows = converged.cells(read_converged())
    else:
        head, rows = tables.cells(name)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _said(name: str) -> str:
    if name in damage.SAID:
        text: list[str] | str = damage.SAID[name](damage.costs(damage.read_rows()))
    elif name in converged.SAID:
        text = converged.SAID[name](read_converged())
    elif name == "in DLIO":
        text = in_dlio.said(in_dlio.read())
    else:
        text = sentences.SAID[name](read_rows())
    if isinstance(text, str):
        return _filled(text, "  ", "  ")
    return "\n".join(_filled(each, "- ", "  ") for each in text)


def _filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


_MADE: dict[str, Callable[[str], str]] = {"table": table, "said": _said}

if __name__ == "__main__":
    write()
