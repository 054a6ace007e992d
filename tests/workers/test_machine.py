"""Sizes as people write them, and what this process may really use."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.basics.resources import (
    default_threads,
    format_bytes,
    format_rounded,
    parse_bytes,
    thread_busy_ns,
    usable_cores,
    usable_memory_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("12B", 12),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500 MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5 GiB", 3 << 29),
        (" 64GiB ", 64 << 30),
        ("1TB", 10**12),
        ("3TiB", 3 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1 G", "2 GiBs", "1e3", "1.GiB", "1,5GiB", "0x10", "2GiB 3", "ten", "٣GB"],
)
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write for example '2GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"),
     (3 << 29, "1.5 GiB"), (5 << 40, "5120.0 GiB")],
)  # fmt: skip
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**15))
def test_what_is_written_reads_back_nearly(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


@given(st.floats(0.001, 1e12), st.integers(3, 4))
def test_a_rounded_number_has_no_exponent(value: float, digits: int) -> None:
    text = format_rounded(value, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))


def test_cores_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    allowed = os.sched_getaffinity(0)
    cores = usable_cores()
    assert 1 <= cores <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_are_shared_out_over_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = usable_cores()
    for ranks in (1, 2, 3, 1000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert usable_cores() == max(1, cores // ranks)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 4), (7, 7), (8, 7), (16, 14), (64, 56)])
def test_one_core_in_eight_is_left_to_the_training_loop(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("stoker.basics.resources.usable_cores", lambda: cores)
    assert default_threads() == threads


@pytest.mark.parametrize("nonsense", ["", "0", "many", "-2"])
def test_nonsense_for_a_number_of_ranks_is_one(
    monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", nonsense)
    assert usable_cores() == cores


def test_memory_is_some_and_no_more_than_there_is() -> None:
    import psutil

    assert 0 < usable_memory_bytes() <= psutil.virtual_memory().total


def test_a_thread_is_busy_while_it_computes_and_not_while_it_sleeps() -> None:
    before = thread_busy_ns()
    until = time.thread_time_ns() + 20_000_000
    while time.thread_time_ns() < until:
        pass
    computed = thread_busy_ns()
    assert computed - before >= 20_000_000
    began = time.perf_counter_ns()
    threading.Event().wait(0.5)
    assert thread_busy_ns() - computed < time.perf_counter_ns() - began
