"""Advice to pack single files into shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoker.analysis.model.gains import WORTH, predict_gain
from stoker.analysis.model.model import Change
from stoker.analysis.model.report import Action, Packing, Rate, Report, list_gains
from stoker.basics.resources import format_bytes


def advise_records(report: Report) -> Iterator[Action]:
    """Advise shards in place of single files, with the better order of reading."""
    found = report.packing
    if found is None or (report.rates.S is None and found.prep_share == 0.0):
        return
    gains = {
        order: _predict_packed(report, order, faster, rate)
        for (order, faster), rate in zip(
            list_gains(found), filter(None, (found.by_offset, found.in_runs)), strict=True
        )
    }
    order = max(gains, key=lambda one: (gains[one].value, one == "by offset"))
    if "by offset" in gains and gains[order].value < WORTH * gains["by offset"].value:
        order = "by offset"  # it shuffles fully
    yield Action(
        f"pack the files into shards ({_tell_counts(found, order)})",
        _write_code(found, order),
        gains[order],
        f"{_tell_trial(found)}. Files in the page cache gain nothing. "
        + ("The shuffle then mixes sixteen blocks at a time. " if order == "in runs" else "")
        + "stoker what-if REPORT.json --format records",
    )


def _write_code(found: Packing, order: str) -> str:
    """Return the commands that pack the files, and read them in that order."""
    if found.by_offset is None:
        return "stoker pack SRC DEST; stoker.from_tar('URL/*.tar').shuffle()"
    if order == "by offset":
        return "stoker pack SRC DEST; stoker.from_tar('DEST/*.tar').shuffle()"
    return "write row groups of 8 MiB by pyarrow.parquet; stoker.from_parquet('DEST/').shuffle()"


def _predict_packed(report: Report, order: str, faster: float, rate: Rate) -> Rate:
    """Return the gain of an order of reading; its interval includes that of the trial."""
    assert report.packing is not None
    as_it_is = report.packing.one_by_one

    def gain(by: float) -> Rate:
        return predict_gain(
            report,
            Change(records=order),
            job=lambda case: replace(case, packed=((order, max(by, 0.01)),)),
        )

    low, high = rate.low / as_it_is.high, rate.high / max(as_it_is.low, 0.01 * as_it_is.value)
    return Rate(gain(faster).value, gain(low).low, gain(high).high)


def _tell_counts(found: Packing, order: str) -> str:
    """Return a text on how many fewer files are opened and read."""
    if found.epoch_files is None or found.epoch_shards is None or found.epoch_runs is None:
        return "fewer files to open"
    reads = found.epoch_runs if order == "in runs" else found.epoch_files
    if found.by_offset is None:
        return f"{reads:,} requests an epoch in place of {found.epoch_files:,}"
    return (
        f"{found.epoch_shards:,} files opened an epoch in place of {found.epoch_files:,}, and "
        f"{reads:,} seeks"
    )


def _tell_trial(found: Packing) -> str:
    """Return a text on the trial and its result."""
    times = dict(list_gains(found))
    sample = f"{found.sample_files:,} of the files ({format_bytes(found.sample_bytes)})"
    if found.by_offset is None:
        return (
            f"read {sample}, and one byte of each, to measure the cost of a request: with a MiB of "
            f"neighbours per request, examples come {times['in runs']:.2f} times as fast"
        )
    return (
        f"tried on {sample}, not in the page cache: from a shard they came "
        f"{times['by offset']:.2f} times as fast by offset, and {times['in runs']:.2f} times in "
        "runs of a MiB"
    )
