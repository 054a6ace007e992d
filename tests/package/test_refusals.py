"""Combinations of stages and options that are refused: each is one more thing for users to know."""

from __future__ import annotations

import ast
from pathlib import Path

import stoker

REFUSALS = 92
"""A commit that adds or removes an option changes this number, and says by how many."""


def test_refusals_of_combinations_are_counted() -> None:
    source = Path(stoker.__file__).parent
    raised = [
        node.exc.func.id
        for file in source.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    ]

    assert raised.count("CombinationError") == REFUSALS
