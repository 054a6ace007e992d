"""How a pipeline is drawn: its chain, where it echoes in the papers' words, its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.engine.pool.make import Workers
from stoker.engine.position import Resolved
from stoker.engine.rank_sync import WINDOW_STEPS
from stoker.machine import format_bytes, process_group
from stoker.sources.stream import IterableSource, LoaderSource
from stoker.stages.batch import Batch
from stoker.stages.echo import DEFAULT_POOL_BATCHES, Echo
from stoker.stages.map import Map
from stoker.stages.shard import Shard
from stoker.stages.skip import RAISE, Budget
from stoker.stages.to import To


def chain(
    source: Any,
    stages: Sequence[Any],
    *,
    seed: int,
    drawn: bool,
    workers: Workers | None,
    resolved: dict[int, Resolved],
    budget: Budget,
) -> str:
    """Draw a chain, a stage a line."""
    loader = isinstance(source, LoaderSource)
    follows = any(isinstance(stage, Echo) and stage.follows for stage in stages)
    lines = [f"{source.name}  {_extent(source, follows)}"]
    if budget != RAISE:
        lines[0] += f"; skips what fails, at most {budget}"
    for number, stage in enumerate(stages):
        note = ""
        if isinstance(stage, Echo):
            pool = _pool(stage, stages, resolved, loader)
            note = f"  {insertion_point(stages, number, loader)}; {pool}{_decides(stage)}"
        elif isinstance(stage, Shard):
            note = "  parts of equal length" if not stage.uneven else "  all examples"
            if stage.assumed:
                note = "  one process: there is no process group"
        own = getattr(stage, "budget", None)
        if own is not None:
            note += "  raises" if own == RAISE else f"  skips what fails, at most {own}"
        lines.append(f"  .{stage.name}{note}")
    if not loader:
        how = "as many threads as there are usable cores"
        if workers is not None:
            how = f"{workers.count} {workers.kind} workers" if workers.count else "no workers"
        lines.append(f"  {how}")
    lines.append(f"  seed {seed}" + (" (drawn)" if drawn else ""))
    return "\n".join(lines)


def _decides(echo: Echo) -> str:
    """Say who decides where the factor is not fixed."""
    if not echo.follows:
        return ""
    if echo.record is not None:
        return "; replays a record"
    ranks = process_group()
    if ranks is None or ranks[1] == 1:
        return "; follows the stall, on demand"
    return f"; planned: {ranks[1]} ranks agree every {WINDOW_STEPS} batches"


def _extent(source: Any, follows: bool) -> str:
    if isinstance(source, LoaderSource):
        where = "a thread of its own" if follows else "the consumer's thread"
        return f"read in {where}, as its owner set it up"
    if isinstance(source, IterableSource):
        return "a stream: no length, no state in the middle of an epoch"
    return f"{len(source):,} examples"


def insertion_point(stages: Sequence[Any], at: int, loader: bool) -> str:
    """Name where an echo stands, in the words of the echoing paper (its section 2)."""
    if any(isinstance(stage, To) for stage in stages[:at]):
        return "batch echoing on the device"
    if loader or any(isinstance(stage, Batch) for stage in stages[:at]):
        return "batch echoing"
    if any(isinstance(stage, Map) and stage.random for stage in stages[:at]):
        return "example echoing after augmentation"
    if any(isinstance(stage, Map) and stage.random for stage in stages[at:]):
        return "example echoing before augmentation"
    return "example echoing (nothing is augmented)"


def _batched(stages: Sequence[Any]) -> bool:
    return any(isinstance(stage, Batch) for stage in stages)


def _pool(echo: Echo, stages: Sequence[Any], resolved: dict[int, Resolved], loader: bool) -> str:
    known = resolved.get(echo.position)
    unit = "batches" if loader or _batched(stages[: stages.index(echo)]) else "examples"
    if known is None and echo.record is not None:
        known = Resolved(echo.record.echo(echo.position, echo.name).size)
    if known is not None:
        held = f", {format_bytes(known.size * known.item_bytes)}" if known.item_bytes else ""
        return f"pool of {known.size:,} {unit}{held}"
    if echo.pool is not None:
        return f"pool of {echo.pool:,} {unit}"
    if echo.pool_bytes is not None:
        return f"pool of {format_bytes(echo.pool_bytes)}"
    unit = "batches" if loader or _batched(stages) else "examples"
    return f"pool of {DEFAULT_POOL_BATCHES} {unit}, at most 10 % of usable memory"
