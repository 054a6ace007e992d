"""What the stages of a chain do to examples: layers in order, each told what stands behind it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from stoker.chain.chain import Chain
from stoker.engine.flow import Flow, Own, Sift
from stoker.engine.skip import RAISE
from stoker.engine.work.segment import Segment
from stoker.pipeline import Pipeline
from stoker.schedule.selection import Selection
from stoker.stages.batching.batch import Batch
from stoker.stages.filter import Filter
from stoker.stages.map import Map
from stoker.stages.to import To
from strategies import few


def _same(value: Any) -> Any:
    return value


def _drawn(value: Any, rng: np.random.Generator) -> Any:
    return value


def _yes(value: Any) -> bool:
    return True


Step = Callable[[Pipeline[Any]], Pipeline[Any]]

STEPS: dict[str, Step] = {
    "shuffle": lambda p: p.shuffle(),
    "shard": lambda p: p.shard(rank=1, world_size=3),
    "take": lambda p: p.take(5),
    "skip": lambda p: p.skip(3),
    "map": lambda p: p.map(_same),
    "map that skips": lambda p: p.map(_same, max_errors=2),
    "map that raises": lambda p: p.map(_same, max_errors=0),
    "random map": lambda p: p.random_map(_drawn),
    "filter": lambda p: p.filter(_yes),
    "filter that skips": lambda p: p.filter(_yes, max_errors=3),
    "echo": lambda p: p.echo(2),
    "adaptive echo": lambda p: p.echo("auto"),
    "batch": lambda p: p.batch(4),
    "to": lambda p: Pipeline(p.chain.then(To("cpu"))),
}

SOURCES: dict[str, Callable[[], Pipeline[Any]]] = {
    "dataset": lambda: stoker.from_dataset(list(range(20)), seed=1),
    "dataset with a budget": lambda: stoker.from_dataset(list(range(20)), seed=1, max_errors=2),
    "iterable": lambda: stoker.from_iterable(list(range(20)), seed=1),
    "iterable with a budget": lambda: stoker.from_iterable(range(20), seed=1, max_errors="50%"),
    "loader": lambda: stoker.from_loader([[1, 2], [3, 4]], seed=1),
}

# Selection first and batches in the middle, so that few steps are refused.
_select = st.lists(st.sampled_from(["shuffle", "shard", "take", "skip"]), max_size=3)
_each = st.lists(
    st.sampled_from([name for name in STEPS if name not in ("batch", "to")]), max_size=5
)
_batches = st.lists(st.sampled_from(["map", "random map", "echo", "adaptive echo"]), max_size=3)
_tails = st.one_of(
    st.just([]),
    st.builds(lambda a, b: ["batch", *a, "to", *b], _batches, _batches),
    st.builds(lambda a: ["batch", *a], _batches),
)
steps_of_chains = st.tuples(_select, _each, _tails).map(lambda layers: [*itertools.chain(*layers)])


def built(source: str, steps: list[str]) -> Chain:
    """Return the chain of those steps that may stand where they are."""
    pipeline = SOURCES[source]()
    for step in steps:
        try:
            pipeline = STEPS[step](pipeline)
        except ValueError:
            continue
    return pipeline.chain


def letters(flow: Flow) -> str:
    """Return the kinds of the layers: segments, filter points, echo points, device points."""
    return "".join(map(letter, flow.layers))


def letter(layer: Any) -> str:
    if isinstance(layer, Segment):
        return "s"
    return "f" if is_sift(layer) else "e" if is_echo(layer) else "d"


def is_echo(layer: Any) -> bool:
    return isinstance(layer, Own) and layer.stage.traits.repeats


def is_sift(layer: Any) -> bool:
    return isinstance(layer, Sift)


def expected_letters(chain: Chain) -> str:
    """Return the kinds of the layers that a chain should have, stretch by stretch.

    A stretch is what stands between two points; points are pools and the way to a device.
    """
    stretches: list[list[Any]] = [[]]
    points = []
    for stage in chain.stages:
        if stage.traits.repeats or stage.traits.moves:
            points.append("e" if stage.traits.repeats else "d")
            stretches.append([])
        elif not stage.traits.selects:
            stretches[-1].append(stage)
    found, batched = "", chain.source.yields_batches
    for stretch, point in zip(stretches, [*points, ""], strict=True):
        is_first = not found and not chain.source.yields_batches
        if stretch or is_first or found.endswith("e"):
            splits = not batched and _may_leave_out(chain, stretch, is_read=is_first)
            batched = batched or any(isinstance(stage, Batch) for stage in stretch)
            found += ("sfs" if batched else "sf") if splits else "s"
        found += point
    return found + ("s" if found.endswith("f") else "")


def _may_leave_out(chain: Chain, stretch: list[Any], *, is_read: bool) -> bool:
    """Whether some examples may be left out in a stretch; ``is_read``: it reads the source."""
    batches = (at for at, stage in enumerate(stretch) if isinstance(stage, Batch))
    single = stretch[: next(batches, None)]
    if not single and not (is_read and chain.source.is_indexed):
        return False  # nothing is done that could fail
    budgets = [chain.budget, *(stage.budget for stage in single if stage.budget is not None)]
    return any(isinstance(s, Filter) for s in single) or any(b != RAISE for b in budgets)


chains = st.builds(built, st.sampled_from(sorted(SOURCES)), steps_of_chains)
indexed_chains = st.builds(
    built, st.sampled_from(["dataset", "dataset with a budget"]), steps_of_chains
)


@few(120)
@given(chain=chains)
@example(chain=built("dataset", ["batch", "to", "echo"]))
@example(chain=built("loader", ["map", "to", "adaptive echo", "map"]))
@example(chain=built("dataset with a budget", ["filter", "adaptive echo", "filter", "batch"]))
def test_layers_come_in_the_order_of_the_chain(chain: Chain) -> None:
    flow = chain.flow
    assert letters(flow) == expected_letters(chain)
    assert [layer.at for layer in flow.layers] == list(range(len(flow.layers)))
    assert list(flow.segments) == [layer for layer in flow.layers if isinstance(layer, Segment)]
    pools = [each for each in flow.layers if is_echo(each)]
    assert pools == ([] if flow.echo is None else [flow.echo])
    assert flow.kinds.count("filter") == letters(flow).count("f")


@few(120)
@given(chain=chains)
def test_a_segment_stands_between_points(chain: Chain) -> None:
    found = letters(chain.flow)
    # But that a pool may follow a filter point, and a device: nothing is done in between.
    pairs = {found[i : i + 2] for i in range(len(found) - 1)}
    assert pairs <= {"sf", "se", "sd", "fs", "es", "ds", "fe", "de"}
    if not chain.source.yields_batches:
        assert found.startswith("s")
    assert not found or found[-1] in "sd"


@few(120)
@given(chain=chains)
def test_a_segment_knows_whether_a_pool_keeps_what_it_makes(chain: Chain) -> None:
    layers = chain.flow.layers
    for segment in chain.flow.segments:
        behind = [layer for layer in layers[segment.at + 1 :] if not is_sift(layer)]
        follower = behind[0] if behind else None
        assert segment.behind.into_pool == is_echo(follower)
        # A pool on the device follows the host's work.
        if isinstance(follower, Own) and not is_echo(follower):
            follower = behind[1] if len(behind) > 1 else None
        followed = isinstance(follower, Own) and follower.stage.is_adaptive
        assert segment.behind.is_followed == followed
    assert chain.flow.is_adaptive == (chain.echo is not None and chain.echo.is_adaptive)


@few(120)
@given(chain=chains)
def test_a_pool_knows_what_it_holds(chain: Chain) -> None:
    flow = chain.flow
    size = next((s.n for s in chain.stages if isinstance(s, Batch)), 1)
    assert chain.orders.group == chain.batch_size == size
    point = flow.echo
    assert chain.echo == (None if point is None else point.stage)
    if point is not None:
        before = chain.stages[: chain.stages.index(point.stage)]
        batched = chain.source.yields_batches or any(s.traits.batches for s in before)
        assert point.holds_batches == batched
        assert point.group == (1 if batched else size)
        assert point.on_device == any(s.traits.moves for s in before)
        assert point.leaks == ("f" in letters(flow)[point.at :])


@few(120)
@given(chain=chains)
def test_segments_know_what_comes_in(chain: Chain) -> None:
    batches, on_device = chain.source.yields_batches, False
    for layer in chain.flow.layers:
        if isinstance(layer, Segment):
            assert layer.batches_in == batches
            assert layer.on_device == on_device
            batches = batches or layer.batch is not None
        on_device = on_device or (isinstance(layer, Own) and layer.stage.traits.moves)
    first = next(iter(chain.flow.segments), None)
    assert all(segment.source is None for segment in chain.flow.segments[1:])
    if first is not None:
        assert first.source is chain.flow.indexed
    assert chain.flow.source is chain.source


@few(120)
@given(chain=chains)
def test_nothing_is_lost_doubled_or_out_of_order(chain: Chain) -> None:
    flow = chain.flow
    assert flow.steps == [stage for stage in chain.stages if isinstance(stage, (Map, Filter))]
    maps = [stage for stage in flow.steps if isinstance(stage, Map)]
    positions = [stage.position for stage in maps if stage.is_random]
    assert positions == list(range(len(positions)))
    assert flow.has_filter == any(isinstance(stage, Filter) for stage in chain.stages)

    names = [name for segment in flow.segments for name in segment.names]
    timed = [s.name for s in chain.stages if isinstance(s, (Map, Filter, Batch))]
    assert names == [chain.source.name] * chain.source.is_indexed + timed


@few(120)
@given(chain=chains)
def test_a_filter_point_has_the_budgets_of_the_segment_before_it(chain: Chain) -> None:
    layers = chain.flow.layers
    for layer in layers:
        if isinstance(layer, Sift):
            segment = layers[layer.at - 1]
            assert isinstance(segment, Segment)
            assert segment.batch is None
            own = {one.account: one.budget for one in segment.operations if one.budget is not None}
            assert 0 not in own
            assert layer.budgets == {0: chain.budget, **own}
    accounts = [one.account for s in chain.flow.segments for one in s.operations if one.account]
    assert len(accounts) == len(set(accounts))
    assert all(account <= len(chain.stages) for account in accounts)


@few(60)
@given(chain=indexed_chains)
def test_the_selection_is_that_of_the_steps_in_order(chain: Chain) -> None:
    selection = Selection()
    for stage in chain.stages:
        if stage.name.startswith("shuffle"):
            selection = selection.shuffle()
        elif stage.name.startswith("shard"):
            selection = selection.shard(1, 3, uneven=False)
        elif stage.name.startswith("take"):
            selection = selection.take(5)
        elif stage.name.startswith("skip"):
            selection = selection.skip(3)
    assert chain.selection == selection


def test_rows_are_gathered_only_where_nothing_is_done_to_single_examples() -> None:
    arrays = stoker.from_arrays(np.zeros((6, 2)), seed=0)

    def first(pipeline: Pipeline[Any]) -> Segment:
        return pipeline.chain.flow.segments[0]

    assert first(arrays.batch(2)).rows is not None
    assert first(arrays.batch(2).map(_same)).rows is not None  # the map is behind
    assert first(arrays.batch(2, collate=list)).rows is None
    assert first(arrays.map(_same).batch(2)).rows is None
    assert first(arrays.echo(2).batch(2)).rows is None
    listed = stoker.from_dataset([1, 2], seed=0).batch(2)
    assert first(listed).only_stacks
    assert first(listed).rows is None


def test_a_segment_of_image_functions_needs_no_gil(tmp_path: Any) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    crop = stoker.images.random_resized_crop(8)

    def segments(pipeline: Any) -> list[bool]:
        return [segment.releases_gil for segment in pipeline.chain.flow.segments]

    files = stoker.from_files(str(tmp_path / "*.jpg"), seed=0)
    native = importlib.util.find_spec("stoker_native") is not None  # Pillow often has the GIL
    assert segments(files.random_map(crop).batch(2)) == [native]
    assert (
        segments(files.map(stoker.images.decode, on=0).echo(2).random_map(crop).batch(2))
        == [native] * 2
    )
    assert segments(files.random_map(crop).map(_same).batch(2)) == [False]
    assert segments(files.random_map(crop).batch(2, collate=_same)) == [False]
    assert segments(files.batch(2, collate=list).random_map(crop)) == [False]
    owned = stoker.from_dataset([b""], seed=0)  # whose reading may need it
    assert segments(owned.random_map(crop).batch(2)) == [False]
