"""The phases of an analysis: what the script is made to do, and when."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker.analysis.draining import Drains
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row
from stoker.analysis.probe_record import ProbeRecord, RankRecord
from stoker.analysis.session import Session, Stopped
from stoker.signals import deferred

_MOST_STARTS = 3
_FEWEST = 12  # batches that a figure wants
_MOST_STEPS = 5000  # of G: a quick script is not to come to its end in it
_UNFED_S = 30.0  # of training without a loader
_PREFIX = "stoker-analysis-"

Say = Callable[[str], None]


def analyzed(
    command: Sequence[str], *, budget_s: float, loader: str | None, say: Say
) -> ProbeRecord:
    """Run a script through the phases. Raises OSError, KeyboardInterrupt.

    Starts it once where it lives long enough, at most three times else, and not again after a
    crash. Whatever happens, all its processes have ended when this returns.
    """
    began = time.monotonic()
    record = ProbeRecord(list(command))
    conductor = _Conductor(record, began + budget_s, budget_s, loader, say)
    with _folder() as folder:
        while record.starts < _MOST_STARTS and conductor.wants():
            before = conductor.done.copy()
            conductor.run(folder / f"start-{record.starts}")
            if conductor.done == before or conductor.over() or record.crash is not None:
                break
    record.seconds = time.monotonic() - began
    return record


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for the run, locked while the analyzer lives; sweep those of dead ones."""
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


class _Conductor:
    """Leads one analysis over one or several starts of the script."""

    def __init__(
        self, record: ProbeRecord, deadline: float, budget_s: float, loader: str | None, say: Say
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
        self._trains: list[str] = []  # sites of all loaders that train
        self._life: int | None = None  # batches after which the script ends by itself

    def wants(self) -> bool:
        """Whether a phase is missing."""
        return not {"as-it-is", "G", "drains"} <= self.done

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def run(self, folder: Path) -> None:
        """Start the script once and go as far as it goes."""
        self.record.starts += 1
        plan = {}
        if self._site is not None:  # it ended early: at its first batch, go on where it stopped
            take_at = 0 if "G" in self.done else self._after_replay()
            sites = {"site": self._site, "trains": [self._site, *self._trains]}
            plan = sites | {"replay_at": 0, "take_at": take_at}
        self._say(f"starting the script ({_ORDINALS[self.record.starts]} start)")
        session = Session(self.record, folder, self._deadline, self._budget_s, plan)
        try:
            with contextlib.suppress(Stopped):
                if "as-it-is" not in self.done:
                    self._as_it_is(session)
                if "G" not in self.done:
                    self._replay(session, planned=bool(plan))
                self._drains(session, planned=plan.get("take_at") == 0)
                self._say("ending the script")
                session.finish()
                return
            if self.over() and session.ranks:
                self._say("the time is up: ending the script")
                session.finish()
            if session.ended_by_itself:
                self._life = session.batches()
        finally:
            with deferred():
                session.close()

    # As it is

    def _as_it_is(self, session: Session) -> None:
        self._say("as it is: waiting for the first batch")
        patience_s = min(_UNFED_S, self._patience_s)

        def met() -> bool:
            return bool(session.ranks) or session.unfed_s() >= patience_s

        session.until(met, "batch")
        if not session.ranks:
            self.record.reasons["batch"] = (
                f"it trained for {patience_s:.0f} s without iterating a DataLoader"
            )
            raise Stopped
        self._say("as it is: measuring the job, left alone")
        began = time.monotonic()

        def enough() -> bool:
            patient = time.monotonic() - began < self._patience_s
            if patient and any(
                rank.about["on_this_host"] > len(session.ranks) for rank in session.ranks
            ):
                return False
            return all(self._seen(rank, session.rows(rank), patient) for rank in session.ranks)

        try:
            session.until(enough, "as-it-is")
        finally:
            self._choose(session)
            if self._site is not None:
                self.done.add("as-it-is")

    def _seen(self, rank: RankRecord, rows: list[Row], patient: bool) -> bool:
        """Whether enough was seen of a rank as it is; less will do after some patience."""
        slot = self._chosen(rank, rows)
        if slot is None:
            return False
        batches = [row for row in rows if row.slot == slot and row.kind & 15 == records.BATCH]
        if patient and self._wanted is None and not batches[0].kind & records.TRAINS:
            return False
        skipped = 2 * max(1, rank.loader(slot)["workers"])
        if len(batches) <= skipped + (_FEWEST if patient else 3):
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
            counts = {s: c for s, c in counts.items() if _built_at(rank.loader(s), self._wanted)}
        return max(counts, key=lambda slot: (counts[slot], -slot)) if counts else None

    def _choose(self, session: Session) -> None:
        chosen = []
        for rank in session.ranks:
            rank.rows = list(session.rows(rank))
            slot = self._chosen(rank, rank.rows)
            if slot is not None:
                rank.slot = slot
                trains = any(row.slot == slot and row.kind & records.TRAINS for row in rank.rows)
                chosen.append((not trains, rank.pid, rank))
            elif self._wanted is not None:
                sites = ", ".join(about["site"] for about in rank.about["loaders"])
                self.record.reasons["as-it-is"] = (
                    f"no loader that was built at {self._wanted!r} gave a batch; there are: {sites}"
                )
        if not chosen:
            return
        _, _, first = min(chosen)
        session.job = first.job
        self._site = session.site = first.loader(first.slot)["site"]
        trained = {row.slot for row in first.rows if row.kind & records.TRAINS}
        self._trains = [first.loader(slot)["site"] for slot in sorted(trained)]
        self.record.ranks = session.paced()
        jobs = {rank.job for idle, _, rank in chosen if not idle}
        self.record.jobs = max(1, len(jobs))
        if len(jobs) > 1:
            arguments = " ".join(first.about["arguments"])
            self.record.note(
                f"the script runs {len(jobs)} training jobs, each on its own (no process group "
                f"joins them); this is about one of them, process {first.pid} ({arguments}), "
                "while the others went on beside it"
            )

    # G

    def _replay(self, session: Session, *, planned: bool) -> None:
        self._say("G: handing prepared batches over again and again")
        session.until(lambda: bool(session.paced()), "G")
        if not planned:
            session.switch("replay_at")
            session.switch("take_at", later=_MOST_STEPS)
        try:
            self._replayed(session)
        finally:
            for rank in session.paced():
                own = _replayed(rank, session.rows(rank))
                if len(own) > 4:
                    kept = session.kept(rank)
                    kept.replayed = session.rows(rank)[session.rows(rank).index(own[0]) :]
                    kept.slot = rank.slot
                    self.done.add("G")

    def _after_replay(self) -> int:
        """Return the batch to take over at; a short script gives all of its batches to G."""
        if self._life is None:
            return _MOST_STEPS
        return self._life if self._life < 4 * _FEWEST else min(_MOST_STEPS, self._life // 2)

    def _replayed(self, session: Session) -> None:
        """Wait until enough prepared batches were handed over. Raises Stopped."""
        began = time.monotonic()

        def enough() -> bool:
            patient = time.monotonic() - began < self._patience_s
            return all(
                self._lasted(_replayed(rank, session.rows(rank)), patient)
                for rank in session.paced()
            )

        session.until(enough, "G")

    def _lasted(self, rows: list[Row], patient: bool) -> bool:
        if rows and rows[-1].kind & 15 == records.SYNCHRONISED and len(rows) > 1:
            return rows[-2].kind & records.REPLAYED > 0  # it has had all that it was to have
        if len(rows) <= (_FEWEST if patient else 6):
            return False
        return (rows[-1].left_ns - rows[0].left_ns) / 1e9 > 1.5 * self._unit_s or not patient

    # P, S, C

    def _drains(self, session: Session, *, planned: bool) -> None:
        self._say("P: reading the loader with no training step in between")
        session.until(lambda: bool(session.paced()), "P")
        if not planned:
            session.switch("take_at")
        patience_s, unit_s = self._patience_s, self._unit_s
        drains = Drains(
            session, self.record, unit_s, patience_s / 4, patience_s, self._life, self._say
        )
        drains.warm()
        self.done.add("drains")
        drains.cold()
        drains.look()


def _built_at(loader: dict[str, Any], wanted: str) -> bool:
    """Whether a loader is built there, or by a function that is called there."""
    return os.path.basename(wanted) in (loader["site"], *loader["built"])


_ORDINALS = {1: "first", 2: "second", 3: "third"}


def _replayed(rank: RankRecord, rows: list[Row]) -> list[Row]:
    """Return a rank's rows of the training loader since prepared batches were handed over."""
    return [
        row
        for row in rows
        if row.slot == rank.slot
        and (row.kind & records.REPLAYED or row.kind & 15 == records.SYNCHRONISED)
    ]
