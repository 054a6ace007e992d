"""Why an accelerator is idle: what was measured, what it means, what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.analysis.model.report import Report
    from stoker.pipeline import Pipeline


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
    from stoker.analysis.pipelines import trace_pipeline
    from stoker.analysis.reports.diagnosis import make_report

    return make_report(trace_pipeline(pipeline, step, budget_s))
