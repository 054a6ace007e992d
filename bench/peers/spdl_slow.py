"""SPDL: examples that sleep, from threads, as they come or in order; see ``slow_examples.py``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from spdl.pipeline import PipelineBuilder

sys.path.append(str(Path(__file__).resolve().parent))  # at the end: there is a spdl.py, too
from serve import serve


def main() -> None:
    path, output_order, group, workers, step_s = sys.argv[1:6]
    seconds = np.load(path)
    generator = np.random.default_rng(0)

    def made(index: int) -> Any:
        time.sleep(seconds[index])
        return np.full(8, index)

    def epoch() -> Iterator[tuple[Any, Any]]:
        pipeline = (
            PipelineBuilder()
            .add_source(generator.permutation(len(seconds)).tolist())
            .pipe(made, concurrency=int(workers), output_order=output_order)
            .aggregate(int(group))
            .add_sink(4)
            .build(num_threads=int(workers))
        )
        with pipeline.auto_stop():
            for batch in pipeline:
                rows = np.stack(batch)
                yield rows, rows[:, 0]
                time.sleep(float(step_s))

    serve({"version": metadata.version("spdl")}, epoch)


if __name__ == "__main__":
    main()
