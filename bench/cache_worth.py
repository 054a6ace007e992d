"""Decoded examples of unlike cost: does it pay to admit by time saved per byte?

JPEGs of several sizes (made; a quarter each of 160, 320, 640 and 1,280 pixels a side), decoded and
made 224x224: all take the same bytes then, and times that differ by an order of magnitude. The
cache holds a share x of them. ``admit="first"`` keeps what comes first, ``"worth"`` what takes most
time per byte; both from the third epoch on, against no cache.

Command::

    python bench/cache_worth.py

Target: "worth" faster than "first" wherever the cache does not hold everything.

Machine: two cores of an Intel Xeon at 2.5 GHz, 24 GiB, Linux 6.18; Python 3.11.7 (a plain loop
iteration takes 290 ns there, several times more than usual).

Results (five rounds of two epochs; 192 examples, decoded 27.6 MiB)::

    [results/cache_worth.json]
                     hits an epoch  time saved  times as fast as none             as first
    --------------------------------------------------------------------------------------
    x = 0.25: first             55         17%    1.21 (1.06 .. 1.47)
    x = 0.25: worth             44         60%     2.49 (1.93 .. 3.4)  2.05 (1.59 .. 2.44)
    x = 0.5: first             104         57%    2.32 (2.12 .. 2.67)
    x = 0.5: worth              89         82%    5.54 (4.78 .. 7.11)   2.37 (2.07 .. 2.8)
    x = 0.75: first            153         85%    6.59 (5.46 .. 8.23)
    x = 0.75: worth            140         92%    13.2 (10.9 .. 15.8)   2.01 (1.7 .. 2.32)
    [end]

Caveats: few examples, of which a store of 1 MiB more than x holds 29 % at x = 0.25; and the sizes
are chosen to differ. Where examples cost alike, "worth" only fills later.
"""

from __future__ import annotations

import secrets
import statistics
import time
import warnings
from typing import Any

import numpy as np
from gil import made_jpegs
from harness import Ratio, Report, parser, report

import stoker
from stoker.basics.resources import format_bytes

SIDES = (160, 320, 640, 1280)
SHARES = (0.25, 0.5, 0.75)
ITEM_BYTES = 224 * 224 * 3
ARMS: tuple[str | None, ...] = (None, "first", "worth")
EPOCHS = 4
FILLED = 2  # epochs, after which a store is what it will be


def resized(data: bytes) -> Any:
    """Decode and resize."""
    from PIL import Image

    image = Image.fromarray(stoker.images.decode(data))
    return np.asarray(image.resize((224, 224)))


def epochs(files: list[bytes], share: float, admit: str | None) -> list[dict[str, Any]]:
    """Run epochs; return what each took."""
    train: Any = stoker.from_dataset(files, seed=0).shuffle().map(resized)
    if admit is not None:
        limit = int(share * len(files) * ITEM_BYTES * 1.03) + (1 << 20)
        train = train.cache(limit, admit=admit, version=secrets.token_hex(8))
    train = train.batch(64).workers(2)
    found = []
    for epoch in range(EPOCHS):
        began = time.perf_counter()
        for _ in train:
            pass
        cache = train.stats().cache
        row = {"epoch": epoch, "epoch_s": time.perf_counter() - began}
        found.append(row | {"hits": cache.hits, "items": cache.items} if cache else row)
    return found


def evaluate(made: Report) -> None:
    """Hold both ways to admit against no cache, once the store is what it will be."""
    filled = [row for row in made.rows if row["epoch"] >= FILLED]
    rows = []
    for share in dict.fromkeys(row["share"] for row in filled):
        found = {
            admit: [r for r in filled if r["share"] == share and r["admit"] == admit]
            for admit in ARMS
        }
        times = {admit: [r["epoch_s"] for r in each] for admit, each in found.items()}
        for admit in ("first", "worth"):
            shares = [a / b for a, b in zip(times[admit], times[None], strict=True)]
            rows.append(
                (
                    f"x = {share}: {admit}",
                    f"{statistics.median(r['hits'] for r in found[admit]):.0f}",
                    f"{1 - statistics.median(shares):.0%}",
                    Ratio.of(times[None], times[admit]),
                    Ratio.of(times["first"], times[admit]) if admit == "worth" else "",
                )
            )
        gain = Ratio.of(times["first"], times["worth"])
        made.expect(f"x = {share}: worth, times as fast as first", gain.median, 1.0)
    made.show(("", "hits an epoch", "time saved", "times as fast as none", "as first"), rows)


def main() -> None:
    arguments = parser(__doc__, evaluate).parse_args()
    warnings.simplefilter("ignore", stoker.CacheWarning)
    quick = arguments.quick
    each = 8 if quick else 16
    files = [f for side in SIDES for f in made_jpegs(each, (side, side))]
    files *= 2 if quick else 3
    print(f"{len(files):,} examples, decoded {format_bytes(len(files) * ITEM_BYTES)}\n")
    with report(__file__, arguments) as made:
        shares = SHARES[:1] if quick else SHARES
        for number in range(1 if quick else arguments.rounds):
            for share in shares:
                for admit in ARMS[number % 3 :] + ARMS[: number % 3]:
                    for row in epochs(files, share, admit):
                        made.add(round=number, share=share, admit=admit, **row)


if __name__ == "__main__":
    main()
