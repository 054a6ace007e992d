"""The course of an analysis as a trace of events, for Perfetto (ui.perfetto.dev) and Chrome.

The format is Chrome's ("Trace Event Format", with complete events); a lane is a thread in it. Of
each rank there are lanes for steps, drains and workers, of the analysis those for its steps and for
the files that it fetches by itself.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stoker.analysis.model.trace import RankTrace, Trace
from stoker.analysis.probe.records import BATCH, END, ERROR, STARTED, Row

# Stands for the analyzer in place of a process id. 0 would be the kernel's idle task.
_ANALYSIS = 1


class Slice(NamedTuple):
    """Something that took a while, in a lane."""

    process: int
    lane: str
    name: str
    began_ns: int
    ended_ns: int
    about: dict[str, Any]


def write_timeline(trace: Trace, path: Path) -> None:
    """Write the course of an analysis as JSON. Times are in us from its begin. Raises OSError."""
    slices = [*_list_analysis(trace)]
    processes = {_ANALYSIS: "analysis"}
    for rank in trace.ranks:
        processes[rank.pid] = f"rank {rank.rank}"
        slices += [*_list_steps(rank), *_list_drains(rank)]
    # A lane's number is its own in the whole file, as a thread's is on a host.
    lanes = sorted({(one.process, one.lane) for one in slices})
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events = [_name(process, 0, "process_name", name) for process, name in processes.items()]
    events += [
        _name(process, number, "thread_name", lane) for (process, lane), number in numbers.items()
    ]
    began_ns = min((one.began_ns for one in slices), default=0)
    # Slices within others come after them.
    for one in sorted(slices, key=lambda one: (one.began_ns, -one.ended_ns)):
        events.append(
            {
                "ph": "X",
                "pid": one.process,
                "tid": numbers[one.process, one.lane],
                "name": one.name,
                "ts": (one.began_ns - began_ns) / 1e3,
                "dur": (one.ended_ns - one.began_ns) / 1e3,
                "args": one.about,
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name(process: int, lane: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": lane, "name": kind, "args": {"name": name}}


def _list_analysis(trace: Trace) -> Iterator[Slice]:
    for (began_ns, text), (ended_ns, _) in itertools.pairwise(trace.said):
        if text:
            yield Slice(_ANALYSIS, "phases", text, began_ns, ended_ns, {})
    for cached, at_ns, readers, reads in trace.fetched:
        name = "from the page cache" if cached else "from storage"
        for files, seconds in reads:
            ended_ns = at_ns + int(1e9 * seconds)
            yield Slice(
                _ANALYSIS, "fetch", name, at_ns, ended_ns, {"files": files, "readers": readers}
            )
            at_ns = ended_ns


def _list_steps(rank: RankTrace) -> Iterator[Slice]:
    """Return the calls of ``next()``, and the steps between them."""
    rows = sorted(rank.course, key=operator.attrgetter("entered_ns"))
    for row, after in itertools.zip_longest(rows, rows[1:]):
        ended_ns = row.left_ns if after is None else min(row.left_ns, after.entered_ns)
        about = {"loader": rank.loader(row.slot)["site"], "epoch": row.epoch, "batch": row.number}
        name = _name_call(row)
        if name:
            yield Slice(rank.pid, "step", name, row.entered_ns, ended_ns, about)
        if row.event == BATCH and after is not None:
            name = "step on a prepared batch" if row.is_replayed else "step"
            yield Slice(rank.pid, "step", name, ended_ns, after.entered_ns, about)


def _name_call(row: Row) -> str:
    names = {BATCH: "wait for a batch", END: "end of an epoch", ERROR: "error", STARTED: "iter()"}
    return "take a prepared batch" if row.is_replayed else names.get(row.event, "")


def _list_drains(rank: RankTrace) -> Iterator[Slice]:
    """Return the drains, and the batches that workers made in them."""
    for name, drains in rank.drains.items():
        for drain in drains:
            if not drain.arrivals_ns:
                continue
            about = {"workers": drain.workers, "batches": len(drain.arrivals_ns)}
            yield Slice(
                rank.pid, "drains", f"drain: {name}", drain.began_ns, drain.arrivals_ns[-1], about
            )
            for made in drain.work:
                read = {"bytes read": made.read_bytes} if made.read_bytes >= 0 else {}
                yield Slice(
                    rank.pid,
                    f"worker {made.worker:>2}",
                    "fetch and prepare a batch",
                    made.started_ns,
                    made.ended_ns,
                    {"drain": name, "examples": made.examples} | read,
                )
