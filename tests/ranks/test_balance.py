"""``.balance()``: the same global batches and draws, equally many rows, about equal work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_places import drawing, of_all, taken

import stoker
from stoker import testing
from strategies import few

Build = Callable[..., stoker.Pipeline]


def lengths_of(examples: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(5, 1, examples)
    return np.minimum(drawn, 8192).astype(np.int32) + 1


def begun(examples: int) -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(examples), seed=5).shuffle()


@few(15)
@given(
    examples=st.integers(1, 400),
    world=st.integers(1, 6),
    each=st.integers(1, 9),
    seed=st.integers(0, 1_000),
    epoch=st.integers(0, 2),
)
def test_global_batches_stay_and_ranks_have_equal_counts(
    examples: int, world: int, each: int, seed: int, epoch: int
) -> None:
    lengths = lengths_of(max(examples, world), seed)

    def ranks(sizes: np.ndarray | None = None) -> list[stoker.Pipeline]:
        dealt = [begun(len(lengths)).shard(rank=rank, world_size=world) for rank in range(world)]
        return [
            (rank if sizes is None else rank.balance(sizes)).random_map(drawing).batch(each)
            for rank in dealt
        ]

    of_ranks = [taken(rank, epoch)[0] for rank in ranks(lengths)]
    assert of_all(ranks(lengths), epoch) == of_all(ranks(), epoch)
    for step in zip(*of_ranks, strict=True):
        assert len({len(batch) for batch in step}) == 1
        for batch in step:
            costs = lengths[batch]
            assert (np.diff(costs.astype(int)) <= 0).all()


def slowest(ranks: list[stoker.Pipeline], lengths: np.ndarray) -> float:
    """Return the work of the slowest rank in each step, over all steps, per mean work."""
    steps = [[lengths[batch].sum() for batch in step] for step in zip(*ranks, strict=True)]
    work = np.array(steps, float)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


@pytest.mark.parametrize(
    ("behind", "gain"),
    [
        (lambda p: p.batch(8), 1.25),
        (lambda p: p.echo(2, pool=128).batch(8), 1.1),
        (lambda p: p.echo(3, pool=128).batch(8), 1.1),
        (lambda p: p.batch(8).echo(2, pool=16), 1.25),
    ],
)
def test_ranks_wait_less_for_one_another_also_behind_an_echo(behind: Build, gain: float) -> None:
    lengths = lengths_of(2_000)

    def ranks(sizes: np.ndarray | None = None) -> list[stoker.Pipeline]:
        dealt = [begun(len(lengths)).shard(rank=rank, world_size=4) for rank in range(4)]
        return [behind(rank if sizes is None else rank.balance(sizes)) for rank in dealt]

    assert slowest(ranks(), lengths) > gain * slowest(ranks(lengths), lengths)


@pytest.mark.parametrize("workers", [{"n": 0}, {"n": 2}])
def test_workers_and_resumes_change_nothing(workers: dict[str, Any]) -> None:
    lengths = lengths_of(90)

    def build() -> stoker.Pipeline:
        dealt = (
            begun(90).shard(rank=1, world_size=3).balance(lengths, cost=lambda n: n + n * n / 4096)
        )
        return dealt.echo(1.5, pool=16).random_map(drawing).batch(4).workers(**workers)

    here = [ids.tolist() for ids, _ in build().workers(0)]
    assert [ids.tolist() for ids, _ in build()] == here
    testing.check_resume(build, every=3)


KINDS: dict[str, Build] = {
    "cut": lambda n: begun(n).skip(3).take(n - 5),
    "blocks": lambda n: stoker.from_arrays(np.arange(n), seed=5).shuffle(block=2),
    "large": lambda n: stoker.from_dataset(range((1 << 20) + n), seed=5).shuffle(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_orders_are_dealt_alike(kind: str) -> None:
    lengths = lengths_of((1 << 20) + 100 if kind == "large" else 100)
    cuts: list[Build] = [lambda p: p, lambda p: p.skip(3).take(20)]
    for behind in cuts:
        found, every = [], []
        for rank in range(2):
            begin = KINDS[kind](100)
            dealt = behind(begin.shard(rank=rank, world_size=2).balance(lengths)).batch(8).steps(3)
            plain = (
                behind(begin.shard(rank=rank, world_size=2).balance(lengths * 0)).batch(8).steps(3)
            )
            found += [int(x) for batch in dealt for x in batch]
            every += [int(x) for batch in plain for x in batch]
        assert len(set(found)) == len(found) == len(every)


def test_fields_have_the_sizes(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as parquet

    lengths = lengths_of(60)
    tokens = [[1] * (each % 50) for each in lengths.tolist()]
    table = pa.table({"n": lengths, "tokens": tokens, "text": ["x" * len(t) for t in tokens]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    hugging_face = datasets.Dataset.from_dict({"tokens": [[1]] * 5 + tokens})
    sources: list[tuple[stoker.Pipeline, list[Any]]] = [
        (stoker.from_arrays(np.arange(60), lengths, seed=1), [1]),
        (stoker.from_table(table, seed=1), ["n", "tokens", "text"]),
        (stoker.from_parquet(tmp_path / "a.parquet", seed=1), ["n", "tokens", "text"]),
        (stoker.from_huggingface(hugging_face.select(range(5, 65)), seed=1), ["tokens"]),
    ]
    for source, fields in sources:
        for field in fields:
            sizes = lengths if field in (1, "n") else lengths % 50
            by_field, by_array = (
                source.shuffle().shard(rank=0, world_size=2).balance(balance).batch(4)
                for balance in (field, sizes)
            )
            assert by_field.chain.signature() == by_array.chain.signature()
    with pytest.raises(LookupError, match="no field 'm'"):
        sources[1][0].shuffle().shard(rank=0, world_size=2).balance("m")


def test_what_is_dealt_by_is_part_of_a_state() -> None:
    lengths = lengths_of(60)
    train = begun(60).shard(rank=0, world_size=2).balance(lengths).batch(4)
    next(iter(train))
    state = train.state_dict()
    dealt = begun(60).shard(rank=0, world_size=2)
    for other in (dealt.balance(lengths[::-1]), dealt):
        with pytest.raises(stoker.StateError, match="another pipeline"):
            other.batch(4).load_state_dict(state)


def test_print_says_what_balance_gains() -> None:
    def shown(each: int, world: int = 4) -> str:
        return str(begun(60).shard(rank=0, world_size=world).balance(lengths_of(60)).batch(each))

    assert "inside each 32 examples, so that ranks have equal work" in shown(8)
    assert "leave little to choose" in shown(2)
    assert "nothing to balance" in shown(1)
    assert "nothing to balance" in shown(8, 1)


def test_what_cannot_be_balanced_is_refused() -> None:
    n = np.arange(60)

    def dealt(
        train: stoker.Pipeline | None = None, sizes: Any = n, cost: Any = None, **shard: Any
    ) -> stoker.Pipeline:
        train = begun(60) if train is None else train
        return train.shard(rank=0, world_size=2, **shard).balance(sizes, cost=cost)

    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"sizes": n[:50]}, ValueError, "each of the 60 examples .* but got 50"),
        ({"sizes": n - 1}, ValueError, "that of example 0 is -1"),
        ({"sizes": np.full(60, np.nan)}, ValueError, "example 0 is nan"),
        ({"sizes": n.reshape(6, 10)}, TypeError, "a number for each example"),
        ({"sizes": "length"}, LookupError, "no field 'length'"),
        ({"cost": 3}, TypeError, "cost= as a function"),
        ({"cost": sum}, ValueError, "returns as many numbers"),
        ({"remainder": "uneven"}, ValueError, "leave remainder='uneven' out"),
    ]
    for given_wrong, kind, said in refused:
        with pytest.raises(kind, match=said):
            dealt(**given_wrong)
    with pytest.raises(ValueError, match=r"put \.shuffle"):
        dealt(stoker.from_arrays(n))
    with pytest.raises(ValueError, match=r"put \.shard"):
        begun(60).balance(n)
    with pytest.raises(ValueError, match=r"cannot follow balance"):
        dealt().balance(n)
    with pytest.raises(ValueError, match="a stream has none"):
        dealt(stoker.from_iterable(n))
    with pytest.raises(ValueError, match="dealt by part"):
        dealt(stoker.mix([begun(30), begun(30)]))
    with pytest.raises(TypeError, match=r"does not read one field"):
        dealt(stoker.from_dataset([{"n": 1}] * 60).shuffle(), "n")
