"""A class that lost a member of the protocol that it stands for is noticed by the type check.

The sources are copied without such members, one of each class at a time: for each protocol that it
stands for one of them, since mypy knows what else a protocol asks for. It has to name every class
that lacks one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "stoker"
PROTOCOLS = {
    "stages/stage.py": ("ChainStage",),
    "engine/stream_stage.py": ("StreamStage",),
    "engine/head_source.py": ("HeadSource",),
    "stages/functions/operation.py": ("Operation",),
    "sources/origin.py": ("Origin", "IndexedSource"),
    "sources/source.py": (
        *("Source", "FetchesMany", "HasSignature", "Labeled", "Identified", "Fingerprinted"),
        *("ReadsFiles", "ReadsBlocks", "ReadsColumns", "ReadsAhead", "Reader"),
        *("GathersRows", "Rows"),
    ),
    "sources/remote/source.py": ("ReadsRanges",),
    "engine/items.py": ("Stream", "PulledStream", "DrivenStream", "HeadStream", "Inputs"),
    "schedule/dealing.py": ("Deal",),
    "schedule/orders/order.py": ("Order",),
}
Class = tuple[Path, str]


@dataclass(frozen=True)
class Member:
    """A member of a class that its protocol asks for, and the lines that it takes."""

    where: Class
    protocol: Class
    name: str
    lines: range


def members_of(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return what a class body defines, by name."""
    found: dict[str, ast.stmt] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            found[each.name] = each
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each
    return found


def classes() -> dict[Class, ast.ClassDef]:
    """Return every class of the package."""
    return {
        (file, node.name): node
        for file in sorted(SOURCES.rglob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def wanted(node: ast.ClassDef) -> set[str]:
    """Return the members that a protocol, or an abstract class, asks for."""
    is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
    return {
        name
        for name, each in members_of(node).items()
        if not name.startswith("_") or name == "__len__"
        if (is_protocol and isinstance(each, ast.FunctionDef))
        or (
            isinstance(each, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(d) for d in each.decorator_list)
        )
    }


def inherited(node: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names of all classes that one inherits from."""
    own = {ast.unparse(base).partition("[")[0] for base in node.bases}
    return own.union(*(inherited(by_name[name], by_name) for name in own & by_name.keys()))


@functools.cache  # not while tests are collected, which every process does
def removable() -> dict[Class, list[Member]]:
    """Return, for each class that stands for a protocol, the members that it must have."""
    known = classes()
    protocols = {
        (SOURCES / file, name): wanted(known[SOURCES / file, name])
        for file, names in PROTOCOLS.items()
        for name in names
    }
    by_name = {name: node for (_, name), node in known.items()}
    found: dict[Class, list[Member]] = {}
    for where, node in known.items():
        own = members_of(node)
        bases = inherited(node, by_name)
        parents = [by_name[base] for base in bases & by_name.keys()]
        given = set().union(*(members_of(parent).keys() - wanted(parent) for parent in parents))
        for protocol, asked in protocols.items():
            stands_for = asked <= own.keys() or protocol[1] in bases
            if where == protocol or not asked or not stands_for or "Protocol" in bases:
                continue
            for name in sorted(asked & own.keys() - given):
                each = own[name]
                decorators = getattr(each, "decorator_list", [])
                first = min([each.lineno, *(d.lineno for d in decorators)])
                lines = range(first, (each.end_lineno or first) + 1)
                found.setdefault(where, []).append(Member(where, protocol, name, lines))
    return found


def rounds() -> list[list[Member]]:
    """Return what is removed together: one member of each class."""
    each = [
        list({member.protocol: member for member in members}.values())
        for where, members in removable().items()
        if where[1] not in itertools.chain(*PROTOCOLS.values())
    ]
    return [
        [members[number] for members in each if number < len(members)]
        for number in range(max(map(len, each)))
    ]


@pytest.mark.full
def test_the_classes_that_stand_for_protocols_are_found() -> None:
    members = removable()
    names = {name for _, name in members}
    stages = {"Shuffle", "Shard", "Take", "Filter", "Map", "CacheStage", "Echo", "Batch", "To"}
    sources = {"FolderSource", "DatasetSource", "ArraySource", "FilesSource", "RemoteFolderSource"}
    foreign = {"IterableSource", "LoaderSource"}
    streams = {"SegmentStream", "FilteredStream", "Prefetcher", "DeviceStream", "IterableHead"}
    assert stages | sources | foreign | streams <= names
    asked = {member.name for member in members[SOURCES / "steps/to.py", "DeviceStream"]}
    assert {"ready_since", "poll", "recompute"} <= asked
    asked = {member.name for member in members[SOURCES / "sources/dataset.py", "DatasetSource"]}
    assert {"fingerprint", "fetch", "path"} <= asked


@pytest.mark.full
def test_a_class_without_a_member_of_its_protocol_fails_the_type_check(tmp_path: Path) -> None:
    for gone in rounds():
        _all_are_missed(gone, tmp_path / "checked", tmp_path / "cache")


def _all_are_missed(gone: list[Member], tmp_path: Path, cache: Path) -> None:
    shutil.rmtree(tmp_path, ignore_errors=True)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file in {member.where[0] for member in gone}:
        lines = file.read_text().splitlines()
        cut = {n for member in gone if member.where[0] == file for n in member.lines}
        kept = [line for n, line in enumerate(lines, 1) if n not in cut]
        (tmp_path / file.relative_to(ROOT)).write_text("\n".join(kept) + "\n")

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "src/stoker"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    for member in gone:
        # An abstract class is told by those that inherit from it, and the member that they lack.
        named = re.compile(rf"\b{member.where[1]}\b|\"{member.name}\"")
        told = [line for line in done.stdout.splitlines() if named.search(line)]
        assert told, f"nothing is said of {member.where[1]} without {member.name}"
