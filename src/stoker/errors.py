"""What stoker raises, grouped by what the reader would do about it.

    StokerError
    ├── StageError    a stage failed on an example: fix the example or the function
    ├── WorkerDied    a worker process vanished: look for the out-of-memory killer
    └── StateError    a saved state cannot be loaded or taken: use another state

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``, where they are given.
"""

from __future__ import annotations


class StokerError(Exception):
    """The base of every error that is stoker's own."""


class StageError(StokerError):
    """A stage of a pipeline failed; the original exception is ``__cause__``.

    Raised once, by ``next()``, at the batch that needed the failed example.

    Attributes:
        stage: the stage as ``print(pipeline)`` names it, such as ``map(decode)``.
        index: the example's index in the source, or None where the stage works on batches.
        path: the example's file, where the source knows one.
        batch: the ordinal of the batch in its epoch, for stages that work on batches.
    """

    def __init__(
        self,
        stage: str,
        cause: BaseException,
        *,
        index: int | None = None,
        path: str | None = None,
        batch: int | None = None,
    ) -> None:
        self.stage = stage
        self.index = index
        self.path = path
        self.batch = batch
        where = ""
        if index is not None:
            where = f" on example {index}"
        elif batch is not None:
            where = f" on batch {batch}"
        if path is not None:
            where += f" ({path})"
        super().__init__(f"{stage} failed{where}: {type(cause).__name__}: {cause}")
        self.__cause__ = cause

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.stage, self.__cause__, self.index, self.path, self.batch)


def _rebuild(
    stage: str, cause: BaseException, index: int | None, path: str | None, batch: int | None
) -> StageError:
    return StageError(stage, cause, index=index, path=path, batch=batch)


class WorkerDied(StokerError):
    """A worker process ended without an answer (killed, out of memory, crashed in native code)."""


class StateError(StokerError):
    """A state belongs to another pipeline or version, or cannot be taken at this moment."""
