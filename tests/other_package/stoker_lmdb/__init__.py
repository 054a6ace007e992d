"""A package of somebody else's: LMDB tables as a source, and two stages.

It imports what docs/extending.md names, and nothing else of stoker.
"""

from stoker_lmdb.stages import Dedup, Doubled
from stoker_lmdb.table import LmdbTable, from_lmdb, write_lmdb

__all__ = ["Dedup", "Doubled", "from_lmdb", "LmdbTable", "write_lmdb"]
