"""Writes the script's loader as a stoker pipeline: code to paste in place of the loader."""

from __future__ import annotations

import ast
from typing import Any

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
    _, dataset, _ = _read_source(about)
    return Prepared(dataset or "dataset", described["example_bytes"], described["varies"])


def find_port(about: dict[str, Any], described: dict[str, Any]) -> Port | None:
    """Return a loader's properties; None if no pipeline can do the same."""
    if not described.get("example_bytes") or not about.get("batch_size"):
        return None
    sampler = described["sampler"]
    if sampler not in _SAMPLERS:
        return None
    name, _, collate = _read_source(about)
    if described["collates"] and not collate:
        return None
    sharded = sampler == "DistributedSampler"
    return Port(
        name=name or "loader",
        batch_size=about["batch_size"],
        shuffle=described["shuffles"] if sharded else sampler == "RandomSampler",
        sharded=sharded,
        drop_last=described["drop_last"],
        collate=collate if described["collates"] else "",
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


def _read_source(about: dict[str, Any]) -> tuple[str, str, str]:
    """Return the code of name, dataset and collate function in the script; "" for a missing one."""
    path, line = about.get("place") or ("", 0)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return "", "", ""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).endswith("DataLoader")
    ]
    if len(calls) != 1:
        return "", "", ""
    (call,) = calls
    named = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else named.get("dataset")
    dataset = "" if first is None or isinstance(first, ast.Starred) else ast.unparse(first)
    collate = ast.unparse(named["collate_fn"]) if "collate_fn" in named else ""
    targets = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and node.value is call
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
    ]
    return targets[0] if targets else "", dataset, collate
