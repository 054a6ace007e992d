"""Stacks of networks: M of one shape, with weights of their own, trained side by side.

All weights of a stack are one tensor [M, D]. Activations have the stack first and the batch behind
the channels, [M, C, B, height, width], so that a convolution is one product for each network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

_BATCH_NORM_MOMENTUM = 0.1


class Shape(NamedTuple):
    """A parameter's, and the bound of the uniform values that it begins with."""

    size: tuple[int, ...]
    bound: float = 0.0
    around: float = 0.0

    @classmethod
    def linear(cls, *size: int) -> Shape:
        """Return weights [out, ...], as torch's layers begin: within 1 over the root of what goes
        in."""
        return cls(size, 1 / math.sqrt(math.prod(size[1:])))


Shapes = Mapping[str, Shape]


def begin(shapes: Shapes, seeds: Sequence[int], copies: int, device: str) -> Any:
    """Return weights float32 [seeds * copies, D]: the same for the copies of a seed."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        parts = [
            torch.rand(math.prod(shape.size), generator=generator) * 2 * shape.bound
            - shape.bound
            + shape.around
            for shape in shapes.values()
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows).repeat_interleave(copies, dim=0).to(device)


def named(shapes: Shapes, weights: Any) -> dict[str, Any]:
    """Return views of weights [M, D] by name, each [M, *size]."""
    sizes = [math.prod(shape.size) for shape in shapes.values()]
    parts = torch.split(weights, sizes, dim=1)
    return {
        name: part.view(-1, *shape.size)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def convolved(x: Any, weight: Any, kernel: int, stride: int, padding: int) -> Any:
    """Convolve [M, C, B, h, w] with weights [M, out, C * kernel**2] of each network."""
    m, c, b, h, w = x.shape
    high, wide = ((n + 2 * padding - kernel) // stride + 1 for n in (h, w))
    # The stack, the channels and the batch as one image's channels: one call, not one an image.
    flat = x.reshape(1, m * c * b, h, w)
    columns = functional.unfold(flat, kernel, padding=padding, stride=stride)
    columns = columns.view(m, c, b, kernel * kernel, high * wide).transpose(2, 3)
    columns = columns.reshape(m, c * kernel * kernel, b * high * wide)
    return torch.bmm(weight, columns).view(m, -1, b, high, wide)


class Normal:
    """Batch normalisation of a stack, with running statistics for tests."""

    def __init__(self, stack: int, channels: int, device: str) -> None:
        self.running = torch.zeros(2, stack, channels, device=device)
        """Means and variances, [2, M, C]."""
        self.running[1] = 1.0
        self._mean, self._variance = self.running.view(2, -1)

    def __call__(self, x: Any, weight: Any, bias: Any, is_training: bool) -> Any:
        """Normalise [M, C, B, h, w] over the batch and the image, by network and channel."""
        m, c = x.shape[:2]
        flat = functional.batch_norm(
            x.reshape(1, m * c, -1),
            self._mean,
            self._variance,
            weight.reshape(-1),
            bias.reshape(-1),
            is_training,
            _BATCH_NORM_MOMENTUM,
        )
        return flat.view(x.shape)


def linear(x: Any, weight: Any, bias: Any) -> Any:
    """Map [M, n, in] by weights [M, out, in] and biases [M, out]."""
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class Momentum:
    """SGD with Nesterov momentum, as torch's, with a rate for each network."""

    def __init__(self, weights: Any, decay: float, momentum: float = 0.9) -> None:
        self._decay, self._momentum = decay, momentum
        self._buffer = torch.zeros_like(weights)

    def step(self, weights: Any, gradient: Any, rates: Any) -> None:
        """Change weights [M, D] in place; rates [M, 1]."""
        gradient = gradient.add(weights, alpha=self._decay)
        self._buffer.mul_(self._momentum).add_(gradient)
        weights.sub_(rates * gradient.add_(self._buffer, alpha=self._momentum))


class Adam:
    """AdamW, as torch's, with a rate for each network."""

    def __init__(self, weights: Any, decay: float) -> None:
        self._decay, self._betas = decay, (0.9, 0.98)
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._steps = 0

    def step(self, weights: Any, gradient: Any, rates: Any) -> None:
        """Change weights [M, D] in place; rates [M, 1]."""
        self._steps += 1
        first, second = self._betas
        self._first.lerp_(gradient, 1 - first)
        self._second.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (self._second / (1 - second**self._steps)).sqrt_().add_(1e-8)
        weights.mul_(1 - rates * self._decay)
        weights.sub_(rates * self._first.div(1 - first**self._steps).div_(root))
