"""How a script crashed: which of its processes, by what, and the last lines of that one."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from stoker.analysis.probe_record import RankRecord
from stoker.analysis.report import Crash

LINES = 20

# What torchrun prints once a rank has failed, behind everything that the rank printed.
_LAUNCHERS = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] ")
_ROOT_CAUSE = re.compile(r"Root Cause .*?rank\s+: (\d+) .*?exitcode\s+: (-?\d+) ", re.DOTALL)


def crash_of(
    code: int | None, lines: Sequence[str], when: str, ends: Sequence[tuple[RankRecord, str]]
) -> Crash | None:
    """Tell of a crash; None where there was none.

    ``code``: of what was started, None while it runs; ``lines``: what it and all its processes
    printed; ``ends``: ranks that failed, the first one first, each with its error, which is empty
    where it was killed.
    """
    cause = _ROOT_CAUSE.search("\n".join(lines))
    if cause is not None:
        rank = int(cause[1])
        own = next((said for record, said in ends if record.rank == rank and said), None)
        if own is None:
            first = next((at for at, line in enumerate(lines) if _LAUNCHERS.search(line)), 0)
            own = "\n".join(lines[:first])
        return _crash(how_it_ended(int(cause[2])), when, rank, own)
    if ends and (code is None or code == 0 or ends[0][0].about["world_size"] > 1):
        record, said = ends[0]
        how = said.splitlines()[-1] if said else "its process was killed, or left behind"
        rank_or_none = record.rank if record.about["world_size"] > 1 else None
        return _crash(how, when, rank_or_none, said or "\n".join(lines))
    if code is None or code == 0:
        return None
    return _crash(how_it_ended(code), when, None, "\n".join(lines))


def _crash(how: str, when: str, rank: int | None, output: str) -> Crash:
    return Crash(how, when, rank, "\n".join(output.splitlines()[-LINES:]))


def how_it_ended(code: int) -> str:
    """Say what an exit code means."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def headline(crash: Crash) -> str:
    """Say it in a sentence."""
    who = "the script" if crash.rank is None else f"rank {crash.rank} of the script"
    return f"{who} crashed {crash.when}: {crash.how}"


def full_text(crash: Crash) -> str:
    """Say it, and show the last lines."""
    return f"{headline(crash)}. Its last lines:\n{crash.output or '(it printed nothing)'}"
