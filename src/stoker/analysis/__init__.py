"""Finds out why an accelerator is idle: measurements, what they mean, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.analysis.model.report import Report
    from stoker.pipeline import Pipeline


def analyze(
    pipeline: Pipeline, step: Callable[[Any], object], *, max_seconds: float = 60.0
) -> Report:
    """Find out why training on a pipeline waits for data, and what would help.

    It runs in this process, on copies of the pipeline: the pipeline's epoch, position and
    statistics do not change. The phases are: the job as it is; training on prepared batches (G);
    the pipeline alone with its data in memory, with several numbers of workers (P); and for local
    files, the pipeline and its files, not in the page cache and in it (S, C). Each stage gets a
    rate of its own. Each phase prints a line to stderr. The method is that of Mohan et al. (VLDB
    2021, section 4), without training steps for P, S and C.

    Example: ``print(stoker.analyze(train, step))``

    Args:
        pipeline: a pipeline without an echo: the report says what an echo would bring.
        step: called with each batch, like the body of the training loop; it really trains. On a
            CUDA device it need not synchronise.
        max_seconds: the approximate time for the analysis in seconds; long steps take longer.

    Returns:
        The report; ``print(report)`` shows it. Rates are in examples/s.

    Raises:
        TypeError: ``pipeline`` is not a pipeline, or ``step`` cannot be called.
        ValueError: the pipeline has an echo, wraps a loader, or yields no batch.
    """
    from stoker.analysis.pipelines import trace_pipeline
    from stoker.analysis.reports.diagnosis import make_report

    return make_report(trace_pipeline(pipeline, step, max_seconds))
