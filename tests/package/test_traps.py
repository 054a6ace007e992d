"""What users of other loaders write, and what it does here."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm  # type: ignore[import-untyped]
from tqdm.asyncio import tqdm as tqdm_auto  # type: ignore[import-untyped]

import stoker
from stoker.collate import pad
from strategies import FULL


def numbers(count: int = 24) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(range(count), seed=0)


@pytest.mark.parametrize("bar", [tqdm, tqdm_auto])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_progress_bar_that_asks_for_two_iterators_loses_nothing(bar: Any, workers: int) -> None:
    train = numbers().shuffle().batch(4).workers(workers)
    plain = numbers().shuffle().batch(4)
    for _ in range(3):
        shown = bar(train, file=io.StringIO())
        assert shown.total == 6
        assert [batch.tolist() for batch in shown] == [batch.tolist() for batch in plain]
    assert train.epoch == 3
    assert train.stats().epoch == plain.stats().epoch


FORMS: dict[str, Callable[[stoker.Pipeline[Any]], Any]] = {
    "plain": lambda p: p.batch(4),
    "repeated": lambda p: p.batch(4).repeat().steps(6),
    "loader": lambda p: p.batch(4).as_dataloader(),
    "monitored": lambda p: stoker.monitor(p.batch(4)),
}


@pytest.mark.parametrize("form", FORMS)
def test_two_loops_over_one_pipeline_do_not_look_finished(form: str) -> None:
    train = FORMS[form](numbers())
    with pytest.raises(RuntimeError, match=r"one at a time can run.*copy\.copy\(pipeline\)"):
        list(zip(train, train, strict=False))

    def nest() -> Any:
        train = FORMS[form](numbers())
        for _ in train:
            yield len(list(train))

    nested = nest()
    assert next(nested) == 6
    with pytest.raises(RuntimeError, match="a second iterator over its pipeline has begun"):
        next(nested)


def test_next_of_a_pipeline_says_what_to_do() -> None:
    train: Any = numbers().batch(4)
    with pytest.raises(TypeError, match=r"batches = iter\(pipeline\).*next\(batches\)"):
        next(train)
    assert next(iter(train)).tolist() == [0, 1, 2, 3]
    again = stoker.from_iterable(train)  # which takes no iterators
    assert [len(list(again)) for _ in range(2)] == [6, 6]


@pytest.mark.parametrize("form", ["plain", "repeated", "loader"])
@pytest.mark.parametrize("move", ["set_epoch", "load_state_dict"])
def test_a_loop_whose_pipeline_is_moved_does_not_look_finished(form: str, move: str) -> None:
    train = FORMS[form](numbers())
    to = 3 if move == "set_epoch" else train.state_dict()
    batches = iter(train)
    next(batches)
    getattr(train, move)(to)
    with pytest.raises(RuntimeError, match="has moved its pipeline"):
        next(batches)
    assert len(list(train)) == 6


def test_an_iterator_that_has_no_more_ends_though_it_is_superseded() -> None:
    train = numbers().batch(4)
    first = iter(train)
    assert len(list(itertools.islice(first, 6))) == 6
    assert len(list(train)) == 6
    assert next(first, None) is None
    with iter(train) as closed:
        next(closed)
    assert next(closed, None) is None


DERIVED: dict[str, Callable[[stoker.Pipeline[Any]], object]] = {
    "shuffle()": lambda p: p.shuffle(),
    "echo(2)": lambda p: p.echo(2, pool=8),
    "batch(4)": lambda p: p.batch(4),
    "workers(2)": lambda p: p.workers(2),
    "steps(2)": lambda p: p.steps(2),
    "repeat()": lambda p: p.repeat(),
}


@pytest.mark.parametrize("call", DERIVED)
def test_a_method_whose_result_is_dropped_is_told_of(call: str) -> None:
    train = numbers()
    DERIVED[call](train)
    with pytest.warns(UserWarning, match=re.escape(f".{call} changes nothing")) as caught:
        assert len(list(train)) == 24
    assert [said.filename for said in caught] == [__file__]
    assert len(list(train)) == 24  # once


def test_pipelines_that_were_looked_at_or_are_kept_are_not_told_of() -> None:
    train = numbers()
    assert len(train.batch(4)) == 6
    assert len(list(train)) == 24
    assert "batch(4)" in str(train.batch(4))
    assert len(list(train)) == 24
    assert len(list(train.shuffle().batch(4))) == 6
    assert len(list(train)) == 24
    kept = train.batch(4)
    assert len(list(train)) == 24
    assert len(list(kept)) == 6


def test_a_size_that_a_stream_is_shuffled_with_is_that_of_its_buffer() -> None:
    stream = stoker.from_iterable(range(24), seed=0)
    again = stoker.from_iterable(range(24), seed=0)
    assert list(stream.shuffle(7)) == list(again.shuffle(buffer=7))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_data_loader_of_a_pipeline_says_what_to_do(batch_size: int | None) -> None:
    loader: Any = torch.utils.data.DataLoader(
        numbers(),  # type: ignore[arg-type]
        batch_size=batch_size,
    )
    with pytest.raises(TypeError, match=r"as_dataloader\(\)"):
        list(loader)
    with pytest.raises(TypeError, match="has no indices"):
        torch.utils.data.random_split(numbers(), [12, 12])[0][0]  # type: ignore[arg-type]


@pytest.mark.full  # transformers takes ten seconds to import
def test_a_trainer_that_is_given_a_pipeline_as_data_says_what_to_do(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    state = pytest.importorskip("accelerate.state")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=numbers())
    try:
        with pytest.raises(TypeError, match=r"get_train_dataloader"):
            trainer.train()
    finally:  # else the tests that come later in this process run below an Accelerator
        state.GradientState._reset_state()
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("device", ["cuda", "mps", "xla"])
def test_a_device_that_is_not_there_is_said_when_iterating(device: str) -> None:
    train = numbers().batch(4).to_torch(device)
    assert f".to_torch({device})" in str(train)
    if device == "cuda" and torch.cuda.is_available():
        return
    says = rf"\.to_torch\({device}\) finds no such device: .*; \.to_torch\(\) gives"
    with pytest.raises(RuntimeError, match=says):
        iter(train)


@settings(max_examples=500 if FULL else 8)
@given(
    count=st.integers(2, 40),
    world=st.integers(1, 4),
    shuffled=st.booleans(),
    taken=st.none() | st.integers(1, 40),
    workers=st.sampled_from([0, 2]),
)
def test_a_cache_before_shuffle_and_shard_is_one_behind_them(
    count: int, world: int, shuffled: bool, taken: int | None, workers: int
) -> None:
    def stream(cache_at: int, rank: int) -> list[list[Any]]:
        stages = [lambda p: p.cache("1MiB")]
        ways: list[Any] = [lambda p: p.shuffle()] if shuffled else []
        ways += [lambda p: p.take(taken)] if taken else []
        ways += [lambda p: p.shard(rank=rank, world_size=world)]
        ways[cache_at:cache_at] = stages
        train = numbers(count)
        for way in ways:
            train = way(train)
        train = train.batch(3).workers(workers)
        if (min(count, taken) if taken else count) < world:
            return []
        return [[batch.tolist() for batch in train] for _ in range(2)]

    for rank in range(world):
        found = [stream(at, rank) for at in range(2 + shuffled + bool(taken))]
        assert all(each == found[0] for each in found)


def test_a_state_of_one_order_is_one_of_the_other() -> None:
    before = numbers().cache("1MiB").shuffle().shard(rank=0, world_size=2).batch(2)
    behind = numbers().shuffle().shard(rank=0, world_size=2).cache("1MiB").batch(2)
    iterator = iter(before)
    next(iterator), next(iterator)
    behind.load_state_dict(before.state_dict())
    assert [batch.tolist() for batch in behind] == [batch.tolist() for batch in iterator]


class Counting:
    """A stream with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        self.at = 0
        while self.at < 40:
            self.at += 1
            yield {"ids": list(range(self.at % 7 + 1))}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stream_that_packs_names_what_its_state_lacks() -> None:
    stream = stoker.from_iterable(Counting(), seed=0)
    for train, named in [
        (stream.map(lambda x: np.array(x["ids"])).pack(8), r"pack\(8\)"),
        (stream.filter(lambda x: len(x["ids"]) > 2), r"filter\(<lambda>\)"),
        (stream.shuffle(4).shard(rank=0, world_size=2), r"shuffle\(buffer=4\), shard"),
        (stream.echo(2, pool=4), r"echo\(2\)"),
    ]:
        iterator = iter(train)
        next(iterator)
        with pytest.raises(stoker.StateError, match=rf"what .*{named}.* cannot be made again"):
            train.state_dict()
        iterator.close()


def ragged(count: int) -> list[dict[str, Any]]:
    return [
        {"tokens": np.arange(i + 1), "labels": np.ones(i + 2, np.int64), "id": i}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("how", "values"),
    [
        (pad({"tokens": 0, "labels": -100}), {"tokens": 0, "labels": -100}),
        (pad(7, on=["tokens", "labels"]), {"tokens": 7, "labels": 7}),
        (pad({"tokens": 0, "labels": 1}), {"tokens": 0, "labels": 1}),
    ],
)
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_several_fields_are_padded_each_with_its_own(how: Any, values: Any, kind: str) -> None:
    (batch,) = stoker.from_dataset(ragged(3)).batch(3, collate=how).workers(1, kind=kind)
    assert batch["id"].tolist() == [0, 1, 2]
    for name, value in values.items():
        for i, (row, length) in enumerate(zip(*batch[name], strict=True)):
            assert row[:length].tolist() == ragged(3)[i][name].tolist()
            assert set(row[length:].tolist()) <= {value}


@pytest.mark.full  # torch takes ten seconds to import what meta tensors need
@pytest.mark.parametrize("odd", [0, 3, 7])
def test_tensors_of_two_devices_are_told_apart(odd: int) -> None:
    data = [torch.zeros(2, device="meta" if i == odd else "cpu") for i in range(8)]
    with pytest.raises(stoker.StageError, match=r"float32 \[2\] on meta") as caught:
        list(stoker.from_dataset(data).batch(8).workers(0))
    assert caught.value.index == odd
