"""Shuffling: a permutation keyed by seed and epoch, by blocks perhaps; or a stream's buffer."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.basics.validate import is_whole_number
from stoker.engine.checkpoint import PoolSize
from stoker.errors import CombinationError
from stoker.schedule.orders.blocks import WINDOW, not_too_large, runs
from stoker.schedule.selection import Selection
from stoker.sources.origin import IndexedSource
from stoker.stages.stage import ChainStage, ChainView, Traits, refuse_behind

DEFAULT_BUFFER = 1_000
"""Examples in a shuffle buffer, unless the user says otherwise: bench/sources.py has WebDataset
shuffle as many. Chosen, not measured."""


@dataclass(frozen=True)
class Shuffle(ChainStage):
    """The stage ``.shuffle()``: a permutation keyed by seed and epoch (see ``orders``).

    Attributes:
        buffer: of a stream, how many examples are shuffled among each other; None otherwise.
        block: of neighbours, how many are a block; True for the source's own blocks, False for
            none, None where the source says which.
        ends: of the blocks, where there are some.
    """

    buffer: int | None = None
    block: int | bool | None = None
    ends: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    traits = Traits(selects=True, shuffles=True, keeps_fields=True)

    @property
    def call(self) -> str:
        if self.ends is not None:
            return f"shuffle({len(self.ends):,} blocks)"
        return f"shuffle({f'buffer={self.buffer:,}' if self.buffer else ''})"

    def bind(self, before: ChainView) -> Shuffle:
        """Check that there is an order to draw, and how."""
        source = before.source
        if source.yields_batches:
            raise CombinationError("a loader has an order of its own: shuffle there (shuffle=True)")
        if source.has_own_order:
            raise CombinationError(
                "shuffle each part of a mixture by itself: stoker.mix([a.shuffle(), b.shuffle()])"
            )
        refuse_behind(
            "shuffle()",
            before,
            lambda t: t.repeats or t.batches or t.shuffles or t.joins or t.scans,
            "put it first",
        )
        if isinstance(source, IndexedSource):
            if self.buffer is not None:
                raise CombinationError(
                    "buffer= is for streams; this source needs none to be shuffled as a whole: "
                    ".shuffle()"
                )
            return replace(self, ends=self._ends(source))
        if self.block is not None:
            raise CombinationError("block= needs examples with numbers; for a stream, use buffer=")
        buffer: Any = DEFAULT_BUFFER if self.buffer is None else self.buffer
        if not is_whole_number(buffer) or buffer < 2:
            raise ValueError(f"a shuffle buffer holds at least two examples, not {buffer!r}")
        return Shuffle(int(buffer))

    def select(self, selection: Selection) -> Selection:
        return selection.shuffle(self.ends, self.buffer or 1)

    def signature(self) -> str:
        if self.ends is None:
            return self.call
        return f"shuffle({len(self.ends):,} blocks, {zlib.crc32(self.ends.tobytes()):08x})"

    def note(self, chain: ChainView, pool_size: PoolSize) -> str:
        """Say what blocks cost in randomness."""
        if self.ends is None:
            return ""
        blocks, batch = len(self.ends), chain.batch_size
        each = len(chain.selection.candidates(int(self.ends[-1]))) / blocks
        from_blocks = WINDOW * (1 - (1 - 1 / WINDOW) ** batch) + max(0.0, batch / each - 1)
        text = f"a batch draws from about {min(batch, blocks, round(from_blocks)):,} of them"
        if not chain.is_batched:
            text = f"{WINDOW} of them at a time"
        return f"  of {each:,.0f} examples; {text}"

    def _ends(self, source: IndexedSource) -> NDArray[np.int64] | None:
        """Return the ends of the blocks in which a source is shuffled, None for none."""
        block: Any = self.block
        if block is None or isinstance(block, bool):
            own = source.blocks
            if block and own is None:
                raise CombinationError(
                    f"{source.name} has no blocks of its own: give a number of neighbours, such as "
                    "block=1000"
                )
            if own is None or not (source.prefers_blocks if block is None else block):
                return None
            ends = not_too_large(own)
        elif not is_whole_number(block):
            raise TypeError(f"block= is a number of neighbours, True or False, not {block!r}")
        elif block < 1:
            raise ValueError(f"a block has at least one example, not {block}")
        else:
            ends = not_too_large(runs(len(source), min(int(block), len(source) or 1)))
        return ends if len(ends) > WINDOW else None
