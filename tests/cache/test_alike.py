"""Data that are alike but for what they select, or are made of, and one ``version=`` of a cache."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

import stoker
from strategies import one_in


@stoker.thread_safe
class Labelled(Dataset[Any]):
    def __init__(self, part: str, scale: float = 1.0, root: Path | None = None) -> None:
        self.part = part
        self.scale = scale
        self.root = root

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        return f"{self.part} {index} {self.scale} {self.root}"


@stoker.thread_safe
class Over(Dataset[Any]):
    """A data set around another."""

    def __init__(self, dataset: Any, transform: Any = None) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        found = self.dataset[index]
        return found if self.transform is None else self.transform(found)


class Behind:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, found: str) -> str:
        return found + self.text


def closing(text: str) -> Callable[[str], str]:
    return lambda found: found + text


def added(found: str, text: str) -> str:
    return found + text


def halves() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return list(random_split(Labelled("a"), [10, 10], generator))  # type: ignore[arg-type]


a, b = Labelled("a"), Labelled("b")
PAIRS: dict[str, Callable[[], list[Any]]] = {
    "halves": halves,
    "halves of halves": lambda: [Subset(each, range(5)) for each in halves()],
    "the same numbers of others": lambda: [Subset(a, [1, 2]), Subset(b, [1, 2])],
    "numbers in another order": lambda: [Subset(a, [1, 2]), Subset(a, [2, 1])],
    "arguments": lambda: [a, b],
    "numbers as arguments": lambda: [Labelled("a", 1.0), Labelled("a", 2.0)],
    "paths": lambda: [Labelled("a", root=Path("x")), Labelled("a", root=Path("y"))],
    "joined": lambda: [ConcatDataset([a, b]), ConcatDataset([b, a])],
    "joined parts": lambda: [ConcatDataset([each, a]) for each in halves()],
    "around others": lambda: [Over(a), Over(b)],
    "with transforms": lambda: [Over(a, Behind("x")), Over(a, Behind("y"))],
    "with functions": lambda: [Over(a, closing("x")), Over(a, closing("y"))],
}


@pytest.mark.parametrize("pair", one_in(3, PAIRS))
@pytest.mark.parametrize("how", ["cached", "chain"])
def test_each_has_its_own_examples(pair: str, how: str, tmp_path: Path) -> None:
    for _ in range(2):  # what was kept is found again, for each its own
        for dataset in PAIRS[pair]():
            every = [dataset[index] for index in range(len(dataset))]
            if how == "cached":
                cache = stoker.cached(dataset, "1MiB", path=tmp_path, version="1")
                assert [cache[index] for index in range(len(dataset))] == every
            else:
                source = stoker.from_dataset(dataset, seed=0)
                assert list(source.cache("1MiB", path=tmp_path, version="1")) == every


def test_what_is_alike_shares(tmp_path: Path) -> None:
    for built in range(2):
        half = stoker.from_dataset(Over(halves()[0], closing("x")), seed=0)
        cache = half.cache("1MiB", path=tmp_path, keep=True, version="1")
        list(cache)
        found = cache.stats().cache
        assert found is not None
        assert found.hits == 10 * built


ELSEWHERE = """
from test_alike import Over, closing, added, halves
from stoker.basics.fingerprint import content_digest
print(content_digest(Over(halves()[1], closing("x"))), content_digest(added))
"""


@pytest.mark.full
def test_another_process_is_told_the_same() -> None:
    answers = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", ELSEWHERE]
        answers.add(subprocess.check_output(command, env=environment, text=True))
    assert len(answers) == 1


FUNCTIONS: dict[str, list[Callable[[Any], Any]]] = {
    "lambdas": [lambda found: found + "x", lambda found: found + "y"],
    "closures": [closing("x"), closing("y")],
    "partials": [functools.partial(added, text="x"), functools.partial(added, text="y")],
    "objects": [Behind("x"), Behind("y")],
    "methods": [Behind("x").__call__, Behind("y").__call__],
}


@pytest.mark.parametrize("pair", one_in(3, FUNCTIONS))
def test_so_has_each_map(pair: str, tmp_path: Path) -> None:
    for fn, text in zip(FUNCTIONS[pair], "xy", strict=True):
        made = stoker.from_dataset(a, seed=0).map(fn)
        seen = list(made.cache("1MiB", path=tmp_path, version="1"))
        assert seen == [a[index] + text for index in range(20)]


def test_arrays_and_tables_are_told_by_rows(tmp_path: Path) -> None:
    import pyarrow

    numbers = np.arange(100)
    for part in (numbers[:50], numbers[50:]):
        cache = stoker.from_arrays(part, seed=0).cache("1MiB", path=tmp_path, version="1")
        assert [int(n) for n in cache] == part.tolist()
        table = pyarrow.table({"n": part})
        rows = stoker.from_table(table, seed=0).cache("1MiB", path=tmp_path, version="1")
        assert [int(row["n"]) for row in rows] == part.tolist()


def test_views_of_hugging_face_s_are_others(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"n": list(range(40))})
    views = [
        whole.select(range(20)),
        whole.select(range(20, 40)),
        whole.shuffle(seed=1).select(range(20)),
        whole.shuffle(seed=2).select(range(20)),
        whole.filter(lambda row: row["n"] % 2),
        whole.filter(lambda row: not row["n"] % 2),
    ]
    for view in views:
        for source in (stoker.from_dataset(view, seed=0), stoker.from_dataset(Over(view), seed=0)):
            rows = source.cache("1MiB", path=tmp_path, version="1")
            assert [int(row["n"]) for row in rows] == view["n"][:]
        cache = stoker.cached(view, "1MiB", path=tmp_path, version="1")
        assert [int(cache[i]["n"]) for i in range(20)] == view["n"][:]
