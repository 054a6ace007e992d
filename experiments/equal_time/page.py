"""The pages that tell of the rows: their tables and sentences are made of these.

Up to `<!-- end -->` stands, behind `<!-- equal time: NAME -->`, a table (`tables`); behind
`<!-- said: NAME -->`, what `sentences` says; behind `<!-- bench: NAME -->`, the first table of a
benchmark's docstring, which is made of its rows. So no sentence outlives its table.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from experiments.equal_time import sentences, tables
from experiments.equal_time.rows import read_rows

_ROOT = Path(__file__).resolve().parents[2]
PAGES = [_ROOT / name for name in ("README.md", "docs/evidence.md", "docs/echoing.md")]

_BLOCK = re.compile(
    r"(<!-- (?P<kind>equal time|said|bench): (?P<name>[^\n]*?) -->\n).*?( *<!-- end -->)", re.DOTALL
)
_WIDTH = 117


def told(text: str) -> str:
    """Return a page with its tables and sentences. Raises LookupError for an unknown one."""
    return _BLOCK.sub(lambda m: m[1] + _MADE[m["kind"]](m["name"]) + "\n" + m[4], text)


def write() -> None:
    """Write tables and sentences into the pages."""
    for page in PAGES:
        page.write_text(told(page.read_text(encoding="utf-8")), encoding="utf-8")


def _table(name: str) -> str:
    head, rows = tables.cells(name)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _said(name: str) -> str:
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


def _bench(name: str) -> str:
    source = (_ROOT / "bench" / f"{name}.py").read_text(encoding="utf-8")
    table = re.search(
        rf"^    \[results/{name}\.json\]\n(.*?)\n(?:\n|    \[end\])", source, re.M | re.S
    )
    if table is None:
        raise LookupError(f"bench/{name}.py has no table of rows")
    return f"```text\n{textwrap.dedent(table[1])}\n```"


_MADE: dict[str, Callable[[str], str]] = {"equal time": _table, "said": _said, "bench": _bench}
