"""A package of somebody else's: LMDB tables as a source, and four stages.

It imports what docs/extending.md names, and nothing else of stoker.
"""

from stoker_lmdb.stages import Dedup, Doubled
from stoker_lmdb.table import LmdbTable, from_lmdb, write_lmdb
from stoker_lmdb.windows import Every, Windows

__all__ = ["Dedup", "Doubled", "Every", "from_lmdb", "LmdbTable", "Windows", "write_lmdb"]
