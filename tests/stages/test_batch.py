"""Batches: their forms, what does not fit together, and whose memory they are."""

from __future__ import annotations

import gc
import itertools
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stoker
from strategies import frozen, one_in, shortened

KINDS = [(0, "thread"), (3, "thread"), (1, "process")]


class Pair(NamedTuple):
    left: Any
    right: Any


Untyped = namedtuple("Untyped", ["a", "b"])


@dataclass
class Plain:
    x: Any
    y: Any
    kept: Any = field(default=7)


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclass(slots=True)
class Slotted:
    x: Any


def batched(examples: list[Any], n: int | None = None, workers: int = 0, kind: str = "thread",
            **how: Any) -> list[Any]:  # fmt: skip
    chain = stoker.from_dataset(examples, seed=0).batch(n or len(examples), **how)
    return list(chain.workers(workers, kind=kind))


FORMS: dict[str, tuple[Any, Any]] = {
    "int": (lambda i: i, np.arange(4)),
    "float": (lambda i: i / 2, np.arange(4) / 2),
    "bool": (lambda i: i > 1, np.arange(4) > 1),
    "complex": (lambda i: i * 1j, np.arange(4) * 1j),
    "numpy scalar": (lambda i: np.float32(i), np.arange(4, dtype=np.float32)),
    "array of no dimension": (lambda i: np.array(i, np.int16), np.arange(4, dtype=np.int16)),
    "array": (lambda i: np.full((2, 3), i), np.arange(4)[:, None, None] + np.zeros((2, 3), int)),
    "empty array": (lambda i: np.zeros((0, 3)), np.zeros((4, 0, 3))),
    "rows without columns": (lambda i: np.zeros((2, 0)), np.zeros((4, 2, 0))),
    "array in another order": (
        lambda i: np.asfortranarray(np.full((2, 3), i)),
        np.arange(4)[:, None, None] + np.zeros((2, 3), int),
    ),
    "string": (lambda i: f"s{i}" * (i + 1), ["s0", "s1s1", "s2s2s2", "s3s3s3s3"]),
    "bytes": (lambda i: b"b" * i, [b"", b"b", b"bb", b"bbb"]),
    "numpy string": (lambda i: np.str_("s" * (i + 1)), ["s", "ss", "sss", "ssss"]),
    "none": (lambda i: None, [None] * 4),
    "tensor": (lambda i: torch.full((2,), i), torch.arange(4)[:, None].expand(4, 2)),
    "scalar tensor": (lambda i: torch.tensor(i), torch.arange(4)),
    "tuple": (lambda i: (i, "x"), (np.arange(4), ["x"] * 4)),
    "list": (lambda i: [i, i + 1], [np.arange(4), np.arange(4) + 1]),
    "empty tuple": (lambda i: (), ()),
    "dict": (lambda i: {"a": i, 3: [i]}, {"a": np.arange(4), 3: [np.arange(4)]}),
    "named tuple": (lambda i: Pair(i, (i,)), Pair(np.arange(4), (np.arange(4),))),
    "old named tuple": (lambda i: Untyped(i, b=2), Untyped(np.arange(4), np.full(4, 2))),
    "dataclass": (lambda i: Plain(i, {"z": i}), Plain(np.arange(4), {"z": np.arange(4)},
                                                      np.full(4, 7))),
    "frozen dataclass": (lambda i: Frozen(i, 1.5), Frozen(np.arange(4), np.full(4, 1.5))),
    "dataclass with slots": (lambda i: Slotted(i), Slotted(np.arange(4))),
    "nested": (
        lambda i: {"a": (i, [Pair(np.full(2, i), None)]), "b": Frozen("x", {"c": i})},
        {
            "a": (np.arange(4), [Pair(np.repeat(np.arange(4)[:, None], 2, 1), [None] * 4)]),
            "b": Frozen(["x"] * 4, {"c": np.arange(4)}),
        },
    ),
    "tensors among arrays": (
        lambda i: (torch.tensor(i), np.full(2, i), i, f"{i}"),
        (
            torch.arange(4),
            torch.arange(4)[:, None].expand(4, 2),
            torch.arange(4),
            ["0", "1", "2", "3"],
        ),
    ),
}  # fmt: skip


# All forms in threads, and in processes some of them in short.
FORMS_OF_KINDS = [
    *itertools.product(FORMS, [0, 3], ["thread"]),
    *one_in(6, itertools.product(FORMS, [1], ["process"])),
]


@pytest.mark.parametrize(("form", "workers", "kind"), FORMS_OF_KINDS)
def test_examples_keep_their_form_in_every_batch(form: str, workers: int, kind: str) -> None:
    make, expected = FORMS[form]  # the first is made in pieces, until it is known what pieces cost
    chain = stoker.from_dataset([make(i) for i in range(4)] * 12, seed=0).batch(4)
    for pipeline in (chain.workers(workers, kind=kind), *([] if workers else [chain])):
        batches = list(pipeline)
        assert len(batches) == 12
        assert all(frozen(batch) == frozen(expected) for batch in batches)
        assert all(stoker.testing.equal(batch, batches[0]) for batch in batches)


@pytest.mark.parametrize(
    "misfit", [3, 1.5, True, "a", b"a", None, np.float32(1), np.zeros(2), (1,)]
)
@pytest.mark.parametrize("one", [2, 0.5, "s", np.float64(2), np.ones(3), (1, 2), [1], {"a": 1}])
def test_a_misfit_in_a_later_batch_is_refused_there(one: Any, misfit: Any) -> None:
    alike = type(one) is type(misfit) and not isinstance(one, (tuple, np.ndarray))
    numbers = (bool, int, float, np.generic)
    if (
        alike
        or (isinstance(one, numbers) and isinstance(misfit, numbers))
        or (isinstance(one, str) and misfit is None)
    ):
        return
    examples = [one] * 40 + [one, misfit] + [one] * 8
    iterator = iter(stoker.from_dataset(examples).batch(2))
    for _ in range(20):
        next(iterator)
    with pytest.raises(
        stoker.StageError, match=r"batch\(2\) failed on batch 20, example 4[01]: .*collate"
    ):
        next(iterator)


def test_whole_numbers_have_the_dtype_that_they_need() -> None:
    wide, huge = 1 << 63, 1 << 70
    chain = stoker.from_dataset([1] * 40 + [wide] * 4 + [-wide] * 4).batch(2)
    assert [batch.dtype for batch in chain] == [np.int64] * 20 + [np.uint64] * 2 + [np.int64] * 2
    assert [batch.tolist() for batch in chain][20:] == [[wide, wide]] * 2 + [[-wide, -wide]] * 2
    for misfit in ([1, wide], [wide, -1], [1, huge]):
        iterator = iter(stoker.from_dataset([1] * 40 + misfit).batch(2))
        for _ in range(20):
            next(iterator)
        with pytest.raises(
            stoker.StageError, match=r"batch 20, example 4[01]: .*no one dtype can hold"
        ):
            next(iterator)


@pytest.mark.parametrize(("form", "workers", "kind"), FORMS_OF_KINDS)
def test_forms_pass_pools_before_and_behind_the_batch(form: str, workers: int, kind: str) -> None:
    make, _ = FORMS[form]
    data = stoker.from_dataset([make(i) for i in range(6)], seed=0)
    for chain in (data.echo(3).batch(2), data.batch(2).echo(3)):
        plain = [frozen(batch) for batch in chain.workers(0)]
        assert len(plain) == 9
        pipeline = chain.workers(workers, kind=kind)
        assert [frozen(batch) for batch in pipeline] == plain
        if form != "empty tuple":  # which does not tell how many it holds
            assert pipeline.stats().uses == 18


def test_tensors_without_a_numpy_dtype_pass_processes() -> None:
    data = [torch.full((2,), i, dtype=torch.bfloat16) for i in range(4)]
    (batch,) = batched(data, workers=1, kind="process")
    assert torch.equal(batch, torch.stack(data))
    found = list(stoker.from_dataset(data).echo(2).workers(1, kind="process"))
    assert len(found) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_tensors_that_inference_mode_asks_for_are_anybody_s(workers: int) -> None:
    tensors = [torch.tensor([i]) for i in range(64)]  # Lightning validates in inference mode
    with torch.inference_mode():
        batches = list(stoker.from_dataset(tensors, seed=0).batch(8).workers(workers))
    for number, batch in enumerate(batches):
        batch += 1  # a tensor of inference mode refuses that here
        assert batch.flatten().tolist() == [8 * number + i + 1 for i in range(8)]


def test_a_tensor_that_requires_grad_is_stacked_without_it() -> None:
    (batch,) = batched([torch.ones(2, requires_grad=True)] * 3)
    assert batch.shape == (3, 2)


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_keys_match_in_whatever_order_they_come(workers: int, kind: str) -> None:
    examples = [{"a": 1, "b": 20}, {"b": 21, "a": 2}, {"a": 3, "b": 22}, {"b": 23, "a": 4}]
    nested = [{"n": example, "x": 0} for example in examples]
    for n in (2, 4):
        for batch, deep in zip(
            batched(examples * 3, n, workers, kind),
            batched(nested * 3, n, workers, kind),
            strict=True,
        ):
            assert set(batch["a"]) <= {1, 2, 3, 4}
            assert set(batch["b"]) <= {20, 21, 22, 23}
            assert set(deep["n"]["a"]) <= {1, 2, 3, 4}


MISFITS: dict[str, tuple[Any, Any]] = {
    "shapes": (np.zeros((2, 3)), np.zeros((2, 4))),
    "dimensions": (np.zeros(3), np.zeros((3, 1))),
    "dtypes": (np.zeros(3, np.float32), np.zeros(3, np.float64)),
    "byte orders": (np.zeros(3, "<i4"), np.zeros(3, ">i4")),
    "array and number": (np.zeros(3), 1.0),
    "times of two units": (np.timedelta64(1, "s"), np.timedelta64(1, "m")),
    "number and time": (1, np.timedelta64(1, "s")),
    "sparse and dense": (torch.zeros(3), torch.zeros(3).to_sparse()),
    "sparse shapes": (torch.zeros(2).to_sparse(), torch.zeros(3).to_sparse()),
    "number and string": (1, "a"),
    "number and none": (1, None),
    "array and none": (np.zeros(2), None),
    "string and bytes": ("a", b"a"),
    "tensor and array": (torch.zeros(3), np.zeros(3)),
    "tensor shapes": (torch.zeros(3), torch.zeros(2)),
    "tensor dtypes": (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
    "tuple lengths": ((1, 2), (1, 2, 3)),
    "tuple and list": ((1, 2), [1, 2]),
    "tuple and number": ((1, 2), 1),
    "keys": ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
    "a key less": ({"a": 1, "b": 2}, {"a": 1}),
    "classes": (Plain(1, 2), Frozen(1, 2)),
    "nesting": ({"a": (1, 2), "b": 3}, {"a": 1, "b": (2, 3)}),
    "nested kinds": ({"a": (1, 2)}, {"a": [1, 2]}),
}


def refused_together(examples: list[Any], workers: int, kind: str) -> None:
    with pytest.raises(stoker.StageError, match=r"batch\(\d+\) failed on batch 0") as caught:
        batched(examples, workers=workers, kind=kind)
    assert caught.value.batch == 0
    assert caught.value.index in ((0, 1) if len(examples) == 2 else (40,))
    assert "collate" in str(caught.value) or "KeyError" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("reverse", [False, True])
def test_examples_that_do_not_fit_together_are_refused(misfit: str, reverse: bool) -> None:
    one, other = MISFITS[misfit][::-1] if reverse else MISFITS[misfit]
    for workers in (0, 3):
        # Whatever runs of examples are stacked together first.
        refused_together([one, other], workers, "thread")
        refused_together([one] * 40 + [other] + [one] * 7, workers, "thread")


@pytest.mark.parametrize("misfit", shortened(MISFITS, 3))
def test_processes_refuse_what_does_not_fit_together(misfit: str) -> None:
    one, other = MISFITS[misfit]
    refused_together([one] * 40 + [other] + [one] * 7, 1, "process")


def test_what_cannot_be_stacked_is_named() -> None:
    with pytest.raises(stoker.StageError, match=r"'a' is of type set.*collate="):
        batched([{"a": {1}}])


def sparse(i: int) -> Any:
    dense = torch.zeros(2, 3)
    dense[0, 2], dense[1, i % 3] = 1, i
    return dense.to_sparse()


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_sparse_tensors_are_stacked_where_torch_can(workers: int, kind: str) -> None:
    data = [(sparse(i), i) for i in range(30)]
    for chain in (stoker.from_dataset(data).batch(3), stoker.from_dataset(data).echo(1.5).batch(3)):
        seen = 0
        for matrices, numbers in chain.workers(workers, kind=kind).to_torch():
            assert matrices.layout == torch.sparse_coo
            expected = [sparse(i).to_dense() for i in numbers.tolist()]
            assert torch.equal(matrices.to_dense(), torch.stack(expected))
            seen += len(numbers)
        assert seen == (30 if chain.chain.echo is None else 45)


LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]


@pytest.mark.parametrize(("workers", "kind"), one_in(3, KINDS))
@pytest.mark.parametrize("layout", shortened(LAYOUTS, 2))
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_pass_in_any_layout(layout: str, workers: int, kind: str) -> None:
    size = {"blocksize": (1, 1)} if "bs" in layout else {}
    data = [sparse(i).to_dense().to_sparse(layout=getattr(torch, layout), **size) for i in range(9)]
    chain = stoker.from_dataset(data).workers(workers, kind=kind)
    for found in (list(chain), [x for batch in chain.batch(2, collate=list) for x in batch]):
        assert [each.layout for each in found] == [getattr(torch, layout)] * 9
        assert all(
            torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(found, data, strict=True)
        )
    assert len(list(chain.echo(2))) == 18
    if layout != "sparse_coo":
        with pytest.raises(stoker.StageError, match=f"{layout}.*sparse_coo.*collate="):
            list(chain.batch(2))


numbers = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False, width=32),
    st.integers(-128, 127).map(np.int8),
    st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.floats(allow_nan=False, width=32).map(np.float32),
    st.integers(-9, 9).map(lambda n: np.array(n, np.int16)),
)


@given(st.lists(numbers, min_size=1, max_size=12), st.sampled_from(KINDS[:2]))
def test_numbers_of_several_types_become_one_dtype(values: list[Any], how: tuple[int, str]) -> None:
    (batch,) = batched(values, None, *how)
    kinds = {np.asarray(value).dtype for value in values}
    if len(kinds) == 1:
        assert batch.dtype in kinds
    else:
        is_float = any(dtype.kind == "f" for dtype in kinds)
        assert batch.dtype == (np.float64 if is_float else np.int64)
    assert batch.tolist() == [batch.dtype.type(value).item() for value in values]


@given(st.lists(numbers, min_size=1, max_size=24), st.lists(st.integers(0, 24), max_size=4))
def test_numbers_are_the_same_in_any_pieces(values: list[Any], cuts: list[int]) -> None:
    from stoker.basics.buffers import Recycler
    from stoker.batching.builder import Builder, collated

    whole, pieces = (Builder(len(values), None, Recycler()) for _ in range(2))
    whole.put(0, values)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(values)}), len(values)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if number % 2:
            pieces.put(start, values[start:stop])
        else:  # as another process sends it
            pieces.put_columns(start, collated(values[start:stop], Recycler()))
    assert frozen(pieces.finish()) == frozen(whole.finish())


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_who_does_not_fit_is_named_with_its_file(workers: int, kind: str, tmp_path: Any) -> None:
    for i in range(24):
        (tmp_path / f"{i:02}.bin").write_bytes(bytes(5 if i == 13 else 4))
    chain = stoker.from_files(sorted(tmp_path.iterdir()), seed=3).shuffle()
    arrays = chain.map(lambda file: np.frombuffer(file.data, np.uint8))
    matrices = arrays.map(lambda x: {"x": x if len(x) < 5 else x[:, None]})
    for train in (
        arrays.batch(8),
        arrays.batch(8, collate=np.stack),
        matrices.batch(8, collate=stoker.collate.pad(on="x")),
        arrays.echo(2).batch(8),
    ):
        with pytest.raises(stoker.StageError, match=r"13\.bin") as caught:
            list(train.workers(workers, kind=kind))
        assert (caught.value.index, caught.value.path) == (13, str(tmp_path / "13.bin"))
        assert caught.value.batch is not None


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_none_and_ragged_arrays_are_shown_with_a_way_out(workers: int, kind: str) -> None:
    data = [{"x": np.zeros(2), "y": None if i == 11 else i} for i in range(24)]
    with pytest.raises(stoker.StageError, match=r"'y' .*NoneType, int.*\.filter\(\)") as caught:
        list(stoker.from_dataset(data).batch(8).workers(workers, kind=kind))
    assert caught.value.index == 11
    ragged = [{"image": np.zeros((5 if i == 3 else 4, 3), np.uint8)} for i in range(4)]
    with pytest.raises(stoker.StageError) as caught:
        batched(ragged, workers=workers, kind=kind)
    for part in ("'image'", "uint8 [4, 3]", "uint8 [5, 3]", "resize, crop, pad", "collate="):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("odd", range(8))
def test_who_is_odd_is_in_the_minority(odd: int) -> None:
    data = [np.zeros((3, 1) if i == odd else 2) for i in range(8)]
    labels = [None if i == odd else i for i in range(8)]
    trials: list[tuple[list[Any], dict[str, Any]]] = [
        (data, {}),
        (labels, {}),
        (data, {"collate": np.stack}),
        ([(x,) for x in data], {"collate": stoker.collate.pad(on=0)}),
    ]
    for examples, how in trials:
        with pytest.raises(stoker.StageError) as caught:
            batched(examples, **how)
        assert caught.value.index == odd


def test_a_collate_that_fails_on_all_blames_none() -> None:
    def broken(examples: list[Any]) -> Any:
        raise LookupError("broken")

    for n in (1, 2, 3, 8):
        with pytest.raises(stoker.StageError, match="batch 0") as caught:
            batched(list(range(8)), n, collate=broken)
        assert caught.value.index == (0 if n == 1 else None)


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_collate_is_given_the_examples_in_order_and_a_failure_names_the_batch(
    workers: int, kind: str
) -> None:
    def joined(examples: list[str]) -> Any:
        assert type(examples) is list
        if "five" in examples:
            raise LookupError("five")
        return {
            "text": "".join(examples),
            "lengths": [len(e) for e in examples],
            "n": len(examples),
        }

    first = [
        {"text": "abb", "lengths": [1, 2], "n": 2},
        {"text": "cccd", "lengths": [3, 1], "n": 2},
    ]
    found = batched(["a", "bb", "ccc", "d", "ee"], 2, workers, kind, collate=joined)
    assert found == [*first, {"text": "ee", "lengths": [2], "n": 1}]
    chain = stoker.from_dataset(["a", "bb", "ccc", "d", "ee", "five"]).batch(2, collate=joined)
    iterator = iter(chain.workers(workers, kind=kind))
    assert [next(iterator), next(iterator)] == first
    with pytest.raises(stoker.StageError, match=r"batch 2, example 5: LookupError: five") as caught:
        next(iterator)
    assert (caught.value.batch, caught.value.index) == (2, 5)


# -- memory


BIG = 1 << 14  # doubles in a row: its batches come from recycled memory


def rows(workers: int, kind: str = "thread", **how: Any) -> stoker.Pipeline:
    data = [np.full(BIG, i, np.float64) for i in range(24)]
    return stoker.from_dataset(data, **how).batch(2).workers(workers, kind=kind)


@pytest.mark.parametrize(("workers", "kind"), KINDS)
@pytest.mark.parametrize(
    "keep",
    one_in(
        3,
        [
            lambda b: b,
            lambda b: b[1:],
            lambda b: b[1:].reshape(-1)[5:].T,
            lambda b: b.view(np.uint8)[:, 3:],
            lambda b: memoryview(b),
            lambda b: torch.from_numpy(b),
            lambda b: torch.from_numpy(b)[1:, 7:],
            lambda b: np.frombuffer(b, np.float64),
            lambda b: b.astype(np.float64, copy=False),
        ],
    ),
)
def test_what_is_kept_of_a_batch_never_changes(keep: Any, workers: int, kind: str) -> None:
    kept = []
    for number, batch in enumerate(rows(workers, kind)):
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        if number % 3 != 2:
            part = keep(batch)
            kept.append((part, np.asarray(part).copy()))
        del batch
    gc.collect()
    for part, as_it_was in kept:
        assert np.array_equal(np.asarray(part), as_it_was)


def test_tensors_from_to_cpu_are_kept_too() -> None:
    kept = [(batch[1:], batch[1:].clone()) for batch in rows(2).to_torch()]
    assert len(kept) == 12
    assert all(torch.equal(part, as_it_was) for part, as_it_was in kept)


def test_memory_that_nobody_keeps_is_used_again() -> None:
    addresses = set()
    for batch in rows(0):
        addresses.add(batch.ctypes.data)
        del batch
    assert len(addresses) <= 4


def test_kept_batches_share_no_memory() -> None:
    kept = list(rows(2))
    starts = sorted(batch.ctypes.data for batch in kept)
    assert all(b - a >= kept[0].nbytes for a, b in itertools.pairwise(starts))
    assert all(start % 64 == 0 for start in starts)


@given(
    st.lists(st.sampled_from(["keep", "drop", "forget"]), min_size=1, max_size=60),
    st.integers(0, 12),
)
def test_recycled_arrays_are_nobody_else_s(orders: list[str], room: int) -> None:
    from stoker.basics.buffers import Recycler

    recycler = Recycler(spare_bytes=room << 18)
    kept: list[tuple[Any, int]] = []
    most = 0  # arrays at once
    for number, order in enumerate(orders):
        array = recycler.array((2, 1 << 14), np.int64)
        array.fill(number)
        most = max(most, len(kept) + 1)
        if order == "keep":
            kept.append((array[1:] if number % 2 else array, number))
        elif order == "forget" and kept:
            kept.pop(number % len(kept))
        del array
        assert all((part == value).all() for part, value in kept)
    kept.clear()
    assert recycler.held_bytes() == min(most, max(recycler.spare, room)) << 18


@given(st.lists(st.sampled_from([1 << 16, 3 << 16, 5 << 16]), max_size=20), st.integers(1, 12))
def test_little_memory_is_kept_while_no_array_is_wanted(sizes: list[int], room: int) -> None:
    from stoker.basics.buffers import Recycler

    recycler = Recycler(resting_bytes=room << 16)
    arrays = [recycler.array((size,), np.uint8) for size in sizes]
    del arrays
    before = recycler.held_bytes()
    recycler.rest()
    assert min(before, (room - 4) << 16) <= recycler.held_bytes() <= min(before, room << 16)


def test_the_memory_of_batches_and_of_pools_stays_for_the_next_epoch() -> None:
    rows = np.zeros((64, 1 << 16), np.uint8)
    whole = stoker.from_arrays(rows[:32], seed=0).batch(32).workers(0)
    echoed = stoker.from_arrays(rows, seed=0).batch(2).echo(2, pool=8).workers(0)
    for _ in range(2):
        assert sum(len(batch) for batch in whole) == 32
        assert whole.stats().window_bytes == 1 << 21
        assert sum(len(batch) for batch in echoed) == 128
        assert echoed.stats().window_bytes >= 8 << 17


@given(st.lists(st.sampled_from(["keep", "drop", "forget"]), min_size=1, max_size=30))
def test_copies_of_tensors_are_nobody_else_s(orders: list[str]) -> None:
    from stoker.basics.buffers import Recycler

    recycler = Recycler()
    stored = torch.zeros(2, BIG)
    kept: list[tuple[Any, int]] = []
    for number, order in enumerate(orders):
        copy = recycler.copy({"x": stored})["x"]
        assert not copy.any()
        copy.fill_(number + 1)
        if order == "keep":
            kept.append((copy[1:].numpy() if number % 2 else copy.T, number + 1))
        elif order == "forget" and kept:
            kept.pop(number % len(kept))
        del copy
        assert all((part == value).all() for part, value in kept)
    assert not stored.any()
    if "keep" not in orders:
        assert recycler.held_bytes() == stored.nbytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(2.0 * BIG).reshape(2, -1),
        torch.arange(2.0 * BIG).reshape(-1, 2).T,
        torch.arange(2.0 * BIG)[::2],
        torch.arange(2.0 * BIG).bfloat16(),
        torch.arange(2.0 * BIG).to(torch.complex64).conj(),
        torch.arange(2.0 * BIG).to(torch.complex64).conj().imag,
        torch.arange(2.0 * BIG).requires_grad_(),
        torch.nn.Parameter(torch.arange(2.0 * BIG)),
        torch.arange(2.0 * BIG).to_sparse(),
        torch.arange(3.0),
    ],
)
def test_copies_of_tensors_are_what_clones_are(tensor: Any) -> None:
    from stoker.basics.buffers import Recycler

    copy, clone = Recycler().copy(tensor), tensor.detach().clone()
    assert (type(copy), copy.dtype, copy.shape) == (type(clone), clone.dtype, clone.shape)
    assert (copy.layout, copy.requires_grad) == (clone.layout, False)
    assert copy.is_sparse or copy.stride() == clone.stride()
    assert torch.equal(copy.to_dense(), clone.to_dense())


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_structured_arrays_beside_others(workers: int, kind: str) -> None:
    points = np.array([(1, 0.5), (2, 1.5), (3, 2.5)], [("x", np.int32), ("y", np.float64)])
    train = stoker.from_arrays(points, np.arange(3), seed=0).batch(2).workers(workers, kind=kind)
    batches = list(train)
    assert np.concatenate([batch[0] for batch in batches]).tolist() == points.tolist()
    assert {batch[0].dtype for batch in batches} == {points.dtype}


def test_arrays_of_the_other_byte_order_beside_tensors() -> None:
    swapped = np.arange(3).astype(np.dtype(np.int32).newbyteorder())
    (batch,) = batched([(torch.zeros(2), swapped)] * 2)
    assert batch[1].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_numbers_of_the_other_byte_order_are_put_right_for_any_workers(
    workers: int, kind: str
) -> None:
    swapped = np.arange(5).astype(np.dtype(np.int32).newbyteorder())
    train = stoker.from_arrays(swapped, seed=0).batch(5).map(np.negative)
    (batch,) = train.workers(workers, kind=kind)
    assert batch.tolist() == [0, -1, -2, -3, -4]
    assert batch.dtype == np.int32


def test_a_pool_keeps_structured_rows_from_those_who_write() -> None:
    def moved(point: Any, rng: np.random.Generator) -> Any:
        point["x"] += 1
        return point

    points = np.array([(1,), (2,)], [("x", np.int32)])
    train = stoker.from_arrays(points, seed=0).echo(3).random_map(moved)
    assert sorted(int(point["x"]) for point in train) == [2, 2, 2, 3, 3, 3]
