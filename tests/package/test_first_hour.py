"""What people write in their first hour that cannot be: each is refused, and told what to write.

Tables of calls and commands, each with a part of what it is told. What waits for others, such as
ranks and feeds, has tests of its own.
"""

from __future__ import annotations

import functools
import io
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stoker
from command_line import call, python
from stoker import foreign, images, testing
from stoker.collate import pad


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Go to a folder with some files of a first hour."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("first"))
    for name in ("cat", "dog"):
        Path("train", name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (i, i, i)).save(f"train/{name}/{i}.png")
    Path("flat").mkdir()
    Path("flat/a.jpg").touch()
    Path("bad/cat").mkdir(parents=True)
    Path("bad/cat/x.jpg").write_bytes(b"no picture")
    Path("rows.csv").write_text("a,b\n1,2\n3,4\n")
    Path("rows.jsonl").write_text('{"a": 1}\nnope\n')
    np.arange(100, dtype=np.uint16).tofile("tokens.bin")
    Path("train.py").write_text(
        "import stoker\ndef make(): return stoker.from_dataset(range(4), seed=0).batch(2)\n"
    )
    yield
    os.chdir(before)


class Data:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.zeros(index + 1), "i": index}


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def stream() -> Iterator[int]:
    yield from range(4)


def p(count: int = 24) -> Any:
    return stoker.from_dataset(range(count), seed=0)


def numbers() -> Any:
    return s.from_dataset([{"x": np.arange(n)} for n in (1, 2, 3)], seed=0)


def skipped(train: Any, count: int) -> Any:
    train.resume_at(count)
    return iter(train)


async def later(x: Any) -> bool:
    return bool(x)


def many_of(x: Any) -> Iterator[Any]:
    yield x


def pictures(folder: str = "train") -> Any:
    return stoker.from_folder(folder, seed=0)


def loader() -> Any:
    return torch.utils.data.DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]


def many(*given: Any) -> Any:
    """Ask for what a type checker would refuse."""
    return given


s: Any = stoker
im: Any = images
Mistakes = list[tuple[Callable[[], object], str]]
"""Calls, and a part of what each is told."""

SOURCES: Mistakes = [
    (lambda: s.from_folder("nowhere"), "there is no folder nowhere; this is "),
    (lambda: s.from_folder("train/cat/0.png"), "is a file; from_folder expects a folder"),
    (lambda: s.from_folder("flat"), "Files without classes: from_files('flat/*')"),
    (lambda: s.from_folder("train", extensions="png"), "such as ['.wav', '.flac'], not 'png'"),
    (lambda: s.from_folder("train", extensions=[".gif"]), "(looked for .gif)"),
    (lambda: s.from_folder("train", classes="cat"), "such as ['cat', 'dog'], not 'cat'"),
    (lambda: s.from_folder("train", classes=["cat"]), "'dog', which is none of the 1 classes"),
    (lambda: s.from_folder("train", seed="a"), "a whole number or None, not 'a'"),
    (lambda: s.from_folder("train", seed=-1), "seed must not be negative, not -1"),
    (lambda: s.from_folder("train", sede=2), "'sede': did you mean seed?"),
    (lambda: s.from_files("train"), "train is a folder: give the files in it, as train/*"),
    (lambda: s.from_files("nowhere/*.jpg"), "no file fits nowhere/*.jpg"),
    (lambda: s.from_files([]), "from_files needs at least one file"),
    (lambda: list(s.from_files(["gone.jpg"])), "example 0 (gone.jpg)"),
    (lambda: s.from_dataset("train/"), "from_folder"),
    (lambda: s.from_dataset(Data), "needs an object, not its class: from_dataset(Data(...))"),
    (lambda: s.from_dataset(NoLength()), "NoLength has no __len__"),
    (lambda: s.from_dataset(Stream()), "a stream goes into from_iterable"),
    (lambda: s.from_dataset({1, 2}), "set has no __getitem__"),
    (lambda: s.from_dataset({"x": 1}), "has the keys 'x': give one of its values"),
    (lambda: s.from_dataset(loader()), "from_loader takes it as it is"),
    (lambda: s.from_dataset(p()), "a pipeline goes on: pipeline.map(fn)"),
    (lambda: s.from_dataset(None), "NoneType has no __getitem__"),
    (lambda: s.from_arrays([1, 2, 3]), "use np.asarray(...), or from_dataset"),
    (lambda: s.from_arrays(np.zeros(3), np.zeros(4)), "of one length, not [3, 4]"),
    (lambda: s.from_arrays(), "at least one array"),
    (lambda: s.from_iterable(5), "int is neither"),
    (lambda: s.from_iterable("rows.csv"), "a file's lines are read by from_text"),
    (lambda: s.from_iterable(stream()), "or a function that returns a new iterator"),
    (lambda: list(s.from_iterable(lambda: 5)), "the function returned a int"),
    (lambda: s.from_iterable(stream).select([1]), "by their numbers, and a stream has none"),
    (lambda: len(s.from_iterable(stream)), ".steps(n) gives it one"),
    (lambda: s.from_loader(None), "NoneType is neither"),
    (lambda: s.from_loader(iter(loader())), "pass the object it came from"),
    (lambda: s.from_csv("rows.csv", ["c"]), "rows.csv has no column 'c', only 'a', 'b'"),
    (lambda: s.from_csv("rows.csv", ["a"], delimiter=";"), "only 'a,b': name those of its first"),
    (lambda: s.from_csv("rows.csv", "a"), "such as ['x', 'y'], not 'a'"),
    (lambda: s.from_csv("rows.csv", delimiter="; "), "one character, such as ';'"),
    (lambda: list(s.from_jsonl("rows.jsonl")), "/rows.jsonl:2): ValueError: this is not JSON"),
    (lambda: s.from_text("train"), "train is a folder: give the files in it, as train/*"),
    (lambda: s.from_tokens("tokens.bin", 8), "Say so, such as dtype='uint16'"),
    (lambda: s.from_tokens("tokens.bin", 1000, dtype="uint16"), "the longest of 1 files has 100"),
    (lambda: s.from_parquet("rows.csv"), "rows.csv is not a Parquet file"),
    (lambda: s.from_tar("shard-{0..3}.tar"), "no file fits shard-0.tar"),
    (lambda: s.from_text(io.StringIO()), "not StringIO: give its path"),
    (lambda: list(s.from_iterable(lambda: next(iter([])))), "the function raised StopIteration"),
    (
        lambda: list(p().map(lambda x: np.array([{}])).cache("1MiB")),
        "a numpy.ndarray, which is of object",
    ),
    (lambda: s.from_table("rows.csv"), "a pyarrow.Table or a DataFrame"),
    (lambda: s.from_huggingface("mnist"), "takes a datasets.Dataset"),
    (lambda: s.mix({p(): 0.7, p(): 0.3}), "as in mix([a, b], weights=[0.7, 0.3])"),
    (lambda: s.mix([p()], weights=[0]), "a finite number above 0, not 0"),
    (lambda: s.mix([p(), p().batch(2)]), "part 2, from_dataset(range), has .batch(2)"),
    (lambda: s.mix([p()], stop="never"), "'first' or 'all', not 'never'"),
]

ORDER: Mistakes = [
    (lambda: p().batch(4).shuffle(), ".shuffle() cannot follow batch(4): put it first"),
    (lambda: p().echo(2).shuffle(), ".shuffle() cannot follow echo(2): put it first"),
    (lambda: p().shuffle(1000), "needs none to be shuffled as a whole: .shuffle()"),
    (lambda: p().sample([1, 2]), "2 weights, and the source has 24 examples"),
    (lambda: p().sample([-1] * 24), "the weight of example 0 is -1.0"),
    (lambda: p().split([0.8, 0.2]), "such as .split(0.8, 0.2), not [0.8, 0.2]"),
    (lambda: p().split(80, 20), "lies between 0 and 1, such as .split(0.8, 0.2), not 80"),
    (lambda: p().split(0.8, 0.3), "are 1 together, not 1.1"),
    (lambda: p().select([100]), "no example 100; the source has examples 0 to 23"),
    (lambda: p().select(lambda x: x > 2), "calls fn(number, name)"),
    (lambda: p().select([]), "leaves none of 24 examples"),
    (lambda: p().take(0), "takes a number from 1 on, not 0"),
    (lambda: p().skip(-1), "takes a number from 0 on, not -1"),
    (lambda: p().steps(0), "at least one step, not 0"),
    (lambda: p().order([3, 2, 1]), ".order(lambda epoch, rng: numbers)"),
    (lambda: list(p().order(lambda epoch, rng: [0])), "say .order(fn, length=1)"),
    (lambda: p().batch(2).split(0.5, 0.5), "cannot follow batch(2): put it behind the source"),
    (lambda: p().split(0.5, groups=["a", None] * 12), "no label for example 1, but None"),
    (lambda: skipped(p().batch(2), 1000), "set_epoch(83), then resume_at(4)"),
    (lambda: s.Pipeline([1, 2]), "a pipeline begins with a source: stoker.from_dataset(list)"),  # type: ignore[arg-type]
]

MAPS: Mistakes = [
    (lambda: p().map("decode"), ".map() needs a function, not str"),
    (lambda: p().map(lambda: 1), "give it one parameter"),
    (lambda: p().map(lambda x, rng: 1), "or use .random_map() for fn(x, rng)"),
    (lambda: p().map(images.random_crop(3)), "random_crop(3)(images, rng) does not take: "),
    (lambda: p().random_map(images.resize(3)), "or use .map() if it draws nothing"),
    (lambda: p().random_map(lambda x: x), "give it a second parameter, rng"),
    (lambda: p().map(abs, on=[]), "on= takes a field"),
    (lambda: p().map(abs, on=1.5), "a field's name, key or position"),
    (lambda: list(p().map(abs, on="image")), "the example has no fields: it is a int"),
    (lambda: list(pictures().map(images.decode, on="img")), "have 'image', 'label'"),
    (lambda: list(pictures().map(images.decode)), "give on= the name of the field"),
    (lambda: list(p().map(lambda x: None)), "the function returned None: return the example"),
    (lambda: list(p().map(lambda x: 1 / (x - 3))), "map(<lambda>) failed on example 3"),
    (lambda: p().map(abs, max_errors="ignore"), "as text such as \"1%\"; not 'ignore'"),
    (lambda: p().filter("x > 0"), ".filter() needs a function, not str"),
    (lambda: p().filter(later), "needs a function that returns the value, not an async function"),
    (lambda: p().map(many_of), "not a generator function (it has a yield)"),
    (lambda: list(p().map(lambda x: s.DROP)), "returned stoker.DROP: return the example"),
    (lambda: list(p().batch(4).map(lambda x: s.DROP)), "returned stoker.DROP: return the batch"),
    (lambda: list(numbers().map(lambda x: s.DROP, on="x")), "returned stoker.DROP: return the"),
    (lambda: len(p().filter(bool)), ".steps(n) ends an epoch after n"),
    (lambda: p().scan(abs, 0), ".scan() calls fn(state, example)"),
    (lambda: list(p().scan(lambda state, x: x, 0)), "return a pair, (state, example)"),
    (lambda: p().apply(abs), ".apply() takes a stoker.Stage"),
]

BATCHES: Mistakes = [
    (
        lambda: p().batch(2).steps(3).steps(4),
        ".steps(4) cannot follow steps(3): an epoch ends once",
    ),
    (lambda: iter(p().late(2)), "put .batch(n) behind it"),
    (lambda: p().batch(0), "a batch has at least one example, not 0"),
    (lambda: p().batch("8"), "a batch size is a whole number, not '8'"),
    (lambda: p().batch(4).batch(2), "cannot follow batch(4): batch once"),
    (lambda: p().batch(4, collate="pad"), "collate must be a function, not str"),
    (lambda: p().batch_by_tokens(100), "sizes"),
    (lambda: list(s.from_dataset(Data()).batch(2)), "give .batch(collate=...)"),
    (lambda: list(s.from_dataset([1, "a"]).batch(2)), "batch 0, example 1"),
    (lambda: list(s.from_dataset([{"x": 1}, {"y": 1}]).batch(2)), "dict(x) and dict(y)"),
    (lambda: list(s.from_dataset([object()]).batch(1)), "turn it into an array in a map"),
    (lambda: list(s.from_dataset(Data()).batch(2, collate=pad)), "collate=pad()"),
    (lambda: list(s.from_dataset([(1, 2)]).batch(1, collate=pad)), "collate=pad()"),
    (lambda: list(s.from_dataset([np.ma.array([1])]).batch(1)), "whose masked values would come"),
    (lambda: list(numbers().batch(2, collate=pad(math.nan, on="x"))), "pad(nan) fits no array of"),
    (lambda: list(numbers().batch(2, collate=pad(1 << 70, on="x"))), "fits no array of int64"),
    (lambda: list(s.from_dataset([[1, 2], [3]]).batch(2, collate=pad())), "Make arrays of lists"),
    (lambda: pad(many("x")), "with a number, not ("),
    (lambda: pad({"x": None}), "with a number, not None"),  # type: ignore[dict-item]
    (lambda: pad({}), "at least one field"),
    (lambda: pad(on=[]), "at least one field"),
    (lambda: pad(on=3.5), "by name, key or position, not 3.5"),  # type: ignore[arg-type]
    (lambda: pad(on=[["x"]]), "not ['x']"),  # type: ignore[list-item]
    (lambda: pad({"x": 0}, on="y"), "not both"),
    (lambda: p().batch(4).pack(8), "put it before .batch(), once"),
    (lambda: list(p().pack(8)), "make them so in a map before it"),
]

ECHOES: Mistakes = [
    (lambda: p().echo(0), "at least 1, not 0: every fresh example is used at least once"),
    (lambda: p().echo("2"), '"auto" or a number of at least 1'),
    (lambda: p().echo(2, max_factor=4), 'go with .echo("auto")'),
    (lambda: p().echo(2, pool=0), "a pool holds at least one item"),
    (lambda: s.echo(loader(), 2, transform=lambda x: x), "give it a second parameter, rng"),
    (lambda: s.echo(loader(), 2, on="image"), "say what transform= gets: give it, too"),
    (lambda: s.echo(loader(), 2, repeats_only=True), "say what transform= gets: give it, too"),
    (lambda: s.echo(iter(loader()), 2), "pass the object it came from"),
    (lambda: s.echo(loader(), 2, device="gpu"), "such as 'cuda'"),
]

CACHES: Mistakes = [
    (lambda: p().cache("/tmp/cache"), "for a folder, write .cache(path='/tmp/cache')"),
    (lambda: p().cache("10 apples"), "write for example '2GiB', '500MB' or '4096'"),
    (lambda: p().cache(-5), "a cache needs at least 1.0 MiB"),
    (lambda: p().cache("1MiB", path="kept"), "Give version=, and change it whenever"),
    (lambda: p().cache("1MiB", path=3, version="1"), "path= is a folder on a local disk"),
    (lambda: p().cache("auto", cluster="torchrun"), "nodes could choose different ones"),
    (lambda: p().cache("1MiB").cache("1MiB"), "choose a place for it"),
    (lambda: p().echo(2).cache(), "put .cache() before it"),
    (lambda: p().random_map(lambda x, rng: x).cache(), "the same in every epoch; put .cache()"),
    (lambda: p().batch(2).cache(), "put .cache() before it"),
    (lambda: p().cache("1MiB", cluster="node"), "a list of addresses such as 'node1:7117'"),
    (lambda: s.cached(p()), "a pipeline has .cache()"),
    (lambda: s.cached(loader()), "DataLoader has no __getitem__"),
]

WORKERS: Mistakes = [
    (lambda: p().workers("four"), "a whole number, not 'four'"),
    (lambda: p().workers(-1), ".workers() takes a number from 0 on, not -1"),
    (lambda: p().workers(2, kind="spawn"), "takes the method of multiprocessing.set_start_method"),
    (lambda: p().workers(2, kind="processes"), "'thread', 'process' or 'ray', not 'processes'"),
    (lambda: p().workers(2, ahead=0), "For none: .workers(0)"),
    (lambda: p().workers(2, timeout_s="30s"), "a number of seconds, not '30s'"),
    (lambda: p().to_torch("gpu"), "such as 'cuda' (any GPU"),
    (lambda: p().to_torch(None), "change the dtype in a map"),
    (lambda: p().to_torch(torch.float16), "not torch.float16: change the dtype"),
    (lambda: list(p().to_torch()), ".to_torch(cpu) moves batches: put .batch(n) before it"),
    (lambda: p().shard(rank=0), "needs rank= and world_size= together"),
    (lambda: p().shard(rank=2, world_size=2), "a rank lies between 0 and world_size - 1"),
    (lambda: p().batch(2).shard(rank=0, world_size=2), "put it right after the source"),
    (
        lambda: list(s.from_dataset(range(4)).shuffle().shard(rank=0, world_size=2)),
        "give the pipeline seed=",
    ),
]

STATES: Mistakes = [
    (lambda: p().load_state_dict({"model": 1}), "state_dict() makes one"),
    (lambda: p().load_state_dict("state.pt"), "state_dict() makes one"),
    (lambda: p().load_state_dict(p().batch(2).state_dict()), "has batch(2, drop_last=False) where"),
    (lambda: p().shuffle().load_state_dict(p().state_dict()), "where this one has shuffle()"),
    (lambda: p(12).load_state_dict(p().state_dict()), "of 24 where this one has"),
    (lambda: p().load_state_dict(s.from_dataset(range(24), seed=1).state_dict()), "its seed is 1"),
    (lambda: p().set_epoch(-1), "an epoch is a whole number from 0, not -1"),
    (lambda: p().acknowledge(), "every batch that was handed out is acknowledged already"),
    (lambda: p().example(24), "there is no example 24; the source has examples 0 to 23"),
    (lambda: p()[0], "iterate the pipeline (for batch in pipeline)"),
    (lambda: s.testing.check_resume(p()), "takes a function that builds the pipeline"),
]

PICTURES: Mistakes = [
    (lambda: images.decode("a.png"), "read it with Path(name).read_bytes()"),  # type: ignore[arg-type]
    (lambda: images.decode(b""), "cannot identify an image in an empty file"),
    (lambda: list(pictures("bad").map(images.decode, on="image")), "/bad/cat/x.jpg)"),
    (lambda: images.resize(-3), "a number of pixels, or height and width, not -3"),
    (lambda: im.resize(np.zeros((8, 8, 3))), ".map(stoker.images.resize(224), on='image')"),
    (lambda: im.random_resized_crop(8, scale=2), "the smallest and the largest value"),
    (lambda: im.normalize(0.5), "a mean and a deviation for each channel"),
    (
        lambda: list(p().batch(2).random_map(images.random_hflip)),
        "Give on= the name of their field",
    ),
    (lambda: images.to_chw(np.zeros(3)), "an image must have three axes"),
]

TOOLS: Mistakes = [
    (lambda: s.monitor(5), "needs something to iterate, not int"),
    (lambda: s.serve(loader()), "wrap it, stoker.monitor(loader)"),
    (lambda: s.serve(p(), port="a"), "a whole number from 0 to 65535, not 'a'"),
    (lambda: s.lr_schedule(None, p().batch(2)), "such as CosineAnnealingLR(optimizer"),
    (lambda: s.analyze(loader(), print), "stoker analyze SCRIPT"),
    (lambda: s.analyze(p(), None), "step must be a function of a batch"),
    (lambda: s.feed(p(), name="x"), "share a function without arguments"),
    (lambda: s.feed("train.py", name="x"), "such as train.py:make_pipeline"),
    (lambda: s.reads_only(5), "reads_only needs a function"),
    (lambda: testing.check_resume(p, every=0), "(every=) takes a whole number from 1, not 0"),
    (lambda: s.from_foldr, "no attribute 'from_foldr': did you mean from_folder?"),
    (lambda: p().shuffel(), "no attribute 'shuffel': did you mean shuffle?"),
    (lambda: p().nothing_like_it(), "no attribute 'nothing_like_it'"),
]

FOREIGN: Mistakes = [
    *((lambda word=word: getattr(s, word), told) for word, told in foreign.FUNCTIONS.items()),
    *((lambda word=word: getattr(p(), word), told) for word, told in foreign.METHODS.items()),
    *(
        (lambda word=word: s.from_dataset(range(3), **{word: 2}), f"{word!r}: {told}")
        for word, told in foreign.KEYWORDS.items()
    ),
    (lambda: p().batch(4, collate_fn=list), foreign.KEYWORDS["collate_fn"]),
    (lambda: s.mix([p()], probabilities=[1]), foreign.KEYWORDS["probabilities"]),
    (lambda: s.concat(p(), p()), foreign.CALLS["concat"]),
    (lambda: s.mix(p(), p(), p()), foreign.CALLS["mix"]),
    (lambda: s.from_arrays(x=np.zeros(3)), foreign.CALLS["from_arrays"]),
    (lambda: p().shuffle(seed=0), f"'seed': {foreign.CALLS['shuffle']}"),
    (lambda: p().batch(8, True), f"too many positional arguments: {foreign.CALLS['batch']}"),
    (lambda: p().workers(num_workers=8), foreign.KEYWORDS["num_workers"]),
    (lambda: p().workers(2, "process"), foreign.CALLS["workers"]),
    (lambda: p().shard(0, 2), foreign.CALLS["shard"]),
    (lambda: p().map(len, "image"), foreign.CALLS["map"]),
    (lambda: p().random_map(len, "image"), foreign.CALLS["random_map"]),
    (lambda: p().filter(len, "image"), foreign.CALLS["filter"]),
    (lambda: p() + p(), "stoker.concat([a, b])"),
    (lambda: p().pack(), foreign.CALLS["pack"]),
    (lambda: p().batch(2).to_jax(), foreign.CALLS["to_jax"]),
    (lambda: p().repeat(3), foreign.CALLS["repeat"]),
]


TABLES = {
    "sources": SOURCES,
    "order": ORDER,
    "maps": MAPS,
    "batches": BATCHES,
    "echoes": ECHOES,
    "caches": CACHES,
    "workers": WORKERS,
    "states": STATES,
    "pictures": PICTURES,
    "tools": TOOLS,
    "foreign": FOREIGN,
}


@pytest.mark.parametrize("table", TABLES)
def test_it_is_refused_and_told_what_to_write(table: str) -> None:
    for write, told in TABLES[table]:
        with pytest.raises(Exception) as refused:  # noqa: PT011 - which, the table says by its words
            write()
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("lacking", "write", "told"),
    [
        ("PIL", lambda: list(pictures().map(images.decode, on="image")), "pip install pillow"),
        ("pyarrow", lambda: s.from_csv("rows.csv"), "pip install pyarrow"),
        ("pyarrow", lambda: s.from_parquet("rows.csv"), "pip install pyarrow"),
        ("fsspec", lambda: s.from_folder("s3://bucket/train"), "fsspec[http,s3]"),
        ("ray", lambda: p().workers(2, kind="ray"), "ray[tune]"),
        ("torch", lambda: p().batch(2).to_torch(), "pip install torch"),
        ("torch", lambda: p().as_dataloader(), "pip install torch"),
        ("lmdb", lambda: list(p().cache("1MiB")), "pip install lmdb"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    lacking: str, write: Callable[[], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "stoker.frameworks.torch_loader", raising=False)
    monkeypatch.setitem(sys.modules, lacking, None)
    for name in [each for each in sys.modules if each.startswith(f"{lacking}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((ImportError, stoker.StageError), match="pip install") as refused:
        write()
    assert told in str(refused.value)


def test_a_file_that_is_no_picture_comes_with_the_way_to_skip_it() -> None:
    with pytest.raises(OSError, match=r"bad/cat/x\.jpg") as failed:
        list(pictures("bad").map(images.decode, on="image"))
    assert failed.value.__notes__ == [
        'The next batch may follow. max_errors="1%" skips such examples.'
    ]


@pytest.fixture
def spawn() -> Iterator[None]:
    """Start processes as macOS does."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawn")
def test_what_cannot_go_to_processes_is_named() -> None:
    class Local(Data):
        """Of a function, so that no other process finds it."""

    holds = Data()
    vars(holds)["lock"] = threading.Lock()
    for pipeline, named in [
        (p().map(lambda x: x), "map(<lambda>)"),
        (p().map(holds.__getitem__), "map(__getitem__)"),
        (p().batch(2, collate=lambda x: x), "batch(2)"),
        (s.from_dataset(Local()), "from_dataset(Local)"),
        (s.from_dataset(holds), "from_dataset(Data)"),
    ]:
        with pytest.raises(TypeError, match="at the top of a module; make locks and open") as told:
            list(pipeline.workers(1, kind="process"))
        assert str(told.value).startswith(f"{named} cannot be sent to worker processes")


@pytest.mark.full
def test_a_program_without_a_main_guard_is_told_to_have_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, stoker\n"
        "multiprocessing.set_start_method('spawn', force=True)\n"
        "list(stoker.from_dataset(range(8), seed=0).workers(1, kind='process'))\n"
    )
    done = python(program)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert 'put what starts training under if __name__ == "__main__"' in last


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("analyse train.py", "stoker: there is no command 'analyse': did you mean analyze?"),
        ("cache lst", "stoker cache: there is no command 'lst': did you mean list?"),
        ("analyze", "are required: SCRIPT|-m MODULE|LAUNCHER"),
        ("analyze gone.py", "there is no script and no command 'gone.py'"),
        ("analyze train", "train is a folder, not a script"),
        ("analyze -m", "-m needs a module, for example: stoker analyze -m my.train"),
        ("analyze --max-seconds 0 train.py", "argument --max-seconds: 0 is not at least 5"),
        ("analyze --bugdet 1 train.py", "there is no option --bugdet: --help shows all"),
        ("analyze --max-seconds x train.py", "argument --max-seconds: invalid float value: 'x'"),
        ("analyze --json gone/r.json train.py", "cannot write gone/r.json: there is no folder"),
        ("run --apply gone.json train.py", "stoker analyze --json gone.json train.py writes one"),
        ("what-if train.py", "train.py is not a report of `stoker analyze --json`"),
        ("what-if gone.json", "stoker analyze --json gone.json train.py writes one"),
        ("gate train.py", "are required: --fail-if (stoker gate --help shows all)"),
        ("gate --runs 4 --fail-if stall>1% train.py", "argument --runs: 4 is not at least 5"),
        ("gate --fail-if stall train.py", "for example: stall>10%"),
        ("gate --fail-if speed>1 train.py", "there is no metric 'speed', only stall"),
        ("gate --fail-if rate<0.9*base train.py", "give --base FOLDER"),
        ("feed train.py:make", "are required: --name"),
        ("feed train.py --name x", "such as train.py:make_pipeline"),
        ("feed train.py:make --name a/b", "use up to 64 letters, digits"),
        ("pack gone shards", "there is no folder gone"),
        ("pack flat shards", "from_folder expects one a class"),
        ("pack train shards --shard-size big", "write for example '2GiB'"),
        ("pack train.py:make shards", "leave out the stages"),
        ("cache remove gone", "run stoker cache list to see all of them"),
        ("cache serve --listen node", "an address must be host:port"),
        ("--verison", "there is no option --verison: did you mean --version?"),
    ],
)
def test_a_command_is_told_what_to_write(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Commands own their process; this one is that of other tests, too.
    monkeypatch.setattr(sys, "path", sys.path[:])
    request.addfinalizer(
        functools.partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    )
    code, out, errors = call(*words.split())
    assert (code, out) == (2 if "(stoker " in errors else 1, "")
    assert told in errors
    assert errors.count("\n") == 1


def test_hints_name_what_there_is() -> None:
    for words, has in ((foreign.METHODS, stoker.Pipeline), (foreign.FUNCTIONS, stoker)):
        assert [word for word in words if hasattr(has, word)] == []
    tables = (foreign.METHODS, foreign.FUNCTIONS, foreign.KEYWORDS, foreign.CALLS)
    told = " ".join(words for table in tables for words in table.values())
    for name in re.findall(r"stoker\.([\w.]+\w)", told):
        assert functools.reduce(getattr, name.split("."), stoker) is not None, name
    own = re.sub(r"stoker\.[\w.]+\w", "", told)
    methods = set(re.findall(r"(?<!jax)\.(\w+)\(", own))
    assert methods
    assert [name for name in methods if not hasattr(stoker.Pipeline, name)] == []
    for name in foreign.CALLS:
        assert hasattr(stoker.Pipeline, name) or hasattr(stoker, name), name
