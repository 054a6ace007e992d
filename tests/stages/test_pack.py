"""Packing: every token once and in order, and where it is resumed nothing is lost or doubled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import opened, signed, stream, through_json


@stoker.thread_safe
class Documents:
    """Sequences of these lengths; the tokens of number ``n`` are 100 n, 100 n + 1, ..."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return np.arange(self.lengths[index], dtype=np.int32) + 100 * index


ragged = st.lists(st.integers(0, 30), max_size=40)
MANY = [n * 7 % 23 for n in range(60)]


def even(tokens: Any) -> bool:
    return len(tokens) % 2 == 0


def first_is_odd(packed: Any) -> bool:
    return bool(packed.tokens[0] % 2)


@stoker.thread_safe
def shifted(packed: Any, rng: np.random.Generator) -> Any:
    return packed._replace(tokens=packed.tokens + rng.integers(1_000_000))


def expected(sequences: list[Any], length: int) -> list[list[tuple[int, int, int]]]:
    """Join sequences, the slow way: tokens with their segments and positions."""
    tokens = [(int(t), number) for number, each in enumerate(sequences) for t in each]
    rows = []
    for start in range(0, len(tokens) - length + 1, length):
        row: list[tuple[int, int, int]] = []
        whose: list[int] = []
        for token, number in tokens[start : start + length]:
            position = 0 if not whose or whose[-1] != number else row[-1][2] + 1
            segment = 0 if not whose else row[-1][1] + (whose[-1] != number)
            row.append((token, segment, position))
            whose.append(number)
        rows.append(row)
    return rows


@given(
    lengths=ragged,
    length=st.integers(1, 40),
    shuffled=st.booleans(),
    filtered=st.booleans(),
    factor=st.sampled_from([1, 2, 1.5]),
)
def test_every_token_comes_once_and_in_order(
    lengths: list[int], length: int, shuffled: bool, filtered: bool, factor: float
) -> None:
    source = stoker.from_dataset(Documents(lengths), seed=2).workers(0)
    source = source.shuffle() if shuffled else source
    source = source.filter(even) if filtered else source
    source = source.echo(factor, pool=64)
    train = source.pack(length)
    found = [
        list(zip(x.tokens.tolist(), x.segments.tolist(), x.positions.tolist(), strict=True))
        for x in train
    ]
    assert found == expected(list(source), length)
    assert all(x.tokens.dtype == np.int64 and x.segments.dtype == np.int32 for x in train)


@given(lengths=ragged, length=st.integers(1, 40), size=st.integers(1, 5), drop_last=st.booleans())
def test_batches_have_the_sequences_in_order(
    lengths: list[int], length: int, size: int, drop_last: bool
) -> None:
    train = stoker.from_dataset(Documents(lengths)).pack(length)
    rows = expected([Documents(lengths)[n] for n in range(len(lengths))], length)
    wanted = [rows[at : at + size] for at in range(0, len(rows), size)]
    if drop_last:
        wanted = [batch for batch in wanted if len(batch) == size]
    batches = train.batch(size, drop_last=drop_last)
    for _ in range(2):  # several at once are joined when it is known how long one takes
        found = [np.stack(batch, axis=-1).tolist() for batch in batches]
        assert found == [[[*map(list, row)] for row in batch] for batch in wanted]


def failing_on_17(tokens: Any) -> Any:
    if len(tokens) and tokens[0] == 1_700:
        raise ValueError("it is 17")
    return tokens


def blocks(**how: Any) -> Any:
    return stoker.from_dataset(Documents(MANY), seed=3, **how).shuffle(block=3)


KINDS: dict[str, Callable[[], stoker.Pipeline]] = {
    "plain": lambda: blocks().pack(16).batch(3),
    "filtered before": lambda: blocks().filter(even).pack(16).batch(3),
    "filtered on both sides": lambda: (
        blocks().filter(even).pack(16).random_map(shifted).filter(first_is_odd).batch(3)
    ),
    "echoed": lambda: blocks().echo(2, pool=12).pack(16).batch(3),
    "echoed and filtered": lambda: (
        blocks().filter(even).echo(1.5, pool=12).pack(16).random_map(shifted)
        .batch(3, drop_last=True)
    ),
    "cached": lambda: blocks().cache("1MiB").pack(16).random_map(shifted).batch(3),
    "a rank's": lambda: blocks().shard(rank=1, world_size=2).pack(16).batch(3).steps(3),
    "budgets": lambda: (
        blocks(max_errors=3).map(failing_on_17).pack(16).filter(first_is_odd).batch(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_anywhere_and_is_the_same_for_any_workers(kind: str) -> None:
    build = KINDS[kind]
    check_resume(lambda: build().workers(0), every=2)
    one, many = build().workers(0), build().workers(3)
    assert stream(one) == stream(many)
    assert stream(one) == stream(many)
    if kind == "filtered on both sides":
        assert stream(build().workers(0)) == stream(build().workers(1, kind="process"))


def slowly(tokens: Any) -> Any:
    time.sleep(0.002)
    return tokens


@pytest.mark.parametrize("behind", [False, True])
def test_workers_that_plan_ahead_do_not_wait(behind: bool) -> None:
    def slow(workers: int) -> stoker.Pipeline:
        source = stoker.from_dataset(Documents(MANY), seed=3).shuffle().map(slowly).pack(16)
        source = source.filter(first_is_odd) if behind else source
        return source.random_map(shifted).batch(3).workers(workers)

    one, many = slow(0), slow(3)
    assert stream(one) == stream(many)
    with iter(many) as batches:
        next(batches)
        state, tail = many.state_dict(), [batch.tokens.tolist() for batch in batches]
    one.load_state_dict(state)
    assert [batch.tokens.tolist() for batch in one] == tail


def test_single_sequences_resume_and_may_be_acknowledged_late() -> None:
    def single() -> stoker.Pipeline:
        return stoker.from_dataset(Documents(MANY), seed=3).shuffle().pack(16)

    check_resume(single, every=5)
    train = single()
    train.acknowledge(0)
    with iter(train) as rows:
        ahead = [next(rows) for _ in range(9)]
        train.acknowledge(4)
        state = through_json(train.state_dict())
    again = single()
    again.load_state_dict(state)
    assert (next(iter(again)).tokens == ahead[4].tokens).all()


def test_an_echo_that_follows_the_stall_is_replayed_and_goes_on_behind_a_resume() -> None:
    def auto() -> stoker.Pipeline:
        source = stoker.from_dataset(Documents(MANY), seed=3).shuffle()
        return source.echo().pack(16).batch(3).steps(8)

    train = auto()
    with iter(train) as batches:
        for _ in range(3):
            next(batches)
        state = train.state_dict()
        tail = [batch.tokens.tolist() for batch in batches]
    again = auto().replay(train.record())
    again.load_state_dict(state)
    assert [batch.tokens.tolist() for batch in again] == tail


def test_a_stream_is_packed_and_saved_between_epochs() -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_iterable(lambda: iter([[1, 2, 3], [], [4, 5], [6]])).pack(2)

    train = build()
    assert [x.tokens.tolist() for x in train] == [[1, 2], [3, 4], [5, 6]]
    build().load_state_dict({**train.state_dict()})
    with iter(train) as rows:
        next(rows)
        with pytest.raises(stoker.StateError, match="no state in its middle"):
            train.state_dict()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("text", "not str"),
        (np.zeros(3), r"not float64 \[3\]"),
        (np.zeros((2, 2), int), r"not int64 \[2, 2\]"),
        ([[1], [2]], "not list"),
        ((1, 2), "not tuple"),
    ],
)
def test_what_is_no_sequence_of_tokens(value: Any, says: str) -> None:
    train = stoker.from_dataset([[1, 2], value]).pack(2).batch(2)
    with pytest.raises(stoker.StageError, match=says) as raised:
        list(train)
    assert raised.value.index == 1
    assert raised.value.stage == "pack(2)"


def test_a_failure_behind_it_names_no_example_of_the_source() -> None:
    def fails(packed: Any) -> Any:
        raise KeyError("no")

    with pytest.raises(stoker.StageError) as raised:
        list(stoker.from_dataset(Documents([5] * 9)).pack(4).map(fails).batch(2))
    assert (raised.value.index, raised.value.number) == (None, 0)


def test_sequences_that_became_shorter_are_noticed() -> None:
    train = stoker.from_dataset(Documents([9, 9]), seed=0).pack(4).batch(1)
    with iter(train) as batches:
        next(batches)
        state = train.state_dict()
    again = stoker.from_dataset(Documents([3, 9]), seed=0).pack(4).batch(1)
    again.load_state_dict(state)
    with pytest.raises(stoker.StateError, match="has become shorter"):
        list(again)


def test_states_that_cannot_be_are_refused() -> None:
    train = stoker.from_dataset(Documents(MANY), seed=3).pack(16).batch(3)
    with iter(train) as batches:
        next(batches)
        state = train.state_dict()
    fields = opened(state)
    (right,) = fields["parts"]
    assert right["number"] == 3
    crafts: Any = (
        [], "no", [[3, 0, 0]], [right] * 2, [{**right, "input": 10**9}], [{**right, "offset": -1}],
        [{**right, "number": 4}], [{"kind": "pack", "number": 3, "input": 0}],
    )  # fmt: skip
    for parts in crafts:
        crafted = signed({**fields, "parts": parts})
        with pytest.raises(stoker.StateError, match="damaged"):  # noqa: PT012 by iter() at last
            train.load_state_dict(crafted)
            iter(train)


def test_where_it_may_stand() -> None:
    begin = stoker.from_dataset(Documents(MANY), seed=0)
    with pytest.raises(ValueError, match=r"cannot follow batch"):
        begin.batch(2, collate=list).pack(4)
    with pytest.raises(ValueError, match=r"cannot follow pack"):
        begin.pack(4).pack(4)
    with pytest.raises(ValueError, match="yields batches"):
        stoker.from_loader([1]).pack(4)
    for behind in (
        lambda p: p.shuffle(),
        lambda p: p.take(3),
        lambda p: p.cache("1MiB"),
        lambda p: p.shard(rank=0, world_size=2),
    ):
        with pytest.raises(ValueError, match=r"cannot follow pack\(4\)"):
            behind(begin.pack(4))
    with pytest.raises(TypeError, match="whole number"):
        begin.pack("4")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="from 1"):
        begin.pack(0)
    with pytest.raises(TypeError, match="packed"):
        len(begin.pack(4))
    assert len(begin.pack(4).batch(2).steps(3)) == 3
    with pytest.raises(ValueError, match=r"packed sequences differs.*steps"):
        iter(begin.shard(rank=0, world_size=2).pack(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_came_before_a_failure_is_joined_first(workers: int) -> None:
    documents: list[Any] = [np.arange(5), np.arange(5, 9), np.arange(9, 16), "bad", np.arange(16)]
    train = stoker.from_dataset(documents).pack(3).batch(5).workers(workers)
    with iter(train) as batches:
        assert next(batches).tokens.ravel().tolist() == list(range(15))
        with pytest.raises(stoker.StageError, match="not str"):
            next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_document_that_fails_comes_again_behind_a_resume(workers: int) -> None:
    def build(documents: list[Any]) -> stoker.Pipeline:
        return stoker.from_dataset(documents).pack(4).batch(1).workers(workers)

    documents: list[Any] = [np.arange(6), "not here yet", np.arange(8, 14)]
    train = build(documents)
    with pytest.raises(stoker.StageError, match="not str"):
        [batch.tokens.tolist() for batch in train]
    documents[1] = np.arange(6, 8)
    again = build(documents)
    again.load_state_dict(train.state_dict())
    assert [t for batch in again for t in batch.tokens.ravel().tolist()] == [*range(4, 12)]


def test_a_sequence_of_many_short_parts() -> None:
    documents = [np.array([number]) for number in range(400)]
    (packed,) = stoker.from_dataset(documents).pack(200).batch(2).workers(0)
    assert packed.tokens.ravel().tolist() == list(range(400))
    assert packed.segments.tolist() == [list(range(200))] * 2
    assert not packed.positions.any()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_who_writes_into_what_comes_harms_nobody(workers: int, batched: bool) -> None:
    documents = [np.arange(n, dtype=kind) for n, kind in ((40, ">u2"), (2, "u8"), (70, "i1"))]
    train: Any = stoker.from_dataset(documents).pack(7).workers(workers)
    for packed in train.batch(2) if batched else train:
        for array in packed:
            array[...] = -1
    assert [document.tolist() for document in documents] == [list(range(n)) for n in (40, 2, 70)]
    found = [token for packed in train for token in packed.tokens.tolist()]
    assert found == [*range(40), *range(2), *range(70)]
