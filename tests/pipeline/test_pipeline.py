"""Pipelines: the guarantees of the design as properties, the cursor, and wrong arguments."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from strategies import (
    POINTS,
    Examples,
    Spec,
    built,
    factors,
    few,
    frozen,
    halve,
    ids,
    jitter,
    small_pools_allowed,
    source_of,
    specs,
    spoil,
    stream,
    through_json,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*are fewer than.*ranks")

PLACES = {
    "before": "example echoing before augmentation",
    "after": "example echoing after augmentation",
    "batch": "batch echoing",
    "device": "batch echoing on the device",
}


# -- the stream


@few(40)
@given(specs(max_examples=60, max_filters=3, ranks=True), st.integers(1, 4))
def test_the_stream_is_the_same_for_any_threads(spec: Spec, workers: int) -> None:
    alone, several = built(spec, 0), built(spec, workers)
    for _ in range(2):  # the second epoch begins with what the first one learnt about speed
        assert stream(alone) == stream(several)


@few(12)
@given(specs(max_examples=25, max_filters=3, ranks=True), st.integers(1, 2))
@example(  # two uses of one item in one request
    Spec(examples=1, batch=2, shuffle=False, echoes=(("before", Fraction(5), None),)), 1
)
def test_the_stream_is_the_same_for_any_processes(spec: Spec, workers: int) -> None:
    assert stream(built(spec, workers, "process")) == stream(built(spec, 0))


@given(specs())
def test_the_same_seed_gives_the_same_epochs(spec: Spec) -> None:
    one, other = built(spec, 0), built(spec, 0)
    epochs = [stream(one) for _ in range(3)]
    assert [stream(other) for _ in range(3)] == epochs


def test_without_a_seed_one_is_drawn_and_kept() -> None:
    pipeline = stoker.from_dataset(Examples(30)).shuffle().batch(4)
    again = stoker.from_dataset(Examples(30), seed=pipeline.seed).shuffle().batch(4)
    assert stream(pipeline) == stream(again)
    assert str(pipeline.seed) in str(pipeline)


@given(specs(max_echoes=1), st.sampled_from(POINTS), st.sampled_from([1, 1.0, Fraction(1)]))
def test_echo_of_one_is_the_identity(spec: Spec, place: str, factor: Any) -> None:
    one = (place, factor, None)
    if place in [point for point, _, _ in spec.echoes]:
        spec = Spec(**{**vars(spec), "echoes": ()})
    to = spec.to or place == "device"
    without = Spec(**{**vars(spec), "to": to})
    with_one = Spec(**{**vars(spec), "to": to, "echoes": (*spec.echoes, one)})
    assert stream(built(with_one, 0)) == stream(built(without, 0))
    plain = built(with_one, 0)
    stream(plain)
    assert len(plain) == len(built(without, 0))
    assert (plain.stats().pool is not None) == bool(without.echoes)


@given(specs(max_echoes=1), st.booleans())
def test_an_unshuffled_epoch_without_echo_is_the_source_in_order(spec: Spec, to: bool) -> None:
    spec = Spec(**{**vars(spec), "echoes": (), "shuffle": False, "to": to, "drop_last": False})
    found = [ids(batch) for batch in built(spec, 0)]
    assert [i for batch in found for i in batch] == list(range(spec.examples))
    assert all(len(batch) == spec.batch for batch in found[:-1])


# -- counts


@given(specs())
@example(Spec(0, 4, echoes=(("device", Fraction(2), None),), to=True))
@example(Spec(1, 4, echoes=(("before", Fraction(5), 4),)))
@example(Spec(1, 1, echoes=(("before", Fraction(3, 2), 1),), drop_last=True))
@example(Spec(3, 4, echoes=(("after", Fraction(5), 100),), drop_last=True))
def test_len_is_the_number_of_batches(spec: Spec) -> None:
    pipeline = built(spec, 0)
    assert len(pipeline) == spec.outputs
    with small_pools_allowed(), iter(pipeline) as batches:
        for left in range(spec.outputs, 0, -1):
            assert len(batches) == left
            next(batches)
        assert len(batches) == 0
        assert next(batches, None) is None
        assert next(batches, None) is None


@pytest.mark.parametrize("points", [("before", "after"), ("batch", "device")])
@given(data=st.data())
def test_everything_is_used_exactly_as_often_as_its_count_says(
    points: tuple[str, ...], data: st.DataObject
) -> None:
    spec = data.draw(specs(max_echoes=1, min_echoes=1, points=points))
    of_batches = "batch" in points
    drop_last = of_batches and spec.drop_last
    spec = Spec(**{**vars(spec), "drop_last": drop_last, "shuffle": False})
    ((_, factor, _),) = spec.echoes
    seen: Counter[int] = Counter()
    with small_pools_allowed():
        for batch in built(spec, 0):
            found = ids(batch)
            seen.update([found[0] // spec.batch] if of_batches else found)
    count = len(seen) if of_batches else spec.examples
    assert [seen[n] for n in range(count)] == [
        int(factor * (n + 1)) - int(factor * n) for n in range(count)
    ]


@pytest.mark.parametrize("place", ["before", "after"])
@given(factor=factors, examples=st.integers(4, 40), seed=st.integers(0, 99))
@few(10)
def test_uses_differ_before_augmentation_and_are_alike_after(
    place: str, factor: Fraction, examples: int, seed: int
) -> None:
    spec = Spec(examples, 4, seed=seed, echoes=((place, factor, None),))
    views: dict[int, list[bytes]] = {}
    for batch in built(spec, 0):
        for i, row in zip(ids(batch), batch["x"], strict=True):
            views.setdefault(i, []).append(row.tobytes())
    for found in views.values():
        assert len(set(found)) == (len(found) if place == "before" else 1)


# -- ownership


def spoilt(batches: Iterable[Any]) -> list[Any]:
    """Return batches bit for bit, and write into each before the next one comes."""
    found = []
    with small_pools_allowed():
        for batch in batches:
            found.append(frozen(batch))
            spoil(batch)
    return found


@given(specs(), st.sampled_from([0, 2]))
def test_a_consumer_that_writes_into_its_batches_harms_nobody(spec: Spec, workers: int) -> None:
    assert spoilt(built(spec, workers)) == stream(built(spec, 0))


@few(5)
@given(specs(max_examples=20))
def test_a_consumer_that_writes_harms_no_process_worker_s_batch(spec: Spec) -> None:
    assert spoilt(built(spec, 1, "process")) == stream(built(spec, 0))


def add_pure(x: Any, rng: np.random.Generator) -> Any:
    return x + rng.random(x.shape)


@given(specs(points=("before", "after")))
def test_random_maps_that_write_in_place_give_what_pure_ones_give(spec: Spec) -> None:
    def run(fn: Any) -> list[Any]:
        on = 1 if spec.source in ("arrays", "tuples") else "x"
        pipeline = source_of(spec)
        for _, factor, pool in spec.echoes:
            pipeline = pipeline.echo(factor, pool=pool).random_map(fn, on=on)  # type: ignore[arg-type]
        return stream(pipeline.batch(spec.batch).workers(0))

    assert run(jitter) == run(add_pure)


@given(factors, st.integers(1, 30), st.integers(1, 6))
def test_batches_that_are_written_into_behind_a_batch_echo_stay_apart(
    factor: Any, examples: int, size: int
) -> None:
    rows = np.arange(examples * 2, dtype=np.float64).reshape(-1, 2)
    echoed = stoker.from_arrays(rows, seed=2).batch(size).echo(factor)
    in_place, pure = (spoilt(echoed.random_map(fn).workers(0)) for fn in (jitter, add_pure))
    assert in_place == pure


@given(specs(), st.sampled_from([0, 2]))
def test_kept_batches_never_change(spec: Spec, workers: int) -> None:
    kept, as_they_came = [], []
    with small_pools_allowed():
        for batch in built(spec, workers):
            kept.append(batch)
            as_they_came.append(frozen(batch))
    assert [frozen(batch) for batch in kept] == as_they_came


# -- the cursor


def test_the_chain_is_immutable() -> None:
    base = stoker.from_dataset(Examples(10), seed=0)
    batched = base.batch(2)
    echoed = batched.echo(2)
    assert len(base) == 10
    assert len(batched) == 5
    assert len(echoed) == 10
    list(batched)
    assert (base.epoch, batched.epoch, echoed.epoch) == (0, 1, 0)


def test_every_loop_is_the_next_epoch_and_set_epoch_goes_to_any() -> None:
    pipeline, twin = (
        stoker.from_dataset(Examples(10), seed=0).shuffle().batch(4) for _ in range(2)
    )
    epochs = [stream(twin) for _ in range(3)]
    assert pipeline.epoch == 0
    assert stream(pipeline) == epochs[0]
    assert pipeline.epoch == 1
    iterator = iter(pipeline)
    next(iterator)
    assert pipeline.epoch == 1
    iterator.close()
    assert stream(pipeline) == epochs[2]  # what was left early is behind us: the next epoch
    assert pipeline.epoch == 3
    pipeline.set_epoch(1)
    assert pipeline.epoch == 1
    assert [stream(pipeline), stream(pipeline)] == epochs[1:]


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", None, True])
def test_wrong_epochs_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="epoch"):
        stoker.from_dataset(Examples(3)).set_epoch(wrong)


def test_an_epoch_that_could_not_begin_is_not_skipped() -> None:
    class Hesitant:
        tries = 0

        def __iter__(self) -> Any:
            self.tries += 1
            if self.tries == 1:
                raise OSError("not yet")
            return iter([np.zeros(1)])

    pipeline = stoker.from_loader(Hesitant())
    with pytest.raises(OSError, match="not yet"):
        iter(pipeline)
    assert pipeline.epoch == 0
    list(pipeline)
    assert pipeline.epoch == 1


# -- what is shown


@pytest.mark.parametrize("point", POINTS)
def test_print_names_the_insertion_point(point: str) -> None:
    spec = Spec(53, 8, seed=3, echoes=((point, Fraction(2), None),), to=point == "device")
    shown = str(built(spec))
    assert f"; {PLACES[point]};" in shown.replace("  ", "; ")
    assert "seed 3" in shown


@pytest.mark.parametrize("second", [3, "auto"])
@pytest.mark.parametrize("first", [2, "auto"])
def test_a_pipeline_echoes_once(first: Any, second: Any) -> None:
    train = stoker.from_arrays(np.zeros(3), seed=0).echo(first)
    assert train.echo(1) is not train  # which echoes nothing
    for twice in (train.map(abs), train.batch(1)):
        with pytest.raises(ValueError, match=r"cannot follow echo\(.*: echo once, .* product of"):
            twice.echo(second)


def test_print_names_an_echo_without_augmentation() -> None:
    assert "nothing is augmented" in str(stoker.from_arrays(np.zeros(3)).echo(2).batch(1))


@given(specs())
def test_print_shows_every_stage(spec: Spec) -> None:
    pipeline = built(spec, 1)
    shown = str(pipeline)
    assert len(shown.splitlines()) >= 4
    assert shown.count(".echo(") == len(spec.echoes)
    assert f".batch({spec.batch})" in shown
    assert repr(pipeline).startswith("<stoker.Pipeline ")
    assert "\n" not in repr(pipeline)


# -- wrong arguments


def chain() -> stoker.Pipeline:
    return stoker.from_arrays(np.zeros((8, 2)), np.arange(8), seed=0)


def of_stream() -> stoker.Pipeline:
    return stoker.from_iterable(range(3))


class Loader:
    def __iter__(self) -> Any:
        return iter([np.zeros(2)])


def no_rng(x: Any) -> Any:
    return x


def three(a: Any, b: Any, c: Any) -> Any:
    return a


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "factor below 1": (lambda: chain().echo(0.5), ValueError, "at least 1"),
    "factor nan": (lambda: chain().echo(float("nan")), ValueError, "at least 1"),
    "pool below a batch": (lambda: chain().echo(2, pool=3).batch(4), ValueError, "at least 8"),
    "pool of no size": (lambda: chain().echo(2, pool="lots"), ValueError, "2GiB"),
    "pool float": (lambda: chain().echo(2, pool=2.5), TypeError, "2GiB"),  # type: ignore[arg-type]
    "buffer of 1": (lambda: of_stream().shuffle(buffer=1), ValueError, "at least two"),
    "buffer true": (lambda: of_stream().shuffle(buffer=True), ValueError, "True"),
    "buffer of a float": (lambda: of_stream().shuffle(buffer=9.5), ValueError, "9.5"),  # type: ignore[arg-type]
    "no such field": (lambda: chain().map(no_rng, on="image"), LookupError, "0, 1"),
    "no such position": (lambda: chain().map(no_rng, on=2), LookupError, "0, 1"),
    "no such field behind a map of a field": (
        lambda: chain().map(no_rng, on=0).random_map(jitter, on="x"), LookupError, "0, 1"
    ),
    "field of a single array": (
        lambda: stoker.from_arrays(np.zeros(3)).map(no_rng, on=0), LookupError, "single arrays"
    ),
    "random map of three": (lambda: chain().random_map(cast(Any, three)), TypeError, "rng"),
    "batch of a bool": (lambda: chain().batch(True), TypeError, "whole number"),
    "shuffle twice": (lambda: chain().shuffle().shuffle(), ValueError, "first"),
    "to twice": (lambda: chain().batch(2).to_torch().to_torch(), ValueError, "once"),
    "no processes": (lambda: chain().workers(0, kind="process"), ValueError, "0"),
    "seed bool": (lambda: stoker.from_arrays(np.zeros(3), seed=True), TypeError, "seed"),
    "an array of no dimension": (lambda: stoker.from_arrays(np.array(1)), TypeError, "dimension"),
    "a loader, shuffled": (
        lambda: stoker.from_loader(Loader()).shuffle(), ValueError, "shuffle=True"
    ),
    "a loader, batched": (lambda: stoker.from_loader(Loader()).batch(2), ValueError, "batch_size"),
    "a loader with workers": (
        lambda: stoker.from_loader(Loader()).workers(2), ValueError, "num_workers"
    ),
    "budget true": (lambda: source_of(Spec(3, 1, max_errors=True)), TypeError, "a number"),
    "budget none": (lambda: source_of(Spec(3, 1, max_errors=None)), TypeError, "a number"),  # type: ignore[arg-type]
    "budget below 0": (lambda: source_of(Spec(3, 1, max_errors=-1)), ValueError, "-1"),
    "budget of 2.0": (lambda: source_of(Spec(3, 1, max_errors="200%")), ValueError, "as text"),
    "budget of 0.1": (
        lambda: source_of(Spec(3, 1, max_errors=0.1)),  # type: ignore[arg-type]
        TypeError,
        "as text such as \"1%\"; not 0.1",
    ),
    "budget of words": (lambda: source_of(Spec(3, 1, max_errors="raise")), ValueError, "'raise'"),
    "a filter's budget": (lambda: chain().filter(no_rng, max_errors=True), TypeError, "number"),
    "a random map's budget": (
        lambda: chain().random_map(jitter, on=0, max_errors="150%"), ValueError, "not '150%'"
    ),
    "a budget behind a batch": (
        lambda: chain().batch(2).map(no_rng, max_errors=1), ValueError, r"after \.batch"
    ),
    "a budget on a loader": (
        lambda: stoker.from_loader(Loader()).map(no_rng, max_errors=1), ValueError, "max_errors"
    ),
    "a filter behind a batch": (
        lambda: chain().batch(2).filter(no_rng), ValueError, r"before \.batch"
    ),
    "a filter on a loader": (
        lambda: stoker.from_loader(Loader()).filter(no_rng), ValueError, "examples"
    ),
    "classes of no folder": (lambda: chain().class_names, AttributeError, "folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_in_one_line_that_says_what_to_do(case: str) -> None:
    wrong, kind, says = WRONG[case]
    with pytest.raises(kind, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert not isinstance(caught.value, KeyError)  # whose text is quoted


def test_a_field_that_an_example_lacks_is_named_with_those_it_has() -> None:
    pipeline = stoker.from_dataset(Examples(3)).map(halve, on="image").batch(2)
    with pytest.raises(stoker.StageError, match=r"'image'.*'id', 'x', 'name'") as caught:
        list(pipeline)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factor", [2, "auto"])
def test_a_pool_of_bytes_smaller_than_a_batch_is_refused(factor: Any) -> None:
    pipeline = stoker.from_arrays(np.zeros((100, 1000))).echo(factor, pool="20KB").batch(8)
    with pytest.raises(ValueError, match=r"pool of .* holds 2 items .* batch of 8"):
        list(pipeline)


@pytest.mark.parametrize("factor", [2, "auto"])
def test_a_pool_of_more_bytes_than_there_is_memory_takes_what_there_is(factor: Any) -> None:
    def build() -> stoker.Pipeline:
        return stoker.from_dataset(Examples(40), seed=0).echo(factor, pool="900TiB").batch(4)

    pipeline = build().workers(2)
    with pytest.warns(UserWarning, match="instead of 921600.0 GiB: there is no more memory"):
        first = next(iterator := iter(pipeline))
    held = pipeline.stats().pool_bytes
    assert first is not None
    assert 0 < held < psutil.virtual_memory().total
    state = through_json(pipeline.state_dict())
    iterator.close()
    resumed = build().workers(2)
    resumed.load_state_dict(state)
    with iter(resumed) as iterator:  # without a warning: the size is the state's
        next(iterator)
        assert resumed.stats().pool_bytes == held


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pool_of_bytes_does_not_hide_a_failing_first_example(workers: int) -> None:
    def fail(x: Any) -> Any:
        raise ArithmeticError("always")

    pipeline = stoker.from_arrays(np.zeros((100, 10))).map(fail).echo(2, pool="2TiB").batch(8)
    with pytest.raises(stoker.StageError, match="always"):
        list(pipeline.workers(workers))


def test_a_pool_that_cannot_keep_uses_apart_warns_where_it_is_used() -> None:
    for workers in (0, 2):
        pipeline = stoker.from_dataset(Examples(20), seed=0).echo(3, pool=8).batch(4)
        pipeline = pipeline.workers(workers)
        with pytest.warns(UserWarning, match="pool of 8.*at least 12") as caught:
            list(pipeline)
        assert [said.filename for said in caught] == [__file__]
        again = iter(pipeline.workers(workers))
        with pytest.warns(UserWarning, match="pool of 8.*at least 12") as caught:
            next(again)
        assert [said.filename for said in caught] == [__file__]
        again.close()
    of_batches = stoker.from_dataset(Examples(20), seed=0).batch(4).echo(2, pool=1).workers(0)
    with pytest.warns(UserWarning, match="pool of 1.*at least 2"):
        list(of_batches)


def test_builtins_without_a_signature_are_taken() -> None:
    assert [int(x) for x in stoker.from_arrays(np.arange(3)).map(int)] == [0, 1, 2]


# -- without batches


@given(st.integers(0, 30), factors, st.sampled_from([0, 2]))
def test_a_pipeline_without_batches_yields_examples(
    examples: int, factor: Any, workers: int
) -> None:
    pipeline = stoker.from_dataset(Examples(examples), seed=0).echo(factor).workers(workers)
    with small_pools_allowed():
        found = [example["id"] for example in pipeline]
    assert len(found) == len(pipeline) == int(factor * examples)
    assert set(found) == set(range(examples))
    assert all(a != b for a, b in itertools.pairwise(found)) or examples < 3
