"""Packing of several fields, by best fit, and by a plan: each document comes once, whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.collate import varlen
from stoker.testing import check_resume
from strategies import few, opened, stream, through_json


@stoker.thread_safe
class Examples:
    """Documents of these lengths; the tokens of number ``n`` are 1000 n + 1, 1000 n + 2, ..."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = 1000 * index + np.arange(1, self.lengths[index] + 1)
        return {
            "id": f"number {index}",
            "tokens": tokens.tolist(),
            "mask": tokens % 2 == 0,
            "frames": np.stack([tokens, -tokens], axis=1).astype(np.float32),
        }


class Pair(NamedTuple):
    tokens: Any
    of: int


FIELDS = ["tokens", "mask", "frames"]
MANY = [n * 7 % 23 for n in range(70)]
ragged = st.lists(st.integers(0, 70), max_size=40)


def is_even(example: Any) -> bool:
    return len(example["tokens"]) % 2 == 0


def best_fit(numbers: list[int], sizes: list[int], length: int, window: int) -> Any:
    """Pack documents, the slow way: of each sequence the pieces ``(place, start, stop)``."""
    coming = [(place, at, min(at + length, sizes[n])) for place, n in enumerate(numbers)
              for at in range(0, sizes[n], length)]  # fmt: skip
    waiting: list[Any] = []
    packs, behind = [], 0
    while coming or waiting:
        while coming and len({place for place, _, _ in waiting}) < window:
            behind = coming[0][0] + 1
            waiting += [piece for piece in coming if piece[0] == coming[0][0]]
            coming = [piece for piece in coming if piece not in waiting]
        made: list[list[Any]] = []
        for piece in sorted(waiting, key=lambda piece: piece[1] - piece[2]):
            size = piece[2] - piece[1]
            fitting = [pack for pack in made if room(pack, length) >= size]
            pack = min(fitting, key=lambda pack: room(pack, length), default=None)
            if pack is None:
                made.append(pack := [])
            pack.append(piece)
        made.sort(key=lambda pack: room(pack, length))
        is_last = len({place for place, _, _ in waiting}) < window
        oldest = max(min(waiting)[0] + 1, behind - 3 * window)
        whole = [pack for pack in made if pack[0][2] < sizes[numbers[pack[0][0]]]]
        old = [pack for pack in made if min(pack)[0] < oldest and pack not in whole]
        others = [pack for pack in made if pack not in whole and pack not in old]
        if not is_last:
            others = others[: max(0, len(made) // 2 - len(whole) - len(old))]
        taken = [*whole, *sorted(others, key=lambda pack: pack[0]), *old]
        packs += [sorted(pack) for pack in taken]
        waiting = [piece for piece in waiting if not any(piece in pack for pack in taken)]
    return [[(numbers[place], start, stop) for place, start, stop in pack] for pack in packs]


def room(pack: list[Any], length: int) -> int:
    return length - sum(stop - start for _, start, stop in pack)


def check_joined(packed: dict[str, Any], pieces: Any, length: int) -> None:
    """Check that a sequence is made of pieces of documents."""
    documents = Examples([100] * 100)
    wanted = [(documents[n], slice(start, stop)) for n, start, stop in pieces]
    total = sum(stop - start for _, start, stop in pieces)
    for name in FIELDS:
        values = np.concatenate([np.asarray(each[name])[part] for each, part in wanted])
        assert packed[name][:total].tolist() == values.tolist()
        assert len(packed[name]) == length
        assert not packed[name][total:].any()
    sizes = [stop - start for _, start, stop in pieces]
    numbers = np.repeat(np.arange(len(sizes)), sizes).tolist() + [-1] * (length - total)
    assert packed["segments"].tolist() == numbers
    places = [place for size in [*sizes, length - total] for place in range(size)]
    assert packed["positions"].tolist() == places
    assert packed["id"] == [each["id"] for each, _ in wanted]
    labels = np.where((packed["positions"] == 0) | (packed["segments"] < 0), -100, packed["tokens"])
    assert packed["labels"].tolist() == labels.tolist()
    kinds = {name: packed[name].dtype for name in FIELDS}
    assert kinds == {"tokens": np.int64, "mask": np.bool_, "frames": np.float32}


@given(
    lengths=ragged,
    length=st.integers(1, 40),
    window=st.integers(1, 12),
    shuffled=st.booleans(),
    filtered=st.booleans(),
)
def test_documents_stay_whole_where_they_fit_best(
    lengths: list[int], length: int, window: int, shuffled: bool, filtered: bool
) -> None:
    source = stoker.from_dataset(Examples(lengths), seed=2).workers(0)
    source = source.shuffle() if shuffled else source
    source = source.filter(is_even) if filtered else source
    numbers = [int(each["id"].split()[1]) for each in source]
    how: Any = {"fields": FIELDS, "fit": "best", "window": window, "labels": "labels"}
    found = list(source.pack(length, **how))
    wanted = best_fit(numbers, lengths, length, window)
    assert len(found) == len(wanted)
    for packed, pieces in zip(found, wanted, strict=True):
        check_joined(packed, pieces, length)
    if not filtered:
        planned = source.pack(length, **how, sizes=np.array(lengths, int))
        assert len(planned) == len(found)
        assert stream(planned) == stream(source.pack(length, **how))


@few(20)
@given(
    lengths=ragged,
    length=st.integers(1, 40),
    window=st.integers(1, 12),
    filtered=st.booleans(),
    echoed=st.booleans(),
)
def test_a_window_goes_on_from_every_sequence(
    lengths: list[int], length: int, window: int, filtered: bool, echoed: bool
) -> None:
    def build() -> stoker.Pipeline:
        source = stoker.from_dataset(Examples(lengths), seed=2).shuffle().workers(0)
        source = source.filter(is_even) if filtered else source
        packed = source.pack(length, fields="tokens", fit="best", window=window)
        return packed.echo(2, pool=4) if echoed else packed

    whole, states = stream(build()), list[Any]()
    train = build()
    with iter(train) as rows:
        for _ in rows:
            states.append(through_json(train.state_dict()))
    for number, state in enumerate(states, 1):
        again = build()
        again.load_state_dict(state)
        assert stream(again) == whole[number:]


@given(lengths=ragged, length=st.integers(1, 40))
def test_split_documents_have_all_fields(lengths: list[int], length: int) -> None:
    train = stoker.from_dataset(Examples(lengths))
    how: Any = {"fields": FIELDS, "labels": "labels"}
    whole = [(n, at) for n, size in enumerate(lengths) for at in range(size)]
    found = list(train.pack(length, **how))
    assert len(found) == len(whole) // length
    for number, packed in enumerate(found):
        part, pieces = whole[number * length : (number + 1) * length], []
        for n in sorted({n for n, _ in part}):
            places = [at for document, at in part if document == n]
            pieces.append((n, places[0], places[-1] + 1))
        check_joined(packed, pieces, length)
    planned = train.pack(length, **how, sizes=np.array(lengths, int))
    assert stream(planned) == stream(train.pack(length, **how))


def even_start(packed: Any) -> bool:
    return bool(packed["tokens"][0] % 2)


@stoker.thread_safe
def shifted(packed: Any, rng: np.random.Generator) -> Any:
    return {**packed, "tokens": packed["tokens"] + rng.integers(1_000_000)}


def documents(length: int = 70) -> stoker.Pipeline:
    return stoker.from_dataset(Examples((MANY * 3)[:length]), seed=3).shuffle()


BEST: dict[str, Any] = {"fields": FIELDS, "fit": "best", "window": 6}
PLAN: dict[str, Any] = {**BEST, "sizes": np.array(MANY)}
flat = varlen()
KINDS: dict[str, Callable[[], Any]] = {
    "split": lambda: documents().pack(16, fields=FIELDS).batch(3, collate=flat),
    "best": lambda: documents().pack(16, **BEST).batch(3, collate=flat),
    "tokens alone": lambda: tokens().pack(16, fit="best", window=4).batch(2),
    "long documents": lambda: documents().pack(5, **BEST).random_map(shifted),
    "filters": lambda: documents().filter(is_even).pack(16, **BEST).filter(even_start),
    "echo before": lambda: documents().echo(1.5, pool=9).pack(16, **BEST).batch(2, collate=flat),
    "planned": lambda: documents().pack(16, **PLAN).batch(3, collate=flat),
    "planned, split": lambda: documents().pack(16, **PLAN | {"fit": "split"}),
    "planned, filter": lambda: documents().pack(16, **PLAN).filter(even_start),
    "echo": lambda: documents().pack(16, **BEST).echo(2, pool=8).random_map(shifted),
    "echo of split": lambda: tokens().pack(16).echo(1.5, pool=8).batch(3),
    "echo of planned": lambda: documents().pack(16, **PLAN).echo(2, pool=8).batch(2, collate=flat),
    "echo of batches": lambda: documents().pack(16, **BEST).batch(2, collate=flat).echo(2, pool=3),
    "rank": lambda: (
        documents().shard(rank=1, world_size=2).pack(16, **PLAN).balance().batch(2, collate=flat)
    ),
    "steps": lambda: documents().pack(16, **PLAN).batch(2, collate=flat).repeat().steps(7),
}


def tokens() -> stoker.Pipeline:
    return documents().map(tokens_of)


@stoker.thread_safe
def tokens_of(example: Any) -> Any:
    return np.array(example["tokens"], np.int64)


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_anywhere_and_is_the_same_for_any_workers(kind: str) -> None:
    build = KINDS[kind]
    check_resume(build, every=3)
    assert stream(build().workers(0)) == stream(build().workers(2))


def test_processes_pack_alike() -> None:
    def build() -> Any:
        return documents().map(lambda x: x).pack(16, **BEST).map(lambda x: x)

    assert stream(build().workers(0)) == stream(build().workers(1, kind="process"))


def test_an_echo_hands_out_each_sequence_as_often_as_it_says() -> None:
    for kind in ({}, BEST, PLAN):
        packed = documents().pack(16, **{"fields": FIELDS, **kind})
        once = sorted(str(each["tokens"]) for each in packed)
        uses = sorted(str(each["tokens"]) for each in packed.echo(2, pool=8))
        assert uses == sorted(once * 2)


def test_a_window_is_saved_as_numbers_alone() -> None:
    train = documents().pack(16, **BEST)
    with iter(train) as rows:
        next(rows)
        (node,) = opened(train.state_dict())["parts"]
    assert {*node} == {"kind", "number", "input", "offset", "window"}
    assert len(node["window"]) < 40


@pytest.mark.parametrize("names", ["flash", "transformers"])
def test_a_batch_is_one_row_for_varlen_attention(names: Any) -> None:
    rows = list(documents().pack(16, **BEST))[:2]
    batch = next(iter(documents().pack(16, **BEST).batch(2, collate=varlen(names))))
    both = {name: np.concatenate([row[name] for row in rows]) for name in [*FIELDS, "positions"]}
    begins = [*np.flatnonzero(both["positions"] == 0).tolist(), 32]
    longest = max(np.diff(begins).tolist())
    assert batch["id"] == rows[0]["id"] + rows[1]["id"]
    if names == "transformers":
        assert batch["tokens"].tolist() == [both["tokens"].tolist()]
        assert batch["position_ids"].tolist() == [both["positions"].tolist()]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == begins
        assert batch["max_length_q"] == batch["max_length_k"] == longest
        assert {*batch} == {*FIELDS, "id", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k",
                            "max_length_q", "max_length_k"}  # fmt: skip
    else:
        assert all(batch[name].tolist() == both[name].tolist() for name in both)
        assert batch["cu_seqlens"].tolist() == begins
        assert batch["cu_seqlens"].dtype == np.int32
        assert batch["seq_lens"].tolist() == np.diff(begins).tolist()
        assert (type(batch["max_seqlen"]), batch["max_seqlen"]) == (int, longest)
        of = batch["segments"][batch["segments"] >= 0]
        assert {*of.tolist()} == {*range(len(batch["id"]))}
        assert (np.diff(of) >= 0).all()


def test_tuples_and_named_tuples_have_fields() -> None:
    documents = [(np.arange(3), np.arange(3) * 2, "a"), (np.arange(2), np.arange(2), "b")]
    (packed,) = stoker.from_dataset(documents).pack(5, fields=(0, 1))
    assert packed[1].tolist() == [0, 2, 4, 0, 1]
    assert packed[2] == ["a", "b"]
    rows = stoker.from_dataset([Pair(np.arange(3), 0)])
    (packed,) = rows.pack(3, fields="tokens")
    assert (packed["tokens"].tolist(), packed["of"]) == ([0, 1, 2], [0])
    rows = stoker.from_dataset([{"tokens": [1], "segments": 0}])
    with pytest.raises(stoker.StageError, match="rename"):
        list(rows.pack(1, fields="tokens"))
    rows = stoker.from_dataset([{"tokens": [1], "labels": [1]}])
    with pytest.raises(stoker.StageError, match="is not joined: add it to fields="):
        list(rows.pack(1, fields="tokens", labels="labels"))


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ({"x": [1, 2]}, "no field 'tokens'"),
        ({"tokens": [1, 2], "y": [1]}, "'tokens' has 2 tokens, and 'y' 1"),
        ({"tokens": ["a"], "y": [1]}, "arrays .* of numbers"),
        ({"tokens": 3, "y": [1]}, "arrays .* of numbers"),
        ([1, 2], "dicts and tuples, not of list"),
    ],
)
def test_what_cannot_be_packed_names_the_example(example: Any, says: str) -> None:
    train = stoker.from_dataset([{"tokens": [1], "y": [1]}, example])
    with pytest.raises(stoker.StageError, match=says) as raised:
        list(train.pack(2, fields=["tokens", "y"], fit="best"))
    assert raised.value.index == 1


def test_sizes_that_are_wrong_name_the_example() -> None:
    train = documents().pack(16, **PLAN | {"sizes": np.array([*MANY[:-1], 50])})
    with pytest.raises(stoker.StageError, match=r"has 0 tokens, and 50 by sizes=") as raised:
        list(train)
    assert raised.value.index == 69


def test_wrong_arguments() -> None:
    begin = documents()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fit": "first"}, "'split' or 'best'"),
        ({"window": 0}, "window= from 1"),
        ({"window": "8"}, "whole number"),
        ({"fields": []}, "a list of them"),
        ({"labels": "labels"}, "add fields="),
        ({"sizes": [1, 2]}, "each of the 70 examples"),
    ]
    for how, says in wrong:
        with pytest.raises((ValueError, TypeError), match=says):
            begin.pack(16, **how)
    with pytest.raises(ValueError, match=r"plans before anything is read"):
        begin.filter(is_even).pack(16, **PLAN)
    with pytest.raises(ValueError, match=r"a stream has none"):
        stoker.from_iterable([[1]]).pack(16, sizes=[1])
    with pytest.raises(ValueError, match=r"or give .pack\(\) its sizes="):
        begin.shard(rank=0, world_size=2).pack(16).balance()
    with pytest.raises(ValueError, match=r"put .shard\(\) before"):
        begin.pack(16, **PLAN).balance()
    with pytest.raises(TypeError, match="a number for each example"):
        begin.shard(rank=0, world_size=2).balance()
    with pytest.raises(ValueError, match="'flash' or 'transformers'"):
        varlen("hf")  # type: ignore[arg-type]
    with pytest.raises(stoker.StageError, match=r"what .pack\(\) makes"):
        list(begin.batch(2, collate=flat))
