"""The stacks of the code that prepares: sampled for real, then named, counted and shown."""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.analyses import analyze, measured, write_script
from stoker.analysis.model.rates import estimate_costs
from stoker.analysis.model.trace import Drain
from stoker.analysis.probe.records import WorkRecord
from stoker.analysis.probe.stacks import StackSampler, _name, find_package, name_work


def sample(folder: Path, fetch: Callable[[Any], object], batches: int) -> list[Counter[str]]:
    """Sample batches that this process makes."""
    sampler, fetcher = StackSampler(), SimpleNamespace(fetch=fetch)
    sampler.begin(str(folder / "drain"))
    sampler.watch(fetcher)
    try:
        for index in range(batches):
            fetcher.fetch(index)
    finally:
        sampler.end()
    lines = [line for path in folder.glob("*.looks") for line in path.read_text().splitlines()]
    return [Counter(json.loads(line)) for line in lines]


class Photographs:
    """Examples whose parts are timed as they are made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def __getitem__(self, index: int) -> int:
        for work in (self.compute, self.hold, self.wait):
            began = time.perf_counter()
            work()
            self.seconds[work.__name__] += time.perf_counter() - began
        return index

    def compute(self) -> int:
        return len([number for number in range(100_000) if number % 3])

    def hold(self) -> int:
        return sum(range(400_000))

    def wait(self) -> None:
        time.sleep(0.01)


def test_each_piece_of_work_has_its_share_whatever_it_does_with_the_gil(tmp_path: Path) -> None:
    before = random.getstate()
    photographs = Photographs()
    found = sample(tmp_path, photographs.__getitem__, 4)
    assert random.getstate() == before
    looks = sum(found, Counter[str]())
    pieces = {name: f"Photographs.{name}" for name in ("compute", "hold", "wait")}
    assert set(pieces.values()) <= set(looks)
    for name, piece in pieces.items():
        truth = photographs.seconds[name] / sum(photographs.seconds.values())
        assert abs(looks[piece] / looks.total() - truth) < 0.25


def test_batches_of_another_thread_and_without_a_drain_are_not_sampled(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(sample(tmp_path, Photographs().__getitem__, 1))
    )
    thread.start()
    thread.join()
    assert found == [[]]
    fetcher = SimpleNamespace(fetch=abs)
    StackSampler().watch(fetcher)
    assert fetcher.fetch is abs


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


LIBRARY = "/env/lib/python3.11/site-packages/"


def frame_of(qualname: str, path: str, kind: type | None = None) -> Any:
    """Return a frame on a stack: of a function, or of the method of an object of a class."""
    code = SimpleNamespace(
        co_qualname=qualname,
        co_name=qualname.rsplit(".", 1)[-1],
        co_filename=path,
        co_argcount=1,
        co_varnames=("self",),
    )
    return SimpleNamespace(f_code=code, f_lineno=1, f_locals={"self": kind and kind()})


def class_of(module: str, name: str) -> type:
    return type(name, (), {"__module__": module})


FETCH = frame_of("_MapDatasetFetcher.fetch", LIBRARY + "torch/utils/data/_utils/fetch.py")
ITEM = frame_of("Photographs.__getitem__", "/home/me/train.py")
VISION = LIBRARY + "torchvision/transforms/transforms.py"
COMPOSE = frame_of("Compose.__call__", VISION, class_of("torchvision.transforms", "Compose"))
JITTER = frame_of("Transform.forward", VISION, class_of("torchvision.transforms", "ColorJitter"))
LAMBDA = frame_of("Lambda.__call__", VISION, class_of("torchvision.transforms", "Lambda"))
CONVERT = frame_of("Image.convert", LIBRARY + "PIL/Image.py")
LOAD = frame_of("ImageFile.load", LIBRARY + "PIL/ImageFile.py")
FOLDER = frame_of("DatasetFolder.__getitem__", LIBRARY + "torchvision/datasets/folder.py")
LOCATE = frame_of("_LocIndexer.__getitem__", LIBRARY + "pandas/core/indexing.py")
LOADS = frame_of("loads", "/usr/lib/python3.11/json/__init__.py")
AUGMENT = frame_of("augment", "/home/me/train.py")
MINE = frame_of("Mine.__call__", "/home/me/train.py", class_of("train", "Mine"))
COLLATE = frame_of("default_collate", LIBRARY + "torch/utils/data/_utils/collate.py")
OWN_COLLATE = frame_of("pad", "/home/me/train.py")
DISPATCH = frame_of(
    "OpOverloadPacket.__call__", LIBRARY + "torch/_ops.py", class_of("torch._ops", "Packet")
)
DECODE = frame_of("decode_jpeg", LIBRARY + "torchvision/io/image.py")


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([FETCH, ITEM, CONVERT], "PIL's Image.convert"),
        ([FETCH, ITEM, CONVERT, LOAD], "PIL's decode"),
        ([FETCH, ITEM, COMPOSE, JITTER], "ColorJitter"),
        ([FETCH, ITEM, COMPOSE, JITTER, CONVERT], "ColorJitter"),
        ([FETCH, ITEM, COMPOSE, JITTER, LOAD], "PIL's decode"),
        ([FETCH, ITEM, COMPOSE, LAMBDA, AUGMENT], "augment"),
        ([FETCH, ITEM, COMPOSE, MINE, AUGMENT], "Mine"),
        ([FETCH, ITEM, AUGMENT], "augment"),
        ([FETCH, ITEM, AUGMENT, LOADS], "json's loads"),
        ([FETCH, ITEM, LOCATE], "pandas's _LocIndexer.__getitem__"),
        ([FETCH, ITEM, DECODE, DISPATCH], "torchvision's decode_jpeg"),
        ([FETCH, ITEM], "Photographs.__getitem__: "),
        ([FETCH, FOLDER, LOAD], "PIL's decode"),
        ([FETCH, FOLDER, COMPOSE, JITTER], "ColorJitter"),
        ([FETCH, FOLDER, CONVERT], "PIL's Image.convert"),
        ([FETCH, ITEM, FOLDER, CONVERT], "PIL's Image.convert"),
        ([FETCH, FOLDER], "torchvision's DatasetFolder.__getitem__"),
        ([FETCH, COLLATE], "torch's default_collate"),
        ([FETCH, OWN_COLLATE], "pad"),
    ],
)
def test_a_stack_is_named_by_the_work_that_it_is_part_of(frames: list[Any], name: str) -> None:
    assert _name(frames[::-1]) == name


def test_of_a_datasets_method_the_line_is_named(tmp_path: Path) -> None:
    class Whole:
        def __getitem__(self, index: int) -> int:
            names.append(name_work(sys._getframe()))
            return index

    names: list[str] = []
    sample(tmp_path, Whole().__getitem__, 1)
    assert names[0].endswith("Whole.__getitem__: names.append(name_work(sys._getframe()))")
    assert name_work(sys._getframe()) == "", "outside of a batch nothing is named"


def test_code_belongs_to_a_package_or_to_the_user() -> None:
    code: CodeType = frame_of.__code__
    assert find_package(code.co_filename) == ""
    assert find_package(json.loads.__code__.co_filename) == "json"
    assert find_package(pytest.raises.__code__.co_filename) == "_pytest"
    assert find_package("<frozen importlib._bootstrap>") == "python"


def drained(batches: int) -> list[Drain]:
    """Return a drain with batches of 10 examples, each of which took 5 ms."""
    work = [WorkRecord(7, 0, 0, 50_000_000, 0, 10, -1)] * batches
    return [Drain(1, [1, 2], 0, 0.0, work)]


def test_costs_are_shares_of_the_time_in_which_batches_are_made() -> None:
    batches = [{"decode": 72, "jitter": 14, "rest": 1, "collate": 13}] * 40
    found = estimate_costs(batches, drained(40))
    assert [cost.name for cost in found] == ["decode", "jitter", "collate"]
    assert [cost.share.value for cost in found] == pytest.approx([0.72, 0.14, 0.13])
    assert [cost.seconds for cost in found] == pytest.approx([0.0036, 0.0007, 0.00065])


@pytest.mark.parametrize(
    "batches", [[], [{"decode": 90}], [{"decode": 9}] * 9, [{"decode": 99}] * 7]
)
def test_too_few_looks_tell_nothing(batches: list[dict[str, int]]) -> None:
    assert estimate_costs(batches, drained(9)) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=8, max_size=40))
def test_an_interval_holds_its_share(found: list[tuple[int, int]]) -> None:
    batches = [{"decode": seen, "rest": 50 + rest} for seen, rest in found]
    looks = sum(sum(batch.values()) for batch in batches)
    costs = {cost.name: cost.share for cost in estimate_costs(batches, drained(9))}
    for name in costs:
        seen = sum(batch[name] for batch in batches)
        assert costs[name].value == pytest.approx(seen / looks)
        assert 0.0 <= costs[name].low <= costs[name].value <= costs[name].high <= 1.0


def test_an_interval_is_wider_where_batches_differ() -> None:
    def spread(batches: list[dict[str, int]]) -> float:
        share = estimate_costs(batches * 4, drained(9))[0].share
        return share.high - share.low

    alike = [{"decode": 5, "rest": 5}] * 8
    unlike = [{"decode": 10}, {"rest": 10}] * 4
    assert spread(unlike) > spread(alike) + 0.3


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


@pytest.mark.parametrize(
    "options",
    [
        "num_workers=0",
        "num_workers=1, multiprocessing_context='spawn', persistent_workers=True",
    ],
)
@measured
def test_the_report_says_which_transform_takes_the_time(options: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT.format(options=options))
    done = analyze(tmp_path, "--details", script, seconds=60)
    assert done.rates["P"] is not None, done.told["reasons"]
    assert done.told["transforms"], done.told["reasons"]
    first = done.told["transforms"][0]
    assert first["name"] == "Decode"
    assert first["share"]["low"] > 0.4
    assert "Cost of each transform" in done.out
