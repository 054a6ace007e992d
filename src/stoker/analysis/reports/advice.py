"""Advice about a stall: actions, each with the gain that the model predicts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stoker.analysis.model.changes import (
    CROSSING,
    MEMORY_FRACTION,
    WORTH,
    choose_workers,
    find_kept,
    plan_keeping,
    predict_gain,
    with_faster_prep,
    with_kept,
    with_processes,
    with_work_on_device,
    with_workers,
    without_work,
)
from stoker.analysis.model.formulas import most_workers, smallest_cache
from stoker.analysis.model.model import Change, Measured, predict
from stoker.analysis.model.report import (
    REDRAWN,
    SAME,
    UNSAFE,
    Action,
    LoaderOptions,
    Rate,
    Report,
    find_point,
    find_prep,
    to_measured,
    to_measured_apart,
)
from stoker.analysis.probe.state import tell_changes, tell_moves
from stoker.basics.resources import format_bytes, format_seconds

# The largest echo factor that is advised. docs/evidence-method.md, batches of 32: echoed 4 times
# they save fresh examples, echoed 8 times they need more than without an echo (0.72).
_MOST_ECHO = 4
# A read of neighbours together, and the default shard size of ``stoker pack``.
_RUN_BYTES, _SHARD_BYTES = 1 << 20, 256 << 20
# If many workers keep this fraction of one worker's rate each, P is extrapolated beyond them.
# Chosen, not measured.
_SCALES = 0.8
# Workers that had a processor for less than this fraction of the time mostly wait.
_WAITS = 0.5


def forecast_move(report: Report) -> Action | None:
    """Return what moving transforms to the device would do; None where none was tried there."""
    costs = {cost.name: cost for cost in report.transforms}
    tried = [each for each in report.on_device if each.name in costs]
    own = find_prep(report)
    if not tried or own is None:
        return None
    # Sending batches is a part of P, too.
    taken_s = sum(costs[each.name].seconds for each in tried)
    share = sum(costs[each.name].share.value for each in tried)
    share = min(share, taken_s * own.value / max(1, report.loader.workers))
    batch_s = sum(each.seconds for each in tried)
    step_s = batch_s / report.loader.batch_size

    def move(case: Measured) -> Measured:
        return with_work_on_device(case, share, step_s)

    job = to_measured(report)
    before, after = predict(job), predict(move(job))
    device = tried[0].device
    where = f"on {device}" if device else "on one thread of a processor, which stands for a device"
    names = " and ".join(each.name for each in tried)
    return Action(
        f"move {names} to the device, for whole batches{'' if device else ' (emulated)'}",
        "images = transform(images.to(device)); in a pipeline .to_torch(device).random_map(fn)",
        predict_gain(report, job=move),
        f"{names}: {share:.0%} of preparing, and for a batch {format_seconds(batch_s)} {where}, by "
        f"which each step is longer. Lost to preparing: {after.prep_stall:.0%} of the time, now "
        f"{before.prep_stall:.0%}",
        "if it draws anew for each example of a batch, or one draw for a batch is enough",
    )


def advise(report: Report) -> list[Action]:
    """Return the actions that would help, the largest gain first.

    After them comes what holds under a condition: work on the device, echoing, as a repeat is not a
    fresh example, and packing. Raises ValueError for a report without G or P.
    """
    found = [
        *_advise_workers(report),
        *_advise_processes(report),
        *_advise_threads(report),
        *_advise_persistence(report),
        *_advise_caches(report),
    ]
    found.sort(key=lambda action: -action.gain.value)
    move = forecast_move(report)
    found += [*([move] if move else ()), *_advise_echo(report), *_advise_packing(report)]
    return [action for action in found if action.gain.value >= WORTH]


def _advise_workers(report: Report) -> Iterator[Action]:
    """Advise the best number of workers: more than processors, if preparing mostly waits."""
    job = to_measured(report)

    def rate(count: int) -> float:
        return predict(job if count == job.workers else with_workers(job, count)).rate

    best = choose_workers(job.workers, _list_worker_counts(report), rate)
    if best == job.workers or _starts_longer(report, rate(best)):
        return
    counts = {point.workers for point in report.prep}
    why = "P at that number of workers was " + (
        "measured"
        if best in counts
        else "interpolated between measured points"
        if best < max(counts)
        else "extrapolated in proportion from measured points"
    )
    if best > job.cores and (best not in counts or _waits(report, best)):
        why += f"; preparing mostly waits, so {job.cores} processors are enough for them"
    if report.loader.moves:
        why += f". But {tell_moves(report.loader.moves)}, in each worker apart: others give others"
    elif report.loader.changes:
        why += f". Without persistent_workers: {tell_changes(report.loader.changes)}"
    options = LoaderOptions(num_workers=best)
    yield Action(
        f"use {best} worker{'s' * (best > 1)} instead of {job.workers}",
        f".workers({best})" if report.stages else str(options),
        predict_gain(report, job=lambda case: with_workers(case, best)),
        why,
        "if the dataset splits its examples among workers" if report.loader.is_stream else "",
        safety=_judge_safety(report),
        options=None if report.stages else options,
    )


def _judge_safety(report: Report) -> str:
    """Return how safe other workers are; empty where that is not known."""
    loader, prepared = report.loader, report.prepared
    if report.stages:
        return "same batches"
    if loader.is_stream or loader.moves:
        return UNSAFE
    return "" if prepared is None else REDRAWN if prepared.varies else SAME


def _starts_longer(report: Report, rate: float) -> bool:
    """True if workers, of which the job has none, start longer in each epoch than they save."""
    starts = [point.startup_s for point in report.prep if point.workers]
    if report.loader.workers or not report.examples or not starts:
        return False
    each = report.examples / max(1, len(report.ranks))
    return each / predict(to_measured(report)).rate - each / rate < min(starts)


def _advise_processes(report: Report) -> Iterator[Action]:
    """Advise worker processes if threads wait for each other."""
    trial = report.thread_trial
    if trial is None or not trial.wait_for_each_other:
        return
    count = trial.processes
    yield Action(
        f"use {count} worker processes: threads wait for each other, {trial.threads} are "
        f"{trial.speedup:.1f} times as fast as one",
        f'.workers({count}, kind="process")',
        predict_gain(report, job=lambda case: with_processes(case, count)),
        f"if they wait for the GIL. Each process is assumed to do {CROSSING:.0%} of the work of "
        "one thread alone, as it also sends examples; forked processes start with every epoch",
    )


def _advise_threads(report: Report) -> Iterator[Action]:
    """Advise threads if the user's code leaves them the GIL, and processes cost a hand-over."""
    trial = report.process_trial
    if trial is None or not trial.threads_are_faster:
        return
    yield Action(
        f"have threads call your Python code: it leaves the GIL free {trial.gil_free_fraction:.0%} "
        "of its time, and nothing need travel between processes",
        "stoker.thread_safe(DATASET)",
        predict_gain(report, job=lambda case: with_faster_prep(case, trial.speedup)),
        "only if several threads may call it at once: a dataset or function that keeps nothing "
        "between calls",
    )


def _advise_persistence(report: Report) -> Iterator[Action]:
    """Advise to keep the workers, if starting them takes a part of each epoch."""
    seen, own = report.as_it_is, find_prep(report)
    if not report.startup_s or seen is None or own is None or not report.examples:
        return
    if report.loader.changes or report.loader.moves:
        return
    # The first batch of an epoch has to be prepared all the same.
    first_s = report.loader.workers * report.loader.batch_size / own.value
    saved_s = max(0.0, report.startup_s - first_s)
    each = report.examples / max(1, len(report.ranks))
    gains = [
        (each / rate + first_s + saved_s) / (each / rate + first_s)
        for rate in (seen.rate.value, max(seen.rate.low, 0.01 * seen.rate.value), seen.rate.high)
    ]
    options = LoaderOptions(persistent_workers=True)
    yield Action(
        "keep the workers from epoch to epoch",
        str(options),
        Rate(*gains),
        f"of whole epochs: they take {each / seen.rate.value:,.2g} s, and their first batch "
        f"{report.startup_s:.2g} s, which the speeds above leave out{_warn_of_changes(report)}",
        safety=_judge_safety(report),
        options=options,
    )


def _list_worker_counts(report: Report) -> list[int]:
    """Return the numbers of workers to consider.

    More than processors only if that was measured, or if preparing mostly waited for something else
    than a processor and was faster with more workers; on a busy host, neither is told.
    """
    job = to_measured_apart(report)
    upto = list(range(1, job.cores + 1))
    points = [point for point in job.prep if point[0] > 0] or [(1, job.prep[0][1])]
    (fewest, low), (most, high) = points[0], points[-1]
    if most > job.cores or high / most < _SCALES * low / fewest:
        is_busy = report.host is not None and report.host.is_busy
        return upto + [count for count, _ in points if count > job.cores and not is_busy]
    counted = find_point(report.prep, most) or find_point(report.prep, job.workers)
    assert counted is not None
    if not _waits(report, counted.workers):
        return upto
    return list(range(1, most_workers(job.cores, most, high, counted.cpu_s) + 1))


def _waits(report: Report, workers: int) -> bool:
    """True if so many workers mostly waited for something else than a processor.

    A busy host is taken for the reason of their waiting.
    """
    point = find_point(report.prep, workers)
    assert point is not None
    if report.host is not None and report.host.is_busy:
        return False
    return 0.0 < point.cpu_s * point.rate.value < _WAITS * max(1, workers)


def _advise_caches(report: Report) -> Iterator[Action]:
    """Advise caches of prepared examples and of files; in a pipeline, the best place too."""
    yield from _advise_keeping(report)
    files = [*_advise_files(report)]
    yield from files
    best = max((action.gain.value for action in files), default=1.0)
    yield from (each for each in _advise_place(report) if each.gain.value >= WORTH * best)


def _advise_keeping(report: Report) -> Iterator[Action]:
    """Advise a cache around the dataset, if its examples are the same in each epoch."""
    kept = plan_keeping(report)
    if kept is None:
        return
    size, held = kept
    whole = find_kept(report)
    yield Action(
        f"keep prepared examples ({held:.0%} of the dataset) in a cache that never evicts",
        f'DataLoader(stoker.cached(dataset, "{_round_up_to_mib(size)}"), ...)',
        predict_gain(report, job=lambda case: with_kept(case, held, whole)),
        "from the second epoch on. An example was the same in each reading, so nothing is random"
        + _warn_of_changes(report),
        safety=SAME,
    )


def _advise_files(report: Report) -> Iterator[Action]:
    """Advise a cache of files that never evicts, as large as needed or as memory allows.

    Only where prepared examples cannot be kept, or not all of them.
    """
    if report.rates.S is None or not report.example_bytes or not report.examples:
        return
    kept = plan_keeping(report)
    if kept is not None and kept[1] >= 1.0:
        return
    job = to_measured(report)
    whole = report.examples * report.example_bytes
    assert job.storage is not None
    assert job.cache is not None
    miss_s = job.miss_s / max(1, job.workers)
    enough = smallest_cache(job.storage, job.cache, predict(job).prep, job.ingestion, miss_s)
    # 2 % more than is predicted to be enough. Chosen, not measured.
    wanted = min(1.0, enough * 1.02) * whole
    room = MEMORY_FRACTION * report.memory_bytes
    size = int(min(wanted, room))
    what = "the files"
    code = "stoker.from_files(...).cache(...)  # in front of .random_map(...)"
    otherwise = "may be random"
    if kept is not None:
        otherwise = f"would take {format_bytes(kept[0] / kept[1])}"
    why = f": the files' contents, not the prepared examples, which {otherwise}"
    if report.stages:
        what, code, why = format_bytes(size), f'.cache("{_round_up_to_mib(size)}")', ""
    if size / whole <= (report.cached_fraction or 0.0):
        return
    fits = "; the page cache would hold it too, from the second epoch on" if whole < room else ""
    yield Action(
        f"keep {what} ({size / whole:.0%} of the dataset) in a cache that never evicts",
        code,
        predict_gain(report, Change(cache_bytes=size)),
        f"from the second epoch on{why}, against the {report.cached_fraction or 0.0:.0%} that "
        f"were in the page cache{fits}",
    )


def _advise_place(report: Report) -> Iterator[Action]:
    """Advise the place that ``.cache("auto")`` chooses for a pipeline."""
    keeping = report.keeping
    if keeping is None:
        return
    # What is random, and behind the cache, is made anew for each use.
    later_s = report.echo_after_s or 0.0
    yield Action(
        f"keep {keeping.kept_fraction:.0%} of the examples as {keeping.name} makes them",
        f"{keeping.name}.cache()",
        predict_gain(
            report,
            job=lambda case: with_kept(
                case, 1 - keeping.left_fraction, without_work(case, later_s)
            ),
        ),
        f"from the second epoch on: {keeping.left_fraction:.0%} of the work up to there is left, "
        'less than with a cache at any other place (.cache("auto") chooses it)',
        "if they are the same in every epoch (a cache refuses others)",
    )


def _warn_of_changes(report: Report) -> str:
    """Return what advice assumes that keeps something from epoch to epoch."""
    if report.loader.changes is not None:
        return ""
    return ". Not where the script changes its dataset between epochs: no two of them were seen"


def _round_up_to_mib(size: int) -> str:
    return format_bytes(math.ceil(size / 2**20) * 2**20)


def _advise_packing(report: Report) -> Iterator[Action]:
    """Advise shards in place of files that are smaller than a read of neighbours together."""
    if report.rates.S is None or not report.file_bytes or not report.example_bytes:
        return
    if not report.examples or report.file_bytes >= _RUN_BYTES:
        return
    job = to_measured(report)
    assert job.storage is not None
    assert job.cache is not None
    # As many reads in a second as now; the page cache is the fastest of all.
    packed = min(job.storage * _RUN_BYTES / report.file_bytes, max(job.storage, job.cache))
    whole = report.examples * report.example_bytes
    block = max(1, round(_RUN_BYTES / report.example_bytes))
    yield Action(
        f"pack the files into shards: {math.ceil(whole / _SHARD_BYTES):,} files opened an epoch in "
        f"place of {math.ceil(whole / report.file_bytes):,}, and {math.ceil(whole / _RUN_BYTES):,} "
        "reads of a MiB",
        f"stoker pack SRC DEST; stoker.from_tar('DEST/*.tar').shuffle(block={block})",
        predict_gain(report, Change(storage_mbps=packed * report.example_bytes / 1e6)),
        "at most: a MiB is assumed to be read as soon as a file is now. Files in the page cache "
        "gain nothing. For the bandwidth that your storage has in large reads: stoker what-if "
        "REPORT.json --storage-mbps MB/s",
        "if the number of reads limits the storage, and not their bytes",
    )


def _advise_echo(report: Report) -> Iterator[Action]:
    """Advise echoing, by the factor that keeps the accelerator busy."""
    job = to_measured(report)
    before = predict(job)
    factor, best = 1, before.rate
    for echo in range(2, _MOST_ECHO + 1):
        rate = predict(job, Change(echo=echo)).rate
        if rate < best * WORTH:
            break
        factor, best = echo, rate
    if factor == 1:
        return
    what, code = "batch", "for batch in stoker.echo(loader, transform=...): ..."
    if report.echo_after_s is not None:
        what, code = "example", ".echo()  # before the first random_map"
    yield Action(
        f"use every {what} {factor} times (echoing)",
        code,
        predict_gain(report, Change(echo=factor)),
        "measured in steps",
        "if a repeated example is worth nearly as much as a fresh one",
    )
