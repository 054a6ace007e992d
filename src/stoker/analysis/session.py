"""One start of the script under analysis, with the probe in it: waiting, asking, switching."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.analysis.launching import Started
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row, Watched
from stoker.analysis.record import RankRecord, Record

_POLL_S = 0.2
_GRACE = 0.1  # of the budget, for a script to end after it was told to
_GRACE_S = 2.0, 30.0  # at least, at most


class Stopped(Exception):
    """The script, or the time for the analysis, came to an end during a phase."""


class Session:
    """A running script and its ranks.

    Attributes:
        folder: where the probe writes.
        site: where the training loader is built, once that is known.
    """

    def __init__(
        self, record: Record, folder: Path, deadline: float, budget_s: float, plan: dict[str, Any]
    ) -> None:
        """Start the script. ``plan`` says where the training loader is built, and what to do."""
        folder.mkdir()
        os.symlink("../alive", folder / "alive")
        self.folder = folder
        self.site: str | None = plan.get("site")
        self._record, self._deadline, self._budget_s = record, deadline, budget_s
        self._watched: dict[int, Watched] = {}
        self._ranks: dict[int, RankRecord] = {}
        self._number = -1
        if plan:
            records.write_json(str(folder / "plan.json"), plan)
        self._started = Started(record.command, folder)

    def close(self) -> None:
        """End the script and all that it started."""
        self._started.stop()
        for watched in self._watched.values():
            watched.close()

    @property
    def ranks(self) -> list[RankRecord]:
        """All processes that iterate loaders."""
        return list(self._ranks.values())

    def rows(self, rank: RankRecord) -> list[Row]:
        """Return all rows of a rank so far."""
        return self._watched[rank.pid].rows()

    def paced(self) -> list[RankRecord]:
        """Return the ranks that iterate the training loader."""
        for rank in self.ranks:
            for about in rank.about["loaders"]:
                if about["site"] == self.site:
                    rank.slot = about["slot"]
        return sorted((rank for rank in self.ranks if rank.slot >= 0), key=lambda rank: rank.rank)

    def kept(self, rank: RankRecord) -> RankRecord:
        """Return the record of the same rank from the first start."""
        for known in self._record.ranks:
            if known.rank == rank.rank:
                return known
        return rank

    def until(self, condition: Callable[[], bool], phase: str, poll_s: float = _POLL_S) -> None:
        """Wait for a condition. Raises Stopped when the script or the time ends first."""
        noted = 0.0
        while True:
            ended = self._started.exit_code is not None
            self._meet()
            if condition():
                return
            if time.monotonic() - noted > 1.0:
                self._started.note_processes()
                noted = time.monotonic()
            if ended or any(self.folder.glob("failed-*")):
                self._why(phase)
                raise Stopped
            if time.monotonic() >= self._deadline:
                self._record.reasons.setdefault(phase, "the time for the analysis was up")
                raise Stopped
            time.sleep(poll_s)

    def switch(self, what: str) -> None:
        """Have all ranks switch at the same step, one that none of them can have reached yet.

        ``replay_at``: every loader that trains replays from there on; ``take_at``: the training
        loader's next() does not return any more.
        """
        paced = self.paced()
        counts: dict[str, int] = {}
        ahead = 3
        for rank in paced:
            rows = [row for row in self.rows(rank) if row.slot == rank.slot][-50:]
            if len(rows) > 1:
                each_s = (rows[-1].left_ns - rows[0].left_ns) / (len(rows) - 1) / 1e9
                ahead = max(ahead, int(0.5 / max(each_s, 1e-6)))
            for row in self.rows(rank):
                site = rank.loader(row.slot)["site"]
                counts[site] = max(counts.get(site, 0), row.number)
        for rank in paced:
            latest = self.rows(rank)[-1000:]
            trained = {row.slot for row in latest if row.kind & records.TRAINS}
            for about in rank.about["loaders"]:
                slot = about["slot"]
                if slot == rank.slot or (what == "replay_at" and slot in trained):
                    place = 8 + 2 * slot + (what == "take_at")
                    step = counts.get(about["site"], 0) + ahead
                    self._watched[rank.pid].header[place] = step

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all ranks at once, and wait for their answers. Raises Stopped."""
        self._number += 1
        ranks = self.paced()
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

        self.until(answered, "P", 0.02)
        return [answers[rank.pid] for rank in ranks]

    def finish(self) -> None:
        """Ask the script to end, and give it time for that."""
        for rank in self.paced():
            base = self._watched[rank.pid].base
            records.write_json(f"{base}.command.{self._number + 1}", {"do": "end"})
        until = time.monotonic() + min(_GRACE_S[1], max(_GRACE_S[0], _GRACE * self._budget_s))
        while self._started.exit_code is None and time.monotonic() < until:
            self._started.note_processes()
            time.sleep(0.05)
        if self._started.exit_code is None:
            self._record.note(
                "the script went on after its end was asked for (it catches SystemExit, or does "
                "something long at its end), and was ended by force"
            )

    def _why(self, phase: str) -> None:
        """Say why a phase stopped: the probe failed, or the script ended."""
        reasons = self._record.reasons
        for path in self.folder.glob("failed-*"):
            self._record.note(f"the probe took itself out: {path.read_text()}")
            reasons.setdefault(phase, f"the probe failed: {path.read_text()}")
        code = self._started.exit_code
        if code is not None:
            how = "ended by itself" if code == 0 else f"ended with exit code {code}"
            reasons[phase] = f"the script {how} before the phase was over"
            if code != 0:
                reasons["output"] = self._started.output()

    def _meet(self) -> None:
        """Take note of processes that iterate loaders."""
        for path in self.folder.glob("process-*.json"):
            about = records.read_json(str(path))
            if about is None:
                continue
            pid = about["pid"]
            if pid not in self._watched:
                self._watched[pid] = Watched(str(path.with_suffix(".rows")))
                self._ranks[pid] = RankRecord(pid, about["rank"], about)
            self._ranks[pid].about = about
            self._ranks[pid].rank = about["rank"]
