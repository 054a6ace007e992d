"""The report of an analysis as data: the JSON file, its schema and its version."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from stoker.analysis.model.calibration import calibrate
from stoker.analysis.model.formulas import MOST_WAITING
from stoker.analysis.model.model import MOST_CORES, Measured, warm_rate
from stoker.basics.resources import format_rounded
from stoker.stats import ProcessTrial, ThreadTrial

SCHEMA = "stoker-analysis/1"
# Of the processors: what background services take is less, and hardly moves a rate. Chosen, not
# measured.
_BUSY = 0.1

_MOST_WORKERS = MOST_CORES * MOST_WAITING
# Of an action that is named first: a smaller gain is hardly noticed. Chosen, not measured.
_WORTH_DOING = 1.05

SAME = "same batches, checked"
"""How safe a change of a loader is: `stoker run` compares the first batches bit for bit."""
REDRAWN = "other random draws, as with another seed"
"""Harmless for most trainings: an augmentation draws as it would in another run."""
UNSAFE = "would change the data"
"""The dataset moves when it is read, or the script changes it between epochs."""


class Rate(msgspec.Struct, frozen=True):
    """A rate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.0f} ({self.low:,.0f} to {self.high:,.0f})"


class Rates(msgspec.Struct, frozen=True):
    """The five rates, in examples/s; None where one could not be told apart (``reasons`` says why).

    Of one rank, the one that is shortest of data.
    """

    G: Rate | None = None
    P: Rate | None = None
    S: Rate | None = None
    C: Rate | None = None
    F: Rate | None = None


class Split(msgspec.Struct, frozen=True):
    """Shares of an epoch's time; they add up to 1."""

    compute: float
    prep_stall: float
    fetch_stall: float


class Interval(msgspec.Struct, frozen=True):
    """The ends of a 95 % interval."""

    low: float
    high: float


class SplitIntervals(msgspec.Struct, frozen=True):
    """Where the shares of the split would lie in another analysis of the same job."""

    compute: Interval
    prep_stall: Interval
    fetch_stall: Interval


class LoaderOptions(msgspec.Struct, frozen=True):
    """Options of the script's ``DataLoader`` that an action changes; the others stay."""

    num_workers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)] | None = None
    persistent_workers: bool = False

    def __str__(self) -> str:
        """Return the code that sets them."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value}
        return f"DataLoader(..., {', '.join(f'{name}={value}' for name, value in given.items())})"


class Action(msgspec.Struct, frozen=True):
    """An action, and its predicted gain."""

    title: str
    """What to do, in a few words."""
    code: str
    """The line of code, option or command that does it."""
    gain: Rate
    """Predicted speed over the speed as it is: 1.5 is half as fast again."""
    why: str
    """What it changes, and what the prediction assumes."""
    condition: str = ""
    """The condition for this action; empty if there is none."""
    safety: str = ""
    """Of a change of the loader: "same batches, checked", "other random draws, ..." or "would
    change the data"; empty for other actions, and where it is not known."""
    options: LoaderOptions | None = None
    """What ``stoker run`` changes for it; None: something else than the loader's options."""


class Keeping(msgspec.Struct, frozen=True):
    """What ``.cache("auto")`` would keep of a pipeline's examples."""

    name: str
    """The source and the stages before the cache."""
    kept_fraction: float
    """The fraction of the examples that is kept."""
    left_fraction: float
    """Of the work up to the cache, what is left in later epochs."""


class PrepPoint(msgspec.Struct, frozen=True):
    """One point of the scaling curve."""

    workers: int
    rate: Rate
    trained: Rate | None = None
    """Examples/s of training with the data in memory and this number of workers."""
    cpu_s: float = 0.0
    """Processor seconds of preparing and receiving an example."""
    startup_s: float = 0.0
    """Seconds from ``iter()`` to the first batch, of an epoch whose workers start."""


class Prepared(msgspec.Struct, frozen=True):
    """Examples as the script's dataset returns them."""

    example_bytes: int | None
    """The bytes of an example's arrays; None if a cache could not hold one."""
    varies: bool
    """True if reading an example draws at random, or gives another value each time."""


class Loader(msgspec.Struct, frozen=True):
    """A loader that the script iterated."""

    name: str
    """Where it was built: file and line."""
    describes: str
    """Dataset, batch size and workers, for people."""
    workers: int
    batch_size: float
    """Examples a batch."""
    unit: str
    """What is counted: "examples", or "items" if the dataset yields ready-made batches."""
    batches: int
    """Number of its batches while the job ran without any change."""
    trains: bool
    """True if gradients were on while it was iterated."""
    changes: list[str] | None = None
    """What the script changes of its dataset between epochs, by name; None if no two of them were
    seen."""
    moves: list[str] = []
    """What reading an example changes of the dataset, beyond its random draws, by name."""
    is_stream: bool = False
    """True for an iterable dataset: each worker may give all of its examples."""
    place: tuple[str, int] | None = None
    """The path and the line of ``name``; None for a pipeline."""


class AsItIs(msgspec.Struct, frozen=True):
    """The job without any change."""

    rate: Rate
    """Examples/s in steady state."""
    wait_fraction: float
    """Share of the steady state spent inside ``next()``: an upper bound of the loss."""
    startup_s: float
    """Seconds from ``iter()`` to the first batch; not part of the rate."""


class Rank(msgspec.Struct, frozen=True):
    """One process of the job."""

    rank: int
    rates: Rates
    split: Split
    wait_fraction: float
    """Share of its time inside its own ``next()``."""
    others_fraction: float
    """Share of its time that it waited for other ranks that were short of data."""


class HostLoad(msgspec.Struct, frozen=True):
    """Who used the processors that the job may use, while it was measured: means over that time."""

    seconds: float
    cores: int
    own_cores: float
    """Used by the script with all its processes, and by the analyzer."""
    others_cores: float
    """Used by all other processes."""
    steal_cores: float
    """Taken by other guests of a virtual machine's host."""
    idle_cores: float

    @property
    def is_busy(self) -> bool:
        """True if others used a tenth of the processors and left less than one of them idle."""
        taken = self.others_cores + self.steal_cores
        return taken >= _BUSY * self.cores and self.idle_cores < max(1.0, _BUSY * self.cores)


class Crash(msgspec.Struct, frozen=True):
    """The error and exit with which the script crashed."""

    how: str
    """How the process ended: "exit code 3", "killed by SIGSEGV"."""
    when: str
    """The phase in which it crashed, in words."""
    rank: int | None
    """The rank that failed first; None for a single process, or if it is unknown."""
    output: str
    """The last lines of its output."""


class Cost(msgspec.Struct, frozen=True):
    """The cost of a piece of the work of preparing, or of a training step."""

    name: str
    """A transform's class, a function, a stage of a pipeline, or a part of the step."""
    share: Rate
    """Of the time in which workers make batches, or of the step."""
    seconds: float
    """Of a worker, for an example; or of the training process, for a step."""


class DeviceTrial(msgspec.Struct, frozen=True):
    """A transform that was tried on a whole batch, where training computes."""

    name: str
    seconds: float
    """For a batch."""
    device: str | None
    """None: there was no device, and a thread of a processor stood for it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An analysis. Rates are of one rank: the one that paces the job."""

    schema: str = SCHEMA
    stoker: str
    """The version of stoker that wrote the report."""
    made: str
    """Date and time, ISO 8601."""
    command: list[str]
    seconds: float
    """Duration of the analysis."""
    starts: int
    """Number of times the script was started."""
    crash: Crash | None = None
    """None if the script did not crash; else the report has the measurements before the crash."""
    cores: int
    memory_bytes: int
    trains_on_cpu: bool
    host: HostLoad | None = None
    """Who used the processors until the end of P; None where the kernel does not tell."""
    loader: Loader
    loaders: list[Loader]
    examples: int | None = None
    """Examples in an epoch, over all ranks; None if the dataset has no length."""
    example_bytes: float | None = None
    """Mean bytes read for an example; None if unknown."""
    file_bytes: float | None = None
    """Mean bytes of a file, where files are read whole; None if they are not."""
    cached_fraction: float | None = None
    """Share of the bytes that were in the page cache when the analysis began."""
    rates: Rates
    reasons: dict[str, str] = {}
    """The reason for each of G, P, S, C, F that is None, and for no ``transforms``."""
    predicted: float | None = None
    """Examples/s that the separately measured rates predict for the job; None without a model."""
    replayed: Rate | None = None
    """The rate of training on the same batches again and again. It is G, unless the job's own speed
    and waits contradict it: then G is what these show, and a doubt says so."""
    split: Split
    split_intervals: SplitIntervals | None = None
    """None in reports of pipelines and scripts that were made before there were any."""
    untold: list[str] = []
    """What the analysis cannot tell, each with what it knows instead; also among ``doubts``."""
    verdict: str
    """What limits the job, and how much that costs, in sentences."""
    doubts: list[str] = []
    """Reasons why the verdict is uncertain: contradictory or too few measurements."""
    bound: str
    """"compute", "prep", "fetch" or "processors"."""
    actions: list[Action]
    notes: list[str] = []
    """Missing or inseparable measurements, and other remarks for the reader."""
    as_it_is: AsItIs | None = None
    prep: list[PrepPoint] = []
    """P by number of workers. If ``rates.P`` is None, it includes fetching over a network."""
    transforms: list[Cost] = []
    """The cost of each transform, by samples of the workers' stacks with the data in memory, or of
    each stage of a pipeline; of pieces that take 3 % or more. ``reasons["transforms"]`` says why
    there is none."""
    on_device: list[DeviceTrial] = []
    """Of the transforms, those that take a batch of images and keep its shape."""
    step: list[Cost] = []
    """Where the time of a step goes in the job as it is, on the host: waiting for data, what
    PyTorch tells of, and the rest; the largest first. Empty where it tells nothing."""
    cold: Rate | None = None
    """The loader drained with nothing in the page cache, examples/s."""
    storage_most: Rate | None = None
    """S with one reader per core, if the job has fewer workers."""
    miss_s: float = 0.0
    """Seconds that a worker waits for an example that is not in the page cache, while storage is
    not busy otherwise, beyond reading it from there."""
    copy_s: float | None = None
    """Seconds that the copy of a batch to the device takes; part of G. None without a device."""
    step_cpu_s: float = 0.0
    """Processor seconds that training takes for an example."""
    echo_after_s: float | None = None
    """For a pipeline: worker seconds for an example behind an echo before the first random stage,
    which each use costs. None: only whole batches can be echoed."""
    startup_s: float = 0.0
    """Seconds from ``iter()`` to the first batch of an epoch, where workers start anew in each."""
    kept: PrepPoint | None = None
    """The loader, and training, with some examples in a cache in memory; None where that was not
    tried, as of examples that are random."""
    prepared: Prepared | None = None
    """Examples as the dataset returns them; None of a stream, and where they could not be read."""
    run_s: float | None = None
    """Seconds of the script's whole training, by its own end or its ``--epochs``; None: unknown."""
    stages: dict[str, Rate] = {}
    """For a pipeline: examples/s of each stage alone on one worker."""
    keeping: Keeping | None = None
    """For a pipeline: the plan of a cache; None where none can stand, or would save anything."""
    thread_trial: ThreadTrial | None = None
    """For a pipeline: the trial of its threads against one; None if there was none."""
    process_trial: ProcessTrial | None = None
    """For a pipeline: what its first worker process showed of the user's code; None without."""
    ranks: list[Rank] = []

    def __repr__(self) -> str:
        """Return what ``print`` shows, for notebooks."""
        return str(self)

    def __str__(self) -> str:
        """Return the verdict, what to do first and how, and where the time goes.

        ``stoker analyze --details`` and the page show all of it.
        """
        lines = [self.verdict + ".", *self.what_to_do]
        # The interval of the verdict says already how little is known of the shares.
        lines += [f"Uncertain: {each}." for each in self.doubts[len(self.untold) :][:2]]
        if self.transforms and self.bound != "compute":
            costs = (f"{cost.name} {cost.share.value:.0%}" for cost in self.transforms[:4])
            lines.append(f"Preparing: {', '.join(costs)}.")
        if self.as_it_is is not None:
            seen = self.as_it_is
            lines.append(
                f"As it is: {seen.rate} {self.loader.unit}/s, {seen.wait_fraction:.0%} of the time "
                "inside next()."
            )
        return "\n".join(lines)

    @property
    def what_to_do(self) -> list[str]:
        """The first action and what applies it, which is indented; or why there is none."""
        best = self.first_action
        if best is not None:
            return [f"{self._describe(best)}.", f"  {self._write_command(best)}"]
        if self.bound == "compute" or not self.prep:
            return []
        top = next(iter(self.transforms), None)
        why = f": {top.name} is {top.share.value:.0%} of preparing" if top else ""
        lines = [f"Nothing in the loader will help{why}."]
        known = next((each for each in self.actions if each.condition), None)
        if known is not None and known.gain.value >= _WORTH_DOING:
            lines.append(
                f"{known.condition[0].upper()}{known.condition[1:]}: {known.title} "
                f"({known.gain.value:.2f} times as fast)."
            )
        return lines

    @property
    def script(self) -> str:
        """The command of the script, without its interpreter."""
        return shlex.join(self.command[Path(self.command[0]).name.startswith("python") :])

    def _describe(self, action: Action) -> str:
        """Return an action with its gain, the time that it saves, and its safety."""
        gain, run_s = action.gain, self.run_s or 3600.0
        unit_s, unit = (60.0, "minutes") if run_s >= 60.0 else (1.0, "seconds")
        saved, whole = (format_rounded(s / unit_s) for s in (run_s - run_s / gain.value, run_s))
        whole = whole if self.run_s else f"each {whole}"
        return (
            f"{action.title[0].upper()}{action.title[1:]}: {gain.value:.2f} times as fast "
            f"({gain.low:.2f} to {gain.high:.2f}), which saves {saved} of {whole} {unit}"
        ) + (f". {action.safety[0].upper()}{action.safety[1:]}" if action.safety else "")

    def _write_command(self, action: Action) -> str:
        """Return what applies an action."""
        return action.code if action.options is None else f"stoker run {self.script}"

    @property
    def first_action(self) -> Action | None:
        """The best safe action without a condition, if it gains enough to be worth the change."""
        known = (each for each in self.actions if not each.condition and each.safety != UNSAFE)
        return next((each for each in known if each.gain.value >= _WORTH_DOING), None)


def find_point(curve: Sequence[PrepPoint], workers: int) -> PrepPoint | None:
    """Return the point of a scaling curve for a number of workers; None if there is none."""
    return next((point for point in curve if point.workers == workers), None)


def find_prep(report: Report) -> Rate | None:
    """Return P with the job's own number of workers, fetching over a network included."""
    own = find_point(report.prep, report.loader.workers)
    return None if own is None else own.rate


def to_measured(report: Report) -> Measured:
    """Return the model's input from a report, calibrated to the job as it ran.

    Raises ValueError if G or P is missing, or a rate is not positive and finite.
    """
    found, seen = to_measured_apart(report), report.as_it_is
    if seen is None:
        return found
    if not (0.0 < seen.rate.value < math.inf and 0.0 < report.split.compute <= 1.0):
        raise ValueError("the report has a rate that is not above 0: run the analysis again")
    return calibrate(found, seen.rate.value, report.split.compute)


def to_measured_apart(report: Report) -> Measured:
    """Return the model's input, not calibrated. Raises ValueError as ``to_measured`` does."""
    rates = report.rates
    if rates.G is None or not report.prep:
        missing = "G" if rates.G is None else "P"
        raise ValueError(
            f"this analysis has no {missing}, so nothing can be predicted: "
            + report.reasons.get(missing, "it was not measured")
        )
    known = [rate for rate in (rates.G, rates.S, rates.C) if rate is not None]
    known += [point.rate for point in report.prep]
    if not all(0.0 < rate.value < math.inf for rate in known):
        raise ValueError("the report has a rate that is not above 0: run the analysis again")
    found = Measured(
        ingestion=rates.G.value,
        prep=tuple(sorted((point.workers, point.rate.value) for point in report.prep)),
        workers=report.loader.workers,
        cores=report.cores,
        batch_size=report.loader.batch_size,
        storage=rates.S.value if rates.S else None,
        cache=rates.C.value if rates.C else (math.inf if rates.S else None),
        storage_most=report.storage_most.value if report.storage_most else None,
        miss_s=report.miss_s,
        cached_fraction=report.cached_fraction or 0.0,
        example_bytes=report.example_bytes,
        examples=report.examples,
        step_cpu_s=report.step_cpu_s,
        prep_cpu=tuple(sorted((point.workers, point.cpu_s) for point in report.prep)),
        trains_on_cpu=report.trains_on_cpu,
        prep_fetches=rates.P is None,
        echo_after_s=report.echo_after_s or 0.0,
    )
    return replace(found, efficiency=find_efficiency(found, report.prep))


def find_efficiency(found: Measured, prep: Sequence[PrepPoint]) -> tuple[tuple[int, float], ...]:
    """Return what training on data in memory reached of what the model expects, at most 1."""
    return tuple(
        sorted(
            (point.workers, min(1.0, point.trained.value / warm_rate(found, point.workers)))
            for point in prep
            if point.trained is not None
        )
    )


def write_report(report: Report, path: Path) -> None:
    """Write a report as JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read_report(path: Path) -> Report:
    """Read a report. Raises OSError, or ValueError for a file that is none of this version."""
    if not path.exists():
        raise FileNotFoundError(
            f"there is no report {path}: stoker analyze --json {path} train.py writes one"
        )
    content = path.read_bytes()
    try:
        report = msgspec.json.decode(content, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a report of `stoker analyze --json` ({SCHEMA}): {error}"
        ) from None
    if report.schema != SCHEMA:
        raise ValueError(
            f"{path} has the schema {report.schema!r}; this version of stoker reads {SCHEMA!r}. "
            "Run the analysis again"
        )
    return report
