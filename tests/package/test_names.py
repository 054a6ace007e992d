"""What the sources say: one meaning a name, prose names what there is, refusals are counted."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "stoker"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w./-]+\.(py|md|toml|json)|[\w./-]+/")


REFUSALS = 88
"""Combinations of stages and options that are refused: each is one more thing for users to know.

A commit that adds or removes an option changes this number, and says by how many.
"""


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Return the nodes of a file's code."""
    return list(ast.walk(ast.parse(file.read_text())))


def test_a_class_name_occurs_once() -> None:
    names = Counter(
        node.name
        for file in SOURCES.rglob("*.py")
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1] == []


def test_a_test_file_name_occurs_once() -> None:
    names = Counter(file.name for file in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_architecture_page_names_what_there_is() -> None:
    prose = _BLOCK.sub("", ARCHITECTURE.read_text())
    prose = prose.partition("\n## Libraries that were tried and not taken")[0]
    quoted = set(_QUOTED.findall(prose))
    assert len(quoted) > 100
    paths = {text for text in quoted if _PATH.fullmatch(text)}
    places = (SOURCES, ROOT, ROOT / "docs", ROOT / "experiments")
    assert {path for path in paths if not any((place / path).exists() for place in places)} == set()
    files = [
        file for folder in ("src", "native", "tests") for file in (ROOT / folder).rglob("*.py")
    ]
    texts = [file.read_text() for file in (*files, ROOT / "pyproject.toml")]
    known = {word for text in texts for word in re.findall(r"\w+", text)}
    assert {text for text in quoted - paths if not known.issuperset(re.findall(r"\w+", text))} == (
        set()
    )


def names_in(file: Path) -> set[str]:
    """Return the names that a file's code uses."""
    nodes = nodes_of(file)
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return used | {
        each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names
    }


def test_a_stage_is_named_in_its_room_and_the_pipeline_alone() -> None:
    used = {file: names_in(file) for file in SOURCES.rglob("*.py")}
    room = SOURCES / "stages"
    for_all = {
        "stage.py",
        "composite.py",
        "__init__.py",
        "operation.py",
    }
    stages = [file for file in room.rglob("*.py") if file.name not in for_all]
    assert len(stages) > 15
    makers = {SOURCES / name for name in ("pipeline.py", "constructors.py", "feeds/client.py")}
    # These two choose what to advise by what stands in a chain; the third makes a stage.
    asking = {"running/loaders.py", "analysis/pipelines.py", "chain/inspection/cache_place.py"}
    may = makers | {SOURCES / name for name in asking}
    for stage in stages:
        body = ast.parse(stage.read_text()).body
        classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
        named = {file for file in used if used[file] & classes} - may
        assert all(room in file.parents for file in named), (stage.name, named)


def test_refusals_of_combinations_are_counted() -> None:
    nodes = [node for file in SOURCES.rglob("*.py") for node in nodes_of(file)]
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    # ``refuse_behind`` raises in the name of those that call it.
    assert calls("CombinationError", raised) - 1 + calls("refuse_behind", nodes) == REFUSALS


def calls(name: str, nodes: Sequence[ast.AST | None]) -> int:
    """Return how many of the nodes are calls of a function by this name."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in nodes
    )
