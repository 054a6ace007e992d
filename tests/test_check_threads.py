"""``stoker.testing.check_threads``: what it finds, what it cannot tell, what ends its child."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import stoker
import thread_programs
from stoker.testing import check_threads


class Pair(NamedTuple):
    x: np.ndarray[Any, Any]
    label: int


class Buffering:
    """Goes by way of a buffer; copies for each thread are right."""

    def __init__(self) -> None:
        self.buf = np.zeros(5_000)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Pair:
        self.buf[:] = i
        return Pair(self.buf[::1_000].copy(), i)


def test_code_that_copies_make_right_passes() -> None:
    tried = stoker.from_dataset(Buffering(), seed=0).shuffle().map(lambda pair: pair.x, on=None)
    tried = tried.random_map(lambda x, rng: x + rng.random()).batch(4).map(lambda x: x * 2)
    assert check_threads(tried, seconds=0.2) > 0
    assert tried.epoch == 0


def test_what_is_declared_and_is_not_safe_is_named_with_its_field() -> None:
    dataset = stoker.thread_safe(Buffering())
    with pytest.raises(AssertionError) as caught:
        check_threads(stoker.from_dataset(dataset), seconds=60.0)
    text = str(caught.value)
    assert text.startswith("from_dataset(Buffering): example ")
    assert ", field x is array([" in text
    assert "(declared safe for threads: Buffering, a " in text


class Meeting:
    """Lets a thread go on once another has come after it."""

    def __init__(self) -> None:
        self.came = 0
        self.changed = threading.Condition()

    def wait(self) -> None:
        with self.changed:
            self.came += 1
            mine = self.came
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.came > mine, timeout=1.0)


def test_what_copies_share_unseen_is_found_in_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_programs, "MEETING", Meeting(), raising=False)
    scratch_name, meeting_name = "SCRATCH", "MEETING"

    def looked_up(i: int) -> Any:
        made = thread_programs.fill(getattr(thread_programs, scratch_name), i)
        if threading.active_count() == 1:
            return made
        getattr(thread_programs, meeting_name).wait()  # by now another thread has filled it
        return tuple(getattr(thread_programs, scratch_name))

    tried = stoker.from_dataset(thread_programs.Numbers()).map(looked_up)
    # It ends as soon as it has found enough.
    with pytest.raises(AssertionError, match=r"^map\(looked_up\): example \d+.* under threads"):
        check_threads(tried, seconds=60.0)


def test_a_crash_is_told_by_its_signal(tmp_path: Path) -> None:
    def crash(i: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    tried = stoker.from_dataset(thread_programs.Numbers()).map(crash)
    with pytest.raises(AssertionError, match=r"SIGKILL ended the process .* called .*map\(crash\)"):
        check_threads(tried, seconds=0.2)


def test_what_is_raised_by_threads_alone_is_found() -> None:
    def refuse(i: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("another thread")
        return i

    tried = stoker.from_dataset(thread_programs.Numbers()).map(refuse)
    with pytest.raises(AssertionError, match="raises RuntimeError"):
        check_threads(tried, seconds=0.2)


def test_what_is_not_the_same_twice_cannot_be_told() -> None:
    count = itertools.count()
    tried = stoker.from_dataset(thread_programs.Numbers()).map(lambda i: next(count))
    with pytest.warns(
        UserWarning, match=r"map\(<lambda>\) gives two different results in one thread"
    ):
        check_threads(tried, seconds=0.1)


def test_batches_are_compared_behind_collate() -> None:
    scratch: list[int] = stoker.thread_safe(Scratch())

    def collate(examples: list[int]) -> Any:
        total = 0
        for _ in range(50):
            scratch.clear()
            for each in examples:
                scratch.append(each)
            total += sum(scratch)
        return np.array(total)

    tried = stoker.from_dataset(thread_programs.Numbers()).batch(16, collate=collate)
    with pytest.raises(AssertionError, match=r"^collate of batch\(16\): the batch"):
        check_threads(tried, seconds=60.0)


class Scratch(list[int]):
    pass


def test_what_fails_alone_is_left_out() -> None:
    def odd(i: int) -> int:
        if i % 2:
            raise ValueError("odd")
        return i

    tried = stoker.from_dataset(thread_programs.Numbers()).map(odd)
    assert check_threads(tried, seconds=0.1) > 0


def test_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="examples by number"):
        check_threads(stoker.from_iterable([1, 2, 3]))
