"""Blood cells (BCCD): boxes of three kinds of cells are found by a small anchor-free network."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from experiments.suite.average_precision import average_precision, suppressed
from experiments.suite.data import Files, find
from experiments.suite.workload import Batch, Part, Recipe, Score, Transform, Workload
from experiments.suite.workloads.classification import normalisation

_ORIGIN = "a tar archive of https://github.com/Shenggan/BCCD_Dataset"
_CLASSES = ("RBC", "WBC", "Platelets")
_HEIGHT, _WIDTH = 96, 128
_STRIDE = 8
_ROWS, _COLUMNS = _HEIGHT // _STRIDE, _WIDTH // _STRIDE
_BOX_WEIGHT = 0.5
_FOCUS = 2.0
_MOST_BOXES = 50


class _Raw(NamedTuple):
    image: NDArray[np.uint8]
    """uint8 [96, 128, 3]."""
    boxes: NDArray[np.float32]
    """float32 [n, 4]: left, top, right, bottom, as shares of width and height."""
    kinds: NDArray[np.int64]
    """int64 [n]: the classes."""


class Detection(Workload):
    """The cell of a grid where a box's centre lies tells its class and its sides."""

    name = "detection"
    title = "blood cells, flips and brightness; an anchor-free detector, BatchNorm, AdamW"
    metric = "mAP at 0.5"
    has_batch_norm = True
    transforms = ("random_flip",)
    recipe = Recipe(
        batch_size=8,
        budget_fresh=2_400,
        learning_rates=(0.0025, 0.006, 0.015),
        evaluations=20,
    )

    def load(self, folder: Path | None) -> None:
        """Read and shrink the images, in the parts that the data set comes in."""
        parts = _made_up() if folder is None else _read(folder)
        self.train = parts["train"]
        self._held_out = {part: parts[part] for part in ("validation", "test")}
        self._targets = {
            part: [
                torch.from_numpy(np.stack(each)) for each in zip(*map(_encoded, raw), strict=True)
            ]
            for part, raw in self._held_out.items()
        }

    def augment(self, example: Any, rng: np.random.Generator) -> Any:
        """Mirror along either axis, change brightness; then lay boxes on the grid."""
        image, boxes, kinds = example
        if self.variant.augmentation:
            for axis in range(2):
                if rng.random() < 0.5:
                    image = np.flip(image, axis)
                    boxes = boxes.copy()
                    boxes[:, [1 - axis, 3 - axis]] = 1 - boxes[:, [3 - axis, 1 - axis]]
            levels = np.clip(np.arange(256) * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
            image = levels[image]
        return _encoded(_Raw(image, boxes, kinds))

    def transform(self, name: str) -> Transform:
        """Return what mirrors images and grids: stoker's own leaves boxes as they are."""
        return _flipped

    def network(self) -> Any:
        """Return four convolutions and one that tells classes and sides of boxes."""
        norm = self.variant.batch_norm
        layers: list[Any] = []
        for before, after, stride in ((3, 8, 2), (8, 16, 2), (16, 32, 2), (32, 32, 1)):
            layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1)]
            layers += [normalisation(after, is_batch=norm), nn.ReLU()]
        head = nn.Conv2d(32, len(_CLASSES) + 4, 3, padding=1)
        # Few cells have a box: so it begins by saying that none has.
        bias: Any = head.bias
        nn.init.constant_(bias, -2.0)
        return nn.Sequential(*layers, head)

    def optimizer(self, network: Any, learning_rate: float) -> Any:
        """Return AdamW, or the same without momentum."""
        betas = (0.9 if self.variant.momentum else 0.0, 0.99)
        return torch.optim.AdamW(network.parameters(), lr=learning_rate, betas=betas, fused=True)

    def loss(self, network: Any, batch: Batch) -> Any:
        """Return the focal loss of classes and the distance of sides, by box."""
        images, kinds, boxes = map(torch.as_tensor, batch)
        said = network(_input_of(images)).permute(0, 2, 3, 1)
        return _loss_of(said, kinds, boxes)

    def score(self, network: Any, part: Part) -> Score:
        """Return the loss, and mean average precision at an overlap of a half."""
        images, kinds, boxes = self._targets[part]
        said = network(_input_of(images)).permute(0, 2, 3, 1)
        loss = float(_loss_of(said, kinds, boxes))
        found = [_boxes_of(each) for each in said.numpy()]
        truth = [(raw.boxes, raw.kinds) for raw in self._held_out[part]]
        precisions = [
            average_precision(
                [(boxes[kind], scores[kind]) for boxes, scores in found],
                [boxes[kinds == kind] for boxes, kinds in truth],
            )
            for kind in range(len(_CLASSES))
        ]
        return Score(loss, float(np.mean(precisions)))


def _flipped(batch: Batch, rng: np.random.Generator) -> Batch:
    """Mirror every other image from left to right, with its grid."""
    images, kinds, sides = batch
    chosen = torch.from_numpy(rng.random(len(images)) < 0.5).view(-1, 1, 1, 1)
    mirrored = images.flip(2), kinds.flip(2), sides[..., [2, 1, 0, 3]].flip(2)
    return [torch.where(chosen, *each) for each in zip(mirrored, batch, strict=True)]


def _input_of(images: Any) -> Any:
    """Scale uint8 [n, height, width, 3] to float32 [n, 3, height, width] around 0."""
    return images.permute(0, 3, 1, 2).float().div_(255).sub_(0.7).div_(0.2)


def _encoded(raw: _Raw) -> tuple[Any, Any, Any]:
    """Lay boxes on the grid.

    Returns the image; uint8 [rows, columns, 1], the class and one, 0 where there is no centre; and
    float32 [rows, columns, 4], distances from the cell's middle to the four sides, in cells.
    """
    kinds = np.zeros((_ROWS, _COLUMNS, 1), np.uint8)
    sides = np.zeros((_ROWS, _COLUMNS, 4), np.float32)
    scale = np.asarray([_COLUMNS, _ROWS] * 2, np.float32)
    for box, kind in zip(raw.boxes * scale, raw.kinds, strict=True):
        column = min(int((box[0] + box[2]) / 2), _COLUMNS - 1)
        row = min(int((box[1] + box[3]) / 2), _ROWS - 1)
        kinds[row, column] = kind + 1
        middle = np.asarray([column + 0.5, row + 0.5])
        sides[row, column] = [*(middle - box[:2]), *(box[2:] - middle)]
    return np.ascontiguousarray(raw.image), kinds, sides


def _loss_of(said: Any, kinds: Any, sides: Any) -> Any:
    """Return the loss of what was said, float32 [n, rows, columns, classes + 4]."""
    logits, told = said[..., : len(_CLASSES)], said[..., len(_CLASSES) :]
    wanted = nn.functional.one_hot(kinds[..., 0].long(), len(_CLASSES) + 1)[..., 1:].float()
    there = kinds[..., 0] > 0
    count = there.sum().clamp(min=1)
    raw = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    missed = torch.where(wanted > 0, 1 - logits.sigmoid(), logits.sigmoid())
    distance = (nn.functional.softplus(told[there]) - sides[there]).abs().sum()
    return ((missed**_FOCUS * raw).sum() + _BOX_WEIGHT * distance) / count


def _boxes_of(said: NDArray[np.float32]) -> tuple[list[Any], list[Any]]:
    """Return boxes and scores by class from what was said of an image; the best first."""
    logits, told = said[..., : len(_CLASSES)], said[..., len(_CLASSES) :]
    scores = 1 / (1 + np.exp(-logits))
    sides = np.logaddexp(0, told)
    rows, columns = np.mgrid[:_ROWS, :_COLUMNS] + 0.5
    boxes = np.stack(
        [
            columns - sides[..., 0],
            rows - sides[..., 1],
            columns + sides[..., 2],
            rows + sides[..., 3],
        ],
        axis=-1,
    ) / np.asarray([_COLUMNS, _ROWS] * 2)
    found: tuple[list[Any], list[Any]] = ([], [])
    for kind in range(len(_CLASSES)):
        told_scores = scores[..., kind].ravel()
        best = np.argsort(-told_scores, kind="stable")[:_MOST_BOXES]
        kept = best[suppressed(boxes.reshape(-1, 4)[best], told_scores[best])]
        found[0].append(boxes.reshape(-1, 4)[kept])
        found[1].append(told_scores[kept])
    return found


def _read(folder: Path) -> dict[str, list[_Raw]]:
    """Return the parts of the data set; boxes without an area are left out."""
    files = Files(find(folder, "bccd.tar", _ORIGIN))
    at = {name.rpartition("/")[2]: i for i, name in enumerate(files.names)}
    lists = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}
    return {
        part: [
            _parsed(files[at[f"{name}.jpg"]], files[at[f"{name}.xml"]])
            for name in files[at[listed]].decode().split()
        ]
        for part, listed in lists.items()
    }


def _parsed(jpeg: bytes, annotation: bytes) -> _Raw:
    with Image.open(io.BytesIO(jpeg)) as image:
        image.draft("RGB", (2 * _WIDTH, 2 * _HEIGHT))
        width, height = 640, 480
        pixels = np.array(image.convert("RGB").resize((_WIDTH, _HEIGHT)))
    boxes, kinds = [], []
    for item in ElementTree.fromstring(annotation).iter("object"):
        left, top, right, bottom = (
            float(item.findtext(f"bndbox/{side}", "nan"))
            for side in ("xmin", "ymin", "xmax", "ymax")
        )
        if right > left and bottom > top:
            boxes.append([left / width, top / height, right / width, bottom / height])
            kinds.append(_CLASSES.index(item.findtext("name", "")))
    return _Raw(pixels, np.asarray(boxes, np.float32).reshape(-1, 4), np.asarray(kinds, np.int64))


def _made_up() -> dict[str, list[_Raw]]:
    """Return dark discs, whose size is their kind, on a bright ground."""
    rng = np.random.default_rng(0)
    parts: dict[str, list[_Raw]] = {"train": [], "validation": [], "test": []}
    y, x = np.mgrid[:_HEIGHT, :_WIDTH]
    for part, count in (("train", 160), ("validation", 12), ("test", 12)):
        for _ in range(count):
            image = rng.integers(190, 230, (_HEIGHT, _WIDTH, 3), dtype=np.uint8)
            boxes, kinds = [], []
            for kind, radius in enumerate((9, 14, 5)):
                row = rng.integers(radius, _HEIGHT - radius)
                column = rng.integers(radius, _WIDTH - radius)
                image[(y - row) ** 2 + (x - column) ** 2 < radius**2] -= 60 * (kind + 1)
                boxes.append([column - radius, row - radius, column + radius, row + radius])
                kinds.append(kind)
            shares: NDArray[np.float32] = np.asarray(boxes, np.float32)
            shares /= np.asarray([_WIDTH, _HEIGHT] * 2, np.float32)
            parts[part].append(_Raw(image, shares, np.asarray(kinds, np.int64)))
    return parts


WORKLOAD = Detection
