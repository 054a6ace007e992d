"""Advice about caches: of prepared examples, of files, or of both within one limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stoker.analysis.model.formulas import prep_rate, smallest_cache
from stoker.analysis.model.gains import WORTH, predict_gain
from stoker.analysis.model.model import Change, Measured, predict
from stoker.analysis.model.report import Action, Report, to_measured
from stoker.basics.resources import format_bytes
from stoker.cache.places.arrangement import arrange

# The fraction of the host's memory for a cache: as with ``limit="auto"`` (cache/location.py).
MEMORY = 0.5
# Copies of an example on its way from a cache into a batch. Each is assumed to cost as much as
# collating.
_COPIES = 2
# What an example in a cache takes beside its arrays: head, names and dtypes.
_KEPT_BYTES = 512
# A pipeline's own cost for an example. Far more than measured (bench/dataset.py: 7 us), so that the
# prediction is cautious.
_OVERHEAD_S = 1e-4


def advise_caches(report: Report) -> Iterator[Action]:
    """Advise caches of prepared examples and of files, and both where that is clearly better."""
    alone = [*_advise_keeping(report), *_advise_files(report)]
    yield from alone
    best = max((action.gain.value for action in alone), default=1.0)
    yield from (each for each in _advise_both(report) if each.gain.value >= WORTH * best)


def _advise_keeping(report: Report) -> Iterator[Action]:
    """Advise a cache around the dataset, if its examples are the same in each epoch."""
    kept = plan_keeping(report)
    if kept is None:
        return
    size, held = kept
    assert report.prepared is not None
    gain = predict_gain(report, job=lambda case: with_kept(case, held, find_kept_s(report)))
    alone = predict_gain(
        report, job=lambda case: _without_workers(with_kept(case, held, find_kept_s(report)))
    )
    why = "from the second epoch on. An example was the same in each reading, so nothing is random"
    if report.loader.workers and alone.value >= gain.value / WORTH:
        why += f". Workers are not needed then: num_workers=0 brings {alone.value:.2f} times"
    yield Action(
        f"keep prepared examples ({held:.0%} of the dataset) in a cache that never evicts",
        f'DataLoader(stoker.cached({report.prepared.dataset}, "{round_up_to_mib(size)}"), ...)',
        gain,
        why,
    )


def plan_keeping(report: Report) -> tuple[int, float] | None:
    """Return the bytes of a cache for prepared examples, and the fraction that it holds.

    None if they are random, or of an unknown number.
    """
    prepared = report.prepared
    if prepared is None or prepared.varies or not report.examples:
        return None
    # 5 % more: only some examples were measured, and others differ.
    whole = report.examples * (1.05 * prepared.example_bytes + _KEPT_BYTES)
    size = int(min(whole, MEMORY * report.memory_bytes))
    return size, size / whole


def find_kept_s(report: Report) -> float:
    """Return worker seconds for an example from a cache, until it is in a batch."""
    return _COPIES * report.after_s.get("after-augmentation", 0.0) + _OVERHEAD_S


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
    room = MEMORY * report.memory_bytes
    size = int(min(wanted, room))
    what = "the files"
    code = "stoker.from_files(...).cache(...)  # in front of .random_map(...)"
    otherwise = "may be random"
    if kept is not None:
        otherwise = f"would take {format_bytes(kept[0] / kept[1])}"
    why = f": the files' contents, not the prepared examples, which {otherwise}"
    if report.stages:
        what, code, why = format_bytes(size), f'.cache("{round_up_to_mib(size)}")', ""
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


def _advise_both(report: Report) -> Iterator[Action]:
    """Advise what ``stoker.auto_cache`` would choose, if it keeps examples in both forms."""
    kept, job = plan_keeping(report), to_measured(report)
    if kept is None or not job.storage or not job.cache or not job.example_bytes:
        return
    size, held = kept
    assert report.examples
    read_s, kept_s = 1 / job.storage - 1 / job.cache, find_kept_s(report) / max(1, job.workers)
    made_s = read_s + 1 / prep_rate(job.prep, job.workers)
    found = arrange(
        made_s * 1e9,
        np.array([[read_s, made_s - kept_s]]) * 1e9,
        np.array([[job.example_bytes, size / held / report.examples]]),
        MEMORY * report.memory_bytes / report.examples,
    )
    if len(found.places) < 2:
        return
    files, examples = found.kept
    # Of the examples that are not kept prepared, as many have their files kept.
    change = Change(cache_bytes=int(files / (1 - examples) * report.examples * job.example_bytes))
    gain = predict_gain(
        report, change, job=lambda case: with_kept(case, examples, find_kept_s(report))
    )
    yield Action(
        f"keep {examples:.0%} of the examples prepared, and {files:.0%} as files",
        f'stoker.auto_cache(pipeline, "{round_up_to_mib(size)}")',
        gain,
        "from the second epoch on, in a pipeline that reads and prepares in two stages; all "
        f"prepared examples would take {format_bytes(size / held)}",
    )


def round_up_to_mib(size: int) -> str:
    return format_bytes(math.ceil(size / 2**20) * 2**20)


def _without_workers(case: Measured) -> Measured:
    """Return the job with its examples prepared by the training process."""
    return replace(case, workers=0, efficiency=((0, 1.0),))


def with_kept(case: Measured, held: float, kept_s: float) -> Measured:
    """Return the job with a fraction of its examples decoded in memory.

    What workers that decode take from training, beyond processor time, shrinks with their time:
    memory bandwidth, shared cores, late batches.

    Args:
        case: the job.
        held: the fraction that is in memory, from 0 to 1.
        kept_s: worker seconds for each example from memory.
    """

    def mixed(takes_s: float) -> float:
        return (1.0 - held) * takes_s + held * min(takes_s, kept_s)

    # Not 0 if everything is kept: it is a divisor below.
    left = max(1.0 - held, 1e-9)
    many = [(max(1, count), count, rate) for count, rate in case.prep]
    return replace(
        case,
        prep=tuple((count, width / mixed(width / rate)) for width, count, rate in many),
        prep_cpu=tuple((count, mixed(cpu_s)) for count, cpu_s in case.prep_cpu),
        efficiency=tuple(
            (count, 1.0 - (1.0 - one) * mixed(takes_s) / takes_s)
            for count, one in case.efficiency
            for takes_s in [max(1, count) / prep_rate(case.prep, count)]
        ),
        storage=case.storage / left if case.storage else None,
        cache=case.cache / left if case.cache else None,
        miss_s=case.miss_s * (1.0 - held),
    )
