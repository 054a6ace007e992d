"""Failures of remote storage: which ones are retried, how often, and their messages."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stoker.errors import RemoteError

T = TypeVar("T")

# Doubled each time: a brief failure costs little.
_FIRST_PAUSE_S = 0.1
# Some sixteen tries in the 60 s of timeout_s, and work goes on soon after an outage.
_LONGEST_PAUSE_S = 5.0
# HTTP: not found, and gone for good. Trying again gives the same.
_GONE = (404, 410)
# HTTP: the request took too long, came too early, too many came. And all from 500 on, but for
# _NOT_IMPLEMENTED.
_PASSING = (408, 425, 429)
# HTTP: the server will never do this.
_NOT_IMPLEMENTED = 501
# All other errors may pass. Storage libraries have many of their own, too many to list.
_LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, LookupError, AttributeError, NotImplementedError, ImportError),
)
_LASTING_ERRNOS = (errno.EINVAL, errno.EFBIG, errno.ENXIO)  # it is no file to be read
_LASTING_NAMES = re.compile("Credential|Auth|Validation|Configuration|Unknown")


class StatusError(Exception):
    """An answer whose status is not 200; ``retry_after_s`` is the server's Retry-After, or 0."""

    def __init__(self, status: int, reason: str | None, retry_after: str | None = None) -> None:
        self.status = status
        # Seconds; a date is rare, and a clock that is wrong would make it a long wait.
        self.retry_after_s = int(retry_after) if retry_after and retry_after.isdecimal() else 0
        super().__init__(f"HTTP {status} {reason or ''}".rstrip())


class PassingError(Exception):
    """Too few bytes, or too many; none for too long; or an answer that is not HTTP."""


class UnusableError(ValueError):
    """An answer that cannot be used and would not change; not retried."""


_OWN = (StatusError, PassingError, UnusableError)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    url: str,
    timeout_s: float,
    on_retry: Callable[[], None] = lambda: None,
) -> T:
    """Try until success, a permanent failure, or ``timeout_s`` after the first failure.

    ``on_retry`` is called before each further attempt. Raises FileNotFoundError if there is no such
    file, ImportError unchanged, and RemoteError for all other errors.
    """
    began = pause_s = 0.0
    attempts = 0
    while True:
        attempts += 1
        try:
            return await attempt()
        except ImportError:
            raise
        except Exception as error:
            now = time.monotonic()
            began = began or now
            left_s = began + timeout_s - now
            status = _find_status(error)
            if isinstance(error, FileNotFoundError) or status in _GONE:
                raise FileNotFoundError(errno.ENOENT, _describe(error), url) from error
            if left_s <= 0 or not _is_passing(error, status):
                raise RemoteError(
                    url, _describe(error), status=status, attempts=attempts, elapsed_s=now - began
                ) from error
            asked_s = getattr(error, "retry_after_s", 0)
        pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        await asyncio.sleep(min(max(asked_s, pause_s * _jitter.uniform(0.5, 1)), left_s))
        on_retry()


_jitter = random.Random()  # of its own: users seed the global one


def _is_passing(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status in _PASSING or (status >= 500 and status != _NOT_IMPLEMENTED)
    name = getattr(error, "os_error", error)
    if isinstance(name, socket.gaierror) and name.errno == socket.EAI_NONAME:
        return False  # no such host
    if isinstance(error, OSError) and error.errno in _LASTING_ERRNOS:
        return False
    return not (isinstance(error, _LASTING) or _LASTING_NAMES.search(type(error).__name__))


def _find_status(error: Exception) -> int | None:
    for attribute in ("status", "status_code", "code"):
        value = getattr(error, attribute, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    for each in (error, error.__cause__):  # s3fs: a built-in error because of botocore's
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(value, int):
                return value
    return None


def _describe(error: Exception) -> str:
    if isinstance(error, _OWN):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
