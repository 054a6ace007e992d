"""The analysis of a pipeline in this process, where its stages are known."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.pipeline import Pipeline
from stoker.stats import Stats

if TYPE_CHECKING:
    from stoker.analysis.probe_record import Drain, ProbeRecord, RankRecord
    from stoker.analysis.report import Report

_FEWEST = 8  # batches of a phase
_FILES = 2000  # that are looked at, or read again
_KEPT = 8  # batches that are handed over again and again
_PID = 0


def analyze(pipeline: Pipeline, step: Callable[[Any], object], *, budget_s: float = 60.0) -> Report:
    """Tell why training on a pipeline waits for data, and what would help.

    Runs, in this process and on copies of the pipeline (its epoch, position and statistics stay
    as they are): the job as it is, training on prepared batches (G), the pipeline alone with its
    data in memory at several numbers of workers (P), and, where the source is local files, the
    pipeline and its files cold and warm (S, C). Every stage gets a rate of its own. A line a phase
    goes to stderr. The method is that of Mohan et al. (VLDB 2021, section 4), with the training
    step switched off for P, S and C.

    Args:
        pipeline: without an echo: what one would bring is among the answers.
        step: called with each batch, as the training loop would be; it really trains. Where it
            uses a CUDA device, it need not synchronise.
        budget_s: about how many seconds the analysis may take; long steps take longer.

    Returns:
        The report; ``print(report)`` shows it. Rates are in examples/s.

    Raises:
        TypeError: ``pipeline`` is no pipeline, or ``step`` cannot be called.
        ValueError: the pipeline echoes, wraps a loader, or gives no batch.
    """
    from stoker.analysis.findings import report_of
    from stoker.analysis.probe_record import ProbeRecord

    if not isinstance(pipeline, Pipeline):
        raise TypeError(
            f"analyze needs a stoker pipeline, not {type(pipeline).__name__}; for a script with "
            "another loader: stoker analyze SCRIPT"
        )
    if not callable(step):
        raise TypeError(f"step is called with each batch; {type(step).__name__} cannot be")
    if pipeline.chain.echoes:
        raise ValueError("take .echo out: the analysis tells what echoing would bring")
    if pipeline.chain.source.yields_batches:
        raise ValueError(
            "the stages of a foreign loader are not known: stoker analyze SCRIPT looks inside"
        )
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: above 0")
    began = time.monotonic()
    record = ProbeRecord([f"stoker.analyze({pipeline!r}, {getattr(step, '__name__', 'step')})"])
    _Analysis(pipeline, step, budget_s / 20, record).run()
    record.seconds = time.monotonic() - began
    return report_of(record)


class _Analysis:
    def __init__(
        self, pipeline: Pipeline, step: Callable[[Any], object], unit_s: float, record: ProbeRecord
    ) -> None:
        from stoker import machine
        from stoker.analysis.probe_record import RankRecord

        self._pipeline, self._step, self._unit_s, self._record = pipeline, step, unit_s, record
        self._cores = machine.usable_cores()
        workers = pipeline.chain.workers
        self._kind = workers.kind if workers is not None else "thread"
        self._width = workers.count if workers is not None else self._cores
        about = {
            "slot": 0,
            "site": repr(pipeline),
            "describes": pipeline.chain.source.name,
            "batch_size": None,
            "workers": self._width,
        }
        self._rank: RankRecord = RankRecord(_PID, 0, {"loaders": [about]}, slot=0)
        self._rank.read_before_look = False
        self._batch = 1.0
        self._most = 1 << 40  # batches of a drain
        record.ranks = [self._rank]
        record.starts = 1

    def run(self) -> None:
        from stoker.analysis.waiting import more_workers

        paths = self._paths()
        self._look(paths)
        self._train()
        self._drain("found", self._width, 1.0)
        self._most = len(self._rank.drains["found"][0].arrivals_ns)
        counts = list(dict.fromkeys([self._width, 1, self._cores]))
        for again in range(2):
            if again and (more := more_workers(self._rank, max(counts), self._cores)) is not None:
                counts.append(more)
            for count in counts:
                self._drain(f"warm-{count}", count, 1.0)
                self._train_again(count)
        if paths:
            self._fetch(paths)
        else:
            self._record.reasons["S"] = "the source is not files on this host that are read whole"

    def _note_stages(self, stats: Stats) -> None:
        """Note what each stage takes, and what is paid behind each place of an echo."""
        for stage in stats.stages:
            self._record.stages.setdefault(stage.name, []).append((stage.examples, stage.seconds))
        maps = self._pipeline.chain.maps
        kinds = {stage.name: "random" if stage.is_random else "map" for stage in maps}
        costs = [
            (kinds.get(stage.name, "batch"), stage.seconds / max(1, stage.examples))
            for stage in stats.stages[1:]
        ]
        augments = [place for place, (kind, _) in enumerate(costs) if kind == "random"]
        mapped = [place for place, (kind, _) in enumerate(costs) if kind != "batch"]
        behind = mapped[-1] + 1 if mapped else 0
        first = augments[0] if augments else behind
        self._record.after_s = {
            "batch": 0.0,
            "after-augmentation": sum(cost for _, cost in costs[behind:]),
            "before-augmentation": sum(cost for _, cost in costs[first:]),
        }

    def _copy(self, workers: int) -> Pipeline:
        chain = self._pipeline.chain
        copy = Pipeline(chain)
        if workers != self._width or chain.workers is None:
            copy = copy.workers(max(workers, self._kind == "process"), kind=self._kind)
        copy.set_epoch(self._pipeline.epoch)
        return copy

    def _train(self) -> None:
        """As it is, then G: the last batches again and again."""
        from stoker.analysis.probe.replay import Bank

        say("as it is")
        pipeline, rank = self._copy(self._width), self._rank
        kept: list[Any] = []
        epochs = itertools.count()
        until = time.monotonic() + 2 * self._unit_s
        while len(rank.rows) < 2 * _FEWEST or time.monotonic() < until:
            before = len(rank.rows)
            with iter(pipeline) as batches:
                for batch in self._rows(batches, rank.rows, next(epochs), 0):
                    if len(kept) < _KEPT:
                        kept.append(batch)
                    self._step(batch)
                    if len(rank.rows) > 2 * _FEWEST and time.monotonic() > until:
                        break
            if len(rank.rows) - before < 2:
                break
        if not kept:
            raise ValueError("the pipeline gave no batch")
        _synchronise()
        stats = pipeline.stats()
        self._batch = stats.uses / max(1, stats.batches)
        say("G: the same batches again and again")
        bank = Bank(kept)
        until = time.monotonic() + 2 * self._unit_s
        again = (bank.next() for _ in itertools.count())
        for batch in self._rows(again, rank.replayed, 0, 32):
            self._step(batch)
            if len(rank.replayed) > _FEWEST and time.monotonic() > until:
                break
        _synchronise()
        rank.described = {
            "cuda": _on_device(),
            "examples": _length(self._pipeline, self._batch),
            "prefetch": 2,
            "ordered": False,
        }

    def _train_again(self, workers: int) -> None:
        """Train on what was drained, now in memory."""
        pipeline = self._copy(workers)
        steps_s: list[float] = []
        until = time.monotonic() + self._unit_s
        with iter(pipeline) as batches:
            entered = time.perf_counter()
            for batch in batches:
                self._step(batch)
                asked = time.perf_counter()
                steps_s.append(asked - entered)
                if len(steps_s) >= self._most or (
                    len(steps_s) > 3 * _FEWEST and time.monotonic() > until
                ):
                    break
                entered = asked
        self._rank.trained.setdefault(workers, []).append(steps_s)

    def _rows(self, batches: Iterator[Any], rows: list[Any], epoch: int, flag: int) -> Any:
        from stoker.analysis.probe.records import BATCH, END, STARTED, TRAINS, Row

        clock = time.perf_counter_ns
        began = clock()
        rows.append(Row(0, epoch, 0, began, began, STARTED | TRAINS, time.process_time_ns()))
        for number in itertools.count():
            entered, cpu = clock(), time.process_time_ns()
            batch = next(batches, None)
            kind = (END if batch is None else BATCH) | TRAINS | flag
            rows.append(Row(0, epoch, number, entered, clock(), kind, cpu))
            if batch is None:
                return
            yield batch

    def _drain(self, name: str, workers: int, share: float) -> None:
        from stoker.analysis.probe_record import Drain

        say(f"P: {name.replace('-', ', workers: ')}")
        pipeline = self._copy(workers)
        until = time.monotonic() + share * self._unit_s
        total = 0
        while True:
            arrivals: list[int] = []
            began, cpu = time.perf_counter_ns(), _cpu_s()
            with iter(pipeline) as batches:
                for _ in batches:
                    arrivals.append(time.perf_counter_ns())
                    if len(arrivals) >= self._most:
                        break
                    if total + len(arrivals) >= _FEWEST and time.monotonic() > until:
                        break
            cpu_s = _cpu_s() - cpu
            work = self._work(len(arrivals), cpu_s)
            # Batches are handed over within the process: nothing is received.
            drain: Drain = Drain(workers, arrivals, began, 0.0, "time", None, work)
            self._rank.drains.setdefault(name, []).append(drain)
            total += len(arrivals)
            enough = total >= _FEWEST and time.monotonic() > until
            if enough or name in ("found", "cold", "partly", "whole") or not arrivals:
                break
            pipeline.set_epoch(self._pipeline.epoch)
        if name == f"warm-{self._width}":
            self._note_stages(pipeline.stats())

    def _work(self, batches: int, cpu_s: float) -> list[Any]:
        from stoker.analysis.probe.records import WorkRecord

        each_ns = int(cpu_s * 1e9 / max(1, batches))
        examples = round(self._batch)
        return [
            WorkRecord(_PID, 0, 0, 0, each_ns * n, 0, examples, -1) for n in range(1, batches + 1)
        ]

    def _paths(self) -> list[str]:
        source = self._pipeline.chain.plan.indexed
        if source is None:
            return []
        count, paths = len(source), []
        for index in range(0, count, max(1, count // _FILES)):
            path = source.path(index)
            if path is None or not os.path.isfile(path):
                return []
            paths.append(path)
        return paths[:_FILES]

    def _look(self, paths: list[str]) -> None:
        from stoker.analysis.probe.residency import resident_pages

        for path in paths:
            line = {"kind": "file", "name": path, "bytes": os.path.getsize(path)}
            self._rank.opened.append(line | {"pages": resident_pages(path)})

    def _fetch(self, paths: list[str]) -> None:
        from stoker.analysis import reading
        from stoker.analysis.draining import drop_part, read_again

        record, source = self._record, self._pipeline.chain.plan.indexed
        assert source is not None
        every = [source.path(index) or "" for index in range(len(source))]
        for _ in range(2):
            say("S: the pipeline, then its files, with nothing in memory")
            try:
                reading.drop_files(every)
                left = reading.resident_fraction(paths)
            except OSError as error:
                record.reasons["S"] = f"the files cannot be read: {error}"
                return
            if left is None or left > 0.05:
                record.reasons["S"] = "files stayed in the page cache after they were dropped"
                return
            record.cold_fraction = left
            self._drain("cold", self._width, 1.0)
            record.files, record.readers = paths, max(1, self._width)
            record.files_examples = len(paths)
            read_again(record, self._unit_s / 2)
            batches = len(self._rank.drains[f"warm-{self._width}"][-1].arrivals_ns)
            if drop_part(record, batches * self._batch / self._unit_s):
                self._drain("partly", self._width, 1.0)
                self._drain("whole", self._width, 1.0)


def _length(pipeline: Pipeline, batch: float) -> int | None:
    try:
        return round(len(pipeline) * batch)
    except TypeError:
        return None


def _on_device() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def _synchronise() -> None:
    if _on_device():
        sys.modules["torch"].cuda.synchronize()


def _cpu_s() -> float:
    """Return the processor seconds of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def say(text: str) -> None:
    """Tell on stderr what goes on."""
    print(f"stoker.analyze: {text}", file=sys.stderr)
