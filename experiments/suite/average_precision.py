"""How well boxes were found: overlaps, the suppression of repeats, average precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Boxes = NDArray[Any]
"""[n, 4]: left, top, right, bottom."""

_OVERLAP = 0.5


def overlaps(some: Boxes, others: Boxes) -> NDArray[Any]:
    """Return the overlap of each with each, [some, others]: common area over that of both."""
    top_left = np.maximum(some[:, None, :2], others[None, :, :2])
    bottom_right = np.minimum(some[:, None, 2:], others[None, :, 2:])
    common = np.prod(np.clip(bottom_right - top_left, 0, None), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (some, others)]
    shared: NDArray[Any] = common / np.maximum(areas[0][:, None] + areas[1][None] - common, 1e-12)
    return shared


def suppressed(boxes: Boxes, scores: NDArray[Any]) -> list[int]:
    """Return which boxes stay, the best first, where of those that overlap by half one does."""
    left = np.argsort(-scores, kind="stable").tolist()
    shared = overlaps(boxes, boxes)
    kept: list[int] = []
    while left:
        best = left.pop(0)
        kept.append(best)
        left = [other for other in left if shared[best, other] <= _OVERLAP]
    return kept


def average_precision(found: Sequence[tuple[Boxes, NDArray[Any]]], truth: Sequence[Boxes]) -> float:
    """Return the area under precision over recall, of boxes of one class.

    Args:
        found: boxes and their scores, image by image.
        truth: the true boxes, image by image. Each is found once, by the box with the best score
            that overlaps it by at least half; a second one is wrong.
    """
    hits: list[tuple[float, bool]] = []
    for (boxes, scores), wanted in zip(found, truth, strict=True):
        shared = overlaps(boxes, wanted)
        taken: set[int] = set()
        for i in np.argsort(-scores, kind="stable").tolist():
            best = int(shared[i].argmax()) if len(wanted) else -1
            is_hit = best >= 0 and shared[i, best] >= _OVERLAP and best not in taken
            taken |= {best} if is_hit else set()
            hits.append((float(scores[i]), is_hit))
    count = sum(map(len, truth))
    if not hits or not count:
        return 0.0
    right = np.cumsum([is_hit for _, is_hit in sorted(hits, key=lambda hit: -hit[0])])
    precision = right / np.arange(1, len(right) + 1)
    # What precision is at a recall is the best at that recall or a larger one.
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    recall = np.concatenate([[0.0], right / count])
    return float(np.sum(np.diff(recall) * precision))
