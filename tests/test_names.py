"""One name, one meaning: classes of the package are named once."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "stoker"


def test_a_class_name_occurs_once() -> None:
    names = Counter(
        node.name
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1] == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    public = ast.parse((SOURCES / "__init__.py").read_text())
    (exported,) = (
        ast.literal_eval(node.value)
        for node in public.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    modules = {path.stem for path in SOURCES.iterdir()} - {
        "collate",
        "images",
        "testing",
    }  # meant so
    assert modules.isdisjoint(exported)


def test_a_test_file_name_occurs_once() -> None:
    names = Counter(file.name for file in SOURCES.parents[1].glob("tests/**/test_*.py"))
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1] == []
