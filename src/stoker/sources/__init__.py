"""Sources of examples, one in each module, and the classes for sources of your own."""

import importlib as _importlib
import typing as _typing

from stoker.basics.buffers import Allocator
from stoker.basics.fingerprint import Fingerprint
from stoker.sources.source import Indices, Reader, Rows, Source

if _typing.TYPE_CHECKING:
    from stoker.sources.remote.reader import RemoteFile
    from stoker.sources.remote.source import Access, ReadsRanges
    from stoker.sources.remote.storage import RemoteOptions

__all__ = [
    "Access",
    "Allocator",
    "Fingerprint",
    "Indices",
    "Reader",
    "ReadsRanges",
    "RemoteFile",
    "RemoteOptions",
    "Rows",
    "Source",
]

_REMOTE = {
    "Access": "source",
    "ReadsRanges": "source",
    "RemoteFile": "reader",
    "RemoteOptions": "storage",
}


def __getattr__(name: str) -> _typing.Any:
    """Import what reads URLs when it is first asked for."""
    if name in _REMOTE:
        return getattr(_importlib.import_module(f"stoker.sources.remote.{_REMOTE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
