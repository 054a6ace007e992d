"""Estimates the gain of packing, from trials on a sample of the job's files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from stoker.analysis.model.rates import estimate_reads
from stoker.analysis.model.report import Packing, Rate
from stoker.analysis.trials.request_trial import RequestTrial
from stoker.analysis.trials.trial_shard import RUN_BYTES, PackingTrial

SHARD_BYTES = 256 << 20
"""The default shard size of ``stoker pack``: few files to open, and enough shards for many
workers."""


def estimate_packing(
    trials: Sequence[PackingTrial], examples_a_file: float, examples: int | None
) -> Packing | None:
    """Return the gain for local files; None if there was no trial, or if it was too short."""
    if not trials:
        return None
    one_by_one, by_offset, in_runs = (
        estimate_reads(reads, examples_a_file)
        for reads in (
            [trial.one_by_one for trial in trials],
            [trial.by_offset for trial in trials],
            [trial.in_runs for trial in trials],
        )
    )
    if one_by_one is None or by_offset is None or in_runs is None:
        return None
    files, nbytes = trials[0].files, trials[0].nbytes
    return _with_counts(
        Packing(files, nbytes, one_by_one, by_offset, in_runs), examples_a_file, examples
    )


def estimate_requests(
    trial: RequestTrial, prep_share: float, examples: int | None
) -> Packing | None:
    """Return the gain for files behind URLs, from the cost of a request and that of the bytes.

    ``prep_share`` is the fraction of the preparation time in which workers wait for files.
    """
    whole = estimate_reads([trial.whole], 1.0)
    bare = estimate_reads([trial.first_bytes], 1.0)
    if whole is None or bare is None:
        return None
    a_run = max(1.0, RUN_BYTES * trial.files / max(1, trial.nbytes))

    def packed(takes_in: float, requests: float) -> float:
        """Return examples/s in runs, from the rates of whole files and of first bytes."""
        if takes_in <= 0.0 or requests <= 0.0:
            return takes_in
        request_s = min(1.0 / requests, 1.0 / takes_in)
        return 1.0 / (1.0 / takes_in - request_s * (1.0 - 1.0 / a_run))

    ends = packed(whole.low, bare.high), packed(whole.high, bare.low)
    value = packed(whole.value, bare.value)
    in_runs = Rate(value, min(value, *ends), max(value, *ends))
    found = Packing(
        trial.files, trial.nbytes, whole, None, in_runs, requests=bare, prep_share=prep_share
    )
    return _with_counts(found, 1.0, examples)


def _with_counts(found: Packing, examples_a_file: float, examples: int | None) -> Packing:
    """Add the numbers of files, shards and reads in an epoch."""
    if examples is None:
        return found
    files = math.ceil(examples / examples_a_file)
    nbytes = files * found.sample_bytes / found.sample_files
    return replace(
        found,
        epoch_files=files,
        epoch_shards=math.ceil(nbytes / SHARD_BYTES),
        epoch_runs=math.ceil(nbytes / RUN_BYTES),
    )
