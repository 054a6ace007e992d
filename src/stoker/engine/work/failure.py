"""Failures, which stand in place of examples until an output needs them."""

from __future__ import annotations


class Failure:
    """Stands in place of an example that a stage failed on, until a batch needs it.

    Attributes:
        error: the error to raise then.
        part: the failed segment's place among the layers: only the sift behind it may skip
            the example. None if nothing may skip it.
        account: the ``max_errors=`` that it counts against (see ``Sift``).
    """

    def __init__(self, error: BaseException, part: int | None = None, account: int = 0) -> None:
        self.error = error
        self.part = part
        self.account = account


class Rejected(Exception):
    """The error of an example that a filter dropped."""


SENDING = "worker process"
"""The stage of values that did not survive the way from a process, or to it."""
REJECTED = Failure(Rejected())
ENDED = -1
"""The part of a failure that ended a stream: it is never skipped, nor left out of a batch."""
