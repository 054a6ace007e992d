"""Writes the script's loader as a stoker pipeline: code to paste in place of the loader."""

from __future__ import annotations

import ast
import os
from typing import Any, NamedTuple

import msgspec

_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


class Prepared(msgspec.Struct, frozen=True):
    """Examples as the script's dataset returns them."""

    dataset: str
    """The dataset, as the script's code."""
    example_bytes: int
    """The bytes of an example's arrays."""
    varies: bool
    """True if reading an example draws at random, or gives another value each time."""
    in_loop: bool = False
    """True if the script builds the loader in a loop, anew for each turn."""


class Port(msgspec.Struct, frozen=True):
    """The properties of a loader that a pipeline in its place needs, as the script's code."""

    name: str
    """The variable of the loader."""
    batch_size: int
    shuffle: bool
    sharded: bool
    drop_last: bool
    collate: str
    """The collate function; empty for PyTorch's own."""
    cuda: bool


def find_prepared(about: dict[str, Any], described: dict[str, Any]) -> Prepared | None:
    """Return what a loader's dataset returns; None if no cache could hold it."""
    if not described.get("example_bytes"):
        return None
    source = _read_source(about)
    return Prepared(
        source.dataset or "dataset",
        described["example_bytes"],
        described["varies"],
        source.in_loop,
    )


def find_port(about: dict[str, Any], described: dict[str, Any]) -> Port | None:
    """Return a loader's properties; None if no pipeline can do the same."""
    if not described.get("example_bytes") or not about.get("batch_size"):
        return None
    sampler = described["sampler"]
    if sampler not in _SAMPLERS:
        return None
    source = _read_source(about)
    if described["collates"] and not source.collate:
        return None
    sharded = sampler == "DistributedSampler"
    return Port(
        name=source.name or "loader",
        batch_size=about["batch_size"],
        shuffle=described["shuffles"] if sharded else sampler == "RandomSampler",
        sharded=sharded,
        drop_last=described["drop_last"],
        collate=source.collate if described["collates"] else "",
        cuda=described["cuda"],
    )


def write_port(found: Port, dataset: str, workers: int, cache: str) -> str:
    """Return the code of the pipeline, with a cache of a size for the dataset's examples."""
    lines = [f"stoker.from_dataset({dataset})"]
    lines += [".shuffle()"] * found.shuffle + [".shard()"] * found.sharded
    lines.append(f'.cache("{cache}")')
    # As in the loader, the dataset is not called by two threads of a process at once.
    lines.append(f'.workers({workers}, kind="process")' if workers else ".workers(1)")
    batch = [str(found.batch_size), *(["drop_last=True"] * found.drop_last)]
    batch += [f"collate={found.collate}"] if found.collate else []
    lines.append(f".batch({', '.join(batch)})")
    lines.append(f'.to("{"cuda" if found.cuda else "cpu"}")')
    body = "\n".join(f"    {line}" for line in lines)
    return f"import stoker\n\n{found.name} = (\n{body}\n)"


class _Source(NamedTuple):
    """The code of a loader in the script; "" for what is missing."""

    name: str = ""
    dataset: str = ""
    collate: str = ""
    in_loop: bool = False


def _read_source(about: dict[str, Any]) -> _Source:
    path, line = about.get("place") or ("", 0)
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return _Source()
    call = find_call(tree, line)
    if call is None:
        return _Source()
    named = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else named.get("dataset")
    targets = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and node.value is call
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
    ]
    # The callers of the function that builds it may be in the loop.
    sites = [site.rpartition(":") for site in about.get("built", ())]
    callers = [int(at) for name, _, at in sites if name == os.path.basename(path)]
    return _Source(
        targets[0] if targets else "",
        "" if first is None or isinstance(first, ast.Starred) else ast.unparse(first),
        ast.unparse(named["collate_fn"]) if "collate_fn" in named else "",
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
