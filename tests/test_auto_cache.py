"""`stoker.auto_cache`: caches where they save most, told before they are filled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from scripts import run
from strategies import one_in, stream

READ_S, DECODE_S = 0.001, 0.001


@pytest.fixture(autouse=True)
def own_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's list of caches alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


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


class Opaque:
    """A value that no store can hold."""

    def __init__(self, row: Any) -> None:
        self.row = row


def unwrapped(value: Opaque) -> Any:
    return value.row


def is_small(row: Any) -> bool:
    return bool(row["id"] % 5)


def jittered(row: Any, rng: np.random.Generator) -> Any:
    return {"id": row["id"], "x": row["x"] + rng.integers(0, 2, dtype=np.uint8)}


def plain(length: int = 100) -> stoker.Pipeline[Any]:
    return stoker.from_dataset(Files(length), seed=0).shuffle().map(decoded)


def counted(pipeline: stoker.Pipeline[Any]) -> stoker.CacheStats:
    found = pipeline.stats().cache
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("limit", "workers", "kind"),
    one_in(
        3,
        [
            ("1MiB", 0, "thread"),
            ("1MiB", 2, "process"),
            ("2MiB", 2, "thread"),
            ("16MiB", 0, "thread"),
            ("16MiB", 2, "process"),
        ],
    ),
)
def test_the_stream_is_the_one_without_caches(limit: str, workers: int, kind: str) -> None:
    bare = plain(60).filter(is_small).random_map(jittered).batch(7).workers(0)
    cached = stoker.auto_cache(bare, limit).workers(workers, kind=kind)
    for _ in range(3):
        assert stream(cached) == stream(bare)
        assert cached.state_dict() == bare.state_dict()
    stats = counted(cached)
    assert stats.hits + stats.misses == 60
    assert stats.used_bytes <= stats.limit_bytes
    assert len(stats.places) == (2 if limit == "1MiB" else 0)  # where all fit, at one place
    assert stats.items > 0
    assert stats.predicted_s is not None
    assert stats.worked_s > 0
    assert "predicted, " in str(stats)


def test_with_room_for_all_the_last_form_is_kept_and_maps_before_it_run_as_one() -> None:
    pipeline = stoker.auto_cache(plain().random_map(jittered).batch(4).workers(0), "64MiB")
    text = str(pipeline)
    assert text.count(".cache(64.0 MiB)") == 1
    assert text.index(".map(decoded)") < text.index(".cache(") < text.index(".random_map(")
    assert "100% as from_dataset(Files).map(decoded); an epoch takes" in text
    for _ in range(2):
        list(pipeline)
    assert counted(pipeline).items == 100


def test_an_echo_s_pool_counts() -> None:
    bare = plain().echo(2, pool="3MiB").batch(4)
    assert ".cache(5.0 MiB)" in str(stoker.auto_cache(bare, "8MiB"))
    of_examples = str(stoker.auto_cache(plain().echo(2, pool=25).batch(4), 8_000_000))
    assert f".cache({(8_000_000 - 25 * 40_000) / 2**20:.1f} MiB" in of_examples
    with pytest.raises(ValueError, match=r"echoes take about 3.0 MiB of it, and a cache needs at"):
        stoker.auto_cache(bare, "3.5MiB")


def test_what_cannot_be_stored_is_no_place() -> None:
    pipeline = plain(30).map(Opaque).map(unwrapped).batch(5).workers(0)
    text = str(stoker.auto_cache(pipeline, "64MiB"))
    assert ".map(Opaque)\n  .map(unwrapped)\n  .cache(" in text
    with pytest.warns(stoker.CacheWarning, match="none would save time"):
        same = stoker.auto_cache(
            stoker.from_dataset([Opaque(1)] * 9).batch(3, collate=list), "1MiB"
        )
    assert "cache" not in str(same)


def test_what_is_larger_than_the_limit_is_no_place() -> None:
    large = stoker.from_dataset(Files(9, size=2_000_000), seed=0).batch(3)
    with pytest.warns(stoker.CacheWarning, match="none would save time within the limit"):
        assert "cache" not in str(stoker.auto_cache(large, "1MiB"))


def test_a_stage_of_one_s_own_is_still_known() -> None:
    class Both(stoker.Stage):
        def describe(self) -> str:
            return "both"

        def lower(self, plan: Any) -> Any:
            return plan.map(decoded).map(unchanged)

    bare = stoker.from_dataset(Files(40), seed=0).apply(Both()).batch(4).workers(0)
    cached = stoker.auto_cache(bare, "64MiB")
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
        pipeline = stoker.auto_cache(pipeline, "2MiB", path={str(tmp_path / "store")!r})
        assert len(list(pipeline.workers(0))) == 30
        pipeline = pipeline.workers(2)
        assert len(list(pipeline)) == 30
        say(json.dumps([pipeline.stats().cache.hits, pipeline.stats().cache.items]))
    """
    for _ in range(2):
        ((hits, items),) = run(tmp_path, body)
        assert hits == items == 30


def shuffled_nothing() -> stoker.Pipeline:
    return stoker.from_arrays(np.arange(0), seed=0).shuffle()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a cache": (lambda: stoker.auto_cache(plain().cache("1MiB")), "that has none"),
    "streams": (lambda: stoker.auto_cache(stoker.from_iterable([1, 2])), "a stream is read once"),
    "loaders": (lambda: stoker.auto_cache(stoker.from_loader([1])), "cache its dataset instead"),
    "random first": (
        lambda: stoker.auto_cache(plain(), "10KB"),
        "at least 1.0 MiB",
    ),
    "kept": (lambda: stoker.auto_cache(plain(), path="/tmp/none"), "needs version="),
    "nothing": (lambda: stoker.auto_cache(stoker.from_dataset([])), "made none"),
    "nothing in any order": (lambda: stoker.auto_cache(shuffled_nothing()), "made none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_place_for_a_cache_is_refused(what: str) -> None:
    make, says = REFUSED[what]
    with pytest.raises(ValueError, match=says):
        make()
