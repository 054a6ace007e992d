"""``.echo("auto")`` as users meet it: real threads, processes, files and loaders.

What is decided here depends on time, so nothing is said about how often an example is used, but
between which bounds; and that a record makes it certain.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from patience import wait_until
from scripts import children
from stoker import testing
from stoker.engine import heads
from stoker.schedule.echo_record import decode
from strategies import (
    POINTS,
    Examples,
    Faulty,
    Keep,
    few,
    frozen,
    halve,
    ids,
    jitter,
    one_in,
    scale_batch,
    shortened,
    small_pools_allowed,
    spoil,
    stream,
    through_json,
)

PATIENCE_S = 200.0  # for what is sure to come; nothing waits so long unless it is broken
KINDS = [(2, "thread"), (2, "process")]

Echo = Callable[[stoker.Pipeline], stoker.Pipeline]


def auto(**options: Any) -> Echo:
    return lambda chain: chain.echo("auto", **options)


@stoker.thread_safe
class Slow(Examples):
    """Some of it takes a while, so that threads are used and something is echoed."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.001 * (index % 3))
        return super().__getitem__(index)


class Gate:
    """Holds whoever comes until it is opened, and tells that somebody came."""

    def __init__(self) -> None:
        self.reached, self.opened, self.in_time = threading.Event(), threading.Event(), True

    def wait(self) -> None:
        self.reached.set()
        self.in_time = self.opened.wait(PATIENCE_S)


@stoker.thread_safe  # one for all threads: it has gates
class Held(Examples):
    """Waits at some examples until they are let go."""

    def __init__(self, length: int, *at: int) -> None:
        super().__init__(length)
        self.gates = {index: Gate() for index in at}

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.002)
        if index in self.gates:
            self.gates[index].wait()
        return super().__getitem__(index)


class Stream:
    """Examples one after another, from some number on only when they are let go.

    Args:
        held: the number that is held back.
        fails: what is raised in place of a last example.
    """

    def __init__(self, length: int, held: int | None = None, fails: Exception | None = None):
        self.length, self.held, self.fails = length, held, fails
        self.gate = Gate()
        self.begun = self.ended = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        try:
            examples = Slow(self.length)
            for number in range(self.length):
                if number == self.held:
                    self.gate.wait()
                yield examples[number]
            if self.fails is not None:
                raise self.fails
        finally:
            self.ended += 1


class Batches:
    """A loader: batches of four examples, as ``Stream`` gives examples."""

    def __init__(self, length: int, held: int | None = None, fails: tuple[int, ...] = ()) -> None:
        self.length, self.held, self.fails = length, held, fails
        self.gate = Gate()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return _Batches(self)


class _Batches(Iterator[dict[str, Any]]):
    """Goes on behind what it raised, as torch's does."""

    def __init__(self, of: Batches) -> None:
        self.of, self.number = of, -1

    def __next__(self) -> dict[str, Any]:
        of = self.of
        self.number += 1
        if self.number >= of.length:
            raise StopIteration
        if self.number == of.held:
            of.gate.wait()
        if self.number in of.fails:
            raise ArithmeticError(f"batch {self.number}")
        time.sleep(0.001)
        numbers = np.arange(4 * self.number, 4 * self.number + 4)
        return {"id": numbers, "x": np.repeat(numbers[:, None], 3, 1).astype(np.float64)}


def built(
    source: stoker.Pipeline,
    point: str,
    echo: Echo,
    *,
    batch: int = 4,
    on: Any = "x",
    workers: int | None = 2,
    kind: str = "thread",
) -> stoker.Pipeline:
    """Put an echo into a chain, at a point."""
    chain = source.map(halve, on=on)
    chain = echo(chain) if point == "before" else chain
    chain = chain.random_map(jitter, on=on)
    chain = echo(chain) if point == "after" else chain
    chain = chain.batch(batch)
    chain = echo(chain) if point == "batch" else chain
    if point == "device":
        chain = echo(chain.to_torch())
    return chain if workers is None else chain.workers(workers, kind=kind)


def slow(length: int, point: str, echo: Echo, **options: Any) -> stoker.Pipeline:
    """A shuffled chain over the slow data set."""
    return built(stoker.from_dataset(Slow(length), seed=0).shuffle(), point, echo, **options)


def used(pipeline: stoker.Pipeline) -> list[list[int]]:
    """Run an epoch and return the ids in each batch, their rows being sound."""
    found = []
    with small_pools_allowed():
        for batch in pipeline:
            assert_sound(batch)
            found.append(ids(batch))
            spoil(batch)
    return found


def collect(batches: Iterator[Any], found: list[list[int]]) -> None:
    """Add the ids of each batch, as long as they come."""
    for batch in batches:
        found.append(ids(batch))


def assert_sound(batch: Any) -> None:
    """Check that no row was written into by anybody, and that each belongs to its id."""
    rows = np.asarray(batch["x"] if isinstance(batch, dict) else batch[1])
    noise = rows - np.array(ids(batch), float)[:, None] / 2
    assert ((noise >= 0) & (noise < 1)).all()


def shift_on_device(batch: Any, rng: Any) -> Any:
    """Shift a whole batch of tensors in place."""
    batch["x"] += float(rng.initial_seed() % 1000)
    return batch


def default_most(point: str) -> int:
    """Return the most uses of an item, unless an echo is told otherwise."""
    return 8 if point == "before" else 4


def assert_covered(
    batches: list[list[int]],
    expected: set[int],
    *,
    point: str = "before",
    batch: int = 4,
    max_factor: int | None = None,
) -> None:
    """Check everything that is promised of an epoch, whatever the timing was."""
    counts = Counter(itertools.chain.from_iterable(batches))
    assert set(counts) == expected
    assert max(counts.values(), default=0) <= (max_factor or default_most(point))
    assert all(len(set(numbers)) == len(numbers) for numbers in batches)
    if point in ("before", "after"):
        assert all(len(numbers) == batch for numbers in batches[:-1])
        assert all(batches[-1:])
        for one, other in itertools.pairwise(batches):
            assert not set(one) & set(other)
    else:
        whole, rest = divmod(len(expected), batch)
        kinds = {tuple(numbers) for numbers in batches}
        assert sorted(map(len, kinds)) == [rest] * (rest > 0) + [batch] * whole
        assert all(one != other for one, other in itertools.pairwise(batches))


def assert_apart(
    batches: list[list[int]],
    min_distance: int = 8,
    *,
    whole: bool = False,
    firsts: list[list[bool]] | None = None,
) -> None:
    """Check that no use follows another one too closely; the last batch of an epoch may be full.

    Args:
        whole: whether batches are echoed, so that one in the place of another is short.
        firsts: which uses are first ones: of an item that is another one than it was in the epoch
            before, copies of which may have come lately.
    """
    last: dict[Any, int] = {}
    for number, batch in enumerate(batches if whole else batches[:-1]):
        distance = 2 + (min_distance - 2) * min(number, 48) // 48
        items = [tuple(batch)] if whole else batch
        for place, item in enumerate(items):
            if firsts is not None and firsts[number][place]:
                continue
            assert number - last.get(item, -number - 99) >= distance, (number, item)
        last |= dict.fromkeys(items, number)


def fresh_counts(pipeline: stoker.Pipeline, epoch: int) -> list[int]:
    """Return how many fresh items each step of an epoch took, as far as is decided."""
    point, echo = pipeline.chain.flow.echo, decode(pipeline.record(), None).echo
    assert point is not None
    assert echo is not None
    return [min(code, point.group) for code in echo.epochs[epoch].codes]


def assert_carried(
    pipeline: stoker.Pipeline,
    epochs: list[list[list[int]]],
    expected: set[int],
    *,
    point: str = "before",
    max_factor: int | None = None,
    longest: int = 8,
) -> None:
    """Check all that is promised of epochs through which one pool goes on.

    An item is what was read fresh: an example, or a batch, in an epoch.
    """
    whole, max_factor = point in ("batch", "device"), max_factor or default_most(point)
    uses: Counter[Any] = Counter()
    last: dict[Any, int] = {}
    step = 0
    for epoch, batches in enumerate(epochs):
        counts = fresh_counts(pipeline, epoch)
        fresh: Counter[int] = Counter()
        for number, batch in enumerate(batches):
            assert len(set(batch)) == len(batch)
            addresses: list[Any] = [tuple(batch)] if whole else batch
            now: list[Any] = []
            for place, address in enumerate(addresses):  # fresh ones stand first
                if place < counts[number]:
                    fresh.update(batch if whole else [address])
                    now.append((epoch, address))
                else:
                    known = [item for item in last if item[1] == address]
                    left = [item for item in known if uses[item] < max_factor]
                    now.append(min(left, key=lambda item: last[item]))
            distance = 2 + (longest - 2) * min(step, 48) // 48
            if number == len(batches) - 1 and not whole:
                distance = 2  # nothing fresh is to come that could be waited for
            assert all(step - last.get(item, -step - 99) >= distance for item in now)
            uses.update(now)
            last |= dict.fromkeys(now, step)
            step += 1
        assert set(fresh) == expected
        assert not expected or max(fresh.values()) == 1
    assert max(uses.values(), default=0) <= max_factor


def threads() -> set[threading.Thread]:
    """Those that nobody may leave behind; torch's queues have some that end in their own time."""
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("stoker")}


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    before = threads(), set(children())
    yield
    assert threads() <= before[0]
    assert set(children()) <= before[1]


# -- arguments


def test_it_is_what_echo_does_and_4_uses_are_the_most() -> None:
    chain = stoker.from_dataset(Examples(40), seed=0)
    plain, named, full = chain.echo(), chain.echo("auto"), chain.echo("auto", max_factor=4)
    assert str(plain) == str(named) == str(full)
    assert "echo(auto, max_factor=4)" in str(plain)
    assert "example echoing" in str(plain.random_map(jitter, on="x").batch(4))
    assert repr(plain) == repr(full)
    state = through_json(plain.batch(4).state_dict())
    full.batch(4).load_state_dict(state)
    with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
        chain.echo(max_factor=5).batch(4).load_state_dict(state)
    with pytest.raises(stoker.StateError, match=r"min_distance=8.*min_distance=2"):
        chain.echo(min_distance=2).batch(4).load_state_dict(state)
    with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
        chain.echo(4).batch(4).load_state_dict(state)


def chain() -> stoker.Pipeline:
    return stoker.from_dataset(Examples(8), seed=0)


def sound_record() -> dict[str, Any]:
    pipeline = chain().echo().batch(2).workers(1)
    list(pipeline)
    return through_json(pipeline.record())


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "max_factor 1": (lambda: chain().echo(max_factor=1), ValueError, "at least 2"),
    "max_factor of a float": (lambda: chain().echo(max_factor=2.5), TypeError, "whole number"),  # type: ignore[arg-type]
    "max_factor of a bool": (lambda: chain().echo(max_factor=True), TypeError, "whole number"),
    "min_distance 1": (lambda: chain().echo(min_distance=1), ValueError, "at least 2"),
    "min_distance of a float": (lambda: chain().echo(min_distance=8.0), TypeError, "whole number"),  # type: ignore[arg-type]
    "min_distance of a bool": (lambda: chain().echo(min_distance=True), TypeError, "whole number"),
    "a huge min_distance": (lambda: chain().echo(min_distance=10**9), ValueError, "at most 65,536"),
    "min_distance of a loader's": (
        lambda: stoker.echo([0], "auto", min_distance=0), ValueError, "at least 2"
    ),
    "replay with another min_distance": (
        lambda: iter(chain().echo(min_distance=9).batch(2).replay(sound_record())),
        stoker.StateError, "another pipeline",
    ),
    "replay of a fixed factor": (
        lambda: iter(chain().echo(2).batch(2).replay(sound_record())),
        stoker.StateError, "another pipeline",
    ),
    "no record": (lambda: chain().replay({"epochs": 3}), stoker.StateError, "no record"),
    "a record of nothing yet": (
        lambda: iter(chain().echo().replay(chain().echo().record())),
        stoker.StateError, "no epoch 0; it has none",
    ),
    "no workers": (
        lambda: iter(chain().echo().batch(2).workers(0)), ValueError, r"\.workers\(0\)"
    ),
    "a pool below a batch": (lambda: chain().echo(pool=3).batch(4), ValueError, "at least 8"),
    "steps of a float": (lambda: chain().steps(2.0), TypeError, "whole number"),  # type: ignore[arg-type]
    "steps of a bool": (lambda: chain().steps(True), TypeError, "whole number"),
    "a record of fixed factors": (
        lambda: chain().echo(2).batch(2).record(), ValueError, "nothing to record"
    ),
    "a record of nothing": (lambda: chain().record(), ValueError, "nothing to record"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_in_one_line_that_says_what_to_do(case: str) -> None:
    wrong, kind, says = WRONG[case]
    with leaving_nothing(), pytest.raises(kind, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_pool_of_less_than_two_batches_warns_where_it_is_used() -> None:
    pipeline = stoker.from_dataset(Slow(20), seed=0).echo(pool=6).batch(4).workers(2)
    with pytest.warns(UserWarning, match="pool of 6.*at least 8") as caught:
        batches = [ids(batch) for batch in pipeline]
    assert [said.filename for said in caught] == [__file__]
    assert set(itertools.chain(*batches)) == set(range(20))


@pytest.mark.parametrize("point", POINTS)
def test_print_says_where_it_echoes(point: str) -> None:
    pipeline = slow(12, point, auto(pool="1MB"))
    call = f"echo(auto, max_factor={default_most(point)})"
    assert call in str(pipeline)
    assert "auto" in repr(pipeline)
    list(pipeline)
    assert call in str(pipeline.stats())


class Jittering(stoker.stages.Stage):
    """A user's stage that is random."""

    def lower(self, pipeline: Any) -> Any:
        return pipeline.map(abs).random_map(jitter)


def test_by_default_8_uses_are_the_most_only_before_augmentation() -> None:
    chain = stoker.from_arrays(np.arange(64), seed=0).shuffle()
    raised = [
        chain.echo().random_map(jitter).batch(4),
        chain.echo().batch(4).random_map(jitter),
        chain.echo().map(abs).apply(Jittering()).batch(4),
    ]
    same = [
        chain.echo(max_factor=4).random_map(jitter).batch(4),
        chain.random_map(jitter).echo().random_map(jitter).batch(4),
        chain.batch(4).echo().random_map(jitter),
        chain.echo().map(abs).batch(4),
    ]
    for most, pipelines in ((8, raised), (4, same)):
        for pipeline in pipelines:
            assert f"echo(auto, max_factor={most})" in str(pipeline)
    train = raised[0]
    batches = [batch.tolist() for batch in train]
    replayed = chain.echo().random_map(jitter).batch(4).replay(train.record())
    assert [batch.tolist() for batch in replayed] == batches
    with pytest.raises(stoker.StateError, match="belongs to another pipeline"):
        same[0].load_state_dict(train.state_dict())


# -- every fresh example, between once and max_factor times


@few(10)
@given(
    st.integers(0, 45),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from(POINTS),
    st.none() | st.integers(2, 8),
    st.sampled_from([1, 3]),
)
@example(0, 4, 4, "before", None, 2)
@example(1, 4, 4, "before", None, 2)
@example(3, 4, 4, "after", None, 2)
@example(3, 4, 4, "batch", None, 2)
@example(40, 4, 2, "device", 2, 2)
def test_every_example_is_used_at_least_once_and_at_most_max_factor_times(
    length: int, batch: int, max_factor: int, point: str, pool: int | None, workers: int
) -> None:
    group = batch if point in ("before", "after") else 1
    size = None if pool is None else pool * group
    echo = auto(max_factor=max_factor, pool=size)
    pipeline = slow(length, point, echo, batch=batch, workers=workers)
    epochs = []
    for epoch in range(2):
        assert pipeline.epoch == epoch
        batches = used(pipeline)
        epochs.append(batches)
        if epoch == 0 or point == "device":  # none of these is carried
            most = {"batch": batch, "max_factor": max_factor}
            assert_covered(batches, set(range(length)), point=point, **most)
        stats = pipeline.stats()
        assert stats.fresh_examples == length
        assert stats.uses == sum(map(len, batches))
        assert stats.batches == len(batches)
        assert stats.repeats_in_batches == 0
        assert stats.pool is not None
        assert stats.pool.held <= stats.pool.size
    if point != "device":
        longest = max(2, min(8, pool or 16))
        most = {"max_factor": max_factor, "longest": longest}
        assert_carried(pipeline, epochs, set(range(length)), point=point, **most)


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("point", POINTS)
def test_an_epoch_of_a_batch_at_most_is_used_once(point: str, length: int) -> None:
    pipeline = slow(length, point, auto())
    for _ in range(2):
        (batch,) = used(pipeline)
        assert sorted(batch) == list(range(length))


@pytest.mark.parametrize("point", one_in(2, ["before", "batch"]))
def test_processes_prepare_for_it_too(point: str) -> None:
    pipeline = slow(30, point, auto(), kind="process")
    epochs = [used(pipeline) for _ in range(3)]
    assert_covered(epochs[0], set(range(30)), point=point)
    assert_carried(pipeline, epochs, set(range(30)), point=point)
    del pipeline
    assert not children()


@pytest.mark.parametrize("point", POINTS)
def test_arrays(point: str) -> None:
    rows = np.repeat(np.arange(50)[:, None], 3, 1).astype(np.float64)
    source = stoker.from_arrays(np.arange(50), rows, seed=0).shuffle()
    pipeline = built(source, point, auto(pool=9), on=1, workers=None)
    epochs = [used(pipeline) for _ in range(2)]
    assert_covered(epochs[0], set(range(50)), point=point)
    if point == "device":
        assert_covered(epochs[1], set(range(50)), point=point)
    else:
        longest = 2 if point in ("before", "after") else 8
        assert_carried(pipeline, epochs, set(range(50)), point=point, longest=longest)


def large(batch: int) -> stoker.Pipeline:
    """A little more than four batches."""
    chain = stoker.from_arrays(np.arange(4 * batch + 7), seed=0).shuffle()
    return chain.echo().batch(batch).workers(1)


@pytest.mark.parametrize("batch", [254, 255, 511])
def test_batches_larger_than_a_byte_can_count(batch: int) -> None:
    batches = [found.tolist() for found in large(batch)]
    assert_covered(batches, set(range(4 * batch + 7)), batch=batch)


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("device", [False, True])
def test_lists_of_batches(length: int, device: bool) -> None:
    loader = list(Batches(length))
    chain = stoker.from_loader(loader, seed=0)
    pipeline = (chain.to_torch() if device else chain).echo()
    for _ in range(2):
        batches = [ids(batch) for batch in pipeline]
        assert_covered(batches, set(range(4 * length)), point="batch")
        stats = pipeline.stats()
        assert (stats.fresh_examples, stats.uses) == (4 * length, 4 * len(batches))


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loaders(workers: int) -> None:
    from torch.utils.data import DataLoader

    data: Any = Slow(30)
    loader: Any = DataLoader(data, 4, num_workers=workers)
    for pipeline in (
        stoker.from_loader(loader, seed=0).echo(),
        stoker.from_loader(loader, seed=0).to_torch().echo(pool=3).random_map(shift_on_device),
    ):
        for _ in range(2):
            with leaving_nothing():
                batches = []
                for batch in pipeline:
                    batches.append(ids(batch))
                    spoil(batch)
                assert_covered(batches, set(range(30)), point="batch")


@pytest.mark.parametrize("source", ["dataset", "iterable"])
@pytest.mark.parametrize(
    ("point", "kind"), [(p, "thread") for p in POINTS] + [("before", "process")]
)
def test_what_filters_and_skip_budgets_leave_is_covered(point: str, source: str, kind: str) -> None:
    bad = {3, 4, 17, 29}

    def fail(x: Any) -> Any:
        if x["id"] in bad:
            raise OSError(f"{x['id']} cannot be read")
        return x

    of_numbers = Stream(33)
    if source == "dataset":
        chain = stoker.from_dataset(Slow(33), seed=0, max_errors=4).shuffle()
    else:
        chain = stoker.from_iterable(of_numbers, seed=0, max_errors=4).shuffle(buffer=7)
    chain = chain.map(fail).filter(Keep(3, 0), on="id")
    expected = {i for i in range(33) if i not in bad and i % 3}
    pipeline = built(chain, point, auto(), kind=kind)
    for epoch in range(2):
        assert_covered(used(pipeline), expected, point=point)
        assert of_numbers.begun == of_numbers.ended == (epoch + 1) * (source == "iterable")
        stats = pipeline.stats()
        assert stats.skipped_examples == len(bad)
        assert stats.filtered_examples == 33 - len(bad) - len(expected)
    with pytest.raises(TypeError, match=r"\.steps\(n\)"):
        len(pipeline)


def test_a_filter_that_lets_nothing_through_leaves_an_empty_epoch() -> None:
    chain = stoker.from_dataset(Slow(20), seed=0).filter(Keep(1, 0), on="id")
    assert used(chain.echo().batch(4).workers(2)) == []


# -- how far apart


def echoed(source: stoker.Pipeline, **echo: Any) -> stoker.Pipeline:
    return source.echo("auto", **echo).batch(4).workers(2)


APART: dict[str, Callable[..., stoker.Pipeline]] = {
    **{
        point: lambda point=point, **echo: slow(200, point, auto(**echo))  # type: ignore[misc]
        for point in POINTS
    },
    "processes": lambda **echo: slow(160, "before", auto(**echo), kind="process"),
    "a stream": lambda **echo: built(
        stoker.from_iterable(Stream(160), seed=0), "before", auto(**echo)
    ),
    "a loader": lambda **echo: stoker.echo(Batches(60), "auto", seed=0, **echo),
    "a shard": lambda **echo: echoed(
        stoker.from_dataset(Slow(320), seed=0).shuffle().shard(rank=1, world_size=2), **echo
    ).steps(40),  # of 40 to 160 batches, as the factor is
    "the first of them": lambda **echo: echoed(
        stoker.from_dataset(Slow(900), seed=0).shuffle().take(160), **echo
    ),
    "a filter": lambda **echo: echoed(
        stoker.from_dataset(Slow(240), seed=0).filter(Keep(3, 0), on="id"), **echo
    ),
    "a cache": lambda **echo: echoed(  # without a version: nobody else fills it
        stoker.from_dataset(Slow(160), seed=0).cache("4MiB"), **echo
    ),
}


@pytest.mark.parametrize(("case", "min_distance"), one_in(5, itertools.product(APART, [None, 5])))
def test_copies_are_at_least_so_far_apart(case: str, min_distance: int | None) -> None:
    pipeline = APART[case](min_distance=min_distance)
    whole = case in ("batch", "device", "a loader")
    for epoch in range(2):
        batches, firsts = [], []
        for batch in pipeline:
            batches.append(ids(batch))
            firsts.append((pipeline.last.number == 1).tolist())
        assert_apart(batches, min_distance or 8, whole=whole, firsts=firsts)
        stats = pipeline.stats()
        assert stats.uses == sum(map(len, batches))
        if epoch == 0 or case != "a cache":
            assert stats.realised_factor > 1  # it is slower than this loop


@pytest.mark.parametrize("batches", [2, 3, 5])
@pytest.mark.parametrize("point", ["before", "batch"])
def test_a_small_pool_asks_for_no_more_than_it_can_hold(point: str, batches: int) -> None:
    group = 4 if point == "before" else 1
    pipeline = slow(160, point, auto(pool=batches * group))
    found = used(pipeline)
    assert_covered(found, set(range(160)), point=point)
    assert_apart(found, batches, whole=point == "batch")
    assert pipeline.stats().realised_factor > 1.5


# -- from epoch to epoch


def epochs_of(pipeline: stoker.Pipeline, count: int) -> tuple[list[list[Any]], list[Any]]:
    """Run epochs; return their batches, bit for bit, and the states before each of them."""
    found: list[list[Any]] = []
    states: list[Any] = []
    for _ in range(count):
        states.append([through_json(pipeline.state_dict())])
        found.append([])
        for batch in pipeline:
            found[-1].append(frozen(batch))
            states[-1].append(through_json(pipeline.state_dict()))
    return found, states


def carried(source: stoker.Pipeline, point: str = "before") -> stoker.Pipeline:
    return built(source, point, auto(), workers=None)


CARRIED: dict[str, Callable[[], stoker.Pipeline]] = {
    "before": lambda: slow(36, "before", auto()),
    "after": lambda: slow(38, "after", auto()),
    "batch": lambda: slow(26, "batch", auto()),
    "processes": lambda: slow(30, "before", auto(), kind="process"),
    "processes behind batches": lambda: slow(30, "batch", auto(), kind="process"),
    "drop_last": lambda: (
        stoker.from_dataset(Slow(35), seed=0)
        .shuffle()
        .echo("auto")
        .random_map(jitter, on="x")
        .batch(4, drop_last=True)
    ),
    "batches, drop_last": lambda: (
        stoker.from_dataset(Slow(35), seed=0)
        .shuffle()
        .random_map(jitter, on="x")
        .batch(4, drop_last=True)
        .echo("auto")
    ),
    "a shard": lambda: carried(
        stoker.from_dataset(Slow(90), seed=0)
        .shard(rank=1, world_size=3, remainder="uneven")
        .shuffle()
    ).steps(9),
    "steps": lambda: slow(90, "before", auto()).steps(11),
    "steps of batches": lambda: slow(50, "batch", auto()).steps(7),
    "the first of them": lambda: carried(stoker.from_dataset(Slow(300), seed=0).shuffle().take(20)),
    "a cache": lambda: carried(
        stoker.from_dataset(Slow(36), seed=0).shuffle().cache("4MiB", version="carried"), "after"
    ),
    "arrays": lambda: stoker.from_arrays(np.arange(60), seed=0).shuffle().batch(4).echo("auto"),
    "to a device": lambda: slow(40, "before", auto()).to_torch().random_map(shift_on_device),
    "processes to a device": lambda: (
        slow(26, "batch", auto(), kind="process").to_torch().random_map(shift_on_device)
    ),
}


@pytest.mark.parametrize("case", shortened(CARRIED, 1))
def test_resumed_anywhere_the_stream_goes_on_over_the_ends_of_epochs(case: str) -> None:
    pipeline = CARRIED[case]()
    found, states = epochs_of(pipeline, 3)
    record = through_json(pipeline.record())
    carried = ["carried" in epoch for epoch in record["echo"]["epochs"].values()]
    assert carried == [False, True, True]
    again = CARRIED[case]().replay(record)
    assert epochs_of(again, 3)[0] == found
    assert through_json(again.record()) == record
    for epoch, saved in enumerate(states):
        for yielded in {0, 1, 2, len(saved) // 2, len(saved) - 2, len(saved) - 1}:
            restored = CARRIED[case]().replay(record)
            restored.load_state_dict(saved[yielded])
            assert restored.state_dict() == saved[yielded]
            if restored.epoch == epoch:
                assert stream(restored) == found[epoch][yielded:]
            else:  # .steps() tell that this was the last one
                assert yielded == len(saved) - 1
            if epoch < 2:
                assert stream(restored) == found[epoch + 1]


def test_a_pool_is_taken_up_where_it_was_so_nothing_is_waited_for() -> None:
    pipeline = slow(120, "before", auto())
    first = used(pipeline)
    second = used(pipeline)
    assert_carried(pipeline, [first, second], set(range(120)))
    assert fresh_counts(pipeline, 0)[0] == 4  # nothing is there yet, so all of it is waited for
    assert any(fresh_counts(pipeline, 1)[step] < 4 for step in range(2))


@stoker.thread_safe  # one for all threads: it counts
class Counted(Slow):
    """Counts what is read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.reads: Counter[int] = Counter()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("point", ["before", "after", "batch"])
def test_what_is_carried_is_read_again_only_after_a_resume(point: str) -> None:
    data = Counted(40)
    pipeline = built(stoker.from_dataset(data, seed=0).shuffle(), point, auto())
    for epoch in range(1, 4):
        list(pipeline)
        assert data.reads == dict.fromkeys(range(40), epoch)
    state = through_json(pipeline.state_dict())
    data.reads.clear()
    pipeline.load_state_dict(state)
    list(pipeline)
    again = data.reads.total() - 40
    pool = pipeline.stats().pool
    assert pool is not None
    assert 0 < again <= pool.size * (4 if point == "batch" else 1)


@stoker.thread_safe
class FailsOnCarried:
    """Two maps: the second raises on what has not come through the first since ``begin``."""

    def __init__(self) -> None:
        self.came: set[int] | None = None

    def begin(self) -> None:
        self.came = set()

    def note(self, example: Any) -> Any:
        if self.came is not None:
            self.came.update(np.atleast_1d(example["id"]).tolist())
        return example

    def use(self, example: Any, rng: np.random.Generator) -> Any:
        used = np.atleast_1d(example["id"]).tolist()
        if self.came is not None and not self.came.issuperset(used):
            raise ValueError(f"used {used}")
        return example


@pytest.mark.parametrize("point", ["before", "batch"])
def test_an_error_on_what_is_carried_names_it(point: str) -> None:
    fails = FailsOnCarried()
    source = stoker.from_dataset(Slow(40), seed=0).shuffle()
    if point == "before":
        pipeline = source.map(fails.note).echo("auto").random_map(fails.use).batch(4)
    else:
        pipeline = source.batch(4).map(fails.note).echo("auto").random_map(fails.use)

    def train() -> None:
        for _ in range(50):
            fails.came = None
            list(pipeline)
            fails.begin()
            list(pipeline)

    with pytest.raises(stoker.StageError) as caught:
        train()
    error = caught.value
    if point == "before":
        assert str(error.__cause__) == f"used [{error.index}]"
    else:
        assert error.batch is not None
        assert -10 <= error.batch < 0
        assert "of an earlier epoch" in str(error)


def test_what_is_left_or_gone_to_begins_with_an_empty_pool() -> None:
    def build(**echo: Any) -> stoker.Pipeline:
        return slow(40, "before", auto(**echo))

    pipeline = build()
    list(pipeline)
    pipeline.set_epoch(1)  # as trainers do: it is the next one anyway
    next(iter(pipeline))
    assert "carried" in pipeline.record()["echo"]["epochs"]["1"]
    assert ids(next(iter(pipeline)))  # it was left
    assert "carried" not in pipeline.record()["echo"]["epochs"]["2"]
    list(pipeline)
    pipeline.set_epoch(7)
    list(pipeline)
    assert "carried" not in pipeline.record()["echo"]["epochs"]["7"]


def test_an_iterator_that_gives_nothing_leaves_the_pool_as_it_was() -> None:
    pipeline = slow(40, "before", auto())
    found = [stream(pipeline)]
    before = through_json(pipeline.state_dict())
    iter(pipeline).close()
    assert through_json(pipeline.state_dict()) == before
    found.append(stream(pipeline))
    again = slow(40, "before", auto()).replay(through_json(pipeline.record()))
    assert [stream(again), stream(again)] == found


def test_a_record_of_a_carried_pool_that_is_damaged_is_refused() -> None:
    pipeline = slow(40, "before", auto())
    list(pipeline)
    list(pipeline)
    record = through_json(pipeline.record())
    record["echo"]["epochs"]["1"]["carried"]["first"] = -(10**6)
    again = slow(40, "before", auto()).replay(record)
    list(again)
    with pytest.raises(stoker.StateError, match="the record is damaged"):
        list(again)


# -- while nothing fresh comes


def stalled(pipeline: stoker.Pipeline, *gates: Gate) -> list[list[int]]:
    """Run an epoch; while nothing fresh comes any more, take twelve batches of sixteen."""
    pipeline._cursor._autotuner.settle(2)  # so that two gates hold two, however busy the machine is
    with iter(pipeline) as iterator:
        batches = [ids(next(iterator)) for _ in range(4)]
        wait_until(lambda: all(gate.reached.is_set() for gate in gates))
        batches += [ids(next(iterator)) for _ in range(12)]
        for gate in gates:
            gate.opened.set()
        collect(iterator, batches)
    assert all(gate.in_time for gate in gates)
    return batches


@pytest.mark.parametrize("point", POINTS)
def test_while_a_stream_gives_nothing_the_consumer_goes_on(point: str) -> None:
    source = Stream(60, held=32)
    pipeline = built(stoker.from_iterable(source, seed=0), point, auto())
    batches = stalled(pipeline, source.gate)  # eight batches may be used four times
    assert max(itertools.chain(*batches[:16])) < 32
    assert_covered(batches, set(range(60)), point=point)


@pytest.mark.parametrize("held", [(64,), (64, 65)])  # a worker is left, or none
@pytest.mark.parametrize("point", POINTS)
def test_while_a_data_set_gives_nothing_the_consumer_goes_on(
    point: str, held: tuple[int, ...]
) -> None:
    data = Held(88, *held)
    pipeline = built(stoker.from_dataset(data, seed=0), point, auto(), batch=8)
    batches = stalled(pipeline, *data.gates.values())
    assert max(itertools.chain(*batches[:16])) < 64
    assert_covered(batches, set(range(88)), point=point, batch=8)


@pytest.mark.parametrize("device", [False, True])
def test_while_a_loader_gives_nothing_the_consumer_goes_on(device: bool) -> None:
    loader = Batches(16, held=8)
    chain = stoker.from_loader(loader, seed=0)
    chain = chain.to_torch() if device else chain
    pipeline = chain.echo().random_map(shift_on_device if device else scale_batch)
    batches = stalled(pipeline, loader.gate)
    assert max(itertools.chain(*batches[:16])) < 32
    assert_covered(batches, set(range(64)), point="batch")


def test_no_example_is_used_more_often_than_it_may_though_nothing_comes() -> None:
    source = Stream(16, held=8)
    pipeline = stoker.from_iterable(source, seed=0).echo(max_factor=3).batch(4).workers(2)
    with iter(pipeline) as iterator:
        opened = threading.Timer(0.3, source.gate.opened.set)
        opened.start()
        batches = [ids(batch) for batch in iterator]
        opened.join()
    assert_covered(batches, set(range(16)), max_factor=3)
    early = list(itertools.takewhile(lambda numbers: max(numbers) < 8, batches))
    assert len(early) <= 6


# -- on record


def live(
    length: int, point: str, epochs: int, **options: Any
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Run some epochs; return what came, bit for bit, and the record after a trip through JSON."""
    pipeline = slow(length, point, auto(max_factor=3, pool=options.pop("pool", None)), **options)
    found = [stream(pipeline) for _ in range(epochs)]
    return found, through_json(pipeline.record())


@pytest.mark.parametrize("point", one_in(3, POINTS))
def test_a_record_repeats_epochs_bit_for_bit(point: str) -> None:
    found, record = live(24, point, 3)
    assert len({str(epoch) for epoch in found}) == 3
    process = [(2, "process")] if point in ("before", "batch") else []
    for workers, kind in ((1, "thread"), (3, "thread"), *process):
        again = slow(24, point, auto(max_factor=3), workers=workers, kind=kind).replay(record)
        assert [stream(again) for _ in range(3)] == found
        assert through_json(again.record()) == record
        with pytest.raises(stoker.StateError, match=r"no epoch 3; it has 0, 1, 2") as caught:
            list(again)
        assert "\n" not in str(caught.value)
    again = slow(24, point, auto(max_factor=3)).replay(record)
    again.set_epoch(2)
    assert stream(again) == found[2]


@few(6)
@given(
    st.integers(0, 50),
    st.integers(1, 6),
    st.sampled_from(POINTS),
    st.none() | st.integers(2, 6),
    st.booleans(),
)
def test_a_record_repeats_any_epoch(
    length: int, batch: int, point: str, pool: int | None, process: bool
) -> None:
    group = batch if point in ("before", "after") else 1
    size = None if pool is None else pool * group
    found, record = live(length, point, 1, batch=batch, pool=size, workers=3)
    kind = "process" if process else "thread"
    again = slow(length, point, auto(max_factor=3), batch=batch, workers=1, kind=kind).replay(
        record
    )
    assert [stream(again)] == found


RECORDED: dict[str, Callable[[], stoker.Pipeline]] = {
    "loader": lambda: stoker.from_loader(Batches(12), seed=0).echo().random_map(scale_batch),
    "device": lambda: stoker.from_loader(Batches(12), seed=0).to_torch().echo(),
    "arrays": lambda: stoker.from_arrays(np.arange(90), seed=0).shuffle().echo().batch(4),
    "stream": lambda: built(
        stoker.from_iterable(Stream(40), seed=0).shuffle(buffer=9), "before", auto()
    ),
    "sieve": lambda: built(
        stoker.from_dataset(Slow(60), seed=0).shuffle().filter(Keep(3, 0), on="id"),
        "before",
        auto(),
        workers=None,
    ),
    "a distance": lambda: slow(80, "before", auto(min_distance=3)),
    "a drawn seed": lambda: built(stoker.from_dataset(Slow(30)).shuffle(), "before", auto()),
}


@pytest.mark.parametrize("case", RECORDED)
def test_a_record_repeats_every_source(case: str) -> None:
    pipeline = RECORDED[case]()
    found = [stream(pipeline) for _ in range(2)]
    again = RECORDED[case]().replay(through_json(pipeline.record()))
    assert again.seed == pipeline.seed
    assert [stream(again) for _ in range(2)] == found


def test_the_record_grows_while_an_epoch_runs_and_is_compact() -> None:
    pipeline = stoker.from_dataset(Slow(10), seed=0).echo(pool=2).workers(1)
    with small_pools_allowed():
        assert json.loads(json.dumps(pipeline.record())) == pipeline.record()
        list(pipeline)
        before = len(json.dumps(pipeline.record()))
        pipeline.set_epoch(0)
    long = stoker.from_arrays(np.arange(3000), seed=0).echo().workers(1)
    steps = sum(1 for _ in long)
    assert len(json.dumps(long.record())) <= 2 * steps + 300
    assert before < 500


@stoker.thread_safe
def lingering(x: Any, rng: np.random.Generator) -> Any:
    """Jitter, taking a while: what is planned ahead is planned before this is done."""
    time.sleep(0.002)
    return jitter(x, rng)


@pytest.mark.parametrize("point", [*POINTS, "lingering"])
def test_a_record_of_an_epoch_that_was_left_ends_with_an_error_that_says_so(point: str) -> None:
    def build() -> stoker.Pipeline:
        if point != "lingering":
            return slow(80, point, auto(), workers=3)
        chain = stoker.from_dataset(Slow(80), seed=0).echo()
        return chain.random_map(lingering, on="x").batch(4).workers(3)

    pipeline = build()
    found = []
    with iter(pipeline) as iterator:
        for _ in range(5):
            found.append(frozen(next(iterator)))
        during = through_json(pipeline.record())
    after = through_json(pipeline.record())
    for record in (during, after):
        echo = decode(record, None).echo
        assert echo is not None
        decided = len(echo.epochs[0].codes)
        assert decided >= 5
        rest: list[list[int]] = []
        with leaving_nothing():
            again = iter(build().replay(record))
            assert [frozen(next(again)) for _ in range(5)] == found
            says = rf"ends at batch {decided}, .*without .replay"
            with pytest.raises(stoker.StateError, match=says) as caught:
                collect(again, rest)
            assert "\n" not in str(caught.value)
            assert next(again, None) is None
            del caught
        assert len(rest) == decided - 5  # all that is on record


THREE = auto(max_factor=3)
OTHERS: dict[str, tuple[Any, str]] = {
    "batch size": (lambda: slow(30, "before", THREE, batch=5), "another pipeline|not 5"),
    "length": (lambda: slow(31, "before", THREE), "another pipeline"),
    "place": (lambda: slow(30, "after", THREE), "another pipeline"),
    "order": (
        lambda: built(stoker.from_dataset(Slow(30), seed=0), "before", THREE),
        "another pipeline",
    ),
    "seed": (
        lambda: built(stoker.from_dataset(Slow(30), seed=1).shuffle(), "before", THREE),
        "its seed is 0, this pipeline's is 1",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_record_of_another_run_is_refused(what: str) -> None:
    build, says = OTHERS[what]
    _, record = live(30, "before", 1)
    with leaving_nothing():
        pipeline = build().replay(record)
        with pytest.raises(stoker.StateError, match=says) as caught:
            list(pipeline)
        assert "\n" not in str(caught.value)
        del caught


# -- states


SAVED: dict[str, Callable[[], stoker.Pipeline]] = {
    **{
        point: lambda point=point: slow(18, point, auto(pool=16))  # type: ignore[misc]
        for point in POINTS
    },
    "steps": lambda: slow(60, "before", auto()).steps(8),
    "behind a filter": lambda: built(
        stoker.from_dataset(Slow(45), seed=3).shuffle().filter(Keep(3, 1), on="id"),
        "before",
        auto(),
    ),
    **{
        f"batches of {size}": lambda size=size: large(size)  # type: ignore[misc]
        for size in (254, 255, 511)
    },
}


@pytest.mark.parametrize("case", SAVED)
def test_saved_before_every_batch_the_tail_is_the_same_with_the_record(case: str) -> None:
    with small_pools_allowed():
        pipeline = SAVED[case]()
        (whole, following), (states, _) = epochs_of(pipeline, 2)
        record = through_json(pipeline.record())
        every = 5 if case == "behind a filter" else 1
        for yielded in (*range(0, len(whole), every), len(whole)):
            restored = SAVED[case]().workers(1 + yielded % 2).replay(record)
            restored.load_state_dict(states[yielded])
            assert restored.state_dict() == states[yielded]
            if restored.epoch == 0:
                iterator = iter(restored)
                assert case != "steps" or len(iterator) == 8 - yielded
                assert [frozen(batch) for batch in iterator] == whole[yielded:]
            else:  # .steps() tell that this was the last one
                assert (case, yielded) == ("steps", len(whole))
            assert restored.epoch == 1
        assert stream(restored) == following


@pytest.mark.parametrize("point", ["before", "device"])
def test_the_check_that_users_can_run_passes_a_replay(point: str) -> None:
    ((found,), record) = live(16, point, 1)
    checked = testing.check_resume(lambda: slow(16, point, auto(max_factor=3)).replay(record))
    assert checked == len(found)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("sieve", [False, True])
def test_restored_without_a_record_it_goes_on_and_covers_every_example(
    point: str, sieve: bool
) -> None:
    def build(**options: Any) -> stoker.Pipeline:
        chain = stoker.from_dataset(Slow(24), seed=0).shuffle()
        chain = chain.filter(Keep(5, 2), on="id") if sieve else chain
        return built(chain, point, auto(**options))

    expected = {i for i in range(24) if not sieve or i % 5 != 2}
    pipeline = build(pool=8)
    taken, states = [], []
    with small_pools_allowed():
        for batch in pipeline:
            taken.append(ids(batch))
            states.append(through_json(pipeline.state_dict()))
    for yielded in range(1, len(taken) + 1, 5):
        restored = build(pool=8)
        restored.load_state_dict(states[yielded - 1])
        tail = used(restored)
        assert_covered(taken[:yielded] + tail, expected, point=point)
        # What was decided there, with the state it went on from, repeats the tail.
        again = build().replay(through_json(restored.record()))
        again.load_state_dict(states[yielded - 1])
        assert used(again) == tail


def test_a_run_that_went_on_from_a_state_has_one_record_of_the_whole_epoch() -> None:
    pipeline = slow(60, "before", auto())
    found = []
    with iter(pipeline) as iterator:
        for _ in range(6):
            found.append(frozen(next(iterator)))
        state = through_json(pipeline.state_dict())
    pipeline.load_state_dict(state)
    found += stream(pipeline)
    assert stream(slow(60, "before", auto()).replay(through_json(pipeline.record()))) == found


def test_a_record_from_the_middle_is_refused_at_the_beginning() -> None:
    first = slow(600, "before", auto(pool=16), batch=2)
    with iter(first) as iterator:
        for _ in range(70):  # behind the first moment that states go back to
            next(iterator)
        state = through_json(first.state_dict())
    second = slow(600, "before", auto(pool=16), batch=2)
    second.load_state_dict(state)
    with iter(second) as iterator:
        next(iterator)
        record = through_json(second.record())
    again = slow(600, "before", auto(), batch=2).replay(record)
    with pytest.raises(stoker.StateError, match=r"begins at batch 64.*load the state") as caught:
        list(again)
    assert "\n" not in str(caught.value)
    again.load_state_dict(state)
    next(iter(again))


def test_there_is_no_state_in_the_middle_of_a_stream_or_a_list_of_batches() -> None:
    for chain in (
        built(stoker.from_iterable(Stream(30), seed=0), "before", auto()),
        stoker.from_loader(list(Batches(9)), seed=0).echo(),
    ):
        with iter(chain) as iterator:
            next(iterator)
            with pytest.raises(stoker.StateError, match="between epochs"):
                chain.state_dict()
            list(iterator)
        state = through_json(chain.state_dict())
        chain.load_state_dict(state)
        assert chain.epoch == 1


# -- lengths and steps


def test_its_length_is_not_known_and_says_why() -> None:
    for point in POINTS:
        pipeline = slow(20, point, auto())
        with pytest.raises(TypeError, match=r'under \.echo\("auto"\).*\.steps\(n\)') as caught:
            len(pipeline)
        assert "\n" not in str(caught.value)
        assert bool(pipeline)
        with iter(pipeline) as iterator, pytest.raises(TypeError, match="not known"):
            len(iterator)
    with pytest.raises(TypeError, match=r"\.steps\(n\)"):
        len(stoker.from_loader(Batches(4)).echo())


@pytest.mark.parametrize("point", POINTS)
def test_steps_end_an_epoch_and_the_next_is_the_next(point: str) -> None:
    group = 4 if point in ("before", "after") else 1
    pipeline = slow(40, point, auto(pool=16 * group)).steps(7)
    assert len(pipeline) == 7
    orders = []
    for epoch in range(3):
        assert pipeline.epoch == epoch
        with iter(pipeline) as iterator:
            batches = []
            for number in range(7):
                assert len(iterator) == 7 - number
                batches.append(ids(next(iterator)))
            assert len(iterator) == 0
            assert next(iterator, None) is None
        assert pipeline.epoch == epoch + 1
        assert pipeline.stats().batches == 7
        orders.append(tuple(map(tuple, batches)))
    assert len(set(orders)) == 3


def test_steps_are_kept_by_what_is_built_on() -> None:
    chain = stoker.from_dataset(Examples(40), seed=0).echo().steps(9)
    assert len(chain.batch(4).workers(2)) == 9


def test_where_an_epoch_has_fewer_steps_a_warning_says_so() -> None:
    # There are six at most, and three of what was carried.
    pipeline = slow(12, "before", auto(max_factor=2)).steps(10)
    epochs = []
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"of the 10 batches.*no more fresh") as caught:
            epochs.append([ids(batch) for batch in pipeline])
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "\n" not in str(caught[0].message)
    assert_covered(epochs[0], set(range(12)), max_factor=2)
    assert_carried(pipeline, epochs, set(range(12)), max_factor=2)


def test_steps_of_what_has_a_length_shorten_it_and_warn_where_it_is_shorter() -> None:
    chain = stoker.from_dataset(Examples(40), seed=0).echo(2).batch(4)
    assert (len(chain), len(chain.steps(6)), len(chain.steps(99))) == (20, 6, 20)
    whole = stream(chain)
    assert stream(chain.steps(6)) == whole[:6]
    assert stream(chain.steps(20)) == whole
    short = chain.steps(99)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"after 20 of the 99 batches.*no more fresh"
        ) as caught:
            assert len([frozen(batch) for batch in short]) == 20
        assert [said.filename for said in caught] == [__file__]


@pytest.mark.parametrize("remainder", ["drop", "uneven"])
@pytest.mark.parametrize("factor", [1, 2])
def test_parts_of_known_length_end_alike_and_warn_of_too_many_steps(
    factor: int, remainder: Any
) -> None:
    parts = [
        stoker.from_dataset(Examples(40), seed=0)
        .shard(rank=rank, world_size=2, remainder=remainder)
        .echo(factor)
        .batch(4)
        .steps(99)
        for rank in range(2)
    ]
    for part in parts:
        with pytest.warns(UserWarning, match=f"after {5 * factor} of the 99 batches"):
            assert len(list(part)) == 5 * factor
    filtered = stoker.from_dataset(Examples(40), seed=0).shard(
        rank=0, world_size=2, remainder=remainder
    )
    with pytest.raises(stoker.StokerError, match="the others go on"):
        list(filtered.filter(stoker.thread_safe(lambda e: True)).echo(factor).batch(4).steps(99))


def test_steps_give_an_endless_stream_epochs() -> None:
    def endless() -> Iterator[int]:
        yield from itertools.count()

    pipeline = stoker.from_iterable(endless, seed=0).shuffle(buffer=5).echo().batch(4)
    pipeline = pipeline.workers(2).steps(30)
    assert len(pipeline) == 30
    for epoch in range(2):
        assert pipeline.epoch == epoch
        with leaving_nothing():
            assert len(list(pipeline)) == 30


# -- clocks


@pytest.mark.parametrize("point", ["before", "after"])
def test_progress_counts_fresh_examples_and_goes_on_over_epochs(point: str) -> None:
    pipeline = slow(40, point, auto())
    assert (pipeline.progress, pipeline.counts) == (0.0, stoker.types.Counts())
    times, uses, steps = [0.0], 0, 0
    for epoch in range(3):
        seen: set[int] = set()
        for number, batch in enumerate(pipeline):
            fresh = fresh_counts(pipeline, epoch)[number]  # they stand first; copies may be older
            assert not seen & set(ids(batch)[:fresh])
            seen |= set(ids(batch)[:fresh])
            uses += len(ids(batch))
            steps += 1
            assert pipeline.epoch == epoch
            assert pipeline.progress == pytest.approx(len(seen) / 40)
            assert pipeline.counts == stoker.types.Counts(40 * epoch + len(seen), uses, steps)
            times.append(pipeline.epoch + pipeline.progress)
        assert times[-1] == epoch + 1
        assert (pipeline.epoch, pipeline.progress) == (epoch + 1, 0.0)
        assert pipeline.counts == stoker.types.Counts(40 * (epoch + 1), uses, steps)
        times.append(pipeline.epoch + pipeline.progress)
    assert times == sorted(times)


@pytest.mark.parametrize("device", [False, True])
def test_clocks_over_a_loader(device: bool) -> None:
    chain = stoker.from_loader(Batches(8), seed=0)
    pipeline = (chain.to_torch() if device else chain).echo()
    for epoch in range(2):
        seen: set[int] = set()
        for batch in pipeline:
            seen |= set(ids(batch))
            assert pipeline.progress >= len(seen) / 32 - 1e-9
            assert device or pipeline.progress == pytest.approx(len(seen) / 32)
            assert pipeline.counts.fresh_examples >= 32 * epoch + len(seen)
        assert pipeline.counts.fresh_examples == 32 * (epoch + 1)


def test_progress_of_what_has_no_length_counts_steps_or_says_why_not() -> None:
    chain = built(stoker.from_iterable(Stream(40), seed=0), "before", auto())
    with pytest.raises(TypeError, match=r"\.steps\(n\)") as caught:
        chain.progress  # noqa: B018
    assert "\n" not in str(caught.value)
    with iter(chain) as iterator:
        next(iterator)
        assert chain.counts.steps == 1
        with pytest.raises(TypeError, match=r"\.steps\(n\)"):
            chain.progress  # noqa: B018
    chain = chain.steps(5)
    assert [chain.progress for _ in chain] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_under_steps_progress_ends_with_the_epoch() -> None:
    pipeline = slow(80, "before", auto()).steps(5)
    for epoch in range(2):
        seen = [pipeline.progress for _ in pipeline]
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        assert all(at >= (number + 1) / 5 - 1e-9 for number, at in enumerate(seen))
        assert (pipeline.epoch, pipeline.progress) == (epoch + 1, 0.0)


@pytest.mark.parametrize("point", POINTS)
def test_clocks_survive_a_state(point: str) -> None:
    pipeline = slow(24, point, auto(pool=8))
    with small_pools_allowed():
        list(pipeline)
        for number, _ in enumerate(pipeline):
            if number % 2 == 0:
                restored = slow(24, point, auto(pool=8))
                restored.load_state_dict(through_json(pipeline.state_dict()))
                assert restored.counts == pipeline.counts
                assert restored.progress == pipeline.progress
                assert restored.epoch == pipeline.epoch
                before = restored.counts
                list(restored)
                assert restored.counts.fresh_examples == 48
                assert restored.counts.uses >= before.uses
                assert restored.counts.steps >= before.steps
        restored = slow(24, point, auto(pool=8))
        restored.load_state_dict(through_json(pipeline.state_dict()))
    assert restored.counts == pipeline.counts
    assert (restored.epoch, restored.progress) == (2, 0.0)


def test_an_epoch_that_was_left_early_counts_for_what_it_gave() -> None:
    pipeline = slow(40, "before", auto())
    for number, _ in enumerate(pipeline):
        if number == 3:
            break
    left_at = pipeline.counts
    assert left_at.steps == 4
    assert pipeline.progress == left_at.fresh_examples / 40
    next(iter(pipeline))
    assert pipeline.epoch == 1
    assert pipeline.counts.steps == 5
    assert pipeline.counts.uses == left_at.uses + 4
    pipeline.set_epoch(7)
    assert (pipeline.epoch, pipeline.progress) == (7, 0.0)
    assert pipeline.counts.steps == 5


# -- whose batches they are


def test_a_loader_that_fills_one_array_anew_is_echoed_right() -> None:
    class Reusing:
        def __iter__(self) -> Any:
            array = np.zeros(3)
            for n in range(20):
                array.fill(n)
                yield array

    found = []
    for batch in stoker.from_loader(Reusing(), seed=0).echo():
        assert len(set(batch.tolist())) == 1
        found.append([int(batch[0])])
        batch.fill(-99)
    assert_covered(found, set(range(20)), point="batch", batch=1)


@pytest.mark.parametrize("point", ["before", "after"])
def test_each_use_is_augmented_anew_behind_the_echo_and_once_before_it(point: str) -> None:
    source = Stream(40, held=20)
    pipeline = built(stoker.from_iterable(source, seed=0), point, auto())
    views: dict[int, set[bytes]] = {}
    uses: Counter[int] = Counter()
    for number, batch in enumerate(pipeline):
        if number == 8:  # so that something surely was used again
            source.gate.opened.set()
        for i, row in zip(ids(batch), batch["x"], strict=True):
            views.setdefault(i, set()).add(row.tobytes())
            uses[i] += 1
    assert max(uses.values()) > 1
    for i, count in uses.items():
        assert len(views[i]) == (count if point == "before" else 1)


# -- life and death

SOURCES: dict[str, Callable[[], stoker.Pipeline]] = {
    "dataset": lambda: stoker.from_dataset(Slow(10**6), seed=0).shuffle().echo().batch(4),
    "process": lambda: (
        stoker.from_dataset(Slow(10**6), seed=0).echo().batch(4).workers(2, kind="process")
    ),
    "behind a batch": lambda: stoker.from_dataset(Slow(10**6), seed=0).batch(4).to_torch().echo(),
    "filtered": lambda: (
        stoker.from_dataset(Slow(10**6), seed=0).filter(Keep(2, 0), on="id").echo().batch(4)
    ),
    "stream": lambda: stoker.from_iterable(Stream(10**6), seed=0).echo().batch(4).workers(2),
    "loader": lambda: stoker.from_loader(Batches(10**6), seed=0).echo(),
    "loader on a device": lambda: stoker.from_loader(Batches(10**6), seed=0).to_torch().echo(),
}


@pytest.mark.parametrize("how", ["break", "error", "dropped", "never asked"])
@pytest.mark.parametrize("source", SOURCES)
def test_leaving_leaves_no_thread(source: str, how: str) -> None:
    pipeline = SOURCES[source]()
    with leaving_nothing():
        if how == "break":
            for number, _ in enumerate(pipeline):
                if number == 5:
                    break
        elif how == "never asked":
            iterator = iter(pipeline)
            iterator.close()
            assert next(iterator, None) is None
        elif how == "error":
            with contextlib.suppress(KeyError), iter(pipeline) as iterator:
                next(iterator)
                raise KeyError
        else:
            iterator = iter(pipeline)
            next(iterator)
            del iterator


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize("where", ["before", "behind", "dataset"])
def test_an_exception_in_fn_is_raised_and_leaves_nothing(
    where: str, workers: int, kind: str
) -> None:
    def fail(x: Any) -> Any:
        if x["id"] == 17:
            raise ArithmeticError("no good")
        return x

    data = Faulty(40, {17}) if where == "dataset" else Slow(40)
    chain = stoker.from_dataset(data, seed=0)
    chain = chain.map(fail).echo() if where == "before" else chain.echo()
    chain = chain.map(fail) if where == "behind" else chain
    found: list[list[int]] = []
    with leaving_nothing():
        iterator = iter(chain.batch(4).workers(workers, kind=kind))
        with pytest.raises(stoker.StageError, match="on example 17") as caught:
            collect(iterator, found)
        iterator.close()
        error = caught.value
        assert error.index == 17
        assert type(error.__cause__) is (OSError if where == "dataset" else ArithmeticError)
        del caught, error
    seen = set(itertools.chain(*found))  # without what stood in one batch with it
    assert set(range(14)) <= seen <= set(range(17))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("length", [0, 5, 30])
def test_what_a_stream_raises_arrives_once_behind_what_it_gave(point: str, length: int) -> None:
    source = Stream(length, fails=OSError("the line is dead"))
    found: list[list[int]] = []
    with leaving_nothing():
        iterator = iter(built(stoker.from_iterable(source, seed=0), point, auto()))
        with pytest.raises(stoker.StageError, match="the line is dead") as caught:
            collect(iterator, found)
        assert next(iterator, None) is None
        assert type(caught.value.__cause__) is OSError
        assert f"example {length} of the stream" in str(caught.value)
        del caught
    # Without what stood in one batch with it.
    assert set(itertools.chain(*found)) >= set(range(length - 3))
    assert source.begun == source.ended == 1


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("fails", [(3,), (0,), (11,), (2, 3, 7)])
def test_what_a_loader_raises_arrives_once_and_it_goes_on(
    fails: tuple[int, ...], device: bool
) -> None:
    chain = stoker.from_loader(Batches(12, fails=fails), seed=0)
    raised, found = [], []
    with leaving_nothing():
        iterator = iter((chain.to_torch() if device else chain).echo())
        while True:
            try:
                found.append(ids(next(iterator)))
            except StopIteration:
                break
            except ArithmeticError as error:
                raised.append(str(error))
    assert raised == [f"batch {n}" for n in fails]
    expected = {i for i in range(48) if i // 4 not in fails}
    assert_covered(found, expected, point="batch")


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_a_budget_that_is_spent_is_told_once(workers: int, kind: str) -> None:
    data = Faulty(60, {5, 21, 40})
    pipeline = stoker.from_dataset(data, seed=0, max_errors=2).echo().batch(4)
    found: list[list[int]] = []
    with leaving_nothing():
        iterator = iter(pipeline.workers(workers, kind=kind))
        with pytest.raises(stoker.TooManyErrors, match="max_errors= allows 2") as caught:
            collect(iterator, found)
        assert next(iterator, None) is None
        assert [skip.index for skip in caught.value.skips] == [5, 21, 40]
        del caught
    assert set(itertools.chain(*found)) <= set(range(40)) - {5, 21}


def test_closing_does_not_wait_long_for_a_loader_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "_JOIN_S", 0.2)  # it is a few seconds
    loader = Batches(16, held=4)
    before = threads()
    iterator = iter(stoker.from_loader(loader, seed=0).to_torch().echo())
    found = [ids(next(iterator)) for _ in range(4)]
    assert loader.gate.reached.wait(PATIENCE_S)
    found += [ids(next(iterator)) for _ in range(4)]
    assert max(itertools.chain(*found)) < 16
    began = time.monotonic()
    iterator.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert next(iterator, None) is None
    loader.gate.opened.set()  # and what it hung in is gone as soon as it may
    wait_until(lambda: threads() == before)
    assert loader.gate.in_time


def test_many_short_epochs_leave_nothing_and_lose_nothing() -> None:
    pipeline = stoker.from_iterable(Stream(9), seed=0).echo().batch(4).workers(2)
    with leaving_nothing():
        for _ in range(15):
            assert {i for batch in pipeline for i in ids(batch)} == set(range(9))
