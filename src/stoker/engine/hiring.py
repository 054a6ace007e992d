"""Who does the work of a run: threads, processes, or nobody but the consumer."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.engine.crew import Crew, Tempo
from stoker.engine.plan import Work


@dataclass
class Workers:
    """How work is shared out: ``.workers(n, kind)``."""

    count: int
    kind: str


def hired(
    workers: Workers, host: list[Work], tempo: Tempo, *, seed: int, epoch: int, rank: int
) -> Crew:
    """Return the crew for the segments on the host."""
    depths = max(1, len(host))
    if workers.count == 0:
        return Crew(0, depths, tempo)
    if workers.kind == "process":
        from stoker.engine import processes  # multiprocessing takes its time to import

        remotes = processes.start(workers.count, host, seed, epoch, rank)
        return Crew(len(remotes), depths, tempo, remotes)
    return Crew(workers.count, depths, tempo)
