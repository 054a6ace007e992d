"""`.cache("auto")`: a cache where it saves most, told before it is filled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import counted

import stoker
from scripts import run
from stoker.chain.inspection.cache_place import best_place
from strategies import one_in, stream

READ_S, DECODE_S = 0.001, 0.001


def limited(monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    """Have half of the memory be so much."""
    monkeypatch.setattr("stoker.cache.location.resolve_limit", lambda *_, **__: limit_bytes)


class Files:
    """Examples that take a while to read."""

    def __init__(self, length: int = 100, size: int = 4_000) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)
        return {"id": index, "x": np.full(self.size, index % 251, np.uint8)}


def decoded(row: Any) -> Any:
    time.sleep(DECODE_S)
    return {"id": row["id"], "x": np.repeat(row["x"], 10)}


def swollen(row: Any) -> Any:
    return {"id": row["id"], "x": np.repeat(row["x"], 100)}


class Opaque:
    """A value that no store can hold."""

    def __init__(self, row: Any) -> None:
        self.row = row


def unwrapped(value: Opaque) -> Any:
    time.sleep(DECODE_S)
    return value.row


def is_small(row: Any) -> bool:
    return bool(row["id"] % 5)


def jittered(row: Any, rng: np.random.Generator) -> Any:
    return {"id": row["id"], "x": row["x"] + rng.integers(0, 2, dtype=np.uint8)}


def plain(length: int = 100) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Files(length), seed=0).shuffle().map(decoded)


@pytest.mark.parametrize(
    ("limit", "workers", "kind"),
    one_in(3, [(1 << 20, 0, "thread"), (1 << 20, 2, "process"), (16 << 20, 2, "thread")]),
)
def test_the_stream_is_the_one_without_a_cache(
    limit: int, workers: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, limit)
    bare = plain(60).filter(is_small).random_map(jittered).batch(7).workers(0)
    cached = bare.cache("auto").workers(workers, kind=kind)
    for _ in range(3):
        assert stream(cached) == stream(bare)
        assert cached.state_dict() == bare.state_dict()
    stats = counted(cached)
    assert stats.hits + stats.misses == 60
    assert stats.used_bytes <= stats.limit_bytes
    assert stats.items > 0


def test_with_room_for_all_the_last_form_is_kept() -> None:
    for pipeline in (
        plain().random_map(jittered).batch(4).cache("auto").workers(0),
        plain().cache("auto").random_map(jittered).batch(4).workers(0),
    ):
        text = str(pipeline)
        assert text.count(".cache(auto)") == 1
        assert text.index(".map(decoded)") < text.index(".cache(") < text.index(".random_map(")
        assert "100% as from_dataset(Files).map(decoded); an epoch takes" in text
        for _ in range(2):
            list(pipeline)
        assert counted(pipeline).items == 100


def test_files_are_kept_where_little_of_what_is_made_of_them_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited(monkeypatch, 1 << 20)
    pipeline = stoker.from_dataset(Files(100), seed=0).shuffle().map(swollen).batch(4).cache("auto")
    text = str(pipeline)
    assert text.index(".cache(") < text.index(".map(swollen)")
    assert "100% as from_dataset(Files); an epoch takes" in text


def test_what_cannot_be_stored_is_no_place() -> None:
    text = str(plain(30).map(Opaque).map(unwrapped).batch(5).cache("auto"))
    assert ".map(Opaque)\n  .map(unwrapped)\n  .cache(" in text
    bare = stoker.from_dataset([Opaque(1)] * 9).batch(3, collate=list)
    with pytest.warns(stoker.CacheWarning, match="none would save time"):
        same = bare.cache("auto")
    assert "cache" not in str(same)


def test_what_is_larger_than_the_limit_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1 << 20)
    large = stoker.from_dataset(Files(9, size=2_000_000), seed=0).batch(3)
    with pytest.warns(stoker.CacheWarning, match="none would save time within the limit"):
        assert "cache" not in str(large.cache("auto"))


def test_a_stage_of_one_s_own_is_still_known() -> None:
    class Both(stoker.Stage):
        def describe(self) -> str:
            return "both"

        def lower(self, pipeline: Any) -> Any:
            return pipeline.map(decoded).map(unchanged)

    bare = stoker.from_dataset(Files(40), seed=0).apply(Both()).batch(4).workers(0)
    cached = bare.cache("auto")
    assert stream(cached) == stream(bare)
    assert [each.stage.describe() for each in cached.chain.applied] == ["both"]


def unchanged(row: Any) -> Any:
    return row


def test_the_next_run_is_warm_with_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.bin").write_bytes(os.urandom(3_000))
    body = f"""
        pipeline = stoker.from_files({str(folder / "*.bin")!r}, seed=0).shuffle()
        pipeline = pipeline.cache("auto", path={str(tmp_path / "store")!r})
        assert len(list(pipeline.workers(0))) == 30
        pipeline = pipeline.workers(2)
        assert len(list(pipeline)) == 30
        say(json.dumps([pipeline.stats().cache.hits, pipeline.stats().cache.items]))
    """
    for _ in range(2):
        ((hits, items),) = run(tmp_path, body)
        assert hits == items == 30


forms = st.tuples(st.integers(0, 50), st.integers(0, 40))


@given(
    st.integers(1, 3).flatmap(
        lambda places: st.lists(st.lists(forms, min_size=places, max_size=places), min_size=1)
    ),
    st.integers(0, 600),
)
def test_no_other_place_saves_more(made: list[list[tuple[int, int]]], room: int) -> None:
    saved, sizes = np.moveaxis(np.array(made, float), 2, 0)
    found = best_place(saved, sizes, room)
    parts = [min(1.0, room / max(1.0, each)) for each in sizes.sum(axis=0)]
    each = [part * time for part, time in zip(parts, saved.sum(axis=0), strict=True)]
    assert (found is None) == (max(each) == 0)
    if found is not None:
        assert found.saved_ns == pytest.approx(max(each))
        assert found.kept == pytest.approx(parts[found.place])
        assert 0 < found.kept <= 1


def shuffled_nothing() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(0), seed=0).shuffle()


def test_a_place_before_late_examples_is_one(tmp_path: Path) -> None:
    train = plain().late(2).batch(4).cache("auto", path=tmp_path / "store", version="1")
    assert ".cache(auto)" in str(train)
    found = [int(number) for batch in train.workers(0) for number in batch["id"]]
    assert sorted(found) == [*range(100)]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a cache": (lambda: plain().cache("1MiB").cache("auto"), "a pipeline has one cache"),
    "streams": (lambda: stoker.from_iterable([1, 2]).cache("auto"), "a stream is read once"),
    "loaders": (lambda: stoker.from_loader([1]).cache("auto"), "cache its dataset instead"),
    "kept": (lambda: plain().cache("auto", path="/tmp/none"), "needs version="),
    "nodes": (lambda: plain().cache("auto", cluster="ray"), "nodes could choose different ones"),
    "nothing": (lambda: stoker.from_dataset([]).cache("auto"), "made none"),
    "nothing in any order": (lambda: shuffled_nothing().cache("auto"), "made none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_place_for_a_cache_is_refused(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        make()
