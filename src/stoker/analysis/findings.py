"""From rates to what they mean: the split of an epoch, what limits, and the report."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import msgspec

import stoker
from stoker import machine
from stoker.analysis import measuring
from stoker.analysis.advice import actions
from stoker.analysis.calibration import calibrated
from stoker.analysis.model import (
    FED,
    INFINITE,
    Measured,
    fetch_rate,
    predict,
)
from stoker.analysis.porting import port
from stoker.analysis.probe_record import AnalysisError, ProbeRecord, RankRecord, raw_phases
from stoker.analysis.report import (
    Action,
    AsItIs,
    Loader,
    PrepPoint,
    Rank,
    Rate,
    Rates,
    Report,
    Split,
    efficiency,
    measured_apart,
)
from stoker.analysis.verdict import doubts, nothing_seen, verdict

_SLOWER = 0.1  # a loader at less than this share of its files' rate is not limited by storage


def report_of(record: ProbeRecord) -> Report:
    """Draw up the report of a recorded analysis.

    Raises AnalysisError where the script showed nothing to report on.
    """
    if not record.ranks:
        raise AnalysisError(nothing_seen(record))
    found = [_Estimates(record, rank) for rank in record.ranks]
    paces = max(found, key=lambda one: one.wait_fraction)
    shell = paces.report(found)
    acts: list[Action] = []
    if paces.g is not None and paces.p is not None:
        predicted = predict(measured_apart(shell)).rate
        shell = msgspec.structs.replace(shell, predicted=predicted)
        acts = actions(shell)
    shell = msgspec.structs.replace(shell, actions=acts, doubts=doubts(shell))
    text = verdict(shell)
    if record.crash is not None:
        text = f"The script crashed {record.crash.when}. {text}"
    return msgspec.structs.replace(shell, verdict=text)


class _Estimates:
    """What one rank's record says."""

    def __init__(self, record: ProbeRecord, rank: RankRecord) -> None:
        self.record, self.rank = record, rank
        self.notes = list(record.notes)
        self.reasons: dict[str, str] = {}
        self.about = rank.loader(rank.slot)
        self.batch = measuring.batch_examples(rank)
        self.steady = measuring.steady(rank, self.batch)
        self.wait_fraction = self.steady.wait_fraction if self.steady else 0.0
        self._ingestion()
        self._prep()
        self._fetch()

    def _why(self, phase: str) -> str:
        return self.record.reasons.get(phase, "this phase did not come about")

    def _ingestion(self) -> None:
        self.g, self.step_cpu_s = measuring.ingestion(self.rank, self.batch)
        if self.g is None:
            self.reasons["G"] = self._why("G")

    def _prep(self) -> None:
        width = self.about["workers"]
        self.curve: list[PrepPoint] = []
        for name, drains in self.rank.drains.items():
            if name.startswith("warm-"):
                rate = measuring.drained(drains, self.batch)
                if rate is not None:
                    count = drains[0].workers
                    cpu_s = measuring.prep_cpu_s(drains, self.batch)
                    trained = measuring.trained(self.rank, count, self.batch)
                    self.curve.append(PrepPoint(count, rate, trained, cpu_s))
        self.curve.sort(key=lambda point: point.workers)
        self.p = next((c.rate for c in self.curve if c.workers == width), None)
        warm = [d for name, ds in self.rank.drains.items() if name[:4] == "warm" for d in ds]
        self.collate_s = measuring.collate_s(warm)
        if self.p is None:
            self.reasons["P"] = self._why("P")
        elif any(line["kind"] == "socket" for line in self.rank.opened):
            self.reasons["P"] = (
                "the data comes over the network and cannot be held in memory, so that preparing "
                "was never seen without fetching"
            )
        elif self.record.warm_fraction is not None and self.record.warm_fraction < 0.99:
            self.notes.append(
                f"P: only {self.record.warm_fraction:.0%} of the data stayed in memory during the "
                "warm drains, so that P holds some reading from storage; give the host more memory"
            )

    def _fetch(self) -> None:
        record, rank, p = self.record, self.rank, self.p
        self.s: Rate | None = None
        self.c: Rate | None = None
        self.s_most: Rate | None = None
        self.miss_s = 0.0
        self.cold = measuring.drained(rank.drains.get("cold", []), self.batch, once=True)
        self.x = self._cached_fraction()
        if record.files and record.cold_reads and p is not None and self.cold is not None:
            self._of_files(p, self.cold)
        elif self.cold is not None and p is not None and self.cold.high < p.low:
            self._of_drains(p, self.cold)
            self.notes.append(
                "S comes from cold and warm drains of the loader, for its files cannot be "
                f"read again as it reads them: {self._why('files')}"
            )
            self.reasons["C"] = "reading from memory is a part of P here"
        elif self.cold is not None and p is not None:
            self.reasons["S"] = self.reasons["C"] = (
                "the loader is as fast with nothing in memory as with everything: what it "
                f"fetches is hidden behind what it prepares ({self._why('files')})"
            )
        else:
            why = record.reasons.get("S") or record.reasons.get("files") or self._why("P")
            self.reasons["S"] = self.reasons["C"] = why
        self.f = self._fetch_rate()
        if self.f is None:
            self.reasons["F"] = "it takes S, C and the share that is cached"

    def _of_files(self, p: Rate, cold: Rate) -> None:
        """S, C and the wait for a miss from files that were read again."""
        record = self.record
        each = record.files_examples / len(record.files) / len(record.ranks)
        self.s = measuring.read_rate(record.cold_reads, each)
        self.c = measuring.read_rate(record.warm_reads, each)
        self.s_most = measuring.read_rate(record.most_reads, each)
        if self.s is None or self.c is None:
            return
        more_s = measuring.more_s(
            self.rank.drains.get("partly", []), self.rank.drains.get("whole", []), self.batch
        )
        if record.partly_fraction is not None and record.partly_fraction < 1.0:
            self.miss_s = more_s / (1.0 - record.partly_fraction)
        workers = max(1, self.about["workers"])
        expected = min(self.s.value, 1 / (1 / p.value + self.miss_s / workers))
        if cold.high < expected * (1 - _SLOWER) and cold.high < p.low:
            alone = self.s.value
            self._of_drains(p, cold)
            self.s_most = None
            self.notes.append(
                f"S is what the loader reached, {self.s.value:,.0f} examples/s; its files alone "
                f"were read at {alone:,.0f}: something besides storage (opening, seeking, a "
                "library that reads in small pieces) costs time on first reads"
            )

    def _of_drains(self, p: Rate, cold: Rate) -> None:
        """S and the wait for a miss from the loader itself: what cold adds to warm."""
        each_s = 1 / cold.value - 1 / p.value
        self.s = _scaled(cold, 1 / each_s)
        self.miss_s = each_s * max(1, self.about["workers"])

    def _cached_fraction(self) -> float | None:
        """Return the share of the data in the page cache, as the job met it.

        The drain that looked came after a part of the epoch had been read, which was then cached.
        """
        pages = [line["pages"] for line in self.rank.opened if line.get("pages") is not None]
        total = sum(count for _, count in pages)
        if not total:
            return None
        later: float = sum(resident for resident, _ in pages) / total
        examples = self.rank.described.get("examples")
        if not self.record.files or not examples or not self.rank.read_before_look:
            return later
        done = sum(row.slot == self.rank.slot and row.kind & 15 == 0 for row in self.rank.rows)
        ahead = self.about["workers"] * (self.rank.described.get("prefetch") or 0) + 8
        read = (done + ahead) * self.batch / examples
        return later if read >= 0.9 else max(0.0, (later - read) / (1.0 - read))

    def _fetch_rate(self) -> Rate | None:
        if self.s is None or self.x is None:
            return None
        x, s, c = self.x, self.s, self.c
        if c is None:
            if x >= 1.0:
                return None
            return Rate(*(rate / (1 - x) for rate in (s.value, s.low, s.high)))
        return Rate(
            fetch_rate(x, s.value, c.value),
            fetch_rate(x, s.low, c.low) if s.low > 0 and c.low > 0 else 0.0,
            fetch_rate(x, s.high, c.high),
        )

    @property
    def network(self) -> bool:
        """Whether examples come over the network."""
        return any(line["kind"] == "socket" for line in self.rank.opened)

    def split(self) -> Split:
        """Split the time of the job as it is.

        What is lost is measured: G against the job. The model says how much of it is fetching.
        """
        compute = 1.0 - self.wait_fraction
        if self.steady is not None and self.g is not None:
            lost = max(0.0, 1.0 - self.steady.rate.value / self.g.value)
            compute = 1.0 - min(lost, self._most_lost())
        if self.g is None or self.p is None:
            lost = 1.0 - compute
            return Split(compute, lost * (not self.network), lost * self.network)
        model = predict(self._as_it_ran(compute))
        return Split(model.compute, model.prep_stall, model.fetch_stall)

    def _most_lost(self) -> float:
        """Return an upper bound of what is lost to data: time inside ``next()``.

        Of the rank that waits longest, for the others wait for it; and, where training and
        preparation share processors, what that costs training.
        """
        seen = [measuring.steady(rank, self.batch) for rank in self.record.ranks]
        longest = max(one.wait_fraction + one.others_fraction for one in seen if one is not None)
        if self.g is None or self.p is None:
            return longest
        model = predict(self._measured())
        return longest + max(0.0, 1.0 - model.processors / self.g.value)

    def _measured(self) -> Measured:
        assert self.g is not None
        found = Measured(
            ingestion=self.g.value,
            prep=tuple((point.workers, point.rate.value) for point in self.curve),
            workers=self.about["workers"],
            cores=self._cores(),
            batch_size=self.batch,
            miss_s=self.miss_s,
            cached_fraction=self.x or 0.0,
            step_cpu_s=self.step_cpu_s,
            prep_fetches=self.network,
            prep_cpu=tuple((point.workers, point.cpu_s) for point in self.curve),
        )
        if self.s is not None:
            cache = self.c.value if self.c else INFINITE
            found = replace(found, storage=self.s.value, cache=cache)
        return replace(found, efficiency=efficiency(found, self.curve))

    def _as_it_ran(self, compute: float) -> Measured:
        job = self._measured()
        return job if self.steady is None else calibrated(job, self.steady.rate.value, compute)

    def _cores(self) -> int:
        return max(1, machine.usable_cores() // len(self.record.ranks))

    def bound(self, split: Split) -> str:
        """Name what limits the job: the model's word, where there is one."""
        if self.g is not None and self.p is not None:
            return predict(self._as_it_ran(split.compute)).bound
        if split.compute > 1.0 - FED:
            return "compute"
        return "fetch" if split.fetch_stall > split.prep_stall else "prep"

    def report(self, found: list[_Estimates]) -> Report:
        """Return the report, this rank being the one that paces the job; yet without advice."""
        record, rank, split = self.record, self.rank, self.split()
        ranks = []
        for one in found:
            own = one.split()
            stalled = own.prep_stall + own.fetch_stall
            others = max(0.0, stalled - one.wait_fraction) if len(found) > 1 else 0.0
            ranks.append(
                Rank(
                    rank=one.rank.rank,
                    rates=Rates(one.g, one.p_known, one.s, one.c, one.f),
                    split=own,
                    wait_fraction=one.wait_fraction,
                    others_fraction=others,
                )
            )
        steady = self.steady
        loaders = [self._loader(rank, about) for about in rank.about["loaders"]]
        if steady is not None and steady.others_fraction > 0.01:
            self.notes.append(
                f"the script reads other training loaders in lock-step, and waits for them "
                f"{steady.others_fraction:.0%} of the time; that counts as stalled, too. Choose "
                "one with --loader"
            )
        if self.network and self.p is not None:
            self.notes.append(
                "examples come over the network: all waiting is counted as fetching; fetching and "
                f"preparing together give {self.p.value:,.0f} examples/s"
            )
        if self.g is not None and self.step_cpu_s > 0 and not rank.described.get("cuda"):
            self.notes.append("no device was used: training runs on the host's processors")
        bytes_each = None
        if record.files:
            sizes = {
                line["name"]: line["bytes"]
                for one in record.ranks
                for line in one.opened
                if line["kind"] == "file"
            }
            bytes_each = sum(sizes.values()) / record.files_examples
        elif rank.drains.get("found"):
            work = rank.drains["found"][-1].work
            read = sum(max(0, w.read_bytes) for w in work)
            count = sum(w.examples for w in work)
            bytes_each = read / count if count and read and self.s is not None else None
        examples_total = rank.described.get("examples")
        if examples_total is not None:
            examples_total *= len(found)
        return Report(
            stoker=stoker.__version__,
            made=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=record.command,
            seconds=record.seconds,
            starts=record.starts,
            crash=record.crash,
            cores=self._cores(),
            memory_bytes=machine.usable_memory_bytes(),
            trains_on_cpu=not rank.described.get("cuda", False),
            loader=loaders[rank.about["loaders"].index(self.about)],
            loaders=loaders,
            examples=examples_total,
            example_bytes=bytes_each,
            cached_fraction=self.x,
            rates=Rates(self.g, self.p_known, self.s, self.c, self.f),
            reasons=self.reasons,
            split=split,
            verdict="",
            bound=self.bound(split),
            actions=[],
            notes=self.notes,
            as_it_is=AsItIs(steady.rate, steady.wait_fraction, steady.startup_s, steady.waits)
            if steady
            else None,
            prep=self.curve if self.p is not None else [],
            cold=self.cold,
            storage_most=self.s_most,
            miss_s=self.miss_s,
            copy_s=rank.described.get("copy_s"),
            step_cpu_s=self.step_cpu_s,
            after_s=self._after_s(),
            port=port(self.about, rank.described),
            stages={
                name: rate
                for name, blocks in record.stages.items()
                if (rate := measuring.rate_of(blocks)) is not None
            },
            ranks=ranks,
            phases=raw_phases(record),
        )

    def _after_s(self) -> dict[str, float]:
        if self.p_known is None:
            return {}
        if self.record.after_s is not None:
            return self.record.after_s
        return {"batch": 0.0, "after-augmentation": self.collate_s}

    @property
    def p_known(self) -> Rate | None:
        """P, where it is not fetching too."""
        return None if self.network else self.p

    def _loader(self, rank: RankRecord, about: dict[str, Any]) -> Loader:
        rows = [row for row in rank.rows if row.slot == about["slot"] and row.kind & 15 == 0]
        automatic = rank.described.get("automatic", True) if about is self.about else True
        return Loader(
            name=about["site"],
            describes=about["describes"],
            workers=about["workers"],
            batch_size=self.batch if about is self.about else float(about["batch_size"] or 1),
            unit="examples" if automatic or not rank.described.get("iterable") else "items",
            batches=len(rows),
            trains=any(row.kind & 16 for row in rows),
        )


def _scaled(like: Rate, value: float) -> Rate:
    return Rate(value, value * like.low / like.value, value * like.high / like.value)
