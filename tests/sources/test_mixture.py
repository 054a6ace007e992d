"""Mixtures: exact proportions, parts with epochs of their own, and all that holds of a source."""

from __future__ import annotations

import itertools
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shards import pack

import stoker
from stoker.schedule.orders.blocks import WINDOW
from stoker.schedule.proportions import Proportions, whole_weights
from stoker.testing import check_resume
from strategies import Examples, Faulty, few, frozen, jitter, stream


@stoker.thread_safe
class Named(Examples):
    """Examples whose ids begin at a number."""

    def __init__(self, length: int, first: int) -> None:
        super().__init__(length)
        self.first = first

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = super().__getitem__(index)
        return {**example, "id": self.first + index}


def marked(x: Any) -> Any:
    return x + 1000.0


def third(number: int) -> bool:
    return number % 3 > 0


@st.composite
def mixtures(draw: st.DrawFn) -> Any:
    """Draw what makes a mixture: the parts' lengths, weights and shuffles, and how it stops."""
    count = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([1, 2, 3, 0.25, 7]), min_size=count, max_size=count))
    shuffled = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    row = Proportions(whole_weights(weights))
    assume(all(row.counts(row.longest(lengths))))
    return lengths, weights, shuffled, draw(st.sampled_from(["first", "all"]))


def mixed(given_: Any, **settings: Any) -> stoker.Pipeline:
    """Build it; of part ``p`` the ids are 100 p, 100 p + 1, ..."""
    lengths, weights, shuffled, stop = given_
    parts = []
    for part, (length, is_shuffled) in enumerate(zip(lengths, shuffled, strict=True)):
        source = stoker.from_arrays(np.arange(100 * part, 100 * part + length))
        parts.append(source.shuffle() if is_shuffled else source)
    return stoker.mix(parts, weights, stop=stop, seed=3, **settings).workers(0)


@given(what=mixtures())
def test_parts_come_in_proportion_and_each_goes_through_its_own_epochs(what: Any) -> None:
    lengths, weights, shuffled, _ = what
    train = mixed(what)
    row = Proportions(whole_weights(weights))
    drawn: list[list[int]] = [[] for _ in lengths]
    for _ in range(3):
        epoch = [int(x) for x in train]
        assert len(epoch) == len(train)
        assert [x // 100 for x in epoch] == row.parts(0, len(epoch))[0].tolist()
        counts = [stats.fresh_examples for stats in train.stats().parts]
        assert counts == row.counts(len(epoch))
        for x in epoch:
            drawn[x // 100].append(x % 100)
    for number, (length, have) in enumerate(zip(lengths, drawn, strict=True)):
        own = [tuple(have[at : at + length]) for at in range(0, len(have), length)]
        for epoch_of_part in own[:-1]:
            assert sorted(epoch_of_part) == list(range(length))
        assert len(set(own[-1])) == len(own[-1])
        if not shuffled[number]:
            assert all(each == tuple(range(len(each))) for each in own)
        elif length > 20:
            assert len(set(own)) == len(own)
        assert train.stats().parts[number].epochs == pytest.approx(len(have) / length)


@given(what=mixtures(), world=st.integers(1, 4), batch=st.integers(1, 9))
def test_ranks_have_equal_shares_of_every_global_batch(what: Any, world: int, batch: int) -> None:
    ranks = [mixed(what).shard(rank=rank, world_size=world).batch(batch) for rank in range(world)]
    alone = mixed(what).batch(batch * world)
    for _ in range(2):
        epochs = [[x.tolist() for x in rank] for rank in ranks] if len(ranks[0]) else [[]] * world
        whole = [x.tolist() for x in alone]
        assert {len(epoch) for epoch in epochs} == {len(ranks[0])}
        for *shares, all_of_them in zip(*epochs, whole, strict=False):
            together = sorted(x for share in shares for x in share)
            if len(together) == len(all_of_them):  # but for what does not divide the last one
                assert together == sorted(all_of_them)
            for part in range(len(what[0])):
                each = [sum(x // 100 == part for x in share) for share in shares]
                assert max(each) - min(each) <= 1
        if not len(ranks[0]):
            return
        for rank, epoch in zip(ranks, epochs, strict=True):
            drawn = [x // 100 for share in epoch for x in share]
            counts = [part.fresh_examples for part in rank.stats().parts]
            assert counts == [drawn.count(part) for part in range(len(what[0]))]


def test_small_batches_of_a_mixture_do_not_give_a_rank_one_part_alone() -> None:
    a, b = (stoker.from_arrays(np.arange(100 * part, 100 * part + 80)) for part in (0, 1))
    for batch in (1, 3):
        for rank in range(2):
            mixture = stoker.mix([a, b], seed=0).shard(rank=rank, world_size=2)
            drawn = [int(x) // 100 for batch in mixture.batch(batch) for x in batch]
            assert drawn.count(0) == pytest.approx(40, abs=1)


@given(what=mixtures(), world=st.integers(1, 3))
def test_parts_by_blocks_are_read_in_runs_and_in_step(what: Any, world: int) -> None:
    lengths, weights, _, stop = what
    parts = [
        stoker.from_arrays(np.arange(100 * n, 100 * n + length)).shuffle(block=1)
        for n, length in enumerate(lengths)
    ]
    if not any(length > WINDOW for length in lengths):
        return  # no more blocks than are drawn from at a time
    mixture = stoker.mix(parts, weights, stop=stop, seed=3).workers(0)
    if min(lengths) < world:
        with pytest.raises(ValueError, match="fewer examples than there are ranks"):
            len(mixture.shard(rank=0, world_size=world))
        return
    ranks = [mixture.shard(rank=rank, world_size=world) for rank in range(world)]
    epochs = [[int(x) for x in rank] for rank in ranks]
    assert {len(epoch) for epoch in epochs} == {len(ranks[0])}
    assert all(len({x // 100 for x in step}) == 1 for step in zip(*epochs, strict=True))
    drawn = [x for epoch in epochs for x in epoch]
    for number, length in enumerate(lengths):
        counts = [drawn.count(100 * number + x) for x in range(length)]
        assert max(counts) - min(counts) <= 1  # each once before any comes again


def test_a_mixture_of_one_is_that_one() -> None:
    alone = stoker.from_arrays(np.arange(50), seed=4).shuffle()
    mixture = stoker.mix([alone], weights=[2])
    assert mixture.seed == 4
    for _ in range(2):
        assert stream(mixture) == stream(alone)


def parts_of_all_kinds(workers: int, kind: str = "thread", **settings: Any) -> stoker.Pipeline:
    a = stoker.from_dataset(Named(40, 0)).shuffle().random_map(jitter, on="x")
    b = stoker.from_dataset(Named(30, 100)).map(marked, on="x").filter(third, on="id")
    c = stoker.from_dataset(Named(7, 200)).take(5).shuffle()
    mixture = stoker.mix([a, b, c], weights=[0.5, 0.3, 0.2], seed=8, stop="all", **settings)
    return mixture.workers(workers, kind=kind)


BEHIND = {
    "batch": lambda m: m.batch(4),
    "echo": lambda m: m.echo(2, pool=12).random_map(jitter, on="x").batch(4),
    "batches": lambda m: m.batch(4).echo(1.5, pool=3),
    "filter": lambda m: m.filter(third, on="id").batch(4, drop_last=True),
    "cache": lambda m: m.cache("1MiB").random_map(jitter, on="x").batch(4),
    "shard": lambda m: m.shard(rank=1, world_size=2).batch(4).steps(9),
}


def shuffled_parts(workers: int = 0, kind: str = "thread") -> stoker.Pipeline:
    """Return parts without random maps, so that a cache may follow."""
    a = stoker.from_dataset(Named(20, 0)).shuffle()
    b = stoker.from_dataset(Named(15, 100)).map(marked, on="x").filter(third, on="id")
    return stoker.mix([a, b], weights=[2, 1], seed=8).workers(workers, kind=kind)


@pytest.mark.parametrize("name", BEHIND)
def test_it_resumes_anywhere_and_is_the_same_for_any_workers(name: str) -> None:
    begin = shuffled_parts if name == "cache" else parts_of_all_kinds
    build = BEHIND[name]
    check_resume(lambda: build(begin(0)), every=7)
    one, many = build(begin(0)), build(begin(3))
    assert stream(one) == stream(many)
    assert stream(one) == stream(many)  # and the next epoch
    if name == "echo":
        assert stream(build(begin(0))) == stream(build(begin(1, "process")))


def test_the_state_of_a_later_epoch_goes_on_in_the_parts_where_they_were() -> None:
    train, again = (parts_of_all_kinds(0).batch(4) for _ in range(2))
    stream(train)
    with iter(train) as batches:
        for _ in range(3):
            next(batches)
        state, tail = train.state_dict(), [frozen(batch) for batch in batches]
    again.load_state_dict(state)
    assert stream(again) == tail
    assert again.stats().parts == train.stats().parts


def test_an_echo_that_follows_the_stall_is_replayed() -> None:
    def build() -> stoker.Pipeline:
        return shuffled_parts(2).echo().random_map(jitter, on="x").batch(4)

    train = build()
    epochs = [stream(train) for _ in range(2)]
    again = build().replay(train.record())
    assert [stream(again) for _ in range(2)] == epochs


def test_what_is_done_to_one_part_is_not_done_to_others() -> None:
    train = parts_of_all_kinds(0)
    for example in train:
        part = example["id"] // 100
        plain = float(example["id"] % 100)
        if part == 0:
            assert (example["x"] != plain).all()
            assert (abs(example["x"] - plain) < 1).all()
        else:
            assert (example["x"] == plain + 1000 * (part == 1)).all()
        assert part != 1 or third(int(example["id"]))


def test_random_maps_of_parts_draw_apart_from_those_behind() -> None:
    def build(seed: int) -> stoker.Pipeline:
        a = stoker.from_arrays(np.zeros((9, 2))).random_map(jitter)
        b = stoker.from_arrays(np.zeros((9, 2))).random_map(jitter)
        return stoker.mix([a, b], seed=seed).random_map(
            stoker.thread_safe(lambda x, rng: (x, rng.random(2)))
        )

    drawn = [tuple(x.tolist()) for pair in build(1) for x in pair]
    assert len(set(drawn)) == len(drawn) == 36
    assert stream(build(1)) == stream(build(1)) != stream(build(2))


def test_rows_of_arrays_are_gathered_as_they_are_read_one_by_one() -> None:
    def build(dtype: Any = np.float32) -> stoker.Pipeline:
        parts = []
        for part in range(3):
            rows = np.arange(60, dtype=np.float32 if part else dtype).reshape(20, 3) + 100 * part
            parts.append(stoker.from_arrays(rows, np.full(20, part)).shuffle())
        return stoker.mix(parts, weights=[1, 2, 3], seed=1)

    gathered = build().batch(8)
    assert gathered.chain.flow.segments[0].rows is not None
    single = build().map(lambda x: x).batch(8)
    assert stream(gathered) == stream(single) == stream(build().batch(8).workers(0))
    check_resume(lambda: build().batch(8))
    unlike = build(np.float64).batch(8)
    with pytest.raises(stoker.StageError, match=r"differs within a batch: float\d+"):
        list(unlike)


def test_a_budget_skips_what_fails_in_any_part_and_errors_say_where() -> None:
    def build(**settings: Any) -> stoker.Pipeline:
        good = stoker.from_dataset(Named(12, 0))
        bad = stoker.from_dataset(Faulty(12, bad={3})).map(_fails_on_5, on="id")
        return stoker.mix([good, bad], seed=0, **settings)

    train = build(max_errors=2)
    found = [(int(x["id"])) for x in train]
    assert len(found) == 22
    assert {(skip.stage, skip.index) for skip in train.stats().skips} == {
        (train.chain.source.name, 12 + 3),
        ("map(_fails_on_5, on='id') of part 2", 12 + 5),
    }
    check_resume(lambda: build(max_errors=2).batch(3))
    with pytest.raises(stoker.StageError, match="3 cannot be read") as raised:
        list(build())
    assert raised.value.index == 15


@stoker.thread_safe
def _fails_on_5(number: int) -> int:
    if number == 5:
        raise ValueError("it is 5")
    return number


def test_a_cache_keeps_parts_of_the_same_files_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "cat").mkdir(parents=True)
        for n in range(6):
            (tmp_path / folder / "cat" / f"{n}.jpg").write_bytes(f"{folder}{n}".encode())

    def build() -> stoker.Pipeline:
        parts = [stoker.from_folder(tmp_path / folder).shuffle() for folder in "ab"]
        return stoker.mix(parts, seed=0)

    cached = build().cache("1MiB", path=tmp_path / "store")
    assert cached.class_names == ["cat"]
    plain = build()
    for _ in range(2):
        assert stream(cached) == stream(plain)
    stats = cached.stats().cache
    assert stats is not None
    assert stats.hits == 12


def test_remote_parts_are_read_ahead(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    (tmp_path / "local").mkdir()
    try:
        for n in range(20):
            memory.pipe(f"/mixed/{n:02}.bin", b"remote %d" % n)
            (tmp_path / "local" / f"{n:02}.bin").write_bytes(b"local %d" % n)

        def build(workers: int = 2, kind: str = "thread") -> stoker.Pipeline:
            a = stoker.from_files("memory://mixed/*.bin", requests=3).shuffle()
            b = stoker.from_files(str(tmp_path / "local" / "*.bin")).map(_lowered, on="data")
            return stoker.mix([a, b], weights=[1, 2], seed=0).batch(4).workers(workers, kind=kind)

        found = stream(build())
        assert found == stream(build(0)) == stream(build(1, "process"))
        check_resume(build, every=3)
    finally:
        memory.rm("/mixed", recursive=True)


def _lowered(data: bytes) -> bytes:
    return data.lower()


def test_print_and_stats_tell_of_the_parts() -> None:
    a, b = stoker.from_arrays(np.arange(10)).shuffle(), stoker.from_arrays(np.arange(30)).map(abs)
    train = stoker.mix([a, b], weights=[1, 2], seed=1).batch(5)
    text = str(train)
    assert "part 1, 33.333%: from_arrays(int64 [10]).shuffle()  10 examples" in text
    assert "part 2, 66.667%: from_arrays(int64 [30]).map(absolute)" in text or "map(abs)" in text
    assert "31 examples an epoch" in text
    list(train)
    assert "fresh examples of from_arrays(int64 [30]), epoch 0.70 of its own" in str(train.stats())
    assert train.stats().parts[1].fresh_examples == 21


def test_a_mixture_has_one_seed() -> None:
    def part(seed: int | None) -> stoker.Pipeline:
        return stoker.from_arrays(np.arange(9), seed=seed).shuffle()

    assert stoker.mix([part(3), part(None)]).seed == 3
    assert stoker.mix([part(3), part(4)], seed=5).seed == 5
    with pytest.raises(ValueError, match="seeds 3, 4"):
        stoker.mix([part(3), part(4)])
    assert stoker.mix([part(None)]).chain.is_seed_drawn


def test_a_state_of_other_proportions_is_refused() -> None:
    a, b = (stoker.from_arrays(np.arange(n)) for n in (9, 10))
    state = stoker.mix([a, b], seed=0).state_dict()
    for other, weights in (([a, b], [1, 2]), ([b, a], [1, 1]), ([a, b.shuffle()], [1, 1])):
        with pytest.raises(stoker.StateError, match="another pipeline"):
            stoker.mix(other, weights, seed=0).load_state_dict(state)


def test_a_truncated_shard_may_be_in_a_part_of_a_mixture_with_a_budget(tmp_path: Path) -> None:
    pack(tmp_path / "s.tar", {f"{n:02}.cls": b"%d" % n for n in range(9)})
    os.truncate(tmp_path / "s.tar", 512 * 11)  # of the sixth the header is there
    with pytest.warns(UserWarning, match="truncated"):
        part = stoker.from_tar(tmp_path / "s.tar", max_errors=1).map(lambda row: int(row["cls"]))
    with pytest.raises(ValueError, match="has max_errors="):
        stoker.mix([part])
    assert [int(x) for x in stoker.mix([part], max_errors=2)] == list(range(5))


numbers = np.arange(9)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda p: p.echo(2), r"part 1, from_arrays.*has \.echo.*after mix"),
        (lambda p: p.batch(2), r"has \.batch"),
        (lambda p: p.cache("1MiB"), r"has \.cache"),
        (lambda p: p.shard(rank=0, world_size=1), r"has \.shard"),
        (lambda p: p.steps(2), r"has \.steps\(\)"),
        (lambda p: p.workers(2), r"has \.workers\(\)"),
        (lambda p: p.repeat(), r"has \.repeat\(\)"),
        (lambda p: stoker.from_dataset(numbers, max_errors=1), "has max_errors="),
        (lambda p: stoker.from_iterable([1]), "no examples with numbers"),
        (lambda p: stoker.from_loader([1]), "no examples with numbers"),
        (lambda p: stoker.mix([p]), "is a mixture"),
        (lambda p: stoker.from_dataset([]), "has no examples"),
    ],
)
def test_what_cannot_be_a_part(part: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stoker.mix([part(stoker.from_arrays(numbers))])


def test_what_is_no_mixture() -> None:
    a = stoker.from_arrays(numbers)
    for wrong in ({a: 1}, [a, "b"], a):
        with pytest.raises(TypeError, match=r"as in mix\(\[a, b\], weights="):
            stoker.mix(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 weights for 2 pipelines"):
        stoker.mix([a, a], weights=[1])
    with pytest.raises(ValueError, match="at least one"):
        stoker.mix([], weights=[])
    with pytest.raises(ValueError, match=r"part 1, .*, would never be read"):
        stoker.mix([a, stoker.from_arrays(numbers)], weights=[1, 100])
    with pytest.raises(ValueError, match="stop="):
        stoker.mix([a], stop="never")
    with pytest.raises(ValueError, match="above 0"):
        stoker.mix([a], weights=[0])
    with pytest.raises(ValueError, match="shuffle each part of a mixture by itself"):
        stoker.mix([a]).shuffle()
    with pytest.raises(ValueError, match="equal shares of each part"):
        stoker.mix([a]).shard(rank=0, world_size=2, remainder="uneven")
    with pytest.raises(ValueError, match="would be the same in every epoch"):
        stoker.mix([a.random_map(lambda x, rng: x)]).cache("1MiB")


@settings(few(5))
@given(what=mixtures(), take=st.integers(1, 20), batch=st.integers(1, 5))
def test_a_part_of_a_mixture_goes_on_where_it_was_cut_off(what: Any, take: int, batch: int) -> None:
    def build() -> stoker.Pipeline:
        return mixed(what).take(take).batch(batch)

    train = build()
    assert sum(len(b) for b in train) == min(take, len(mixed(what)))
    seen = [int(x) for b in itertools.chain(train, train) for x in b]
    first = [x for x in seen if x < 100][: what[0][0]]
    assert len(set(first)) == len(first) or Fraction(take) > sum(what[0])
    check_resume(build, every=3)
