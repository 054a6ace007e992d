"""Warns if a pipeline that a method returned was dropped unused.

Pipelines are immutable, so ``train.shuffle()`` without an assignment does nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

from stoker.basics.warn import warn


class UnusedCheck:
    """The use of a pipeline, and of the last one that was made of it.

    ``is_used``: whether the pipeline was asked for anything.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._last: UnusedCheck | None = None
        self._call = ""
        self._pipeline: weakref.ref[Any] | None = None

    def note_derived(self, check: UnusedCheck, pipeline: Any, call: str) -> None:
        """Note the pipeline, with its own check, that a method, ``call``, made of this one."""
        self._last = check
        check._call, check._pipeline = call, weakref.ref(pipeline)

    def warn_of_dropped(self) -> None:
        """Warn, once, if the last pipeline made of this one is gone and was never used."""
        last, self._last = self._last, None
        if last is None or last._pipeline is None or last._pipeline() is not None or last.is_used:
            return
        warn(
            f".{last._call} changes nothing in the pipeline that is iterated here: it returned a "
            "new one, which was dropped. Keep it (train = train.shuffle())"
        )

    def __reduce__(self) -> tuple[type[UnusedCheck], tuple[()]]:
        return UnusedCheck, ()  # a copy of a pipeline begins anew, and references cannot be pickled
