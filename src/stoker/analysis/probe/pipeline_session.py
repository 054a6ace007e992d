"""Analyzes a pipeline of stoker's in the script that iterates it, in step with the script's loop.

``stoker.analyze(pipeline, step)`` runs in a thread. Its ``step`` hands a batch to the loop, and
returns when the loop asks for the next one: so training goes on in the thread where it always ran.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from .drain_session import Finished, wait_for_command
from .records import write_json

THREAD = "stoker-analyze"
"""The name of the thread that iterates copies of the script's pipeline."""


class PipelineSession:
    """Replaces ``next()`` of a pipeline once the analyzer takes over."""

    def __init__(self, pipeline: Any, process: Any) -> None:
        self._pipeline, self._process = pipeline, process
        self._base: str = process.recorder.base
        self._given: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self) -> Any:
        """Return a batch to train on. Raises Finished when the analysis is over."""
        if self._thread is None:
            command = wait_for_command(f"{self._base}.command.0", self._process.folder)
            if command is None or command["do"] == "end":
                raise Finished
            self._thread = threading.Thread(None, self._analyze, THREAD, (command,), daemon=True)
            self._thread.start()
        else:
            self._asked.put(None)
        given = self._given.get()
        if not given:
            raise Finished
        return given[0]

    def _step(self, batch: Any) -> None:
        self._given.put([batch])
        self._asked.get()

    def _analyze(self, command: dict[str, Any]) -> None:
        answer = {}
        try:
            load = importlib.import_module  # it is imported, as there is a pipeline
            trace = load("stoker.analysis.pipelines").trace_pipeline(
                self._pipeline, self._step, command["seconds"]
            )
            report = load("stoker.analysis.reports.diagnosis").make_report(trace)
            path = load("pathlib").Path(command["path"])
            load("stoker.analysis.model.report").write_report(report, path)
        except Exception as error:
            answer = {"error": str(error)}
        write_json(f"{self._base}.answer.0", answer)
        self._given.put([])


class HandedBatches:
    """An epoch of a pipeline whose batches a ``PipelineSession`` hands over."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take

    def __iter__(self) -> HandedBatches:
        return self

    def __next__(self) -> Any:
        return self._take()

    def __enter__(self) -> HandedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass
