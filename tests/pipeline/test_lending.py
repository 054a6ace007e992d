"""What is declared to only read is lent a pool's items: nothing else changes, ever."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker import images, reads_only
from stoker.basics import pytree
from strategies import few

pytestmark = pytest.mark.filterwarnings("ignore:.*keep uses apart")

# -- functions, each declared and not; what they do is written down once


@stoker.thread_safe
def view(x: Any, rng: Any) -> Any:
    return x[::-1] if rng.random() < 0.5 else x[:]


@stoker.thread_safe
def grown(x: Any, rng: Any) -> Any:
    return x + rng.random()


@stoker.thread_safe
def same(x: Any, rng: Any) -> Any:
    return x


@stoker.thread_safe
def overwritten(x: Any, rng: Any) -> Any:
    """Write into what it is given, as careless augmentations do."""
    x *= 2
    x += rng.random()
    return x


READS = [view, grown, same]
DECLARED: dict[Any, Any] = {fn: reads_only(functools.partial(fn)) for fn in READS}


@stoker.thread_safe
class Rows:
    """Dicts of a row and of a list with another one, which nobody names."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"x": np.arange(7.0) + 10 * index, "more": [np.full(2, index)], "n": index}


@stoker.thread_safe
def write_all(example: Any) -> Any:
    """Write into every array of an example, those that no map before named included."""
    example["more"][0] += 1
    example["more"].append(np.zeros(1))
    example["x"] += 1
    return example


def chain(fns: Any, declared: bool, factor: Any, end: str, seed: int) -> Any:
    p: Any = stoker.from_dataset(Rows(9), seed=seed).shuffle()
    p = p.echo(factor, pool=8)
    for fn in fns:
        p = p.random_map(DECLARED.get(fn, fn) if declared else fn, on="x")
    if end == "written":
        p = p.map(write_all)
    if end == "listed":
        p = p.batch(4, collate=list)
    elif end != "single":
        p = p.batch(4)
    return p.workers(2)


def consumed(p: Any, epochs: int = 2) -> list[Any]:
    """Return all that epochs hand out, and write over it: nobody may be harmed."""
    kept = []
    for _ in range(epochs):
        for batch in p:
            leaves = pytree.leaves(batch)
            kept.append([np.array(leaf) for leaf in leaves])
            for leaf in leaves:
                if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
                    leaf[...] = 111
    return kept


def alike(some: list[Any], others: list[Any]) -> None:
    assert len(some) == len(others)
    for mine, theirs in zip(some, others, strict=True):
        assert len(mine) == len(theirs)
        for left, right in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(left, right)


@few(12)
@given(
    fns=st.lists(st.sampled_from([view, grown, same, overwritten]), min_size=1, max_size=3),
    factor=st.sampled_from([1.5, 2, 4]),
    end=st.sampled_from(["batch", "written", "listed", "single"]),
    seed=st.integers(0, 99),
    workers=st.sampled_from([0, 2]),
)
def test_the_same_stream_as_without_the_declaration(
    fns: Any, factor: Any, end: str, seed: int, workers: int
) -> None:
    plain, lent = chain(fns, False, factor, end, seed), chain(fns, True, factor, end, seed)
    alike(consumed(lent.workers(workers)), consumed(plain))


@pytest.mark.parametrize("end", ["batch", "listed", "single"])
def test_the_same_stream_behind_an_echo_that_follows_the_stall(end: str) -> None:
    fns = [grown, view, overwritten]
    lent = chain(fns, True, "auto", end, 5)
    found = consumed(lent)
    replayed = chain(fns, False, "auto", end, 5).replay(lent.record())
    alike(consumed(replayed), found)


def test_the_same_tail_after_a_resume() -> None:
    whole = consumed(chain([view, overwritten], False, 3, "batch", 1), epochs=1)
    train = chain([view, overwritten], True, 3, "batch", 1)
    for _ in zip(range(3), train, strict=False):
        pass
    again = chain([view, overwritten], True, 3, "batch", 1)
    again.load_state_dict(train.state_dict())
    alike(consumed(again, epochs=1), whole[3:])


@pytest.mark.parametrize("rank", range(2))
def test_the_same_stream_for_ranks_with_a_cache(rank: int) -> None:
    def built(declared: bool) -> Any:
        p: Any = stoker.from_dataset(Rows(24), seed=2).shuffle().shard(rank=rank, world_size=2)
        if declared:
            p = p.cache("8MB", version=f"lent {rank}")
        fn = DECLARED[view] if declared else view
        return p.echo(2, pool=8).random_map(fn, on="x").map(write_all).batch(3)

    alike(consumed(built(True), 3), consumed(built(False), 3))


def pictures(declared: bool, kind: str) -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 24, 3), np.uint8)
    crop: Any = images.random_resized_crop(8)
    if not declared:
        crop = Undeclared(crop)
    p: Any = stoker.from_arrays(pixels, np.arange(12), seed=1).shuffle()
    p = p.echo(3, pool=8).random_map(crop, on=0).random_map(images.random_hflip, on=0)
    return p.batch(4).workers(2, kind=kind)


class Undeclared:
    """What hides a declaration; it pickles."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, x: Any, rng: Any) -> Any:
        return self.fn(x, rng)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_images_are_the_same_from_threads_and_processes(kind: str) -> None:
    alike(consumed(pictures(True, kind)), consumed(pictures(False, "thread").workers(0)))


def shared() -> Any:
    return pictures(True, "thread")


@pytest.mark.full
def test_images_are_the_same_from_a_feed() -> None:
    train = stoker.feed(shared, name="lending", seed=1)
    alike(consumed(train, 1), consumed(pictures(False, "thread"), 1))


# -- who gets what


def given_to(*fns: Any, end: Callable[[Any], Any] = lambda p: p.batch(4)) -> list[Any]:
    """Return whether each function was given memory that another use of the item was given, too."""
    seen: list[list[Any]] = [[] for _ in fns]

    def noting(at: int) -> Any:
        def fn(x: Any) -> Any:
            seen[at].append(x)  # keeps it, so that no address comes twice
            return fns[at](x)

        return reads_only(fn) if stoker.basics.buffers.only_reads(fns[at]) else fn

    p: Any = stoker.from_dataset([np.full(3, float(i)) for i in range(4)], seed=0).echo(3, pool=4)
    for at in range(len(fns)):
        p = p.map(noting(at))
    for _ in end(p).workers(0):
        pass
    return [len({x.ctypes.data for x in each}) < len(each) for each in seen]


def test_only_the_declared_are_lent_to_and_only_in_front() -> None:
    reading = reads_only(lambda x: x)
    assert given_to(reading) == [True]
    assert given_to(lambda x: x) == [False]
    assert given_to(reading, reading, lambda x: x) == [True, True, False]
    assert given_to(lambda x: x, reading) == [False, False]
    assert given_to(reads_only(lambda x: x[1:]), lambda x: x) == [True, False]


def test_a_filter_borrows_too() -> None:
    seen: list[Any] = []

    @reads_only
    def first(x: Any) -> bool:
        seen.append(x)
        return bool(x[0] < 2)

    p = stoker.from_dataset([np.full(3, float(i)) for i in range(4)], seed=0).echo(3, pool=4)
    batches = list(p.filter(first).map(lambda x: np.add(x, 1, out=x)).batch(4).workers(0))
    assert len({id(x) for x in seen}) == 4
    assert {x for batch in batches for x in batch[:, 0]} == {1.0, 2.0}


def test_tensors_that_share_an_arrays_memory_are_copied() -> None:
    declared = reads_only(lambda x: (torch.from_numpy(x)[1:], x[::-1], {"x": x}))

    def write(parts: Any) -> Any:
        for leaf in pytree.leaves(parts):
            leaf += 1
        return parts

    p: Any = stoker.from_dataset([np.zeros(3)], seed=0).echo(4, pool=1).map(declared).map(write)
    for parts in p:
        for leaf in pytree.leaves(parts):
            assert np.asarray(leaf).tolist() == [1.0] * len(leaf)


class Own(np.ndarray[Any, Any]):
    """Arrays of a class of one's own."""


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3).view(Own),
        np.ma.masked_array(np.zeros(3), [False, True, False]),
        torch.zeros(3),
        np.array([[0.0], [0.0]], object),
        bytearray(3),
    ],
    ids=["subclass", "masked", "tensor", "objects", "bytes"],
)
def test_whatever_an_item_is_made_of_nobody_writes_into_it(value: Any) -> None:
    @reads_only
    def parts(x: Any) -> Any:
        if isinstance(x, bytearray):
            return [x, np.frombuffer(x, np.uint8)]
        return [x, x[:2]] if torch.is_tensor(x) else [x, np.asarray(x)]

    def write(found: Any) -> Any:
        before.append([repr(each) for each in found])
        for each in found:
            each[0] = 1
        return found

    before: list[Any] = []
    p: Any = stoker.from_dataset([value], seed=0).echo(3, pool=1).map(parts).map(write)
    for _ in p.workers(0):
        pass
    assert before == [before[0]] * 3


# -- the declaration


def test_what_is_declared() -> None:
    def fn(x: Any) -> Any:
        return x

    declared = stoker.basics.buffers.only_reads
    assert not declared(fn)
    assert reads_only(fn) is fn
    assert declared(fn)
    assert declared(functools.partial(functools.partial(fn), 1))

    @functools.wraps(fn)
    def wrapper(x: Any) -> Any:
        x[0] = 1
        return fn(x)

    assert not declared(wrapper)

    @reads_only
    class Called:
        def __call__(self, x: Any) -> Any:
            return x

    assert declared(Called())
    for each in (
        images.decode,
        functools.partial(images.decode, orient=True),
        images.random_resized_crop(8),
        images.center_crop(8),
        images.color_jitter(0.4),
        images.normalize(),
        images.to_chw,
        images.hflip,
        images.random_hflip,
    ):
        assert declared(each)


def test_what_cannot_be_declared() -> None:
    with pytest.raises(TypeError, match="needs a function"):
        reads_only(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="function of your own"):
        reads_only(len)
