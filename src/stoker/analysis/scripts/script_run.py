"""One start of the script under analysis, with the probe in it.

The script starts with ``analysis/startup`` first on ``PYTHONPATH``. The ``sitecustomize`` there
loads the probe, under a name of its own, in every Python process below, and then the
``sitecustomize`` that it hides.

The analyzer gives commands through files and mapped headers (``probe.records``). The batches from
which on to replay (``replay_at``) and to take over (``take_at``) are step numbers in the future:
ranks are in step, so they switch at the same step. Nothing is sent, so a kill loses nothing.

A script may end during a phase. It is then started again, with the number of its batches known.

The run's folder has a file ``alive``, locked while the analyzer lives. A waiting probe ends when it
can take the lock, and the next analysis removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker.analysis.model.trace import RankTrace, Trace
from stoker.analysis.phases import Stopped
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row, WatchedRows, WorkRecord
from stoker.analysis.scripts.script_process import (
    ScriptProcess,
    describe_crash,
    describe_exit,
    find_crash,
    is_running,
    summarize_crash,
)

_PREFIX = "stoker-analysis-"
# Short beside a phase of seconds; a look reads the rows that are new.
_POLL_S = 0.2
# Of the analysis, for a script to end after the command to end.
_GRACE = 0.1
# At least, at most: a checkpoint takes seconds, and a user with much time waits for no more
# than half a minute.
_GRACE_S = 2.0, 30.0
# Time for a launcher to end after one of its ranks: torchrun ends the other ranks first. Chosen,
# not measured.
_GONE_S = 5.0

_WHEN = {
    "batch": "before its first batch",
    "as-it-is": "while it ran as it is",
    "G": "while batches were handed over again (G)",
    "P": "while it was read and trained on (P, S)",
}


@contextlib.contextmanager
def make_folder() -> Iterator[Path]:
    """Make a folder, locked while the analyzer lives; remove the folders of dead analyzers."""
    for left in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), open(left / "alive", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with open(folder / "new", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(folder / "new", folder / "alive")  # never there without its lock
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose_slot(rank: RankTrace, rows: Sequence[Row], wanted: str | None = None) -> int | None:
    """Return the training loader's slot: most batches with gradients on, else most batches.

    ``wanted``: the line that builds it, if that is known.
    """
    every = Counter(row.slot for row in rows if row.event == records.BATCH)
    trains = Counter(row.slot for row in rows if row.event == records.BATCH and row.trains)
    slots = [s for s in every if wanted is None or _is_built_at(rank.loader(s), wanted)]
    return max(slots, key=lambda slot: (trains[slot], every[slot], -slot), default=None)


def _is_built_at(loader: dict[str, Any], wanted: str) -> bool:
    """True if a loader is built there, or by a function that is called there."""
    return os.path.basename(wanted) in (loader["site"], *loader["built"])


def find_latest(ranks: Collection[RankTrace]) -> list[RankTrace]:
    """Return the ranks; of a rank that was started again, only the latest."""
    latest: dict[tuple[int, int], int] = {}
    for rank in ranks:
        place = rank.about["parent"], rank.rank
        latest[place] = max(latest.get(place, 0), rank.about["generation"])
    return [r for r in ranks if r.about["generation"] == latest[r.about["parent"], r.rank]]


class Session:
    """A running script and its ranks.

    Attributes:
        folder: where the probe writes.
        site: where the training loader is built, once that is known.
        job: the one that is analyzed, once that is known; a script may start several.
    """

    def __init__(
        self,
        trace: Trace,
        folder: Path,
        deadline: float,
        max_seconds: float,
        plan: dict[str, Any],
        cwd: Path | None = None,
    ) -> None:
        """Start the script in ``cwd``, by default the current folder.

        ``plan`` names the line that builds the training loader, and phases.
        """
        folder.mkdir()
        os.symlink("../alive", folder / "alive")
        self.folder = folder
        self.site: str | None = plan.get("site")
        self._trace, self._deadline, self._max_seconds = trace, deadline, max_seconds
        self._watched: dict[int, WatchedRows] = {}
        self._ranks: dict[int, RankTrace] = {}
        self._number = -1
        self._gone_since: float | None = None
        self.job: str | None = None
        if plan:
            records.write_json(str(folder / "plan.json"), plan)
        self._process = ScriptProcess(trace.command, folder, cwd)

    def close(self) -> None:
        """End the script and all that it started."""
        self._process.stop()
        for watched in self._watched.values():
            watched.close()

    @property
    def ranks(self) -> list[RankTrace]:
        """All processes that iterate loaders; of a rank that was started again, only the latest."""
        return find_latest(self._ranks.values())

    def read_rows(self, rank: RankTrace) -> list[Row]:
        """Return all rows of a rank so far."""
        return self._watched[rank.pid].rows()

    def find_training_ranks(self) -> list[RankTrace]:
        """Return the ranks of the job that iterate the training loader."""
        having = []
        for rank in self.ranks:
            for about in rank.about["loaders"]:
                if about["site"] == self.site:
                    rank.slot = about["slot"]
                    having.append(rank)
        if self.job is None and having:
            self.job = min(having, key=lambda rank: rank.pid).job
        having = [rank for rank in having if rank.job == self.job]
        return sorted(having, key=lambda rank: rank.rank)

    def count_batches(self) -> int:
        """Return how many batches the job has had in this start; of several ranks, the fewest."""
        counts = [
            sum(
                row.slot == rank.slot and row.event == records.BATCH for row in self.read_rows(rank)
            )
            for rank in self.find_training_ranks()
        ]
        return min(counts, default=0)

    @property
    def has_ended_by_itself(self) -> bool:
        """True if the script ended without a command to end, and without a crash."""
        return self._process.exit_code == 0 and self._trace.crash is None

    def find_recorded(self, rank: RankTrace) -> RankTrace:
        """Return the record of the same rank from the first start."""
        for known in self._trace.ranks:
            if known.rank == rank.rank:
                return known
        return rank

    def wait_until(
        self, condition: Callable[[], bool], phase: str, poll_s: float = _POLL_S
    ) -> None:
        """Wait for a condition. Raises Stopped when the script or the time ends first."""
        noted = 0.0
        while True:
            ended = self._process.exit_code is not None
            self._find_processes()
            if condition():
                return
            if time.monotonic() - noted > 1.0:
                self._process.note_processes()
                noted = time.monotonic()
            if ended or self._has_lost_rank() or any(self.folder.glob("failed-*")):
                self._note_why(phase)
                raise Stopped
            if time.monotonic() >= self._deadline:
                self._trace.reasons[phase] = "the time for the analysis was up"
                self._trace.out_of_time = _WHEN[phase]
                raise Stopped
            time.sleep(poll_s)

    def switch(self, what: str, later: int = 0) -> None:
        """Have all ranks switch at the same step, which none of them can have reached yet.

        With ``replay_at``, every loader that trains replays from there on. With ``take_at``, the
        training loader's next() no longer returns, ``later`` steps after that. A single rank
        switches at once.
        """
        paced = self.find_training_ranks()
        counts: dict[str, int] = {}
        ahead = 3
        for rank in paced:
            # The last ones: steps may have become faster since the first.
            rows = [row for row in self.read_rows(rank) if row.slot == rank.slot][-50:]
            if len(rows) > 1:
                each_s = (rows[-1].left_ns - rows[0].left_ns) / (len(rows) - 1) / 1e9
                # Half a second ahead, so that all ranks read the switch before they reach it.
                ahead = max(ahead, int(0.5 / max(each_s, 1e-6)))
            for row in self.read_rows(rank):
                site = rank.loader(row.slot)["site"]
                counts[site] = max(counts.get(site, 0), row.number)
        for rank in paced:
            latest = self.read_rows(rank)[-1000:]
            trained = {row.slot for row in latest if row.trains}
            for about in rank.about["loaders"]:
                slot = about["slot"]
                if slot == rank.slot or (what == "replay_at" and slot in trained):
                    place = records.find_places(slot)[what == "take_at"]
                    step = counts.get(about["site"], 0) + (ahead if len(paced) > 1 else 0) + later
                    header = self._watched[rank.pid].header
                    header[place] = min(header[place], step)

    def send(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all ranks at once, and wait for their answers. Raises Stopped."""
        self._number += 1
        ranks = self.find_training_ranks()
        for rank in ranks:
            base = self._watched[rank.pid].base
            records.write_json(f"{base}.command.{self._number}", command)
        answers: dict[int, dict[str, Any]] = {}

        def has_answered() -> bool:
            for rank in ranks:
                if rank.pid not in answers:
                    base = self._watched[rank.pid].base
                    answer = records.read_json(f"{base}.answer.{self._number}")
                    if answer is not None:
                        answers[rank.pid] = answer
            return len(answers) == len(ranks)

        self.wait_until(has_answered, "P", 0.02)
        return [answers[rank.pid] for rank in ranks]

    def read_drain(
        self, tag: str, rank: RankTrace
    ) -> tuple[list[WorkRecord], list[dict[str, Any]]]:
        """Return the records of a rank's workers in a drain, and the files that they opened."""
        work: list[WorkRecord] = []
        opened: list[dict[str, Any]] = []
        for path in self.folder.glob(f"{tag}-{rank.pid}-*.work"):
            work.extend(records.read_work(str(path)))
        for path in self.folder.glob(f"{tag}-{rank.pid}-*.opened"):
            opened.extend(json.loads(line) for line in path.read_text().splitlines())
        return work, opened

    def read_looks(self, tag: str, rank: RankTrace) -> list[dict[str, int]]:
        """Return the looks at each batch of a rank's workers in a drain that sampled stacks."""
        paths = sorted(self.folder.glob(f"{tag}-{rank.pid}-*.looks"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def finish(self) -> None:
        """Ask the script to end, and give it time to do so."""
        if self._process.exit_code is not None:
            self._note_why("P")
            return
        paced = {rank.pid for rank in self.find_training_ranks()}
        for rank in self.ranks:
            watched = self._watched[rank.pid]
            number = self._number + 1 if rank.pid in paced else 0
            records.write_json(f"{watched.base}.command.{number}", {"do": "end"})
            for about in rank.about["loaders"]:
                for place in records.find_places(about["slot"]):
                    watched.header[place] = 0
        given_s = min(_GRACE_S[1], max(_GRACE_S[0], _GRACE * self._max_seconds))
        until = time.monotonic() + given_s
        while self._process.exit_code is None and time.monotonic() < until:
            self._process.note_processes()
            time.sleep(0.05)
        code = self._process.exit_code
        if code is None:
            self._trace.note(
                f"the script went on for {given_s:.0f} s after it was told to end, which is a "
                "SystemExit inside of next(), and was ended by force"
            )
        elif code != 0:
            last = "\n".join(self._process.output()[-5:])
            self._trace.note(
                f"told to end, which is a SystemExit inside of next(), the script ended with "
                f"{describe_exit(code)}. Its last lines:\n{last}"
            )

    def _has_lost_rank(self) -> bool:
        """True if a rank ended some time ago, while its launcher goes on."""
        ranks = self.find_training_ranks() if self.site is not None else []
        if not ranks or all(is_running(rank.pid) for rank in ranks):
            self._gone_since = None
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since > _GONE_S

    def _note_why(self, phase: str) -> None:
        """Record why a phase stopped: the probe failed, or the script ended, in whichever way."""
        trace, reasons = self._trace, self._trace.reasons
        for path in self.folder.glob("failed-*"):
            trace.note(f"the probe removed itself: {path.read_text()}")
            reasons.setdefault(phase, f"the probe failed: {path.read_text()}")
        code = self._process.exit_code
        gone = self._gone_since is not None
        if code is None and not gone:
            return
        lines = self._process.output()
        trace.crash = find_crash(code, lines, _WHEN[phase], self._find_failed_ranks())
        if trace.crash is not None:
            trace.note(describe_crash(trace.crash))
            reasons[phase] = summarize_crash(trace.crash)
            reasons["output"] = trace.crash.output
        else:
            who = "the script" if code is not None else "its training process"
            reasons[phase] = f"{who} ended by itself before the phase was over"

    def _find_failed_ranks(self) -> list[tuple[RankTrace, str]]:
        """Return the ranks that failed or were killed, the first one first, with their errors.

        A daemonic child that its parent ends by force did not fail.
        """
        failed, went_well = [], self._process.exit_code == 0
        for rank in self.ranks:
            end = records.read_json(f"{self._watched[rank.pid].base}.ended")
            if end is not None and end["error"] is not None:
                failed.append((end["at_ns"], rank, end["error"]))
            elif end is None and went_well and rank.about["daemon"]:
                continue
            elif end is None and rank.pid != self._process.pid and not is_running(rank.pid):
                failed.append((records.NEVER, rank, ""))
        return [(rank, text) for _, rank, text in sorted(failed, key=lambda one: one[0])]

    def _find_processes(self) -> None:
        """Record processes that iterate loaders."""
        for path in self.folder.glob("process-*.json"):
            about = records.read_json(str(path))
            if about is None:
                continue
            pid = about["pid"]
            if pid not in self._watched:
                self._watched[pid] = WatchedRows(str(path.with_suffix(".rows")))
                self._ranks[pid] = RankTrace(pid, about["rank"], about)
            self._ranks[pid].about = about
            self._ranks[pid].rank = about["rank"]
