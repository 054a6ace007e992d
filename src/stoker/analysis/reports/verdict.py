"""The verdict of an analysis in a few sentences; the first one is the headline."""

from __future__ import annotations

from stoker.analysis.model.calibration import TOLERANCE
from stoker.analysis.model.report import HostLoad, Report
from stoker.analysis.model.trace import Trace

_LIMITS = {
    "fetch": "fetching data from storage",
    "prep": "preparing data",
    "processors": "the host's processors",
}


def find_doubts(report: Report) -> list[str]:
    """Return the reasons why the report is uncertain; an empty list if it is not."""
    seen = report.as_it_is
    found = [f"cannot be told: {untold}" for untold in report.untold]
    if seen is not None and report.predicted is not None:
        rate = seen.rate.value
        if abs(report.predicted - rate) > TOLERANCE * rate:
            found.append(f"predicted {report.predicted:,.0f} examples/s, measured {rate:,.0f}")
    g, replayed = report.rates.G, report.replayed
    if g and replayed and abs(replayed.value - g.value) > TOLERANCE * g.value:
        found.append(
            f"G is {g.value:,.0f} examples/s by the job's own speed and waits, and "
            f"{replayed.value:,.0f} on the same batches again and again"
        )
    if report.host is not None and report.host.is_busy:
        found.append(_describe_host(report.host))
    rates = {name: getattr(report.rates, name) for name in ("G", "P", "S", "C", "F")}
    rates["speed"] = seen.rate if seen is not None else None
    wide = [name for name, rate in rates.items() if rate is not None and rate.low <= 0.0]
    if wide:
        found.append(f"the 95 % interval of {', '.join(wide)} reaches 0")
    return found


def _describe_host(host: HostLoad) -> str:
    text = (
        f"the host was busy: other processes used {host.others_cores:.1f} of {host.cores} "
        f"core{'s' * (host.cores != 1)}"
    )
    # Less than a twentieth of a processor is within the counters' own error.
    if host.steal_cores > 0.05:
        text += f", and other virtual machines {host.steal_cores:.1f}"
    return text


def write_verdict(report: Report) -> str:
    """Return what limits the job, and how much that costs; with care where there are doubts."""
    split, seen, sure = report.split, report.as_it_is, not report.doubts
    if seen is None:
        return "The script ended before it reached a steady state. Only the rates below are known"
    if report.rates.G is None:
        return (
            f"The job waits {seen.wait_fraction:.0%} of the time for its loader. "
            "G was not measured, so it is unknown how much of that time is lost: measure longer "
            "(stoker analyze --max-seconds 900), or on a quieter machine"
        )
    who = "Training" if report.trains_on_cpu else "The accelerator"
    if report.bound == "compute":
        left = 1.0 / split.compute - 1.0
        gain = f"At most {left:.0%} is" if left >= 0.005 else "There is nothing"
        return (
            f"{who} {'is' if sure else 'seems to be'} kept busy: {split.compute:.0%} of the time "
            f"is compute. {gain} to gain in the data path"
        )
    lost, ends = 1.0 - split.compute, ""
    if report.split_intervals is not None:
        compute = report.split_intervals.compute
        ends = f" ({100 - 100 * compute.high:.0f} to {1 - compute.low:.0%})"
    text = (
        f"The job {'is' if sure else 'seems to be'} limited by {_LIMITS[report.bound]}: it loses "
        f"{lost:.0%}{ends} of its time"
    )
    if split.prep_stall > 0.01 and split.fetch_stall > 0.01:
        text += (
            f", {split.prep_stall:.0%} to preparing data (decoding, augmenting, collating) and "
            f"{split.fetch_stall:.0%} to fetching it from storage"
        )
    if len(report.ranks) > 1:
        short = max(report.ranks, key=lambda rank: rank.wait_fraction)
        text += f". Rank {short.rank} is short of data, and the others wait for it"
    if report.bound == "processors":
        text += ". Preparing takes processors that training needs, too"
    return text


def explain_nothing_seen(trace: Trace) -> str:
    """Return why there is nothing to report on a script, and what to do."""
    reasons = trace.reasons
    why = reasons.get("batch") or reasons.get("as-it-is") or "it ended"
    text = f"the script never used a loader, or got no batch from it: {why}"
    if output := reasons.get("output"):
        text += f". Its last lines:\n{output}"
        if "EOFError" in output:
            text += (
                "\nIts standard input is empty during an analysis, unless you give a file: "
                "stoker analyze ... < FILE"
            )
    else:
        text += (
            ". The analyzer sees loops over torch.utils.data.DataLoader, and over pipelines of "
            "stoker, in Python processes that keep PYTHONPATH"
        )
    return text
