"""What share of packed sequences is padding, beside peers; and how equal ranks' attention is.

- padding: 20,000 documents in random order, none longer than a sequence. Lengths of Wikipedia for
  BERT, and of SQuAD 1.1, are drawn from published histograms (Krell et al., arXiv 2107.02027; the
  authors' ``histograms.py``, here in bins of 16 tokens); those of WikiText-2 are its paragraphs',
  in words. stoker and Grain choose among ``window`` documents, or bins; TRL among a thousand.
  Each row counts all tokens, and sequences until all documents are in one.
- balance: the sum of squared lengths in a step, of the rank that has most of it, over the mean of
  8 ranks with 4 sequences each: what all others wait for where attention takes the time.
- speed: the same documents of Wikipedia to sequences of 2,048 with positions and segments, in
  batches of 8, beside loops by hand that do the same: tokens joined and cut, and best fit
  decreasing by bisection in each 1,024 documents. Processor time, in turns.

Command::

    python bench/padding.py --peers all --install --text wikitext-2/train.txt

Machine: two cores of an AMD EPYC, 24 GiB; Python 3.11.7.

Results::

    [results/padding.json]
    padding, %  length  stoker, 1024  stoker, 256  Grain, 1024  Grain, 256  TRL bfd
    -------------------------------------------------------------------------------
    Wikipedia      512          0.07         0.19         0.89        1.40     0.22
    Wikipedia     2048          0.17         0.64         0.33        0.37     0.53
    SQuAD 1.1      384          2.02         2.17         5.99        7.03     2.39
    SQuAD 1.1     2048          0.27         1.09         0.74        0.80     0.86
    WikiText-2    1024          0.11         0.64         0.11        0.16     0.64
    WikiText-2    2048          0.34         2.31         0.11        0.11     1.40

    largest rank / mean  .pack()  .balance()
    ----------------------------------------
    Wikipedia              1.156       1.041
    SQuAD 1.1              1.242       1.024
    WikiText-2             1.333       1.044

    packing, one thread  million tokens/s           over by hand
    ------------------------------------------------------------
    by hand, split                   77.3             1 (1 .. 1)
    stoker, split                    99.4    1.28 (1.22 .. 1.39)
    by hand, best fit                75.7             1 (1 .. 1)
    stoker, best fit                 14.4  0.194 (0.17 .. 0.214)
    [end]

Grain hands out all bins where a document fits into none. TRL packs each thousand by itself.
stoker hands out half of the sequences of a window, and packs the rest anew with those that follow.
Behind: the last row, where 0.1 % are one sequence of 600, and Grain's bins hold ten times as many
documents as stoker's window. The text of the last rows has its articles in another order.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from harness import HERE, Ratio, Report, interleaved, parser, report
from numpy.typing import NDArray
from peers import environment, racing

import stoker

# Documents of 1 to 16 tokens, 17 to 32, ...; the last ones are as long as that.
WIKIPEDIA = (
    52, 533, 1100, 1179, 1020, 833, 696, 602, 535, 479, 438, 403, 374, 346, 325, 305, 286, 268,
    254, 242, 230, 220, 210, 200, 191, 184, 177, 170, 163, 158, 153, 139,
)  # fmt: skip
WIKIPEDIA_FULL = 3815  # of 512 tokens
SQUAD = (
    0, 0, 293, 1488, 2208, 2542, 4369, 10267, 12428, 11583, 9448, 7855, 5883, 4539, 3538, 2722,
    2347, 1694, 1440, 1027, 720, 593, 324, 279,
)  # fmt: skip
SQUAD_FULL = 1054  # of 384 tokens
WINDOWS = (256, 1_024)
RANKS, EACH = 8, 4
BATCH = 8


def drawn(counts: tuple[int, ...], full: int, documents: int) -> NDArray[np.int64]:
    """Draw lengths from a histogram."""
    draw = np.random.default_rng(0)
    weights = np.array([*counts, full]) / (sum(counts) + full)
    bins = draw.choice(len(weights), documents, p=weights)
    lengths = 16 * bins + draw.integers(1, 17, documents)
    return np.where(bins == len(counts), 16 * len(counts), lengths)


def of_lines(text: Path, documents: int) -> NDArray[np.int64]:
    """Return the lengths of paragraphs, in words, in random order."""
    lengths = np.array([len(line.split()) for line in text.read_text().splitlines()])
    return np.random.default_rng(0).permutation(lengths[lengths > 0])[:documents]


def sequences(sizes: NDArray[np.int64], length: int, window: int) -> int:
    """Pack with stoker."""
    documents = [np.ones(size, np.int32) for size in sizes]
    packed = stoker.from_dataset(documents).pack(length, fit="best", window=window)
    return sum(1 for _ in packed)


def unequal(sizes: NDArray[np.int64], length: int, *, balanced: bool) -> float:
    """Return the mean over steps of the largest rank's work, over the mean of all ranks."""
    documents = [np.ones(size, np.int32) for size in sizes]
    ranks = []
    for rank in range(RANKS):
        train: Any = stoker.from_dataset(documents, seed=0).shuffle()
        train = train.shard(rank=rank, world_size=RANKS).pack(length, fit="best", sizes=sizes)
        train = (train.balance() if balanced else train).batch(EACH, drop_last=True)
        ranks.append([_work(segments) for _, segments, _ in train])
    work = np.array(ranks)
    return float((work.max(axis=0) / work.mean(axis=0)).mean())


def split_by_hand(documents: list[NDArray[np.int32]], length: int) -> Iterator[Any]:
    """Join documents, and cut them, as plain loops do."""
    pieces: list[NDArray[np.int32]] = []
    room = length
    for document in documents:
        while len(document):
            pieces.append(document[:room])
            document = document[room:]
            room -= len(pieces[-1])
            if not room:
                yield joined_by_hand(pieces, length)
                pieces, room = [], length
    if pieces:
        yield joined_by_hand(pieces, length)


def best_by_hand(documents: list[NDArray[np.int32]], length: int, window: int) -> Iterator[Any]:
    """Pack so many documents at once, the longest first, each where it leaves least room."""
    for start in range(0, len(documents), window):
        rooms: list[tuple[int, int]] = []  # room and number of each sequence that has some
        packed: list[list[NDArray[np.int32]]] = []
        for document in sorted(documents[start : start + window], key=len, reverse=True):
            at = bisect_left(rooms, (len(document), -1))
            room, number = rooms.pop(at) if at < len(rooms) else (length, len(packed))
            if number == len(packed):
                packed.append([])
            packed[number].append(document)
            insort(rooms, (room - len(document), number))
        for pieces in packed:
            yield joined_by_hand(pieces, length)


def joined_by_hand(pieces: list[NDArray[np.int32]], length: int) -> Any:
    tokens = np.zeros(length, np.int32)
    segments = np.full(length, -1, np.int32)
    positions = np.zeros(length, np.int32)
    at = 0
    for number, piece in enumerate(pieces):
        until = at + len(piece)
        tokens[at:until] = piece
        segments[at:until] = number
        positions[at:until] = np.arange(len(piece))
        at = until
    return tokens, segments, positions


def batched_by_hand(sequences: Iterator[Any]) -> Iterator[Any]:
    while batch := [*islice(sequences, BATCH)]:
        yield tuple(map(np.stack, zip(*batch, strict=True)))


def speeds(sizes: NDArray[np.int64], rounds: int) -> dict[str, list[float]]:
    """Return tokens a second of processor time, in each round."""
    length, window = 2_048, WINDOWS[-1]
    documents = [np.ones(size, np.int32) for size in sizes]
    source = stoker.from_dataset(documents).workers(0)
    arms: dict[str, Callable[[], Iterable[Any]]] = {
        "by hand, split": lambda: batched_by_hand(split_by_hand(documents, length)),
        "stoker, split": lambda: source.pack(length).batch(BATCH),
        "by hand, best fit": lambda: batched_by_hand(best_by_hand(documents, length, window)),
        "stoker, best fit": lambda: source.pack(length, fit="best", window=window).batch(BATCH),
    }

    def measured(make: Callable[[], Iterable[Any]]) -> float:
        began = time.process_time()
        for _ in make():
            pass
        return int(sizes.sum()) / (time.process_time() - began)

    return interleaved({arm: partial(measured, make) for arm, make in arms.items()}, rounds)


def _work(segments: NDArray[np.int32]) -> int:
    rows = [np.bincount(row[row >= 0]) for row in segments]
    return int(sum((lengths**2).sum() for lengths in rows))


def peer_sequences(peer: str, path: Path, length: int, window: int) -> int:
    """Pack with a peer."""
    program = HERE / "peers" / "pack_lengths.py"
    words = [environment.python(peer), "-W", "ignore", program, peer, path, length, window]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    line = next(line for line in found.stdout.splitlines() if line.startswith("sequences:"))
    return int(line.split()[1])


def main() -> None:
    """Pack all sets with stoker, and with the chosen peers."""
    options = parser(__doc__, evaluate)
    racing.add_options(options, {"grain": ["grain"], "trl": ["trl"]})
    options.add_argument("--text", type=Path, help="WikiText-2's training text")
    arguments = options.parse_args()
    chosen = racing.chosen(arguments, {"grain": ["grain"], "trl": ["trl"]})
    count = 2_000 if arguments.quick else 20_000
    sets = {
        "Wikipedia": (drawn(WIKIPEDIA, WIKIPEDIA_FULL, count), (512, 2_048)),
        "SQuAD 1.1": (drawn(SQUAD, SQUAD_FULL, count), (384, 2_048)),
    }
    if arguments.text is not None:
        sets["WikiText-2"] = (of_lines(arguments.text, count), (1_024, 2_048))
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        for name, (sizes, lengths) in sets.items():
            np.save(path, sizes)
            for length in lengths:
                fitting = np.minimum(sizes, length)
                about = {"set": name, "length": length, "tokens": int(fitting.sum())}
                for window in WINDOWS:
                    found = {f"stoker, {window}": sequences(fitting, length, window)}
                    if "grain" in chosen:
                        found[f"Grain, {window}"] = peer_sequences("grain", path, length, window)
                    for arm, packed in found.items():
                        made.add(**about, arm=arm, sequences=packed)
                if "trl" in chosen:
                    made.add(
                        **about, arm="TRL bfd", sequences=peer_sequences("trl", path, length, 0)
                    )
            for balanced in (False, True):
                ratio = unequal(np.minimum(sizes, 2_048), 2_048, balanced=balanced)
                made.add(set=name, balanced=balanced, ratio=ratio)
        rounds = 1 if arguments.quick else arguments.rounds
        for arm, rates in speeds(sets["Wikipedia"][0], rounds).items():
            made.add(arm=arm, tokens_per_s=rates)


def evaluate(made: Report) -> None:
    """Show shares, and hold stoker's against the peers'."""
    packed = made.having("sequences")
    arms = sorted({row["arm"] for row in packed}, key=lambda arm: (arm[0] != "s", arm))
    lines = []
    for name, length in dict.fromkeys((row["set"], row["length"]) for row in packed):
        rows = {row["arm"]: row for row in packed if (row["set"], row["length"]) == (name, length)}
        shares = {arm: 1 - row["tokens"] / (row["sequences"] * length) for arm, row in rows.items()}
        lines.append((name, length, *(f"{100 * shares[arm]:.2f}" for arm in arms)))
        own = shares[f"stoker, {WINDOWS[-1]}"]
        for arm in arms:
            if not arm.startswith("stoker"):
                what = f"{name}, {length}: share over that of {arm}"
                made.expect(what, own - shares[arm], 0.0, at_least=False)
    made.show(("padding, %", "length", *arms), lines)
    ratios = made.having("ratio")
    lines = []
    for name in dict.fromkeys(row["set"] for row in ratios):
        plain, balanced = (row["ratio"] for row in ratios if row["set"] == name)
        lines.append((name, f"{plain:.3f}", f"{balanced:.3f}"))
        made.expect(f"{name}: balanced", balanced, plain, at_least=False)
    made.show(("largest rank / mean", ".pack()", ".balance()"), lines)
    rates = {row["arm"]: row["tokens_per_s"] for row in made.having("tokens_per_s")}
    lines = []
    for fit in ("split", "best fit"):
        own, by_hand = rates[f"stoker, {fit}"], rates[f"by hand, {fit}"]
        for arm, each in ((f"by hand, {fit}", by_hand), (f"stoker, {fit}", own)):
            millions = f"{statistics.median(each) / 1e6:.1f}"
            lines.append((arm, millions, str(Ratio.of(each, by_hand))))
        made.expect(f"{fit}: tokens/s, of by hand", Ratio.of(own, by_hand).median, 0.95)
    made.show(("packing, one thread", "million tokens/s", "over by hand"), lines)


if __name__ == "__main__":
    main()
