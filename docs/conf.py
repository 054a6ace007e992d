"""Settings of the documentation site; ``scripts/docs`` builds it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

import stoker

project = "stoker"
author = "The stoker authors"
copyright = "2026, the stoker authors"
version = release = stoker.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# What other builds may leave.
exclude_patterns = ["_build"]
nitpicky = False  # signatures name types of NumPy and torch, whose inventories need the network

html_theme = "furo"
html_title = f"stoker {release}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_dark_style = "a11y-high-contrast-dark"  # furo's own underlines what is imported
html_extra_path = ["llms.txt"]  # beside the pages, as llmstxt.org has it

# The links between headings are those that GitHub makes.
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False


_CELLS = re.split(
    r"^# %% (\S+)\n", (Path(__file__).parent / "api/examples.py").read_text(), flags=re.M
)
_EXAMPLES = dict(zip(_CELLS[1::2], _CELLS[2::2], strict=True))


def _without_overloads(
    self: ModuleAnalyzer, analyze: Callable[[ModuleAnalyzer], None] = ModuleAnalyzer.analyze
) -> None:
    """Show the signature of the function itself: its overloads are for type checkers."""
    analyze(self)
    self.overloads = {}


ModuleAnalyzer.analyze = _without_overloads  # type: ignore[method-assign]


def setup(app: Any) -> None:
    """Add examples; leave out what named tuples say of fields without a docstring; read the
    changelog.
    """

    def add(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        if name in _EXAMPLES:
            code = _EXAMPLES[name].strip().splitlines()
            lines += ["", ".. code-block:: python", "", *(f"   {line}" for line in code), ""]

    def skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
        return True if (inspect.getdoc(obj) or "").startswith("Alias for field number") else None

    def read(app: Any, page: str, source: list[str]) -> None:
        if page == "changelog":
            text = (Path(app.srcdir).parent / "CHANGELOG.md").read_text()
            source[0] = text.replace("](docs/", "](")

    app.connect("autodoc-process-docstring", add, priority=600)  # after napoleon
    app.connect("autodoc-skip-member", skip)
    app.connect("source-read", read)
