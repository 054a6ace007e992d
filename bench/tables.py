"""Tables, windows and sequences: beside the strongest loop by hand, and peers.

Each row is one kind of work, done by stoker at its defaults, inline (``.workers(0)``), by hand, and
by a peer where there is one. Beside the rate stands the processor time an example took, of all
threads together: on a machine where other programs run, that is what counts, and goals are held
against it.

- a table of 12 columns of numbers in 40 chunks, shuffled: by hand its chunks are joined
  beforehand, and NumPy gathers each column by a permutation that is there beforehand.
- Parquet, shuffled by blocks: numbers (8 columns), a label and text, the same with nulls, a label
  and lists of 16 numbers. By hand 16 row groups are read at a time, joined, and taken from by a
  permutation of their own. Whole epochs, the files' footers included, nothing kept from before;
  and, of numbers at 4,096, later epochs of one pipeline, which has the groups in memory by then.
- a data set of Hugging Face on disk, in chunks of 1,000 rows, as it is and with rows selected: by
  hand it is asked for batches with ``with_format("numpy")``.
- windows of an array; packed sequences, with a plain loop over documents by hand; windows of four
  token files, mixed, with a loop over memory maps by hand, and one file in place of four.

Command::

    python bench/tables.py

Results::

    [results/tables.json]
    a second                        by hand      stoker  clock         processor time  inline  goal
    -----------------------------------------------------------------------------------------------
    numbers in chunks, 256        7,284,008  11,236,629   1.54     1.54 (1.53 .. 1.7)    1.54  0.85
    numbers in chunks, 4,096      8,565,340  13,192,862   1.54    1.54 (1.49 .. 1.57)    1.53  0.85
    parquet, numbers, 256         4,635,274  11,300,898   2.43    2.42 (2.39 .. 2.53)    2.50  0.90
    parquet, numbers, 4,096      13,138,443  13,083,857   1.00  0.985 (0.963 .. 1.04)    0.96  0.90
    parquet, text, 256            6,548,050   8,505,189   1.29     1.28 (1.22 .. 1.3)    1.26  0.90
    parquet, text, 4,096          9,348,139   9,149,705   0.99  0.983 (0.952 .. 0.99)    0.96  0.90
    parquet, nulls, 256           6,448,063   8,668,724   1.35   1.34 (0.827 .. 1.37)    1.35  0.90
    parquet, nulls, 4,096         9,224,977   9,270,031   1.02   1.01 (0.915 .. 1.02)    1.00  0.90
    parquet, lists, 256           3,800,640   7,424,982   1.94    1.93 (0.54 .. 1.96)    1.91  0.90
    parquet, lists, 4,096         5,302,680   7,856,839   1.55    1.54 (1.35 .. 1.68)    1.53  0.90
    parquet, later epochs        12,629,681  24,855,047   1.99    1.96 (1.91 .. 2.12)    2.02  1.50
    hugging face, 256               212,888  12,378,742  58.36      58.4 (56 .. 64.5)   60.13  1.00
    hugging face, selected, 256     116,980  10,780,269  91.85    91.8 (88.7 .. 99.7)   96.42  1.00
    windows of an array          13,718,319   7,771,800   0.55  0.549 (0.51 .. 0.637)    0.57  0.90
    packed to 2,049                  96,031     173,071   1.81     1.81 (1.8 .. 1.81)    0.91  1.50
    mix of four token files         255,474     702,451   2.78    2.78 (2.74 .. 2.79)    2.83  1.40
    [end]

Goals are ratios of processor time, by hand over stoker. All are met but that of windows. Where time
goes:

- Parquet at 4,096: of 80 ns a row of numbers (67 by hand; both on a busy machine) reading takes 29
  (by hand 24: sixteen groups in one call), gathering 18, the order by blocks 13, of which Philox is
  10 (by hand 8), finding each row's group 4, and the start 3, most of it a look through the footer.
- windows: a batch takes 7.1 us, and 4.3 by hand. Sixteen are gathered in one call: copying takes
  2.6. The order, which by hand is there beforehand, takes 1.8: 22 ns a number, by NumPy; the same
  in C took 43, as each round waits for the one before. The rest is the engine: cutting the batches
  out, an item for each, and handing them out. Fewer batches in a call (of 256 KiB) take 10 us.
- packed: half of a sequence's time is joining, from documents that no cache holds straight into the
  batch. Ends are found for all documents at hand at once, up to eight batches are joined without a
  task; inline (``.workers(0)``) one at a time is, so that nothing is read early.

Caveats: on a busy machine the rows of Parquet are lower, 0.84 to 0.99. Nothing ran beside these.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import Ratio, Report, interleaved, parser, report

import stoker

Spent = tuple[int, float, float]
"""Examples, seconds, and seconds of a processor."""
Arms = Mapping[str, Callable[[], Spent]]
WINDOW_S = 0.3
GROUPS = 80
TOGETHER = 16
LENGTH = 2_049


@dataclass(frozen=True)
class Row:
    """One kind of work.

    Attributes:
        goal: by-hand processor time over stoker's, at least.
    """

    name: str
    goal: float
    arms: Callable[[bool, Path], Arms]


def steady(batches: Callable[[], Iterable[Any]], size: int, quick: bool) -> Callable[[], Spent]:
    """Return what goes through epochs for a while; the first batches are not counted."""
    window_s = 0.02 if quick else WINDOW_S

    def measured() -> Spent:
        count, began, began_cpu = -64, 0.0, 0.0
        while True:
            with closing(_each(batches())) as epoch:
                for _ in epoch:
                    count += 1
                    if not count:
                        began, began_cpu = time.perf_counter(), time.process_time()
                    if count > 0 and time.process_time() - began_cpu > window_s:
                        cpu_s = time.process_time() - began_cpu
                        return count * size, time.perf_counter() - began, cpu_s

    return measured


def whole(epoch: Callable[[], Iterable[Any]], examples: int) -> Callable[[], Spent]:
    """Return what goes through one epoch."""

    def measured() -> Spent:
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in epoch():
            pass
        return examples, time.perf_counter() - began, time.process_time() - began_cpu

    return measured


def _each(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches


def of_pipeline(pipeline: Any, size: int, quick: bool) -> dict[str, Callable[[], Spent]]:
    inline = pipeline.workers(0)
    return {
        "stoker": steady(lambda: pipeline, size, quick),
        "inline": steady(lambda: inline, size, quick),
    }


# -- tables


def table_in_chunks(size: int) -> Callable[[bool, Path], Arms]:
    def arms(quick: bool, folder: Path) -> Arms:
        rows, draw = 40_000 if quick else 4_000_000, np.random.default_rng(0)
        table = pa.table(
            {
                f"c{n}": pa.chunked_array([draw.random(rows // 40) for _ in range(40)])
                for n in range(12)
            }
        )
        columns = {name: table[name].to_numpy() for name in table.column_names}
        order = draw.permutation(rows)

        def by_hand() -> Iterator[Any]:
            for start in range(0, rows - size + 1, size):
                wanted = order[start : start + size]
                yield {name: column[wanted] for name, column in columns.items()}

        train = stoker.from_table(table, seed=0).shuffle().batch(size)
        return {"by hand": steady(by_hand, size, quick), **of_pipeline(train, size, quick)}

    return arms


def written(kind: str, rows: int, folder: Path) -> Path:
    draw, path = np.random.default_rng(0), folder / f"{kind}.parquet"
    if path.exists():
        return path
    label = draw.integers(0, 100, rows)
    columns: dict[str, Any] = {"label": label}
    if kind == "numbers":
        columns = {f"c{n}": draw.random(rows) if n % 2 else label + n for n in range(8)}
    elif kind == "lists":
        ends = pa.array(np.arange(0, 16 * rows + 1, 16), pa.int32())
        values = draw.integers(0, 50_000, 16 * rows).astype(np.int32)
        columns["tokens"] = pa.ListArray.from_arrays(ends, values)
    else:
        every = 7 if kind == "nulls" else rows + 1
        texts = [None if n % every == 6 else f"row number {n}, which says so" for n in range(rows)]
        columns["text"] = texts
    pq.write_table(pa.table(columns), path, row_group_size=rows // GROUPS)
    return path


def parquet(kind: str, size: int, is_first: bool = True) -> Callable[[bool, Path], Arms]:
    def arms(quick: bool, folder: Path) -> Arms:
        rows = 8_000 if quick else 1_000_000
        path = written(kind, rows, folder)

        def by_hand() -> Iterator[Any]:
            draw = np.random.default_rng(0)
            with pq.ParquetFile(path) as file:
                order = draw.permutation(file.num_row_groups).tolist()
                for first in range(0, len(order), TOGETHER):
                    table = file.read_row_groups(order[first : first + TOGETHER], use_threads=False)
                    table = table.combine_chunks()
                    places = draw.permutation(len(table))
                    for start in range(0, len(places), size):
                        some = table.take(places[start : start + size])
                        yield {name: values_of(some[name]) for name in some.column_names}

        def train() -> Any:
            return stoker.from_parquet(path, seed=0).shuffle(block=True).batch(size)

        by_kind = {"stoker": train, "inline": lambda: train().workers(0)}
        if not is_first:
            pipelines = {name: made() for name, made in by_kind.items()}
            for pipeline in pipelines.values():
                for _ in pipeline:
                    pass
            by_kind = {name: partial(iter, each) for name, each in pipelines.items()}
        return {
            "by hand": whole(by_hand, rows),
            **{name: whole(epoch, rows) for name, epoch in by_kind.items()},
        }

    return arms


def values_of(column: Any) -> Any:
    if pa.types.is_list(column.type):
        flat = column.combine_chunks().flatten().to_numpy()
        return flat.reshape(len(column), -1).copy()
    return column.to_pylist() if pa.types.is_string(column.type) else column.to_numpy()


def hugging_face(is_selected: bool) -> Callable[[bool, Path], Arms]:
    def arms(quick: bool, folder: Path) -> Arms:
        datasets.disable_progress_bars()
        rows, size = 4_000 if quick else 400_000, 256
        place = folder / "dataset"
        if not place.exists():
            columns = {"n": np.arange(rows), "text": [f"row number {n}" for n in range(rows)]}
            datasets.Dataset.from_dict(columns).save_to_disk(str(place))
        data: Any = datasets.load_from_disk(str(place))
        data = data.shuffle(seed=0).select(range(0, rows, 2)) if is_selected else data
        shown, order = data.with_format("numpy"), np.random.default_rng(0).permutation(len(data))

        def by_hand() -> Iterator[Any]:
            for start in range(0, len(order) - size + 1, size):
                yield shown[order[start : start + size]]

        train = stoker.from_huggingface(data, seed=0).shuffle().batch(size)
        return {"by hand": steady(by_hand, size, quick), **of_pipeline(train, size, quick)}

    return arms


# -- windows and sequences


def array_windows(quick: bool, folder: Path) -> Arms:
    signal = np.random.default_rng(0).random(4_000_000, np.float32)
    rows = np.lib.stride_tricks.sliding_window_view(signal, 256, writeable=True)
    order = np.random.default_rng(0).permutation(len(rows))

    def by_hand() -> Iterator[Any]:
        for start in range(0, len(order) - 63, 64):
            yield rows[order[start : start + 64]]

    train = stoker.from_arrays(rows, seed=0).shuffle().batch(64)
    return {"by hand": steady(by_hand, 64, quick), **of_pipeline(train, 64, quick)}


class Documents:
    """Documents of 50 to 3,000 tokens."""

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(0)
        self.each = [draw.integers(0, 50_000, n) for n in draw.integers(50, 3_001, count)]

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> Any:
        return self.each[index]


def packed(quick: bool, folder: Path) -> Arms:
    documents = Documents(400 if quick else 20_000)

    def sequences() -> Iterator[Any]:
        at = number = 0
        for index in np.random.default_rng(0).permutation(len(documents)).tolist():
            document, begin = documents[index], 0
            while begin < len(document):
                if not at:
                    made = [np.empty(LENGTH, kind) for kind in (np.int64, np.int32, np.int32)]
                    number = 0
                count = min(len(document) - begin, LENGTH - at)
                made[0][at : at + count] = document[begin : begin + count]
                made[1][at : at + count] = number
                made[2][at : at + count] = np.arange(count)
                at, begin, number = at + count, begin + count, number + 1
                if at == LENGTH:
                    yield made
                    at = 0

    def by_hand() -> Iterator[Any]:
        batch = []
        for sequence in sequences():
            batch.append(sequence)
            if len(batch) == 8:
                yield [np.stack(each) for each in zip(*batch, strict=True)]
                batch = []

    train = stoker.from_dataset(documents, seed=0).shuffle().pack(LENGTH).batch(8)
    return {"by hand": steady(by_hand, 8, quick), **of_pipeline(train, 8, quick)}


def mixed_tokens(quick: bool, folder: Path) -> Arms:
    length, size, weights = 1_024, 64, (1, 2, 3, 4)
    tokens = 300_000 if quick else 25_000_000
    paths = [folder / f"tokens-{n}.bin" for n in range(4)]
    for path in paths:
        np.random.default_rng(0).integers(0, 50_000, tokens).astype(np.uint16).tofile(path)
    maps = [np.memmap(path, np.uint16, "r") for path in paths]
    pattern = np.repeat(range(4), weights).tolist()

    def by_hand() -> Iterator[Any]:
        draw, count = np.random.default_rng(0), (tokens - 1) // length
        orders = [draw.permutation(count).tolist() for _ in paths]
        taken, number = [0] * 4, 0
        while True:
            inputs, targets = np.empty((size, length), np.int64), np.empty((size, length), np.int64)
            for row in range(size):
                part = pattern[number % len(pattern)]
                first = orders[part][taken[part] % count] * length
                taken[part], number = taken[part] + 1, number + 1
                window = maps[part][first : first + length + 1]
                inputs[row], targets[row] = window[:-1], window[1:]
            yield inputs, targets

    def windows(path: Path, seed: int) -> Any:
        return stoker.from_tokens(path, length, dtype="uint16", seed=seed).shuffle()

    parts = [windows(path, n) for n, path in enumerate(paths)]
    one = windows(paths[0], 0).batch(size)
    return {
        "by hand": steady(by_hand, size, quick),
        **of_pipeline(stoker.mix(parts, weights, seed=0).batch(size), size, quick),
        "one file": steady(lambda: one, size, quick),
    }


ROWS = [
    *(Row(f"numbers in chunks, {n:,}", 0.85, table_in_chunks(n)) for n in (256, 4_096)),
    *(
        Row(f"parquet, {kind}, {n:,}", 0.9, parquet(kind, n))
        for kind in ("numbers", "text", "nulls", "lists")
        for n in (256, 4_096)
    ),
    Row("parquet, later epochs", 1.5, parquet("numbers", 4_096, is_first=False)),
    Row("hugging face, 256", 1.0, hugging_face(False)),
    Row("hugging face, selected, 256", 1.0, hugging_face(True)),
    Row("windows of an array", 0.9, array_windows),
    Row("packed to 2,049", 1.5, packed),
    Row("mix of four token files", 1.4, mixed_tokens),
]


def evaluate(made: Report) -> None:
    """Show the rates, and by how much less processor time than by hand stoker takes."""
    lines = []
    for name in dict.fromkeys(row["path"] for row in made.rows):
        rows = [row for row in made.rows if row["path"] == name]
        cpu_us: dict[str, list[float]] = {}
        rates: dict[str, list[float]] = {}
        for row in rows:
            examples, seconds, cpu_s = row["spent"]
            cpu_us.setdefault(row["arm"], []).append(1e6 * cpu_s / examples)
            rates.setdefault(row["arm"], []).append(examples / seconds)
        ratios = {
            arm: Ratio.of(cpu_us["by hand"], cpu_us[arm]) for arm in cpu_us if arm != "by hand"
        }
        clock = Ratio.of(rates["stoker"], rates["by hand"])
        lines.append(
            (
                name,
                f"{median(rates['by hand']):,.0f}",
                f"{median(rates['stoker']):,.0f}",
                f"{clock.median:.2f}",
                ratios["stoker"],
                f"{ratios['inline'].median:.2f}",
                f"{rows[0]['goal']:.2f}",
            )
        )
        made.expect(f"{name}: processor time", ratios["stoker"].median, rows[0]["goal"])
    head = ("a second", "by hand", "stoker", "clock", "processor time", "inline", "goal")
    made.show(head, lines)


def main() -> None:
    made_by = parser(__doc__, evaluate)
    made_by.add_argument("--only", default="", help="rows whose names have this in them")
    arguments = made_by.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with report(__file__, arguments) as made, ExitStack() as within:
        folder = Path(within.enter_context(tempfile.TemporaryDirectory()))
        for row in ROWS:
            if arguments.only not in row.name:
                continue
            for arm, found in interleaved(row.arms(arguments.quick, folder), rounds).items():
                for spent in found:
                    made.add(path=row.name, arm=arm, spent=spent, goal=row.goal)
            print(row.name, flush=True)


if __name__ == "__main__":
    main()
