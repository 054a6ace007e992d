"""``mix(parts, weights, by=)``: weights are shares of tokens, whatever examples hold."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.testing import check_resume
from strategies import few, stream

PART = 1_000
"""The first number of the second part, and so on."""


def parts(sizes: list[list[int]]) -> list[stoker.Pipeline[Any]]:
    """Examples are a number that tells the part, and a size."""
    return [
        stoker.from_arrays(np.arange(len(own)) + PART * n, np.array(own), seed=3).shuffle()
        for n, own in enumerate(sizes)
    ]


def size(example: Any) -> int:
    return int(example[1])


sizes_of_parts = st.lists(
    st.lists(st.integers(0, 50), min_size=2, max_size=20).map(lambda own: [*own, 7]),
    min_size=1,
    max_size=4,
)


@given(sizes=sizes_of_parts, data=st.data(), epochs=st.integers(1, 4))
def test_each_part_has_its_share_of_tokens(sizes: Any, data: Any, epochs: int) -> None:
    """But for what the pass under way of each part has too much or too little, of two examples."""
    many = st.sampled_from([1, 2, 0.5, 3])
    weights = data.draw(st.lists(many, min_size=len(sizes), max_size=len(sizes)))
    train = stoker.mix(parts(sizes), weights, by=1, stop="all").workers(0)
    seen = [example for _ in range(epochs) for example in train]
    given = [Fraction(weight) for weight in weights]
    means = [Fraction(sum(own), len(own)) for own in sizes]
    per_example = sum(w / m for w, m in zip(given, means, strict=True))
    for n, (own, weight, mean) in enumerate(zip(sizes, given, means, strict=True)):
        found = [int(tokens) for number, tokens in seen if number // PART == n]
        due = len(seen) * weight / per_example  # the tokens of the part
        assert abs(len(found) * mean - due) <= 2 * epochs * mean
        assert abs(sum(found) - len(found) * mean) <= sum(own)
        passes = len(found) // len(own) * len(own)
        assert sum(found[:passes]) == passes * mean


@pytest.mark.parametrize(
    "by",
    [1, size, [size, 1], [np.array([5, 1, 4]), [100, 300, 200, 400]]],
    ids=["field", "function", "both", "numbers"],
)
def test_sizes_are_a_field_a_function_or_numbers(by: Any) -> None:
    """The means are 10/3 and 250."""
    sizes = [[5, 1, 4], [100, 300, 200, 400]]
    by_tokens = stoker.mix(parts(sizes), [1, 1], by=by, stop="all")
    by_examples = stoker.mix(parts(sizes), [0.3, 0.004], stop="all")
    assert stream(by_tokens.batch(8)) == stream(by_examples.batch(8))


@pytest.mark.parametrize(
    ("change", "mean"),
    [
        (lambda part: part, 4),
        (lambda part: part.select([0, 3]), 5),
        (lambda part: part.skip(1).shuffle(), 5),
        (lambda part: part.sample([1, 0, 0, 3]), 7),
    ],
)
def test_a_part_counts_by_what_it_draws(change: Any, mean: int) -> None:
    """Of the sizes 1, 2, 4, 9 all, two, the last three, or one thrice as often as another."""
    part = stoker.from_arrays(np.arange(4), np.array([1, 2, 4, 9]), seed=3)
    ones = stoker.from_arrays(np.arange(PART, PART + 40), np.ones(40, np.int64)).shuffle()
    train = stoker.mix([change(part), ones], [1, 1], by=1)
    same = stoker.mix([change(part), ones], [1, mean])
    assert [int(x) for x, _ in train] == [int(x) for x, _ in same]


@settings(few(5))
@given(sizes=sizes_of_parts, batch=st.sampled_from([4, 8]))
def test_ranks_share_the_global_batches_and_it_resumes(sizes: Any, batch: int) -> None:
    def build(rank: int = 0, world: int = 1, workers: int = 0) -> stoker.Pipeline[Any]:
        many = parts([4 * own for own in sizes])
        train = stoker.mix(many, by=size, stop="all").shard(rank=rank, world_size=world)
        return train.batch(batch // world, drop_last=True).workers(workers)

    def batches(world: int) -> list[list[int]]:
        each = [[numbers.tolist() for numbers, _ in build(rank, world)] for rank in range(world)]
        return [sorted(itertools.chain(*steps)) for steps in zip(*each, strict=True)]

    whole = batches(1)
    assert batches(2)[: len(whole)] == batches(4)[: len(whole)] == whole
    check_resume(build, every=max(4, len(whole) // 8))  # some epochs have hundreds of batches
    assert stream(build()) == stream(build(workers=2))


def test_weights_of_tokens_may_change() -> None:
    sizes = [[1] * 400, [9] * 400]
    early = stoker.mix(parts(sizes), [lambda time: 1 - time.epochs, 1], by=1)
    first = [int(tokens) for _, tokens in early][:80]
    ones, nines = first.count(1), 9 * first.count(9)
    assert abs(ones - nines) < 20


def test_a_state_of_other_sizes_is_refused() -> None:
    a, b = parts([[1, 2, 3], [4, 5, 6]])
    train = stoker.mix([a, b], by=1, stop="all").batch(2)
    next(iter(train))
    other = stoker.mix([a, b], by=[1, [6, 6, 6]], stop="all").batch(2)
    with pytest.raises(stoker.StateError):
        other.load_state_dict(train.state_dict())


def test_what_says_no_sizes() -> None:
    (a,) = parts([[1, 2, 3]])
    unknown = stoker.from_dataset([{"n": 1}, {"n": 2}])
    each: Any
    for each, by, says in [
        ([unknown, a], "n", r"pipeline\.sizes\(fn\)"),
        ([a, a], [1], "1 sizes for 2 pipelines"),
        ([a, a], [1, [1, 2, 3, 4]], "for each of the 3"),
        ([a, a], [1, 9], "no field 9"),
        ([a, a], [1, [0, 0, 0]], "has no tokens"),
        ([a, a.filter(size)], size, "filter"),
    ]:
        with pytest.raises((TypeError, ValueError, LookupError), match=says):
            stoker.mix(each, by=by)


def test_stats_tell_of_the_parts_of_packed_documents() -> None:
    sizes = [[5] * 50, [7] * 50]
    train = stoker.mix(parts(sizes), by=1, stop="all")
    train = train.map(lambda example: np.arange(example[1])).pack(16, sizes=1)
    assert len(list(train)) == len(train)
    assert [part.epochs for part in train.stats().parts] == [1.38, 1.0]
