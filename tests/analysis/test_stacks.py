"""The stacks of the code that prepares: sampled for real, then named, counted and shown."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.analyses import analyze, measured, write_script
from stoker.analysis.model.stack_samples import (
    CodeFrame,
    SampledStack,
    estimate_share,
    find_preparing,
    name_work,
    read_samples,
)
from stoker.analysis.probe.stacks import StackSampler


def sample(folder: Path, fetch: Callable[[Any], object], batches: int) -> list[Counter[Any]]:
    """Sample batches that this process makes."""
    sampler, fetcher = StackSampler(), SimpleNamespace(fetch=fetch)
    sampler.begin(str(folder / "drain"))
    sampler.watch(fetcher)
    try:
        for index in range(batches):
            fetcher.fetch(index)
    finally:
        sampler.end()
    return [batch for path in folder.glob("*.stacks") for batch in read_samples(path)]


class Photographs:
    """Examples whose parts are timed as they are made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __getitem__(self, index: int) -> int:
        for work in (self.compute, lambda: sum(range(400_000)), lambda: time.sleep(0.01)):
            began = time.perf_counter()
            work()
            self.seconds[work.__name__] += time.perf_counter() - began
        return index

    def compute(self) -> int:
        return len([number for number in range(100_000) if number % 3])


def test_each_piece_of_work_has_its_share_whatever_it_does_with_the_gil(tmp_path: Path) -> None:
    before = random.getstate()
    photographs = Photographs()
    found = sample(tmp_path, photographs.__getitem__, 4)
    assert random.getstate() == before
    looks: Counter[str] = Counter()
    for batch in found:
        for stack, count in batch.items():
            assert stack.frames[0][1:3] == ("Photographs.__getitem__", __file__)
            looks["compute" if "compute" in stack.frames[-1].name else stack.native] += count
    assert {"compute", "sum", "time.sleep"} <= set(looks)
    truth = photographs.seconds["compute"] / sum(photographs.seconds.values())
    assert abs(looks["compute"] / looks.total() - truth) < 0.25


def test_batches_of_another_thread_are_made_and_not_sampled(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(sample(tmp_path, Photographs().__getitem__, 1))
    )
    thread.start()
    thread.join()
    assert found == [[]]


def test_a_time_out_of_the_datasets_own_goes_off_when_it_should(tmp_path: Path) -> None:
    """A call that waits is not cut short by looks, and an alarm comes once."""
    rang: list[float] = []

    def fetch(index: int) -> None:
        signal.signal(signal.SIGALRM, lambda *_: rang.append(time.perf_counter()))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        began = time.perf_counter()
        time.sleep(0.04)
        assert rang[index] - began >= 0.02
        assert time.perf_counter() - began >= 0.04

    before, left = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        assert sample(tmp_path, fetch, 2)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
    assert len(rang) == 2


def test_nothing_is_sampled_without_a_drain(tmp_path: Path) -> None:
    fetcher = SimpleNamespace(fetch=abs)
    StackSampler().watch(fetcher)
    assert fetcher.fetch is abs


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    sample(tmp_path, Photographs().__getitem__, 2)
    (path,) = tmp_path.glob("*.stacks")
    whole = list(read_samples(path))
    assert len(whole) == 2
    path.write_text(path.read_text()[:-4])
    assert list(read_samples(path)) == whole[:1]


LIBRARY = "/env/lib/python3.11/site-packages/"
FETCH = ("", "_MapDatasetFetcher.fetch", LIBRARY + "torch/utils/data/_utils/fetch.py")
ITEM = ("", "Photographs.__getitem__", "/home/me/train.py")
COMPOSE = ("torchvision.transforms.Compose", "Compose.__call__", LIBRARY + "torchvision/t.py")
JITTER = (
    "torchvision.transforms.v2.ColorJitter",
    "Transform.forward",
    LIBRARY + "torchvision/t.py",
)
LAMBDA = ("torchvision.transforms.Lambda", "Lambda.__call__", LIBRARY + "torchvision/t.py")
CONVERT = ("", "Image.convert", LIBRARY + "PIL/Image.py")
LOAD = ("", "ImageFile.load", LIBRARY + "PIL/ImageFile.py")
FOLDER = ("", "DatasetFolder.__getitem__", LIBRARY + "torchvision/datasets/folder.py")
LOCATE = ("", "_LocIndexer.__getitem__", LIBRARY + "pandas/core/indexing.py")
LOADS = ("", "loads", "/usr/lib/python3.11/json/__init__.py")
AUGMENT = ("", "augment", "/home/me/train.py")
MINE = ("train.Mine", "Mine.__call__", "/home/me/train.py")
COLLATE = ("", "default_collate", LIBRARY + "torch/utils/data/_utils/collate.py")
OWN_COLLATE = ("", "pad", "/home/me/train.py")
DISPATCH = ("torch._ops.OpOverloadPacket", "OpOverloadPacket.__call__", LIBRARY + "torch/_ops.py")
DECODE = ("", "decode_jpeg", LIBRARY + "torchvision/io/image.py")


@pytest.mark.parametrize(
    ("frames", "native", "name"),
    [
        ([FETCH, ITEM, CONVERT], "self.im.convert", "PIL's convert"),
        ([FETCH, ITEM, CONVERT, LOAD], "decoder.decode", "PIL's decode"),
        ([FETCH, ITEM, COMPOSE, JITTER], "", "ColorJitter"),
        ([FETCH, ITEM, COMPOSE, JITTER, CONVERT], "self.im.convert", "ColorJitter"),
        ([FETCH, ITEM, COMPOSE, JITTER, LOAD], "decoder.decode", "PIL's decode"),
        ([FETCH, ITEM, COMPOSE, LAMBDA, AUGMENT], "np.add", "augment"),
        ([FETCH, ITEM, COMPOSE, MINE, AUGMENT], "np.add", "Mine"),
        ([FETCH, ITEM, AUGMENT], "np.add", "augment"),
        ([FETCH, ITEM, AUGMENT, LOADS], "", "json's loads"),
        ([FETCH, ITEM, LOCATE], "", "pandas's _LocIndexer.__getitem__"),
        ([FETCH, ITEM, DECODE, DISPATCH], "self._op", "torchvision's decode_jpeg"),
        ([FETCH, ITEM], "cv2.imdecode", "cv2.imdecode"),
        ([FETCH, ITEM], "", "Photographs.__getitem__"),
        ([FETCH, FOLDER, LOAD], "decoder.decode", "PIL's decode"),
        ([FETCH, FOLDER, COMPOSE, JITTER], "", "ColorJitter"),
        ([FETCH, FOLDER, CONVERT], "", "PIL's convert"),
        ([FETCH, ITEM, FOLDER, CONVERT], "", "PIL's convert"),
        ([FETCH, FOLDER], "", "torchvision's DatasetFolder.__getitem__"),
        ([FETCH, COLLATE], "torch.stack", "collate"),
        ([FETCH, OWN_COLLATE], "torch.stack", "pad"),
    ],
)
def test_a_stack_is_named_by_the_work_that_it_is_part_of(
    frames: list[tuple[str, str, str]], native: str, name: str
) -> None:
    stack = SampledStack(tuple(CodeFrame(*frame, 1) for frame in frames), native)
    assert name_work(stack) == name


def batches_of(*counts: dict[str, int]) -> list[Counter[SampledStack]]:
    """Return batches with so many looks at each native function."""
    item = tuple(CodeFrame(*frame, 1) for frame in (FETCH, ITEM))
    return [Counter({SampledStack(item, name): n for name, n in each.items()}) for each in counts]


def test_the_line_says_shares_with_their_intervals() -> None:
    found = find_preparing(batches_of(*[{"decode": 72, "jitter": 14, "rest": 1, "c": 13}] * 40))
    assert found is not None
    assert found.text.startswith("72% (71 to 73%) in decode, 14% (13 to 15%) in jitter, 13% ")
    assert [one.name for one in found.work] == ["decode", "jitter", "c"]
    assert found.samples == 4000
    (fetch,) = found.frames
    assert fetch.share == 1.0
    (item,) = fetch.calls
    assert {part.name: part.share for part in item.calls} == {
        "decode": 0.72, "jitter": 0.14, "c": 0.13, "rest": 0.01
    }  # fmt: skip


@pytest.mark.parametrize("batches", [[{"decode": 90}], [{"decode": 9}] * 9, [{"decode": 99}] * 7])
def test_too_few_samples_tell_nothing(batches: list[dict[str, int]]) -> None:
    found = find_preparing(batches_of(*batches))
    assert found is not None
    assert found.text.startswith("too few samples to tell: ")
    assert found.work == []
    assert find_preparing([]) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=8, max_size=40))
def test_an_interval_holds_its_share_and_narrows_with_more_batches(
    found: list[tuple[int, int]],
) -> None:
    counts = [(min(seen, every), every) for seen, every in found]
    seen, every = (sum(column) for column in zip(*counts, strict=True))
    interval = estimate_share(counts)
    assert 0.0 <= interval.low <= seen / every <= interval.high <= 1.0
    again = estimate_share(counts * 9)
    assert again.high - again.low <= interval.high - interval.low


def test_an_interval_is_wider_where_batches_differ() -> None:
    alike, unlike = (estimate_share(each * 10) for each in ([(5, 10)] * 2, [(10, 10), (0, 10)]))
    assert unlike.high - unlike.low > 1.5 * (alike.high - alike.low)


SCRIPT = """
class Decode:
    def __call__(self, index):
        return float(sum(range(400_000)) + index)

class Photographs(Sleepy):
    def __init__(self):
        super().__init__()
        self.decode = Decode()

    def __getitem__(self, index):
        return torch.full((4,), self.decode(index))

if __name__ == "__main__":
    train(DataLoader(Photographs(), 4, {options}))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        "num_workers=2",
        "num_workers=0",
        "num_workers=1, multiprocessing_context='spawn', persistent_workers=True",
    ],
)
@measured
def test_the_report_says_which_transform_takes_the_time(options: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT.format(options=options))
    done = analyze(tmp_path, script, minutes=3.0)
    assert done.report is not None, done.errors
    assert done.rates["P"] is not None, done.report["reasons"]
    found = done.report["preparing"]
    assert found["work"], found
    assert found["work"][0]["name"] == "Decode"
    assert found["work"][0]["interval"]["low"] > 0.4
    assert "in Decode" in done.out
