"""The text of ``print(pipeline)``: a line for each stage, the place of the echo, the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.engine.checkpoint import PoolSize
from stoker.engine.skip import RAISE
from stoker.engine.work.held_generators import find_generators
from stoker.sources.origin import IndexedSource
from stoker.stages.stage import ChainStage

if TYPE_CHECKING:
    from stoker.chain.chain import Chain


def describe(chain: Chain, pool_size: PoolSize) -> str:
    """Describe a chain, a stage a line, and its pool."""
    source = chain.source
    lines = [f"{source.name}  {source.extent()}"]
    if chain.budget != RAISE:
        lines[0] += f"; skips what fails, at most {chain.budget}"
    lines[0] += _generators_of(source)
    lines += [
        f"  .{stage.name}{stage.note(chain, pool_size)}{_generators_of(stage)}"
        for stage in chain.stages
        if not stage.traits.inside  # the source describes them
    ]
    if not source.yields_batches:
        how = "as many workers as usable cores (seven of each eight), more while they mostly wait"
        if chain.workers is not None:
            how = str(chain.workers)
        lines.append(f"  {how}")
    if chain.awaits_seed:
        lines.append("  seed of rank 0, which ranks tell each other at the first iter()")
    else:
        lines.append(f"  seed {chain.seed}" + (" (drawn)" if chain.is_seed_drawn else ""))
    return "\n".join(lines)


def _generators_of(caller: Any) -> str:
    """Say which generators the user's objects hold, so that they are seeded at each call."""
    found = []
    if isinstance(caller, (IndexedSource, ChainStage)):
        found = find_generators(each.value for each in caller.user_objects())
    return "  seeds " + ", ".join(each.path for each in found) if found else ""
