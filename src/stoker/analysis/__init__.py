"""Finds out why an accelerator is idle: measurements, what they mean, and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.analysis.model.report import Report
    from stoker.analysis.watching.watch import RunWatch
    from stoker.pipeline import Pipeline


def analyze(pipeline: Pipeline, step: Callable[[Any], object], *, budget_s: float = 60.0) -> Report:
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
        budget_s: the approximate time for the analysis in seconds; long steps take longer.

    Returns:
        The report; ``print(report)`` shows it. Rates are in examples/s.

    Raises:
        TypeError: ``pipeline`` is not a pipeline, or ``step`` cannot be called.
        ValueError: the pipeline has an echo, wraps a loader, or yields no batch.
    """
    from stoker.analysis.pipelines import trace_pipeline
    from stoker.analysis.reports.diagnosis import make_report

    return make_report(trace_pipeline(pipeline, step, budget_s))


def watch(port: int | None = None) -> RunWatch:
    """Watch how long this process waits for pipelines and PyTorch's data loaders, until it ends.

    Once a minute, and at the end, a line on stderr has the shares of compute, prep stall and fetch
    stall in the time so far, and percentiles of the waits for a batch. A run that becomes slow is
    told with its cause: storage, the page cache, memory, another process, a stopped worker. Each
    rank calls it; rank 0 tells the lines of each minute, each rank its last one and warnings. Costs
    under 1 % (``bench/results/watch.json``). `stoker run --watch` does the same for an unedited
    script.

    Example: ``stoker.watch(port=9464)``, before the loop.

    Args:
        port: serves a page at ``http://127.0.0.1:PORT/``, and its numbers to Prometheus at
            ``/metrics``; 0: any free port (``.url``). Of several ranks on a host, PORT plus the
            local rank. Needs ``stoker[prometheus]``.

    Returns:
        The watch: ``stats()``, also for ``stoker.metrics``; ``close()`` ends it. A second call ends
        the watch of the first.

    Raises:
        ImportError: with a port, ``stoker[prometheus]`` is not installed.
        ValueError: ``port`` is no port, or with the local rank no longer one.
        OSError: the port is taken.
    """
    from stoker.analysis.watching.hooks import start_watch
    from stoker.basics.validate import is_whole_number

    if port is not None and (not is_whole_number(port) or not 0 <= port < 1 << 16):
        raise ValueError(f"a port is a whole number from 0 to 65535, not {port!r}")
    return start_watch(port)
