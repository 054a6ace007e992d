"""The memory budget of a feed (``staging=``): how many items or bytes shared memory may hold."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.basics import resources
from stoker.feeds.feeder.log import OutputLog

# The default budget in batches: two jobs hold up to four, and one may be four ahead. Chosen, not
# measured.
BATCHES = 8
CHUNKS = 64
"""The default budget in chunks of examples, if the pipeline yields examples: a batch of a job takes
several chunks. Chosen, not measured."""
# Examples in a chunk: a usual batch. Each item costs a message and a wake-up, which the examples of
# a chunk share.
CHUNK_EXAMPLES = 64
# Batches that a job may hold: it works on one, and the next is ready.
_MAX_LEASED_BATCHES = 2
# Chunks that a job may hold: enough for two batches of 512 examples.
_MAX_LEASED_CHUNKS = 16


class MemoryBudget:
    """The limit on items in a feeder's logs.

    It does not count items that jobs hold after they left the log: at most ``max_leases`` for each
    job.

    Args:
        limit: a number of items (batches, or chunks of examples); None for the default.
        batched: whether items are batches.

    Attributes:
        max_leases: how many items a job may hold at a time.
        largest_item_bytes: the largest item so far, in bytes.

    Raises ValueError for a limit that is too small.
    """

    def __init__(self, limit: int | None, batched: bool) -> None:
        self.max_leases = _MAX_LEASED_BATCHES if batched else _MAX_LEASED_CHUNKS
        self.largest_item_bytes = 0
        self._unit = "batches" if batched else f"chunks of up to {CHUNK_EXAMPLES} examples"
        self._items = (BATCHES if batched else CHUNKS) if limit is None else limit
        if self._items < 2 * self.max_leases:
            raise ValueError(
                f"staging= must be at least {2 * self.max_leases} {self._unit}, not {limit}"
            )

    def describe(self) -> str:
        size = (
            self.largest_item_bytes
            and f", {resources.format_bytes(self._items * self.largest_item_bytes)}"
        )
        return f"{self._items} {self._unit}{size or ''}"

    def max_logs(self) -> int:
        return max(1, self._items // self.max_leases)

    def record_size(self, nbytes: int) -> str | None:
        """Record an item's size; return why the budget cannot hold such items, or None."""
        first = not self.largest_item_bytes
        self.largest_item_bytes = max(self.largest_item_bytes, nbytes)
        if first and self._items * nbytes > resources.usable_memory_bytes():
            size = resources.format_bytes(nbytes)
            usable = resources.format_bytes(resources.usable_memory_bytes())
            return (
                f"the staging area of {self._items} items of {size} does not fit into memory: this "
                f"process can use {usable}. Give a smaller staging= (--staging)"
            )
        return None

    def room(self, logs: Sequence[OutputLog], log: OutputLog) -> int:
        """Return how many more items a log may take.

        The first log gets the room that the others leave. Each other log gets as many items as one
        job may hold.
        """
        is_first = log is logs[0]
        reserved = self.max_leases * (len(logs) - 1) if is_first else 0
        room = self._items - reserved - sum(len(each.items) for each in logs)
        return max(0, min(room, CHUNKS if is_first else self.max_leases - len(log.items)))
