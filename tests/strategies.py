"""What the tests share: strategies, pipelines built from a description, and ways to compare."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import stoker_lmdb
from hypothesis import settings
from hypothesis import strategies as st

import stoker
from stoker.chain.state import seal, unseal

FULL = settings.get_current_profile_name() == "full"

POINTS = ("before", "after", "batch", "device")
"""Where an echo may stand: before or after the random map, behind the batch, behind ``.to``."""

SIEVES = ("first", "middle", "last")
"""Where a filter may stand: behind the source, behind the first echo, right before the batch."""


def few(short: int) -> settings:
    """Limit the examples of a costly property; ten times as many in the full profile."""
    return settings(max_examples=10 * short if FULL else short)


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a costly table; all but one in so many are marked ``full``."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        if number % count
        else case
        for number, case in enumerate(cases)
    ]


def shortened(cases: Iterable[Any], short: int) -> list[Any]:
    """Return the cases of a costly test; those behind the first few are marked ``full``."""
    return [
        case if number < short else pytest.param(case, marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


factors = st.one_of(
    st.sampled_from([Fraction(5, 4), Fraction(3, 2), Fraction(2), Fraction(21, 10), Fraction(5)]),
    st.fractions(1, 6, max_denominator=50).filter(lambda f: f > 1),
)


@dataclass(frozen=True)
class Spec:
    """A pipeline to be built, echoed at a point at most, and filtered at some.

    Attributes:
        echoes: where, by which factor, and with which pool; one at most.
        filters: where, and which ids are left out: those that leave ``rest`` when divided by
            ``modulus``.
        shard: rank, world, whether uneven, and whether parts are drawn anew every epoch.
    """

    examples: int
    batch: int
    drop_last: bool = False
    shuffle: bool = True
    seed: int = 0
    source: str = "dataset"
    to: bool = False
    echoes: tuple[tuple[str, Fraction, int | str | None], ...] = ()
    batch_map: bool = False
    filters: tuple[tuple[str, int, int], ...] = ()
    max_errors: int | str = 0
    shard: tuple[int, int, bool, bool] | None = None

    @property
    def uses(self) -> int:
        """Return the examples that reach the batch, before ``drop_last``, if none is left out."""
        count = self.examples
        for point, factor, _ in self.echoes:
            if point in ("before", "after"):
                count = int(factor * count)
        return count

    @property
    def outputs(self) -> int:
        """Return the batches of an epoch."""
        uses = self.uses
        count = uses // self.batch if self.drop_last else -(-uses // self.batch)
        for point, factor, _ in self.echoes:
            if point in ("batch", "device"):
                count = int(factor * count)
        return count


@st.composite
def specs(
    draw: st.DrawFn,
    max_examples: int = 40,
    max_echoes: int = 1,
    min_echoes: int = 0,
    sources: tuple[str, ...] = ("dataset", "many", "arrays", "tuples", "lmdb"),
    points: tuple[str, ...] = POINTS,
    byte_pools: bool = False,
    max_filters: int = 0,
    min_filters: int = 0,
    ranks: bool = False,
) -> Spec:
    batch = draw(st.integers(1, 8))
    # Empty, one example, fewer than a batch, a batch exactly, and more.
    examples = draw(
        st.one_of(
            st.sampled_from([0, 1, batch - 1, batch, batch + 1]), st.integers(0, max_examples)
        )
    )
    chosen = sorted(
        draw(
            st.lists(st.sampled_from(points), min_size=min_echoes, max_size=max_echoes, unique=True)
        ),
        key=POINTS.index,
    )
    echoes = []
    for point in chosen:
        factor = draw(factors)
        group = batch if point in ("before", "after") else 1
        pool: int | str | None = draw(st.one_of(st.none(), st.integers(group, 4 * group + 20)))
        if byte_pools and pool is not None and draw(st.booleans()):
            # At most some 150 bytes an example and 8 examples a batch: a batch always fits.
            pool = f"{draw(st.integers(10, 40))}KB"
        echoes.append((point, factor, pool))
    filters = []
    if max_filters:
        places = st.lists(
            st.sampled_from(SIEVES), min_size=min_filters, max_size=max_filters, unique=True
        )
        for place in sorted(draw(places), key=SIEVES.index):
            modulus = draw(st.sampled_from([1, 2, 2, 3, 3, 5, 7, 100]))
            filters.append((place, modulus, draw(st.integers(0, modulus - 1))))
    shard = None
    if ranks and draw(st.booleans()):
        world = draw(st.sampled_from([2, 3, 8]))
        uneven = bool(filters) or draw(st.booleans())  # equal parts are not filtered
        shard = (draw(st.integers(0, world - 1)), world, uneven, draw(st.booleans()))
    return Spec(
        examples=examples,
        batch=batch,
        drop_last=draw(st.booleans()),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 2**40)),
        source=draw(st.sampled_from(sources)),
        to="device" in chosen or draw(st.booleans()),
        echoes=tuple(echoes),
        batch_map=draw(st.booleans()),
        filters=tuple(filters),
        shard=shard,
    )


@stoker.thread_safe
class Examples:
    """A dataset of dicts: the example's index, and a row that tells it too."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"id": index, "x": np.full(3, index, np.float64), "name": f"example {index}"}


class CountingStream:
    """A stream of numbers up to a length, with a state of its own: how far it is."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class GoesOn(CountingStream):
    """Goes on where it stands, as the class of docs/loaders.md."""

    def __iter__(self) -> Iterator[int]:
        begin, self.at = self.at, 0
        for number in range(begin, self.length):
            self.at = (number + 1) % self.length
            yield number


class BeginsAnew(CountingStream):
    """Begins at its beginning, but for the pass behind a load."""

    begin = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        self.at = begin
        for number in range(begin, self.length):
            self.at = number + 1
            yield number

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


@functools.cache
def table_of(examples: int) -> str:
    """Return a table of another package, of so many numbers; it goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="stoker-lmdb-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stoker_lmdb.write_lmdb(folder, ((b"%06d" % number, b"") for number in range(examples)))
    return folder


def example_of(key: bytes, value: bytes) -> dict[str, Any]:
    """Make of an item of the table what ``Examples`` gives."""
    index = int(key)
    return {"id": index, "x": np.full(3, index, np.float64), "name": f"example {index}"}


@stoker.thread_safe
class ManyExamples(Examples):
    """The same, asked for many at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@stoker.thread_safe
class TupleExamples(Examples):
    """The same as tuples."""

    def __getitem__(self, index: int) -> Any:
        example = super().__getitem__(index)
        return example["id"], example["x"]


@stoker.thread_safe
class Faulty(Examples):
    """Fails on some examples, for as long as they are in ``bad``."""

    def __init__(self, length: int, bad: Iterable[int] = ()) -> None:
        super().__init__(length)
        self.bad = set(bad)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise OSError(f"{index} cannot be read")
        return super().__getitem__(index)


@stoker.thread_safe
class Keep:
    """Leaves out the ids that leave a rest."""

    def __init__(self, modulus: int, rest: int) -> None:
        self.modulus, self.rest = modulus, rest

    def __call__(self, number: Any) -> bool:
        return bool(number % self.modulus != self.rest)


@stoker.thread_safe
def halve(x: Any) -> Any:
    """Do something deterministic."""
    return x / 2


@dataclass(frozen=True)
class Halve(stoker.Stage):
    """Halve a field."""

    on: str | int

    def lower(self, pipeline: stoker.Pipeline[Any]) -> stoker.Pipeline[Any]:
        return pipeline.map(halve, on=self.on)


@stoker.thread_safe
def jitter(x: Any, rng: np.random.Generator) -> Any:
    """Add noise in place, as careless augmentations do."""
    x += rng.random(x.shape)
    return x


@stoker.thread_safe
def scale_batch(batch: Any, rng: np.random.Generator) -> Any:
    """Scale a whole batch in place."""
    x = batch[field_of(batch)]
    x *= rng.random()
    return batch


@stoker.thread_safe
def field_of(example: Any) -> Any:
    """Name the field with the row, in whatever form the source gives examples."""
    return "x" if isinstance(example, dict) else 1


def source_of(spec: Spec, data: Any = None) -> stoker.Pipeline:
    """Return the source alone; of a dataset of one's own, if there is one."""
    if data is not None:
        return stoker.from_dataset(data, seed=spec.seed, max_errors=spec.max_errors)
    if spec.source == "arrays":
        ids = np.arange(spec.examples)
        rows = np.repeat(ids[:, None], 3, 1).astype(np.float64)
        return stoker.from_arrays(ids, rows, seed=spec.seed)
    if spec.source == "lmdb":
        table = stoker_lmdb.LmdbTable(table_of(spec.examples), example_of)
        return stoker.from_dataset(table, seed=spec.seed, max_errors=spec.max_errors)
    kinds = {"dataset": Examples, "many": ManyExamples, "tuples": TupleExamples}
    data = kinds[spec.source](spec.examples)
    return stoker.from_dataset(data, seed=spec.seed, max_errors=spec.max_errors)


def built(
    spec: Spec, workers: int | None = None, kind: str = "thread", data: Any = None
) -> stoker.Pipeline:
    """Build a pipeline, over a dataset of one's own if there is one."""
    echoes = {point: (factor, pool) for point, factor, pool in spec.echoes}

    def echoed(pipeline: stoker.Pipeline, point: str) -> stoker.Pipeline:
        if point not in echoes:
            return pipeline
        factor, pool = echoes[point]
        return pipeline.echo(factor, pool=pool)  # type: ignore[arg-type]

    def filtered(pipeline: stoker.Pipeline, place: str) -> stoker.Pipeline:
        for at, modulus, rest in spec.filters:
            if at == place:
                pipeline = pipeline.filter(Keep(modulus, rest), on=0 if on == 1 else "id")
        return pipeline

    on = 1 if spec.source in ("arrays", "tuples") else "x"
    pipeline = source_of(spec, data)
    rank, world, uneven, anew = spec.shard or (0, 1, False, False)
    if spec.shard and not anew:
        pipeline = pipeline.shard(
            rank=rank, world_size=world, remainder="uneven" if uneven else "drop"
        )
    if spec.shuffle:
        pipeline = pipeline.shuffle()
    if spec.shard and anew:
        pipeline = pipeline.shard(
            rank=rank, world_size=world, remainder="uneven" if uneven else "drop"
        )
    pipeline = filtered(pipeline, "first")
    # Of another package's source a step is another package's, too: the same by a stage.
    halved = pipeline.apply(Halve(on)) if spec.source == "lmdb" else pipeline.map(halve, on=on)
    pipeline = echoed(halved, "before")
    pipeline = filtered(pipeline, "middle").random_map(jitter, on=on)
    pipeline = filtered(echoed(pipeline, "after"), "last")
    pipeline = pipeline.batch(spec.batch, drop_last=spec.drop_last)
    if spec.batch_map:
        pipeline = pipeline.random_map(scale_batch)
    pipeline = echoed(pipeline, "batch")
    if spec.to:
        pipeline = echoed(pipeline.to_torch(), "device")
    return pipeline if workers is None else pipeline.workers(workers, kind=kind)


@contextlib.contextmanager
def small_pools_allowed() -> Iterator[None]:
    """Let pools be smaller than distinct uses want, which warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"echo\(.*with a pool of")
        yield


def frozen(value: Any) -> Any:
    """Return a value that compares equal only where every leaf is equal bit for bit."""
    if isinstance(value, dict):
        return ("dict", *((key, frozen(child)) for key, child in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(frozen(child) for child in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__,
            *(frozen(getattr(value, f.name)) for f in dataclasses.fields(value)),
        )
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value).__name__, value.dtype.str, value.shape, value.tobytes())
    if type(value).__module__.startswith("torch"):
        return ("tensor", str(value.device), frozen(value.numpy()))
    return (type(value).__name__, value)


def stream(pipeline: stoker.Pipeline) -> list[Any]:
    """Run one epoch and return what came, bit for bit."""
    with small_pools_allowed():
        return [frozen(batch) for batch in pipeline]


def ids(batch: Any) -> list[int]:
    """Return the indices of a batch's examples."""
    found = batch["id"] if isinstance(batch, dict) else batch[0]
    return [int(i) for i in found]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Write a state and read it."""
    return json.loads(json.dumps(state))


def spoil(value: Any) -> None:
    """Write into every array of a batch, as a consumer may."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for child in value:
            spoil(child)
    elif hasattr(value, "fill_"):
        value.fill_(-99)
    elif isinstance(value, np.ndarray):
        value.fill(-99)


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """Return all fields of a state."""
    return unseal(state)


def signed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a state with these fields, with the checksum that they have."""
    own = {"loader": (fields["loader"],)} if "loader" in fields else {}
    return seal({k: v for k, v in fields.items() if k != "loader"}) | own


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a state."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    found = [path] if path else []
    for key, child in children:
        found += paths_of(child, (*path, key))
    return found


def tails_agree(spec: Spec, save: Any, load: Any) -> None:
    """Save before every batch, load each state into a new pipeline, compare what follows."""
    with small_pools_allowed():
        pipeline = save(spec)
        states, whole = [pipeline.state_dict()], []
        for batch in pipeline:
            whole.append(frozen(batch))
            states.append(through_json(pipeline.state_dict()))
        following = stream(pipeline)
        for yielded, state in enumerate(states):
            restored = load(spec)
            restored.load_state_dict(state)
            assert restored.state_dict() == state
            if yielded and yielded == known_length(restored):  # that was all: between epochs
                assert restored.epoch == 1
                continue
            assert restored.epoch == 0
            assert stream(restored) == whole[yielded:]
            assert restored.epoch == 1
        assert stream(restored) == following


def known_length(pipeline: stoker.Pipeline) -> int | None:
    try:
        return len(pipeline)
    except TypeError:
        return None
