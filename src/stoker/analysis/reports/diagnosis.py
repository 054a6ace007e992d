"""Draws conclusions from rates: the split of an epoch, the limit, and the report.

The loss is a difference: G against the job as it ran, at most the time spent inside ``next()``.
The model, calibrated to the job's rate and to that loss, says which part of it is fetching, and
names the limit. Rates are those of the rank that waits longest.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from stoker.analysis.host_load import join_loads
from stoker.analysis.model import rates
from stoker.analysis.model.calibration import MOST_ALONE, calibrate
from stoker.analysis.model.changes import find_ends
from stoker.analysis.model.formulas import fetch_rate, inverse
from stoker.analysis.model.model import FED, Measured, predict
from stoker.analysis.model.report import (
    Action,
    DeviceTrial,
    Interval,
    Loader,
    Prepared,
    PrepPoint,
    Rank,
    Rate,
    Rates,
    Report,
    Split,
    SplitIntervals,
    find_point,
    to_measured_apart,
)
from stoker.analysis.model.trace import (
    AnalysisError,
    Drain,
    RankTrace,
    Trace,
)
from stoker.analysis.probe.records import BATCH
from stoker.analysis.probe.state import tell_changes, tell_moves
from stoker.analysis.reports.advice import advise, forecast_move
from stoker.analysis.reports.verdict import explain_nothing_seen, find_doubts, write_verdict
from stoker.basics import resources
from stoker.version import __version__

# A loader that is slower than its files by more than this share is not limited by storage. Chosen,
# not measured.
_SLOWER = 0.1

# Options of scripts: --epochs 90, --num_train_epochs=3, trainer.max_epochs=5.
_EPOCHS = re.compile(r"[-_.]epochs?[ =](\d+)\b")
# Shares with wider intervals cannot be told. Chosen, not measured.
_TELLS = 0.25
_SHARES = {
    "compute": "training computes",
    "prep_stall": "it loses to preparing",
    "fetch_stall": "it loses to fetching",
}

# Processor seconds that a worker's second takes from training: its own, and at most as much again,
# as hardware threads of one core, caches and memory are shared. PyTorch's super_resolution example
# on two hardware threads: 0.57 of G beside a worker that takes 0.21 of the processors.
_MOST_TAKEN = 2.0


def make_report(trace: Trace) -> Report:
    """Draw up the report of a recorded analysis.

    Raises AnalysisError if the script gave nothing to report on.
    """
    if trace.report is not None:
        return trace.report
    if not trace.ranks:
        raise AnalysisError(explain_nothing_seen(trace))
    found = [_RankFindings(trace, rank) for rank in trace.ranks]
    paces = max(found, key=lambda one: one.wait_fraction)
    shell = paces.make_report(found)
    acts: list[Action] = []
    if paces.has_model:
        predicted = predict(to_measured_apart(paces._shell)).rate
        shell = msgspec.structs.replace(shell, predicted=predicted)
        acts = advise(shell)
        move = forecast_move(shell)
        if move is not None and move not in acts:
            told = f"{move.title}: {move.gain.value:.2f} times as fast. {move.why}"
            shell = msgspec.structs.replace(shell, notes=[*shell.notes, told])
    doubts = find_doubts(shell)
    if trace.out_of_time:
        doubts.append(f"the time for the analysis was up {trace.out_of_time}")
    shell = msgspec.structs.replace(shell, actions=acts, doubts=doubts)
    text = write_verdict(shell)
    if trace.crash is not None:
        text = f"The script crashed {trace.crash.when}. {text}"
    return msgspec.structs.replace(shell, verdict=text)


class _RankFindings:
    """The conclusions from one rank's record."""

    def __init__(self, trace: Trace, rank: RankTrace) -> None:
        self.trace, self.rank = trace, rank
        self.notes = list(trace.notes)
        self.reasons: dict[str, str] = {}
        self.about = rank.loader(rank.slot)
        if changes := self.about["changes"]:
            self.notes.append(
                f"{tell_changes(changes)}. Workers that persist, or examples that are kept, would "
                "not see that: neither is advised"
            )
        if moves := rank.described.get("moves"):
            self.notes.append(
                f"{tell_moves(moves)}. Workers that persist, or examples that are kept, would give "
                "others: neither is advised, and stoker run leaves the loader as it is"
            )
        self.batch = rates.estimate_batch_size(rank)
        self.steady, self.others_fraction = rates.estimate_steady(rank, self.batch)
        self.wait_fraction = self.steady.wait_fraction if self.steady else 0.0
        # Whether examples come over the network.
        self.is_networked = any(line["kind"] == "socket" for line in rank.opened)
        self.g, self.step_cpu_s = rates.estimate_ingestion(rank, self.batch)
        if self.g is None:
            self.reasons["G"] = self._explain("G")
        blocks = ((name, rates.estimate_rate(found)) for name, found in trace.stages.items())
        self.stages = {name: rate for name, rate in blocks if rate is not None}
        self._estimate_prep()
        self._estimate_fetch()
        self.transforms = rates.estimate_costs(rank.sampled, rank.drains.get("sampled", []))
        if self.stages:
            self.transforms = rates.estimate_stage_costs(self.stages)
        elif not self.transforms and rank.drains.get("sampled"):
            looks = sum(sum(batch.values()) for batch in rank.sampled)
            self.reasons["transforms"] = (
                f"{looks} looks at the code that prepares are too few: batches take too little "
                "time, or a thread makes them that is not its process's main one"
            )
        self.has_model = self.g is not None and self.p is not None
        shares = self._list_compute_shares()
        most = MOST_ALONE if self.about["workers"] == 0 and self.g is not None else 1.0
        self.compute = min(most, sum(shares) / len(shares))
        self.compute_interval = self._find_compute_interval(shares)

    def _explain(self, phase: str) -> str:
        return self.trace.reasons.get(phase, "this phase did not take place")

    def _estimate_prep(self) -> None:
        warm = [drains for name, drains in self.rank.drains.items() if name.startswith("warm-")]
        trained, turns = self.rank.trained, self.rank.kept_turns
        self.curve = self._estimate_curve(
            warm, lambda count: rates.estimate_trained(trained.get(count, []), count, self.batch)[0]
        )
        as_it_is = self.steady.rate if self.steady else None
        kept = self._estimate_curve(
            [self.rank.drains[name] for name in ("kept",) if name in self.rank.drains],
            lambda count: rates.estimate_kept(turns, count, self.batch, as_it_is),
        )
        self.kept = kept[0] if kept else None
        # Of training on data in memory, by the job's own workers.
        own = self.rank.trained.get(self.about["workers"], [])
        self.outside_s = rates.estimate_trained(own, self.about["workers"], self.batch)[1]
        self.own = find_point(self.curve, self.about["workers"])
        self.p = None if self.own is None else self.own.rate
        # P, where it is not fetching too.
        self.p_known = None if self.is_networked else self.p
        if self.p is None:
            self.reasons["P"] = self._explain("P")
        elif self.is_networked:
            self.reasons["P"] = (
                "the data comes over the network and cannot be kept in memory, so preparing was "
                "never measured without fetching"
            )
        # Less than a hundredth changes P by less than its interval.
        elif self.trace.warm_fraction is not None and self.trace.warm_fraction < 0.99:
            self.notes.append(
                f"P: only {self.trace.warm_fraction:.0%} of the data stayed in memory during the "
                "warm drains, so P includes some reading from storage; give the host more memory"
            )

    def _estimate_curve(
        self, several: list[list[Drain]], estimate_trained: Callable[[int], Rate | None]
    ) -> list[PrepPoint]:
        """Return a point for each number of workers, ascending."""
        curve = []
        for drains in sorted(several, key=lambda drains: drains[0].workers):
            rate, count = rates.estimate_drained(drains, self.batch), drains[0].workers
            if rate is not None:
                cpu_s = rates.estimate_prep_cpu_s(drains, self.batch)
                startup_s = min((d.arrivals_ns[0] - d.began_ns) / 1e9 for d in drains)
                trained = estimate_trained(count)
                curve.append(PrepPoint(count, rate, trained, cpu_s, startup_s))
        return curve

    def _estimate_fetch(self) -> None:
        trace, rank, p = self.trace, self.rank, self.p
        self.s: Rate | None = None
        self.c: Rate | None = None
        self.s_most: Rate | None = None
        self.miss_s = 0.0
        self.cold = rates.estimate_drained(rank.drains.get("cold", []), self.batch, once=True)
        self.x = self._estimate_cached_fraction()
        if trace.files and trace.cold_reads and p is not None and self.cold is not None:
            self._use_files(p, self.cold)
        elif self.cold is not None and p is not None and self.cold.high < p.low:
            self._use_drains(p, self.cold)
            self.notes.append(
                "S comes from cold and warm drains of the loader, because its files cannot be "
                f"read again as it reads them: {self._explain('files')}"
            )
            self.reasons["C"] = "P includes reading from memory here"
        elif self.cold is not None and p is not None:
            self.reasons["S"] = self.reasons["C"] = (
                "the loader is as fast with nothing in memory as with everything: preparing "
                f"takes so long that fetching costs no time ({self._explain('files')})"
            )
        else:
            why = trace.reasons.get("S") or trace.reasons.get("files") or self._explain("P")
            self.reasons["S"] = self.reasons["C"] = why
        self.f = self._estimate_fetch_rate()
        if self.f is None:
            self.reasons["F"] = "it takes S, C and the share that is cached"

    def _use_files(self, p: Rate, cold: Rate) -> None:
        """Take S, C and the wait for a miss from files that were read again."""
        trace = self.trace
        each = trace.files_examples / len(trace.files) / len(trace.ranks)
        self.s = rates.estimate_reads(trace.cold_reads, each)
        self.c = rates.estimate_reads(trace.warm_reads, each)
        self.s_most = rates.estimate_reads(trace.most_reads, each)
        if self.s is None or self.c is None:
            return
        more_s = rates.estimate_more_s(
            self.rank.drains.get("partly", []), self.rank.drains.get("whole", []), self.batch
        )
        if trace.partly_fraction is not None and trace.partly_fraction < 1.0:
            self.miss_s = more_s / (1.0 - trace.partly_fraction)
        workers = max(1, self.about["workers"])
        expected = min(self.s.value, 1 / (1 / p.value + self.miss_s / workers))
        if cold.high < expected * (1 - _SLOWER) and cold.high < p.low:
            alone = self.s.value
            self._use_drains(p, cold)
            self.s_most = None
            self.notes.append(
                f"S is what the loader reached, {self.s.value:,.0f} examples/s; its files alone "
                f"were read at {alone:,.0f}: something besides storage (opening, seeking, a "
                "library that reads in small pieces) costs time on first reads"
            )

    def _use_drains(self, p: Rate, cold: Rate) -> None:
        """Take S and the wait for a miss from the loader itself: cold drains against warm ones."""
        each_s = 1 / cold.value - 1 / p.value
        self.s = _scale_rate(cold, 1 / each_s)
        self.miss_s = each_s * max(1, self.about["workers"])

    def _estimate_cached_fraction(self) -> float | None:
        """Return the fraction in the page cache of the data that the job has not read.

        Where the files of unread examples are known, these alone count. Of files that many examples
        share, and of a new random order, the part that the job has read is subtracted.
        """
        known = [line for line in self.rank.opened if line.get("pages") is not None]
        unread = [line for line in known if line["unread"]]
        pages = [line["pages"] for line in unread or known]
        total = sum(count for _, count in pages)
        if not total:
            return None
        found: float = sum(resident for resident, _ in pages) / total
        done = sum(row.slot == self.rank.slot and row.event == BATCH for row in self.rank.rows)
        if unread or not done:
            return found
        examples = self.rank.described.get("examples")
        read = (done + rates.count_ahead(self.rank)) * self.batch / examples if examples else 1.0
        # Where nearly all was read by the job itself, too little is left to tell what was there
        # before.
        if read < 0.9:
            return max(0.0, (found - read) / (1.0 - read))
        self.notes.append(
            f"the {found:.0%} in the page cache are of data that the job had read itself (nearly "
            "all of it, or the beginning of a stream): a later epoch finds them, the first did not"
        )
        return found

    def _estimate_fetch_rate(self) -> Rate | None:
        x, s, c = self.x, self.s, self.c
        if s is None or x is None or (c is None and x >= 1.0):
            return None
        if c is None:
            return _scale_rate(s, s.value / (1 - x))
        return Rate(
            fetch_rate(x, s.value, c.value),
            fetch_rate(x, s.low, c.low) if s.low > 0 and c.low > 0 else 0.0,
            fetch_rate(x, s.high, c.high),
        )

    def make_split(self) -> Split:
        """Split the time of the job as it is: the model says how much of the loss is fetching."""
        if not self.has_model:
            return self._split_loss(self.compute)
        model = predict(self._to_calibrated(self.compute))
        # Once more, with the report's own rounded values, by which its readers calibrate.
        model = predict(self._to_calibrated(model.compute))
        return Split(model.compute, model.prep_stall, model.fetch_stall)

    def _split_loss(self, compute: float) -> Split:
        """Split the time without a model: all that is lost is fetching, or all of it preparing."""
        lost = 1.0 - compute
        return Split(compute, lost * (not self.is_networked), lost * self.is_networked)

    def _list_compute_shares(self) -> list[float]:
        """Return the fraction of the time that the job computes, at first and in each turn.

        It is the job's speed over G. What it loses is at most what it can have lost by its waits:
        by those of the rank that waits longest, as the others wait for it.
        """
        if self.steady is None or self.g is None:
            return [1.0 - self.wait_fraction]
        seen = [rates.estimate_steady(rank, self.batch) for rank in self.trace.ranks]
        waits = max(one.wait_fraction + others for one, others in seen if one is not None)
        found = [(self.steady.rate.value, self.g.value, waits)]
        turns = [rates.estimate_turns(rank, self.batch) for rank in self.trace.ranks]
        own = rates.estimate_turns(self.rank, self.batch)
        for number, (rate, g, _) in enumerate(own):
            waits = max(many[number][2] for many in turns if number < len(many))
            found.append((rate, g, waits + self.others_fraction))
        beside = self._estimate_loss_beside()
        return [1.0 - min(max(0.0, 1.0 - rate / g), waits + beside) for rate, g, waits in found]

    def _find_compute_interval(self, shares: list[float]) -> tuple[float, float]:
        """Return where the share of compute would lie in another analysis.

        Without turns it is as wide as the intervals of the speed and of G make it.
        """
        among = rates.estimate_mean(shares)
        low, high = among.low, among.high
        if self.steady is not None and self.g is not None:
            rate, g = self.steady.rate, self.g
            low = min(low, self.compute * rate.low / rate.value * g.value / g.high)
            high = max(high, self.compute * rate.high / rate.value * g.value / max(g.low, 1e-9))
        # Not 0: the model divides by it.
        return max(0.01, min(low, self.compute)), min(1.0, max(high, self.compute))

    def _find_intervals(self, split: Split) -> SplitIntervals:
        """Return the intervals of the split: the model's answers at the ends of what was measured.

        The ends are those of the share of compute, of P and of S.
        """
        found = [split]
        for compute in self.compute_interval:
            if not self.has_model:
                found.append(self._split_loss(compute))
                continue
            apart = to_measured_apart(self._agreed)
            for p, s in itertools.product(find_ends(self.p), find_ends(self.s)):
                job = replace(
                    apart,
                    prep=tuple((count, p * rate) for count, rate in apart.prep),
                    storage=None if apart.storage is None else s * apart.storage,
                )
                if self.steady is not None:
                    job = calibrate(job, self.steady.rate.value, compute)
                model = predict(job)
                found.append(Split(model.compute, model.prep_stall, model.fetch_stall))

        def span(values: list[float]) -> Interval:
            return Interval(max(0.0, min(values)), min(1.0, max(values)))

        return SplitIntervals(
            **{name: span([getattr(one, name) for one in found]) for name in _SHARES}
        )

    def _list_untold(self, split: Split, intervals: SplitIntervals) -> list[str]:
        """Return what cannot be told: stalls apart from each other, or shares too uncertain."""
        found = []
        if self.s is None and self.cold is None and self.rank.opened and not self.is_networked:
            lost = split.prep_stall + split.fetch_stall
            if lost > FED:
                found.append(
                    f"how much of the {lost:.0%} that is lost goes to fetching: {self.reasons['S']}"
                )
        for name, words in _SHARES.items():
            share: Interval = getattr(intervals, name)
            if share.high - share.low > _TELLS:
                found.append(f"how much of the time {words}: {share.low:.0%} to {share.high:.0%}")
        return found

    def _estimate_loss_beside(self) -> float:
        """Return an upper bound of what workers beside training take from it.

        It is known by the processor time of both, or by how much slower than G training itself was
        on data in memory, where workers took processors meanwhile.
        """
        if not self.about["workers"] or not self.g or self.own is None or self.steady is None:
            return 0.0
        model = predict(to_measured_apart(self._shell))
        slowed = 1.0 - inverse(self.outside_s) / self.g.value
        most = _MOST_TAKEN * self.own.cpu_s * self.steady.rate.value / self._shell.cores
        return max(0.0, 1.0 - model.processors / self.g.value, min(slowed, most))

    def _to_calibrated(self, compute: float) -> Measured:
        job = to_measured_apart(self._agreed)
        return job if self.steady is None else calibrate(job, self.steady.rate.value, compute)

    def find_bound(self, split: Split) -> str:
        """Name the job's limit: by the model, if there is one."""
        if self.has_model:
            return predict(self._to_calibrated(split.compute)).bound
        if split.compute > 1.0 - FED:
            return "compute"
        return "fetch" if split.fetch_stall > split.prep_stall else "prep"

    def make_report(self, found: list[_RankFindings]) -> Report:
        """Return the report of this rank, which paces the job, without advice yet."""
        split = self.make_split()
        intervals = self._find_intervals(split)
        ranks = []
        for one in found:
            own, waits = one.make_split(), one.wait_fraction
            others = max(0.0, own.prep_stall + own.fetch_stall - waits) if len(found) > 1 else 0.0
            ranks.append(Rank(one.rank.rank, one._agreed.rates, own, waits, others))
        # Less than a hundredth of the time is not worth a line.
        if self.others_fraction > 0.01:
            self.notes.append(
                f"the script reads other training loaders in lock-step, and waits for them "
                f"{self.others_fraction:.0%} of the time; that counts as stalled, too. Choose "
                "one with --loader"
            )
        if self.is_networked and self.p is not None:
            self.notes.append(
                "examples come over the network: all waiting is counted as fetching; fetching and "
                f"preparing together give {self.p.value:,.0f} examples/s"
            )
        if self.g is not None and self.step_cpu_s > 0 and not self.rank.described.get("cuda"):
            self.notes.append("no device was used: training runs on the host's processors")
        return msgspec.structs.replace(
            self._agreed,
            split=split,
            split_intervals=intervals,
            untold=self._list_untold(split, intervals),
            bound=self.find_bound(split),
            notes=self.notes,
            ranks=ranks,
        )

    @cached_property
    def _agreed(self) -> Report:
        """Return the shell with one G: the job's own speed over its fraction of compute.

        Where the two measurements of G differ, its interval spans both.
        """
        if self.steady is None or self.g is None:
            return self._shell
        value = self.steady.rate.value / self.compute
        scaled = _scale_rate(self.g, value)
        g = Rate(value, min(scaled.low, self.g.low), max(scaled.high, self.g.high))
        agreed = msgspec.structs.replace(self._shell.rates, G=g)
        return msgspec.structs.replace(self._shell, rates=agreed)

    @cached_property
    def _shell(self) -> Report:
        """Return the report without its conclusions: G as it was measured, no split, no limit."""
        trace, rank = self.trace, self.rank
        loaders = [self._make_loader(about) for about in rank.about["loaders"]]
        bytes_each = file_bytes = None
        if trace.files:
            opened = (line for one in trace.ranks for line in one.opened if line["kind"] == "file")
            sizes = {line["name"]: line["bytes"] for line in opened}
            bytes_each = sum(sizes.values()) / trace.files_examples
            file_bytes = sum(sizes.values()) / len(sizes)
        elif rank.drains.get("found") and self.s is not None:
            work = rank.drains["found"][-1].work
            read = sum(max(0, w.read_bytes) for w in work)
            count = sum(w.examples for w in work)
            bytes_each = read / count if count and read else None
        examples = rank.described.get("examples")
        return Report(
            stoker=__version__,
            made=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=trace.command,
            seconds=trace.seconds,
            starts=trace.starts,
            crash=trace.crash,
            cores=trace.share_of_cores,
            host=join_loads(trace.host_loads),
            memory_bytes=resources.usable_memory_bytes(),
            trains_on_cpu=not rank.described.get("cuda", False),
            loader=loaders[rank.about["loaders"].index(self.about)],
            loaders=loaders,
            examples=None if examples is None else examples * len(trace.ranks),
            example_bytes=bytes_each,
            file_bytes=file_bytes,
            cached_fraction=self.x,
            rates=Rates(self.g, self.p_known, self.s, self.c, self.f),
            replayed=self.g,
            reasons=self.reasons,
            split=Split(1.0, 0.0, 0.0),
            verdict="",
            bound="",
            actions=[],
            as_it_is=self.steady,
            prep=self.curve if self.p is not None else [],
            transforms=self.transforms,
            on_device=[
                DeviceTrial(name, seconds, rank.moved["device"])
                for name, seconds in rank.moved.get("seconds", {}).items()
            ],
            step=rates.estimate_step_costs(rank),
            cold=self.cold,
            storage_most=self.s_most,
            miss_s=self.miss_s,
            copy_s=rank.described.get("copy_s"),
            step_cpu_s=self.step_cpu_s,
            echo_after_s=None if self.p_known is None else trace.echo_after_s,
            startup_s=(
                rates.estimate_startup_s(rank)
                if rank.workers and rank.described.get("persistent") is False
                else 0.0
            ),
            kept=self.kept,
            prepared=(
                Prepared(rank.described["example_bytes"], rank.described["varies"])
                if "varies" in rank.described
                else None
            ),
            run_s=self._find_run_s(),
            stages=self.stages,
            thread_trial=trace.thread_trial,
            process_trial=trace.process_trial,
            keeping=trace.keeping,
        )

    def _find_run_s(self) -> float | None:
        """Return the seconds of the whole training, by its own end or an option ``--epochs``."""
        if self.steady is None:
            return None
        batches, examples = self.trace.batches, self.rank.described.get("examples")
        epochs = _EPOCHS.search(" ".join(self.trace.command))
        if batches is None and epochs is not None and examples:
            batches = int(epochs[1]) * examples / self.batch
        return batches * self.batch / self.steady.rate.value if batches else None

    def _make_loader(self, about: dict[str, Any]) -> Loader:
        rank, is_own = self.rank, about is self.about
        rows = [row for row in rank.rows if row.slot == about["slot"] and row.event == BATCH]
        whole = rank.described.get("iterable") and not rank.described.get("automatic", True)
        return Loader(
            name=about["site"],
            describes=about["describes"],
            workers=about["workers"],
            batch_size=self.batch if is_own else float(about["batch_size"] or 1),
            unit="items" if is_own and whole else "examples",
            batches=len(rows),
            trains=any(row.trains for row in rows),
            changes=about["changes"],
            moves=rank.described.get("moves", []) if is_own else [],
            is_stream=is_own and bool(rank.described.get("iterable")),
            place=tuple(about["place"]) if about.get("place") else None,
        )


def _scale_rate(like: Rate, value: float) -> Rate:
    return Rate(value, value * (like.low / like.value), value * (like.high / like.value))
