"""The phases of an analysis: what the script is made to do, and when."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker import machine
from stoker.analysis import reading
from stoker.analysis.launching import Started
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row, Watched, Work

_POLL_S = 0.2
_MOST_STARTS = 3
_FEWEST = 12  # batches that a figure wants
_GRACE = 0.1  # of the budget, for a script to end after it was told to
_GRACE_S = 2.0, 30.0  # at least, at most
_EVERYTHING = 1 << 40
PREFIX = "stoker-analysis-"

Say = Callable[[str], None]


@dataclass
class Drain:
    """One drain of the loader in one rank."""

    workers: int
    arrivals_ns: list[int]
    began_ns: int
    cpu_s: float
    """Of the training process."""
    ended: str
    error: str | None
    work: list[Work]
    """Batches that were delivered."""
    made: int = 0
    """Examples that were made, those that were not delivered any more included."""


@dataclass
class RankRecord:
    """All that is known of one process of the job."""

    pid: int
    rank: int
    about: dict[str, Any]
    slot: int = -1
    """The training loader's."""
    rows: list[Row] = field(default_factory=list)
    """As it is."""
    replayed: list[Row] = field(default_factory=list)
    """From the moment on that prepared batches were handed over."""
    worker_pids: dict[int, list[list[int]]] = field(default_factory=dict)
    """By loader, then by epoch."""
    work: dict[int, list[Work]] = field(default_factory=dict)
    """As it is, by worker's pid."""
    described: dict[str, Any] = field(default_factory=dict)
    drains: dict[str, list[Drain]] = field(default_factory=dict)
    """"found", "warm-W" for W workers, "cold"."""
    opened: list[dict[str, Any]] = field(default_factory=list)
    """Files, with the part that lay in the page cache, and connections."""
    read_before_look: bool = True
    """Whether the job had run before that part was looked at."""

    def loader(self, slot: int) -> dict[str, Any]:
        """Return what is known of a loader."""
        return next(about for about in self.about["loaders"] if about["slot"] == slot)


@dataclass
class Record:
    """Everything that an analysis measured."""

    command: list[str]
    ranks: list[RankRecord] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Files that can be read again as the loader read them."""
    files_examples: int = 0
    """Examples that these files make up."""
    cold_reads: list[reading.Reads] = field(default_factory=list)
    warm_reads: list[reading.Reads] = field(default_factory=list)
    readers: int = 1
    warm_fraction: float | None = None
    """Share of the drained data that was in memory during the warm drains."""
    cold_fraction: float | None = None
    """Share of it that still was before the cold drains."""
    starts: int = 0
    seconds: float = 0.0
    stages: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of a pipeline: examples, and seconds of one worker, of each stage in each warm drain."""
    after_s: dict[str, float] | None = None
    """Of a pipeline: worker seconds an example behind each place of an echo."""
    notes: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a phase did not happen: "as-it-is", "G", "P", "S"."""


class Stopped(Exception):
    """The script, or the time for the analysis, came to an end during a phase."""


class AnalysisError(Exception):
    """Nothing could be measured; the text says why and what to do."""


def analyzed(command: Sequence[str], *, budget_s: float, loader: str | None, say: Say) -> Record:
    """Run a script through the phases. Raises AnalysisError, OSError, KeyboardInterrupt.

    Starts it once where it lives long enough, at most three times else. Whatever happens, all
    its processes have ended when this returns.
    """
    began = time.monotonic()
    record = Record(list(command))
    conductor = _Conductor(record, began + budget_s, budget_s, loader, say)
    with _folder() as folder:
        while record.starts < _MOST_STARTS and conductor.wants():
            before = conductor.done.copy()
            conductor.run(folder / f"start-{record.starts}")
            if conductor.done == before or conductor.over():
                break
    record.seconds = time.monotonic() - began
    return record


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for the run, locked while the analyzer lives; sweep those of dead ones."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(PREFIX + "*"):
        with contextlib.suppress(OSError), open(left / "alive", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with open(folder / "alive", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Conductor:
    """Leads one analysis over one or several starts of the script."""

    def __init__(
        self, record: Record, deadline: float, budget_s: float, loader: str | None, say: Say
    ) -> None:
        self.record = record
        self.done: set[str] = set()  # of "as-it-is", "G", "drains"
        self._deadline = deadline
        self._budget_s = budget_s
        self._unit_s = min(4.0, budget_s / 75)
        self._patience_s = budget_s / 3
        self._wanted = loader
        self._say = say
        self._site: str | None = None
        self._watched: dict[int, Watched] = {}
        self._ranks: dict[int, RankRecord] = {}

    def wants(self) -> bool:
        """Whether a phase is missing."""
        return not {"as-it-is", "G", "drains"} <= self.done

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def run(self, folder: Path) -> None:
        """Start the script once and go as far as it goes."""
        folder.mkdir()
        os.symlink("../alive", folder / "alive")
        record = self.record
        record.starts += 1
        self._folder, self._ranks = folder, {}
        if self._site is not None:
            take_at = 0 if "G" in self.done else records.NEVER
            plan = {"site": self._site, "replay_at": 0, "take_at": take_at}
            records.write_json(str(folder / "plan.json"), plan)
        self._say(f"starting the script ({_ordinal(record.starts)} start)")
        self._started = Started(record.command, folder)
        try:
            with contextlib.suppress(Stopped):
                self._phases()
        finally:
            self._started.stop()
            self._collect()
            for watched in self._watched.values():
                watched.close()
            self._watched.clear()

    def _phases(self) -> None:
        if "as-it-is" not in self.done:
            self._as_it_is()
        if "G" not in self.done:
            self._replay()
        self._drains()
        self._finish()

    # As it is

    def _as_it_is(self) -> None:
        self._say("as it is: waiting for the first batch")
        self._until(lambda: any(r.about["loaders"] for r in self._ranks.values()), "batch")
        self._say("as it is: measuring the job, left alone")
        began = time.monotonic()

        def enough() -> bool:
            patient = time.monotonic() - began < self._patience_s
            return bool(self._ranks) and all(
                self._enough(rank, patient) for rank in self._ranks.values()
            )

        try:
            self._until(enough, "as-it-is")
        finally:
            self._choose()
            if self._site is not None:
                self.done.add("as-it-is")

    def _enough(self, rank: RankRecord, patient: bool) -> bool:
        rows = self._watched[rank.pid].rows()
        slot = self._chosen(rank, rows)
        if slot is None:
            return False
        batches = [row for row in rows if row.slot == slot and row.kind & 15 == records.BATCH]
        if patient and self._wanted is None and not batches[0].kind & records.TRAINS:
            return False
        skipped = 2 * max(1, rank.loader(slot)["workers"])
        if len(batches) <= skipped + (3 if not patient else _FEWEST):
            return False
        elapsed_s = (batches[-1].left_ns - batches[skipped].left_ns) / 1e9
        return elapsed_s > 1.5 * self._unit_s or not patient

    def _chosen(self, rank: RankRecord, rows: list[Row]) -> int | None:
        """Return the training loader's slot: most batches with gradients on, else most batches."""
        counts: dict[int, list[int]] = {}
        for row in rows:
            if row.kind & 15 == records.BATCH:
                count = counts.setdefault(row.slot, [0, 0])
                count[0] += bool(row.kind & records.TRAINS)
                count[1] += 1
        if self._wanted is not None:
            counts = {s: c for s, c in counts.items() if self._wanted in rank.loader(s)["site"]}
        return max(counts, key=lambda slot: (counts[slot], -slot)) if counts else None

    def _choose(self) -> None:
        for rank in self._ranks.values():
            rank.rows = list(self._watched[rank.pid].rows())
            slot = self._chosen(rank, rank.rows)
            if slot is not None:
                rank.slot = slot
                self._site = rank.loader(slot)["site"]
        if self._site is not None:
            self.record.ranks = sorted(
                (r for r in self._ranks.values() if r.slot >= 0), key=lambda r: r.rank
            )

    # G

    def _replay(self) -> None:
        self._say("G: handing prepared batches over again and again")
        self._at("replay_at")
        began = time.monotonic()

        def enough() -> bool:
            return all(
                _lasted(self._replayed(rank), 1.5 * self._unit_s, began + self._patience_s)
                for rank in self._paced()
            )

        try:
            self._until(lambda: bool(self._paced()) and enough(), "G")
        finally:
            for rank in self._paced():
                rows = self._replayed(rank)
                if len(rows) > 4:
                    every = self._watched[rank.pid].rows()
                    kept = self._kept(rank)
                    kept.replayed = every[every.index(rows[0]) :]
                    kept.slot = rank.slot
                    self.done.add("G")

    def _replayed(self, rank: RankRecord) -> list[Row]:
        return [
            row
            for row in self._watched[rank.pid].rows()
            if row.slot == rank.slot and (row.kind & records.REPLAYED or row.kind & 15 == 4)
        ]

    def _paced(self) -> list[RankRecord]:
        """Return the ranks of this start that iterate the training loader."""
        for rank in self._ranks.values():
            for about in rank.about["loaders"]:
                if about["site"] == self._site:
                    rank.slot = about["slot"]
        return [rank for rank in self._ranks.values() if rank.slot >= 0]

    def _kept(self, rank: RankRecord) -> RankRecord:
        """Return the record of the same rank from the first start."""
        for known in self.record.ranks:
            if known.rank == rank.rank:
                return known
        return rank

    def _at(self, what: str) -> None:
        """Have all ranks switch at the same step, one that none of them can have reached yet."""
        now = {rank.pid: self._watched[rank.pid].rows() for rank in self._paced()}
        ahead = 3
        for rank in self._paced():
            rows = [row for row in now[rank.pid] if row.slot == rank.slot][-50:]
            if len(rows) > 1:
                each_s = (rows[-1].left_ns - rows[0].left_ns) / (len(rows) - 1) / 1e9
                ahead = max(ahead, int(0.5 / max(each_s, 1e-6)))
        counts: dict[str, int] = {}
        for rank in self._paced():
            for row in now[rank.pid]:
                site = rank.loader(row.slot)["site"]
                counts[site] = max(counts.get(site, 0), row.number)
        for rank in self._paced():
            for about in rank.about["loaders"]:
                chosen = about["slot"] == rank.slot
                trained = any(
                    row.slot == about["slot"] and row.kind & records.TRAINS
                    for row in now[rank.pid][-1000:]
                )
                if chosen or (what == "replay_at" and trained):
                    place = 8 + 2 * about["slot"] + (what == "take_at")
                    step = counts.get(about["site"], 0) + ahead
                    self._watched[rank.pid].header[place] = step

    # P, S, C

    def _drains(self) -> None:
        record = self.record
        self._say("P: reading the loader with no training step in between")
        if not self._planned_takeover():
            self._until(lambda: bool(self._paced()), "P")
            self._at("take_at")
        self._until(lambda: bool(self._paced()), "P")
        ranks = self._paced()
        self._number = -1
        for rank, answer in zip(ranks, self._ask({"do": "describe"}), strict=True):
            self._kept(rank).described = answer
        width = ranks[0].loader(ranks[0].slot)["workers"]
        unit_s = self._unit_s
        self._drain("found", width, 1.25 * unit_s, fresh=True)
        self._find_files(ranks)
        counts = _worker_counts(width, max(1, machine.usable_cores() // len(ranks)))
        first = self._kept(ranks[0]).drains["found"][-1]
        startup_s = (first.arrivals_ns[0] - first.began_ns) / 1e9 if first.arrivals_ns else 0.0
        rounds = 1 if startup_s > 2 * unit_s else 2  # workers that import a lot, anew each time
        self._warm()
        for again in range(rounds):
            for count in counts:
                share = 1.0 if count == width else 0.75
                self._say(f"P: data in memory, {_workers(count)}, round {again + 1} of {rounds}")
                self._drain(f"warm-{count}", count, share * unit_s)
        self.done.add("drains")
        record.warm_fraction = self._resident()
        self._cold(width, len(ranks))

    def _planned_takeover(self) -> bool:
        plan = records.read_json(str(self._folder / "plan.json")) or {}
        return plan.get("take_at") == 0

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all ranks at once and wait for their answers."""
        self._number += 1
        ranks = self._paced()
        for rank in ranks:
            base = self._watched[rank.pid].base
            records.write_json(f"{base}.command.{self._number}", command)
        answers: dict[int, dict[str, Any]] = {}

        def answered() -> bool:
            for rank in ranks:
                if rank.pid not in answers:
                    base = self._watched[rank.pid].base
                    answer = records.read_json(f"{base}.answer.{self._number}")
                    if answer is not None:
                        answers[rank.pid] = answer
            return len(answers) == len(ranks)

        self._until(answered, "P", 0.02)
        return [answers[rank.pid] for rank in ranks]

    def _drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        tag = str(self._folder / f"drain-{self._number}")
        command = {
            "do": "drain",
            "tag": tag,
            "workers": workers,
            "seconds": seconds,
            "longest": max(seconds * 3, self._patience_s / 4),
            "least": 4 * max(1, workers) + 8,
            "most": _EVERYTHING,
            "fresh": fresh,
            "once": once,
            "hears": fresh,
        }
        answers = self._ask(command)
        for rank, answer in zip(self._paced(), answers, strict=True):
            if "arrivals_ns" not in answer:
                self._note(f"{name}: the loader could not be read again: {answer['error']}")
                raise Stopped
            if answer["error"]:
                self._note(f"{name}: the loader ended with {answer['error']}")
            own = f"{Path(tag).name}-{rank.pid}-*"
            work: list[Work] = []
            for path in self._folder.glob(own + ".work"):
                work.extend(records.read_work(str(path)))
            drain = Drain(
                workers,
                answer["arrivals_ns"],
                answer["began_ns"],
                answer["cpu_s"],
                answer["ended"],
                answer["error"],
                [w for w in work if w.ended_ns <= (answer["arrivals_ns"] or [0])[-1]],
                sum(w.examples for w in work),
            )
            self._kept(rank).drains.setdefault(name, []).append(drain)
            if fresh:
                for path in self._folder.glob(own + ".opened"):
                    lines = path.read_text().splitlines()
                    self._kept(rank).opened += [json.loads(line) for line in lines]

    def _find_files(self, ranks: list[RankRecord]) -> None:
        """Tell files that are read whole, one or a few an example, from everything else."""
        record = self.record
        opened: dict[str, dict[str, Any]] = {}
        sockets = set()
        examples = read = 0
        for rank in ranks:
            kept = self._kept(rank)
            for line in kept.opened:
                if line["kind"] == "socket":
                    sockets.add(line["name"])
                else:
                    opened[line["name"]] = line
            work = kept.drains["found"][-1].work
            examples += kept.drains["found"][-1].made
            read += sum(max(0, w.read_bytes) for w in work)
        files = [line for line in opened.values() if line["kind"] == "file"]
        total = sum(line["bytes"] for line in files)
        whole = bool(files) and len(files) >= 0.2 * examples and 0.5 * total <= read <= 1.5 * total
        if whole:
            record.files = [line["name"] for line in files]
            record.files_examples = examples
            self.touched = record.files
            return
        self.touched = [line["name"] for line in opened.values()]
        if sockets:
            why = f"the data comes over the network ({', '.join(sorted(sockets)[:3])})"
        elif not opened:
            why = "no file was seen to be opened by the loader: its data is in memory, made up, \
or read by a library that opens files by itself"
        elif any(line["kind"] == "mapped" for line in opened.values()):
            why = "the data is mapped into memory from few large files"
        else:
            why = "examples are parts of few large files"
        record.reasons["files"] = why

    def _warm(self) -> None:
        with contextlib.suppress(OSError):
            if self.record.files and (reading.resident_fraction(self.touched) or 1.0) < 1.0:
                reading.read_files(self.touched, 4, self._patience_s / 4)

    def _resident(self) -> float | None:
        if not self.touched:
            return None
        with contextlib.suppress(OSError):
            return reading.resident_fraction(self.touched)
        return None

    def _cold(self, width: int, ranks: int) -> None:
        record = self.record
        if not self.touched:
            record.reasons["S"] = record.reasons.get("files", "no file was seen")
            return
        unit_s = self._unit_s
        for again in range(2):
            self._say(f"S: dropping the loader's files from the page cache, round {again + 1} of 2")
            try:
                reading.drop_files(self.touched)
                left = reading.resident_fraction(self.touched)
            except OSError as error:
                record.reasons["S"] = f"the loader's files cannot be read: {error}"
                return
            if left is None or left > 0.05:
                share = "an unknown part" if left is None else f"{left:.0%}"
                record.reasons["S"] = (
                    f"{share} of the data stayed in the page cache after it was asked to leave "
                    "(files that are mapped, or belong to somebody else)"
                )
                return
            record.cold_fraction = left
            self._say(f"S: reading the loader with nothing in memory, round {again + 1} of 2")
            self._drain("cold", width, 2 * unit_s, once=True)
            if record.files:
                record.readers = max(1, width) * ranks
                self._say(f"S, C: reading {len(record.files):,} files, cold and warm")
                reading.drop_files(record.files)
                reads = reading.read_files(record.files, record.readers, 2 * unit_s)
                record.cold_reads.append(reads)
                warm = record.files[: sum(reads.files)]
                record.warm_reads.append(reading.read_files(warm, record.readers, unit_s))

    # The end

    def _finish(self) -> None:
        self._say("ending the script")
        for rank in self._paced():
            base = self._watched[rank.pid].base
            records.write_json(f"{base}.command.{self._number + 1}", {"do": "end"})
        until = time.monotonic() + min(_GRACE_S[1], max(_GRACE_S[0], _GRACE * self._budget_s))
        while self._started.exit_code is None and time.monotonic() < until:
            self._started.note_processes()
            time.sleep(0.05)
        if self._started.exit_code is None:
            self._note(
                "the script went on after its end was asked for (it catches SystemExit, or does "
                "something long at its end), and was ended by force"
            )

    def _until(self, condition: Callable[[], bool], phase: str, poll_s: float = _POLL_S) -> None:
        """Wait for a condition. Raises Stopped when the script or the time ends first."""
        noted = 0.0
        while True:
            self._meet()
            if condition():
                return
            if time.monotonic() - noted > 1.0:
                self._started.note_processes()
                noted = time.monotonic()
            if self._started.exit_code is not None:
                self._meet()
                if not condition():
                    self._why(phase)
                    raise Stopped
                return
            if any(self._folder.glob("failed-*")):
                self._why(phase)
                raise Stopped
            if self.over():
                self.record.reasons.setdefault(phase, "the time for the analysis was up")
                raise Stopped
            time.sleep(poll_s)

    def _why(self, phase: str) -> None:
        reasons = self.record.reasons
        for path in self._folder.glob("failed-*"):
            self._note(f"the probe took itself out: {path.read_text()}")
            reasons.setdefault(phase, f"the probe failed: {path.read_text()}")
        code = self._started.exit_code
        if code is not None:
            how = "ended by itself" if code == 0 else f"ended with exit code {code}"
            reasons[phase] = f"the script {how} before the phase was over"
            if code != 0:
                reasons["output"] = self._started.output()

    def _meet(self) -> None:
        """Take note of processes that iterate loaders."""
        for path in self._folder.glob("process-*.json"):
            about = records.read_json(str(path))
            if about is None:
                continue
            pid = about["pid"]
            if pid not in self._watched:
                self._watched[pid] = Watched(str(path.with_suffix(".rows")))
                self._ranks[pid] = RankRecord(pid, about["rank"], about)
            self._ranks[pid].about = about
            self._ranks[pid].rank = about["rank"]

    def _collect(self) -> None:
        """Read what workers wrote while the job was left alone."""
        if self.record.starts != 1:
            return
        work: dict[int, list[Work]] = {}
        for path in self._folder.glob("work-*.work"):
            rows = list(records.read_work(str(path)))
            if rows:
                work[rows[0].pid] = rows
        for rank in self.record.ranks:
            path = self._folder / f"process-{rank.pid}.workers"
            with contextlib.suppress(FileNotFoundError):
                for line in path.read_text().splitlines():
                    slot, _, *pids = map(int, line.split())
                    rank.worker_pids.setdefault(slot, []).append(pids)
                    rank.work |= {pid: work[pid] for pid in pids if pid in work}

    def _note(self, text: str) -> None:
        if text not in self.record.notes:
            self.record.notes.append(text)


def _lasted(rows: list[Row], seconds: float, patience: float) -> bool:
    fewest = _FEWEST if time.monotonic() < patience else 6
    return len(rows) > fewest and (
        (rows[-1].left_ns - rows[0].left_ns) / 1e9 > seconds or time.monotonic() > patience
    )


def _worker_counts(width: int, cores: int) -> list[int]:
    """Return the worker counts of the scaling curve: the job's own first, at most five."""
    counts = [width, 1, cores]
    if cores > 4:
        counts += [round(cores**0.5), round(cores**0.75)]
    return list(dict.fromkeys(counts))


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}[number]
