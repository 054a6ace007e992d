"""Writes the script's loader as a stoker pipeline: code to paste in place of the loader."""

from __future__ import annotations

import ast
from typing import Any

import msgspec

_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


class Port(msgspec.Struct, frozen=True):
    """The properties of a loader that a pipeline in its place needs, as the script's code."""

    name: str
    """The variable of the loader."""
    dataset: str
    example_bytes: int
    """The bytes of an example's arrays, as the dataset returns it."""
    varies: bool
    """True if an example differs in each reading, as with random augmentation."""
    batch_size: int
    shuffle: bool
    sharded: bool
    drop_last: bool
    collate: str
    """The collate function; empty for PyTorch's own."""
    cuda: bool


def find_port(about: dict[str, Any], described: dict[str, Any]) -> Port | None:
    """Return a loader's properties; None if no pipeline can do the same."""
    if not described.get("example_bytes") or not about.get("batch_size"):
        return None
    sampler = described["sampler"]
    if sampler not in _SAMPLERS:
        return None
    name, dataset, collate = _read_source(*about["place"]) if about.get("place") else ("", "", "")
    if described["collates"] and not collate:
        return None
    sharded = sampler == "DistributedSampler"
    return Port(
        name=name or "loader",
        dataset=dataset or "dataset",
        example_bytes=described["example_bytes"],
        varies=described["varies"],
        batch_size=about["batch_size"],
        shuffle=described["shuffles"] if sharded else sampler == "RandomSampler",
        sharded=sharded,
        drop_last=described["drop_last"],
        collate=collate if described["collates"] else "",
        cuda=described["cuda"],
    )


def write_port(found: Port, workers: int, cache: str) -> str:
    """Return the code of the pipeline, with a cache of a size for the dataset's examples."""
    lines = [f"stoker.from_dataset({found.dataset})"]
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


def _read_source(path: str, line: int) -> tuple[str, str, str]:
    """Return the code of name, dataset and collate function in the script; "" for a missing one."""
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
