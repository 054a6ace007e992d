"""Streams with a state of their own that are left early: as if nothing had been read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from strategies import BeginsAnew, CountingStream, GoesOn, few, one_in, through_json


class BeginsThere(BeginsAnew):
    """Begins every pass at what was loaded last."""

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin, self.length):
            self.at = number + 1
            yield number


class CountsPasses(BeginsAnew):
    """Has other numbers in each pass, which it counts itself."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield 1000 * self.passes + number
        self.passes += 1

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.passes = state["passes"]


class TellsLate(GoesOn):
    """Has a state only once it is iterated."""

    def state_dict(self) -> dict[str, int]:
        if not hasattr(self, "read"):
            raise RuntimeError("not iterated yet")
        return super().state_dict()

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.read = number
            yield number


class Batches(GoesOn):
    """A loader: batches of a stream that goes on where it stands."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield np.arange(4 * number, 4 * number + 4)


KINDS = [GoesOn, BeginsAnew, BeginsThere]


def flat(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in np.ravel(batch)]


def left(train: stoker.Pipeline, batches: int) -> list[int]:
    """Take so many batches of an epoch, and leave it."""
    with iter(train) as epoch:
        return flat(islice(epoch, batches))


def itself(stream: Any, examples: int) -> list[int]:
    """Return what the stream gives when it is read no further."""
    return list(islice(stream, examples))


@few(25)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(1, 60),
    batch=st.integers(1, 5),
    workers=st.sampled_from([0, 2]),
    taken=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_the_next_epoch_is_that_of_a_stream_that_was_read_no_further(
    kind: type[CountingStream], length: int, batch: int, workers: int, taken: list[int]
) -> None:
    stream = kind(length)
    train = stoker.from_iterable(kind(length), seed=0).batch(batch).workers(workers)
    for batches in [*taken, length, 1, length]:
        # An epoch that hands out nothing leaves no trace.
        expected = itself(stream, batches * batch) if batches else []
        assert left(train, batches) == expected


@pytest.mark.parametrize("kind", [*KINDS, TellsLate])
def test_steps_end_an_epoch_as_leaving_it_does(kind: type[CountingStream]) -> None:
    stream, train = kind(), stoker.from_iterable(kind(), seed=0).batch(8).steps(10)
    for _ in range(4):
        assert flat(train) == itself(stream, 80)


def test_under_repeat_it_goes_on() -> None:
    train = stoker.from_iterable(BeginsAnew(200), seed=0).batch(8).repeat().steps(10)
    assert [flat(train)[0] for _ in range(3)] == [0, 80, 160]
    assert left(train, 3)[0] == 40
    assert flat(train)[0] == 64


def chains() -> dict[str, Callable[[stoker.Pipeline], stoker.Pipeline]]:
    return {
        "processes": lambda p: p.map(np.int64).batch(8).workers(2, kind="process"),
        "maps": lambda p: p.map(np.int64).batch(8).workers(2),
        "take": lambda p: p.take(900).batch(8),
        "parts": lambda p: p.shard(rank=0, world_size=1).batch(8),
        "device": lambda p: p.map(np.int64).batch(8).to_torch(),
    }


@pytest.mark.parametrize("chain", one_in(3, chains()))
@pytest.mark.parametrize("kind", [GoesOn, BeginsAnew])
def test_whatever_reads_ahead(kind: type[CountingStream], chain: str) -> None:
    stream = kind()
    train = chains()[chain](stoker.from_iterable(kind(), seed=0))
    for batches in (3, 1, 5):
        assert left(train, batches) == itself(stream, 8 * batches)


def test_a_filter_leaves_out_nothing_else() -> None:
    train = stoker.from_iterable(GoesOn(), seed=0).filter(lambda n: n % 10 != 0).batch(9)
    seen = [*left(train, 3), *left(train, 2), *left(train, 200)]
    assert seen == [n for n in range(1000) if n % 10]


def test_packing_goes_on_behind_the_sequences_that_were_used() -> None:
    made = stoker.from_iterable(GoesOn(), seed=0).map(lambda n: np.full(4, n))
    train = made.pack(8).map(lambda packed: packed.tokens[::4]).batch(2)
    assert [*left(train, 2), *left(train, 3)] == list(range(20))


@pytest.mark.parametrize(("factor", "workers"), [(2, 0), (2, 2), ("auto", 2)])
def test_echoing_goes_on_behind_as_many_as_were_used(factor: Any, workers: int) -> None:
    train = stoker.from_iterable(GoesOn(), seed=0).echo(factor, pool=8).batch(4).workers(workers)
    used = 0
    for _ in range(4):
        assert min(left(train, 5)) == used
        used += train.stats().fresh_examples


def test_parts_of_ranks_go_on_at_the_same_round() -> None:
    ranks = [
        stoker.from_iterable(GoesOn(), seed=0).shard(rank=rank, world_size=2).batch(4)
        for rank in range(2)
    ]
    seen = [number for _ in range(3) for rank in ranks for number in left(rank, 2)]
    assert sorted(seen) == list(range(48))


def test_a_shuffle_buffer_leaves_out_what_it_holds_and_no_more() -> None:
    train = stoker.from_iterable(GoesOn(), seed=0).shuffle(buffer=5).batch(4).workers(2)
    first, second = left(train, 3), left(train, 3)
    assert set(first) < set(range(16))
    assert set(second) < set(range(16, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_costs_the_examples_of_its_batch(kind: type[CountingStream]) -> None:
    broken = [True]

    def maybe(number: int) -> int:
        if broken[0]:
            raise ValueError("not yet")
        return number

    stream, train = kind(), stoker.from_iterable(kind(), seed=0).map(maybe).batch(4).workers(2)
    for _ in range(2):
        broken[0] = True
        with pytest.raises(stoker.StageError, match="not yet"):
            next(iter(train))
        itself(stream, 4)
        broken[0] = False
        assert left(train, 2) == itself(stream, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_over", [True, False])
def test_a_state_between_epochs_knows_where_it_was_left(
    kind: type[CountingStream], is_over: bool
) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(kind(), seed=0).batch(8).steps(5)

    train = build()
    flat(train)
    epoch = iter(train)
    for _ in range(5):
        next(epoch)
    if is_over:
        assert next(epoch, None) is None
    state = through_json(train.state_dict())
    assert state["epoch"] == 2
    epoch.close()
    resumed = build()
    resumed.load_state_dict(state)
    assert through_json(resumed.state_dict())["epoch"] == 2
    assert [flat(resumed), flat(resumed)] == [flat(train), flat(train)]


@few(25)
@given(
    kind=st.sampled_from([*KINDS, CountsPasses]),
    length=st.integers(1, 60),
    batch=st.integers(1, 5),
    workers=st.sampled_from([0, 2]),
    epochs=st.integers(1, 3),
)
def test_a_state_behind_whole_epochs_knows_what_the_stream_has_counted(
    kind: type[CountingStream], length: int, batch: int, workers: int, epochs: int
) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(kind(length), seed=0).batch(batch).workers(workers)

    train = build()
    for _ in range(epochs):
        assert len(flat(train)) == length
        resumed = build()
        resumed.load_state_dict(through_json(train.state_dict()))
        train = build()  # a state that was loaded alone is kept
        train.load_state_dict(through_json(resumed.state_dict()))
    whole = build()
    assert [flat(whole) for _ in range(epochs + 2)][epochs:] == [flat(train), flat(train)]


def test_a_state_behind_whole_epochs_of_torchdata_s_nodes() -> None:
    """They count epochs themselves, and tell the sampler."""
    from torchdata import nodes

    class Permuted:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(np.random.default_rng(self.epoch).permutation(50).tolist())

        def __len__(self) -> int:
            return 50

    def build() -> stoker.Pipeline:
        loader = nodes.Loader(nodes.SamplerWrapper(Permuted()))
        return stoker.from_iterable(loader, seed=0).map(int).batch(4)

    train, resumed = build(), build()
    first = flat(train)
    resumed.load_state_dict(through_json(train.state_dict()))
    assert flat(resumed) == flat(train) != first


@pytest.mark.parametrize("kind", [GoesOn, BeginsAnew])
def test_a_state_in_the_middle_goes_on_and_is_left_like_any_other(
    kind: type[CountingStream],
) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(kind(), seed=0).batch(8)

    train = build()
    with iter(train) as epoch:
        taken = flat(islice(epoch, 4))
        state = through_json(train.state_dict())
    assert taken == list(range(32))
    resumed = build()
    resumed.load_state_dict(state)
    assert left(resumed, 2) == list(range(32, 48))
    begin = 48 if kind is GoesOn else 0
    assert left(resumed, 2) == list(range(begin, begin + 16))


def test_a_loader_that_is_read_ahead_goes_on_where_it_was_left() -> None:
    train = stoker.from_loader(Batches()).echo("auto")
    used = 0
    for batches in (3, 1, 2, 9):
        assert min(left(train, batches)) == used
        used += train.stats().fresh_examples


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_s_loader_over_a_stream_and_its_nodes() -> None:
    import torchdata.stateful_dataloader as loaders
    from torch.utils import data
    from torchdata import nodes

    class Going(GoesOn, data.IterableDataset):  # type: ignore[misc, name-defined]
        pass

    def over(kind: type[CountingStream]) -> Any:
        return loaders.StatefulDataLoader(kind(), batch_size=None)

    class Anew(BeginsAnew, data.IterableDataset):  # type: ignore[misc, name-defined]
        pass

    for made in (
        lambda: over(Going),
        lambda: over(Anew),
        lambda: loaders.StatefulDataLoader(range(1000), batch_size=None),
        lambda: nodes.Loader(nodes.SamplerWrapper(range(1000))),
    ):
        stream, train = made(), stoker.from_iterable(made(), seed=0).map(int).batch(4).workers(2)
        for batches in (3, 1, 2):
            assert left(train, batches) == [int(n) for n in itself(stream, 4 * batches)]


def test_hugging_face_s_streams_begin_anew() -> None:
    import datasets

    def build() -> Any:
        stream = datasets.Dataset.from_dict({"n": list(range(300))}).to_iterable_dataset(3)
        return stoker.from_iterable(stream, seed=0).map(lambda row: row["n"]).batch(8)

    train = build()
    assert left(train, 3) == list(range(24))
    assert left(train, 2) == list(range(16))
    assert sorted(flat(train)) == list(range(300))
