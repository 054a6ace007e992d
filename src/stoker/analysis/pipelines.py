"""A pipeline as a job under analysis: it runs in this process, and its stages are known."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

from stoker.analysis.model.report import Keeping
from stoker.analysis.model.trace import Drain, RankTrace, Step, Trace, Turn
from stoker.analysis.phases import TURNS, run_phases
from stoker.analysis.probe.records import BATCH, END, REPLAYED, STARTED, TRAINS, Row, WorkRecord
from stoker.analysis.probe.replay import Bank
from stoker.analysis.probe.residency import resident_pages
from stoker.basics import resources
from stoker.errors import CacheWarning
from stoker.pipeline import Pipeline
from stoker.stages.cache import CacheStage
from stoker.stages.map import Map
from stoker.stats import Stats

# The fewest batches of a phase: one for each block of an interval (analysis/model/rates.py).
_FEWEST = 8
# The most files that are inspected or read again: seconds of reading on a slow disk. Chosen, not
# measured.
_FILES = 2000
# Batches that G repeats, as in a script (analysis/probe/replay.py).
_KEPT = 8
# More batches than any drain has.
_EVERYTHING = 1 << 40
# A placeholder for a process id: only this process is analyzed.
_PID = 0


def trace_pipeline(pipeline: Pipeline, step: Callable[[Any], object], max_seconds: float) -> Trace:
    """Run a pipeline through the phases; see ``stoker.analyze``."""
    if not isinstance(pipeline, Pipeline):
        raise TypeError(
            f"analyze needs a stoker pipeline, not {type(pipeline).__name__}; for a script with "
            "another loader: stoker analyze SCRIPT"
        )
    if not callable(step):
        raise TypeError(f"step must be a function of a batch, not a {type(step).__name__}")
    if pipeline.chain.echo is not None:
        raise ValueError("leave .echo out for an analysis, which says what echoing would bring")
    if pipeline.chain.source.yields_batches:
        raise ValueError(
            "analyze cannot see inside a loader that a pipeline reads: iterate over the loader "
            "itself, and use stoker analyze SCRIPT"
        )
    if not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds}: must be above 0")
    began = time.monotonic()
    # A phase takes one or two of these parts of the time. Chosen, not measured.
    job = PipelineJob(pipeline, step, max_seconds / 25)
    run_phases(job)
    job.trace.seconds = time.monotonic() - began
    return job.trace


class PipelineJob:
    """A pipeline and its training step as a ``DrivenJob``; its files are those of all examples."""

    def __init__(self, pipeline: Pipeline, step: Callable[[Any], object], unit_s: float) -> None:
        """``unit_s`` is the approximate time of a drain in seconds."""
        self.trace = Trace([f"stoker.analyze({pipeline!r}, {getattr(step, '__name__', 'step')})"])
        self.done: set[str] = set()
        self.unit_s, self.patience_s, self.worker_counts = unit_s, math.inf, 3
        self._pipeline, self._step = pipeline, step
        workers = pipeline.chain.workers
        self._workers = None if workers is None else workers.count
        self._kind = None if workers is None else workers.kind
        about = {
            "slot": 0,
            "site": repr(pipeline),
            "describes": pipeline.chain.source.name,
            "batch_size": None,
            "workers": resources.default_threads() if self._workers is None else self._workers,
            "changes": None,
        }
        self._rank = RankTrace(_PID, 0, {"loaders": [about]}, slot=0)
        self._batch_size = 1.0
        self._most = _EVERYTHING  # batches of a drain
        self._kept: list[Any] = []
        self.trace.ranks = [self._rank]
        self.trace.starts = 1
        self.files = _list_files(pipeline)
        self._samples = self.files[:: max(1, len(self.files) // _FILES)][:_FILES]
        if not all(map(os.path.isfile, self._samples)):
            self.files = self._samples = []
        for path in self._samples:
            line = {"kind": "file", "name": path, "bytes": os.path.getsize(path)}
            self._rank.opened.append(line | {"pages": resident_pages(path), "unread": True})

    def say(self, text: str) -> None:
        """Print progress to stderr."""
        print(f"stoker.analyze: {text}", file=sys.stderr)

    def run_as_it_is(self) -> None:
        """Train as the job does. Raises ValueError if there is no batch."""
        self.say("as it is")
        pipeline, rows = self._copy(self._rank.workers), self._rank.rows
        until = time.monotonic() + 2 * self.unit_s
        for epoch in itertools.count():
            before = len(rows)
            with iter(pipeline) as batches:
                for batch in _note_rows(batches, rows, epoch, 0):
                    if len(self._kept) < _KEPT:
                        self._kept.append(batch)
                    self._step(batch)
                    if len(rows) > 2 * _FEWEST and time.monotonic() > until:
                        break
            if len(rows) - before < 2 or (len(rows) >= 2 * _FEWEST and time.monotonic() >= until):
                break
        if not self._kept:
            raise ValueError("the pipeline yields no batch, so there is nothing to analyze")
        _synchronise()
        stats = pipeline.stats()
        self._batch_size = stats.uses / max(1, stats.batches)

    def replay(self) -> None:
        """Train on the same batches again and again."""
        self.say("G: the same batches again and again")
        bank, rows = Bank(self._kept), self._rank.replayed
        until = time.monotonic() + 2 * self.unit_s
        again = (bank.next() for _ in itertools.count())
        for batch in _note_rows(again, rows, 0, REPLAYED):
            self._step(batch)
            if len(rows) > _FEWEST and time.monotonic() > until:
                break
        _synchronise()

    def begin_drains(self) -> None:
        """Record the pipeline's properties."""
        try:
            examples = round(len(self._pipeline) * self._batch_size)
        except TypeError:
            examples = None
        self._rank.described = {
            "cuda": _has_device(),
            "examples": examples,
            "prefetch": 2,
        }

    def drain(
        self, name: str, workers: int, seconds: float, *, fresh: bool = False, once: bool = False
    ) -> None:
        """Read the pipeline without training steps in between."""
        pipeline = self._copy(workers)
        until = time.monotonic() + seconds
        total, is_enough, is_warm = 0, False, name.startswith("warm-")
        while not is_enough:
            arrivals: list[int] = []
            began, cpu_s = time.perf_counter_ns(), _read_cpu_s()
            with iter(pipeline) as batches:
                for number, _ in enumerate(batches, 1):
                    arrivals.append(time.perf_counter_ns())
                    is_enough = total + number >= _FEWEST and time.monotonic() > until
                    if is_enough or number >= self._most:
                        break
            work = self._share_work(len(arrivals), _read_cpu_s() - cpu_s)
            # 0.0 seconds to receive: batches stay in this process.
            drain = Drain(workers, arrivals, began, 0.0, work)
            self._rank.drains.setdefault(name, []).append(drain)
            total += len(arrivals)
            if fresh or once or not arrivals:
                break
            pipeline.set_epoch(self._pipeline.epoch)
        if fresh:
            self._most = total
        if is_warm:
            stats = pipeline.stats()
            self.trace.thread_trial = stats.thread_trial or self.trace.thread_trial
            self.trace.process_trial = stats.process_trial or self.trace.process_trial
            if workers == self._rank.workers:
                self._note_stages(stats)

    def find_files(self) -> list[str]:
        """Record the files; return none, as it is unknown which of them a drain reads."""
        if self.files:
            self.trace.files, self.trace.files_examples = self._samples, len(self._samples)
        else:
            why_not = "the source is not files on this host that are read whole"
            self.trace.reasons["files"] = why_not
        return []

    def train(self, workers: int, left: int) -> None:
        """Train on the drained data, which is in memory now."""
        steps: list[Step] = []
        until = time.monotonic() + self.unit_s
        with iter(self._copy(workers)) as batches:
            for step in self._timed(batches):
                steps.append(step)
                is_enough = len(steps) > 3 * _FEWEST and time.monotonic() > until
                if len(steps) >= self._most or is_enough:
                    break
        self._rank.trained.setdefault(workers, []).append(steps)

    def alternate(self) -> None:
        """Train on the pipeline's own batches and on prepared ones by turns.

        Only if its files are all in memory by now, or there are none: it reads the same epochs
        again.
        """
        pages = [line["pages"] for line in self._rank.opened if line["pages"]]
        if sum(found for found, _ in pages) < 0.99 * sum(count for _, count in pages):
            return
        self.say(f"as it is and G once more, in {TURNS} turns")
        bank, pipeline = Bank(self._kept), self._copy(self._rank.workers)
        replayed = (bank.next() for _ in itertools.count())
        with contextlib.closing(_read_on(pipeline)) as own:
            for _ in range(TURNS):
                steps = (
                    self._train_for(own, self.unit_s / 2),
                    self._train_for(replayed, self.unit_s / 4),
                )
                self._rank.turns.append(Turn(*(found[len(found) // 3 :] for found in steps)))

    def _train_for(self, batches: Iterator[Any], seconds: float) -> list[Step]:
        """Train for so long, and on 24 batches at least: the first third of them settles."""
        steps: list[Step] = []
        until = time.monotonic() + seconds
        for step in self._timed(batches):
            steps.append(step)
            if len(steps) >= 3 * _FEWEST and time.monotonic() > until:
                break
        _synchronise()
        return steps

    def _timed(self, batches: Iterable[Any]) -> Iterator[Step]:
        entered = time.perf_counter()
        for batch in batches:
            came = time.perf_counter()
            self._step(batch)
            asked = time.perf_counter()
            yield Step(asked - entered, came - entered)
            entered = asked

    def sample_stacks(self) -> None:
        """Do nothing: a pipeline's stages are known, with a rate each."""

    def keep_examples(self) -> None:
        """Do nothing: the plan of a cache says what it saves."""

    def look_at_example(self) -> None:
        """Choose a place for a cache, as ``.cache("auto")`` does; none where it refuses."""
        with contextlib.suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            for stage in self._pipeline.cache("auto").chain.stages:
                forecast = stage.forecast if isinstance(stage, CacheStage) else None
                if forecast is not None:
                    left = forecast.left_s / forecast.work_s
                    self.trace.keeping = Keeping(forecast.name, forecast.kept, left)

    def _copy(self, workers: int) -> Pipeline:
        chain = self._pipeline.chain.apart()  # ranks measure for as long as each of them needs
        copy = Pipeline(replace(chain, flows=False, steps=chain.data_epoch_steps))
        if workers != self._workers:
            copy = copy.workers(max(workers, self._kind == "process"), kind=self._kind)
        copy.set_epoch(self._pipeline.epoch)
        return copy

    def _share_work(self, batches: int, cpu_s: float) -> list[WorkRecord]:
        """Return processor seconds as work records, in equal parts for all batches."""
        each_ns, size = int(cpu_s * 1e9 / max(1, batches)), round(self._batch_size)
        return [WorkRecord(_PID, 0, 0, 0, each_ns * (n + 1), size, -1) for n in range(batches)]

    def _note_stages(self, stats: Stats) -> None:
        """Record the cost of each stage, and of all behind an echo before the first random one."""
        seen: Counter[str] = Counter()
        for stage in stats.stages:
            seen[stage.name] += 1  # of two stages of one name each has its own rate
            name = stage.name if seen[stage.name] == 1 else f"{stage.name} ({seen[stage.name]})"
            self.trace.stages.setdefault(name, []).append((stage.examples, stage.seconds))
        steps = self._pipeline.chain.flow.steps
        random = {step.name: step.is_random for step in steps if isinstance(step, Map)}
        behind_source = stats.stages[1:]
        costs_s = [stage.seconds / max(1, stage.examples) for stage in behind_source]
        maps = [place for place, stage in enumerate(behind_source) if stage.name in random]
        behind = maps[-1] + 1 if maps else 0
        first = next((place for place in maps if random[behind_source[place].name]), behind)
        self.trace.echo_after_s = sum(costs_s[first:])


def _list_files(pipeline: Pipeline) -> list[str]:
    """Return the files of all examples; none if some examples are not files of their own."""
    source = pipeline.chain.indexed
    if source is None:
        return []
    found = itertools.takewhile(bool, map(source.local_path, range(len(source))))
    paths = [path for path in found if path is not None]
    return list(dict.fromkeys(paths)) if len(paths) == len(source) else []


def _note_rows(batches: Iterable[Any], rows: list[Row], epoch: int, flag: int) -> Iterator[Any]:
    """Yield batches, and record each call as the probe does."""
    clock, coming = time.perf_counter_ns, iter(batches)
    began = clock()
    rows.append(Row(0, epoch, 0, began, began, STARTED | TRAINS, time.process_time_ns()))
    for number in itertools.count():
        entered, cpu = clock(), time.process_time_ns()
        batch = next(coming, None)
        kind = (END if batch is None else BATCH) | TRAINS | flag
        rows.append(Row(0, epoch, number, entered, clock(), kind, cpu))
        if batch is None:
            return
        yield batch


def _read_on(pipeline: Pipeline) -> Generator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        with iter(pipeline) as batches:
            yield from batches


def _has_device() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def _synchronise() -> None:
    if _has_device():
        sys.modules["torch"].cuda.synchronize()


def _read_cpu_s() -> float:
    """Return the processor seconds of this process and of children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
