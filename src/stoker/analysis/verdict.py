"""What an analysis found, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.analysis.record import Record
from stoker.analysis.report import Action, Report

FED = 0.05  # stalls below this share of the time are not worth anybody's
_LIMITS = {
    "fetch": "fetching data from storage",
    "prep": "preparing data (decoding, augmenting, collating)",
    "processors": "preparing data, on processors that training needs too",
}


def verdict(report: Report, actions: Sequence[Action]) -> str:
    """Return what the job is limited by, how much that costs, and what to do first."""
    split, seen = report.split, report.as_it_is
    if seen is None:
        return "The script ended before a steady state was seen; the rates below are all there is"
    if report.rates.G is None:
        return (
            f"The job waits {seen.wait_fraction:.0%} of the time for its loader, start-up apart; "
            "how much of that is lost could not be told, for G was not measured"
        )
    who = ""
    if len(report.ranks) > 1:
        short = max(report.ranks, key=lambda rank: rank.wait_fraction)
        who = f"Rank {short.rank} is short of data, and the others wait for it. "
    if report.bound == "compute":
        who = "" if split.compute > 1 - FED else who
        return (
            f"{who}The accelerator is fed: {split.compute:.0%} of the time is compute, and there "
            "is nothing to gain in the data path"
        )
    parts = []
    if split.prep_stall > 0.01:
        parts.append(f"{split.prep_stall:.0%} to preparing data")
    if split.fetch_stall > 0.01:
        parts.append(f"{split.fetch_stall:.0%} to fetching it")
    text = (
        f"{who}The job is limited by {_LIMITS[report.bound]}: training computes "
        f"{split.compute:.0%} of the time and loses {' and '.join(parts)}"
    )
    if actions:
        text += f". First: {actions[0].title} ({actions[0].gain.value:.2f} times as fast)"
    return text


def nothing_seen(record: Record) -> str:
    """Say why a script showed nothing to report on, and what to do."""
    reasons = record.reasons
    why = reasons.get("batch") or reasons.get("as-it-is") or "it ended"
    text = f"the script never reached a loader, or got no batch from one: {why}"
    if output := reasons.get("output"):
        text += f". Its last lines:\n{output}"
        if "EOFError" in output:
            text += (
                "\nIts standard input is empty during an analysis, unless you give a file: "
                "stoker analyze ... < FILE"
            )
    else:
        text += (
            ". The analyzer sees loops over torch.utils.data.DataLoader, in Python processes that "
            "keep PYTHONPATH; for a stoker pipeline use stoker.analyze(pipeline, step)"
        )
    return text
