"""How the scene is drawn: the factor over time, in characters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.text import Text

from experiments.scene import SceneRow

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HIGHEST = 4
_MARGIN = 9
_WIDEST = 90
_REDRAW_EVERY_S = 0.2


def plot(rows: Sequence[SceneRow], seconds: float, width: int) -> list[str]:
    """Draw the factor over `seconds`: a line of text for each unit of it, R below.

    Args:
        width: columns, at most.
    """
    columns = max(10, min(_WIDEST, width - _MARGIN))
    factors: list[float] = []
    marks = " " * columns
    before: SceneRow | None = None
    for row in rows:
        at = min(columns - 1, int(row.seconds / seconds * columns))
        factors += [before.factor if before else 0.0] * (at - len(factors)) + [row.factor]
        factors = factors[: at + 1]
        if before is None or before.ratio != row.ratio:
            label = f"{row.ratio:.1f}"
            marks = (marks[:at] + label + marks[at + len(label) :])[:columns]
        before = row
    lines = [
        f"{f'factor {unit}' if unit == _HIGHEST else unit:>8} "
        + "".join(_BLOCKS[round(8 * min(1.0, max(0.0, f - unit + 1)))] for f in factors)
        for unit in range(_HIGHEST, 0, -1)
    ]
    return [*lines, f"{'R':>8} {marks}"]


class SceneView:
    """The scene, as far as it is."""

    def __init__(self, live: Live | None, width: int, seconds: float) -> None:
        """Draw on `live`, `width` columns wide, a scene of so many seconds; on None nothing."""
        self._live = live
        self._width = width
        self._seconds = seconds
        self._rows: list[SceneRow] = []
        self._drawn_s = time.monotonic()

    def moved(self, row: SceneRow) -> None:
        """Take another moment of the scene, and draw it if it is time to."""
        self._rows.append(row)
        if self._live is not None and time.monotonic() - self._drawn_s >= _REDRAW_EVERY_S:
            self._drawn_s = time.monotonic()
            self.refresh()

    def refresh(self) -> None:
        """Draw."""
        if self._live is not None:
            self._live.update(self.drawn(), refresh=True)

    def drawn(self) -> Group:
        """Return what there is to see."""
        lines = "\n".join(plot(self._rows, self._seconds, self._width))
        if not self._rows:
            return Group(Text(lines))
        last = self._rows[-1]
        now = (
            f"{last.seconds:4.1f} s: {last.latency_s * 1e3:.1f} ms a read, R = {last.ratio:.1f}; "
            f"factor {last.factor:.1f}, {last.waited_fraction:.0%} waited"
        )
        return Group(Text(lines), Text(now, "dim"))
