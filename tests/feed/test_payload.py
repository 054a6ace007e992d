"""What is handed over comes out as it went in, without a copy, and harms nobody."""

from __future__ import annotations

import gc
import os
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from descriptors import open_descriptors
from stoker.basics import pytree
from stoker.basics.buffers import Recycler
from stoker.feeds import shared_memory
from stoker.feeds.shared_memory import Blocks, Stale, map_block

Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    boxes: Any
    name: str


def sent(value: Any, blocks: Blocks, generation: int = 1) -> tuple[Any, Any, list[Any]]:
    """Return what a job sees of a value, the payload, and its mappings."""
    packed = shared_memory.to_payload(value, blocks)
    packed.mark(generation)
    seen, mappings = received(packed)
    return seen, packed, mappings


def received(packed: shared_memory.Payload) -> tuple[Any, list[Any]]:
    mappings = [map_block(os.dup(block.descriptor), block.generation) for block in packed.blocks]
    return shared_memory.from_payload(packed.header, packed.places, mappings), mappings


arrays = hnp.arrays(
    st.sampled_from((np.uint8, np.float32, np.int64, np.dtype("S5"), np.dtype("U3"))),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
    fill=st.nothing(),
    elements=None,
) | st.builds(
    lambda n, step: np.arange(n * step, dtype=np.float64)[::step],
    st.integers(0, 20_000),
    st.integers(1, 3),
)
leaves = (
    arrays
    | st.binary(max_size=20_000)
    | st.text()
    | st.integers()
    | st.none()
    | st.floats(allow_nan=False)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(inner, inner)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner, st.text())
    ),
    max_leaves=6,
)


@given(values)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    blocks = Blocks()
    seen, packed, _ = sent(value, blocks)
    assert pytree.equal(value, seen)
    for leaf in pytree.leaves(seen):
        if isinstance(leaf, np.ndarray):
            assert not leaf.flags.writeable
    packed.retire()
    blocks.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [3, 50_000])
def test_tensors(dtype: torch.dtype, size: int) -> None:
    value = {"a": torch.arange(size).to(dtype), "b": torch.ones(4, size)[::2].to(dtype)}
    seen, _, _ = sent(value, Blocks())
    assert pytree.equal(value, seen)


def test_arrays_in_the_feeders_memory_are_not_copied() -> None:
    blocks = Blocks()
    recycler = Recycler(allocate=blocks.allocate)
    batch = recycler.array((64, 1000), np.float32)
    batch[:] = 1
    seen, packed, _ = sent((batch, batch[10:20].T), blocks)
    assert [block.size for block in packed.blocks] == [batch.nbytes]
    batch[:] = 2  # as the feeder must not
    assert (seen[0] == 2).all()
    assert (seen[1] == 2).all()


def test_what_one_job_writes_no_other_sees() -> None:
    blocks = Blocks()
    value = torch.arange(50_000.0)
    one, packed, _ = sent(value, blocks)
    other, _ = received(packed)
    one.mul_(0)
    assert torch.equal(other, value)
    array, _, _ = sent(np.arange(50_000), blocks)
    with pytest.raises(ValueError, match="read-only"):
        array += 1


def test_no_job_can_write_or_resize_a_block() -> None:
    blocks = Blocks()
    packed = shared_memory.to_payload(np.arange(50_000), blocks)
    descriptor = packed.blocks[0].descriptor
    for forbidden in (
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.ftruncate(descriptor, 1 << 30),
        lambda: os.pwrite(descriptor, b"x", 5000),
    ):
        with pytest.raises(PermissionError):
            forbidden()


def test_who_comes_too_late_is_told() -> None:
    blocks = Blocks()
    packed = shared_memory.to_payload(np.arange(50_000), blocks)
    packed.mark(1)
    descriptor = os.dup(packed.blocks[0].descriptor)
    in_time = map_block(os.dup(descriptor), 1)
    packed.retire()
    with pytest.raises(Stale):
        map_block(descriptor, 1)
    with pytest.raises(Stale):
        shared_memory.check_generation(in_time, 1)


def test_what_is_kept_outlasts_its_block() -> None:
    blocks = Blocks()
    recycler = Recycler(allocate=blocks.allocate)
    batch = recycler.array((100_000,), np.float32)
    batch[:] = 7
    seen, _, mappings = sent(batch, blocks)
    shared_memory.detach(mappings[0])
    batch[:] = 8
    assert (seen == 7).all()


def test_two_batches_in_one_block_have_one_generation_while_either_is_lent() -> None:
    blocks = Blocks()
    whole = Recycler(allocate=blocks.allocate).array((2, 40_000), np.float32)
    first, second = (shared_memory.to_payload(row, blocks) for row in whole)
    first.mark(1)
    second.mark(2)
    block = first.blocks[0]
    first.retire()
    assert block.generation == 1
    second.retire()
    assert block.generation == 0


def test_blocks_go_with_their_last_user() -> None:
    gc.collect()
    before = open_descriptors()
    blocks = Blocks()
    value, packed, mappings = sent([np.zeros(100_000) for _ in range(5)], blocks)
    assert blocks.held_bytes() > 0
    del value, packed, mappings
    blocks.clear()
    gc.collect()
    assert blocks.held_bytes() == 0
    assert open_descriptors() <= before


def test_what_cannot_be_handed_over_says_why() -> None:
    with pytest.raises(TypeError, match="cannot send this value"):
        shared_memory.to_payload((lambda: 0,), Blocks())
