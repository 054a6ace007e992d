"""Shows what a user would write in the script in place of `stoker run`, as a diff."""

from __future__ import annotations

import ast
import difflib
import os
from pathlib import Path

import msgspec

from stoker.analysis.model.report import UNSAFE, LoaderOptions, Report
from stoker.running.plan import merge_options


def show_edits(report: Report) -> str:
    """Return a diff of the code that builds a report's loader, with the options that are advised.

    The options alone if the code cannot be found.
    """
    refused = [each for each in report.actions if each.options and each.safety == UNSAFE]
    safe = [each for each in report.actions if each not in refused]
    options = merge_options(msgspec.structs.replace(report, actions=safe))
    left_out = "".join(
        f"Left out, as it would change the data: {each.title}.\n" for each in refused
    )
    if options == LoaderOptions():
        return left_out or "The report advises no other options of the loader.\n"
    written = {name: str(value) for name, value in msgspec.structs.asdict(options).items() if value}
    more = left_out
    if options.persistent_workers:
        more += (
            "Not where the script changes its dataset between epochs: workers that persist do not "
            "see that; stoker run does.\n"
        )
    path, line = report.loader.place or ("", 0)
    try:
        text = Path(path).read_text(encoding="utf-8")
        call = _find_call(ast.parse(text), line)
    except (OSError, ValueError, SyntaxError):
        call = None
    if call is None or any(word.arg is None for word in call.keywords):
        return f"{report.loader.name}: {options}\n{more}"
    lines = text.splitlines(keepends=True)
    name = os.path.relpath(path)
    changed = _edit(lines, call, written).splitlines(keepends=True)
    return "".join(difflib.unified_diff(lines, changed, name, name)) + more


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


def _edit(lines: list[str], call: ast.Call, options: dict[str, str]) -> str:
    """Return the script with a call's options written."""

    def offset(line: int, column: int) -> int:
        # Columns of the syntax tree count bytes.
        before = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(before)

    text = "".join(lines)
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
        end = offset(call.end_lineno or 0, (call.end_col_offset or 0) - 1)
        if text[last:end].lstrip().startswith(")"):  # of the last value
            last = end
            if call.keywords:  # there may be a comma or a comment behind it
                first = call.keywords[0]
                last, new = offset(first.lineno, first.col_offset), new.removeprefix(", ") + ", "
        edits.append((last, last, new))
    for start, end, value in sorted(edits, reverse=True):
        text = text[:start] + value + text[end:]
    return text
