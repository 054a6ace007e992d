"""The trace of an analysis: its raw observations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.analysis.cold_reads import Reads
from stoker.analysis.model.report import Crash, HostLoad, Keeping, Report
from stoker.analysis.probe.records import Row, WorkRecord
from stoker.basics.resources import usable_cores
from stoker.stats import ProcessTrial, ThreadTrial


@dataclass
class Drain:
    """One drain of the loader in one rank."""

    workers: int
    arrivals_ns: list[int]
    began_ns: int
    cpu_s: float
    """Processor seconds of the training process, from the first batch on."""
    work: list[WorkRecord]
    """Batches that were delivered."""
    made: int = 0
    """Examples that were made, whether or not they were still delivered."""


class Step(NamedTuple):
    """A training step, in seconds."""

    lasted_s: float
    """From asking for its batch to asking for the next one."""
    waited_s: float
    """Of these, until the batch came."""


class Turn(NamedTuple):
    """A while of training on the job's own data, and one on other batches right after it."""

    own: list[Step]
    other: list[Step]


@dataclass
class RankTrace:
    """The observations of one process of the job."""

    pid: int
    rank: int
    about: dict[str, Any]
    slot: int = -1
    """The training loader's."""
    rows: list[Row] = field(default_factory=list)
    """As it is."""
    replayed: list[Row] = field(default_factory=list)
    """From the first prepared batch on."""
    trained: dict[int, list[list[Step]]] = field(default_factory=dict)
    """Training on data in memory, by number of workers."""
    turns: list[Turn] = field(default_factory=list)
    """The job as it is and G once more, by turns."""
    kept_turns: list[Turn] = field(default_factory=list)
    """The job as it is and training on a cache, by turns. Without the job where its data would have
    to be fetched again."""
    described: dict[str, Any] = field(default_factory=dict)
    drains: dict[str, list[Drain]] = field(default_factory=dict)
    """"found", "warm-W" for W workers, "cold"; "partly" and, right after it, "whole"; "kept" of
    examples in a cache."""
    sampled: list[dict[str, int]] = field(default_factory=list)
    """Looks at the code that makes a batch, with the data in memory, by the name of the work."""
    moved: dict[str, Any] = field(default_factory=dict)
    """"seconds" that each transform took for a batch on the "device", by name."""
    opened: list[dict[str, Any]] = field(default_factory=list)
    """Files, with the part that was in the page cache, and connections. ``unread``: the job had
    not read the examples for which the file was opened."""

    @property
    def job(self) -> str:
        """An identity of this process's job: ranks of one job wait for each other."""
        about = self.about
        return about["master"] if about["world_size"] > 1 else f"process {self.pid}"

    @property
    def workers(self) -> int:
        """The training loader's."""
        count: int = self.loader(self.slot)["workers"]
        return count

    def join_changes(self, other: RankTrace) -> None:
        """Add what another start of the rank showed of its loaders' datasets."""
        known = {about["site"]: about for about in self.about["loaders"]}
        for about in other.about["loaders"]:
            mine, found = known.get(about["site"]), about["changes"]
            if mine is not None and found is not None:
                mine["changes"] = sorted({*found, *(mine["changes"] or ())})

    def loader(self, slot: int) -> dict[str, Any]:
        return next(about for about in self.about["loaders"] if about["slot"] == slot)


@dataclass
class Trace:
    """All measurements of an analysis."""

    command: list[str]
    ranks: list[RankTrace] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Files that can be read again as the loader read them."""
    files_examples: int = 0
    """Examples that these files make up."""
    cold_reads: list[Reads] = field(default_factory=list)
    warm_reads: list[Reads] = field(default_factory=list)
    most_reads: list[Reads] = field(default_factory=list)
    """Cold, with a reader a core, where the job has fewer workers."""
    partly_fraction: float | None = None
    """Share of the drained data that was in memory before the last "partly" drain."""
    readers: int = 1
    warm_fraction: float | None = None
    """Share of the drained data that was in memory during the warm drains."""
    cores: int = field(default_factory=usable_cores)
    """Processors that the script may use."""
    host_loads: list[HostLoad] = field(default_factory=list)
    """From the job as it is until P, of each start."""
    starts: int = 0
    batches: int | None = None
    """The number of its training batches, if the script ended by itself."""
    seconds: float = 0.0
    out_of_time: str = ""
    """In which phase the time for the analysis was up; empty if it was enough."""
    stages: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of a pipeline: examples, and seconds of one worker, of each stage in each warm drain."""
    thread_trial: ThreadTrial | None = None
    """Of a pipeline: the speed of threads, by the last warm drain in which they were tried."""
    process_trial: ProcessTrial | None = None
    """Of a pipeline: what its first worker process showed of the user's code."""
    keeping: Keeping | None = None
    report: Report | None = None
    """That of a pipeline in a script, made in the script's own process."""
    echo_after_s: float | None = None
    """Of a pipeline: worker seconds an example from its first random stage on."""
    crash: Crash | None = None
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a phase did not happen: "as-it-is", "G", "P", "S"."""

    @property
    def share_of_cores(self) -> int:
        """The processors of one rank, where all ranks do alike."""
        return max(1, self.cores // max(1, len(self.ranks)))

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


class AnalysisError(Exception):
    """Nothing could be measured; the message says why and what to do."""
