"""Shows what a user would write in the script in place of `stoker run`, as a diff."""

from __future__ import annotations

import ast
import difflib
import os
from pathlib import Path

from stoker.basics.resources import format_bytes
from stoker.running.loaders import LoaderChoice


def show_edits(place: tuple[str, int], choice: LoaderChoice) -> str:
    """Return a diff of the code that builds a loader; the options alone if it cannot be found."""
    path, line = place
    options = _list_options(choice)
    more = f"{choice.why}\n" if choice.why else ""
    if options.get("persistent_workers") == "True" or "dataset" in options:
        more += (
            "Not where the script changes its dataset between epochs: workers that persist, and a "
            "cache, do not see that; stoker run does.\n"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(text)
        call = _find_call(tree, line)
    except (OSError, ValueError, SyntaxError):
        call = None
    if call is None or any(word.arg is None for word in call.keywords):
        written = ", ".join(f"{name}={value}" for name, value in options.items())
        return f"{os.path.basename(path)}:{line}: DataLoader(..., {written})\n{more}"
    lines = text.splitlines(keepends=True)
    changed = _edit(lines, call, options)
    if "dataset" in options:
        changed = _import_stoker(changed)
        if _is_in_loop(tree, line):
            more += (
                "Build stoker.cached(...) in front of the loop: each one begins with no examples.\n"
            )
    name = os.path.relpath(path)
    difference = difflib.unified_diff(lines, changed.splitlines(keepends=True), name, name)
    return "".join(difference) + more


def _find_call(tree: ast.Module, line: int) -> ast.Call | None:
    """Return the call of a loader at a line; None if there is none, or if there are several."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).endswith("DataLoader")
    ]
    return calls[0] if len(calls) == 1 else None


def _is_in_loop(tree: ast.Module, line: int) -> bool:
    """True if a line is in a loop over numbers, as epochs are, or in a ``while``.

    Loops over anything else may build one loader for each split.
    """
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.While)
        or (isinstance(node, ast.For) and "range(" in ast.unparse(node.iter))
    )


def _list_options(choice: LoaderChoice) -> dict[str, str]:
    own, new = choice.own, choice.new
    pairs = (
        ("num_workers", own.workers, new.workers),
        ("persistent_workers", own.persistent, new.persistent),
    )
    found = {name: str(value) for name, before, value in pairs if value != before}
    if new.cache_bytes:
        found["dataset"] = f'stoker.cached(..., "{format_bytes(new.cache_bytes)}")'
    return found


def _import_stoker(text: str) -> str:
    """Return the script with an import in front of its first one."""
    lines = text.splitlines(keepends=True)
    imports = [
        node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    own = [node for node in imports if getattr(node, "module", "") != "__future__"]
    if own and not any(name.name == "stoker" for node in own for name in node.names):
        lines.insert(own[0].lineno - 1, "import stoker\n")
    return "".join(lines)


def _edit(lines: list[str], call: ast.Call, options: dict[str, str]) -> str:
    """Return the script with a call's options written."""

    def offset(line: int, column: int) -> int:
        # Columns of the syntax tree count bytes.
        before = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(before)

    text = "".join(lines)
    options = dict(options)
    cached = options.pop("dataset", "")
    given = {word.arg: word.value for word in call.keywords}
    spans = [
        (offset(value.lineno, value.col_offset), offset(value.end_lineno, value.end_col_offset))
        for value in given.values()
        if value.end_lineno is not None and value.end_col_offset is not None
    ]
    edits = [
        (start, end, options[str(name)])
        for name, (start, end) in zip(given, spans, strict=True)
        if name in options
    ]
    new = "".join(f", {name}={value}" for name, value in options.items() if name not in given)
    if new:
        last = max(
            (
                offset(node.end_lineno, node.end_col_offset)
                for node in [*call.args, *given.values()]
                if node.end_lineno is not None and node.end_col_offset is not None
            ),
            default=0,
        )
        edits.append((last, last, new))
    dataset = call.args[0] if call.args else given.get("dataset")
    if cached and dataset is not None and dataset.end_lineno and dataset.end_col_offset:
        start = offset(dataset.lineno, dataset.col_offset)
        end = offset(dataset.end_lineno, dataset.end_col_offset)
        before, after = cached.split("...")
        edits += [(start, start, before), (end, end, after)]
    for start, end, value in sorted(edits, reverse=True):
        text = text[:start] + value + text[end:]
    return text
