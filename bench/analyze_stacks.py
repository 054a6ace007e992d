"""Whether samples of a worker's stack give each piece of its work the share that it really takes.

Batches of pieces of three kinds, each timed by the clock around it: native code that holds the GIL
(``sum`` of a range), native code that lets go of it (``time.sleep``), and a loop in Python. The
sampler of ``stoker analyze`` looks at the stack meanwhile. The shares of its looks are held against
the shares of the clock. Beside it, in a run of its own, a sampler as usual: a thread with
``sys._current_frames``, each look of which counts once.

Command::

    python bench/analyze_stacks.py

Target: the median of each share within 0.05 of the clock's.

Machine: two cores of an Intel Xeon, shared with other jobs (load 13); Python 3.11.7. A share of the
clock has the time in it that a piece waited for a processor.

Results (five rounds; medians; the furthest that the looks are off)::

    [results/analyze_stacks.json]
    looks for clock                    signal  furthest           thread  furthest
    ------------------------------------------------------------------------------
    long calls: holds         0.668 for 0.661    -0.007  0.426 for 0.743    -0.363
    long calls: lets_go       0.142 for 0.139    +0.009  0.477 for 0.076    +0.428
    long calls: computes      0.192 for 0.193    -0.002  0.140 for 0.160    -0.140
    mostly Python: holds      0.050 for 0.052    -0.006  0.309 for 0.104    +0.211
    mostly Python: lets_go    0.202 for 0.205    +0.012  0.292 for 0.172    +0.181
    mostly Python: computes   0.739 for 0.732    +0.007  0.404 for 0.667    -0.352
    mostly waiting: holds     0.105 for 0.115    -0.034  0.066 for 0.145    -0.158
    mostly waiting: lets_go   0.834 for 0.822    +0.032  0.914 for 0.793    +0.209
    mostly waiting: computes  0.066 for 0.063    +0.008  0.011 for 0.062    -0.059
    short calls: holds        0.087 for 0.079    +0.011  0.087 for 0.120    -0.064
    short calls: lets_go      0.833 for 0.827    -0.016  0.860 for 0.740    +0.200
    short calls: computes     0.098 for 0.094    +0.023  0.052 for 0.109    -0.155
    [end]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from harness import Report, interleaved, parser, report

from stoker.analysis.probe.stacks import StackSampler

_NUMBERS_A_MS = 50_000
PIECES = ("holds", "lets_go", "computes")
# Milliseconds of each piece, and how often it comes in an example.
CASES = {
    "long calls": ((12.0, 4.0, 4.0), 1),
    "mostly Python": ((1.0, 1.0, 8.0), 1),
    "mostly waiting": ((1.0, 12.0, 1.0), 1),
    "short calls": ((0.3, 0.3, 0.3), 10),
}
BATCHES = 40


def holds(each_ms: float) -> None:
    """Compute in native code that keeps the GIL."""
    sum(range(int(each_ms * _NUMBERS_A_MS)))


def lets_go(each_ms: float) -> None:
    """Wait without the GIL."""
    time.sleep(each_ms / 1e3)


def computes(each_ms: float) -> None:
    """Compute in Python, without a call that lets go of the GIL."""
    until = time.perf_counter() + each_ms / 1e3
    while time.perf_counter() < until:
        pass


def measure(case: str, batches: int, by_thread: bool) -> dict[str, dict[str, float]]:
    """Return the share of each piece by the clock, and by the sampler."""
    sizes, times = CASES[case]
    spent = dict.fromkeys(PIECES, 0.0)

    def fetch(_: int) -> None:
        for _ in range(times):
            for piece, each_ms in zip((holds, lets_go, computes), sizes, strict=True):
                began = time.perf_counter()
                piece(each_ms)
                spent[piece.__name__] += time.perf_counter() - began

    watch = _watch_by_thread if by_thread else _watch_by_signal
    looks = watch(fetch, batches)
    return {"clock": _share(spent), "looks": _share(looks)}


def _watch_by_signal(fetch: Callable[[int], None], batches: int) -> Counter[str]:
    looks: Counter[str] = Counter()
    sampler, fetcher = StackSampler(), SimpleNamespace(fetch=fetch)
    with tempfile.TemporaryDirectory() as folder:
        sampler.begin(f"{folder}/drain")
        sampler.watch(fetcher)
        try:
            for index in range(batches):
                fetcher.fetch(index)
        finally:
            sampler.end()
        for path in Path(folder).glob("*.looks"):
            for line in path.read_text().splitlines():
                looks.update(json.loads(line))
    return looks


def _watch_by_thread(fetch: Callable[[int], None], batches: int) -> Counter[str]:
    looks: Counter[str] = Counter()
    maker, draw, goes_on = threading.get_ident(), random.Random(0).uniform, True

    def run() -> None:
        while goes_on:
            time.sleep(draw(0.001, 0.003))
            looks[sys._current_frames()[maker].f_code.co_name] += 1

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the best for it
    thread = threading.Thread(target=run)
    thread.start()
    for index in range(batches):
        fetch(index)
    goes_on = False
    thread.join()
    sys.setswitchinterval(switch_s)
    return looks


def _share(counts: Mapping[str, float]) -> dict[str, float]:
    total = sum(counts.get(piece, 0.0) for piece in PIECES)
    return {piece: counts.get(piece, 0.0) / total for piece in PIECES}


def evaluate(made: Report) -> None:
    """Hold each share against the clock's."""
    shown = []
    for case in CASES:
        for piece in PIECES:
            cells, offs = [], []
            for who in ("signal", "thread"):
                rows = [row for row in made.rows if (row["case"], row["by"]) == (case, who)]
                clock, looks = ([row[what][piece] for row in rows] for what in ("clock", "looks"))
                off = [b - a for a, b in zip(clock, looks, strict=True)]
                cells.append(f"{statistics.median(looks):.3f} for {statistics.median(clock):.3f}")
                offs.append(f"{max(off, key=abs):+.3f}")
                if who == "signal":
                    middle = abs(statistics.median(off))
                    made.expect(f"{case}: {piece}, off", middle, 0.05, at_least=False)
            shown.append((f"{case}: {piece}", cells[0], offs[0], cells[1], offs[1]))
    made.show(("looks for clock", "signal", "furthest", "thread", "furthest"), shown)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    quick = arguments.quick
    with report(__file__, arguments) as made:
        batches = 5 if quick else BATCHES
        cases = {
            f"{case}/{who}": partial(measure, case, batches, who == "thread")
            for case in CASES
            for who in ("signal", "thread")
        }
        for name, rounds in interleaved(cases, 1 if quick else arguments.rounds).items():
            case, who = name.split("/")
            for number, found in enumerate(rounds):
                made.add(round=number, case=case, by=who, **found)


if __name__ == "__main__":
    main()
