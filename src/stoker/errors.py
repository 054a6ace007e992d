"""Errors and warnings of stoker, grouped by the remedy.

    StokerError
    ├── StageError    a stage failed on an example: fix the example or the function; where it can
    │                 be, it is also of the type that the function raised
    ├── FieldError    an example lacks a field that on= names: usually a StageError's cause
    ├── UnlikeError   an example does not fit into its batch: usually a StageError's cause
    ├── RemoteError   remote storage failed for good, or for too long: look at the server
    ├── WorkerDied    a worker process vanished: look for the out-of-memory killer
    ├── TooManyErrors more examples failed than may be skipped: look at the list
    ├── FeedError     a feed is missing, cannot be prepared or has failed: the message says which
    ├── CacheError    a cache is damaged, in use or cannot be made: the message says which
    ├── ClusterError  this process is in no cluster that answers: join one first
    ├── TokenError    the secret of a cluster cannot be read: look at its file
    └── StateError    a saved state cannot be loaded or taken: use another state

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``, in the call that passes them;
what cannot stand together raises a ``CombinationError``, which is a ``ValueError``.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_HERE = os.path.dirname(__file__) + os.sep
# Skips in the message of TooManyErrors: a screenful.
_SHOWN = 20


def describe_error(error: BaseException | None) -> str:
    """Return the type and the message of an exception, whose class may be a user's and fail."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return f"{name}, of which str() fails"


def shows_all_frames() -> bool:
    """True if stoker's own frames are to stay in tracebacks: STOKER_TRACEBACK=full."""
    return os.environ.get("STOKER_TRACEBACK") == "full"


def raised_here(error: _Error) -> _Error:
    """Return an exception whose traceback begins where it is raised next, not deep inside."""
    if shows_all_frames():
        return error
    if error.__cause__ is not None:
        without_own_frames(error.__cause__)
    return error.with_traceback(None)


def without_own_frames(error: _Error) -> _Error:
    """Return an exception, and those behind it, with tracebacks that begin outside of stoker."""
    behind: BaseException | None = error
    seen: set[int] = set()
    while behind is not None and id(behind) not in seen and not shows_all_frames():
        seen.add(id(behind))
        trace = behind.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
            trace = trace.tb_next
        behind.with_traceback(trace)  # an exception that is frozen allows this alone
        behind = behind.__cause__ or behind.__context__
    return error


class StokerError(Exception):
    """The base of every error that is stoker's own."""


class CombinationError(ValueError):
    """Stages, or options, that cannot stand together: each by itself is right.

    A class of its own so that a test can count these refusals; callers catch ``ValueError``.
    """


class FieldError(StokerError, LookupError):
    """The example lacks the field that ``on=`` names."""


class UnlikeError(StokerError, ValueError):
    """An example does not fit into its batch.

    Attributes:
        row: the row of the example in the batch.
    """

    def __init__(self, text: str, row: int = 0) -> None:
        super().__init__(text)
        self.row = row


@functools.cache
def _class_for(kind: type[BaseException]) -> type[StageError]:
    """Return the class of a ``StageError`` that is also of this type, where there can be one."""
    if issubclass(kind, StageError):
        return kind
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return StageError
    names = {"__module__": StageError.__module__, "__doc__": StageError.__doc__}
    try:
        meta: Any = type("Meta", (type(kind),), {})
        made: type[StageError] = meta("StageError", (StageError, kind), names)
        _bare(made)
        # Others' queues carry an error's class, too, such as those of a DataLoader's workers.
        copyreg.pickle(meta, lambda _: (_class_for, (kind,)))
    except Exception:  # a group, or a class that does not want heirs
        return StageError
    return made


def _bare(kind: type[StageError]) -> StageError:
    """Return a new error. No ``__new__`` of a user's class runs."""
    makers = (vars(base).get("__new__") for base in kind.__mro__)
    make: Any = next(each for each in makers if isinstance(each, BuiltinFunctionType))
    made: StageError = make(kind)
    return made


def _copy_attributes(cause: BaseException, error: BaseException) -> None:
    """Give an error the attributes of its cause, such as ``errno``, but for private ones."""
    kinds = [kind for kind in type(cause).__mro__ if not issubclass(Exception, kind)]
    slots = {
        name: getattr(cause, name, None)
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, (GetSetDescriptorType, MemberDescriptorType))
    }
    for name, value in {**slots, **vars(cause)}.items():
        if not name.startswith("__"):
            with contextlib.suppress(Exception):
                setattr(error, name, value)


class StageError(StokerError):
    """A stage of a pipeline failed; the original exception is ``__cause__``.

    It is also of the type of that exception, and has its attributes, so that ``except OSError``
    around a loop catches it; but for ``StopIteration`` and types that allow no second base.

    Raised by ``next()``, at the batch that needed the failed example; the next ``next()`` goes on
    behind that batch, whose examples count as skipped. Where a later batch depends on what failed
    (in ``.scan()``, in a stream's own iterator), a note says that the epoch ends.

    The traceback of the cause begins in the function that stoker called; with
    STOKER_TRACEBACK=full in the environment, stoker's own frames are in it, too.

    Attributes:
        stage: the stage as ``print(pipeline)`` names it, such as ``map(decode)``.
        index: the example's index in the source, or None where the stage works on batches.
        path: the example's file, where the source knows one.
        number: how many examples of a stream came before it, where there is no index.
        where: these as text, such as ``example 7 (/data/7.jpg)``.
        batch: the ordinal of the batch in its epoch, for stages that work on batches. Of an example
            that does not fit into its batch, ``index`` and the others tell, too. Below 0: a batch
            of an earlier epoch that an echo uses again; -1 stands just before this epoch's first.
    """

    # In the class, too, and set as any error's: the type of the cause may have properties of these
    # names, or refuse to be written to.
    stage: str = ""
    index: int | None = None
    path: str | None = None
    number: int | None = None
    where: str = ""
    batch: int | None = None
    __setattr__ = Exception.__setattr__

    def __new__(cls, stage: str, cause: BaseException, **where: Any) -> StageError:
        kind: Any = type(cause)
        return _bare(_class_for(kind))

    def __init__(
        self,
        stage: str,
        cause: BaseException,
        *,
        index: int | None = None,
        path: str | None = None,
        batch: int | None = None,
        number: int | None = None,
    ) -> None:
        if isinstance(self, type(cause)):
            _copy_attributes(cause, self)
        self.stage = stage
        self.number = number
        self.index = index
        self.path = path
        self.batch = batch
        places = [f"batch {batch}"] if batch is not None else []
        if batch is not None and batch < 0:
            places = [f"batch {batch} (of an earlier epoch, counted back from this one's first)"]
        if index is not None:
            places.append(f"example {index}")
        elif number is not None:
            places.append(f"example {number} of the stream")
        self.where = ", ".join(places) + ("" if path is None else f" ({path})")
        where = f" on {self.where}" if places else self.where
        # No ``__init__`` of a user's class runs.
        Exception.__init__(self, f"{stage} failed{where}: {describe_error(cause)}")
        self.__cause__ = without_own_frames(cause)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        where = {name: getattr(self, name) for name in ("index", "path", "batch", "number")}
        return functools.partial(StageError, **where), (self.stage, self.__cause__)


@dataclass(frozen=True)
class Skip:
    """One example that was left out because a stage failed on it."""

    stage: str
    """The stage as ``print(pipeline)`` names it."""
    index: int | None
    """The example's index in the source; None in a stream."""
    path: str | None
    """The example's file, where the source knows one."""
    cause: str
    """What was raised, type and message."""

    def __str__(self) -> str:
        which = "an example" if self.index is None else f"example {self.index}"
        where = "" if self.path is None else f" ({self.path})"
        return f"{which}{where}: {self.stage}: {self.cause}"


class TooManyErrors(StokerError):
    """More examples failed in an epoch than ``max_errors=`` allows to skip.

    Raised by ``next()`` when the next batch depends on the failure that is one too many, which
    is its ``__cause__``. The state of the last batch can be resumed with a larger ``max_errors=``.

    Attributes:
        skips: the failures since the epoch began or was resumed, the last one included (of very
            many, the first thousand); with a stage's own ``max_errors=``, those of that stage.
        skipped: how many failures there are in the epoch, that stage's or all others.
    """

    def __init__(self, budget: str, stage: str | None, skips: Sequence[Skip], skipped: int) -> None:
        self.budget = budget
        self.stage = stage
        self.skips = tuple(skips)
        self.skipped = skipped
        of = f" of {stage}" if stage else ""
        shown = [f"  {skip}" for skip in self.skips[-_SHOWN:]]
        if skipped > len(shown):
            shown.insert(0, f"  ... and {skipped - len(shown):,} before")
        failed = f"{skipped:,} example{'s' * (skipped > 1)} failed in this epoch"
        head = f"{failed}, max_errors={of} allows {budget}:"
        super().__init__("\n".join([head, *shown]))

    def __reduce__(self) -> tuple[object, ...]:
        return TooManyErrors, (self.budget, self.stage, self.skips, self.skipped)


class RemoteError(StokerError):
    """A file or folder on remote storage could not be read, and retrying did not or cannot help.

    Attributes:
        url: of the file or folder.
        status: the HTTP status of the last answer; None where there was none.
        attempts: how often it was tried.
        elapsed_s: the time from the first failure to the last.
    """

    def __init__(
        self, url: str, reason: str, *, status: int | None, attempts: int, elapsed_s: float
    ) -> None:
        self.url = url
        self.reason = reason
        self.status = status
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        spent = f" after {attempts} attempts in {elapsed_s:.3g} s" if attempts > 1 else ""
        super().__init__(f"{url}: {reason}{spent}")

    def __reduce__(self) -> tuple[object, ...]:
        details = {name: getattr(self, name) for name in ("status", "attempts", "elapsed_s")}
        return functools.partial(RemoteError, **details), (self.url, self.reason)


class WorkerDied(StokerError):
    """A worker process ended without an answer (killed, out of memory, crashed in native code)."""


class StateError(StokerError):
    """A state belongs to another pipeline or version, or cannot be taken at this moment."""


class CacheError(StokerError):
    """A cache is in use, or cannot be read or made."""


class ClusterError(StokerError):
    """This process has joined no Ray cluster, or one whose head does not answer."""


class TokenError(StokerError):
    """A cluster's token or key cannot be read, or other users can read it, too."""


class CacheWarning(UserWarning):
    """A cache cannot help, is smaller than asked for, or has stopped admitting."""


class FeedError(StokerError):
    """A feed is not there, cannot be made or joined, or its pipeline has failed."""
