"""Sources of examples: one source a module, and what a source of your own is made of."""

import typing as _typing

from stoker.basics.fingerprint import Fingerprint
from stoker.sources.source import (
    Blocks,
    Columns,
    Described,
    FetchesMany,
    Fingerprints,
    Identified,
    Labeled,
    Outlined,
    Reader,
    ReadsAhead,
    Rows,
    Source,
    WholeFiles,
)

if _typing.TYPE_CHECKING:
    from stoker.sources.remote.source import RemoteFile, RemoteOptions, RemoteRanges

__all__ = [
    "Blocks",
    "Columns",
    "Described",
    "FetchesMany",
    "Fingerprint",
    "Fingerprints",
    "Identified",
    "Labeled",
    "Outlined",
    "Reader",
    "ReadsAhead",
    "RemoteFile",
    "RemoteOptions",
    "RemoteRanges",
    "Rows",
    "Source",
    "WholeFiles",
]


def __getattr__(name: str) -> _typing.Any:
    """Import what reads URLs when it is first asked for."""
    if name in ("RemoteFile", "RemoteOptions", "RemoteRanges"):
        from stoker.sources.remote import source

        return getattr(source, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
