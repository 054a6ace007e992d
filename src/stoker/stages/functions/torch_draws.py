"""torch's random numbers from a generator of one's own, in one thread, whoever asks for them.

A module draws from torch's global generator, which all threads share. Here each random operation
of the calling thread is given a generator instead, below the module (``TorchDispatchMode``), so
that nothing global moves and no other thread has a part in it. Imports torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, random operations of this thread draw from generators of its own.

    They are seeded from ``rng`` where something is first drawn, one for each kind of device.
    What takes no generator (recurrent layers) draws from the global one as ever.

    Args:
        rng: a ``numpy.random.Generator``, or a ``torch.Generator`` that was seeded.
    """

    def __init__(self, rng: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = rng
        is_torch = isinstance(rng, torch.Generator)
        self._seed: int | None = rng.initial_seed() if is_torch else None
        self._generators: dict[str, torch.Generator] = {rng.device.type: rng} if is_torch else {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keyed = _with_generator(func)
        if keyed is not None and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(_device(args, kwargs))}
            func = keyed
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device.type)
        if found is None:
            if self._seed is None:
                self._seed = int(self._rng.integers(1 << 63))
            found = self._generators[device.type] = torch.Generator(device)
            found.manual_seed(self._seed)
        return found


@functools.cache
def _with_generator(op: Any) -> Any:
    """Return the overload of a random operation that takes a generator, None where there is none.

    None as well for what is not random.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    wanted = _names(op) - {"generator"}
    overloads = [op, *(getattr(op.overloadpacket, n) for n in op.overloadpacket.overloads())]
    return next((each for each in overloads if _names(each) == wanted | {"generator"}), None)


def _names(op: Any) -> set[str]:
    return {argument.name for argument in op._schema.arguments}


def _device(args: Any, kwargs: Any) -> torch.device:
    tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if tensor is not None:
        return tensor.device
    return torch.device(kwargs.get("device") or "cpu")
