"""Runs a training script through the phases of an analysis, by the probe inside it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace as replace_fields

from stoker.analysis import cold_reads
from stoker.analysis.model import rates
from stoker.analysis.model.report import read_report
from stoker.analysis.model.trace import AnalysisError, Drain, RankTrace, Step, Trace, Turn
from stoker.analysis.phases import TURNS, DrainFailed, Stopped, run_phases
from stoker.analysis.probe import records
from stoker.analysis.probe.records import Row
from stoker.analysis.scripts.script_run import Session, choose_slot, make_folder
from stoker.basics.signals import defer_interrupts
from stoker.cache import inventory

if TYPE_CHECKING:
    from rich.console import Console

# A short script may need one start for the job as it is, one for G, and one for the drains.
_MOST_STARTS = 3
# Batches for a figure: eight blocks for an interval, and the first ones, which are left out.
_FEWEST = 12
# A divisor: no training step takes less.
_SHORTEST_S = 1e-4
# Prepared batches at the begin of a turn that are left out: the first one waits for the workers.
_SETTLE = 2
# Of G, or on data in memory: a quick script must not end during it.
_MOST_STEPS = 5000
# Of filling a cache: the user's time. It has at most so many bytes: more than the processor's own
# caches hold. Chosen, not measured.
_FILLS_S = 1.0
_KEPT_BYTES = 64 << 20
# Batches of a share of a turn that count: there are several turns. Chosen, not measured.
_FEWEST_OF_SHARE = 4
# Of the analysis of a pipeline, as with ``stoker.analyze``.
_PIPELINE_S = 60.0

Say = Callable[[str], None]


def trace_script(
    command: Sequence[str],
    errors: Console,
    *,
    max_seconds: float,
    loader: str | None = None,
    refuse: Callable[[dict[str, Any]], str] | None = None,
) -> Trace:
    """Run a script through the phases. Raises OSError, KeyboardInterrupt, AnalysisError.

    Starts it once if it runs long enough, else up to three times, and not again after a crash. All
    its processes have ended when this returns or raises.

    ``errors``: told how far it is; on a terminal in one line that changes.
    ``refuse``: called with what the examples showed, before much is measured. Where it returns a
    reason, that is the AnalysisError.
    """
    began = time.monotonic()
    trace = Trace(list(command))
    with errors.status("") as status, make_folder() as folder:
        say = status.update if errors.is_terminal else partial(errors.print, markup=False)
        job = ScriptJob(trace, began + max_seconds, max_seconds, loader, say, refuse)
        while trace.starts < _MOST_STARTS and not {"as-it-is", "G", "drains"} <= job.done:
            before = job.done.copy()
            job.run_start(folder / f"start-{trace.starts}")
            if job.done == before or job.is_over or trace.crash is not None:
                break
    trace.seconds = time.monotonic() - began
    return trace


@dataclass(frozen=True)
class InterleavedPhase:
    """A part of a turn: training on one kind of batches."""

    kind: str
    """"own", "replayed" or "kept"."""
    workers: int
    settle: int
    """The first batches, which are not measured: the workers had them ready."""
    measured: int
    each_s: float
    """How long a step is expected to last."""

    @property
    def batches(self) -> int:
        return self.settle + self.measured

    def shorten(self, batches: int) -> InterleavedPhase:
        """Return the share with no more batches, but some to measure: whole rounds of workers."""
        period = max(1, self.workers)
        measured = max(_FEWEST_OF_SHARE, min(self.measured, batches - self.settle))
        return replace(self, measured=-(-measured // period) * period)


class ScriptJob:
    """A script, over one or several starts of it; a ``DrivenJob``."""

    def __init__(
        self,
        trace: Trace,
        deadline: float,
        max_seconds: float,
        loader: str | None,
        say: Say,
        refuse: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        """``loader``: the line that builds the loader to analyze; else it is the most used one."""
        self.trace = trace
        self._say = say
        self.done: set[str] = set()
        self.files: list[str] = []
        self._deadline = deadline
        self._max_seconds = max_seconds
        # A phase takes one or two of these; more than 4 s hardly improve a figure. Chosen, not
        # measured.
        self.unit_s = min(4.0, max_seconds / 75)
        self.patience_s = max_seconds / 3
        self.worker_counts = 5
        self._wanted, self._refuse = loader, refuse
        self._site: str | None = None
        self._trains: list[str] = []  # sites of all loaders that train
        self._life: int | None = None  # batches after which the script ends by itself
        # Of the present start:
        self._session: Session
        self._plan: dict[str, Any] = {}
        self._ranks: list[RankTrace] = []
        self._recorded: list[RankTrace] = []  # the same ones in the trace, since the first start
        self._drains = 0

    def say(self, text: str) -> None:
        """Report a step of the analysis."""
        self._say(text)

    @property
    def is_over(self) -> bool:
        """True if the time is up."""
        return time.monotonic() >= self._deadline

    def run_start(self, folder: Path) -> None:
        """Start the script once, and run as many phases as fit into its life."""
        self.trace.starts += 1
        self._plan = {}
        if self._site is not None:  # it ended early: at its first batch, go on where it stopped
            take_at = 0 if "G" in self.done else self._after_replay()
            sites = {"site": self._site, "trains": [self._site, *self._trains]}
            self._plan = sites | {"replay_at": 0, "take_at": take_at}
        self.say(f"starting the script (start {self.trace.starts})")
        session = Session(self.trace, folder, self._deadline, self._max_seconds, self._plan)
        self._session = session
        try:
            with contextlib.suppress(Stopped):
                run_phases(self)
                self.say("ending the script")
                session.finish()
                return
            if self.is_over and session.ranks:
                self.say("the time is up: ending the script")
                session.finish()
            if session.has_ended_by_itself:
                self._life = self.trace.batches = session.count_batches()
        finally:
            with defer_interrupts():
                for rank in session.ranks:
                    session.find_recorded(rank).join_changes(rank)
                session.close()
                inventory.sweep()  # a script that was ended by force has left its store

    # As it is

    def run_as_it_is(self) -> None:
        """Wait for the training loader, and measure the job undisturbed. Raises Stopped."""
        session = self._session
        self.say("as it is: waiting for the first batch")
        session.wait_until(lambda: bool(session.ranks), "batch")
        self.say("as it is: measuring the job without any change")

        def is_enough(patient: bool) -> bool:
            ranks = session.ranks
            if patient and any(rank.about["on_this_host"] > len(ranks) for rank in ranks):
                return False
            return all(
                self._has_seen_enough(rank, session.read_rows(rank), patient) for rank in ranks
            )

        try:
            self._wait_patiently(is_enough, "as-it-is")
        finally:
            self._choose_loader()
            if self._site is not None:
                self.done.add("as-it-is")
            if self._is_pipeline:  # nothing of it is handed over again
                self.done.add("G")
        if self._is_pipeline:
            self._analyze_pipeline()

    @property
    def _is_pipeline(self) -> bool:
        return any(rank.loader(rank.slot)["is_pipeline"] for rank in self.trace.ranks)

    def _analyze_pipeline(self) -> NoReturn:
        """Have the script analyze its own pipeline. Raises Stopped, AnalysisError."""
        session, trace = self._session, self.trace
        path = session.folder / "report.json"
        left_s = self._deadline - time.monotonic()
        problem = "it is a pipeline of stoker's, and its code is yours to edit (stoker analyze)"
        if self._refuse is None:
            problem = "only a single process with a pipeline can be analyzed"
        if self._refuse is None and len(trace.ranks) == 1:
            self.say("analyzing the pipeline, stage by stage")
            session.switch("take_at")
            command = {"do": "analyze", "seconds": min(_PIPELINE_S, left_s / 2), "path": str(path)}
            try:
                problem = session.send(command)[0].get("error", "")
            except Stopped:
                if self._plan and session.has_ended_by_itself:  # from its first batch on
                    raise AnalysisError(
                        f"{self._site}: the script ended before its pipeline was analyzed: let it "
                        "train for longer, by more epochs"
                    ) from None
                raise
        session.finish()
        if problem:
            raise AnalysisError(f"{self._site}: {problem}")
        found = read_report(path)
        loader = replace_fields(found.loader, name=self._site)
        seconds = self._max_seconds - (self._deadline - time.monotonic())
        trace.report = replace_fields(
            found, command=trace.command, loader=loader, loaders=[loader], seconds=seconds,
            step=rates.estimate_step_costs(trace.ranks[0]),
        )  # fmt: skip
        self.done |= {"G", "drains"}
        raise Stopped

    def _wait_patiently(self, is_enough: Callable[[bool], bool], phase: str) -> None:
        """Wait until ``is_enough``, which asks for less once it is called with False.

        Raises Stopped.
        """
        # A third of what is left: the phases that follow get the rest.
        until = time.monotonic() + (self._deadline - time.monotonic()) / 3
        self._session.wait_until(lambda: is_enough(time.monotonic() < until), phase)

    def _have_lasted(self, rows: list[Row], patient: bool, fewest: int) -> bool:
        if len(rows) <= (_FEWEST if patient else fewest):
            return False
        return (rows[-1].left_ns - rows[0].left_ns) / 1e9 > 1.5 * self.unit_s or not patient

    def _has_seen_enough(self, rank: RankTrace, rows: list[Row], patient: bool) -> bool:
        slot = choose_slot(rank, rows, self._wanted)
        if slot is None:
            return False
        batches = [row for row in rows if row.slot == slot and row.event == records.BATCH]
        if patient and self._wanted is None and not batches[0].trains:
            return False
        skipped = 2 * max(1, rank.loader(slot)["workers"])
        return self._have_lasted(batches[skipped:], patient, 3)

    def _choose_loader(self) -> None:
        session = self._session
        chosen = []
        for rank in session.ranks:
            rank.rows = list(session.read_rows(rank))
            slot = choose_slot(rank, rank.rows, self._wanted)
            if slot is not None:
                rank.slot = slot
                trains = any(row.slot == slot and row.trains for row in rank.rows)
                chosen.append((not trains, rank.pid, rank))
            elif self._wanted is not None:
                sites = ", ".join(about["site"] for about in rank.about["loaders"])
                self.trace.reasons["as-it-is"] = (
                    f"no loader that was built at {self._wanted!r} gave a batch; there are: {sites}"
                )
        if not chosen:
            return
        _, _, first = min(chosen)
        session.job = first.job
        self._site = session.site = first.loader(first.slot)["site"]
        trained = {row.slot for row in first.rows if row.trains}
        self._trains = [first.loader(slot)["site"] for slot in sorted(trained)]
        self.trace.ranks = session.find_training_ranks()

    # G

    def replay(self) -> None:
        """Have the probe hand prepared batches over again and again. Raises Stopped."""
        session = self._session
        self.say("G: handing prepared batches over again and again")
        session.wait_until(lambda: bool(session.find_training_ranks()), "G")
        if not self._plan:
            session.switch("replay_at")
            session.switch("take_at", later=_MOST_STEPS)

        def is_enough(patient: bool) -> bool:
            return all(
                self._has_replayed_enough(_list_replayed(rank, session.read_rows(rank)), patient)
                for rank in session.find_training_ranks()
            )

        try:
            self._wait_patiently(is_enough, "G")
        finally:
            for rank in session.find_training_ranks():
                rows = session.read_rows(rank)
                own = _list_replayed(rank, rows)
                if len(own) > 4:
                    kept = session.find_recorded(rank)
                    kept.replayed, kept.slot = rows[rows.index(own[0]) :], rank.slot
                    self.done.add("G")

    def _after_replay(self) -> int:
        """Return the batch to take over at; a short script gives all of its batches to G."""
        if self._life is None:
            return _MOST_STEPS
        return self._life if self._life < 4 * _FEWEST else min(_MOST_STEPS, self._life // 2)

    def _has_replayed_enough(self, rows: list[Row], patient: bool) -> bool:
        if rows and rows[-1].event == records.SYNCHRONISED and len(rows) > 1:
            return rows[-2].is_replayed  # it has had all batches of the phase
        return self._have_lasted(rows, patient, 6)

    # P, S, C

    def begin_drains(self) -> None:
        """Take the script's ``next()`` over. Raises Stopped."""
        self.say("P: reading the loader with no training step in between")
        session = self._session
        session.wait_until(lambda: bool(session.find_training_ranks()), "P")
        if self._is_pipeline:
            self._analyze_pipeline()
        if self._plan.get("take_at") != 0:
            session.switch("take_at")
        self._ranks, self._drains = session.find_training_ranks(), 0
        for rank in self.trace.ranks:  # an earlier start may have ended in the middle of its drains
            rank.drains, rank.trained, rank.opened = {}, {}, []
            rank.turns, rank.sampled, rank.kept_turns = [], [], []
        self._recorded = [session.find_recorded(rank) for rank in self._ranks]
        for rank, answer in zip(self._recorded, session.send({"do": "describe"}), strict=True):
            rank.described = answer
        if self._refuse is not None:
            self.look_at_example()
            why = self._refuse(self._recorded[0].described)
            if why:
                session.finish()
                raise AnalysisError(f"{self._site}: {why}")

    def look_at_example(self) -> None:
        """Have the script look at some of its examples. Raises Stopped."""
        if "varies" in self._recorded[0].described:
            return
        for rank, answer in zip(self._recorded, self._session.send({"do": "look"}), strict=True):
            rank.described |= answer

    def keep_examples(self) -> None:
        """Measure the loader, and training, with some examples in a cache. Raises Stopped."""
        first = self._recorded[0]
        if any(
            rank.described.get("varies", True)
            or rank.described["moves"]
            or rank.described["example_bytes"] is None
            or rank.loader(rank.slot)["changes"]
            for rank in self._recorded
        ):
            return
        batch = rates.estimate_batch_size(first)
        prep = rates.estimate_drained(first.drains[f"warm-{first.workers}"], batch)
        if prep is None:
            return
        seconds = min(_FILLS_S, self.unit_s / 2)
        most = min(seconds * prep.value, _KEPT_BYTES / max(1, first.described["example_bytes"]))
        self.say("keeping some examples in memory, and training on them")
        command = {"do": "keep", "seconds": seconds, "batches": max(2, int(most / batch))}
        for answer in self._session.send(command):
            if "error" in answer:
                self.trace.note(f"examples were not kept in memory: {answer['error']}")
                return
        with contextlib.suppress(DrainFailed):
            self.drain("kept", first.workers, seconds / 2, kept=True)
            again = self._is_found_in_memory()
            # Where its own data are not in memory, they would be fetched by now.
            shares = [self._plan_own()] if again else []
            shares.append(self._plan_kept(first.workers))
            for recorded, turns in self._take_turns("the job as it is and a cache", shares, again):
                recorded.kept_turns = [Turn(turn[0] if again else [], turn[-1]) for turn in turns]
        if not first.kept_turns:
            self.trace.note("training on a cache was not measured: its gain is that of its parts")

    def drain(
        self,
        name: str,
        workers: int,
        seconds: float,
        *,
        fresh: bool = False,
        once: bool = False,
        samples: bool = False,
        kept: bool = False,
    ) -> None:
        """Read the loader in all ranks with no training step in between. Raises Stopped."""
        session, tag = self._session, f"drain-{self._drains}"
        self._drains += 1
        command = {
            "do": "drain",
            "tag": str(session.folder / tag),
            "workers": workers,
            "seconds": seconds,
            "longest": max(seconds * 3, self.patience_s / 4),
            "least": 4 * max(1, workers) + 8,
            "fresh": fresh,
            "once": once,
            "samples": samples,
            "kept": kept,
            "skip": self._count_read_before() if fresh else 0,
        }
        answers = session.send(command)
        for answer in answers:
            if "arrivals_ns" not in answer:
                self.trace.note(f"{name}: the loader could not be read again: {answer['error']}")
                raise DrainFailed
            if answer["error"]:
                self.trace.note(f"{name}: the loader ended with {_in_a_line(answer['error'])}")
        fewest = 1 if fresh or once else 2  # an epoch may be one
        if any(len(answer["arrivals_ns"]) < fewest for answer in answers):
            self.trace.reasons["P"] = (
                "read alone, the loader gave too few batches in its time: use more --max-seconds"
            )
            raise DrainFailed
        for rank, recorded, answer in zip(self._ranks, self._recorded, answers, strict=True):
            arrivals_ns = answer["arrivals_ns"]
            work, opened = session.read_drain(tag, rank)
            recorded.opened += opened
            if samples:
                recorded.sampled += session.read_looks(tag, rank)
            drain = Drain(
                workers,
                arrivals_ns,
                answer["began_ns"],
                answer["cpu_s"],
                [batch for batch in work if batch.ended_ns <= arrivals_ns[-1]],
                sum(batch.examples for batch in work),
            )
            recorded.drains.setdefault(name, []).append(drain)

    def _count_read_before(self) -> int:
        """Return the most batches of an epoch that an earlier start of the script has read."""
        if self.trace.starts == 1:
            return 0
        counts = [
            count
            for rank in self.trace.ranks
            for count in Counter(
                row.epoch
                for row in (*rank.rows, *rank.replayed)
                if row.slot == rank.slot and row.event == records.BATCH and not row.is_replayed
            ).values()
        ]
        return max(counts, default=0) + max(rates.count_ahead(rank) for rank in self.trace.ranks)

    def train(self, workers: int, left: int) -> None:
        """Have the script train on drained batches; ``left`` phases share the time that is left.

        Raises Stopped.
        """
        session, each_s = self._session, self._find_drained_step_s(f"warm-{workers}")
        fewest = 4 * max(1, workers) + _FEWEST
        steps_wanted = max(fewest, min(_MOST_STEPS, int(self.unit_s / each_s)))
        if self._life is not None:
            steps_wanted = min(steps_wanted, (self._life - session.count_batches()) // left - 2)
            if steps_wanted < _FEWEST:
                return
        # Ranks train together: all of them take the same number of steps.
        for rank, recorded, answer, start in self._send(
            do="train", workers=workers, steps=steps_wanted
        ):
            if "error" in answer:
                self.trace.note(f"training on data in memory failed: {answer['error']}")
                continue
            pairs = rates.find_steps(session.read_rows(rank)[start:], rank.slot)
            steps = [rates.make_step(*pair) for pair in pairs]
            recorded.trained.setdefault(workers, []).append(steps)

    def sample_stacks(self) -> None:
        """Drain with the job's own workers, and look at their stacks. Raises Stopped."""
        self.say("P: looking at the code that prepares")
        session = self._session
        with contextlib.suppress(DrainFailed):
            workers = self._recorded[0].workers
            self.drain("sampled", workers, self.unit_s, samples=True)
            for rank, answer in zip(self._recorded, session.send(self._ask_to_move()), strict=True):
                rank.moved = answer if "seconds" in answer else {}

    def _ask_to_move(self) -> dict[str, Any]:
        """Return the command to try what was seen on a batch, on the device."""
        seen = {name for rank in self._recorded for looks in rank.sampled for name in looks}
        return {"do": "move", "names": sorted(seen)}

    def alternate(self) -> None:
        """Have the script train on its own data and on prepared batches by turns. Raises Stopped.

        Without effect if there is no time for two turns, or if the script ends too soon; and if
        several ranks, or a stream, would run out of examples that nobody has read.
        """
        again = self._is_found_in_memory()
        if not again and (len(self._recorded) > 1 or self._recorded[0].described["iterable"]):
            return
        replayed_s = max(_find_step_s(rank.replayed[-100:], rank.slot) for rank in self._recorded)
        measured = max(_FEWEST, min(_MOST_STEPS, int(self.unit_s / 4 / replayed_s)))
        shares = [self._plan_own(), InterleavedPhase("replayed", 0, _SETTLE, measured, replayed_s)]
        for recorded, turns in self._take_turns("as it is and G once more", shares, again):
            recorded.turns = [Turn(*turn) for turn in turns]
        if not self._recorded[0].turns:
            self.trace.note("the split's intervals are those within a phase")

    def _plan_own(self) -> InterleavedPhase:
        """Return the share of the job's own data in a turn."""
        own_s = max(_find_step_s(rank.rows, rank.slot) for rank in self._recorded)
        workers = max(rank.workers for rank in self._recorded)
        ahead = max(rates.count_ahead(rank) for rank in self._recorded)
        return self._plan_share("own", workers, 1 + ahead, own_s)

    def _plan_kept(self, workers: int) -> InterleavedPhase:
        """Return the share of a cache that is read by so many workers."""
        prefetch = self._recorded[0].described["prefetch"] or 2
        each_s = self._find_drained_step_s("kept")
        return self._plan_share("kept", workers, 1 + prefetch * workers, each_s)

    def _plan_share(self, kind: str, workers: int, settle: int, each_s: float) -> InterleavedPhase:
        measured = min(_MOST_STEPS, int(self.unit_s / 2 / each_s))
        return InterleavedPhase(kind, workers, settle, measured, each_s).shorten(settle + measured)

    def _find_drained_step_s(self, name: str) -> float:
        """Return the seconds of a step on drained batches, as far as its parts tell."""
        each_s = _SHORTEST_S
        for rank in self._recorded:
            arrivals = rank.drains[name][-1].arrivals_ns
            steps = [row.entered_ns for row in rank.replayed[-100:]]
            for at in (arrivals[len(arrivals) // 2 :], steps):
                if len(at) > 1:
                    each_s = max(each_s, (at[-1] - at[0]) / (len(at) - 1) / 1e9)
        return each_s

    def _take_turns(
        self, called: str, shares: list[InterleavedPhase], again: bool
    ) -> Iterator[tuple[RankTrace, list[list[list[Step]]]]]:
        """Have the script train on each share by turns; yield the steps of each rank's turns.

        None if there is no time for two turns, or the script ends too soon. Raises Stopped.
        """
        session = self._session
        lasts_s = sum(share.batches * share.each_s for share in shares)
        turns = min(TURNS, int((self._deadline - time.monotonic()) / 3 / lasts_s))
        lack, remedy = "too little time", "; use more --max-seconds"
        if self._life is not None:
            # Another half is for what follows.
            left = (self._life - session.count_batches()) // 2
            if left < TURNS * sum(share.batches for share in shares):
                shares = [share.shorten(left // TURNS // len(shares)) for share in shares]
            most = left // sum(share.batches for share in shares)
            if most < turns:
                turns, lack, remedy = most, f"{self._life} batches of the script are too few", ""
        if turns < 2:
            self.trace.note(f"{called}: {lack} for two turns{remedy}")
            return
        self.say(f"{called}, in {turns} turns")
        batches = [share.batches for share in shares]
        for rank, recorded, answer, start in self._send(
            do="alternate", again=again, steps=turns * sum(batches),
            shares=[(share.kind, share.workers, share.batches) for share in shares],
        ):  # fmt: skip
            # Its epoch is over, or it was started again and has prepared no batches since.
            known = "StopIteration", "LookupError"
            if "error" in answer and not answer["error"].startswith(known):
                self.trace.note(f"training by turns failed: {answer['error']}")
            pairs = rates.find_steps(session.read_rows(rank)[start:], rank.slot)
            yield recorded, split_into_turns(pairs, shares)

    def _send(self, **command: Any) -> Iterator[tuple[RankTrace, RankTrace, dict[str, Any], int]]:
        """Send a command; return the ranks, their records and answers, and their rows before it."""
        began = [len(self._session.read_rows(rank)) for rank in self._ranks]
        answers = self._session.send(command)
        return zip(self._ranks, self._recorded, answers, began, strict=True)

    def _is_found_in_memory(self) -> bool:
        """True if the job's data were in the page cache, or are no files: an epoch is like another.

        Else only examples that nobody has read yet show how the job runs.
        """
        lines = [line for rank in self._recorded for line in rank.opened if line.get("pages")]
        found, pages = (sum(line["pages"][at] for line in lines) for at in (0, 1))
        return bool(found >= 0.99 * pages)

    def find_files(self) -> list[str]:
        """Return the files of the first drain."""
        trace = self.trace
        first = [rank.drains["found"][-1] for rank in self._recorded]
        opened = [line for rank in self._recorded for line in rank.opened]
        examples = sum(drain.made for drain in first)
        read_bytes = sum(max(0, work.read_bytes) for drain in first for work in drain.work)
        self.files, why_not = cold_reads.find_files(opened, examples, read_bytes)
        if why_not:
            trace.reasons["files"] = why_not
            for line in opened:  # the job has read other parts of them
                line["unread"] = False
        else:
            trace.files, trace.files_examples = self.files, examples
            for rank in self._recorded:
                rank.opened = [line for line in rank.opened if line["kind"] in ("file", "socket")]
        return self.files


def _in_a_line(error: str) -> str:
    """Return an error's message in a line, without the traceback of a worker."""
    lines = error.strip().splitlines()
    return error if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def _find_step_s(rows: Sequence[Row], slot: int) -> float:
    """Return the mean seconds from one batch to the next."""
    at = [row.entered_ns for row in rows if row.slot == slot and row.event == records.BATCH]
    if len(at) < 2:
        return _SHORTEST_S
    return max(_SHORTEST_S, (at[-1] - at[0]) / (len(at) - 1) / 1e9)


def _list_replayed(rank: RankTrace, rows: list[Row]) -> list[Row]:
    """Return a rank's rows of the training loader since prepared batches were handed over."""
    return [
        row
        for row in rows
        if row.slot == rank.slot and (row.is_replayed or row.event == records.SYNCHRONISED)
    ]


def split_into_turns(
    pairs: Sequence[tuple[Row, Row]], shares: Sequence[InterleavedPhase]
) -> list[list[list[Step]]]:
    """Return the steps of each turn and share, without the first ones of both."""
    places = [
        (at, place >= share.settle)
        for at, share in enumerate(shares)
        for place in range(share.batches)
    ]
    turns: dict[int, list[list[Step]]] = {}
    for before, row in pairs:
        number, place = divmod(before.number - pairs[0][0].number, len(places))
        at, counts = places[place]
        if counts:
            step = rates.make_step(before, row)
            turns.setdefault(number, [[] for _ in shares])[at].append(step)
    return [turn for turn in turns.values() if all(turn)]
