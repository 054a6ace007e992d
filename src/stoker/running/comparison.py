"""Compares the first batches of a changed loader with those of the untouched one, bit for bit.

The untouched loader reads the same indices beside the changed one, with the script's own number of
workers and their seeds. Without workers, a process of its own stands for the script's, which must
not read: files that it opened would be shared with workers that start later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from stoker.basics import pytree
from stoker.basics.signals import raise_interrupt

DEAD_WORKER = "DataLoader worker (pid"
"""How PyTorch's error for a worker that died begins."""


class BatchComparison:
    """The untouched loader's batches of one epoch.

    Attributes:
        compared: batches that were the same.
        problem: why batches cannot be compared any more; empty if they can.
    """

    def __init__(self, batches: Any) -> None:
        """``batches``: the untouched loader's iterator, over indices that the changed loader's
        workers were given."""
        self.compared = 0
        self.problem = ""
        self._batches = batches

    def find_difference(self, batch: Any) -> str:
        """Compare the changed loader's next batch; empty if it is the same, or has no counterpart.

        In the second case ``problem`` is set.
        """
        try:
            fill(self._batches)
            own = next(self._batches)
        except Exception as error:
            raise_interrupt(error)
            if str(error).startswith(DEAD_WORKER):
                self.problem = "the process that read the script's own was killed"
                return ""
            return f"the script's own loader fails there ({type(error).__name__})"
        try:
            same = pytree.equal(batch, own, layout=True)
        except Exception as error:  # what cannot be compared, or what the values' own code raises
            self.problem = str(error)
            return ""
        if same:
            self.compared += 1
            return ""
        return "the script's own has other values"

    def close(self) -> None:
        """End the untouched loader's workers."""
        if self._batches._num_workers:
            self._batches._shutdown_workers()


def fill(batches: Any) -> None:
    """Give the workers of PyTorch's iterator the indices that came after they had asked."""
    if batches._num_workers:  # else it reads when it is asked
        most = batches._prefetch_factor * batches._num_workers
        # Batches that came before their turn count, too.
        for _ in range(most - (batches._send_idx - batches._rcvd_idx)):
            batches._try_put_index()


class IndicesBehind:
    """The indices that the changed loader's workers were given, for the untouched one's."""

    def __init__(self, copies: deque[Any]) -> None:
        self._behind = copies

    def __iter__(self) -> IndicesBehind:
        return self

    def __next__(self) -> Any:
        if not self._behind:
            raise StopIteration  # not for good: more may be given
        return self._behind.popleft()
