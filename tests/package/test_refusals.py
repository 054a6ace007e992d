"""Combinations of stages and options that are refused: each is one more thing for users to know."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import stoker

REFUSALS = 88
"""A commit that adds or removes an option changes this number, and says by how many."""


def test_refusals_of_combinations_are_counted() -> None:
    source = Path(stoker.__file__).parent
    nodes = [
        node for file in source.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
    ]
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]

    # ``refuse_behind`` raises in the name of those that call it.
    assert named("CombinationError", raised) - 1 + named("refuse_behind", calls) == REFUSALS


def named(name: str, nodes: Sequence[ast.AST | None]) -> int:
    """Return how many of the nodes are calls of a function by this name."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in nodes
    )
