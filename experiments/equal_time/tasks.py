"""The tasks: data, augmentation, network and loss of each, for stacks of networks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from experiments.equal_time.stacks import (
    Adam,
    Momentum,
    Normal,
    Shape,
    Shapes,
    convolved,
    linear,
    named,
)

Part = Literal["train", "validation", "test"]


class Losses(NamedTuple):
    """Of each network and example, [M, B]."""

    loss: Any
    right: Any
    """What the metric is the mean of."""


class Task(ABC):
    """One training task, its data on the device.

    Args:
        folder: of the packed data (`data.pack`).
        examples: how many of the training examples there are to be; None: all.
        augments: whether uses are augmented.
    """

    name: ClassVar[str]
    rates: ClassVar[tuple[float, ...]]
    metric: ClassVar[str] = "accuracy"
    batch_size: ClassVar[int] = 32
    tested_at_once: ClassVar[int] = 250
    shapes: Shapes

    def __init__(self, folder: Path, device: str, examples: int | None, augments: bool) -> None:
        self.device = device
        self.augments = augments
        self._parts: dict[str, dict[str, Any]] = {}
        for part in ("train", "validation", "test"):
            limit = examples if part == "train" else None
            self._parts[part] = {
                key: torch.from_numpy(values[:limit]).to(device)
                for key, values in self.arrays(folder, part).items()
            }

    def arrays(self, folder: Path, part: str) -> dict[str, Any]:
        """Return the arrays of a part by name: by default those that were packed."""
        return {
            path.stem.split("-")[2]: np.load(path)
            for path in sorted(folder.glob(f"{self.name}-{part}-*.npy"))
        }

    @property
    def examples(self) -> int:
        """How many examples there are for training."""
        return len(next(iter(self._parts["train"].values())))

    @abstractmethod
    def batch(self, part: Part, items: Any, dice: Any) -> Any:
        """Return a batch (input, target) of examples int64 [..., B], augmented by `dice` if any."""

    @abstractmethod
    def losses(self, weights: Any, batch: Any, normals: Any, is_training: bool) -> Losses:
        """Return the losses of networks of weights [M, D] on batches [M, B, ...]."""

    def normals(self, stack: int) -> Any:
        """Return the layers with running statistics of so many networks."""
        return []

    def optimizer(self, weights: Any) -> Any:
        """Return an optimizer."""
        return Momentum(weights, decay=5e-4)

    def score(self, weights: Any, normals: Any, part: Part) -> tuple[list[float], list[float]]:
        """Return loss and metric over a whole part, by network."""
        held = len(next(iter(self._parts[part].values())))
        stack = len(weights)
        loss = torch.zeros(stack, device=self.device)
        right = torch.zeros(stack, device=self.device)
        with torch.no_grad():
            for start in range(0, held, self.tested_at_once):
                items = torch.arange(start, min(held, start + self.tested_at_once))
                batch = self.batch(part, items.to(self.device), None)
                spread = tuple(x.unsqueeze(0).expand(stack, *x.shape) for x in batch)
                found = self.losses(weights, spread, normals, False)
                loss += found.loss.sum(1)
                right += found.right.sum(1)
        return (loss / held).tolist(), (right / held).tolist()


def _classified(said: Any, truth: Any) -> Losses:
    """Cross entropy of logits [M, B, classes]."""
    loss = functional.cross_entropy(said.flatten(0, 1), truth.flatten(), reduction="none")
    return Losses(loss.view(truth.shape), (said.detach().argmax(-1) == truth).float())


class _Layer(NamedTuple):
    channels: int
    kernel: int
    stride: int
    padding: int


class Images(Task):
    """Convolutions with BatchNorm and a linear layer; crops of padded images, and flips."""

    layers: ClassVar[tuple[_Layer, ...]]
    pooled: ClassVar[int] = 1
    out: ClassVar[int] = 10
    reach_px: ClassVar[int]
    mean: ClassVar[float]
    deviation: ClassVar[float]
    side: ClassVar[int]
    colours: ClassVar[int]

    def __init__(self, folder: Path, device: str, examples: int | None, augments: bool) -> None:
        super().__init__(folder, device, examples, augments)
        reach, shapes, channels, side = self.reach_px, {}, self.colours, self.side
        for part in self._parts.values():
            part["x"] = functional.pad(part["x"], (reach,) * 4)
        for n, layer in enumerate(self.layers):
            shapes[f"convolution {n}"] = Shape.linear(layer.channels, channels * layer.kernel**2)
            shapes[f"norm weight {n}"] = Shape((layer.channels,), around=1.0)
            shapes[f"norm bias {n}"] = Shape((layer.channels,))
            channels = layer.channels
            side = (side + 2 * layer.padding - layer.kernel) // layer.stride + 1
        features = channels * (side // self.pooled) ** 2
        shapes["head"] = Shape.linear(self.out, features)
        shapes["head bias"] = Shape((self.out,), shapes["head"].bound)
        self.shapes = shapes

    def batch(self, part: Part, items: Any, dice: Any) -> Any:
        """Return images float32 [..., C, B, side, side] and classes int64 [..., B]."""
        return self.images(part, items, dice), self._parts[part]["y"][items]

    def images(self, part: Part, items: Any, dice: Any) -> Any:
        """Return images, each cut from its padded image and mirrored as the dice say."""
        reach, along = self.reach_px, torch.arange(self.side, device=self.device)
        down = across = torch.full_like(items, reach)
        columns = along.expand(*items.shape, -1)
        if dice is not None and self.augments:
            ways = 2 * reach + 1
            down, dice = dice % ways, dice // ways
            across, dice = dice % ways, dice // ways
            columns = torch.where((dice % 2).bool()[..., None], self.side - 1 - along, along)
        rows = (down[..., None] + along)[..., :, None]
        columns = (across[..., None] + columns)[..., None, :]
        stored = self._parts[part]["x"]
        found = [
            stored[:, colour][items[..., None, None], rows, columns]
            for colour in range(self.colours)
        ]
        return torch.stack(found, -4).float().div_(255).sub_(self.mean).div_(self.deviation)

    def normals(self, stack: int) -> Any:
        """Return the layers with running statistics of so many networks."""
        return [Normal(stack, layer.channels, self.device) for layer in self.layers]

    def said(self, weights: Any, x: Any, normals: Any, is_training: bool) -> Any:
        """Return what networks say of images [M, C, B, side, side]: [M, B, out]."""
        of = named(self.shapes, weights)
        return linear(self.features(of, x, normals, is_training), of["head"], of["head bias"])

    def features(self, of: dict[str, Any], x: Any, normals: Any, is_training: bool) -> Any:
        """Return what the linear layer is given, [M, B, features]."""
        for n, (layer, normal) in enumerate(zip(self.layers, normals, strict=True)):
            x = convolved(x, of[f"convolution {n}"], layer.kernel, layer.stride, layer.padding)
            x = normal(x, of[f"norm weight {n}"], of[f"norm bias {n}"], is_training).relu()
        if self.pooled > 1:
            small = functional.avg_pool2d(x.flatten(0, 1), self.pooled)
            x = small.view(*x.shape[:2], *small.shape[1:])
        return x.transpose(1, 2).flatten(2)

    def losses(self, weights: Any, batch: Any, normals: Any, is_training: bool) -> Losses:
        """Return cross entropies."""
        x, truth = batch
        return _classified(self.said(weights, x, normals, is_training), truth)


class Fashion(Images):
    """Fashion-MNIST: two convolutions."""

    name = "fashion"
    rates = (0.0125, 0.025, 0.05, 0.1, 0.2)
    layers = (_Layer(16, 5, 2, 2), _Layer(32, 3, 2, 1))
    reach_px, mean, deviation, side, colours = 2, 0.286, 0.353, 28, 1


class Cifar(Images):
    """CIFAR-10: three convolutions."""

    name = "cifar"
    rates: ClassVar[tuple[float, ...]] = (0.025, 0.05, 0.1, 0.2)
    layers = (_Layer(16, 3, 2, 1), _Layer(32, 3, 2, 1), _Layer(64, 3, 1, 1))
    pooled = 2
    reach_px, mean, deviation, side, colours = 4, 0.473, 0.252, 32, 3


class Views(Cifar):
    """Two views of each image, cropped, mirrored, lighter or darker, are to find each other.

    The loss is that of SimCLR (Chen et al. 2020, section 2), NT-Xent, at a temperature of 0.2. Held
    out images are seen in views as well, the same ones for all.
    """

    name = "views"
    rates = (0.05, 0.1, 0.2)
    metric = "pairs found"
    batch_size = 64
    out = 32
    tested_at_once = 64

    def arrays(self, folder: Path, part: str) -> dict[str, Any]:
        """Return the images of CIFAR-10, fewer for tests, in whole batches."""
        limit = None if part == "train" else 2_048
        found = {
            path.stem.split("-")[2]: np.load(path)[:limit]
            for path in sorted(folder.glob(f"cifar-{part}-*.npy"))
        }
        whole = len(found["x"]) // self.tested_at_once * self.tested_at_once
        return found if part == "train" else {key: x[:whole] for key, x in found.items()}

    def batch(self, part: Part, items: Any, dice: Any) -> Any:
        """Return two views of each image, all first ones before all second ones, and nothing."""
        if dice is None:
            dice = items * 40_503 % (1 << 30)
        both = []
        for _ in range(2):
            dice = (dice * 1_103_515_245 + 12_345) % (1 << 31)
            x = self.images(part, items, dice // 2)
            tint = (dice // 1_024 % 256).float() / 255
            stretch = (dice // 262_144 % 256).float() / 255
            shape = (*items.shape[:-1], 1, items.shape[-1], 1, 1)
            x = x * (0.5 + stretch).view(shape) + (2 * tint - 1).view(shape)
            both.append(x)
        return torch.cat(both, -3), items

    def losses(self, weights: Any, batch: Any, normals: Any, is_training: bool) -> Losses:
        """Return the loss of each image, the mean of its views'."""
        x, items = batch
        places = functional.normalize(self.said(weights, x, normals, is_training), dim=-1)
        alike = torch.bmm(places, places.transpose(1, 2)) / 0.2
        count = items.shape[-1]
        itself = torch.eye(2 * count, dtype=torch.bool, device=self.device)
        alike = alike.masked_fill(itself, -1e9)
        truth = (torch.arange(2 * count, device=self.device) + count) % (2 * count)
        found = _classified(alike, truth.expand(len(x), -1))
        return Losses(*(each.unflatten(1, (2, count)).mean(1) for each in found))


class Table(Task):
    """Numbers in columns: two hidden layers, no augmentation at all."""

    columns: ClassVar[int]
    out: ClassVar[int]
    hidden: ClassVar[int] = 64

    def __init__(self, folder: Path, device: str, examples: int | None, augments: bool) -> None:
        super().__init__(folder, device, examples, False)
        sizes = (self.columns, self.hidden, self.hidden, self.out)
        self._depth = len(sizes) - 1
        shapes = {}
        for n in range(self._depth):
            shapes[f"weight {n}"] = Shape.linear(sizes[n + 1], sizes[n])
            shapes[f"bias {n}"] = Shape((sizes[n + 1],), shapes[f"weight {n}"].bound)
        self.shapes = shapes

    def batch(self, part: Part, items: Any, dice: Any) -> Any:
        """Return rows float32 [..., B, columns] and what is to be told of each."""
        return self._parts[part]["x"][items], self._parts[part]["y"][items]

    def losses(self, weights: Any, batch: Any, normals: Any, is_training: bool) -> Losses:
        """Return cross entropies, or squared errors where there is one output."""
        x, truth = batch
        of = named(self.shapes, weights)
        for n in range(self._depth):
            x = linear(x.relu() if n else x, of[f"weight {n}"], of[f"bias {n}"])
        if self.out > 1:
            return _classified(x, truth)
        error = (x.squeeze(-1) - truth) ** 2
        return Losses(error, -error.detach())


class Digits(Table):
    """Hand-written digits of 8 x 8 numbers (UCI), told by their numbers."""

    name = "digits"
    rates = (0.00625, 0.0125, 0.025, 0.05, 0.1)
    columns, out = 64, 10


class Friedman(Table):
    """Made up: Friedman's first function (1991) of ten numbers, five in vain, with noise."""

    name = "friedman"
    metric = "minus squared error"
    rates = (0.00125, 0.0025, 0.005, 0.01, 0.02)
    columns, out = 10, 1


class Features(Table):
    """A head on frozen features: classes 5 to 9 of CIFAR-10, features learned on classes 0 to 4."""

    name = "features"
    rates = (0.00125, 0.0025, 0.005, 0.01, 0.02)
    columns, out, hidden = 1_024, 5, 128


class Words(Task):
    """Words of wikitext-2: one layer of a transformer, AdamW."""

    name = "words"
    metric = "share of next words guessed"
    rates = (0.00125, 0.0025, 0.005, 0.01, 0.02)
    batch_size = 16
    tested_at_once = 32
    window, vocabulary, width, heads = 32, 1_024, 64, 4

    def __init__(self, folder: Path, device: str, examples: int | None, augments: bool) -> None:
        super().__init__(folder, device, examples, augments)
        w, root = self.width, self.width**-0.5
        one = 3**0.5 * root  # a uniform one of this deviation
        self.shapes = {
            "symbols": Shape((self.vocabulary, w), one),
            "places": Shape((self.window, w), one),
            "before": Shape((w,), around=1.0),
            "before bias": Shape((w,)),
            "asked": Shape((3 * w, w), root),
            "asked bias": Shape((3 * w,), root),
            "answer": Shape((w, w), root),
            "answer bias": Shape((w,), root),
            "between": Shape((w,), around=1.0),
            "between bias": Shape((w,)),
            "wide": Shape((4 * w, w), root),
            "wide bias": Shape((4 * w,), root),
            "narrow": Shape((w, 4 * w), root / 2),
            "narrow bias": Shape((w,), root / 2),
            "after": Shape((w,), around=1.0),
            "after bias": Shape((w,)),
        }

    def optimizer(self, weights: Any) -> Any:
        """Return AdamW."""
        return Adam(weights, decay=0.01)

    def batch(self, part: Part, items: Any, dice: Any) -> Any:
        """Return windows of pieces twice as long, int64 [..., B, window], and the next words."""
        starts = dice % self.window if dice is not None and self.augments else items * 0
        places = starts[..., None] + torch.arange(self.window + 1, device=self.device)
        words = self._parts[part]["x"][items[..., None], places].long()
        return words[..., :-1], words[..., 1:]

    def losses(self, weights: Any, batch: Any, normals: Any, is_training: bool) -> Losses:
        """Return cross entropies, means over windows."""
        words, truth = batch
        of = named(self.shapes, weights)
        m, b, t = words.shape
        w, heads = self.width, self.heads
        which = torch.arange(m, device=self.device)[:, None, None]
        x = (of["symbols"][which, words] + of["places"][:, None]).flatten(1, 2)

        def normed(x: Any, name: str) -> Any:
            scaled = functional.layer_norm(x, (w,)) * of[name][:, None]
            return scaled + of[f"{name} bias"][:, None]

        asked = linear(normed(x, "before"), of["asked"], of["asked bias"])
        query, key, value = asked.view(m * b, t, 3, heads, w // heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = seen.transpose(1, 2).reshape(m, b * t, w)
        x = x + linear(seen, of["answer"], of["answer bias"])
        thought = functional.gelu(linear(normed(x, "between"), of["wide"], of["wide bias"]))
        x = x + linear(thought, of["narrow"], of["narrow bias"])
        said = torch.bmm(normed(x, "after"), of["symbols"].transpose(1, 2))
        found = _classified(said, truth.reshape(m, b * t))
        return Losses(*(each.unflatten(1, (b, t)).mean(2) for each in found))


TASKS: Sequence[type[Task]] = (Fashion, Cifar, Views, Digits, Friedman, Features, Words)


def task_of(name: str) -> type[Task]:
    """Return a task's class. Raises LookupError if there is none."""
    for task in TASKS:
        if task.name == name:
            return task
    raise LookupError(f"there is no task {name}")
