"""JPEGs, cropped at random and resized: processor time an image, beside peers.

The task "photographs" of ``images.py``: random boxes resized to 224 x 224, half of them flipped,
``uint8`` batches of 64, two workers, a warm page cache; every arm is a process of its own, all of
them in turns. Processor time is that of all processes of an arm, of whole epochs, and does not tell
how much of it is parallel; unlike rates it can be measured beside other work.

Peers are in the strongest forms that were found: those that leave decoding to the user decode by
simplejpeg and resize by OpenCV (two nearest pixels; stoker and DALI resize with antialiasing).
WebDataset reads tar archives, LitData its own chunks of the files' bytes, both written before.

Command::

    python bench/image_peers.py --jpegs imagenet-sample.tar --peers all --install

Machine: two cores of an AMD EPYC with nothing beside the rows, 24 GiB, Linux 6.18; Python 3.11.7.

Results (five rounds)::

    [results/image_peers.json]
    photographs             processor us  stoker's rate over it
    -----------------------------------------------------------
    stoker                           900             1 (1 .. 1)
    stoker, Pillow                  1900    2.08 (2.04 .. 2.12)
    torch, Pillow                   1935     2.15 (2.1 .. 2.27)
    torch, simplejpeg               1250     1.4 (1.35 .. 1.44)
    WebDataset, simplejpeg          1378    1.52 (1.16 .. 1.61)
    LitData, simplejpeg             1534    1.69 (1.54 .. 1.89)
    SPDL, simplejpeg                1243   1.39 (0.998 .. 1.42)
    Grain, simplejpeg               1288    1.43 (1.02 .. 1.51)
    tf.data                         1136   1.27 (0.895 .. 1.33)
    DALI                            1591    1.76 (1.41 .. 1.82)
    FFCV                            1248    1.39 (1.36 .. 1.49)
    [end]

A loop in C, in one thread, is in ``image_kinds.py``.
FFCV builds where Debian's libopencv-dev and libturbojpeg0-dev are; before its first batch it writes
a file of its own, of JPEGs that it encodes anew, and compiles its loader.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from harness import Ratio, Report, parser, report
from inputs import jpegs
from peers import racing

from images import BATCH, Task, arms_of, colour, written

PEERS = {
    "torch, simplejpeg": ("webdataset_jpegs", "torch_jpegs", "simplejpeg"),
    "WebDataset, simplejpeg": ("webdataset_jpegs", "webdataset_jpegs", ""),
    "LitData, simplejpeg": ("litdata_jpegs", "litdata_jpegs", ""),
    "SPDL, simplejpeg": ("spdl_jpegs", "spdl_jpegs", "simplejpeg"),
    "Grain, simplejpeg": ("grain_jpegs", "grain_jpegs", ""),
    "tf.data": ("tensorflow", "tensorflow_jpegs", ""),
    "DALI": ("dali", "dali_crops", ""),
    "FFCV": ("ffcv", "ffcv_jpegs", ""),
}
FILES = 1_000
LEAST_RATE = 1.0


def main() -> None:
    options = parser(__doc__, evaluate)
    options.add_argument("--jpegs", help="a folder or a tar of JPEGs; by default some are made")
    racing.add_options(options, PEERS)
    arguments = options.parse_args()
    chosen, quick = racing.chosen(arguments, PEERS), arguments.quick
    rounds, seconds = (1, 0.1) if quick else (arguments.rounds, 2.0)
    with report(__file__, arguments) as made, tempfile.TemporaryDirectory() as home:
        files = colour(jpegs(arguments.jpegs, BATCH if quick else 500))
        count = 4 * BATCH if quick else FILES
        task = Task("photographs", written(files, Path(home) / "photographs", count))
        arms = arms_of(task, chosen, PEERS)
        for name, (_, samples) in racing.raced(arms, seconds, rounds, SIDE=str(task.side)).items():
            made.add(arm=name, processor_us=racing.processor_us(samples))


def evaluate(made: Report) -> None:
    """Hold every arm against stoker."""
    times = {row["arm"]: row["processor_us"] for row in made.rows}
    own = times["stoker"] if "stoker" in times else next(iter(times.values()))
    made.show(
        ("photographs", "processor us", "stoker's rate over it"),
        [(arm, f"{median(each):.0f}", Ratio.of(each, own)) for arm, each in times.items()],
    )
    for arm, each in times.items():
        if arm in PEERS:
            made.expect(f"stoker over {arm}", Ratio.of(each, own).median, LEAST_RATE)


if __name__ == "__main__":
    main()
