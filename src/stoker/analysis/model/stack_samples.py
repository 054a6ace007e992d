"""Looks at the stacks of the code that prepares: read, named and counted.

A look counts for one piece of work. Its name is the first of these that the stack has:

- the innermost object with ``__call__`` or ``forward``, such as a transform; a function of the
  user's inside a library's object (a ``Lambda``) is named itself;
- the library's function that the user's innermost function calls;
- the native function that a dataset's method calls by itself, or else the user's function.

A lazy image is decoded where it is used first: PIL's decoding is a piece of its own.
"""

from __future__ import annotations

import ast
import functools
import json
import linecache
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stoker.analysis.model.report import Interval, Preparing, PrepWork, StackFrame

# Fewer looks or batches tell nothing: 100 looks alone give intervals of up to 20 percent. Chosen,
# not measured.
_FEWEST_LOOKS, _FEWEST_BATCHES = 100, 8
# Pieces with less of the time are not worth naming; nor parts of the graph that no eye finds.
_SMALLEST, _SMALLEST_SHOWN = 0.03, 0.002
_Z = 1.96  # of 95 %
# Methods of datasets, which pass on what they are asked for.
_DATASET = {"__getitem__", "__getitems__", "__iter__", "__next__"}
_TORCH_DATA = "/torch/utils/data/"
# Objects with a ``__call__`` that only pass on a call.
_DISPATCH = "torch._ops."


class CodeFrame(NamedTuple):
    """A function on a stack."""

    kind: str
    """Module and class of the object, of a ``__call__`` or ``forward``; else empty."""
    name: str
    """The qualified name."""
    path: str
    line: int

    @property
    def function(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def package(self) -> str:
        """The installed package, or module of the standard library; empty for the user's code."""
        for mark in ("/site-packages/", "/dist-packages/"):
            if mark in self.path:
                return _first_part(self.path.rsplit(mark, 1)[1])
        _, mark, rest = self.path.rpartition("/lib/python3.")
        if mark:
            return _first_part(rest.split("/", 1)[-1])
        return "python" if self.path[:1] == "<" or "/<" in self.path else ""


def _first_part(path: str) -> str:
    return path.split("/", 1)[0].removesuffix(".py")


class SampledStack(NamedTuple):
    """A stack, from the fetcher inwards."""

    frames: tuple[CodeFrame, ...]
    native: str
    """The native function that the innermost one called; empty if none."""


SampledBatch = Counter[SampledStack]
"""Looks at the making of a batch, by stack."""


def read_samples(path: Path) -> Iterator[SampledBatch]:
    """Read the batches of one process (``probe.stacks``); a line that was cut off is left out."""
    known: list[SampledStack] = []
    for line in path.read_text().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            return
        if isinstance(found, dict):
            frames = tuple(CodeFrame(*frame) for frame in found["frames"])
            native = found["native"]
            known.append(
                SampledStack(frames, _read_call(frames[-1].path, *native) if native else "")
            )
        else:
            batch: SampledBatch = Counter()
            for number, looks in found:
                batch[known[number]] += looks
            yield batch


@functools.lru_cache(maxsize=4096)
def _read_call(path: str, line: int | None, last: int | None, begin: int, end: int) -> str:
    """Return the name of a call, or the text of an operation, that stands in a source file."""
    if line is None or last is None:
        return ""
    lines = [text.encode() for text in linecache.getlines(path)[line - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    text = b"".join(lines).decode(errors="replace").strip()
    try:
        found = ast.parse(text.lstrip("."), mode="eval").body
    except SyntaxError:
        return ""
    if not isinstance(found, ast.Call):
        return " ".join(text.split())[:40]
    names: list[str] = []
    part: ast.expr = found.func
    while isinstance(part, ast.Attribute):
        names.insert(0, part.attr)
        part = part.value
    # Of a chain of calls, the last one.
    return ".".join([part.id, *names] if isinstance(part, ast.Name) else names[-1:])


def name_work(stack: SampledStack) -> str:
    """Name the piece of work that a stack is part of; see the module."""
    frames = stack.frames
    for frame in frames:
        if frame.package == "PIL" and frame.function == "load":
            return "PIL's decode"
    own = max((n for n, frame in enumerate(frames) if not frame.package), default=-1)
    called = max(
        (n for n, frame in enumerate(frames) if frame.kind and frame.kind[:11] != _DISPATCH),
        default=-1,
    )
    if called >= 0 and (called >= own or not frames[called].package):
        return frames[called].kind.rsplit(".", 1)[-1]
    place = own + 1
    while place < len(frames) and _passes_on(frames[place]):
        place += 1
    if place < len(frames):
        frame = frames[place]
        return "collate" if frame.function == "default_collate" else _name_library(frame)
    last = frames[-1]
    if last.function in _DATASET and stack.native:
        return stack.native
    return _name_library(last) if last.package else last.name


def _passes_on(frame: CodeFrame) -> bool:
    """True of a library's dataset, and of PyTorch's fetcher."""
    if frame.function == "default_collate":
        return False
    of_dataset = "dataset" in (frame.path + frame.name).lower()
    return _TORCH_DATA in frame.path or (frame.function in _DATASET and of_dataset)


def _name_library(frame: CodeFrame) -> str:
    # A private or special method says little without its class.
    name = frame.name if frame.function[:1] == "_" else frame.function
    return f"{frame.package}'s {name}"


def find_preparing(batches: Sequence[SampledBatch]) -> Preparing | None:
    """Return what preparing consists of; None if nothing was sampled."""
    total = sum(sum(batch.values()) for batch in batches)
    if not total:
        return None
    stacks: Counter[SampledStack] = Counter()
    for batch in batches:
        stacks.update(batch)
    work: list[PrepWork] = []
    if total >= _FEWEST_LOOKS and len(batches) >= _FEWEST_BATCHES:
        named: list[Counter[str]] = []
        for batch in batches:
            counts: Counter[str] = Counter()
            for stack, looks in batch.items():
                counts[name_work(stack)] += looks
            named.append(counts)
        names: Counter[str] = Counter()
        for counts in named:
            names.update(counts)
        for name, looks in names.most_common():
            share = looks / total
            if share >= _SMALLEST:
                pairs = [(counts[name], sum(counts.values())) for counts in named]
                work.append(PrepWork(name, share, estimate_share(pairs)))
    text = describe_work(work, total, len(batches))
    return Preparing(total, len(batches), text, work, _grow(stacks))


def estimate_share(batches: Sequence[tuple[int, int]]) -> Interval:
    """Return the 95 % interval of a share, from (looks that saw it, all looks) of each batch.

    It is the wider one of two: of the batches' spread (a ratio's, by batches as clusters; Cochran,
    Sampling Techniques, 3rd ed., section 2.11), and of as many single looks (Wilson 1927).
    """
    seen, total = (sum(counts) for counts in zip(*batches, strict=True))
    share, many = seen / total, len(batches)
    spread = sum((some - share * every) ** 2 for some, every in batches)
    half = _Z * math.sqrt(spread * many / max(1, many - 1)) / total
    middle = (share + _Z**2 / (2 * total)) / (1 + _Z**2 / total)
    inexact = share * (1 - share) / total + _Z**2 / (4 * total**2)
    wide = _Z * math.sqrt(inexact) / (1 + _Z**2 / total)
    return Interval(
        max(0.0, min(share - half, middle - wide)), min(1.0, max(share + half, middle + wide))
    )


def describe_work(work: Sequence[PrepWork], looks: int, batches: int) -> str:
    """Say in a line what preparing consists of."""
    if looks < _FEWEST_LOOKS or batches < _FEWEST_BATCHES:
        return f"too few samples to tell: {looks} in {batches} batches"
    if not work:
        return f"no piece of code takes {_SMALLEST:.0%} of the time"
    said = [
        f"{one.share:.0%} ({100 * one.interval.low:.0f} to {one.interval.high:.0%}) in {one.name}"
        for one in work[:4]
    ]
    return ", ".join(said)


def _grow(stacks: Counter[SampledStack]) -> list[StackFrame]:
    """Return the flame graph: the outermost functions, each with those that it called."""
    total = sum(stacks.values())

    def grow(stacks: list[tuple[SampledStack, int]], depth: int) -> list[StackFrame]:
        parts: dict[tuple[str, str], list[tuple[SampledStack, int]]] = {}
        for stack, looks in stacks:
            if depth < len(stack.frames):
                frame = stack.frames[depth]
                method = f".{frame.function}"
                name = frame.kind.rsplit(".", 1)[-1] + method if frame.kind else frame.name
                label = name, f"{frame.path}:{frame.line}"
            elif depth == len(stack.frames) and stack.native:
                label = stack.native, "native"
            else:
                continue
            parts.setdefault(label, []).append((stack, looks))
        found = []
        for (name, place), part in parts.items():
            share = sum(looks for _, looks in part) / total
            if share >= _SMALLEST_SHOWN:
                found.append(StackFrame(name, place, share, grow(part, depth + 1)))
        return sorted(found, key=lambda frame: -frame.share)

    return grow(list(stacks.items()), 0)
