"""Reads the code that builds a loader in the user's script."""

from __future__ import annotations

import ast
import os
from typing import Any

from stoker.analysis.model.report import Prepared


def find_prepared(about: dict[str, Any], described: dict[str, Any]) -> Prepared | None:
    """Return what a loader's dataset returns; None if no cache could hold it."""
    if not described.get("example_bytes"):
        return None
    dataset, in_loop = _read_source(about)
    return Prepared(dataset, described["example_bytes"], described["varies"], in_loop)


def _read_source(about: dict[str, Any]) -> tuple[str, bool]:
    """Return the code of a loader's dataset, and whether a loop builds the loader anew."""
    path, line = about.get("place") or ("", 0)
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return "dataset", False
    call = find_call(tree, line)
    if call is None:
        return "dataset", False
    named = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else named.get("dataset")
    # The callers of the function that builds it may be in the loop.
    sites = [site.rpartition(":") for site in about.get("built", ())]
    callers = [int(at) for name, _, at in sites if name == os.path.basename(path)]
    return (
        "dataset" if first is None or isinstance(first, ast.Starred) else ast.unparse(first),
        any(is_in_loop(tree, at) for at in (line, *callers)),
    )


def find_call(tree: ast.Module, line: int) -> ast.Call | None:
    """Return the call of a loader at a line; None if there is none, or if there are several."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).endswith("DataLoader")
    ]
    return calls[0] if len(calls) == 1 else None


def is_in_loop(tree: ast.Module, line: int) -> bool:
    """True if a line is in a loop over numbers, as epochs are, or in a ``while``.

    A loader there is built anew each time, and a cache with it. Loops over anything else may build
    one loader for each split.
    """
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.While)
        or (isinstance(node, ast.For) and "range(" in ast.unparse(node.iter))
    )
