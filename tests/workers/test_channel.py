"""What crosses between processes comes out as it went in, its arrays in the memory of both."""

from __future__ import annotations

import gc
import threading
import weakref
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.transport import channel
from stoker.transport.channel import Arena
from stoker.transport.flatten import Flattener
from strategies import few


class Tagged(np.ndarray[Any, Any]):
    pass


ARRAYS = {
    "plain": np.arange(50_000.0),
    "of no dimension": np.array(7),
    "of no size": np.zeros((0, 3)),
    "transposed": np.arange(60_000).reshape(200, 300).T,
    "backwards": np.arange(50_000)[::-1],
    "with gaps": np.arange(90_000)[::3],
    "one value repeated": np.broadcast_to(np.float32(3), (300, 300)),
    "dates": np.arange("2001", "2003", dtype="datetime64[h]"),
    "records": np.zeros(9_000, [("a", "u1"), ("b", "f8")]),
    "objects": np.array([{1: 2}, None], object),
    "empty texts": np.zeros(3, "S0"),
    "of a subclass": np.arange(50_000).view(Tagged),
}


def crossed(value: Any, arena: Arena) -> Any:
    """Return what another process gets, that opens the arena."""
    ours, theirs = Pipe()
    there = Arena.open(arena.handle)
    with ours, theirs:
        sender = threading.Thread(target=channel.send, args=(ours, value, 0, arena))
        sender.start()
        got = channel.receive(theirs, [there])
        sender.join()
    there.close()
    return got[1]


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays(what: str) -> None:
    arena = Arena.create()
    array = ARRAYS[what]
    got = crossed({"a": (array, 1)}, arena)["a"][0]
    assert (type(got), got.dtype, got.shape) == (type(array), array.dtype, array.shape)
    assert got.tolist() == array.tolist()
    assert got.flags.writeable == array.flags.writeable
    arena.close()


def test_axes_keep_their_order_in_memory() -> None:
    arena = Arena.create()
    channels_first = np.arange(60_000).reshape(2, 100, 100, 3).transpose(0, 3, 1, 2)
    array, tensor = crossed((channels_first, torch.from_numpy(channels_first)), arena)
    assert array.strides == channels_first.strides
    assert np.array_equal(array, channels_first)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(tensor, channels_first)
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors(dtype: torch.dtype) -> None:
    arena = Arena.create()
    tensor = torch.arange(60_000).reshape(200, 300).to(dtype)
    for sent in (tensor, tensor.T, tensor[:, ::2]):
        got = crossed([sent], arena)[0]
        assert got.dtype == dtype
        assert torch.equal(got, sent)
    arena.close()


def test_what_comes_twice_is_one_thing() -> None:
    arena = Arena.create()
    array = np.arange(1000)
    first, second = crossed([array, array], arena)
    assert first is second
    arena.close()


def test_an_arena_grows() -> None:
    arena = Arena.create()
    there = Arena.open(arena.handle)
    ours, theirs = Pipe()
    with ours, theirs:
        for size in (10, 1_000_000, 5, 3_000_000):
            channel.send(ours, np.arange(size), 0, arena)
            assert channel.receive(theirs, [there])[1].sum() == size * (size - 1) // 2
    there.close()
    arena.close()


sizes = st.integers(0, 40_000)


@few(30)
@given(st.lists(st.tuples(st.booleans(), sizes), max_size=6), st.randoms(use_true_random=False))
def test_arrays_that_were_made_in_an_arena_cross_among_others(
    arrays: list[tuple[bool, int]], random: Any
) -> None:
    """In any order; twice, since what comes next is written over what was there."""
    arena = Arena.create()
    for first in (0, 7):
        value = []
        for number, (is_there, size) in enumerate(arrays):
            array = arena.array((size,), np.int32) if is_there else np.empty(size, np.int32)
            array[:] = np.arange(size) + first + number
            value.append(array)
        random.shuffle(value)
        expected = [array.tolist() for array in value]
        assert [array.tolist() for array in crossed(value, arena)] == expected
    arena.close()


def test_what_was_made_in_an_arena_and_not_sent_is_written_over() -> None:
    arena = Arena.create()
    arena.array((100_000,), np.uint8)[:] = 1
    assert crossed(np.arange(100_000), arena)[-1] == 99_999
    assert arena.array((100_000,), np.uint8).flags.owndata is False
    objects = arena.array((100_000,), object)  # lie elsewhere
    assert objects[0] is None
    arena.close()


def test_what_was_flattened_is_not_kept() -> None:
    """Not even until the next collection."""
    array = np.arange(50_000)
    gone = weakref.ref(array)
    gc.disable()
    try:
        flattener = Flattener()
        flattener.flatten([array, torch.arange(10)])
        del flattener, array
        assert gone() is None
    finally:
        gc.enable()
