"""Random generators of Python, NumPy and torch: seeded, looked at, and put back as they were.

``generator_of`` wraps one that somebody holds, ``global_generators`` returns those of the modules.
No module is imported for it: a program without the import holds no generator of it.
"""

from __future__ import annotations

import array
import contextlib
import functools
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.basics import pytree

# Bits of the words that states are set to, and of the seeds that NumPy's older generator takes.
_WORD, _OLD_SEED = (1 << 64) - 1, (1 << 32) - 1
# Odd, as PCG's increment has to be: the one of its reference implementation.
_PCG_INCREMENT = 0x5851F42D4C957F2D14057B7EF767814F
# The bytes of a Mersenne Twister: 624 words, and how many of them are used. A draw uses one; when
# all are used, all change: so this number and three words next to it tell of any draw.
_TWISTER, _MARK = 625 * 4, 4 * 4
# Spreads 64 bits over 128: the increment of splitmix64, and the next odd constant of MurmurHash3.
_SPREAD = 0x9E3779B97F4A7C15FF51AFD7ED558CCD


class SeededGenerator(ABC):
    """A generator that can be seeded, and put back. ``path`` says where it is, for people."""

    def __init__(self, path: str, generator: Any) -> None:
        self.path = path
        self.generator = generator

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed it with an integer of 63 well-mixed bits."""

    @abstractmethod
    def state(self) -> Any:
        """Return its state."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Put it into a state that it had."""

    @abstractmethod
    def has_moved(self, state: Any) -> bool:
        """Return whether anything was drawn since it had this state."""


class _PythonGenerator(SeededGenerator):
    """A ``random.Random``."""

    def seed(self, seed: int) -> None:
        self.generator.seed(seed)

    def state(self) -> Any:
        return self.generator.getstate(), self._mark()

    def restore(self, state: Any) -> None:
        self.generator.setstate(state[0])

    def has_moved(self, state: Any) -> bool:
        full, mark = state
        if mark is not None:
            return bool(self._mark() != mark)
        return bool(self.generator.getstate() != full)

    def _mark(self) -> tuple[bytes, Any] | None:
        """Return the part of its memory that changes with each draw; None where that is not known.

        ``getstate`` makes 625 integers of it, and takes 15 times as long.
        """
        if type(self.generator) is not random.Random or not _knows_memory():
            return None
        return _memory_of(self.generator, _MARK), vars(self.generator)["gauss_next"]


class _NumpyGenerator(SeededGenerator):
    """A ``numpy.random.Generator``."""

    def seed(self, seed: int) -> None:
        _seed_bits(self.generator.bit_generator, seed)

    def state(self) -> Any:
        return self.generator.bit_generator.state

    def restore(self, state: Any) -> None:
        self.generator.bit_generator.state = state

    def has_moved(self, state: Any) -> bool:
        return not pytree.equal(self.generator.bit_generator.state, state)


class _OldNumpyGenerator(SeededGenerator):
    """A ``numpy.random.RandomState``: bits, and the second of two normal numbers made at once."""

    def seed(self, seed: int) -> None:
        bits = self.generator._bit_generator
        if type(bits) is _of_numpy("MT19937"):
            self.generator.seed(seed & _OLD_SEED)
        else:
            _seed_bits(bits, seed)
            self.generator.__init__(bits)  # forgets the normal number

    def state(self) -> Any:
        full = self.generator.get_state(legacy=False)
        return full, self._mark(full)

    def restore(self, state: Any) -> None:
        self.generator.set_state(state[0])

    def has_moved(self, state: Any) -> bool:
        full, mark = state
        if mark is not None:
            return bool(self._mark(full) != mark)
        return not pytree.equal(self.generator.get_state(legacy=False), full)

    def _mark(self, full: dict[str, Any]) -> bytes | None:
        """Return the memory of the bits; None if a normal number is left, which may go alone.

        ``get_state`` makes 624 integers of it, and takes 50 times as long.
        """
        if full["has_gauss"] or full["bit_generator"] != "MT19937":
            return None
        address = self.generator._bit_generator.ctypes.state_address
        return _reader()(address + _TWISTER - _MARK, _MARK)  # the number of words used is last


class _TorchGenerator(SeededGenerator):
    """A ``torch.Generator`` of the processor's."""

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def state(self) -> Any:
        return self.generator.get_state(), self._mark()

    def restore(self, state: Any) -> None:
        self.generator.set_state(state[0])

    def has_moved(self, state: Any) -> bool:
        return bool(self._mark() != state[1])

    def _mark(self) -> bytes:
        """Return the state's memory: ``Tensor.equal`` takes ten times as long."""
        state = self.generator.get_state()
        return _reader()(state.data_ptr(), state.nbytes)


def kind_of_generators(cls: type) -> type[SeededGenerator] | None:
    """Return the wrapper for generators of a class; None if objects of it cannot be seeded."""
    if issubclass(cls, random.Random):
        return None if issubclass(cls, random.SystemRandom) else _PythonGenerator
    kinds = (("Generator", _NumpyGenerator), ("RandomState", _OldNumpyGenerator))
    for name, kind in kinds:
        of_numpy = _of_numpy(name)
        if of_numpy is not None and issubclass(cls, of_numpy):
            return kind
    of_torch = getattr(sys.modules.get("torch"), "Generator", None)
    return _TorchGenerator if of_torch is not None and issubclass(cls, of_torch) else None


def generator_of(value: Any, path: str) -> SeededGenerator | None:
    """Wrap a generator; None for a global one, and for one that cannot be seeded: on a device."""
    kind = kind_of_generators(type(value))
    if kind is None or any(value is each.generator for each in global_generators()):
        return None
    if kind is _TorchGenerator and value.device.type != "cpu":
        return None
    return kind(path, value)


def global_generators() -> Sequence[SeededGenerator]:
    """Return the generators of ``random``, ``numpy.random`` and torch; those that are imported."""
    modules = sys.modules
    of_numpy = getattr(modules.get("numpy.random.mtrand"), "_rand", None)
    # None while torch is being imported.
    of_torch = getattr(modules.get("torch"), "default_generator", None)
    return _wrapped(random._inst, of_numpy, of_torch)


@functools.lru_cache(8)
def _wrapped(of_python: Any, of_numpy: Any, of_torch: Any) -> Sequence[SeededGenerator]:
    found = [
        _PythonGenerator("random", of_python),
        None if of_numpy is None else _OldNumpyGenerator("numpy.random", of_numpy),
        None if of_torch is None else _TorchGenerator("torch", of_torch),
    ]
    return [each for each in found if each is not None]


class GeneratorStates:
    """The states of generators at one moment; looking at them draws nothing."""

    def __init__(self, generators: Sequence[SeededGenerator]) -> None:
        self.generators = generators
        self._states = [(each, each.state()) for each in generators]

    def have_moved(self) -> bool:
        """Return whether somebody drew from one of them since; any thread may have done so."""
        return any(each.has_moved(state) for each, state in self._states)

    def moved(self) -> list[str]:
        """Return the paths of those that somebody drew from since."""
        return [each.path for each, state in self._states if each.has_moved(state)]

    def restore(self) -> None:
        for each, state in self._states:
            each.restore(state)


@contextlib.contextmanager
def put_back(generators: Sequence[SeededGenerator]) -> Iterator[None]:
    """Put generators back afterwards, as if nothing had been drawn."""
    states = GeneratorStates(generators)
    try:
        yield
    finally:
        states.restore()


def device_generator(batch: Any, seed: int) -> Any:
    """Return a new ``torch.Generator`` on a batch's device; for arrays of JAX, a key of JAX.

    ``seed`` has 63 well-mixed bits. None for a batch without tensors and arrays of JAX.
    """
    for leaf in pytree.leaves(batch):
        if pytree.is_tensor(leaf):
            generator = sys.modules["torch"].Generator(leaf.device)
            generator.manual_seed(seed)
            return generator
        if pytree.is_jax_array(leaf):
            # JAX takes seeds of 32 bits, unless 64-bit numbers are switched on.
            return sys.modules["jax"].random.key(seed >> 31)
    return None


def _of_numpy(name: str) -> Any:
    return getattr(sys.modules.get("numpy.random"), name, None)


def _seed_bits(bits: Any, seed: int) -> None:
    kind = type(bits)
    if kind is _of_numpy("PCG64") or kind is _of_numpy("PCG64DXSM"):
        words = {"state": seed * _SPREAD & ((1 << 128) - 1), "inc": _PCG_INCREMENT}
        bits.state = _numpy_state(kind, words)
    elif kind is _of_numpy("Philox"):
        rest = {"buffer": [0] * 4, "buffer_pos": 4}
        key = {"counter": [0] * 4, "key": [seed, seed * _SPREAD >> 64 & _WORD]}
        bits.state = _numpy_state(kind, key) | rest
    else:
        bits.state = kind(seed).state  # ten times as long, and right for all kinds


def _numpy_state(kind: type, words: dict[str, Any]) -> dict[str, Any]:
    return {"bit_generator": kind.__name__, "state": words, "has_uint32": 0, "uinteger": 0}


def _memory_of(generator: random.Random, nbytes: int) -> bytes:
    """Return the number of words used of a ``random.Random``, and words, as CPython has them."""
    return _reader()(id(generator) + object.__basicsize__, nbytes)


@functools.cache
def _reader() -> Callable[[int, int], bytes]:
    """Return a function that reads so many bytes from an address."""
    import ctypes  # takes its time

    return ctypes.string_at


@functools.cache
def _knows_memory() -> bool:
    """Return whether this interpreter lays a ``random.Random`` out as expected."""
    one = random.Random(1)
    if sys.implementation.name != "cpython" or object.__basicsize__ + _TWISTER > one.__sizeof__():
        return False
    one.random()
    found, state = array.array("I"), one.getstate()[1]
    found.frombytes(_memory_of(one, _TWISTER))
    return found.tolist() == [state[-1], *state[:-1]]
