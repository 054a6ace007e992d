"""P, S and C: the loader without training, its files without the loader; warm and cold."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker import machine
from stoker.analysis import measuring, reading
from stoker.analysis.probe import records
from stoker.analysis.probe.records import WorkRecord
from stoker.analysis.probe_record import Drain, ProbeRecord
from stoker.analysis.session import Session, Stopped
from stoker.analysis.waiting import more_workers

_EVERYTHING = 1 << 40
_COLD = 0.05  # of the data may stay in the page cache
_ROUNDS = 2
_SPARE = 1.5  # times as fast as preparing, where storage is to keep up
_FEWEST, _MOST_STEPS = 12, 5000  # steps of training on data in memory


class Drains:
    """The drains of one start of the script."""

    def __init__(
        self,
        session: Session,
        record: ProbeRecord,
        unit_s: float,
        longest_s: float,
        warm_s: float,
        life: int | None,
        say: Callable[[str], None],
    ) -> None:
        """``unit_s``: how long a drain takes; ``longest_s``: what a slow one may take.

        After ``warm_s`` of warm drains no further number of workers is tried. ``life``: batches
        after which the script ends by itself, where that was seen.
        """
        self._session, self._record, self._say = session, record, say
        self._unit_s, self._longest_s, self._life = unit_s, longest_s, life
        self._warm_until = time.monotonic() + warm_s
        self._ranks = session.paced()
        self._width: int = self._ranks[0].loader(self._ranks[0].slot)["workers"]
        self._touched: list[str] = []  # all files that the loader was seen to read
        self._count = 0

    def warm(self) -> None:
        """Drain the loader with its data in memory, at several numbers of workers.

        Raises Stopped.
        """
        session, record, unit_s = self._session, self._record, self._unit_s
        for kept in record.ranks:  # an earlier start may have ended in the middle of its drains
            kept.drains, kept.trained, kept.opened = {}, {}, []
        for rank, answer in zip(self._ranks, session.ask({"do": "describe"}), strict=True):
            session.kept(rank).described = answer
        self._drain("found", self._width, 1.25 * unit_s, fresh=True)
        self._find_files()
        first = session.kept(self._ranks[0]).drains["found"][-1]
        startup_s = (first.arrivals_ns[0] - first.began_ns) / 1e9 if first.arrivals_ns else 0.0
        rounds = 1 if startup_s > 2 * unit_s else _ROUNDS  # workers import a lot, each time anew
        with contextlib.suppress(OSError):
            if record.files and (reading.resident_fraction(self._touched) or 1.0) < 1.0:
                reading.read_files(self._touched, 4, self._longest_s)
        cores = max(1, machine.usable_cores() // len(self._ranks))
        counts = _worker_counts(self._width, cores)
        for again in range(rounds):
            kept = session.kept(self._ranks[0])
            if again and (more := more_workers(kept, max(counts), cores)) is not None:
                counts.insert(0, more)
            for place, count in enumerate(counts):
                if time.monotonic() > self._warm_until and (again or count != self._width):
                    record.note("the job is slow: a larger --budget tries more worker counts")
                    break
                share = 1.0 if count == self._width else 0.75
                workers = "1 worker" if count == 1 else f"{count} workers"
                self._say(f"P: data in memory, {workers}, round {again + 1} of {rounds}")
                self._drain(f"warm-{count}", count, share * unit_s)
                self._say(f"training on data in memory, {workers}, round {again + 1} of {rounds}")
                self._train(count, (rounds - again) * len(counts) - place)
        with contextlib.suppress(OSError):
            if self._touched:
                record.warm_fraction = reading.resident_fraction(self._touched)

    def look(self) -> None:
        """Have the script look at one of its examples. Raises Stopped."""
        for rank, answer in zip(self._ranks, self._session.ask({"do": "look"}), strict=True):
            self._session.kept(rank).described |= answer

    def cold(self) -> None:
        """Drain the loader, and read its files, with nothing in the page cache. Raises Stopped."""
        record = self._record
        if not self._touched:
            record.reasons["S"] = record.reasons.get("files", "no file was seen")
            return
        for again in range(_ROUNDS):
            try:
                if not self._cold_round(f"round {again + 1} of {_ROUNDS}"):
                    return
            except OSError as error:
                record.reasons["S"] = f"the loader's files cannot be read: {error}"
                return

    def _cold_round(self, turn: str) -> bool:
        """Do all of it once; return whether it could be done. Raises OSError, Stopped."""
        record, unit_s = self._record, self._unit_s
        self._say(f"S: dropping the loader's files from the page cache, {turn}")
        reading.drop_files(self._touched)
        left = reading.resident_fraction(self._touched)
        if left is None or left > _COLD:
            share = "an unknown part" if left is None else f"{left:.0%}"
            record.reasons["S"] = (
                f"{share} of the data stayed in the page cache after it was asked to leave "
                "(files that are mapped, or belong to somebody else)"
            )
            return False
        record.cold_fraction = left
        self._say(f"S: reading the loader with nothing in memory, {turn}")
        self._drain("cold", self._width, 2 * unit_s, once=True)
        if record.files:
            record.readers = max(1, self._width) * len(self._ranks)
            self._say(f"S, C: reading {len(record.files):,} files, cold and warm, {turn}")
            read_again(record, unit_s)
            prep = self._arrivals_s(f"warm-{self._width}")
            if drop_part(record, prep * len(record.files) / record.files_examples):
                self._say(f"S: reading the loader with a part not in memory, {turn}")
                self._drain("partly", self._width, 2 * unit_s, once=True)
                self._drain("whole", self._width, 2 * unit_s, once=True)
        return True

    def _arrivals_s(self, name: str) -> float:
        """Return examples/s of a drain, roughly."""
        drain = self._session.kept(self._ranks[0]).drains[name][-1]
        times = drain.arrivals_ns[len(drain.arrivals_ns) // 2 :]
        examples = sum(work.examples for work in drain.work) / max(1, len(drain.work))
        return examples * (len(times) - 1) / max(1e-9, (times[-1] - times[0]) / 1e9)

    def _train(self, workers: int, times: int) -> None:
        """Have the script train on what was drained, as one of so many times. Raises Stopped."""
        session, each_s = self._session, 1e-4
        for rank in self._ranks:
            arrivals = session.kept(rank).drains[f"warm-{workers}"][-1].arrivals_ns
            steps = session.kept(rank).replayed[-100:]
            for at in (arrivals[len(arrivals) // 2 :], [row.entered_ns for row in steps]):
                if len(at) > 1:
                    each_s = max(each_s, (at[-1] - at[0]) / (len(at) - 1) / 1e9)
        fewest = 4 * max(1, workers) + _FEWEST
        steps_wanted = max(fewest, min(_MOST_STEPS, int(self._unit_s / each_s)))
        if self._life is not None:
            steps_wanted = min(steps_wanted, (self._life - session.batches()) // times - 2)
            if steps_wanted < _FEWEST:
                self._record.note(
                    f"the script ends after {self._life} batches, too few to have it train on "
                    "data in memory: predictions take it to reach what its parts can do"
                )
                return
        began = [len(session.rows(rank)) for rank in self._ranks]
        # Ranks train together: all of them take the same number of steps.
        command = {"do": "train", "workers": workers, "steps": steps_wanted}
        answers = session.ask(command)
        for rank, answer, start in zip(self._ranks, answers, began, strict=True):
            if "error" in answer:
                self._record.note(f"training on data in memory failed: {answer['error']}")
                continue
            found = measuring.steps(session.rows(rank)[start:], rank.slot)
            steps_s = [(row.entered_ns - before.entered_ns) / 1e9 for before, row in found]
            session.kept(rank).trained.setdefault(workers, []).append(steps_s)

    def _drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        tag = str(self._session.folder / f"drain-{self._count}")
        self._count += 1
        command = {
            "do": "drain",
            "tag": tag,
            "workers": workers,
            "seconds": seconds,
            "longest": max(seconds * 3, self._longest_s),
            "least": 4 * max(1, workers) + 8,
            "most": _EVERYTHING,
            "fresh": fresh,
            "once": once,
            "hears": fresh,
        }
        answers = self._session.ask(command)
        for rank, answer in zip(self._ranks, answers, strict=True):
            if "arrivals_ns" not in answer:
                self._record.note(f"{name}: the loader could not be read again: {answer['error']}")
                raise Stopped
            if answer["error"]:
                self._record.note(f"{name}: the loader ended with {answer['error']}")
            if len(answer["arrivals_ns"]) < (1 if fresh or once else 2):  # an epoch may be one
                self._record.reasons["P"] = (
                    "read alone, the loader gave too few batches in its time: use a larger --budget"
                )
                raise Stopped
            own = f"{Path(tag).name}-{rank.pid}-*"
            work: list[WorkRecord] = []
            for path in self._session.folder.glob(own + ".work"):
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
            self._session.kept(rank).drains.setdefault(name, []).append(drain)
            if fresh:
                for path in self._session.folder.glob(own + ".opened"):
                    lines = path.read_text().splitlines()
                    self._session.kept(rank).opened += [json.loads(line) for line in lines]

    def _find_files(self) -> None:
        """Tell files that are read whole, one or a few an example, from everything else."""
        record = self._record
        opened: dict[str, dict[str, Any]] = {}
        sockets = set()
        examples = read = 0
        for rank in self._ranks:
            kept = self._session.kept(rank)
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
            self._touched = record.files
            for rank in self._ranks:
                kept = self._session.kept(rank)
                kept.opened = [line for line in kept.opened if line["kind"] in ("file", "socket")]
            return
        self._touched = [line["name"] for line in opened.values()]
        if sockets:
            why = f"the data comes over the network ({', '.join(sorted(sockets)[:3])})"
        elif not opened:
            why = (
                "no file was seen to be opened by the loader: its data is in memory, made up, or "
                "read by a library that opens files by itself"
            )
        elif any(line["kind"] == "mapped" for line in opened.values()):
            why = "the data is mapped into memory from few large files"
        else:
            why = "examples are parts of few large files"
        record.reasons["files"] = why


def read_again(record: ProbeRecord, unit_s: float) -> None:
    """Read the record's files cold and warm, by as many readers as the loader has.

    And cold by a reader a core, where these are more. Raises OSError.
    """
    files = record.files
    reading.drop_files(files)
    reads = reading.read_files(files, record.readers, 2 * unit_s)
    record.cold_reads.append(reads)
    warm = reading.read_files(files[: sum(reads.files)], record.readers, unit_s)
    record.warm_reads.append(warm)
    if machine.usable_cores() > record.readers:
        reading.drop_files(files)
        most = reading.read_files(files, machine.usable_cores(), unit_s)
        record.most_reads.append(most)


def drop_part(record: ProbeRecord, prep_files: float) -> bool:
    """Drop so many of the files that storage keeps up with preparing ``prep_files`` a second.

    So what misses cost then is the wait for each, and not that storage is short. Returns whether
    the kernel says what is in memory. Raises OSError.
    """
    reads = record.cold_reads[-1]
    storage = sum(reads.files) / max(1e-9, sum(reads.seconds))
    share = min(1.0, storage / (_SPARE * max(1e-9, prep_files)))
    reading.read_files(record.files, machine.usable_cores(), 60.0)
    chosen = random.Random(0).sample(record.files, max(1, round(share * len(record.files))))
    reading.drop_files(chosen)
    resident = reading.resident_fraction(record.files)
    if resident is None or resident == 1.0:
        return False
    record.partly_fraction = resident
    return True


def _worker_counts(width: int, cores: int) -> list[int]:
    """Return the worker counts of the scaling curve: the job's own first, at most five."""
    counts = [width, 1, cores]
    if cores > 4:
        counts += [round(cores**0.5), round(cores**0.75)]
    return list(dict.fromkeys(counts))
